"""Services that run as long as a block."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from headrace_broker.config import BrokerConfig
from headrace_daemon.network import MemoryNetwork
from headrace_nameserver.config import NameServerConfig
from headrace_nameserver.server import NameServer


@asynccontextmanager
async def running(*services: Callable[..., Awaitable[Any]]) -> AsyncIterator[None]:
    """Start each and wait until it has started; cancel them at the end."""
    async with trio.open_nursery() as nursery:
        for service in services:
            await nursery.start(service)
        yield
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def in_background(*works: Callable[[], Awaitable[Any]]) -> AsyncIterator[None]:
    """Begin each without waiting for it; cancel them at the end."""
    async with trio.open_nursery() as nursery:
        for work in works:
            nursery.start_soon(work)
        yield
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def nameserver(network: MemoryNetwork) -> AsyncIterator[None]:
    """One at 127.0.0.1:9876."""
    config = NameServerConfig(bind_address="127.0.0.1", listen_port=9876)
    async with running(NameServer(config, network).run):
        yield


def small_config(folder: Path, **settings: Any) -> BrokerConfig:
    """Settings of a broker on this machine whose files are small. folder: its store."""
    sizes = {"mapped_file_size_commit_log": 1 << 20, "max_hash_slot_num": 100, "max_index_num": 400}
    return BrokerConfig(
        **{
            "broker_name": "broker-a",
            "bind_address": "127.0.0.1",
            "store_path_root_dir": folder,
            **sizes,
            **settings,
        }
    )
