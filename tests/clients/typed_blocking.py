"""Deliberate mistakes with the blocking clients: an unused ``type: ignore`` is an error, so mypy
must reject just the lines that have one."""

from __future__ import annotations

from typing import assert_type

from headrace import Message, MessageBatch, MessageQueue, PoppedMessage, ReceivedMessage, SendResult
from headrace.blocking import (
    Admin,
    Consumer,
    Pipeline,
    Producer,
    PullConsumer,
    SimpleConsumer,
    Table,
)


def send(message: Message) -> None:
    Producer(timeout=3)  # type: ignore[call-arg]
    Producer(timeout_ms="3")  # type: ignore[arg-type]
    with Producer("group", nameserver="localhost:9876") as producer:
        assert_type(producer.group, str)
        assert_type(producer.send(message), SendResult)
        producer.send(message, queue=0)  # type: ignore[arg-type]
        producer.send("text")  # type: ignore[arg-type]
        producer.sent(message)  # type: ignore[attr-defined]
        assert_type(producer.send_many([message]), list[SendResult])
        producer.send_many([message], tag="x")  # type: ignore[call-arg]
        with producer.pipeline(max_in_flight=10) as pipeline:
            assert_type(pipeline, Pipeline)
            pipeline.send_all([message])
            pipeline.send()  # type: ignore[call-arg]
        producer.pipeline(in_flight=10)  # type: ignore[call-arg]


def consume() -> None:
    Consumer("group")  # type: ignore[call-arg]
    Consumer("group", "topic", start="middle")  # type: ignore[arg-type]
    with Consumer("group", "topic") as consumer:
        for message in consumer:
            assert_type(message, ReceivedMessage)
        for message in consumer.until(timeout_ms=5000):
            assert_type(message.body, bytes)
        assert_type(consumer.receive(10, timeout_ms=5000), MessageBatch | None)
        consumer.receive(timeout=5)  # type: ignore[call-arg]
        for batch in consumer.batches():
            assert_type(batch.values(), list[bytes])
        assert_type(consumer.assignment, list[MessageQueue])
        consumer.commit("now")  # type: ignore[call-arg]


def take_out() -> None:
    SimpleConsumer("group", "topic", start=5)  # type: ignore[arg-type]
    with SimpleConsumer("group", ["topic"]) as consumer:
        messages = consumer.receive(max=5, wait=1, invisible=10)
        assert_type(messages, list[PoppedMessage])
        consumer.receive(5)  # type: ignore[call-arg]
        consumer.ack(messages)
        messages[0].retry(5)  # type: ignore[call-arg]


def table() -> None:
    Table("users", models=dict)  # type: ignore[call-overload]
    with Table("users") as raw, Table("users", model=Message) as typed:
        assert_type(raw.get("a"), bytes | None)
        assert_type(raw["a"], bytes)
        assert_type(typed["a"], Message)
        assert_type(typed.get_many(["a"]), dict[str, Message])
        assert_type(typed.put("a", typed["a"]), SendResult)
        raw.put("a", "text")  # type: ignore[arg-type]
        for change in typed.changes():
            assert_type(change.value, Message | None)


def pull(queue: MessageQueue) -> None:
    with PullConsumer() as consumer:
        consumer.assign(queue)  # type: ignore[arg-type]
        consumer.seek(queue, 0)
        assert_type(consumer.position(queue), int)
        assert_type(consumer.receive_many(timeout_ms=10), MessageBatch | None)
        consumer.receive_many(timeout_ms=10).values()  # type: ignore[union-attr]
        consumer.offset_at(queue, "today")  # type: ignore[arg-type]


def administer() -> None:
    with Admin() as admin:
        admin.create_topic("topic", queues=4)
        admin.create_topic("topic", queue_count=4)  # type: ignore[call-arg]
        assert_type(admin.topics(), list[str])
        admin.topics().keys()  # type: ignore[attr-defined]
