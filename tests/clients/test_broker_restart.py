"""Producers of every kind send while their broker restarts: nothing fails or is lost."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from headrace import Message, MessageQueue, Producer, PullConsumer, blocking
from headrace.errors import RouteNotFound
from headrace_broker.config import BrokerConfig
from headrace_broker.server import Broker
from headrace_daemon.network import TcpNetwork
from headrace_nameserver.config import NameServerConfig
from headrace_nameserver.server import NameServer

HOST = "127.0.0.1"
TOPIC = "Orders"


class Daemons:
    """A nameserver and a broker that stop and start at their addresses."""

    def __init__(self, nursery: trio.Nursery, folder: Path) -> None:
        self._nursery = nursery
        self._folder = folder
        self._scopes: dict[str, trio.CancelScope] = {}
        self._ended: dict[str, trio.Event] = {}
        self.addresses: dict[str, str] = {}

    async def start(self, name: str) -> None:
        port = int(self.addresses.get(name, ":0").rpartition(":")[2])
        run = (self._broker if name == "broker" else self._nameserver)(port)
        self._ended[name] = trio.Event()
        self.addresses[name] = await self._nursery.start(self._run, name, run)

    def _nameserver(self, port: int) -> Callable[..., Coroutine[Any, Any, None]]:
        config = NameServerConfig(bind_address=HOST, anonymous_access="allow", listen_port=port)
        return NameServer(config, TcpNetwork()).run

    def _broker(self, port: int) -> Callable[..., Coroutine[Any, Any, None]]:
        config = BrokerConfig(
            broker_name="a",
            bind_address=HOST,
            anonymous_access="allow",
            listen_port=port,
            fast_listen_port=0,
            namesrv_addr=self.addresses["nameserver"],
            store_path_root_dir=self._folder,
            mapped_file_size_commit_log=1 << 24,
            mapped_file_size_consume_queue=200_000,
            max_hash_slot_num=2000,
            max_index_num=8000,
        )
        return Broker(config, TcpNetwork()).run

    async def _run(
        self,
        name: str,
        run: Callable[..., Coroutine[Any, Any, None]],
        *,
        task_status: trio.TaskStatus[str],
    ) -> None:
        with trio.CancelScope() as self._scopes[name]:
            await run(task_status=task_status)
        self._ended[name].set()

    async def stop(self, name: str) -> None:
        self._scopes[name].cancel()
        await self._ended[name].wait()


@asynccontextmanager
async def daemons(folder: Path) -> AsyncIterator[Daemons]:
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            running = Daemons(nursery, folder)
            await running.start("nameserver")
            await running.start("broker")
            yield running
            nursery.cancel_scope.cancel()


class Sending:
    """The messages that one producer has sent so far; it continues until ``enough`` is set."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self.enough = threading.Event()

    def next(self) -> Message:
        self.count += 1
        return Message(TOPIC, b"%s %d" % (self.name.encode(), self.count), key=self.name)

    async def wait_for_more(self) -> None:
        """Wait until some of this producer's messages are stored from now on."""
        goal = self.count + 3
        while self.count < goal:
            await trio.lowlevel.checkpoint()


async def send_singly(address: str, sending: Sending) -> None:
    async with Producer(nameserver=address) as producer:
        while not sending.enough.is_set():
            await producer.send(sending.next())


async def send_in_pipeline(address: str, sending: Sending) -> None:
    async with Producer(nameserver=address) as producer, producer.pipeline(max_in_flight=50) as p:
        while not sending.enough.is_set():
            await p.send(sending.next())


async def send_many(address: str, sending: Sending) -> None:
    async with Producer(nameserver=address) as producer:
        while not sending.enough.is_set():
            await producer.send_many([sending.next() for _ in range(10)])


async def send_blocking(address: str, sending: Sending) -> None:
    def send() -> None:
        with blocking.Producer(nameserver=address) as producer:
            while not sending.enough.is_set():
                producer.send(sending.next())

    await trio.to_thread.run_sync(send)


KINDS = [send_singly, send_in_pipeline, send_many, send_blocking]


async def queues_of(consumer: PullConsumer) -> Sequence[MessageQueue]:
    """The topic's queues, as soon as the broker has registered at a nameserver that restarted."""
    while True:
        try:
            return await consumer.queues(TOPIC)
        except RouteNotFound as error:
            if not error.retryable:
                raise


async def stored_bodies(address: str) -> list[bytes]:
    async with PullConsumer(nameserver=address) as consumer:
        queues = await queues_of(consumer)
        remaining = sum([await consumer.max_offset(queue) for queue in queues])
        await consumer.assign(queues)
        bodies: list[bytes] = []
        while len(bodies) < remaining:
            batch = await consumer.receive_many()
            assert batch is not None
            bodies += batch.values()
    return bodies


def count_retrying(caplog: pytest.LogCaptureFixture) -> int:
    """The number of producers that have reported a retry: each does so once."""
    return sum(record.message.startswith("broker a is unavailable") for record in caplog.records)


@pytest.mark.parametrize(
    "stopped", [("broker",), ("nameserver", "broker"), ("broker", "nameserver")]
)
async def test_a_restart_costs_no_message(
    stopped: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sendings = [Sending(kind.__name__) for kind in KINDS]
    async with daemons(tmp_path) as running:
        address = running.addresses["nameserver"]
        async with trio.open_nursery() as nursery:
            for kind, sending in zip(KINDS, sendings, strict=True):
                nursery.start_soon(kind, address, sending)
            for sending in sendings:
                await sending.wait_for_more()
            for name in stopped:
                await running.stop(name)
            while count_retrying(caplog) < len(KINDS):
                await trio.lowlevel.checkpoint()
            for name in reversed(stopped):
                await running.start(name)
            for sending in sendings:
                await sending.wait_for_more()
                sending.enough.set()
        bodies = await stored_bodies(address)
    for sending in sendings:
        expected = [b"%s %d" % (sending.name.encode(), n + 1) for n in range(sending.count)]
        of_it = [body for body in bodies if body.startswith(sending.name.encode() + b" ")]
        assert set(of_it) == set(expected)
        # A retry may store a message twice, but never out of order.
        assert list(dict.fromkeys(of_it)) == expected
