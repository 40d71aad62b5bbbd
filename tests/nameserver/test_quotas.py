"""A nameserver holds users to their quotas, as a broker does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from trio.testing import MockClock

from headrace_daemon.access.errors import AccessError
from headrace_daemon.network import MemoryNetwork
from headrace_nameserver.config import NameServerConfig
from headrace_nameserver.server import NameServer
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.nameserver_headers import GetRouteInfoHeader
from headrace_protocol.quotas import Quota, QuotaList
from tests.support.paused_clients import Client, clients_of, codes, quota

ROUTE = RequestCode.GET_ROUTEINFO_BY_TOPIC
UNKNOWN = ResponseCode.TOPIC_NOT_EXIST
HEADER = GetRouteInfoHeader(topic="T")


@asynccontextmanager
async def clients(
    clock: MockClock, count: int = 1, folder: Path | None = None
) -> AsyncIterator[list[Client]]:
    network = MemoryNetwork()
    kept = str(folder / "kvConfig.json") if folder else None
    server = NameServer(NameServerConfig(listen_port=0, kv_config_path=kept), network)
    async with clients_of(server, network, clock, count) as several:
        yield several


@pytest.mark.parametrize(
    ("limit", "rate"), [("requests", 2.0), ("bytes_in", 200.0), ("bytes_out", 500.0), ("cpu", 1e-3)]
)
async def test_a_client_at_its_rate_is_not_read(
    mock_clock: MockClock, limit: str, rate: float
) -> None:
    async with clients(mock_clock) as [client]:
        await client.set("user", "*", **{limit: rate})
        answered = 0
        while later := await client.begin(ROUTE, HEADER):
            assert codes(later) == [UNKNOWN]
            answered += 1
            assert answered < 200
        assert answered
        await client.passes(2)
        # The request that was sent in vain is answered before this one.
        assert (await client.ask(RequestCode.LIST_QUOTAS)).command.code == ResponseCode.SUCCESS


async def test_many_clients_are_refused(mock_clock: MockClock) -> None:
    async with clients(mock_clock, 20) as several:
        await several[0].set("user", "127.0.0.1", requests=1.0)
        answers = [answer for each in several[1:] for answer in await each.begin(ROUTE, HEADER)]
        assert set(codes(answers)) == {UNKNOWN, ResponseCode.SYSTEM_BUSY}
        error = answers[-1].error()
        assert "[quota] user 127.0.0.1: 1 requests/s" in (error.remark or "")
        assert error.retry_after_ms > 1000
        await several[0].passes(error.retry_after_ms / 1000)
        assert codes(await several[-1].begin(ROUTE, HEADER)) == [UNKNOWN]


async def test_connections_are_limited_until_one_ends(mock_clock: MockClock) -> None:
    async with clients(mock_clock, 3) as [admin, one, other]:
        await admin.set("user", "*", connections=2)
        answers = [await each.ask(ROUTE, HEADER) for each in (admin, one, other)]
        assert codes(answers) == [UNKNOWN, UNKNOWN, ResponseCode.SYSTEM_BUSY]
        await one.close()
        assert codes([await other.ask(ROUTE, HEADER)]) == [UNKNOWN]


async def test_a_restart_keeps_quotas(tmp_path: Path, mock_clock: MockClock) -> None:
    async with clients(mock_clock, folder=tmp_path) as [client]:
        await client.set("user", "ann", requests=5.0)
        await client.set("user", "bob", cpu=0.5)
        await client.set("user", "bob")
    async with clients(mock_clock, folder=tmp_path) as [client]:
        listed = await client.ask(RequestCode.LIST_QUOTAS)
        assert listed.decode(QuotaList).quotas == [Quota(of="user", name="ann", requests=5.0)]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (quota("topic", "T", bytes_in=1.0), "bytes_in is a limit of brokers only"),
        (quota("group", "g", cpu=0.5), "cpu is a limit of brokers only"),
        (quota("user", "ann", topics=5), "topics is a limit of brokers only"),
        (quota("user", "ann", held_pulls=5), "held_pulls is a limit of brokers only"),
    ],
)
async def test_what_only_brokers_have_is_rejected(
    mock_clock: MockClock, body: bytes, reason: str
) -> None:
    async with clients(mock_clock) as [client]:
        error = (await client.ask(RequestCode.SET_QUOTA, body=body)).error()
        assert error.code == ResponseCode.INVALID_PARAMETER
        assert reason in (error.remark or "")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"[]", ""),
        (
            b'{"quotas":[{"of":"user","name":"a","requests":0}]}',
            "requests=0: must be a number, at least 0.001",
        ),
        (b'{"quotas":[{"of":"topic","name":"T","connections":5}]}', "is no limit of a topic"),
    ],
)
def test_a_damaged_file_ends_a_start(tmp_path: Path, text: bytes, reason: str) -> None:
    (tmp_path / "quotas.json").write_bytes(text)
    config = NameServerConfig(kv_config_path=str(tmp_path / "kvConfig.json"))
    with pytest.raises(AccessError, match=rf"quotas\.json: cannot read .*{reason}.*; repair it"):
        NameServer(config)
