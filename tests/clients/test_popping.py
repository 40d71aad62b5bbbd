"""Consumers that pop at a real broker, on each loop: nothing is lost, nothing comes twice."""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from itertools import count
from typing import Any

import pytest
import trio

import headrace
from headrace import (
    Admin,
    Consumer,
    Message,
    PoppedMessage,
    Producer,
    PullConsumer,
    SimpleConsumer,
    blocking,
)
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


# -- in a loop -------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_members_that_loop_share_one_queue(mq: Embedded, topic: str) -> None:
    sent = await send(mq.nameserver, topic, 500)
    taken: Counter[bytes] = Counter()
    at: Any = {"nameserver": mq.nameserver, "mode": "pop"}

    async def work(scope: trio.CancelScope) -> None:
        async with Consumer("g", topic, **at) as consumer:
            async for message in consumer:
                taken[message.body] += 1
                if len(taken) == len(sent):
                    # Another member may have the last one, and leaves its loop at the next.
                    await consumer.commit()
                    scope.cancel()

    with trio.move_on_after(20):
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(work, nursery.cancel_scope)
    assert taken.keys() == sent
    assert set(taken.values()) == {1}
    async with SimpleConsumer("g", topic, nameserver=mq.nameserver) as consumer:
        assert await consumer.receive(wait=1.5) == []


async def test_batches_and_values_of_a_loop(mq: Embedded, topic: str) -> None:
    sent = await send(mq.nameserver, topic, 40)
    found: set[bytes] = set()
    async with Consumer("g", topic, mode="pop", nameserver=mq.nameserver) as consumer:
        with trio.fail_after(10):
            async for batch in consumer.batches(max_messages=7):
                assert len(batch) <= 7
                assert [message.body for message in batch] == batch.values()
                assert batch.to_arrow().column("value").to_pylist() == batch.values()
                assert batch[0].queue_offset == batch.queue_offset
                assert pickle.loads(pickle.dumps(batch)).values() == batch.values()
                found.update(batch.values())
                if found == sent:
                    break


async def test_retries_of_a_loop_end_in_the_dead_letters(mq: Embedded, topic: str) -> None:
    await send(mq.nameserver, topic, 2)
    group, attempts = f"g_{topic}", []
    async with Consumer(
        group, topic, mode="pop", max_attempts=2, retry_delay=0.01, nameserver=mq.nameserver
    ) as consumer:
        with trio.fail_after(20):
            async for message in consumer:
                attempts.append((message.body, message.reconsume_times, message.topic))
                if message.body == b"1":
                    await message.retry()
                if attempts.count((b"1", 1, topic)):
                    break
    assert sorted(attempts) == [(b"0", 0, topic), (b"1", 0, topic), (b"1", 1, topic)]
    async with PullConsumer(nameserver=mq.nameserver) as reader:
        await reader.assign(await reader.queues(f"%DLQ%{group}"))
        dead = await reader.receive_many(timeout_ms=5000)
        assert [(each.body, each.topic) for each in dead or ()] == [(b"1", topic)]


def test_a_blocking_loop(mq: Embedded, topic: str) -> None:
    at: Any = {"nameserver": mq.nameserver}
    with blocking.Producer(**at) as producer:
        for number in range(3):
            producer.send(Message(topic, b"%d" % number))
    with blocking.Consumer("g", topic, mode="pop", **at) as consumer:
        found = []
        for message in consumer.until(10_000):
            found.append(message.body)
            if message.body == b"1" and not message.reconsume_times:
                message.retry(after=0.01)
            if len(found) == 4:
                break
    assert sorted(found) == [b"0", b"1", b"1", b"2"]
    with blocking.SimpleConsumer("g", topic, **at) as simple:
        assert simple.receive(wait=0.5) == []


def test_asyncio_in_a_loop(mq: Embedded, topic: str) -> None:
    async def run() -> None:
        sent = await send(mq.nameserver, topic, 20)
        found = set()
        async with Consumer("g", topic, mode="pop", nameserver=mq.nameserver) as consumer:
            async for message in consumer:
                found.add(message.body)
                if found == sent:
                    break

    asyncio.run(asyncio.wait_for(run(), 20))
