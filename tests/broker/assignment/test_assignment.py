"""Assignment by the broker: shares, modes and their file, and where queues are looked up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace import Admin
from headrace_broker.assignment.request_modes import Mode, RequestModes
from headrace_broker.assignment.topic_queues import TopicQueues
from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.config_file import ConfigFile
from headrace_protocol.bodies import (
    ConsumerData,
    MessageQueue,
    QueryAssignmentRequestBody,
    QueryAssignmentResponseBody,
    SetMessageRequestModeRequestBody,
)
from headrace_protocol.bounds import ITEMS_MAX
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.drivers.errors import ConnectFailed
from headrace_protocol.errors import RequestError
from headrace_protocol.pop.shares import SHARES, averagely, popped_queues
from tests.support.broker import Answer, BrokerUnderTest, broker_config
from tests.support.running_brokers import brokers
from tests.support.scripted import open_instance

QUERY = RequestCode.QUERY_ASSIGNMENT
SET = RequestCode.SET_MESSAGE_REQUEST_MODE
GET_ALL = RequestCode.GET_ALL_MESSAGE_REQUEST_MODE


def queues(*counts: int) -> list[MessageQueue]:
    """The queues of T on broker-0, broker-1, ..."""
    return [
        MessageQueue("T", f"broker-{number}", queue)
        for number, count in enumerate(counts)
        for queue in range(count)
    ]


@pytest.fixture
def broker(tmp_path: Path) -> Any:
    broker = BrokerUnderTest(tmp_path)
    broker.create_topic("T", 4)
    yield broker
    broker.close()


def asked(client_id: str = "a", **fields: Any) -> bytes:
    body = {"topic": "T", "consumer_group": "g", "strategy_name": "AVG", **fields}
    return QueryAssignmentRequestBody(client_id=client_id, **body).encode()


def mode(mode: Any = "POP", share: int = 0, topic: str = "T", group: str = "g") -> Mode:
    return Mode(topic=topic, consumer_group=group, mode=mode, pop_share_queue_num=share)


def assigned(broker: BrokerUnderTest, body: bytes) -> list[tuple[int, str]] | None:
    """Queue ids and modes in an answer."""
    answer = broker.ask(QUERY, body=body)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    found = QueryAssignmentResponseBody.decode(answer.body).message_queue_assignments
    if found is None:
        return None
    return [(each.message_queue.queue_id, each.mode) for each in found]


def set_mode(broker: BrokerUnderTest, mode: Mode) -> Answer:
    return broker.ask(SET, body=mode.encode())


# -- shares ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("members", range(1, 9))
@pytest.mark.parametrize("count", [0, 1, 4, 7, 16])
@pytest.mark.parametrize("strategy", SHARES)
def test_each_queue_has_one_member(strategy: str, count: int, members: int) -> None:
    client_ids = [f"c{number}" for number in range(members)]
    all_queues = queues(count)
    shares = [SHARES[strategy](all_queues, client_ids, each) for each in client_ids]
    assert sorted(queue for share in shares for queue in share) == all_queues
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(
    ("members", "share", "expected"),
    [
        # Everybody pops everything, from any queue of each broker.
        (3, 0, [("broker-0", -1), ("broker-1", -1)]),
        (3, -1, [("broker-0", -1), ("broker-1", -1)]),
        (3, 2, [("broker-0", -1), ("broker-1", -1)]),
        (1, 1, [("broker-0", -1), ("broker-1", -1)]),
        # Its own queue, and that of the next one.
        (4, 1, [("broker-0", 0), ("broker-0", 1)]),
        (4, 2, [("broker-0", 0), ("broker-0", 1), ("broker-1", 0)]),
        # More members than queues.
        (6, 1, [("broker-0", 0)]),
    ],
)
def test_members_that_pop_share_queues(
    members: int, share: int, expected: list[tuple[str, int]]
) -> None:
    client_ids = [f"c{number}" for number in range(members)]
    found = popped_queues(averagely, queues(2, 2), client_ids, "c0", share)
    assert [(queue.broker_name, queue.queue_id) for queue in found] == expected


@pytest.mark.parametrize("members", range(1, 9))
@pytest.mark.parametrize("share", range(-1, 9))
@pytest.mark.parametrize("count", [0, 1, 4, 7])
def test_no_queue_is_left_out(members: int, share: int, count: int) -> None:
    client_ids = [f"c{number}" for number in range(members)]
    all_queues = queues(count)
    popped = [
        queue
        for client_id in client_ids
        for queue in popped_queues(averagely, all_queues, client_ids, client_id, share)
    ]
    if count and not any(queue.queue_id == -1 for queue in popped):
        assert set(popped) == set(all_queues)
    elif count:
        assert {queue.broker_name for queue in popped} == {"broker-0"}


# -- requests --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("AVG", [(0, "PULL"), (1, "PULL")]), ("AVG_BY_CIRCLE", [(0, "PULL"), (2, "PULL")])],
)
def test_members_share_queues(broker: BrokerUnderTest, strategy: str, expected: Any) -> None:
    broker.join("g", "b", "T")
    broker.join("g", "a", "T")
    assert assigned(broker, asked(strategy_name=strategy)) == expected


def test_a_member_that_is_not_known_yet_keeps_its_queues(broker: BrokerUnderTest) -> None:
    assert assigned(broker, asked()) is None
    broker.join("g", "b", "T")
    assert assigned(broker, asked()) is None


def test_a_topic_without_a_route_has_no_assignment(broker: BrokerUnderTest) -> None:
    broker.join("g", "a", "U")
    assert assigned(broker, asked(topic="U")) is None


def test_broadcasting_members_have_all_queues(broker: BrokerUnderTest) -> None:
    body = asked(message_model="BROADCASTING", strategy_name="")
    assert assigned(broker, body) == [(queue, "PULL") for queue in range(4)]


def test_an_unknown_strategy_is_named(broker: BrokerUnderTest) -> None:
    answer = broker.ask(QUERY, body=asked(strategy_name="CONFIG" * 1000))
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "'CONFIGCONFIG" in answer.remark
    assert "use AVG or AVG_BY_CIRCLE" in answer.remark
    assert len(answer.remark) < 200


@pytest.mark.parametrize("code", [QUERY, SET])
@pytest.mark.parametrize("fields", [{"topic": "a b"}, {"consumer_group": "a b"}, {"topic": ""}])
def test_wrong_names_are_rejected(broker: BrokerUnderTest, code: int, fields: Any) -> None:
    names = {"topic": "T", "consumer_group": "g", **fields}
    body = SetMessageRequestModeRequestBody(**names).encode()
    assert broker.ask(code, body=body).code == ResponseCode.INVALID_PARAMETER


def test_a_group_pops_once_it_is_set_to(broker: BrokerUnderTest) -> None:
    broker.join("g", "a", "T")
    assert set_mode(broker, mode()).code == ResponseCode.SUCCESS
    assert assigned(broker, asked()) == [(-1, "POP")]
    assert assigned(broker, asked(topic="%RETRY%g")) == [(0, "PULL")]
    set_mode(broker, mode("PULL"))
    assert assigned(broker, asked()) == [(queue, "PULL") for queue in range(4)]


def test_a_default_counts_for_groups_that_are_not_set(tmp_path: Path) -> None:
    config = broker_config(
        tmp_path, default_message_request_mode="POP", default_pop_share_queue_num=1
    )
    broker = BrokerUnderTest(tmp_path, config)
    broker.create_topic("T", 4)
    for client_id in "abc":
        broker.join("g", client_id, "T")
        broker.join("h", client_id, "T")
    assert assigned(broker, asked()) == [(0, "POP"), (1, "POP"), (2, "POP")]
    set_mode(broker, mode("PULL", group="h"))
    assert assigned(broker, asked(consumer_group="h")) == [(0, "PULL"), (1, "PULL")]
    assert assigned(broker, asked(topic="%RETRY%g")) == [(0, "PULL")]
    broker.close()


def test_a_retry_topic_can_not_be_popped(broker: BrokerUnderTest) -> None:
    answer = set_mode(broker, mode(topic="%RETRY%g"))
    assert answer.code == ResponseCode.NO_PERMISSION
    assert "retry topic is not allowed to set mode" in answer.remark


def test_an_unknown_mode_is_rejected(broker: BrokerUnderTest) -> None:
    answer = set_mode(broker, mode("PUSH"))
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert answer.remark == "mode 'PUSH': expected PULL or POP"


# -- the file --------------------------------------------------------------------------------------

APACHES = (
    '{"messageRequestModeMap":{"T":{"g":{"consumerGroup":"g","mode":"POP","popShareQueueNum":0,'
    '"topic":"T"}}}}'
)


def test_modes_are_kept_as_apache_keeps_them(tmp_path: Path) -> None:
    broker = BrokerUnderTest(tmp_path)
    set_mode(broker, mode())
    assert broker.ask(GET_ALL).body.decode() == APACHES
    path = broker.config.store_path_root_dir / "config" / "messageRequestMode.json"
    broker.close()
    assert json.loads(path.read_text()) == json.loads(APACHES)
    broker = BrokerUnderTest(tmp_path)
    assert broker.ask(GET_ALL).body.decode() == APACHES
    broker.close()


def test_fields_of_other_versions_are_kept(tmp_path: Path) -> None:
    file = ConfigFile(tmp_path / "messageRequestMode.json")
    text = json.loads(APACHES)
    text["dataVersion"] = {"counter": 5}
    text["messageRequestModeMap"]["T"]["g"]["priority"] = 3
    file.path.write_text(json.dumps(text))
    defaults = broker_config(tmp_path)
    modes = RequestModes(file, defaults)
    assert modes.get("T", "g").mode == "POP"
    modes.put(mode("PULL", 2))
    modes.put(mode(topic="U"))
    kept = json.loads(file.path.read_text())
    assert kept["dataVersion"] == {"counter": 5}
    assert kept["messageRequestModeMap"]["T"]["g"] == {
        "topic": "T",
        "consumerGroup": "g",
        "mode": "PULL",
        "popShareQueueNum": 2,
        "priority": 3,
    }
    assert RequestModes(file, defaults).get("U", "g").mode == "POP"


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        '{"messageRequestModeMap":[]}',
        '{"messageRequestModeMap":{"T":{"g":{"popShareQueueNum":"x"}}}}',
        '{"messageRequestModeMap":{"T":{"g":5}}}',
    ],
)
def test_a_damaged_file_ends_a_start(tmp_path: Path, text: str) -> None:
    file = ConfigFile(tmp_path / "messageRequestMode.json")
    file.path.write_text(text)
    with pytest.raises(StoreFormatError, match="messageRequestMode"):
        RequestModes(file, broker_config(tmp_path))


def test_modes_have_a_bound(tmp_path: Path) -> None:
    file = ConfigFile(tmp_path / "messageRequestMode.json")
    entry = {"consumerGroup": "g", "mode": "POP", "topic": "T"}
    table = {"T": {f"g{number}": entry for number in range(ITEMS_MAX)}}
    file.path.write_text(json.dumps({"messageRequestModeMap": table}))
    modes = RequestModes(file, broker_config(tmp_path))
    with pytest.raises(RequestError, match="10000 request modes are the most"):
        modes.put(mode(group="new"))
    modes.put(mode("PULL", group="g5"))
    assert modes.get("T", "g5").mode == "PULL"


# -- looking queues up -----------------------------------------------------------------------------


class Lookups:
    """A nameserver that answers by ``found``; raises it if it is an error."""

    def __init__(self) -> None:
        self.found: Any = queues(2, 2)
        self.count = self.ms = 0
        self.queues = TopicQueues(self.look_up, lambda _: queues(1), lambda: self.ms)

    async def look_up(self, _topic: str) -> Sequence[MessageQueue] | None:
        self.count += 1
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    async def after(self, ms: int) -> Sequence[MessageQueue]:
        self.ms += ms
        return await self.queues.of("T")


async def test_queues_are_looked_up_each_half_minute() -> None:
    lookups = Lookups()
    assert await lookups.after(0) == queues(2, 2)
    lookups.found = queues(4)
    assert await lookups.after(29_999) == queues(2, 2)
    assert await lookups.after(1) == queues(4)
    assert lookups.count == 2


async def test_an_old_answer_counts_while_no_nameserver_answers() -> None:
    lookups = Lookups()
    await lookups.after(0)
    lookups.found = ConnectFailed("nameserver", "refused")
    for _ in range(100):
        assert await lookups.after(600) == queues(2, 2)
    assert lookups.count < 60
    lookups.found = queues(4)
    assert await lookups.after(1000) == queues(4)


async def test_a_broker_that_no_nameserver_knows_has_its_own_queues() -> None:
    lookups = Lookups()
    lookups.found = None
    assert await lookups.after(0) == queues(1)
    lookups = Lookups()
    lookups.found = ConnectFailed("nameserver", "refused")
    assert await lookups.after(0) == queues(1)


async def test_queues_of_all_brokers_are_shared(tmp_path: Path, autojump_clock: object) -> None:
    async with brokers(tmp_path, ["a", "b"]) as cluster:
        async with Admin(**cluster.at) as admin:
            await admin.create_topic("T", queues=2)
        async with open_instance(cluster.nameserver, cluster.network) as client:
            client.consumers = [ConsumerData(group_name="g")]
            for broker in cluster.brokers.values():
                response = await client.request(
                    broker.address, QUERY, None, asked(client.client_id)
                )
                found = response.expect().decode(QueryAssignmentResponseBody)
                assert [each.message_queue for each in found.message_queue_assignments or ()] == [
                    MessageQueue("T", name, n) for name in ("a", "b") for n in (0, 1)
                ]
