"""confluent-kafka: librdkafka, in C, with a thin layer of Python."""

from __future__ import annotations

from itertools import cycle, islice
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, Producer, TopicPartition

from tests.bench.clients.job import Lost, Window

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.bench.clients.job import Job, Report

# As acknowledged as RocketMQ's. Queues of the default 100,000 messages are empty or full too often
# at 100 B: then the consumer's fetches pause for a second.
PRODUCER = {"acks": 1, "queue.buffering.max.messages": 1_000_000}
CONSUMER = {"auto.offset.reset": "earliest", "queued.min.messages": 1_000_000}
BATCH_MESSAGES = 1000
POLL_EVERY = 10_000
TIMEOUT_S = 10


def send(job: Job) -> Report:
    """``produce`` of one message after the other, ``flush`` at the end."""
    bodies = job.bodies()

    def send_all(producer: Producer, count: int) -> None:
        for number, body in enumerate(islice(cycle(bodies), count)):
            try:
                producer.produce(job.topic, body)
            except BufferError:
                producer.poll(TIMEOUT_S)
                producer.produce(job.topic, body)
            if number % POLL_EVERY == 0:
                producer.poll(0)
        producer.flush()

    return _warm_and_send(job, send_all)


def _warm_and_send(job: Job, send_all: Callable[[Producer, int], None]) -> Report:
    producer, window = Producer({"bootstrap.servers": job.address, **PRODUCER}), Window(job)
    send_all(producer, job.warm_up)
    window.open()
    send_all(producer, job.messages)
    report = window.close(job.messages)
    check_stored(job, job.warm_up + job.messages)
    return report


def read(job: Job) -> Report:
    """``consume(1000)``."""
    _read(job, f"warm-{job.work}", job.warm_up)
    return _read(job, job.work, job.messages)


def _read(job: Job, group: str, count: int) -> Report:
    window = Window(job)
    consumer = _consumer(job, f"{group}-{job.topic}")
    consumer.subscribe([job.topic])
    received = body_bytes = 0
    while received < count:
        messages = consumer.consume(BATCH_MESSAGES, TIMEOUT_S)
        if not messages:
            raise Lost(f"{job}: only {received} messages came")
        if not received:
            window.open(len(messages))
        received += len(messages)
        # The length of a message is that of its body, or of its error.
        body_bytes += sum(map(len, messages))
    report = window.close(received)
    consumer.close()
    window.check_bodies(received, body_bytes)
    return report


def check_stored(job: Job, messages: int) -> None:
    """Raise Lost unless Kafka has so many messages in the job's topic."""
    consumer = _consumer(job, "check")
    partitions = consumer.list_topics(job.topic).topics[job.topic].partitions
    stored = sum(
        consumer.get_watermark_offsets(TopicPartition(job.topic, number))[1]
        for number in partitions
    )
    consumer.close()
    if stored != messages:
        raise Lost(f"{stored} of {messages} messages of {job} were stored")


def _consumer(job: Job, group: str) -> Consumer:
    return Consumer({"bootstrap.servers": job.address, "group.id": group, **CONSUMER})


WORKS = {
    "confluent-produce": send,
    "confluent-consume": read,
}
