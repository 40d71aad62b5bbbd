"""Clients that are started in one task and stopped in another, under trio and asyncio."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import headrace
from headrace import Consumer, Message, Producer, PullConsumer
from headrace.errors import ClientClosed, ConfigurationError, RouteNotFound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.embedded import Embedded


@pytest.fixture(scope="module")
def mq() -> Iterator[Embedded]:
    with headrace.embedded() as running:
        yield running


Run = Callable[[Callable[[], Awaitable[None]]], None]


@pytest.fixture(params=["trio", "asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs an async function in one of both."""

    async def limited(function: Callable[[], Awaitable[None]]) -> None:
        with anyio.fail_after(30):
            await function()

    def run(function: Callable[[], Awaitable[None]]) -> None:
        anyio.run(limited, function, backend=request.param)

    return run


async def in_a_task(function: Callable[..., Coroutine[Any, Any, object]], *arguments: Any) -> None:
    """Call a function in a task that then ends."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(function, *arguments)


def test_start_and_stop_may_be_in_different_tasks(mq: Embedded, run: Run) -> None:
    async def main() -> None:
        producer = Producer(nameserver=mq.nameserver)
        await in_a_task(producer.start)
        await producer.send(Message("Started", b"1"))
        pipeline = producer.pipeline()
        await in_a_task(pipeline.start)
        await pipeline.send(Message("Started", b"2"))
        await in_a_task(pipeline.stop)
        consumer = PullConsumer(nameserver=mq.nameserver)
        await in_a_task(consumer.start)
        queues = await consumer.queues("Started")
        assert sum([await consumer.max_offset(queue) for queue in queues]) >= 2
        await in_a_task(consumer.stop)
        await in_a_task(producer.stop)
        with pytest.raises(ClientClosed):
            await producer.send(Message("Started", b"3"))
        await producer.stop()
        await in_a_task(producer.start)
        await producer.send(Message("Started", b"4"))
        await producer.stop()

    run(main)


def test_a_client_is_started_once_at_a_time(mq: Embedded, run: Run) -> None:
    async def main() -> None:
        producer = Producer(nameserver=mq.nameserver)
        await producer.start()
        with pytest.raises(ConfigurationError, match="already started"):
            await producer.start()
        await producer.send(Message("Once", b"x"))
        await producer.stop()

    run(main)


def test_an_error_of_the_start_is_raised_where_it_is_awaited(mq: Embedded, run: Run) -> None:
    async def main() -> None:
        consumer = Consumer("g", "Nowhere", nameserver=mq.nameserver)
        for _ in range(2):
            with pytest.raises(RouteNotFound):
                await consumer.start()

    run(main)


def test_a_cancelled_start_leaves_nothing_open(mq: Embedded, run: Run) -> None:
    async def main() -> None:
        producer = Producer(nameserver=mq.nameserver)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await producer.start()
        assert scope.cancelled_caught
        await producer.start()
        await producer.send(Message("Cancelled", b"x"))
        await producer.stop()

    run(main)


def test_stopping_a_consumer_lets_its_loops_finish(mq: Embedded, run: Run) -> None:
    async def main() -> None:
        async with Producer(nameserver=mq.nameserver) as producer:
            await producer.send_many([b"%d" % n for n in range(10)], topic="Loops")
        numbers: list[int] = []
        at_third, go_on = anyio.Event(), anyio.Event()

        async def work(consumer: Consumer) -> None:
            async for message in consumer:
                numbers.append(int(message.body))
                if len(numbers) == 3:
                    at_third.set()
                    await go_on.wait()

        async def idle(consumer: Consumer) -> None:
            async for _ in consumer.batches():
                pytest.fail("the other loop has all messages")

        consumer = Consumer(group, "Loops", nameserver=mq.nameserver, start="earliest")
        await consumer.start()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work, consumer)
            await at_third.wait()
            tasks.start_soon(idle, consumer)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(consumer.stop)
            await anyio.wait_all_tasks_blocked()
            go_on.set()
        assert len(numbers) == 3
        async with Consumer(group, "Loops", nameserver=mq.nameserver) as again:
            async for message in again:
                numbers.append(int(message.body))
                if len(numbers) == 10:
                    break
        assert sorted(numbers) == list(range(10)), "the third counts as processed"

    group = f"loops-{id(run)}"
    run(main)


def test_what_is_left_open_ends_with_the_event_loop(mq: Embedded, run: Run) -> None:
    async def main() -> None:
        await Producer(nameserver=mq.nameserver).start()

    run(main)


def test_a_blocks_client_is_unaffected_by_stop(mq: Embedded, run: Run) -> None:
    async def main() -> None:
        async with Producer(nameserver=mq.nameserver) as producer:
            await producer.stop()
            await producer.send(Message("Block", b"x"))

    run(main)
