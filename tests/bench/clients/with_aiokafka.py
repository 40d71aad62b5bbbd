"""aiokafka: the asyncio client of Kafka, its records in C."""

from __future__ import annotations

import asyncio
from itertools import cycle, islice
from typing import TYPE_CHECKING

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from tests.bench.clients.job import Window, warm_and_measure
from tests.bench.clients.with_confluent import check_stored

if TYPE_CHECKING:
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
    return asyncio.run(_warm_and_read(job))


async def _warm_and_read(job: Job) -> Report:
    await _read_each(job, f"warm-{job.work}", job.warm_up)
    return await _read_each(job, job.work, job.messages)


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
}
