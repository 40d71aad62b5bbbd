"""Clients that are started in one task and stopped in another, under trio and asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Self

import anyio
import pytest
from anyio.from_thread import start_blocking_portal

from headrace import Admin, Consumer, Message, MessageQueue, Producer, PullConsumer, Table
from headrace.embedded import Embedded
from headrace.errors import ClientClosed, ConfigurationError, RouteNotFound, WrongEventLoop
from headrace.lifecycle import Startable

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


class Slow(Startable):
    """A client whose block takes a while to leave."""

    def __init__(self) -> None:
        self.may_leave = anyio.Event()
        self.is_open = False

    async def __aenter__(self) -> Self:
        self.is_open = True
        return self

    async def __aexit__(self, error_type: type[BaseException] | None = None, *_: object) -> None:
        with anyio.CancelScope(shield=True):
            await self.may_leave.wait()
        self.is_open = False


def test_a_cancelled_stop_can_be_waited_for(run: Run) -> None:
    async def main() -> None:
        client = Slow()
        await client.start()
        for _ in range(2):
            with anyio.move_on_after(0.01) as scope:
                await client.stop()
            assert scope.cancelled_caught
        with pytest.raises(ConfigurationError, match="stop it first"):
            await client.start()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.stop)
            await anyio.wait_all_tasks_blocked()
            client.may_leave.set()
        assert not client.is_open
        await client.stop()
        await client.start()
        await client.stop()

    run(main)


def test_a_start_that_is_cancelled_twice_is_not_forgotten() -> None:
    async def main() -> None:
        client = Slow()
        start = asyncio.create_task(client.start())
        await asyncio.sleep(0)
        for _ in range(2):
            start.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await start
        with pytest.raises(ConfigurationError, match="stop it first"):
            await client.start()
        client.may_leave.set()
        await client.stop()
        await client.start()
        assert client.is_open
        await client.stop()

    asyncio.run(main())


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
                pytest.fail("the other loop has the queue")

        consumer = Consumer(
            group, "Loops", nameserver=mq.nameserver, start="earliest", ordered=True
        )
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


def test_a_client_of_a_loop_that_has_ended_is_closed_and_starts_anew(
    mq: Embedded, run: Run
) -> None:
    producer = Producer(nameserver=mq.nameserver)
    consumer = Consumer(f"anew-{id(run)}", "Anew", nameserver=mq.nameserver, start="earliest")
    pulls = PullConsumer(nameserver=mq.nameserver)

    async def leave_open() -> None:
        await producer.start()
        await producer.send(Message("Anew", b"1"))
        await consumer.start()
        await pulls.start()

    async def use() -> None:
        with pytest.raises(ClientClosed):
            await producer.send(Message("Anew", b"x"))
        with pytest.raises(ClientClosed):
            await consumer.commit()
        with pytest.raises(ClientClosed):
            await pulls.queues("Anew")
        for client in (producer, consumer, pulls):
            await client.start()
        await producer.send(Message("Anew", b"2"))
        assert len(await pulls.queues("Anew")) > 0
        bodies = set()
        async for message in consumer:
            bodies.add(message.body)
            if len(bodies) == 2:
                break
        for client in (producer, consumer, pulls):
            await client.stop()

    run(leave_open)
    run(use)


def test_a_client_of_an_abandoned_loop_is_refused_by_each_call(mq: Embedded) -> None:
    producer = Producer(nameserver=mq.nameserver)
    abandoned = asyncio.new_event_loop()
    abandoned.run_until_complete(producer.start())

    async def use() -> None:
        for call in (producer.start, producer.stop, partial(producer.send, Message("A", b"x"))):
            with pytest.raises(WrongEventLoop, match="this Producer was opened on another"):
                await call()

    try:
        asyncio.run(use())
    finally:
        abandoned.run_until_complete(producer.stop())
        abandoned.close()


MESSAGE = Message("Elsewhere", b"x", key="k")
QUEUE = MessageQueue(topic="Elsewhere", broker_name="broker-a", queue_id=0)


class Clients:
    """One client of each kind, open on the event loop of a thread."""

    def __init__(self, nameserver: str) -> None:
        self.producer = Producer("g", nameserver=nameserver)
        self.consumer = Consumer("g", "Elsewhere", nameserver=nameserver)
        self.pulls = PullConsumer("g", nameserver=nameserver)
        self.table: Table[bytes] = Table("Elsewhere", nameserver=nameserver)
        self.admin = Admin(nameserver=nameserver)

    async def start(self) -> None:
        await self.admin.start()
        await self.admin.create_topic("Elsewhere", queues=1)
        for client in (self.producer, self.consumer, self.pulls, self.table):
            await client.start()
        self.pipeline = self.producer.pipeline()
        await self.pipeline.start()
        self.transaction = self.producer.transaction("Elsewhere")

    async def stop(self) -> None:
        await self.admin.delete_topic("Elsewhere")
        clients = (self.pipeline, self.table, self.pulls, self.consumer, self.producer, self.admin)
        for client in clients:
            await client.stop()


# Calls of each kind of client that is open on another event loop.
FROM_ELSEWHERE: dict[str, Callable[[Clients], Awaitable[Any]]] = {
    "Producer.send": lambda its: its.producer.send(MESSAGE),
    "Producer.send_many": lambda its: its.producer.send_many([MESSAGE]),
    "Producer.send_oneway": lambda its: its.producer.send_oneway(MESSAGE),
    "Producer.queues": lambda its: its.producer.queues("Elsewhere"),
    "Producer.pipeline": lambda its: called(its.producer.pipeline),
    "Producer.transaction": lambda its: called(its.producer.transaction, "Elsewhere"),
    "Pipeline.send": lambda its: its.pipeline.send(MESSAGE),
    "Pipeline.start": lambda its: its.pipeline.start(),
    "Transaction.send": lambda its: its.transaction.send(MESSAGE),
    "Consumer.commit": lambda its: its.consumer.commit(),
    "Consumer.stop": lambda its: its.consumer.stop(),
    "Consumer.batches": lambda its: called(its.consumer.batches),
    "Consumer.__aiter__": lambda its: called(its.consumer.__aiter__),
    "PullConsumer.queues": lambda its: its.pulls.queues("Elsewhere"),
    "PullConsumer.assign": lambda its: its.pulls.assign([QUEUE]),
    "PullConsumer.receive_many": lambda its: its.pulls.receive_many(),
    "PullConsumer.commit": lambda its: its.pulls.commit(),
    "PullConsumer.committed": lambda its: its.pulls.committed(QUEUE),
    "PullConsumer.max_offset": lambda its: its.pulls.max_offset(QUEUE),
    "Table.get": lambda its: its.table.get("k"),
    "Table.put": lambda its: its.table.put("k", b"x"),
    "Table.delete": lambda its: its.table.delete("k"),
    "Table.synced": lambda its: its.table.synced(),
    "Table.changes": lambda its: called(its.table.changes),
    "Admin.topics": lambda its: its.admin.topics(),
    "Admin.topic": lambda its: its.admin.topic("Elsewhere"),
    "Admin.lag": lambda its: its.admin.lag("g", "Elsewhere"),
}


async def called(function: Callable[..., object], *arguments: object) -> None:
    function(*arguments)


@pytest.fixture(scope="module", params=["trio", "asyncio"])
def elsewhere(mq: Embedded, request: pytest.FixtureRequest) -> Iterator[Clients]:
    with start_blocking_portal(request.param) as portal:
        clients = Clients(mq.nameserver)
        portal.call(clients.start)
        yield clients
        portal.call(clients.stop)


@pytest.mark.parametrize("call", FROM_ELSEWHERE)
def test_a_client_of_another_loop_is_refused_by_name(
    elsewhere: Clients, run: Run, call: str
) -> None:
    async def main() -> None:
        with pytest.raises(WrongEventLoop) as raised:
            await FROM_ELSEWHERE[call](elsewhere)
        assert "was opened on another event loop" in str(raised.value)

    run(main)


def test_any_thread_reads_the_copy_of_a_table(mq: Embedded) -> None:
    async def main() -> None:
        async with Admin(nameserver=mq.nameserver) as admin:
            await admin.create_topic("Threads", queues=1)
        async with Table("Threads", nameserver=mq.nameserver) as table:
            await table.put("k", b"v")
            await table.synced()
            assert await asyncio.to_thread(table.__getitem__, "k") == b"v"

    asyncio.run(main())
