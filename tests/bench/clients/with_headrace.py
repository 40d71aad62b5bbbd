"""headrace's own clients, under trio."""

from __future__ import annotations

from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import trio

import headrace
from headrace import Consumer, Message, Producer, PullConsumer
from tests.bench.clients.job import Lost, Window, warm_and_measure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from headrace import MessageBatch
    from tests.bench.clients.job import Job, Report

    SendAll = Callable[[Producer, int], Awaitable[None]]

# Messages in a call of send_many.
CALL_MESSAGES = 50_000
TIMEOUT_MS = 10_000
_DISPATCH_S = 30
_LOOK_AGAIN_S = 0.02


def pipeline(job: Job) -> Report:
    """``Pipeline.send`` of one message after the other; leaving it waits for all answers."""
    bodies = job.bodies()

    async def send_all(producer: Producer, count: int) -> None:
        async with producer.pipeline() as sends:
            for body in islice(cycle(bodies), count):
                await sends.send(Message(job.topic, body))

    return trio.run(_warm_and_send, job, send_all)


def send_bytes(job: Job) -> Report:
    """``send_many`` of a list of bytes."""
    bodies = _bodies(job)

    async def send_all(producer: Producer, count: int) -> None:
        for size in _calls(count):
            await producer.send_many(bodies[:size], topic=job.topic)

    return trio.run(_warm_and_send, job, send_all)


def _bodies(job: Job) -> list[bytes]:
    return list(islice(cycle(job.bodies()), CALL_MESSAGES))


def _calls(count: int) -> Iterator[int]:
    """The number of messages of each call, for ``count`` in all."""
    for first in range(0, count, CALL_MESSAGES):
        yield min(CALL_MESSAGES, count - first)


async def _warm_and_send(job: Job, send_all: SendAll) -> Report:
    async with Producer(nameserver=job.address) as producer:
        report = await warm_and_measure(job, partial(send_all, producer))
    await _check_stored(job, job.warm_up + job.messages)
    return report


async def _check_stored(job: Job, messages: int) -> None:
    """Raise Lost unless the broker has so many messages in the job's topic.

    Brokers answer before their ConsumeQueues have what they stored.
    """
    stored = 0
    async with headrace.Admin(nameserver=job.address) as admin:
        with trio.move_on_after(_DISPATCH_S):
            while stored < messages:
                stats = await admin.topic_stats(job.topic)
                stored = sum(offset.max_offset for offset in stats.values())
                await trio.sleep(_LOOK_AGAIN_S)
    if stored != messages:
        raise Lost(f"{stored} of {messages} messages of {job} were stored")


def read_each(job: Job) -> Report:
    """``async for message in consumer``."""
    trio.run(_read_each, job, f"warm-{job.work}", job.warm_up)
    return trio.run(_read_each, job, job.work, job.messages)


async def _read_each(job: Job, group: str, count: int) -> Report:
    window = Window(job)
    consumer = Consumer(f"{group}-{job.topic}", job.topic, nameserver=job.address, start="earliest")
    async with consumer:
        messages = aiter(consumer)
        body_bytes = len((await anext(messages)).body)
        received = 1
        window.open(received)
        async for message in messages:
            body_bytes += len(message.body)
            received += 1
            if received == count:
                break
        report = window.close(received)
    window.check_bodies(received, body_bytes)
    return report


def read_columns(job: Job) -> Report:
    """``receive_many``, of which the columns are used."""
    return _warm_and_read(job, lambda batch: int(batch.columns.body_bytes.sum()))


def read_values(job: Job) -> Report:
    """``receive_many``, of which all bodies are taken as bytes, their checksums checked."""
    return _warm_and_read(job, lambda batch: sum(map(len, batch.values())))


def _warm_and_read(job: Job, body_bytes_of: Callable[[MessageBatch], int]) -> Report:
    trio.run(_read, job, job.warm_up, body_bytes_of)
    return trio.run(_read, job, job.messages, body_bytes_of)


async def _read(job: Job, count: int, body_bytes_of: Callable[[MessageBatch], int]) -> Report:
    window = Window(job)
    received = body_bytes = 0
    async with PullConsumer(nameserver=job.address) as consumer:
        await consumer.assign(await consumer.queues(job.topic))
        while received < count:
            batch = await consumer.receive_many(timeout_ms=TIMEOUT_MS)
            if batch is None:
                raise Lost(f"{job}: only {received} messages came")
            if not received:
                window.open(len(batch))
            received += len(batch)
            body_bytes += body_bytes_of(batch)
        report = window.close(received)
    window.check_bodies(received, body_bytes)
    return report


WORKS: dict[str, Callable[[Any], Any]] = {
    "pipeline": pipeline,
    "send-many-bytes": send_bytes,
    "async-for": read_each,
    "receive-columns": read_columns,
    "receive-values": read_values,
}
