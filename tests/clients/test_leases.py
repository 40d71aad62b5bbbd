"""Ends of messages that a SimpleConsumer has taken out, against scripted brokers."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from headrace import PoppedMessage, SimpleConsumer, blocking
from headrace.errors import (
    BrokerError,
    ClientClosed,
    ConfigurationError,
    HeadraceError,
    RequestTimeout,
)
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
    POP,
    POP_TIME,
    answer,
    bodies,
    consuming,
    in_thread,
    popped,
)
from tests.support.scripted import (
    Asked,
)


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
