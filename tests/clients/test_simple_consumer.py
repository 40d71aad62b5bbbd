"""SimpleConsumer against scripted brokers: what it asks, keeps, acknowledges and gives back."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from headrace import PoppedMessage, SimpleConsumer, blocking
from headrace.errors import (
    AccessDenied,
    BrokerError,
    ClientClosed,
    ConfigurationError,
    HeadraceError,
    MalformedAnswer,
    RequestTimeout,
    RouteNotFound,
)
from headrace_protocol.bodies import HeartbeatData
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.compression import COMPRESSED, BodyTooLarge
from headrace_protocol.message import encode_properties, encode_record
from headrace_protocol.pop.batch_ack import BatchAckBody
from headrace_protocol.pop.handle import Handle, TopicKind, parse
from headrace_protocol.pop.headers import (
    ChangeInvisibleTimeResponseHeader,
    PopMessageResponseHeader,
)
from headrace_protocol.pop.infos import PoppedQueue, encode_offsets
from headrace_protocol.serving import Reply
from tests.support.scripted import (
    Asked,
    Scripted,
    no_topic,
    route,
    scripted_cluster,
    scripted_in_thread,
    static_route,
)

POP = RequestCode.POP_MESSAGE
ACK = RequestCode.ACK_MESSAGE
ACKS = RequestCode.BATCH_ACK_MESSAGE
CHANGE = RequestCode.CHANGE_MESSAGE_INVISIBLETIME
POP_TIME = 1_795_235_851_336


def record(offset: int, queue_id: int = 0, topic: str = "T", **properties: str) -> bytes:
    return encode_record(
        topic=topic,
        queue_id=queue_id,
        body=b"%d" % offset,
        queue_offset=offset,
        properties=encode_properties(properties),
        physical_offset=1000 + offset,
    )


def popped(*offsets: int, queue_id: int = 0, start: int | None = None, **properties: str) -> Reply:
    """The answer to a POP: messages of one queue."""
    queue = PoppedQueue(TopicKind.NORMAL, queue_id, offsets[0] if start is None else start, offsets)
    records = b"".join(record(offset, queue_id, **properties) for offset in offsets)
    return answer([queue], records)


def answer(queues: list[PoppedQueue], records: bytes) -> Reply:
    start_info, offset_info = encode_offsets(queues)
    header = PopMessageResponseHeader(
        pop_time=POP_TIME,
        invisible_time=30_000,
        revive_qid=3,
        rest_num=0,
        start_offset_info=start_info,
        msg_offset_info=offset_info,
    )
    return Reply(header, (records,))


EMPTY = Reply(code=ResponseCode.POLLING_TIMEOUT)
CHANGED = Reply(
    ChangeInvisibleTimeResponseHeader(pop_time=POP_TIME + 7, invisible_time=9000, revive_qid=5)
)


@contextlib.asynccontextmanager
async def consuming(
    brokers: int = 1, topics: Any = "T", **options: Any
) -> AsyncIterator[tuple[SimpleConsumer, list[Scripted], Scripted]]:
    cluster = scripted_cluster(brokers)
    async with cluster as (nameserver, masters, network):
        for master in masters:
            master.answer(POP, EMPTY)
            master.answer(CHANGE, CHANGED)
        async with SimpleConsumer(
            "g", topics, nameserver=nameserver.address, connect=network.connect, **options
        ) as consumer:
            yield consumer, masters, nameserver


def bodies(messages: Iterable[PoppedMessage]) -> list[bytes]:
    return [message.body for message in messages]


# -- what is asked, and what comes of it -----------------------------------------------------------


async def test_a_pop_asks_for_all_queues_of_a_topic(autojump_clock: MockClock) -> None:
    async with consuming(topics={"T": "a || b"}, start="latest") as (consumer, [broker], _):
        broker.answer(POP, popped(0, 1, TAGS="a"))
        assert bodies(await consumer.receive(max=7, wait=3, invisible=1.5)) == [b"0", b"1"]
        asked = broker.last(POP).ext
        assert {name: asked[name] for name in asked if name not in {"bornTime", "headrace"}} == {
            "topic": "T",
            "queueId": "-1",
            "bname": "broker-0",
            "consumerGroup": "g",
            "maxMsgNums": "7",
            "invisibleTime": "1500",
            "pollTime": "3000",
            "initMode": "1",
            "expType": "TAG",
            "exp": "a || b",
            "order": "false",
        }
        heartbeat = HeartbeatData.decode(broker.last(RequestCode.HEART_BEAT).body)
        (group,) = heartbeat.consumer_data_set
        assert (group.group_name, group.consume_type) == ("g", "CONSUME_POP")
        assert [each.topic for each in group.subscription_data_set] == ["T"]
    assert broker.count(RequestCode.UNREGISTER_CLIENT) == 1


async def test_messages_have_handles(autojump_clock: MockClock) -> None:
    async with consuming() as (consumer, [broker], _):
        broker.answer(POP, popped(5, 7, queue_id=2, start=4))
        first, second = await consumer.receive()
        assert first.handle == Handle(4, POP_TIME, 30_000, 3, TopicKind.NORMAL, "broker-0", 2, 5)
        assert (second.topic, second.queue.queue_id, second.queue_offset) == ("T", 2, 7)
        copy = pickle.loads(pickle.dumps(second))
        assert (copy.body, copy.topic, copy.handle) == (b"7", "T", second.handle)
        with pytest.raises(ConfigurationError, match="was not taken out by a SimpleConsumer"):
            await copy.ack()


@pytest.mark.parametrize("topic", ["T", "%RETRY%g_T"])
async def test_messages_of_retry_topics_bring_their_handles(
    autojump_clock: MockClock, topic: str
) -> None:
    handle = Handle(8, POP_TIME, 60_000, 1, TopicKind.RETRY_V1, "broker-0", 0, 9)
    async with consuming() as (consumer, [broker], _):
        queue = PoppedQueue(TopicKind.RETRY_V1, 0, 8, [9])
        broker.answer(POP, answer([queue], record(9, topic=topic, POP_CK=handle.text())))
        (message,) = await consumer.receive()
        assert (message.topic, message.queue.topic) == ("T", "%RETRY%g_T")
        assert message.handle == handle
        await message.ack()
        asked = broker.last(ACK).ext
        assert (asked["topic"], asked["offset"]) == ("%RETRY%g_T", "9")
        assert parse(asked["extraInfo"]) == handle


async def test_the_retry_topics_own_name_makes_a_handle_too(autojump_clock: MockClock) -> None:
    async with consuming() as (consumer, [broker], _):
        queue = PoppedQueue(TopicKind.RETRY_V2, 0, 8, [9])
        broker.answer(POP, answer([queue], record(9, topic="%RETRY%g+T")))
        (message,) = await consumer.receive()
        assert message.handle is not None
        assert message.handle.kind is TopicKind.RETRY_V2


async def test_nothing_comes_in_time(autojump_clock: MockClock) -> None:
    async with consuming(2) as (consumer, brokers, _):
        began = trio.current_time()
        assert await consumer.receive(wait=0) == []
        assert trio.current_time() == began
        assert await consumer.receive(wait=5) == []
        assert 5 <= trio.current_time() - began <= 6
        assert [broker.last(POP).ext["maxMsgNums"] for broker in brokers] == ["32", "32"]
        # They answer at once instead of waiting; that must not become a storm.
        assert all(broker.count(POP) < 20 for broker in brokers)


async def test_a_broker_that_waits_holds_up_no_other(autojump_clock: MockClock) -> None:
    async with consuming(2) as (consumer, [silent, other], _):
        silent.answer(POP, None)
        other.answer(POP, popped(0), EMPTY)
        began = trio.current_time()
        assert bodies(await consumer.receive(wait=20)) == [b"0"]
        assert trio.current_time() == began
        # The first one's POP is still held, so it gets no second one.
        assert await consumer.receive(wait=3) == []
        assert silent.count(POP) == 1
        assert 3 <= trio.current_time() - began <= 4


async def test_what_others_bring_is_kept_for_the_next_call(autojump_clock: MockClock) -> None:
    async with consuming(2) as (consumer, brokers, _):
        for broker in brokers:
            broker.answer(POP, popped(0, 1), EMPTY)
        first = await consumer.receive(max=3)
        await wait_all_tasks_blocked()
        rest = await consumer.receive(max=3, wait=0)
        assert sorted(bodies([*first, *rest])) == [b"0", b"0", b"1", b"1"]
        assert [broker.count(POP) for broker in brokers] == [1, 1]


async def test_what_nobody_received_is_given_back_at_the_end(autojump_clock: MockClock) -> None:
    async with consuming() as (consumer, [broker], _):
        broker.answer(POP, popped(0, 1, 2))
        assert bodies(await consumer.receive(max=1)) == [b"0"]
    given = [asked.ext for asked in broker.asked if asked.code == CHANGE]
    parts = [(each["offset"], each["invisibleTime"], each["suspend"]) for each in given]
    assert sorted(parts) == [
        ("1", "1000", "true"),
        ("2", "1000", "true"),
    ]
    assert broker.count(ACK) == broker.count(ACKS) == 0


async def test_what_was_kept_for_too_long_is_given_back(autojump_clock: MockClock) -> None:
    async with consuming() as (consumer, [broker], _):
        broker.answer(POP, popped(0, 1), EMPTY)
        await consumer.receive(max=1, invisible=30)
        await trio.sleep(14)
        broker.answer(POP, popped(5, 6), EMPTY)
        assert bodies(await consumer.receive(max=1, invisible=30)) == [b"1"]
        assert bodies(await consumer.receive(max=1, invisible=30)) == [b"5"]
        await trio.sleep(15)
        assert await consumer.receive(max=1, wait=0) == []
        await wait_all_tasks_blocked()
        assert [each.ext["offset"] for each in broker.asked if each.code == CHANGE] == ["6"]


async def test_calls_side_by_side_share_what_comes(autojump_clock: MockClock) -> None:
    async with consuming() as (consumer, [broker], _):
        broker.answer(POP, popped(0, 1), popped(2), EMPTY)
        found: list[bytes] = []

        async def take() -> None:
            found.extend(bodies(await consumer.receive(max=1)))

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(take)
        assert sorted(found) == [b"0", b"1", b"2"]


async def test_a_call_that_is_cancelled_loses_nothing(autojump_clock: MockClock) -> None:
    async with consuming() as (consumer, [broker], _):
        broker.answer(POP, EMPTY, popped(0), EMPTY)
        with trio.move_on_after(0.001):
            await consumer.receive()
        assert bodies(await consumer.receive()) == [b"0"]


async def test_tags_with_the_hash_of_a_wanted_one_are_acknowledged(
    autojump_clock: MockClock,
) -> None:
    # "Aa" and "BB" have the same hash in Java.
    async with consuming(topics={"T": "Aa"}) as (consumer, [broker], _):
        broker.answer(POP, popped(0, TAGS="BB"), popped(1, TAGS="Aa"))
        assert bodies(await consumer.receive()) == [b"1"]
        await wait_all_tasks_blocked()
        assert broker.last(ACK).ext["offset"] == "0"


# -- errors ----------------------------------------------------------------------------------------


async def test_a_broker_that_is_away_holds_up_no_other(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with consuming(2) as (consumer, [broken, other], _):
        broken.answer(POP, Reply(code=ResponseCode.SYSTEM_ERROR, remark="disk"))
        other.answer(POP, EMPTY)
        assert await consumer.receive(wait=3) == []
        assert "disk" in caplog.text
        other.answer(POP, popped(4))
        assert bodies(await consumer.receive(wait=3)) == [b"4"]


async def test_brokers_that_are_all_away_are_an_error(autojump_clock: MockClock) -> None:
    async with consuming(2) as (consumer, brokers, _):
        for broker in brokers:
            broker.answer(POP, Reply(code=ResponseCode.SYSTEM_ERROR, remark="disk"))
        began = trio.current_time()
        with pytest.raises(BrokerError, match="disk"):
            await consumer.receive(wait=3)
        assert 3 <= trio.current_time() - began <= 4
        brokers[0].answer(POP, popped(0))
        assert bodies(await consumer.receive(wait=3)) == [b"0"]


async def test_an_error_that_waiting_does_not_mend_is_raised_at_once(
    autojump_clock: MockClock,
) -> None:
    remark = "User:u has no permission to access Topic:T from 127.0.0.1, no rule"
    async with consuming() as (consumer, [broker], _):
        broker.answer(POP, Reply(code=ResponseCode.NO_PERMISSION, remark=remark))
        began = trio.current_time()
        with pytest.raises(AccessDenied, match="access Topic:T"):
            await consumer.receive()
        assert trio.current_time() == began


async def test_a_topic_without_a_route_is_an_error(autojump_clock: MockClock) -> None:
    async with consuming() as (consumer, [broker], nameserver):
        code = RequestCode.GET_ROUTEINFO_BY_TOPIC
        found = nameserver.answers[code][0]
        nameserver.answer(code, no_topic(awaits_broker=False))
        with pytest.raises(RouteNotFound):
            await consumer.receive()
        nameserver.answer(code, no_topic(awaits_broker=True))
        with pytest.raises(RouteNotFound):
            await consumer.receive(wait=3)
        nameserver.answer(code, *[no_topic(awaits_broker=True)] * 2, found)
        broker.answer(POP, popped(0))
        assert bodies(await consumer.receive(wait=5)) == [b"0"]


async def test_a_static_topic_is_refused(autojump_clock: MockClock) -> None:
    async with consuming() as (consumer, [broker], nameserver):
        nameserver.answer(
            RequestCode.GET_ROUTEINFO_BY_TOPIC, static_route(broker, leads=[[0]], total=1)
        )
        with pytest.raises(ConfigurationError, match="T is a static topic"):
            await consumer.receive()


@pytest.mark.parametrize(
    ("malformed", "reason"),
    [
        (answer([], record(0)), "offset 0 of queue 0 is in no msgOffsetInfo"),
        (answer([PoppedQueue(TopicKind.NORMAL, 0, 0, [1])], record(0)), "is in no msgOffsetInfo"),
        (answer([PoppedQueue(TopicKind.NORMAL, 0, 5, [0])], record(0)), "from 5 on"),
        (answer([], record(0, topic="U")), "U is neither T nor its retry topic"),
        (answer([], record(0, POP_CK="1 2 3")), "3 parts"),
        (answer([], b"x" * 200), "magic number"),
        (Reply({}), "popTime"),
    ],
)
async def test_answers_that_can_not_be_read_are_errors(
    autojump_clock: MockClock, malformed: Reply, reason: str
) -> None:
    async with consuming() as (consumer, [broker], _):
        broker.answer(POP, malformed)
        with pytest.raises(MalformedAnswer, match=reason):
            await consumer.receive()


async def test_a_closed_consumer_says_so(autojump_clock: MockClock) -> None:
    async with consuming() as (consumer, [broker], _):
        broker.answer(POP, popped(0))
        (message,) = await consumer.receive()
    for call in (consumer.receive, message.ack, message.retry, message.reject):
        with pytest.raises(ClientClosed):
            await call()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"max": 0}, "max=0"),
        ({"wait": -1}, "wait=-1"),
        ({"wait": 3601}, "wait=3601"),
        ({"invisible": 0}, "invisible=0"),
        ({"invisible": -1}, "invisible=-1"),
        ({"invisible": 43_201}, "invisible=43201"),
        ({"invisible": "x"}, "invisible='x'"),
    ],
)
async def test_wrong_arguments_are_rejected(arguments: dict[str, Any], reason: str) -> None:
    async with consuming() as (consumer, _, _):
        with pytest.raises(ConfigurationError, match=reason):
            await consumer.receive(**arguments)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"topics": []}, "group g subscribes to no topic"),
        ({"topics": 5}, "topics=5"),
        ({"topics": "T", "start": 5}, "start=5"),
        ({"topics": "T", "body_bytes_max": 0}, "body_bytes_max=0"),
    ],
)
def test_wrong_settings_are_rejected(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        SimpleConsumer("g", **arguments)


# -- acks and their kin ----------------------------------------------------------------------------


async def test_acks_that_wait_leave_together(autojump_clock: MockClock) -> None:
    async with consuming() as (consumer, [broker], _):
        broker.answer(POP, popped(0, 1, 2, 3))
        messages = await consumer.receive()
        async with trio.open_nursery() as nursery:
            for message in messages:
                nursery.start_soon(message.ack)
        assert broker.count(ACK) + broker.count(ACKS) <= 2
        if broker.count(ACK):
            assert broker.last(ACK).ext["offset"] == "0"
        (ack,) = BatchAckBody.decode(broker.last(ACKS).body).acks
        assert ack.offsets()[-3:] == [1, 2, 3]
        assert (ack.topic, ack.consumer_group, ack.pop_time) == ("T", "g", POP_TIME)


async def test_many_are_acknowledged_by_one_request_per_broker(autojump_clock: MockClock) -> None:
    async with consuming(2) as (consumer, brokers, _):
        for broker in brokers:
            broker.answer(POP, popped(0, 1))
        messages = await consumer.receive(max=2)
        messages += await consumer.receive(max=2)
        await consumer.ack(messages)
        for broker in brokers:
            body = BatchAckBody.decode(broker.last(ACKS).body)
            assert [ack.offsets() for ack in body.acks] == [[0, 1]]
            assert broker.count(ACKS) == 1
        await consumer.ack([])


def rejects(offset: int) -> Callable[[Asked], Reply]:
    def answer(asked: Asked) -> Reply:
        is_wrong = asked.ext["offset"] == str(offset)
        return Reply(code=ResponseCode.NO_MESSAGE if is_wrong else ResponseCode.SUCCESS)

    return answer


@pytest.mark.parametrize("code", [ResponseCode.NO_MESSAGE, ResponseCode.REQUEST_CODE_NOT_SUPPORTED])
async def test_a_batch_that_is_rejected_is_acknowledged_one_by_one(
    autojump_clock: MockClock, code: ResponseCode
) -> None:
    async with consuming() as (consumer, [broker], _):
        broker.answer(POP, popped(0, 1, 2))
        broker.answer(ACKS, Reply(code=code))
        broker.answer(ACK, rejects(1))
        messages = await consumer.receive()
        with pytest.raises(BrokerError, match="NO_MESSAGE"):
            await consumer.ack(messages)
        assert broker.count(ACK) == 3
        await messages[0].ack()
        with pytest.raises(BrokerError, match="NO_MESSAGE"):
            await messages[1].ack()


async def test_acks_fail_with_their_connection(autojump_clock: MockClock) -> None:
    async with consuming() as (consumer, [broker], _):
        broker.answer(POP, popped(0, 1))
        messages = await consumer.receive()
        broker.answer(ACKS, None)
        with pytest.raises(RequestTimeout):
            await consumer.ack(messages)


async def test_acks_that_are_under_way_are_awaited_at_the_end(autojump_clock: MockClock) -> None:
    failures: list[HeadraceError] = []

    async def ack(message: PoppedMessage) -> None:
        try:
            await message.ack()
        except (RequestTimeout, ClientClosed) as error:
            failures.append(error)

    async with trio.open_nursery() as nursery:
        async with consuming() as (consumer, [broker], _):
            broker.answer(POP, popped(0, 1, 2))
            broker.answer(ACK, None)
            broker.answer(ACKS, None)
            messages = await consumer.receive()
            nursery.start_soon(ack, messages[0])
            await wait_all_tasks_blocked()
            nursery.start_soon(ack, messages[1])
            await wait_all_tasks_blocked()
            began = trio.current_time()
        assert trio.current_time() - began >= 5
    assert len(failures) == 2


async def test_an_extended_message_has_a_new_handle(autojump_clock: MockClock) -> None:
    async with consuming() as (consumer, [broker], _):
        broker.answer(POP, popped(5, 6, 7))
        message = (await consumer.receive())[1]
        old = message.handle
        await message.extend(9)
        asked = broker.last(CHANGE).ext
        assert asked["invisibleTime"] == "9000"
        assert "suspend" not in asked
        assert old is not None
        assert asked["extraInfo"] == old.text()
        assert message.handle == Handle(
            6, POP_TIME + 7, 9000, 5, TopicKind.NORMAL, "broker-0", 0, 6
        )
        await message.ack()
        assert parse(broker.last(ACK).ext["extraInfo"]) == message.handle


@pytest.mark.parametrize(
    ("times", "after", "milliseconds"),
    [(0, None, 10_000), (1, None, 30_000), (40, None, 7_200_000), (5, 1.5, 1500), (0, 0.0001, 1)],
)
async def test_a_retry_comes_later_each_time(
    autojump_clock: MockClock, times: int, after: float | None, milliseconds: int
) -> None:
    stored = encode_record(topic="T", queue_id=0, body=b"x", queue_offset=0, reconsume_times=times)
    async with consuming() as (consumer, [broker], _):
        broker.answer(POP, answer([PoppedQueue(TopicKind.NORMAL, 0, 0, [0])], stored))
        (message,) = await consumer.receive()
        await message.retry(after=after)
        assert broker.last(CHANGE).ext["invisibleTime"] == str(milliseconds)


async def test_a_message_that_is_rejected_goes_to_the_dead_letters(
    autojump_clock: MockClock,
) -> None:
    async with consuming() as (consumer, [broker], _):
        broker.answer(POP, popped(5))
        (message,) = await consumer.receive()
        await message.reject()
        asked = broker.last(RequestCode.CONSUMER_SEND_MSG_BACK).ext
        assert (asked["group"], asked["delayLevel"], asked["offset"]) == ("g", "-1", "1005")
        assert broker.last(ACK).ext["offset"] == "5"


@pytest.mark.parametrize("seconds", [0, -1, 43_201, float("nan"), 2**63, None])
async def test_wrong_times_are_rejected(autojump_clock: MockClock, seconds: Any) -> None:
    async with consuming() as (consumer, [broker], _):
        broker.answer(POP, popped(0))
        (message,) = await consumer.receive()
        with pytest.raises(ConfigurationError, match="seconds="):
            await message.extend(seconds)
        if seconds is not None:
            with pytest.raises(ConfigurationError, match="after="):
                await message.retry(after=seconds)
        assert not broker.count(CHANGE)


async def test_a_large_body_is_refused_when_it_is_read(autojump_clock: MockClock) -> None:
    stored = encode_record(
        topic="T", queue_id=0, body=zlib.compress(bytes(5000)), queue_offset=0, sys_flag=COMPRESSED
    )
    async with consuming(body_bytes_max=4999) as (consumer, [broker], _):
        broker.answer(POP, answer([PoppedQueue(TopicKind.NORMAL, 0, 0, [0])], stored))
        (message,) = await consumer.receive()
        with pytest.raises(BodyTooLarge):
            _ = message.body


# -- on other loops --------------------------------------------------------------------------------


@contextlib.contextmanager
def in_thread(*answers: Reply) -> Iterator[tuple[str, Scripted]]:
    """A scripted broker on loopback sockets, and its nameserver's address."""
    with scripted_in_thread(2) as (nameserver, broker):
        nameserver.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, route(broker))
        broker.answer(POP, *answers)
        broker.answer(CHANGE, CHANGED)
        yield nameserver.address, broker


def test_a_blocking_consumer_settles_messages_at_once() -> None:
    with (
        in_thread(popped(0, 1, 2, 3)) as (nameserver, broker),
        blocking.SimpleConsumer("g", "T", nameserver=nameserver) as consumer,
    ):
        assert consumer.group == "g"
        first, second, third, fourth = consumer.receive(wait=5)
        first.ack()
        assert broker.last(ACK).ext["offset"] == "0"
        second.extend(9)
        assert broker.last(CHANGE).ext["invisibleTime"] == "9000"
        third.retry(after=3)
        assert broker.last(CHANGE).ext["invisibleTime"] == "3000"
        fourth.reject()
        assert broker.last(RequestCode.CONSUMER_SEND_MSG_BACK).ext["delayLevel"] == "-1"
        consumer.ack([second, third])
        assert len(BatchAckBody.decode(broker.last(ACKS).body).acks) == 2
    with pytest.raises(ClientClosed):
        first.ack()


def test_asyncio_receives_and_acknowledges() -> None:
    async def run(nameserver: str) -> list[bytes]:
        async with SimpleConsumer("g", "T", nameserver=nameserver) as consumer:
            messages = await consumer.receive(wait=5)
            await asyncio.gather(*(message.ack() for message in messages))
            return bodies(messages)

    with in_thread(popped(0, 1)) as (nameserver, broker):
        assert asyncio.run(run(nameserver)) == [b"0", b"1"]
        assert broker.count(ACK) == 2 or broker.count(ACKS)
