"""A nameserver and several brokers in this process, whose clients can be cut off at any request."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import trio

from headrace_broker.config import BrokerConfig
from headrace_broker.server import Broker
from headrace_daemon.network import MemoryNetwork, Network, TcpNetwork
from headrace_nameserver.config import NameServerConfig
from headrace_nameserver.server import NameServer
from tests.support.until import until

_NAMESERVER = "nameserver"
# The default is 110 MB for each queue of a compacted topic.
_SMALL_LOGS: dict[str, Any] = {
    "compaction_mapped_file_size": 1024 * 1024,
    "compaction_cq_mapped_file_size": 46_000,
}


class Brokers:
    """Running daemons; a broker can be stopped and started again at its address."""

    def __init__(self, folder: Path, network: Network, nursery: trio.Nursery) -> None:
        self._folder = folder
        self.network = network
        self._nursery = nursery
        self._running: dict[str, tuple[trio.CancelScope, trio.Event]] = {}
        self._ports: dict[str, int] = {}
        self.nameserver = ""
        self.brokers: dict[str, Broker] = {}

    @property
    def at(self) -> dict[str, Any]:
        """Arguments with which clients find the brokers."""
        return {"nameserver": self.nameserver, "connect": self.network.connect}

    async def start_nameserver(self) -> NameServer:
        config = NameServerConfig(
            bind_address="127.0.0.1",
            anonymous_access="allow",
            listen_port=int(self.nameserver.rpartition(":")[2] or 0),
            kv_config_path=str(self._folder / "kvConfig.json"),
        )
        server = NameServer(config, self.network)
        await self._run(_NAMESERVER, server.run)
        self.nameserver = server.address
        return server

    async def restart_nameserver(self) -> None:
        """Restart it at its address, and wait until all running brokers have registered."""
        await self.stop(_NAMESERVER)
        server = await self.start_nameserver()
        await until(lambda: len(server._table.live()) == len(self._running) - 1)

    async def start(self, name: str, **settings: Any) -> Broker:
        config = BrokerConfig(
            broker_name=name,
            bind_address="127.0.0.1",
            anonymous_access="allow",
            listen_port=self._ports.get(name, 0),
            fast_listen_port=0,
            namesrv_addr=self.nameserver,
            store_path_root_dir=self._folder / name,
            mapped_file_size_commit_log=1024 * 1024,
            mapped_file_size_consume_queue=20 * 1000,
            max_hash_slot_num=2000,
            max_index_num=8000,
            clean_file_forcibly_enable=False,  # however full the disk of the machine is
            # Compaction and tiers take what is flushed.
            flush_commit_log_least_pages=0,
            **(_SMALL_LOGS | settings),
        )
        broker = self.brokers[name] = Broker(config, self.network)
        await self._run(name, broker.run)
        self._ports[name] = int(broker.address.rpartition(":")[2])
        return broker

    async def _run(self, name: str, run: Callable[..., Awaitable[None]]) -> None:
        scope, ended = trio.CancelScope(), trio.Event()

        async def run_in_scope(task_status: trio.TaskStatus[str]) -> None:
            with scope:
                await run(task_status=task_status)
            ended.set()

        await self._nursery.start(run_in_scope)
        self._running[name] = scope, ended

    async def stop(self, name: str) -> None:
        scope, ended = self._running.pop(name)
        scope.cancel()
        await ended.wait()

    async def stop_all(self) -> None:
        for name in self._running.keys() - {_NAMESERVER}:
            await self.stop(name)


@asynccontextmanager
async def brokers(
    folder: Path, names: Iterable[str], *, memory: bool = True, **settings: Any
) -> AsyncIterator[Brokers]:
    """Daemons that run as tasks of the block."""
    async with trio.open_nursery() as nursery:
        running = Brokers(folder, MemoryNetwork() if memory else TcpNetwork(), nursery)
        await running.start_nameserver()
        for name in names:
            await running.start(name, **settings)
        yield running
        await running.stop_all()
        nursery.cancel_scope.cancel()


class BrokersInThread:
    """Daemons on a loop of their own, for blocking calls from this thread."""

    def __init__(self, brokers: Brokers, token: trio.lowlevel.TrioToken) -> None:
        self._brokers = brokers
        self._token = token
        self.nameserver = brokers.nameserver

    def stop(self, name: str) -> None:
        """Stop a broker in order."""
        trio.from_thread.run(self._brokers.stop, name, trio_token=self._token)

    def start(self, name: str) -> None:
        """Start a broker again, at its address."""
        trio.from_thread.run(self._brokers.start, name, trio_token=self._token)


@contextmanager
def running_in_thread(
    folder: Path, names: Iterable[str], **settings: Any
) -> Iterator[BrokersInThread]:
    """Daemons on a loop of their own, for commands."""
    is_up = threading.Event()
    found: list[BrokersInThread] = []
    stop: trio.Event
    token: trio.lowlevel.TrioToken

    async def serve() -> None:
        nonlocal stop, token
        async with brokers(folder, names, memory=False, **settings) as running:
            stop, token = trio.Event(), trio.lowlevel.current_trio_token()
            found.append(BrokersInThread(running, token))
            is_up.set()
            await stop.wait()

    thread = threading.Thread(target=trio.run, args=(serve,), daemon=True)
    thread.start()
    assert is_up.wait(30)
    try:
        yield found[0]
    finally:
        token.run_sync_soon(stop.set)
        thread.join()


@contextmanager
def brokers_in_thread(folder: Path, names: Iterable[str], **settings: Any) -> Iterator[str]:
    """The same; yields the nameserver's address."""
    with running_in_thread(folder, names, **settings) as running:
        yield running.nameserver
