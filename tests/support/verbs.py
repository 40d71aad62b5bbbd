"""Steps that many tests of clients take."""

from __future__ import annotations

import trio

from headrace import Consumer, Message, blocking
from headrace.embedded import Embedded


async def produce(
    mq: Embedded, count: int, topic: str = "T", *, queues: int = 4, first: int = 0, tag: str = ""
) -> None:
    """``count`` numbered messages, each tenth with one key."""
    async with mq.admin() as admin:
        await admin.create_topic(topic, queues=queues, if_not_exists=True)
    async with mq.producer() as producer, producer.pipeline() as pipeline:
        for number in range(first, first + count):
            await pipeline.send(Message(topic, b"%d" % number, key=f"k{number % 10}", tag=tag))


async def take(consumer: Consumer, count: int) -> list[int]:
    """The bodies of the next ``count`` messages, as numbers."""
    numbers: list[int] = []
    async for message in consumer:
        numbers.append(int(message.body))
        if len(numbers) == count:
            break
    return numbers


async def take_nothing(consumer: Consumer) -> None:
    with trio.move_on_after(0.1) as scope:
        async for message in consumer:
            raise AssertionError(f"nothing should come, but {message} did")
    assert scope.cancelled_caught


async def lag_of(mq: Embedded, group: str = "g", topic: str = "T") -> int:
    """The number of messages that a group has not consumed."""
    async with mq.admin() as admin:
        return sum(queue.lag for queue in await admin.lag(group, topic))


def lag_at(nameserver: str, group: str, topic: str) -> int:
    """As ``lag_of``, for blocking code."""
    with blocking.Admin(nameserver=nameserver) as admin:
        return sum(queue.lag for queue in admin.lag(group, topic))
