"""Resets and copies of groups in static topics, and the units of their queues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_protocol import fastjson
from headrace_protocol.admin_headers import (
    CloneGroupOffsetHeader,
    QueryConsumeQueueHeader,
    QueryConsumeTimeSpanHeader,
    ResetOffsetHeader,
)
from headrace_protocol.bodies import MessageQueue, QueryConsumeTimeSpanBody, QueueTimeSpan
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import (
    OffsetResponseHeader,
    QueryConsumerOffsetHeader,
    UpdateConsumerOffsetHeader,
)
from tests.support.channel import MemoryChannel
from tests.support.static_brokers import GROUP, TOPIC, Brokers, item

OTHER = (item("a", 0, 0, 0),)
A, B = item("a", 0, 0, 1), item("b", 1, 5, 0)


@pytest.fixture
def brokers(tmp_path: Path) -> Brokers:
    """Queue 0 went from a to b, with 5 messages in either item, one a second; 1 is at a."""
    brokers = Brokers(tmp_path, use_server_side_reset_offset=True)
    for number, chain in enumerate(((A,), (A, B))):
        brokers.map(chain, OTHER)
        for _ in range(5):
            brokers.send("ab"[number], b"body")
            for broker in brokers.values():
                broker.clock.ms += 1000
    for broker in brokers.values():
        broker.join(GROUP, "c", TOPIC)
    return brokers


def commit(brokers: Brokers, group: str, offset: int) -> None:
    header = UpdateConsumerOffsetHeader(
        topic=TOPIC, queue_id=0, consumer_group=group, commit_offset=offset
    )
    answer = brokers["b"].ask(RequestCode.UPDATE_CONSUMER_OFFSET, header)
    assert answer.code == ResponseCode.SUCCESS, answer.remark


def committed(brokers: Brokers, group: str = GROUP) -> int:
    header = QueryConsumerOffsetHeader(topic=TOPIC, queue_id=0, consumer_group=group)
    answer = brokers["b"].ask(RequestCode.QUERY_CONSUMER_OFFSET, header)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return answer.command.header(OffsetResponseHeader).offset


def reset(brokers: Brokers, broker: str = "b", **fields: Any) -> dict[int, int]:
    header = ResetOffsetHeader(**{"topic": TOPIC, "group": GROUP, "timestamp": -1, **fields})
    answer = brokers[broker].ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    table = fastjson.loads(answer.body)["offsetTable"]
    assert {key["brokerName"] for key in table} <= {"__syslo__global__"}
    return {key["queueId"]: offset for key, offset in table.items()}


@pytest.mark.parametrize(("seconds", "offset"), [(0, 0), (3, 3), (7, 7), (60, 10)])
def test_a_reset_to_a_time_finds_the_item(brokers: Brokers, seconds: int, offset: int) -> None:
    first_ms = brokers["a"].clock.ms - 10_000
    assert reset(brokers, timestamp=first_ms + 1000 * seconds) == {0: offset}
    assert committed(brokers) == offset


def test_a_reset_takes_effect_at_the_next_pull(brokers: Brokers) -> None:
    commit(brokers, GROUP, 9)
    assert reset(brokers, queue_id=0, offset=2) == {0: 2}
    commit(brokers, GROUP, 9)
    assert committed(brokers) == 2
    code, header, _ = brokers.pull("b", 9)
    assert (code, header.next_begin_offset) == (ResponseCode.PULL_OFFSET_MOVED, 2)
    commit(brokers, GROUP, 3)
    assert committed(brokers) == 3


async def test_a_reset_of_one_queue_reaches_its_leader(brokers: Brokers) -> None:
    assert reset(brokers, "a", queue_id=0, offset=7) == {0: 7}
    assert reset(brokers, "a") == {1: 0}


def test_members_are_told_to_seek_logic_queues(brokers: Brokers) -> None:
    brokers["b"].config.use_server_side_reset_offset = False
    channel = brokers["b"].join(GROUP, "d", TOPIC, channel=MemoryChannel())
    assert reset(brokers) == {0: 10}
    notices = [
        fastjson.loads(body)
        for command, body in channel.replies()
        if command.code == RequestCode.RESET_CONSUMER_CLIENT_OFFSET
    ]
    ((queue, offset),) = notices[0]["offsetTable"].items()
    assert (queue["brokerName"], queue["queueId"], offset) == ("__syslo__global__", 0, 10)


@pytest.mark.parametrize(
    ("offset", "consumed_ms", "next_ms"),
    [(0, 0, 0), (3, 2000, 3000), (5, 4000, 5000), (7, 6000, 7000), (10, 9000, None)],
)
def test_where_a_group_stands_in_time(
    brokers: Brokers, offset: int, consumed_ms: int, next_ms: int | None
) -> None:
    now_ms = brokers["b"].clock.ms
    first_ms = now_ms - 10_000
    if offset:
        commit(brokers, GROUP, offset)
    header = QueryConsumeTimeSpanHeader(topic=TOPIC, group=GROUP)
    answer = brokers["b"].ask(RequestCode.QUERY_CONSUME_TIME_SPAN, header)
    assert QueryConsumeTimeSpanBody.decode(answer.body).consume_time_span_set == [
        QueueTimeSpan(
            message_queue=MessageQueue(TOPIC, "__syslo__global__", 0),
            min_time_stamp=first_ms,
            max_time_stamp=first_ms + 9000,
            consume_time_stamp=first_ms + consumed_ms if offset else 0,
            delay_time=0 if next_ms is None else now_ms - first_ms - next_ms,
        )
    ]


@pytest.mark.parametrize("topic", [TOPIC, None])
def test_progress_is_copied_by_logic_queue(brokers: Brokers, topic: str | None) -> None:
    commit(brokers, GROUP, 7)
    for name in ("idle", "live"):
        if name == "live":
            brokers["b"].join(name, "e", TOPIC)
        header = CloneGroupOffsetHeader(src_group=GROUP, dest_group=name, topic=topic)
        answer = brokers["b"].ask(RequestCode.CLONE_GROUP_OFFSET, header)
        assert answer.code == ResponseCode.SUCCESS, answer.remark
        assert committed(brokers, name) == 7


@pytest.mark.parametrize(("index", "units"), [(2, 3), (6, 4)])
def test_units_are_those_of_the_item(brokers: Brokers, index: int, units: int) -> None:
    header = QueryConsumeQueueHeader(topic=TOPIC, queue_id=0, index=index, count=8)
    answer = brokers["b"].ask(RequestCode.QUERY_CONSUME_QUEUE, header)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    body = fastjson.loads(answer.body)
    assert len(body["queueData"]) == units
    assert (body["minQueueIndex"], body["maxQueueIndex"]) == ((0, 5) if index < 5 else (5, 10))
