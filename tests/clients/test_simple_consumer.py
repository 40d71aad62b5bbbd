"""SimpleConsumer against scripted brokers: what it asks, hands out, keeps and gives back."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from headrace import SimpleConsumer
from headrace.errors import (
    AccessDenied,
    BrokerError,
    ClientClosed,
    ConfigurationError,
    MalformedAnswer,
    RouteNotFound,
)
from headrace_protocol.bodies import HeartbeatData
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.pop.handle import Handle, TopicKind, parse
from headrace_protocol.pop.infos import PoppedQueue
from headrace_protocol.serving import Reply
from tests.support.popping import (
    ACK,
    ACKS,
    CHANGE,
    EMPTY,
    POP,
    POP_TIME,
    answer,
    bodies,
    consuming,
    popped,
    record,
)
from tests.support.scripted import (
    no_topic,
    static_route,
)

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
        with pytest.raises(ConfigurationError, match="was not taken out by a consumer of"):
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
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    remark = "User:u has no permission to access Topic:T from 127.0.0.1, no rule"
    async with consuming() as (consumer, [broker], _):
        broker.answer(POP, Reply(code=ResponseCode.NO_PERMISSION, remark=remark))
        began = trio.current_time()
        with pytest.raises(AccessDenied, match="access Topic:T"):
            await consumer.receive()
        assert trio.current_time() == began
    assert "retrying" not in caplog.text


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


async def test_a_static_topic_is_refused(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with consuming() as (consumer, [broker], nameserver):
        nameserver.answer(
            RequestCode.GET_ROUTEINFO_BY_TOPIC, static_route(broker, leads=[[0]], total=1)
        )
        with pytest.raises(ConfigurationError, match="T is a static topic"):
            await consumer.receive()
    assert "retrying" not in caplog.text


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


async def test_what_is_no_list_of_messages_is_not_acknowledged(autojump_clock: MockClock) -> None:
    async with consuming() as (consumer, [broker], _):
        broker.answer(POP, popped(0))
        (message,) = await consumer.receive(wait=1)
        for wrong in (None, ["x"], [message, 5], message):
            with pytest.raises(ConfigurationError, match=r"messages=.* message.ack\(\)"):
                await consumer.ack(wrong)  # type: ignore[arg-type]
        assert broker.count(RequestCode.BATCH_ACK_MESSAGE) == 0


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
