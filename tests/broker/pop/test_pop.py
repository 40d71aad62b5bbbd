"""POPs: members of a group take messages one by one, from all queues of a topic."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog
import trio
import trio.testing

from headrace_broker.pop import reading
from headrace_broker.pop.targets import PopTargets, Wanted
from headrace_broker.queue_directory import Here, Lookup, QueueDirectory
from headrace_protocol.bodies import SubscriptionGroupConfig, TopicConfig
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.forbidden import ForbiddenType
from headrace_protocol.headers import UnregisterClientHeader
from headrace_protocol.message import decode_records
from headrace_protocol.pop.headers import NotificationHeader, PeekMessageHeader, PollingInfoHeader
from headrace_protocol.serving import Request
from headrace_protocol.waiting import at_once
from tests.support.broker import broker_config
from tests.support.channel import MemoryChannel
from tests.support.pop_broker import INVISIBLE_MS, PopBroker, answers, bodies, messages_of
from tests.support.stores import put
from tests.support.wire import pull_header


def test_messages_of_all_queues_are_taken_once(broker: PopBroker) -> None:
    for number in range(5):
        broker.store_message("T", number % 2, b"%d" % number)
    assert bodies(broker.taken(max_msg_nums=3)) + bodies(broker.taken()) != []
    assert broker.taken() == []
    assert broker.pop_parts.pops.out_count == 5


def test_an_answer_says_what_remains(broker: PopBroker) -> None:
    for number in range(5):
        broker.store_message("T", number % 2)
    ext = broker.pop(max_msg_nums=2).command.ext()
    assert ext["restNum"] == "3"
    assert int(ext["popTime"]) == broker.clock.ms


@pytest.mark.parametrize(("mode", "expected"), [(0, [b"0", b"1", b"2"]), (1, [b"0", b"1", b"2"])])
def test_a_new_group_begins_at_the_start_of_a_young_queue(
    broker: PopBroker, mode: int, expected: list[bytes]
) -> None:
    for number in range(3):
        broker.store_message("T", 0, b"%d" % number)
    assert bodies(broker.taken(init_mode=mode)) == expected


def test_a_group_goes_on_where_it_was(broker: PopBroker) -> None:
    for number in range(3):
        broker.store_message("T", 0, b"%d" % number)
    broker.offsets.commit("g", "T", 0, 2)
    assert bodies(broker.taken()) == [b"2"]


@pytest.mark.parametrize("count", [0, -1])
def test_a_pop_of_no_messages_takes_one(broker: PopBroker, count: int) -> None:
    for _ in range(2):
        broker.store_message("T", 0)
    assert len(broker.taken(max_msg_nums=count)) == 1


def test_messages_that_are_invisible_for_no_time_come_at_once(broker: PopBroker) -> None:
    broker.store_message("T", 0)
    broker.taken(invisible_time=0)
    broker.clock.ms += 20
    broker.revive()
    ((message, _),) = broker.taken()
    assert message.reconsume_times == 1


def test_only_wanted_tags_are_taken_and_others_passed(broker: PopBroker) -> None:
    for number in range(6):
        broker.store_message("T", 0, b"%d" % number, TAGS="ab"[number % 2])
    assert bodies(broker.taken(exp="a")) == [b"0", b"2", b"4"]
    assert broker.taken(exp="a") == []
    queue = broker.pop_parts.pops.find("g", "T", 0)
    assert queue is not None
    assert (queue.next_offset, queue.settled_offset) == (6, 0)


def test_a_sql_filter_chooses_messages(broker: PopBroker) -> None:
    """As in pulls; a bad one is refused with its place."""
    for number in range(6):
        broker.store_message("T", 0, b"%d" % number, a=str(number))
    assert bodies(broker.taken(exp="a > 2 AND a <> 4", exp_type="SQL92")) == [b"3", b"5"]
    assert broker.taken(exp="a > 2 AND a <> 4", exp_type="SQL92") == []
    answer = broker.pop(exp="a >", exp_type="SQL92")
    assert answer.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED
    assert "line 1, column 4" in answer.remark


@pytest.fixture
def short_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt passes the messages of one read at most."""
    monkeypatch.setattr(reading, "_SCAN_S", 1e-9)


def store_unwanted(broker: PopBroker, count: int = 30) -> None:
    """Messages with the tag a, which nobody is notified of yet."""
    for queue_id in (0, 1):
        for _ in range(count):
            put(broker.store, broker.store.queue("T", queue_id), dispatch=False, TAGS="a")


@pytest.mark.parametrize(
    "fields", [{"exp": "b"}, {"exp": "TAGS = 'b'", "exp_type": "SQL92"}], ids=["tags", "sql"]
)
@pytest.mark.usefixtures("short_scans")
def test_a_pop_looks_as_far_as_there_are_messages(
    broker: PopBroker, fields: dict[str, Any]
) -> None:
    """In turns with others, since each looks at some messages only."""
    store_unwanted(broker)
    broker.store_message("T", 0, b"wanted", TAGS="b")
    assert bodies(broker.taken(**fields)) == [b"wanted"]
    assert broker.taken(**fields) == []
    ends = {queue.name.queue_id: queue.next_offset for queue in broker.pop_parts.pops}
    assert ends == {0: 31, 1: 30}


@pytest.mark.usefixtures("short_scans")
async def test_a_pop_that_waits_looks_as_far_too(broker: PopBroker) -> None:
    channel = broker.hold(exp="b")
    store_unwanted(broker)
    broker.store_message("T", 1, TAGS="a")
    assert (answers(channel), broker.long_polling.held_count) == ([], 1)
    store_unwanted(broker)
    broker.store_message("T", 1, b"wanted", TAGS="b")
    (answer,) = answers(channel)
    assert bodies(messages_of(answer)) == [b"wanted"]
    assert (broker.long_polling.held_count, polling_count(broker)) == (0, 0)


@pytest.mark.usefixtures("short_scans")
async def test_a_pop_in_the_middle_of_a_queue_ends_in_time(broker: PopBroker) -> None:
    channel = broker.hold(exp="b")
    store_unwanted(broker)
    broker.store.write_path.publish()
    broker.clock.ms += 10_000
    broker.long_polling.answer_all()
    (answer,) = answers(channel)
    assert answer.code == ResponseCode.POLLING_TIMEOUT
    assert broker.long_polling.held_count == 0


@pytest.mark.usefixtures("short_scans")
def test_a_notification_tells_of_what_a_filter_has_yet_to_look_at(broker: PopBroker) -> None:
    store_unwanted(broker)
    broker.store_message("T", 0, TAGS="a")
    header = NotificationHeader(
        consumer_group="g", topic="T", queue_id=-1, poll_time=0, exp="b", born_time=broker.clock.ms
    )
    has_message = []
    for _ in range(2):
        answer = broker.ask(RequestCode.NOTIFICATION, header)
        has_message.append(answer.command.ext()["hasMsg"])
        assert broker.taken(exp="b") == []
    assert has_message == ["true", "false"]


def test_targets_are_bounded_by_their_bytes(broker: PopBroker) -> None:
    broker.pop()
    targets = PopTargets(broker.config, broker.core.tables, broker.directory)
    request = cast("Request", SimpleNamespace(channel=MemoryChannel()))
    sizes = []
    for number in range(1000):
        text = f"a = '{number}'" + " " * 30_000
        targets.find(request, Wanted("g", "T", -1, "SQL92", text))
        sizes.append(targets.byte_count)
    assert max(sizes) < 65 << 20
    assert sizes[-1] < max(sizes)


async def test_a_pop_that_waits_is_charged_for_its_filter(broker: PopBroker) -> None:
    channels = [broker.hold(), broker.hold(exp="a = 1", exp_type="SQL92")]
    plain, filtered = (channel.charged_bytes for channel in channels)
    assert filtered - plain > 4096
    broker.long_polling.answer_all()
    assert [channel.charged_bytes for channel in channels] == [0, 0]


# -- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"born_time": 1}, ResponseCode.POLLING_TIMEOUT),
        ({"max_msg_nums": 33}, ResponseCode.INVALID_PARAMETER),
        ({"topic": "missing"}, ResponseCode.TOPIC_NOT_EXIST),
        ({"queue_id": 2}, ResponseCode.INVALID_PARAMETER),
        ({"queue_id": -2}, ResponseCode.INVALID_PARAMETER),
        ({"consumer_group": ""}, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST),
        ({"consumer_group": "idle"}, ResponseCode.NO_PERMISSION),
        ({"exp": "a = 1", "exp_type": "XPATH"}, ResponseCode.SUBSCRIPTION_PARSE_FAILED),
        ({"invisible_time": -1}, ResponseCode.INVALID_PARAMETER),
        ({"invisible_time": 2**63 - 1}, ResponseCode.INVALID_PARAMETER),
        ({"init_mode": 2}, ResponseCode.INVALID_PARAMETER),
        ({"order": True, "attempt_id": "a" * 256}, ResponseCode.INVALID_PARAMETER),
    ],
)
def test_bad_pops_are_refused(broker: PopBroker, fields: dict[str, Any], code: int) -> None:
    broker.groups.put(SubscriptionGroupConfig(group_name="idle", consume_enable=False))
    broker.store_message("T", 0)
    answer = broker.pop(**fields)
    assert answer.code == code
    assert answer.remark
    assert broker.pop_parts.pops.out_count == 0


@pytest.mark.parametrize(
    ("kind", "settings", "enabled", "perm"),
    [
        (ForbiddenType.BROKER, {"broker_permission": 2}, True, 6),
        (ForbiddenType.GROUP, {}, False, 6),
        (ForbiddenType.TOPIC, {}, True, 2),
    ],
)
@pytest.mark.parametrize("is_pop", [True, False])
def test_an_answer_says_what_permits_no_reading(
    tmp_path: Path,
    kind: ForbiddenType,
    settings: dict[str, int],
    enabled: bool,
    perm: int,
    is_pop: bool,
) -> None:
    broker = PopBroker(tmp_path, broker_config(tmp_path, **settings))
    broker.create_topic("T", perm=perm)
    broker.groups.put(SubscriptionGroupConfig(group_name="g", consume_enable=enabled))
    pull = RequestCode.PULL_MESSAGE
    answer = broker.pop() if is_pop else broker.ask(pull, pull_header())
    assert answer.code == ResponseCode.NO_PERMISSION
    assert answer.command.ext() == {"forbiddenType": str(int(kind))}


def test_no_messages_are_taken_without_timers(tmp_path: Path) -> None:
    broker = PopBroker(tmp_path, broker_config(tmp_path, timer_wheel_enable=False))
    answer = broker.pop()
    assert (answer.code, "timerWheelEnable" in answer.remark) == (ResponseCode.SYSTEM_ERROR, True)


def test_nothing_is_read_where_the_broker_may_not_be_read(tmp_path: Path) -> None:
    broker = PopBroker(tmp_path, broker_config(tmp_path, broker_permission=2))
    assert broker.pop(max_msg_nums=33).code == ResponseCode.NO_PERMISSION


# -- waiting ----------------------------------------------------------------------------------


async def test_a_pop_waits_at_all_queues_and_is_answered_once(broker: PopBroker) -> None:
    channel = broker.hold()
    assert answers(channel) == []
    for queue_id in (1, 0):
        broker.store_message("T", queue_id, b"%d" % queue_id)
    (answer,) = answers(channel)
    assert bodies(messages_of(answer)) == [b"1"]
    assert broker.long_polling.held_count == 0
    assert not any(broker.store.queue("T", number).waiting for number in (0, 1))
    assert bodies(broker.taken()) == [b"0"]


async def test_one_of_two_pops_gets_a_message(broker: PopBroker) -> None:
    channels = [broker.hold(), broker.hold()]
    broker.store_message("T", 0)
    assert [len(answers(channel)) for channel in channels] == [1, 0]
    assert broker.long_polling.held_count == 1


async def test_a_pop_gives_up_at_its_deadline(broker: PopBroker) -> None:
    channel = broker.hold()
    broker.long_polling.answer_all()
    (answer,) = answers(channel)
    assert answer.code == ResponseCode.POLLING_TIMEOUT


async def test_the_pops_of_a_member_that_leaves_are_answered(broker: PopBroker) -> None:
    """A message that came after its goodbye would be taken for nobody."""
    leaving, other = broker.hold(), broker.hold()
    header = broker.pop_header(poll_time=10_000, consumer_group="h")
    broker.send(RequestCode.POP_MESSAGE, header, channel=leaving)
    goodbye = UnregisterClientHeader(client_id="c", consumer_group="g")
    broker.send(RequestCode.UNREGISTER_CLIENT, goodbye, channel=leaving)
    codes = [answer.code for answer in answers(leaving)]
    assert codes == [ResponseCode.POLLING_TIMEOUT, ResponseCode.SUCCESS]
    assert [polling_count(broker, group) for group in "gh"] == [1, 1]
    broker.store_message("T", 0)
    assert len(answers(other)) == 1


async def test_the_pop_of_a_client_that_has_left_takes_nothing(broker: PopBroker) -> None:
    channel = broker.hold()
    channel.is_open = False
    broker.store_message("T", 0)
    broker.long_polling.channel_closed(channel)
    assert broker.pop_parts.pops.out_count == 0
    assert len(broker.taken()) == 1


@pytest.mark.parametrize(
    ("settings", "held"), [({"pop_polling_size": 2}, 2), ({"max_pop_polling_size": 1}, 1)]
)
async def test_only_so_many_pops_wait(tmp_path: Path, settings: dict[str, int], held: int) -> None:
    broker = PopBroker(tmp_path, broker_config(tmp_path, **settings))
    channels = [broker.hold() for _ in range(held + 1)]
    (answer,) = answers(channels[-1])
    assert answer.code == ResponseCode.POLLING_FULL
    assert polling_count(broker) == held
    broker.long_polling.answer_all()
    assert polling_count(broker) == 0


def polling_count(broker: PopBroker, group: str = "g") -> int:
    header = PollingInfoHeader(consumer_group=group, topic="T", queue_id=-1)
    return int(broker.ask(RequestCode.POLLING_INFO, header).command.ext()["pollingNum"])


async def test_a_pop_waits_no_more_where_its_topic_has_no_queue(broker: PopBroker) -> None:
    broker.hold()
    broker.topics.put(TopicConfig(topic_name="T", read_queue_nums=1, write_queue_nums=1))
    broker.store_message("T", 1)
    waiting = [broker.store.queue("T", queue_id).waiting for queue_id in (0, 1)]
    assert [bool(each) for each in waiting] == [True, False]


# -- a threshold ------------------------------------------------------------------------------


def limited(folder: Path) -> PopBroker:
    """A broker whose group gets no more of a queue while over two of its messages are out."""
    settings = {"enable_pop_message_threshold": True, "pop_inflight_message_threshold": 2}
    broker = PopBroker(folder, broker_config(folder, **settings))
    for number in range(8):
        broker.store_message("T", 0, b"%d" % number)
    return broker


def test_a_group_with_too_much_out_gets_no_more_of_a_queue(tmp_path: Path) -> None:
    broker = limited(tmp_path)
    taken = broker.taken(max_msg_nums=2) + broker.taken(max_msg_nums=3)
    assert len(taken) == 5
    look = NotificationHeader(consumer_group="g", topic="T", queue_id=-1, poll_time=0, born_time=0)
    for _, handle in taken[:3]:
        assert broker.taken() == []
        assert broker.ask(RequestCode.NOTIFICATION, look).command.ext()["hasMsg"] == "false"
        broker.ack(handle)
    assert broker.ask(RequestCode.NOTIFICATION, look).command.ext()["hasMsg"] == "true"
    broker.store_message("T", 1, b"of another queue")
    assert len(broker.taken(consumer_group="h")) == 9
    assert bodies(broker.taken()) == [b"5", b"6", b"7", b"of another queue"]


@pytest.mark.parametrize("end", ["ack", "time", "reset", "delete"])
async def test_a_pop_that_waits_gets_messages_once_fewer_are_out(tmp_path: Path, end: str) -> None:
    broker = limited(tmp_path)
    taken = broker.taken(max_msg_nums=3)
    revive = broker.pop_parts.revive
    with structlog.testing.capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(revive.run)
            channel = broker.hold(queue_id=0)
            await trio.testing.wait_all_tasks_blocked()
            assert (broker.taken(), answers(channel)) == ([], [])
            if end == "ack":
                broker.ack(taken[0][1])
            elif end == "time":
                broker.clock.ms += INVISIBLE_MS
                await revive.revive_due()
            elif end == "reset":
                broker.offsets.reset("g", "T", 0, 5)
            else:
                at_once(broker.offsets.delete_group("g"))
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    (answer,) = answers(channel)
    first = {"ack": 3, "time": 3, "reset": 5, "delete": 0}[end]
    assert bodies(messages_of(answer))[-1] == b"7"
    assert b"%d" % first in bodies(messages_of(answer))
    begun, ended = (each["event"] for each in logs if "POP of" in each["event"])
    assert begun == (
        "POP of T queue 0 for group g is unavailable, retrying: "
        "3 messages are not acknowledged, popInflightMessageThreshold=2"
    )
    assert ended.startswith("POP of T queue 0 for group g is available again")


def test_an_orderly_batch_over_the_threshold_comes_again(tmp_path: Path) -> None:
    broker = limited(tmp_path)
    assert len(broker.taken(order=True, max_msg_nums=3)) == 3
    broker.clock.ms += INVISIBLE_MS
    assert bodies(broker.taken(order=True, max_msg_nums=3)) == [b"0", b"1", b"2"]


# -- looks ------------------------------------------------------------------------------------


def test_a_peek_takes_nothing(broker: PopBroker) -> None:
    header = PeekMessageHeader(consumer_group="g", topic="T", queue_id=-1, max_msg_nums=2)
    assert broker.ask(RequestCode.PEEK_MESSAGE, header).code == ResponseCode.PULL_NOT_FOUND
    for _ in range(3):
        broker.store_message("T", 0)
    for _ in range(2):
        answer = broker.ask(RequestCode.PEEK_MESSAGE, header)
        assert (answer.code, answer.command.ext()["restNum"]) == (ResponseCode.SUCCESS, "1")
    assert len(broker.taken()) == 3


def test_a_peek_has_the_size_of_a_pop(broker: PopBroker) -> None:
    for number in range(30):
        broker.store_message("T", number % 2, bytes(20_000))
    header = PeekMessageHeader(consumer_group="g", topic="T", queue_id=-1, max_msg_nums=32)
    peeked = broker.ask(RequestCode.PEEK_MESSAGE, header)
    assert len(broker.taken()) <= 14
    assert len(decode_records(peeked.body)) <= 14


@pytest.mark.parametrize("count", [0, 33])
def test_a_peek_of_no_or_too_many_messages_is_refused(broker: PopBroker, count: int) -> None:
    header = PeekMessageHeader(consumer_group="g", topic="T", queue_id=-1, max_msg_nums=count)
    assert broker.ask(RequestCode.PEEK_MESSAGE, header).code == ResponseCode.INVALID_PARAMETER


async def test_a_notification_waits_for_a_message_and_takes_none(broker: PopBroker) -> None:
    header = NotificationHeader(
        consumer_group="g", topic="T", queue_id=-1, poll_time=10_000, born_time=broker.clock.ms
    )
    channel = MemoryChannel()
    broker.send(RequestCode.NOTIFICATION, header, channel=channel)
    assert answers(channel) == []
    broker.store_message("T", 1)
    (answer,) = answers(channel)
    assert answer.command.ext() == {"hasMsg": "true", "pollingFull": "false"}
    assert len(broker.taken()) == 1


def test_a_notification_that_comes_too_late_has_nothing(broker: PopBroker) -> None:
    broker.store_message("T", 1)
    header = NotificationHeader(
        consumer_group="g", topic="T", queue_id=-1, poll_time=1, born_time=1
    )
    answer = broker.ask(RequestCode.NOTIFICATION, header)
    assert answer.command.ext()["hasMsg"] == "false"


def test_a_pop_without_a_time_comes_just_in_time(broker: PopBroker) -> None:
    broker.store_message("T", 1)
    assert broker.pop(born_time=0, poll_time=0).code == ResponseCode.SUCCESS


@pytest.mark.parametrize(
    "code", [RequestCode.POP_MESSAGE, RequestCode.PEEK_MESSAGE, RequestCode.NOTIFICATION]
)
def test_a_topic_with_batch_queues_is_refused_by_name(broker: PopBroker, code: RequestCode) -> None:
    broker.create_topic("B", attributes={"queue.type": "BatchCQ"})
    broker.store_message("B", 0)
    headers: dict[RequestCode, Any] = {
        RequestCode.POP_MESSAGE: broker.pop_header(topic="B"),
        RequestCode.PEEK_MESSAGE: PeekMessageHeader(
            consumer_group="g", topic="B", queue_id=0, max_msg_nums=1
        ),
        RequestCode.NOTIFICATION: NotificationHeader(
            consumer_group="g", topic="B", queue_id=0, poll_time=0, born_time=broker.clock.ms
        ),
    }
    answer = broker.ask(code, headers[code])
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert "topic B has queue.type=BatchCQ" in answer.remark
    assert broker.pop_parts.pops.out_count == 0


def test_a_static_topic_is_refused_by_name(broker: PopBroker) -> None:
    def spanning_brokers(directory: QueueDirectory, lookup: Lookup) -> Here:
        place = directory.local(lookup)
        return place._replace(reader=place.source)

    broker.directory.ask((spanning_brokers,), ())
    answer = broker.pop()
    assert (answer.code, "static" in answer.remark) == (ResponseCode.INVALID_PARAMETER, True)
