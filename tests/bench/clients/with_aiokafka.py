"""aiokafka: the asyncio client of Kafka, its records in C."""

from __future__ import annotations

import asyncio
from itertools import cycle, islice
from typing import TYPE_CHECKING

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from tests.bench.clients.job import Window, warm_and_measure
from tests.bench.clients.with_confluent import check_stored

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.bench.clients.job import Job, Report

# Larger batches than the default 16 KiB, and as acknowledged as RocketMQ's: by the one replica.
PRODUCER = {"acks": 1, "linger_ms": 5, "max_batch_size": 131_072}


def send(job: Job) -> Report:
    """``send`` returns once the message is in a batch that will go out; ``flush`` at the end."""
    return asyncio.run(_send(job))


async def _send(job: Job) -> Report:
    bodies = job.bodies()
    async with AIOKafkaProducer(bootstrap_servers=job.address, **PRODUCER) as producer:

        async def send_all(count: int) -> None:
            for body in islice(cycle(bodies), count):
                await producer.send(job.topic, body)
            await producer.flush()

        report = await warm_and_measure(job, send_all)
    check_stored(job, job.warm_up + job.messages)
    return report


def read_each(job: Job) -> Report:
    """``async for message in consumer``."""
    return asyncio.run(_warm_and_read(job, _read_each))


def read_many(job: Job) -> Report:
    """``getmany``."""
    return asyncio.run(_warm_and_read(job, _read_many))


async def _warm_and_read(job: Job, read: Callable[[Job, str, int], Awaitable[Report]]) -> Report:
    await read(job, f"warm-{job.work}", job.warm_up)
    return await read(job, job.work, job.messages)


async def _read_each(job: Job, group: str, count: int) -> Report:
    window = Window(job)
    async with _consumer(job, group) as consumer:
        messages = aiter(consumer)
        body_bytes = len((await anext(messages)).value)
        received = 1
        window.open(received)
        async for message in messages:
            body_bytes += len(message.value)
            received += 1
            if received == count:
                break
        report = window.close(received)
    window.check_bodies(received, body_bytes)
    return report


async def _read_many(job: Job, group: str, count: int) -> Report:
    window = Window(job)
    received = body_bytes = 0
    async with _consumer(job, group) as consumer:
        while received < count:
            for messages in (await consumer.getmany(timeout_ms=10_000)).values():
                if not received:
                    window.open(len(messages))
                received += len(messages)
                body_bytes += sum([len(message.value) for message in messages])
        report = window.close(received)
    window.check_bodies(received, body_bytes)
    return report


def _consumer(job: Job, group: str) -> AIOKafkaConsumer:
    return AIOKafkaConsumer(
        job.topic,
        bootstrap_servers=job.address,
        group_id=f"{group}-{job.topic}",
        auto_offset_reset="earliest",
    )


WORKS = {
    "aiokafka-send": send,
    "aiokafka-for": read_each,
    "aiokafka-getmany": read_many,
}
