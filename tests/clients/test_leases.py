"""Ends of messages that a SimpleConsumer has taken out, against scripted brokers."""

from __future__ import annotations

import asyncio
import pickle
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from headrace import Consumer, MessageQueue, PoppedMessage, SimpleConsumer, blocking
from headrace.errors import (
    AccessDenied,
    BrokerError,
    ClientClosed,
    ConfigurationError,
    HeadraceError,
    RequestTimeout,
)
from headrace_protocol.bodies import HeartbeatData, QueryAssignmentRequestBody
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.compression import COMPRESSED, BodyTooLarge
from headrace_protocol.message import encode_record
from headrace_protocol.pop.batch_ack import BatchAckBody
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
    assigned,
    bodies,
    consuming,
    in_thread,
    looping,
    popped,
    record,
)
from tests.support.scripted import Asked, Scripted
from tests.support.until import until


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
        with pytest.raises(BodyTooLarge, match=r"^T/broker-0/0@0: a ZLIB body of"):
            _ = message.body


# -- of a Consumer that pops -----------------------------------------------------------------------


def offsets_of(broker: Scripted, code: int) -> list[str]:
    return [asked.ext["offset"] for asked in broker.asked if asked.code == code]


def acknowledged(broker: Scripted) -> list[int]:
    """The offsets of all acks, alone or together."""
    found = [int(offset) for offset in offsets_of(broker, ACK)]
    for asked in broker.asked:
        if asked.code == ACKS:
            for ack in BatchAckBody.decode(asked.body).acks:
                found += ack.offsets()
    return sorted(found)


async def test_messages_of_a_loop_are_acknowledged_while_it_goes_on(
    autojump_clock: MockClock,
) -> None:
    async with looping() as (consumer, [broker], _):
        broker.answer(POP, popped(0, 1, 2, 3), EMPTY)
        async for message in consumer:
            if message.queue_offset == 2:
                await trio.sleep(2)
                assert acknowledged(broker) == [0, 1], "not only at the end of the answer"
            if message.queue_offset == 3:
                break
    assert acknowledged(broker) == [0, 1, 2, 3]
    assert not broker.count(CHANGE)
    heartbeat = HeartbeatData.decode(broker.last(RequestCode.HEART_BEAT).body)
    (group,) = heartbeat.consumer_data_set
    assert group.consume_type == "CONSUME_POP"
    assert [each.topic for each in group.subscription_data_set] == ["T"]


async def test_messages_of_a_loop_stay_out_while_the_program_works(
    autojump_clock: MockClock,
) -> None:
    async with looping() as (consumer, [broker], _):
        broker.answer(POP, popped(0, 1), EMPTY)
        async for message in consumer:
            if message.queue_offset == 0:
                await trio.sleep(100)
                assert 12 <= broker.count(CHANGE) <= 14, "each of both every 15 s"
                assert broker.last(CHANGE).ext["invisibleTime"] == "30000"
                handle = broker.last(CHANGE).ext["extraInfo"]
                assert parse(handle).invisible_time == 9000, "that of the answer before"
            else:
                assert isinstance(message, PoppedMessage)
                await message.extend(600)
                before = broker.count(CHANGE)
                await trio.sleep(10)
                assert broker.count(CHANGE) == before
                break
    assert acknowledged(broker) == [0, 1]


async def fail_at_the_second(asked: list[Scripted]) -> None:
    async with looping(retry_delay=7) as (consumer, brokers, _):
        asked += brokers
        brokers[0].answer(POP, popped(0, 1, 2), EMPTY)
        async for message in consumer:
            assert message.queue_offset == 0


async def test_what_was_received_late_stays_out_in_time(autojump_clock: MockClock) -> None:
    """A message that waited for half of its time is extended before the rest is over."""
    async with looping(2, queue_messages_max=2) as (consumer, [first, second], _):
        first.answer(POP, popped(0, 1), None)
        second.answer(POP, None)
        messages = aiter(consumer)
        await anext(messages)
        received_at = autojump_clock.current_time()
        second.last(POP).reply(popped(5))
        await wait_all_tasks_blocked()
        autojump_clock.jump(14.8)
        assert [(await anext(messages)).queue_offset for _ in range(2)] == [1, 5]
        autojump_clock.jump(14.8)
        await until(lambda: second.count(CHANGE) > 0)
        assert autojump_clock.current_time() < received_at + 30


async def test_what_a_loop_leaves_is_returned(autojump_clock: MockClock) -> None:
    brokers: list[Scripted] = []
    with pytest.raises(ExceptionGroup):
        await fail_at_the_second(brokers)
    (broker,) = brokers
    assert acknowledged(broker) == [0]
    failed, unseen = (asked.ext for asked in broker.asked if asked.code == CHANGE)
    # It failed on one, which is counted, and has not seen the other.
    assert (failed["offset"], failed["invisibleTime"], failed.get("suspend")) == ("1", "7000", None)
    assert (unseen["offset"], unseen["invisibleTime"], unseen["suspend"]) == ("2", "1000", "true")


async def test_a_batch_of_a_loop_has_the_bytes_of_the_answer(autojump_clock: MockClock) -> None:
    records = [record(0, a="1"), record(1), record(2, b="2")]
    queues = [PoppedQueue(TopicKind.NORMAL, 0, 0, (0, 1, 2))]
    async with looping() as (consumer, [broker], _):
        broker.answer(POP, answer(queues, b"".join(records)), EMPTY)
        batch = await anext(aiter(consumer.batches()))
        assert (len(batch), batch.offset_at(1), batch.buffer_bytes) == (
            3,
            1,
            len(b"".join(records)),
        )
        for each in (batch, pickle.loads(pickle.dumps(batch))):
            assert bytes(each.columns.data) == b"".join(records)
            assert bytes(each.part(1, 2).columns.data) == records[1]
            assert each.part(1, 1).columns.data == b""


async def test_a_message_that_the_program_has_settled_is_left_alone(
    autojump_clock: MockClock,
) -> None:
    async with looping() as (consumer, [broker], _):
        broker.answer(POP, popped(0, 1, 2, 3), EMPTY)
        async for message in consumer:
            match message.queue_offset:
                case 0:
                    await message.retry(after=5)
                case 1:
                    await message.reject()
                case 2:
                    assert isinstance(message, PoppedMessage)
                    await message.ack()
                case _:
                    await consumer.commit()
                    break
        assert offsets_of(broker, CHANGE) == ["0"]
        assert acknowledged(broker) == [1, 2, 3]
    assert acknowledged(broker) == [1, 2, 3]


async def test_tasks_of_a_program_share_the_messages_of_a_loop(autojump_clock: MockClock) -> None:
    async def work(consumer: Consumer, broker: Scripted) -> None:
        async for message in consumer:
            assert message.queue_offset in (2, 3)
            if message.queue_offset == 3:
                break
        await consumer.commit()
        assert acknowledged(broker) == [2, 3], "though the other has not done those before"

    async with looping() as (consumer, [broker], _):
        broker.answer(POP, popped(0, 1, 2, 3), EMPTY)
        messages = aiter(consumer)
        assert (await anext(messages)).queue_offset == 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work, consumer, broker)
        assert (await anext(messages)).queue_offset == 1
    assert acknowledged(broker) == [0, 1, 2, 3]


async def test_acks_that_fail_are_sent_again_while_messages_are_out(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    busy = Reply(code=ResponseCode.SYSTEM_BUSY)
    async with looping() as (consumer, [broker], _):
        broker.answer(POP, popped(0), EMPTY)
        broker.answer(ACK, busy, busy, Reply())
        iterator = aiter(consumer)
        await anext(iterator)
        with pytest.raises(BrokerError):
            await consumer.commit()
        await trio.sleep(5)
        assert broker.count(ACK) == 3
        await consumer.commit()
        assert broker.count(ACK) == 3
    assert "acknowledging messages of group g" in caplog.text


async def test_messages_that_are_lost_are_logged(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with looping() as (consumer, [broker], _):
        broker.answer(POP, popped(0), EMPTY)
        broker.answer(CHANGE, Reply(code=ResponseCode.NO_MESSAGE))
        async for _message in consumer:
            await trio.sleep(40)
            break
        assert broker.count(CHANGE) == 1
    assert "1 messages were not kept out in time" in caplog.text
    assert not acknowledged(broker)


async def test_a_loop_waits_for_brokers_that_are_away(autojump_clock: MockClock) -> None:
    async with looping() as (consumer, [broker], _):
        busy = Reply(code=ResponseCode.SYSTEM_BUSY)
        broker.answer(POP, busy, busy, popped(0), EMPTY)
        async for message in consumer:
            assert message.body == b"0"
            break
        assert not consumer.failures()
        assert consumer.assignment == []
        broker.answer(POP, busy)
        await trio.sleep(30)
        assert [(queue.topic, queue.queue_id) for queue in consumer.failures()] == [("T", -1)]
        assert not consumer.failures(after_ms=60_000)


async def test_a_loop_pops_the_queues_that_a_broker_assigns(autojump_clock: MockClock) -> None:
    query = RequestCode.QUERY_ASSIGNMENT
    mine = [MessageQueue("T", "broker-0", 0), MessageQueue("T", "broker-0", 2)]
    async with looping() as (_, [broker], _):

        async def popped_in_a_minute(answer: Reply) -> set[str]:
            broker.answer(query, answer)
            await trio.sleep(45)
            broker.asked.clear()
            await trio.sleep(60)
            return {asked.ext["queueId"] for asked in broker.asked if asked.code == POP}

        assert await popped_in_a_minute(assigned(*mine, MessageQueue("U", "x", 1))) == {"0", "2"}
        body = QueryAssignmentRequestBody.decode(broker.last(query).body)
        assert (body.topic, body.consumer_group, body.strategy_name) == ("T", "g", "AVG")
        heartbeat = HeartbeatData.decode(broker.last(RequestCode.HEART_BEAT).body)
        assert body.client_id == heartbeat.client_id
        # Of a broker that was told nothing, or knows no assignment.
        assert await popped_in_a_minute(assigned(*mine, mode="PULL")) == {"-1"}
        assert await popped_in_a_minute(Reply(code=ResponseCode.SYSTEM_ERROR)) == {"-1"}
        assert await popped_in_a_minute(assigned()) == {"-1"}


async def test_a_loop_is_paused_and_told_of_missing_rights(autojump_clock: MockClock) -> None:
    async with looping() as (consumer, [broker], _):
        broker.answer(POP, popped(0, 1), EMPTY)
        iterator = aiter(consumer)
        await anext(iterator)
        consumer.pause()
        with trio.move_on_after(3) as paused:
            await anext(iterator)
        assert paused.cancelled_caught
        consumer.resume()
        assert (await anext(iterator)).body == b"1"
        with pytest.raises(ConfigurationError, match="is not assigned to this member"):
            consumer.pause([MessageQueue("T", "b", 0)])
        broker.answer(
            POP,
            Reply(code=ResponseCode.NO_PERMISSION, remark="has no permission to access Topic:T"),
        )
        with trio.fail_after(60), pytest.raises(AccessDenied):
            await anext(iterator)


async def test_a_loop_holds_no_more_than_it_may(autojump_clock: MockClock) -> None:
    async with looping(queue_messages_max=4) as (consumer, [broker], _):
        broker.answer(POP, popped(0, 1, 2, 3), popped(4, 5), EMPTY)
        iterator = aiter(consumer)
        await anext(iterator)
        await trio.sleep(5)
        assert broker.count(POP) == 1, "there is no room"
        assert broker.last(POP).ext["maxMsgNums"] == "4"
        for _ in range(4):
            message = await anext(iterator)
        assert message.body == b"4"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mode": "push"}, "mode='push': must be 'pull' or 'pop'"),
        ({"ordered": True}, "ordered= cannot be combined with mode='pop'"),
        ({"strategy": "consistent_hash"}, "strategy= cannot"),
        ({"offsets_topic": "o"}, "offsets_topic= cannot"),
        ({"on_assigned": print}, "on_assigned= cannot"),
        ({"broadcast": True}, "broadcast= cannot"),
        ({"start": 5}, "start=5: must be 'earliest' or 'latest'"),
        ({"retry_delay": 0}, "retry_delay=0: must be more than 0"),
        ({"offsets_dir": "/d"}, "requires broadcast=True"),
    ],
)
def test_options_that_a_popping_consumer_has_no_use_for(options: Any, reason: str) -> None:
    how: dict[str, Any] = {"mode": "pop", "nameserver": "localhost:1"} | options
    with pytest.raises(ConfigurationError, match=reason):
        Consumer("g", "T", **how)


# -- on other loops --------------------------------------------------------------------------------


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
