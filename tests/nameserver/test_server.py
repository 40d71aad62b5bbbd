"""The nameserver daemon over real sockets, and in memory where time has to pass."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio
import trio.testing

from headrace_daemon.network import MemoryNetwork, Network, TcpNetwork
from headrace_daemon.process import run_until_signal
from headrace_nameserver.config import NameServerConfig
from headrace_nameserver.server import NameServer
from headrace_protocol.bodies import TopicRouteData
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.drivers.aio import AsyncConnection
from headrace_protocol.drivers.response import Response
from headrace_protocol.nameserver_headers import (
    BrokerHeartbeatHeader,
    GetRouteInfoHeader,
    RegisterBrokerHeader,
    UnregisterBrokerHeader,
)
from tests.support.nameserver import register_body, register_header
from tests.support.until import until

TIMEOUT_MS = 5_000


class Cluster:
    """A running nameserver and connections to it."""

    def __init__(self, network: Network, address: str, nursery: trio.Nursery) -> None:
        self.address = address
        self._network = network
        self._nursery = nursery

    async def connect(self) -> Client:
        connection = AsyncConnection(await self._network.connect(self.address), self.address)
        scope = trio.CancelScope()

        async def run() -> None:
            with scope:
                await connection.run()

        self._nursery.start_soon(run)
        return Client(connection, scope)


class Client:
    def __init__(self, connection: AsyncConnection, scope: trio.CancelScope) -> None:
        self.connection = connection
        self._scope = scope

    async def close(self) -> None:
        self._scope.cancel()
        while self.connection.is_open:
            await trio.lowlevel.checkpoint()

    async def register(self, header: RegisterBrokerHeader | None = None) -> None:
        response = await self.connection.request(
            RequestCode.REGISTER_BROKER,
            header or register_header(),
            register_body("T", "U").encode(),
            timeout_ms=TIMEOUT_MS,
        )
        response.expect()

    async def route(self, topic: str = "T") -> Response:
        return await self.connection.request(
            RequestCode.GET_ROUTEINFO_BY_TOPIC,
            GetRouteInfoHeader(topic=topic, departed=True),
            timeout_ms=TIMEOUT_MS,
        )

    async def routed(self) -> TopicRouteData:
        return TopicRouteData.decode((await self.route()).expect().body)

    async def remark_once_gone(self) -> str:
        """The reason why there is no route, as soon as there is none."""
        while (response := await self.route()).command.code == ResponseCode.SUCCESS:
            await trio.lowlevel.checkpoint()
        assert response.command.code == ResponseCode.TOPIC_NOT_EXIST
        return response.command.remark or ""


@asynccontextmanager
async def running(network: Network, **settings: Any) -> AsyncIterator[Cluster]:
    config = NameServerConfig(bind_address="127.0.0.1", listen_port=0, **settings)
    with trio.fail_after(600):
        async with trio.open_nursery() as nursery:
            nameserver = NameServer(config, network)
            address = await nursery.start(nameserver.run)
            assert address == nameserver.address
            yield Cluster(network, address, nursery)
            nursery.cancel_scope.cancel()


# -- over sockets ----------------------------------------------------------------------------------


async def test_a_broker_registers_and_clients_find_it() -> None:
    async with running(TcpNetwork()) as cluster:
        broker, client = await cluster.connect(), await cluster.connect()
        assert (await client.route()).command.code == ResponseCode.TOPIC_NOT_EXIST
        await broker.register()
        route = TopicRouteData.decode((await client.route()).expect().body)
        assert route.broker_datas[0].broker_addrs == {0: "127.0.0.1:10911"}


async def test_a_closed_connection_unregisters_at_once() -> None:
    async with running(TcpNetwork()) as cluster:
        broker, client = await cluster.connect(), await cluster.connect()
        await broker.register()
        await broker.close()
        remark = await client.remark_once_gone()
        assert "broker b0 (127.0.0.1:10911) closed its connection 0 s ago" in remark


async def test_the_daemon_ends_on_a_signal() -> None:
    with structlog.testing.capture_logs() as logs, trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            config = NameServerConfig(bind_address="127.0.0.1", listen_port=0)
            nursery.start_soon(run_until_signal, NameServer(config).run)
            await trio.testing.wait_all_tasks_blocked()
            signal.raise_signal(signal.SIGTERM)
    assert [entry["event"] for entry in logs] == ["serving"]


# -- when time passes ------------------------------------------------------------------------------


async def test_a_silent_broker_is_noticed_when_its_timeout_ends(autojump_clock: object) -> None:
    async with running(MemoryNetwork(), broker_timeout_ms=30_000) as cluster:
        broker, client = await cluster.connect(), await cluster.connect()
        await broker.register()
        await client.route()  # who says nothing at all is not listened to for long
        await trio.sleep(20)
        heartbeat = BrokerHeartbeatHeader(
            cluster_name="c0", broker_addr="127.0.0.1:10911", broker_name="b0"
        )
        await broker.connection.request(
            RequestCode.BROKER_HEARTBEAT, heartbeat, timeout_ms=TIMEOUT_MS
        )
        await trio.sleep(29.99)
        response = (await client.route()).expect()
        assert 29_980 <= int(response.command.ext()["routeAgeMillis"]) <= 29_990
        await trio.sleep(0.02)
        with structlog.testing.capture_logs() as logs:
            command = (await client.route()).command
        assert command.code == ResponseCode.TOPIC_NOT_EXIST
        assert "b0 (127.0.0.1:10911) is silent, last heard 30 s ago" in (command.remark or "")
        assert logs == []
        # It hangs, or its way here does: a new connection may help.
        assert not broker.connection.is_open
        await trio.sleep(100)
        assert "last heard 130 s ago" in ((await client.route()).command.remark or "")


async def test_a_shorter_limit_of_a_broker_counts(autojump_clock: object) -> None:
    async with running(MemoryNetwork()) as cluster:
        first, second, client = [await cluster.connect() for _ in range(3)]
        await first.register()
        await trio.sleep(10.5)
        header = register_header(name="b1", address="b:1", heartbeat_timeout_millis=1500)
        with structlog.testing.capture_logs() as logs:
            await second.register(header)
            await trio.sleep(1.51)
        assert [(entry["event"], entry["broker"]) for entry in logs] == [
            ("broker registered", "b1"),
            ("broker lost", "b1"),
        ]
        route = TopicRouteData.decode((await client.route()).expect().body)
        assert [broker.broker_name for broker in route.broker_datas] == ["b0"]


async def test_a_broker_says_goodbye() -> None:
    async with running(MemoryNetwork()) as cluster:
        broker, client = await cluster.connect(), await cluster.connect()
        await broker.register()
        header = UnregisterBrokerHeader(
            broker_name="b0", broker_addr="127.0.0.1:10911", cluster_name="c0", broker_id=0
        )
        await broker.connection.request(
            RequestCode.UNREGISTER_BROKER, header, timeout_ms=TIMEOUT_MS
        )
        assert "was shut down 0 s ago" in await client.remark_once_gone()


async def test_departed_brokers_survive_a_restart(tmp_path: Path) -> None:
    settings = {"kv_config_path": str(tmp_path / "kvConfig.json")}
    async with running(TcpNetwork(), **settings) as cluster:
        broker = await cluster.connect()
        await broker.register()
        await broker.register(register_header("b1", address="127.0.0.1:2"))
    async with running(TcpNetwork(), **settings) as cluster:
        client, broker = await cluster.connect(), await cluster.connect()
        remark = (await client.route()).command.remark or ""
        assert "broker b0 (127.0.0.1:10911) has not registered since a start" in remark
        await broker.register(register_header("b1", address="127.0.0.1:2"))
        (gone,) = (await client.routed()).departed_brokers or []
        assert (gone.broker_name, gone.how) == ("b0", "NOT_BACK")


@pytest.mark.slow
async def test_changes_are_saved_while_the_nameserver_runs(tmp_path: Path) -> None:
    path = tmp_path / "departedBrokers.json"
    async with running(TcpNetwork(), kv_config_path=str(tmp_path / "kv.json")) as cluster:
        broker = await cluster.connect()
        await broker.register()
        await until(lambda: path.exists() and b'"how":"NOT_BACK"' in path.read_bytes())
        await broker.close()
        await until(lambda: b'"how":"DISCONNECTED"' in path.read_bytes())
