"""A broker whose store is not mounted begins no empty one if a nameserver remembers it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing

from headrace import Admin
from headrace_broker.config import BrokerConfig
from headrace_broker.server import Broker
from headrace_broker.store.errors import StoreMissing
from headrace_daemon.network import MemoryNetwork
from headrace_nameserver.config import NameServerConfig
from headrace_nameserver.server import NameServer
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.drivers.aio import AsyncConnection, open_stream
from headrace_protocol.drivers.errors import BrokerError
from headrace_protocol.serving import Reply
from tests.support.running import in_background, running
from tests.support.scripted import scripted
from tests.support.wire import send_header

NAMESERVERS = ["127.0.0.1:9876", "127.0.0.1:9877"]


def config(folder: Path, **settings: Any) -> BrokerConfig:
    given: dict[str, Any] = {
        "broker_name": "broker-a",
        "bind_address": "127.0.0.1",
        "listen_port": 0,
        "namesrv_addr": ";".join(NAMESERVERS),
        "store_path_root_dir": folder,
        "mapped_file_size_commit_log": 1024 * 1024,
        "max_hash_slot_num": 100,
        "max_index_num": 400,
    }
    return BrokerConfig(**given | settings)


@asynccontextmanager
async def nameserver(network: MemoryNetwork, memory: Path | None = None) -> AsyncIterator[None]:
    """One of the two; the other one is away. memory: its folder, if it remembers."""
    kept = None if memory is None else str(memory / "kvConfig.json")
    at = NameServerConfig(bind_address="127.0.0.1", listen_port=9877, kv_config_path=kept)
    async with running(NameServer(at, network).run):
        yield


async def run_once(network: MemoryNetwork, settings: BrokerConfig, *topics: str) -> None:
    """Start a broker, create topics on it, and stop it in order."""
    async with running(Broker(settings, network).run):
        if topics:
            async with Admin(nameserver=NAMESERVERS[1], connect=network.connect) as admin:
                for topic in topics:
                    await admin.create_topic(topic)


@pytest.mark.parametrize("left", [False, True], ids=["no folder", "an empty folder"])
async def test_an_unmounted_store_does_not_become_an_empty_one(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, *, left: bool
) -> None:
    network, root = MemoryNetwork(), tmp_path / "store"
    async with nameserver(network):
        await run_once(network, config(root), "orders", "users", "prices", "visits")
        root.rename(tmp_path / "mounted")
        if left:
            root.mkdir()
        for _ in range(2):
            with pytest.RaisesGroup(
                pytest.RaisesExc(
                    StoreMissing,
                    match=rf"store {root} is empty, but nameserver {NAMESERVERS[1]} remembers "
                    r"broker broker-a with topics \(orders, users, prices, \.\.\.\); it was shut "
                    r"down \(since 20..-.*Z\)\. Mount the disk .* `headrace tier restore`, or "
                    "give its messages up with `headrace broker forget broker-a`$",
                ),
                flatten_subgroups=True,
            ):
                await run_once(network, config(root))
        assert root.exists() == left
        assert not left or not list(root.iterdir())
        if left:
            root.rmdir()
        (tmp_path / "mounted").rename(root)
        await run_once(network, config(root))


async def test_a_broker_that_is_forgotten_begins_anew(
    tmp_path: Path, autojump_clock: object
) -> None:
    network = MemoryNetwork()
    async with nameserver(network):
        await run_once(network, config(tmp_path / "one"), "orders")
        async with Admin(nameserver=NAMESERVERS[1], connect=network.connect) as admin:
            assert await admin.forget_broker("broker-a")
        await run_once(network, config(tmp_path / "two"))


@pytest.mark.parametrize(
    ("topics", "other"),
    [
        ((), {}),
        (("orders",), {"broker_name": "broker-b"}),
        (("orders",), {"broker_cluster_name": "another"}),
    ],
    ids=["without topics", "another name", "another cluster"],
)
async def test_a_new_broker_begins_an_empty_store(
    tmp_path: Path, autojump_clock: object, topics: tuple[str, ...], other: dict[str, str]
) -> None:
    network = MemoryNetwork()
    async with nameserver(network):
        await run_once(network, config(tmp_path / "one"), *topics)
        await run_once(network, config(tmp_path / "two", **other))


@pytest.mark.parametrize(
    "answer",
    [
        Reply(body=(b"nonsense",)),
        Reply(body=(b'{"departedBrokers":[7]}',)),
        Reply(code=ResponseCode.SYSTEM_ERROR, remark="no"),
        None,
    ],
    ids=["no-json", "wrong-types", "refused", "silent"],
)
async def test_a_nameserver_that_can_not_tell_is_a_warning(
    tmp_path: Path, autojump_clock: object, answer: Reply | None
) -> None:
    network = MemoryNetwork()
    with structlog.testing.capture_logs() as logs:
        async with scripted(network) as (away,):
            if answer is not None:
                away.answer(RequestCode.GET_BROKER_CLUSTER_INFO, answer)
            away.answer(RequestCode.GET_BROKER_MEMBER_GROUP, Reply(code=ResponseCode.SYSTEM_ERROR))
            away.answer(RequestCode.REGISTER_BROKER, Reply())
            away.answer(RequestCode.UNREGISTER_BROKER, Reply())
            await run_once(network, config(tmp_path / "store", namesrv_addr=away.address))
    told = [entry for entry in logs if entry["event"].startswith("a new store begins")]
    assert [entry["nameserver"] for entry in told] == [away.address]
    assert all(entry["reason"] for entry in told)


@pytest.mark.parametrize("restarts", [False, True], ids=["running", "restarted"])
async def test_a_store_that_began_alone_is_given_up_when_a_nameserver_remembers(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, *, restarts: bool
) -> None:
    network, root = MemoryNetwork(), tmp_path / "store"
    memory = tmp_path / "nameserver"
    anew = (
        rf"store {root} has begun anew, but nameserver {NAMESERVERS[1]} remembers broker broker-a"
    )
    async with nameserver(network, memory):
        await run_once(network, config(root), "orders")
    root.rename(tmp_path / "unmounted")
    async with trio.open_nursery() as nursery:
        broker = Broker(config(root), network)
        await nursery.start(broker.run)
        await send(network, broker.address, "orders")
        async with nameserver(network, memory):
            if not restarts:
                await trio.sleep(30)
                with pytest.raises(BrokerError, match=f"{anew}.*then restart it"):
                    await send(network, broker.address, "orders")
            nursery.cancel_scope.cancel()
    async with nameserver(network, memory):
        with pytest.RaisesGroup(pytest.RaisesExc(StoreMissing, match=anew), flatten_subgroups=True):
            await run_once(network, config(root))
        async with Admin(nameserver=NAMESERVERS[1], connect=network.connect) as admin:
            (left,) = await admin.departed_brokers()
            assert left.topics == ["orders"]
            assert await admin.forget_broker("broker-a")
        await run_once(network, config(root))
    assert (root / "config" / "begunWithout").read_text().split()[0] == NAMESERVERS[0]


async def test_a_store_that_began_alone_stays_when_no_nameserver_remembers(
    tmp_path: Path, autojump_clock: object
) -> None:
    network, root = MemoryNetwork(), tmp_path / "store"
    only = config(root, namesrv_addr=NAMESERVERS[1])
    async with trio.open_nursery() as nursery:
        broker = Broker(only, network)
        await nursery.start(broker.run)
        assert (root / "config" / "begunWithout").exists()
        async with nameserver(network):
            await trio.sleep(30)
            await send(network, broker.address, "orders")
            assert not (root / "config" / "begunWithout").exists()
            nursery.cancel_scope.cancel()


async def send(network: MemoryNetwork, address: str, topic: str) -> None:
    """Send to a broker as a client does that knows its address."""
    stream = await open_stream(network.connect, address)
    connection = AsyncConnection(stream, address)
    async with in_background(connection.run):
        header = send_header(producer_group="g", topic=topic)
        response = await connection.request(
            RequestCode.SEND_MESSAGE_V2, header, b"x", timeout_ms=5000
        )
    response.expect()
