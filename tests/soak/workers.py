"""The kinds of work of a soak: ``python -m tests.soak.workers KIND NAMESERVER BROKER RATE``.

Each is a process of its own that does its work RATE times a second, or without a pause if that is
"inf", until SIGTERM; then it prints what it did.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count
from typing import NamedTuple

import trio

from headrace import Admin, Consumer, Message, Producer, PullConsumer
from headrace.errors import HeadraceError
from headrace_protocol.bodies import SubscriptionGroupConfig
from headrace_protocol.message import encode_batch
from tests.bench.wire import QUEUES, SUBSCRIPTION, SUSPEND, Client, pull_frame, send_frame

SINGLES, BATCHES, BULK, QUIET = "SoakSingles", "SoakBatches", "SoakBulk", "SoakQuiet"
GROUP = "soak_readers"
KEYS = 1000
BODY = os.urandom(1024)
BATCH = encode_batch([(0, BODY[:200], b"")] * 20)
BULK_BODIES = [BODY[:500]] * 100
BULK_KEYS = [str(number) for number in range(100)]
MEMBER_S = 10.0

Once = Callable[[], Awaitable[int]]
Kind = Callable[[str, str], AbstractAsyncContextManager[Once]]


@asynccontextmanager
async def singles(nameserver: str, _broker: str) -> AsyncIterator[Once]:
    """One message after the other."""
    numbers = count()
    async with Producer(nameserver=nameserver) as producer:

        async def once() -> int:
            await producer.send(Message(SINGLES, BODY, key=f"key{next(numbers) % KEYS}"))
            return 1

        yield once


@asynccontextmanager
async def batches(_nameserver: str, broker: str) -> AsyncIterator[Once]:
    """RocketMQ's own batches."""
    frames = [send_frame(BATCHES, queue, BATCH, is_batch=True) for queue in range(QUEUES)]
    numbers = count()
    with Client(broker) as client:

        async def once() -> int:
            await trio.to_thread.run_sync(client.call, frames[next(numbers) % QUEUES])
            return 20

        yield once


@asynccontextmanager
async def bulk(nameserver: str, _broker: str) -> AsyncIterator[Once]:
    """Whole records."""
    async with Producer(nameserver=nameserver) as producer:

        async def once() -> int:
            await producer.send_many(BULK_BODIES, topic=BULK, keys=BULK_KEYS)
            return len(BULK_BODIES)

        yield once


@asynccontextmanager
async def pulls(nameserver: str, _broker: str) -> AsyncIterator[Once]:
    """A reader without a group that takes what comes."""
    async with PullConsumer(nameserver=nameserver) as consumer:
        await consumer.assign(await consumer.queues(BULK))
        await consumer.seek_to("latest")

        async def once() -> int:
            batch = await consumer.receive_many(timeout_ms=1000)
            return len(batch) if batch else 0

        yield once


@asynccontextmanager
async def push(nameserver: str, _broker: str) -> AsyncIterator[Once]:
    """A member of a group that is always there."""
    topics = dict.fromkeys((SINGLES, BATCHES, BULK), "*")
    async with Consumer(GROUP, topics, nameserver=nameserver, start="earliest") as consumer:
        taken = consumer.batches()

        async def once() -> int:
            return len(await anext(taken))

        yield once


@asynccontextmanager
async def guests(nameserver: str, _broker: str) -> AsyncIterator[Once]:
    """Members of an ordered group, of whom one joins every 10 s and the one before it leaves."""

    async def once() -> int:
        done = 0
        consumer = Consumer(
            "soak_guests", SINGLES, nameserver=nameserver, start="latest", ordered=True
        )
        async with consumer:
            with trio.move_on_after(MEMBER_S):
                async for batch in consumer.batches():
                    done += len(batch)
        return done

    yield once


@asynccontextmanager
async def queries(nameserver: str, broker: str) -> AsyncIterator[Once]:
    """By key and id, and what monitors ask."""
    numbers = count()
    async with Admin(nameserver=nameserver) as admin:

        async def once() -> int:
            found = await admin.query_by_key(SINGLES, f"key{next(numbers) % KEYS}", max_count=4)
            for message in found[:1]:
                await admin.message(message.offset_message_id)
            await admin.topic_stats(BULK)
            await admin.lag(GROUP)
            await admin.members(GROUP)
            await admin.runtime_info(broker)
            return 1

        yield once


@asynccontextmanager
async def changes(nameserver: str, broker: str) -> AsyncIterator[Once]:
    """Topics and groups that come and go, and settings."""
    numbers = count()
    async with Admin(nameserver=nameserver) as admin, Producer(nameserver=nameserver) as producer:

        async def once() -> int:
            name = f"SoakPassing{next(numbers)}"
            await admin.create_topic(name, queues=4)
            await producer.send_many([BODY] * 8, topic=name)
            await admin.create_group(SubscriptionGroupConfig(group_name=name))
            await admin.update_broker_config(broker, {"fileReservedTime": "72"})
            await admin.delete_group(name)
            await admin.delete_topic(name)
            return 1

        yield once


@asynccontextmanager
async def strangers(_nameserver: str, broker: str) -> AsyncIterator[Once]:
    """Connections that end in the middle: of a frame, or of a pull that is held."""
    send = send_frame(QUIET, 0, BODY)
    pull = pull_frame("soak_strangers", QUIET, 1, 0, SUSPEND | SUBSCRIPTION)

    def visit() -> int:
        with Client(broker) as client:
            client.call(send)
            client.send(pull + send[:100])
        return 1

    async def once() -> int:
        return await trio.to_thread.run_sync(visit)

    yield once


class Work(NamedTuple):
    """tasks: how many do it at once. rate_max: turns a second that are enough of it."""

    kind: Kind
    tasks: int = 1
    rate_max: float = math.inf


WORK = {
    "singles": Work(singles, tasks=8),
    "batches": Work(batches),
    "bulk": Work(bulk),
    "queries": Work(queries),
    "changes": Work(changes),
    "strangers": Work(strangers, rate_max=20),
    "pulls": Work(pulls),
    "push": Work(push),
    "guests": Work(guests, tasks=2),
}

READERS = ("pulls", "push", "guests")


class Worker:
    """Does one kind of work, and counts."""

    def __init__(self, rate: float) -> None:
        self._interval_s = 1 / rate
        self._due = trio.current_time()
        self._began = time.monotonic()
        self.turns = self.messages = 0
        self.errors: list[str] = []

    async def run(self, once: Once) -> None:
        """Again and again; what falls behind is not made up for."""
        while True:
            self._due = max(self._due + self._interval_s, trio.current_time() - 1)
            await trio.sleep_until(self._due)
            try:
                messages = await once()
            except HeadraceError as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                await trio.sleep(0.1)
            else:
                self.turns += 1
                self.messages += messages

    def report(self) -> str:
        seconds = time.monotonic() - self._began
        figures = {"turns": self.turns, "messages": self.messages, "seconds": seconds}
        return json.dumps({**figures, "errors": len(self.errors), "said": self.errors[:3]})


async def work(kind: Work, nameserver: str, broker: str, rate: float) -> None:
    worker = Worker(rate)
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async with kind.kind(nameserver, broker) as once, trio.open_nursery() as nursery:
            for _ in range(kind.tasks):
                nursery.start_soon(worker.run, once)
            await anext(signals)
            report = worker.report()
            nursery.cancel_scope.cancel()
    sys.stdout.write(report + "\n")


if __name__ == "__main__":
    name, nameserver, broker, rate = sys.argv[1:]
    trio.run(work, WORK[name], nameserver, broker, float(rate))
