"""A broker stays registered, whatever becomes of its nameserver and the way to it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import structlog.testing
import trio
import trio.testing

from headrace import Admin
from headrace_broker.config import BrokerConfig
from headrace_broker.server import Broker
from headrace_nameserver.config import NameServerConfig
from headrace_nameserver.server import NameServer
from headrace_protocol.drivers.network import MemoryNetwork

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

NAMESERVER = "127.0.0.1:9876"


@asynccontextmanager
async def nameserver(network: MemoryNetwork) -> AsyncIterator[None]:
    config = NameServerConfig(bind_address="127.0.0.1", listen_port=9876)
    async with trio.open_nursery() as nursery:
        await nursery.start(NameServer(config, network).run)
        yield
        nursery.cancel_scope.cancel()


async def run_broker(
    network: MemoryNetwork, folder: Path, task_status: trio.TaskStatus[str]
) -> None:
    config = BrokerConfig(
        broker_name="broker-a",
        bind_address="127.0.0.1",
        namesrv_addr=NAMESERVER,
        store_path_root_dir=folder,
        mapped_file_size_commit_log=1024 * 1024,
        mapped_file_size_consume_queue=20 * 1000,
        max_hash_slot_num=100,
        max_index_num=400,
    )
    await Broker(config, network).run(task_status=task_status)


async def registered(network: MemoryNetwork) -> list[str]:
    async with Admin(nameserver=NAMESERVER, connect=network.connect) as admin:
        return [node.address for node in await admin.cluster()]


async def test_a_nameserver_that_starts_again_hears_of_the_broker_at_once(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    network = MemoryNetwork()
    with structlog.testing.capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            async with nameserver(network):
                address = await nursery.start(run_broker, network, tmp_path)
                assert await registered(network) == [address]
            for _ in range(3):
                await trio.sleep(50)
                async with nameserver(network):
                    # Well before the next period of 30 s.
                    await trio.sleep(5)
                    assert await registered(network) == [address]
            await trio.sleep(50)
            nursery.cancel_scope.cancel()
    events = [entry["event"] for entry in logs]
    assert events.count("registered") == events.count("registration lost") == 4
    # Once for each time that it was away, not once for each try.
    assert events.count("not registered, trying on") == 4
