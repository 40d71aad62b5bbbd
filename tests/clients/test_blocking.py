"""The clients without an event loop, against a real broker."""

# ruff: noqa: PT012 - what blocks raise after a few statements is the point here

from __future__ import annotations

import contextlib
import inspect
import signal
import threading
import time
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest

import headrace
from headrace import Message, blocking
from headrace.errors import ClientClosed, ConfigurationError, InvalidMessage, RouteNotFound
from headrace.producer.pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.embedded import Embedded


@pytest.fixture(scope="module")
def mq() -> Iterator[Embedded]:
    with headrace.embedded() as running:
        yield running


def options(mq: Embedded) -> dict[str, Any]:
    return {"nameserver": mq.nameserver}


def produce(mq: Embedded, topic: str, count: int) -> None:
    with blocking.Admin(**options(mq)) as admin:
        admin.create_topic(topic, queues=2)
    with blocking.Producer(**options(mq)) as producer, producer.pipeline() as pipeline:
        pipeline.send_all(Message(topic, b"%d" % number) for number in range(count))


def test_sending_and_consuming(mq: Embedded) -> None:
    with blocking.Producer(**options(mq)) as producer:
        assert producer.group == "headrace_producer"
        result = producer.send(Message("Plain", b"hello", key="k"))
        assert result.queue in producer.queues("Plain")
        producer.send_many([Message("Plain", b"again", key="k")])
    with blocking.Consumer("g", "Plain", start="earliest", **options(mq)) as consumer:
        assert [message.body for message in islice(consumer, 2)] == [b"hello", b"again"]


def test_what_was_processed_does_not_come_again(mq: Embedded) -> None:
    produce(mq, "Once", 100)
    numbers = []
    for _ in range(4):
        with blocking.Consumer("g", "Once", start="earliest", **options(mq)) as consumer:
            for message in consumer:
                numbers.append(int(message.body))
                if len(numbers) % 25 == 0:
                    break
    assert sorted(numbers) == list(range(100))


def test_a_message_whose_handler_failed_comes_again(mq: Embedded) -> None:
    produce(mq, "Failed", 3)
    with (
        pytest.raises(KeyError),
        blocking.Consumer("g", "Failed", start="earliest", **options(mq)) as consumer,
    ):
        for message in consumer:
            first = message.body
            raise KeyError
    with blocking.Consumer("g", "Failed", start="earliest", **options(mq)) as consumer:
        assert first in {message.body for message in islice(consumer, 3)}


def test_batches_and_commits(mq: Embedded) -> None:
    produce(mq, "Batches", 50)
    count = 0
    with blocking.Consumer("g", "Batches", start="earliest", **options(mq)) as consumer:
        assert sum(queue.topic == "Batches" for queue in consumer.assignment) == 2
        for batch in consumer.batches(max_messages=10):
            assert len(batch) <= 10
            count += len(batch)
            if count == 50:
                break
        consumer.commit()
    with blocking.Admin(**options(mq)) as admin:
        assert sum(queue.lag for queue in admin.lag("g", "Batches")) == 0


def test_queues_by_hand(mq: Embedded) -> None:
    produce(mq, "Pull", 20)
    with blocking.PullConsumer(**options(mq)) as consumer:
        queues = consumer.queues("Pull")
        consumer.assign(queues[:1])
        count = len(consumer.receive_many() or ())
        consumer.seek(queues[0], 0)
        assert len(consumer.receive_many() or ()) == count == consumer.max_offset(queues[0])
        assert consumer.receive_many(timeout_ms=1) is None


def test_until_ends_a_loop_after_its_time(mq: Embedded) -> None:
    produce(mq, "Until", 10)
    with blocking.Consumer("g", "Until", start="earliest", **options(mq)) as consumer:
        numbers = [int(message.body) for message in consumer.until(timeout_ms=300)]
        assert sorted(numbers) == list(range(10))
        assert list(consumer.until(timeout_ms=0)) == []
        with pytest.raises(ConfigurationError, match="timeout_ms=-1"):
            next(consumer.until(timeout_ms=-1))
    with blocking.Admin(**options(mq)) as admin:
        assert sum(queue.lag for queue in admin.lag("g", "Until")) == 0


def test_until_hands_out_nothing_after_its_time(
    mq: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(mq, "Late", 10)
    with blocking.Consumer("g", "Late", start="earliest", **options(mq)) as consumer:
        clock = [0.0]
        monkeypatch.setattr(time, "monotonic", lambda: clock[0])
        numbers = []
        for message in consumer.until(timeout_ms=60_000):
            numbers.append(int(message.body))
            clock[0] += 20
        assert len(numbers) == 3
        # A new loop resumes where the last one ended.
        numbers += [int(message.body) for message in islice(consumer, 7)]
    assert sorted(numbers) == list(range(10))


def test_receive_has_a_limit_in_messages_and_in_time(mq: Embedded) -> None:
    produce(mq, "Receive", 10)
    numbers: list[int] = []
    with blocking.Consumer("g", "Receive", start="earliest", **options(mq)) as consumer:
        while batch := consumer.receive(3, timeout_ms=300):
            assert 1 <= len(batch) <= 3
            numbers += map(int, batch.values())
        assert sorted(numbers) == list(range(10))
    with blocking.Admin(**options(mq)) as admin:
        assert sum(queue.lag for queue in admin.lag("g", "Receive")) == 0


PAIRS: list[tuple[type, type]] = [
    (blocking.Producer, headrace.Producer),
    (blocking.Pipeline, Pipeline),
    (blocking.Consumer, headrace.Consumer),
    (blocking.PullConsumer, headrace.PullConsumer),
    (blocking.Admin, headrace.Admin),
]


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=[kind.__name__ for kind, _ in PAIRS])
def test_a_blocking_client_has_all_that_the_async_one_has(ours: type, theirs: type) -> None:
    # Those are for tasks of an event loop, and for its connections.
    assert public(theirs) - public(ours) <= {"start", "stop", "answered"}
    for name in public(theirs) & public(ours):
        theirs_one, ours_one = getattr(theirs, name), getattr(ours, name)
        assert inspect.getdoc(ours_one), name
        if callable(theirs_one):
            expected = inspect.signature(theirs_one).parameters
            assert inspect.signature(ours_one).parameters.keys() == expected.keys(), name
    if ours is not blocking.Pipeline:
        assert inspect.signature(ours) == inspect.signature(theirs)


def test_messages_by_the_thousand(mq: Embedded) -> None:
    produce(mq, "Many", 5000)
    with blocking.PullConsumer(**options(mq)) as consumer:
        consumer.assign(consumer.queues("Many"))
        first = consumer.receive_many(max_messages=10)
        assert first is not None
        assert len(first) == len(first.values()) == 10
        assert consumer.position(first.queue) == 10
    with blocking.Consumer("g", "Many", start="earliest", **options(mq)) as consumer:
        numbers = [int(message.body) for message in islice(consumer, 5000)]
    assert sorted(numbers) == list(range(5000))
    with blocking.Admin(**options(mq)) as admin:
        # The last message is at hand when the block is left without an exception.
        assert sum(queue.lag for queue in admin.lag("g", "Many")) == 0


class Interrupted(BaseException):
    """As the handler of a signal raises it."""


@contextlib.contextmanager
def interrupted() -> Iterator[None]:
    """The main thread is, a moment later, wherever it waits."""

    def interrupt(*_: Any) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGALRM))
    timer.start()
    try:
        with pytest.raises(Interrupted):
            yield
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGALRM, before)


def test_the_block_can_be_left_after_an_interrupted_call(mq: Embedded) -> None:
    produce(mq, "Interrupted", 0)
    with blocking.PullConsumer(**options(mq)) as consumer:
        consumer.assign(consumer.queues("Interrupted"))
        with interrupted():
            consumer.receive_many()
    with pytest.raises(ClientClosed):
        consumer.receive_many()


def test_a_client_has_one_block_at_a_time(mq: Embedded) -> None:
    with blocking.Producer(**options(mq)) as producer:
        with pytest.raises(ConfigurationError, match="already open"):
            producer.__enter__()
        pipeline = producer.pipeline()
        with pytest.raises(ClientClosed, match="Pipeline"):
            pipeline.send(Message("Plain", b"x"))
        with pipeline:
            pipeline.send(Message("Plain", b"x"))
    producer.__exit__(None, None, None)
    with pytest.raises(ClientClosed, match="Producer"):
        pipeline.send(Message("Plain", b"x"))


def test_errors_are_the_async_clients(mq: Embedded) -> None:
    with blocking.Producer(**options(mq)) as producer:
        with pytest.raises(InvalidMessage):
            producer.send(Message("T", b""))
        with pytest.raises(InvalidMessage), producer.pipeline() as pipeline:
            pipeline.send(Message("T", b""))
    with pytest.raises(ClientClosed):
        producer.send(Message("T", b"x"))
    with (
        pytest.raises(RouteNotFound),
        blocking.Consumer("g", "Missing", **options(mq)),
    ):
        pass
    with pytest.raises(AttributeError):
        _ = producer.nonsense  # type: ignore[attr-defined]
