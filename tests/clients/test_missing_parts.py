"""The parts that a route lacks while a broker is away, and their names."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import PartialAnswer
from headrace.missing import MissingPart
from headrace.route import TopicRoute
from headrace.whole import require_whole
from headrace_protocol.bodies import BrokerData, MessageQueue, QueueData, TopicRouteData
from headrace_protocol.departed import DepartedBroker
from headrace_protocol.statictopic.mapping import MappingInfo


def gone(**fields: Any) -> DepartedBroker:
    given = {"broker_name": "b", "how": "SILENT", "since": 1_700_000_000_000, "perm": 6, **fields}
    return DepartedBroker(read_queue_nums=4, **given)


def route_with(*departed: DepartedBroker, mappings: Any = None) -> TopicRoute:
    data = TopicRouteData(
        queue_datas=[QueueData(broker_name="a", read_queue_nums=2, write_queue_nums=2, perm=6)],
        broker_datas=[BrokerData(cluster="c", broker_name="a", broker_addrs={0: "a:1"})],
        departed_brokers=list(departed),
        topic_queue_mapping_by_broker=mappings,
    )
    return TopicRoute("T", data, 0.0)


def leads(broker: str, *queues: int) -> MappingInfo:
    return MappingInfo(
        topic="T", bname=broker, total_queues=4, epoch=1, curr_id_map=dict.fromkeys(queues, 0)
    )


@pytest.mark.parametrize(
    ("departed", "queue_ids"),
    [
        ((), []),
        ((gone(),), [(0, 1, 2, 3)]),
        ((gone(perm=2),), []),  # nothing can be read there
        ((gone(how="LATER_INVENTED"),), [(0, 1, 2, 3)]),
    ],
)
def test_a_route_knows_its_missing_queues(departed: Any, queue_ids: Any) -> None:
    missing = route_with(*departed).missing
    assert [tuple(part.queue_ids or ()) for part in missing] == queue_ids


@pytest.mark.parametrize(
    ("departed", "mappings", "missing"),
    [
        ((), [leads("a", 0, 1, 2, 3)], []),
        ((gone(),), [leads("a", 0, 1), leads("b", 2, 3)], [("b", (2, 3))]),
        ((gone(),), [leads("a", 0, 1, 2, 3)], [("b", ())]),
        ((), [leads("a", 0, 1), leads("b", 2, 3)], [("b", (2, 3))]),  # an Apache nameserver
        ((), [leads("a", 0, 1)], [("", (2, 3))]),  # one that has forgotten it
    ],
)
def test_a_static_topic_lacks_queues_and_older_messages(
    departed: Any, mappings: Any, missing: Any
) -> None:
    route = route_with(*departed, mappings={each.bname: each for each in mappings})
    found = [
        (part.broker.removeprefix("__syslo__none__"), part.queue_ids) for part in route.missing
    ]
    assert found == missing


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (MissingPart("b", (0, 1, 2, 5), "left"), "broker b (queues 0 to 2, 5) left"),
        (MissingPart("b", (7,), "left"), "broker b (queue 7) left"),
        (MissingPart("b", range(2**31 - 1), "left"), "broker b (queues 0 to 2147483646) left"),
        (MissingPart("b", None, "left"), "broker b left"),
        (MissingPart("b", (), "left"), "broker b (older messages of some queues) left"),
        (MissingPart("", (1,), "is away"), "an unknown broker (queue 1) is away"),
        (MissingPart("b", tuple(range(0, 99, 2)), "left"), "broker b (queues 0, 2, 4, 6, 8, 10"),
    ],
)
def test_a_part_is_named(part: MissingPart, text: str) -> None:
    assert str(part).startswith(text)
    assert len(str(part)) < 80


def test_a_part_is_an_error_or_a_warning() -> None:
    said: list[str] = []
    require_whole("T", [])
    missing = [MissingPart(f"b{number}", (0,), "left") for number in range(5)]
    with pytest.raises(PartialAnswer, match=r"b2 .* and 2 more.*--allow-partial.*forget b0"):
        require_whole("T", missing)
    require_whole("T", missing, allow_partial=True, warn=said.append)
    assert len(said) == 1
    assert said[0].startswith("this is only a part of topic T: broker b0 (queue 0) left; ")


def test_a_compacted_topic_keeps_its_queues_for_keys() -> None:
    compacted = route_with(gone(compacted=True, write_queue_nums=2))
    assert [(queue.broker_name, queue.queue_id) for queue in compacted.write_queues] == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
        ("b", 1),
    ]
    error = compacted.why_not_writable(MessageQueue("T", "b", 0))
    assert "broker b is silent, last heard" in str(error)
    assert {queue.broker_name for queue in compacted.read_queues} == {"a"}
    plain = route_with(gone(write_queue_nums=2))
    assert {queue.broker_name for queue in plain.write_queues} == {"a"}
