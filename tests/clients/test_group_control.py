"""Members that pause and move within their queues, and hear which queues they get and lose."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock

import headrace
from headrace import Message, MessageQueue, blocking
from headrace.embedded import Embedded
from headrace.errors import ClientClosed, ConfigurationError, WrongEventLoop
from tests.support.fixtures import in_memory
from tests.support.until import until
from tests.support.verbs import lag_of, take

pytestmark = pytest.mark.slow  # the mock clock waits for the broker's threads


mq = pytest.fixture(in_memory)


async def produce(mq: Embedded, count: int, *, queues: int = 1) -> None:
    """Numbered messages, each queue in turn."""
    async with mq.admin() as admin:
        await admin.create_topic("T", queues=queues)
    async with mq.producer() as producer:
        targets = await producer.queues("T")
        for number in range(count):
            message = Message("T", b"%d" % number)
            await producer.send(message, queue=targets[number % queues])


@pytest.mark.parametrize("ordered", [False, True])
async def test_a_paused_member_gets_nothing_until_it_resumes(
    mq: Embedded, autojump_clock: MockClock, *, ordered: bool
) -> None:
    await produce(mq, 10)
    numbers = []
    async with mq.consumer("g", "T", ordered=ordered) as consumer:
        async for message in consumer.until(timeout_ms=60_000):
            numbers.append(int(message.body))
            if len(numbers) == 3:
                consumer.pause()
        assert numbers == [0, 1, 2]
        assert await consumer.receive(timeout_ms=60_000) is None
        await consumer.commit()
        assert await lag_of(mq) == 7, "the third message was processed when the next was asked for"
        consumer.resume()
        assert await take(consumer, 7) == list(range(3, 10))
    assert await lag_of(mq) == 0


async def test_other_queues_continue_while_one_is_paused(
    mq: Embedded, autojump_clock: object
) -> None:
    await produce(mq, 20, queues=2)
    async with mq.consumer("g", "T") as consumer:
        first, second = [queue for queue in consumer.assignment if queue.topic == "T"]
        consumer.pause([first])
        found = [message async for message in consumer.until(timeout_ms=5000)]
        assert {message.queue for message in found} == {second}
        assert len(found) == 10
        consumer.resume([first])
        assert sorted(await take(consumer, 10)) == list(range(0, 20, 2))
        consumer.pause([second])
    assert await lag_of(mq) == 0


async def test_resume_leaves_the_delay_of_a_retry(mq: Embedded, autojump_clock: object) -> None:
    await produce(mq, 1)
    async with mq.consumer("g", "T", ordered=True) as consumer:
        async for message in consumer:
            await message.retry(after=20)
            break
        consumer.pause()
        consumer.resume()
        assert await consumer.receive(timeout_ms=15_000) is None
        assert await consumer.receive(timeout_ms=10_000) is not None


async def test_a_member_moves_within_its_queue(mq: Embedded, autojump_clock: object) -> None:
    await produce(mq, 10)
    async with mq.consumer("g", "T") as consumer:
        queue = next(queue for queue in consumer.assignment if queue.topic == "T")
        assert await take(consumer, 5) == list(range(5))
        consumer.seek(queue, 8)
        assert await take(consumer, 2) == [8, 9]
        consumer.seek(queue, 3)
        assert await take(consumer, 1) == [3]
        await consumer.commit()
        assert await lag_of(mq) == 6, "progress moves backwards, too"
        other = MessageQueue("T", "broker-a", 7)
        for call in (lambda: consumer.seek(other, 0), lambda: consumer.pause([other])):
            with pytest.raises(ConfigurationError, match="not assigned to this member"):
                call()


async def test_a_wrong_place_is_refused_in_the_call(mq: Embedded, autojump_clock: object) -> None:
    await produce(mq, 10)
    async with mq.consumer("g", "T") as consumer:
        queue = next(queue for queue in consumer.assignment if queue.topic == "T")
        for offset in ("5", 5.0, None, 2**63):
            with pytest.raises(ConfigurationError, match="offset="):
                consumer.seek(queue, offset)  # type: ignore[arg-type]
        for wrong in ("T", ["T"], 0):
            with pytest.raises(ConfigurationError, match="give a MessageQueue"):
                consumer.pause([wrong])  # type: ignore[list-item]
        consumer.seek(queue, np.int64(8))  # type: ignore[arg-type]
        assert await take(consumer, 2) == [8, 9]


async def test_another_loop_cannot_steer_a_member(mq: Embedded) -> None:
    await produce(mq, 1)
    async with mq.consumer("g", "T") as consumer:
        queue = consumer.assignment[-1]
        for call in (consumer.pause, consumer.resume, partial(consumer.seek, queue, 0)):
            with pytest.raises(WrongEventLoop):
                await trio.to_thread.run_sync(call)


async def test_members_hear_of_the_queues_that_they_get_and_lose(
    mq: Embedded, autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    await produce(mq, 8, queues=4)
    events: list[tuple[str, str, int]] = []

    async def assigned(queue: MessageQueue) -> None:
        await trio.lowlevel.checkpoint()
        events.append(("one", "+", queue.queue_id))

    def revoked(queue: MessageQueue) -> None:
        events.append(("one", "-", queue.queue_id))
        raise KeyError("a bug of the program")

    async with mq.consumer("g", "T", on_assigned=assigned, on_revoked=revoked) as one:
        assert events == [("one", "+", number) for number in range(4)]
        await take(one, 8)
        await one.commit()
        del events[:]
        async with mq.consumer(
            "g", "T", on_assigned=lambda queue: events.append(("two", "+", queue.queue_id))
        ):
            await until(lambda: len(events) >= 4)
            lost = {number for who, what, number in events if (who, what) == ("one", "-")}
            assert {number for who, _, number in events if who == "two"} == lost
            assert len(lost) == 2
        del events[:]
    assert len([event for event in events if event[1] == "-"]) >= 2
    assert "on_revoked failed for MessageQueue(topic='T'" in caplog.text
    assert await lag_of(mq) == 0


async def test_on_assigned_may_choose_the_start(mq: Embedded, autojump_clock: object) -> None:
    await produce(mq, 10)

    def move(queue: MessageQueue) -> None:
        consumer.seek(queue, 7)

    consumer = mq.consumer("g", "T", on_assigned=move)
    async with consumer:
        assert await take(consumer, 3) == [7, 8, 9]
    with pytest.raises(ConfigurationError, match="on_revoked='no'"):
        mq.consumer("g", "T", on_revoked="no")


@pytest.fixture
def threaded() -> Iterator[Embedded]:
    with headrace.embedded() as running:
        yield running


def test_the_functions_of_a_blocking_member_may_call_it(threaded: Embedded) -> None:
    where: dict[str, Any] = {"nameserver": threaded.nameserver}
    with blocking.Admin(**where) as admin:
        admin.create_topic("T", queues=1)
    with blocking.Producer(**where) as producer:
        producer.send_many([b"%d" % number for number in range(10)], topic="T")
    lost: list[MessageQueue] = []
    consumer = blocking.Consumer(
        "g",
        "T",
        on_assigned=lambda queue: consumer.seek(queue, 8),
        on_revoked=lost.append,
        **where,
    )
    with consumer:
        assert [message.body for message in consumer.until(timeout_ms=500)] == [b"8", b"9"]
        consumer.seek(consumer.assignment[-1], 9)
        consumer.pause()
        assert consumer.receive(timeout_ms=100) is None
        consumer.resume()
        batch = consumer.receive(timeout_ms=10_000)
        assert batch is not None
        assert batch.values() == [b"9"]
    assert [queue.topic for queue in lost] == ["T"]


def test_a_function_may_call_a_blocking_member_that_closes(threaded: Embedded) -> None:
    where: dict[str, Any] = {"nameserver": threaded.nameserver}
    with blocking.Admin(**where) as admin:
        admin.create_topic("C", queues=1)
    failures: list[Any] = []

    def revoked(_queue: MessageQueue) -> None:
        consumer.commit()
        failures.append(consumer.failures())
        with pytest.raises(ConfigurationError, match="already open"):
            consumer.start()
        consumer.stop()

    consumer = blocking.Consumer("g", "C", on_revoked=revoked, **where)
    with consumer:
        pass
    assert failures == [{}]
    with pytest.raises(ClientClosed):
        consumer.commit()
