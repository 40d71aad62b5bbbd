"""SimpleConsumers at a real broker, on each loop: nothing is lost, nothing comes twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import count
from typing import Any

import pytest
import trio

import headrace
from headrace import Admin, Message, PoppedMessage, Producer, PullConsumer, SimpleConsumer, blocking
from headrace.embedded import Embedded

_numbers = count()


@pytest.fixture
def topic(mq: Embedded) -> str:
    """A topic of the test's own, with one queue."""
    name = f"popped_{next(_numbers)}"
    with blocking.Admin(nameserver=mq.nameserver) as admin:
        admin.create_topic(name, queues=1)
    return name


async def send(nameserver: str, topic: str, count: int) -> set[bytes]:
    bodies = [b"%d" % number for number in range(count)]
    async with Producer(nameserver=nameserver) as producer:
        await producer.send_many([Message(topic, body) for body in bodies])
    return set(bodies)


@pytest.mark.slow
async def test_members_share_one_queue(mq: Embedded, topic: str) -> None:
    sent = await send(mq.nameserver, topic, 500)
    taken: Counter[bytes] = Counter()

    async def work() -> None:
        async with SimpleConsumer("g", topic, nameserver=mq.nameserver) as consumer:
            while messages := await consumer.receive(max=8, wait=0.3):
                taken.update(message.body for message in messages)
                await consumer.ack(messages)

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(work)
    assert taken.keys() == sent
    assert set(taken.values()) == {1}


async def test_a_held_receive_is_woken(mq: Embedded, topic: str) -> None:
    async with SimpleConsumer("g", topic, nameserver=mq.nameserver) as consumer:
        found: list[PoppedMessage] = []

        async def receive() -> None:
            found.extend(await consumer.receive(wait=20))

        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(receive)
                await trio.sleep(0.05)
                await send(mq.nameserver, topic, 1)
        assert [message.body for message in found] == [b"0"]
        await consumer.ack(found)


@pytest.mark.slow
async def test_each_end_of_a_message(mq: Embedded, topic: str) -> None:
    await send(mq.nameserver, topic, 5)
    group = f"g_{topic}"
    async with SimpleConsumer(group, topic, nameserver=mq.nameserver) as consumer:
        messages = await consumer.receive(wait=5, invisible=0.5)
        await messages[0].ack()
        await messages[1].extend(60)
        await messages[1].ack()
        await messages[2].retry(after=0.01)
        await messages[3].reject()
        # The fifth comes again because its time is up.
        again = await consumer.receive(max=1, wait=5)
        again += await consumer.receive(max=1, wait=5)
        assert [(each.body, each.reconsume_times) for each in again] == [(b"2", 1), (b"4", 1)]
        assert {each.topic for each in again} == {topic}
        await consumer.ack(again)
        assert await consumer.receive(wait=0.7) == []
    async with PullConsumer(nameserver=mq.nameserver) as reader:
        await reader.assign(await reader.queues(f"%DLQ%{group}"))
        dead = await reader.receive_many(timeout_ms=5000)
        assert [message.body for message in dead or ()] == [b"3"]


async def test_what_was_not_received_comes_to_another_member(mq: Embedded, topic: str) -> None:
    await send(mq.nameserver, topic, 3)
    async with SimpleConsumer("g", topic, nameserver=mq.nameserver) as consumer:
        (first,) = await consumer.receive(max=1, invisible=60)
        await first.ack()
        assert await consumer.receive(max=1, invisible=60)
    # Given back after a second, and not counted as an attempt.
    async with SimpleConsumer("g", topic, nameserver=mq.nameserver) as consumer:
        messages = await consumer.receive(wait=5)
        assert [(each.body, each.reconsume_times) for each in messages] == [(b"2", 0)]


async def test_tags_are_checked_again(mq: Embedded, topic: str) -> None:
    async with Producer(nameserver=mq.nameserver) as producer:
        for tag in ("Aa", "BB", "C", "Aa"):
            await producer.send(Message(topic, tag.encode(), tag=tag))
    # "Aa" and "BB" have the same hash, so the broker delivers both.
    async with SimpleConsumer("g", {topic: "Aa"}, nameserver=mq.nameserver) as consumer:
        messages = await consumer.receive(wait=5)
        assert [message.body for message in messages] == [b"Aa", b"Aa"]
        await consumer.ack(messages)


def test_a_blocking_consumer(mq: Embedded, topic: str) -> None:
    with (
        blocking.Producer(nameserver=mq.nameserver) as producer,
        blocking.SimpleConsumer("g", topic, nameserver=mq.nameserver) as consumer,
    ):
        producer.send(Message(topic, b"x"))
        (message,) = consumer.receive(wait=5)
        message.retry(after=0.01)
        (message,) = consumer.receive(wait=5)
        assert message.reconsume_times == 1
        message.ack()
        assert consumer.receive(wait=0) == []


def test_asyncio(mq: Embedded, topic: str) -> None:
    async def run() -> None:
        sent = await send(mq.nameserver, topic, 20)
        async with SimpleConsumer("g", topic, nameserver=mq.nameserver) as consumer:
            messages = await consumer.receive(wait=5)
            assert {message.body for message in messages} == sent
            await asyncio.gather(*(message.ack() for message in messages))
            assert await consumer.receive(wait=0) == []

    asyncio.run(run())


async def test_all_topics_and_brokers_are_asked(mq: Embedded) -> None:
    async with headrace.embedded(memory=True) as own:
        at: Any = {"nameserver": own.nameserver, "connect": own.connect}
        async with Admin(**at) as admin, Producer(**at) as producer:
            for name in ("T", "U"):
                await admin.create_topic(name, queues=2)
                await producer.send(Message(name, name.encode()))
        async with SimpleConsumer("g", ["T", "U"], **at) as consumer:
            found = [await consumer.receive(max=1, wait=5) for _ in range(2)]
            assert {message.topic for messages in found for message in messages} == {"T", "U"}
