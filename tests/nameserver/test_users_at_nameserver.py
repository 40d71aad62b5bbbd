"""A running nameserver with users: who is served, by a log-in, a certificate or nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace_daemon.access.settings import Secret
from headrace_daemon.network import MemoryNetwork, Network, TcpNetwork
from headrace_nameserver.config import NameServerConfig
from headrace_nameserver.server import NameServer
from headrace_protocol.codes import RequestCode as Code
from headrace_protocol.drivers.aio import AsyncConnection, open_stream
from headrace_protocol.rights.auth_requests import ListUserHeader, UserHeader, UserInfo
from headrace_protocol.tls.connect import tls_connector
from headrace_protocol.tls.settings import ClientAuth, TlsFile
from tests.support.certificates import Authority
from tests.support.running import in_background, running
from tests.support.wire import ask

LIST = Code.AUTH_LIST_USER, ListUserHeader()


@asynccontextmanager
async def serving(folder: Path, network: Network, **settings: object) -> AsyncIterator[str]:
    """The address of a nameserver whose Super user is root."""
    root = Secret('{"username":"root","password":"rootsecret"}')
    config = NameServerConfig(
        listen_port=0,
        kv_config_path=str(folder / "kvConfig.json"),
        init_authentication_user=root,
        **settings,  # type: ignore[arg-type]
    )
    server = NameServer(config, network)
    async with running(server.run):
        yield server.address


@pytest.mark.parametrize("shown", ["root", "stranger", None])
async def test_a_certificate_is_as_good_as_a_password(tmp_path: Path, shown: str | None) -> None:
    authority = Authority.new(tmp_path / "ca")
    settings = authority.server(client_auth=ClientAuth.OPTIONAL)
    network = TcpNetwork(TlsFile(settings, None, ()))
    on = {"authentication_enabled": True, "authorization_enabled": True}
    async with serving(tmp_path, network, **on) as address:
        stream = await open_stream(tls_connector(authority.client(name=shown)), address)
        connection = AsyncConnection(stream, address)
        async with in_background(connection.run):
            answer = await connection.request(*LIST, timeout_ms=10_000)
            assert answer.command.code == (0 if shown == "root" else 16)
            assert (b"root" in bytes(answer.body)) is (shown == "root")


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"authentication_enabled": True}, 16),
        ({"authentication_enabled": True, "anonymous_access": "read"}, 0),
        ({}, 0),
        ({"anonymous_access": "read"}, 0),
    ],
)
async def test_clients_without_a_user(
    tmp_path: Path, settings: dict[str, object], code: int
) -> None:
    network = MemoryNetwork()
    async with serving(tmp_path, network, **settings) as address:
        answer = await ask(network, address, Code.GET_BROKER_CLUSTER_INFO)
        assert answer.command.code == code
        body = UserInfo(username="eve", password="x", user_type="Super").encode()
        header = UserHeader(username="eve")
        refused = await ask(network, address, Code.AUTH_CREATE_USER, header, body)
        assert refused.command.code == 16
    assert (tmp_path / "users.json").exists() is bool(settings.get("authentication_enabled"))
