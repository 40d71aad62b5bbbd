"""Groups with members of both kinds: Java's official client and ours share all queues."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import chain

import pytest
import trio

import headrace
from headrace import Admin, Consumer, Message, Producer
from headrace.admin.group_view import GroupView
from headrace_protocol.drivers.address import local_ip
from tests.conformance.console import Console
from tests.conformance.peer import TIMEOUT_MS

QUEUES = 8
TIMEOUT_S = 120
PEERS = ["headrace", "apache"]

pytestmark = [pytest.mark.conformance, pytest.mark.slow]


@asynccontextmanager
async def broker(peer: str, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """The nameserver of a broker: ours in this process, or Apache's."""
    if peer == "apache":
        yield request.getfixturevalue("nameserver")
        return
    async with headrace.embedded() as mq:
        yield mq.nameserver


class Group:
    """A group with members of both kinds; each has its queues and messages by client id."""

    def __init__(self, nameserver: str, console: Console, strategy: str) -> None:
        number = random.randrange(1 << 32)
        self.nameserver = nameserver
        self.name, self.topic = f"G_{number}", f"T_{number}"
        self._console = console
        self._strategy = strategy
        self._javas: list[str] = []
        self._ours: dict[Consumer, list[str]] = {}

    async def join_java(self) -> str:
        join = partial(self._console.join, self.nameserver, self.name, self.topic, self._strategy)
        client_id = await trio.to_thread.run_sync(join)
        self._javas.append(client_id)
        return client_id

    async def leave_java(self, client_id: str) -> None:
        self._javas.remove(client_id)
        await trio.to_thread.run_sync(self._console.leave, client_id)

    @asynccontextmanager
    async def ours(self) -> AsyncIterator[None]:
        """A member of ours that reads all the time."""
        bodies: list[str] = []

        async def read() -> None:
            async for batch in consumer.batches():
                bodies.extend(message.body.decode() for message in batch)

        async with (
            Consumer(
                self.name, self.topic, nameserver=self.nameserver, strategy=self._strategy
            ) as consumer,
            trio.open_nursery() as nursery,
        ):
            self._ours[consumer] = bodies
            nursery.start_soon(read)
            yield
            del self._ours[consumer]
            nursery.cancel_scope.cancel()

    async def shares(self, admin: Admin) -> list[list[int]]:
        """The queue ids of each member."""
        queues = [list(consumer.assignment) for consumer in self._ours]
        for client_id in self._javas:
            report = await admin.running_info(self.name, client_id, "broker-a")
            queues.append(list(report.mq_table) if report else [])
        return [[each.queue_id for each in mine if each.topic == self.topic] for mine in queues]

    async def until_shared(self, admin: Admin) -> None:
        """Wait until every queue has one member, and every member a queue."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            shares = await self.shares(admin)
            if all(shares) and sorted(chain.from_iterable(shares)) == list(range(QUEUES)):
                return
            assert time.monotonic() < deadline_s, shares
            await trio.sleep(0.05)

    async def exchange(self, producer: Producer, name: str) -> None:
        """Send messages of this name, and wait until each has reached one member."""
        bodies = [f"{name}-{number}" for number in range(100)]
        for body in bodies:  # to all queues in turn
            await producer.send(Message(self.topic, body.encode()))
        found: list[str] = []
        deadline_s = time.monotonic() + TIMEOUT_S
        while len(found) < len(bodies):
            assert time.monotonic() < deadline_s, found
            await trio.sleep(0.05)
            found = [body for body in await self._received() if body.startswith(f"{name}-")]
        assert sorted(found) == sorted(bodies)

    async def _received(self) -> list[str]:
        found = [body for bodies in self._ours.values() for body in bodies]
        for client_id in self._javas:
            found += await trio.to_thread.run_sync(self._console.received, client_id)
        return found


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("strategy", ["averagely", "averagely_by_circle"])
async def test_a_mixed_group_shares_all_queues(
    peer: str, strategy: str, console: Console, request: pytest.FixtureRequest
) -> None:
    async with AsyncExitStack() as stack:
        nameserver = await stack.enter_async_context(broker(peer, request))
        admin = await stack.enter_async_context(Admin(nameserver=nameserver))
        producer = await stack.enter_async_context(
            Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS)
        )
        group = Group(nameserver, console, strategy)
        await admin.create_topic(group.topic, queues=QUEUES)
        java = [await group.join_java()]
        await stack.enter_async_context(group.ours())
        await group.until_shared(admin)
        await group.exchange(producer, "first")
        java.append(await group.join_java())
        async with group.ours():
            await group.until_shared(admin)
            assert sorted(map(len, await group.shares(admin))) == [2, 2, 2, 2]
            await group.exchange(producer, "second")
            rows = (await GroupView.of(admin, group.name, [])).rows()
            assert [row["strategy"] for row in rows["members"]] == [strategy] * 4
            owners = {row["owner"] for row in rows["queues"] if row["topic"] == group.topic}
            assert owners == {row["member"] for row in rows["members"]}
        await group.leave_java(java[0])
        await group.until_shared(admin)
        members = await admin.members(group.name)
        assert len(members["broker-a"].connection_set) == 2
        await group.leave_java(java[1])


@pytest.mark.parametrize("peer", PEERS)
async def test_a_broadcasting_consumer_resumes_where_javas_stopped(
    peer: str, console: Console, request: pytest.FixtureRequest
) -> None:
    home = console.home / ".rocketmq_offsets"
    async with (
        broker(peer, request) as nameserver,
        Admin(nameserver=nameserver) as admin,
        Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer,
    ):
        group = Group(nameserver, console, "averagely")
        await admin.create_topic(group.topic, queues=1)

        async def read_java(count: int) -> list[str]:
            words = (nameserver, group.name, group.topic, "averagely", local_ip())
            client_id = await trio.to_thread.run_sync(console.join, *words)
            found: list[str] = []
            with trio.fail_after(TIMEOUT_S):
                while len(found) < count:
                    await trio.sleep(0.05)
                    found = await trio.to_thread.run_sync(console.received, client_id)
            await trio.to_thread.run_sync(console.leave, client_id)
            return found

        async def read_ours() -> str:
            async with Consumer(
                group.name, group.topic, broadcast=True, offsets_dir=home, nameserver=nameserver
            ) as consumer:
                async for message in consumer:
                    return message.body.decode()
            raise AssertionError("a consumer's iterator ended")

        await producer.send(Message(group.topic, b"1"))
        assert await read_java(1) == ["1"]
        await producer.send(Message(group.topic, b"2"))
        assert await read_ours() == "2"
        await producer.send(Message(group.topic, b"3"))
        assert await read_java(1) == ["3"]
