"""TLS on the ports of a daemon: who is served, and what both ends learn when it fails."""

from __future__ import annotations

import json
import socket
import ssl
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import anyio
import pytest
import structlog.testing
import trio

from headrace_daemon.network import TcpNetwork
from headrace_daemon.serving.handshakes import ALL_RATE, HOST_RATE, WAIT_S_MAX, Handshakes
from headrace_daemon.serving.server import RemotingServer, ServerLimits
from headrace_daemon.serving.server_channel import ServerChannel
from headrace_protocol.drivers.aio import AsyncConnection, connect_tcp, open_stream
from headrace_protocol.drivers.blocking import BlockingConnection
from headrace_protocol.drivers.errors import HeadraceError, WrongServer
from headrace_protocol.frame import Frame, frame_prefix
from headrace_protocol.tls.connect import tls_connector
from headrace_protocol.tls.contexts import client_context
from headrace_protocol.tls.names import ServerNames
from headrace_protocol.tls.settings import ClientAuth, ClientTls, ServerTls, TlsFile, TlsMode
from tests.support.certificates import Authority, Raw
from tests.support.echo import Echo, frame
from tests.support.running import in_background, running
from tests.support.until import until


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.new(tmp_path / "ca")


@asynccontextmanager
async def serving(
    settings: ServerTls | None,
    limits: ServerLimits | None = None,
    handler: Echo | None = None,
) -> AsyncIterator[tuple[str, RemotingServer]]:
    network = TcpNetwork(TlsFile(settings, None, ()))
    server = RemotingServer(handler or Echo(), limits)
    listener = network.listen("127.0.0.1", 0)
    async with running(partial(network.serve, listener, server)):
        yield listener.address, server
    assert server.held_bytes == 0


async def echo(connect: object, address: str, body: bytes) -> bytes:
    """The body of the answer to a frame."""
    stream = await open_stream(connect, address)  # type: ignore[arg-type]
    async with stream:
        await stream.send(frame(body))
        got = b""
        size = int(body[4:]) if body.startswith(b"big:") else len(body)
        while len(got) < 8 + 2 + size:
            got += await stream.receive(1 << 20)
        return got[10:]


@pytest.mark.parametrize("body", [b"hello", b"y" * 300_000, b"big:5000000", b""])
async def test_frames_pass(authority: Authority, body: bytes) -> None:
    async with serving(authority.server()) as (address, _):
        answer = await echo(tls_connector(authority.client()), address, body)
        assert answer == (b"x" * 5_000_000 if body.startswith(b"big") else body)


async def failure(connect: object, address: str) -> str:
    """The text of the error of a client that is not served."""
    try:
        stream = await open_stream(connect, address)  # type: ignore[arg-type]
    except HeadraceError as error:
        return str(error)
    connection = AsyncConnection(stream, address)
    async with in_background(connection.run):
        with pytest.raises(HeadraceError) as caught:
            await connection.request(10, timeout_ms=5000)
    return str(caught.value)


PLAIN_ON_TLS = "this port speaks TLS: connect with tls=True"
TLS_ON_PLAIN = "it does not speak TLS"


@pytest.mark.parametrize(
    ("mode", "plain", "secured"),
    [
        (None, None, TLS_ON_PLAIN),
        (TlsMode.PERMISSIVE, None, None),
        (TlsMode.ENFORCING, PLAIN_ON_TLS, None),
    ],
)
async def test_each_mode_serves_its_clients_and_tells_the_others(
    authority: Authority, mode: TlsMode | None, plain: str | None, secured: str | None
) -> None:
    settings = authority.server(mode) if mode else None
    with structlog.testing.capture_logs() as logs:
        async with serving(settings, ServerLimits(sweep_s=0.05)) as (address, _):
            clients = {connect_tcp: plain, tls_connector(authority.client()): secured}
            for connect, expected in clients.items():
                if expected is None:
                    assert await echo(connect, address, b"served") == b"served"
                else:
                    assert expected in await failure(connect, address)
            await trio.sleep(0.1)
    lines = [line["reason"] for line in logs if "reason" in line]
    assert len(lines) == (plain is not None) + (secured is not None)
    assert all("TLS" in line for line in lines)


# -- certificates ----------------------------------------------------------------------------------


async def test_a_server_that_can_not_be_verified_is_not_talked_to(
    authority: Authority, tmp_path: Path
) -> None:
    other = Authority.new(tmp_path / "other")
    async with serving(authority.server()) as (address, _):
        ours = authority.client()
        for settings, expected in (
            (other.client(), "of an authority that is not trusted here: set ca_file"),
            (ClientTls(), "of an authority that is not trusted here: set ca_file"),
            (ours._replace(server_name="example.org"), "not for example.org"),
        ):
            assert expected in await failure(tls_connector(settings), address)
        localhost = address.replace("127.0.0.1", "localhost")
        assert "not for localhost" in await failure(tls_connector(ours), localhost)
        named = tls_connector(ours._replace(server_name="127.0.0.1"))
        assert await echo(named, localhost, b"named") == b"named"


async def test_a_broker_at_an_ip_may_have_a_certificate_with_its_name(
    authority: Authority,
) -> None:
    cert, key = authority.issue("named", "broker-a.c")
    settings = authority.server()._replace(cert_file=cert, key_file=key)
    names, tls = ServerNames(), authority.client()
    blocking = partial(BlockingConnection.connect, tls=tls, names=names)
    async with serving(settings) as (address, server):
        for host, broker in (
            ("127.0.0.1", None),
            ("127.0.0.1", "broker-b"),
            ("localhost", "broker-a"),
        ):
            at = address.replace("127.0.0.1", host)
            if broker is not None:
                names.put(at, broker, "c")
            with pytest.raises(WrongServer) as caught:
                await trio.to_thread.run_sync(blocking, at)
            text = await failure(tls_connector(tls, names), at)
            assert text == str(caught.value)
            assert f"not for {host}{f' or {broker}.c' if broker == 'broker-b' else ''}: " in text
        names.put(address, "broker-a", "c")
        handshakes = server.turned_away_count
        assert await echo(tls_connector(tls, names), address, b"named") == b"named"
        assert names.of(tls, address) == ("broker-a.c", "127.0.0.1")
        (await trio.to_thread.run_sync(blocking, address)).close()
        assert server.turned_away_count == handshakes
        named = tls_connector(tls._replace(server_name="x.org"), names)
        assert "not for x.org:" in await failure(named, address)


async def test_a_client_with_the_wrong_kind_of_connection_is_one_line_for_its_host(
    authority: Authority,
) -> None:
    for settings, connect, reason in (
        (authority.server(), connect_tcp, "no TLS, which this port requires"),
        (None, tls_connector(authority.client()), "TLS, which this port does not speak"),
    ):
        with structlog.testing.capture_logs() as logs:
            async with serving(settings, ServerLimits(sweep_s=0.2)) as (address, server):
                for _ in range(30):
                    await failure(connect, address)
                await until(lambda server=server: not server._turned_away)  # type: ignore[misc]
        found = [line for line in logs if line["event"] == "clients turned away"]
        assert {line["host"] for line in found} == {"127.0.0.1"}, (reason, logs)
        assert sum(line["count"] for line in found) == 30
        assert len(found) <= 3
        assert all(line["reason"].startswith(reason) for line in found)
        assert not [line for line in logs if line["event"] == "client closed"]


async def test_an_expired_certificate_is_rejected(authority: Authority) -> None:
    cert, key = authority.issue("old", not_after=datetime.now(UTC) - timedelta(days=1))
    settings = authority.server()._replace(cert_file=cert, key_file=key)
    async with serving(settings) as (address, _):
        text = await failure(tls_connector(authority.client()), address)
        assert "its certificate is not valid: certificate has expired" in text


@pytest.mark.parametrize("shown", ["ours", "none", "other's"])
@pytest.mark.parametrize("wanted", list(ClientAuth))
async def test_certificates_of_clients(
    authority: Authority, tmp_path: Path, wanted: ClientAuth, shown: str
) -> None:
    other = Authority.new(tmp_path / "other")
    settings = {
        "ours": authority.client(name="alice"),
        "none": authority.client(),
        "other's": other.client(name="mallory")._replace(ca_file=authority.ca_file),
    }[shown]
    is_served = {
        ClientAuth.NONE: True,
        ClientAuth.OPTIONAL: shown != "other's",
        ClientAuth.REQUIRE: shown == "ours",
    }[wanted]
    with structlog.testing.capture_logs() as logs:
        async with serving(authority.server(client_auth=wanted)) as (address, _):
            connect = tls_connector(settings)
            if is_served:
                assert await echo(connect, address, b"served") == b"served"
            else:
                assert "certificate" in await failure(connect, address)
    reasons = [line["reason"] for line in logs if line["event"] == "client closed"]
    assert len(reasons) == (not is_served)
    assert all("certificate" in reason for reason in reasons)


# Tasks that start together run in any order.
@pytest.mark.parametrize("start", range(8))
async def test_a_client_that_comes_before_the_start_is_served(
    authority: Authority, start: int
) -> None:
    network = TcpNetwork(TlsFile(authority.server(), None, ()))
    listener = network.listen("127.0.0.1", 0)
    client = Raw(client_context(authority.client()))
    with socket.create_connection(("127.0.0.1", listener.port)) as early:
        early.sendall(client.step())
        async with running(partial(network.serve, listener, RemotingServer(Echo()))):
            early.settimeout(10)
            client.incoming.write(await trio.to_thread.run_sync(early.recv, 65536))
            assert client.step()
            assert client.tls.version() is not None


@pytest.mark.parametrize(
    ("wanted", "shown", "user"),
    [
        (ClientAuth.REQUIRE, "alice", "alice"),
        (ClientAuth.OPTIONAL, "alice", "alice"),
        # Nobody has verified it.
        (ClientAuth.NONE, "alice", None),
        (ClientAuth.OPTIONAL, None, None),
        # There is no such user, so that the client may log in as another.
        (ClientAuth.REQUIRE, "bob", None),
    ],
)
async def test_a_certificate_of_a_client_names_its_user(
    authority: Authority, wanted: ClientAuth, shown: str | None, user: str | None
) -> None:
    async with serving(authority.server(client_auth=wanted)) as (address, server):
        server.is_user = {"alice", "root"}.__contains__
        logged_in: list[tuple[object, str, bool]] = []
        server.on_log_in = lambda *outcome: logged_in.append(outcome)
        stream = await open_stream(tls_connector(authority.client(name=shown)), address)
        async with stream:
            await stream.send(frame(b"hello"))
            await stream.receive()
            (channel,) = server.channels
            assert channel.user == user
            assert logged_in == ([] if user is None else [(channel, user, True)])
            assert channel.is_encrypted


def test_changed_files_serve_the_next_connection(authority: Authority) -> None:
    settings = authority.server()
    network = TcpNetwork(TlsFile(settings, None, ()))
    certificates = network.certificates
    assert certificates is not None
    before = certificates.context, certificates.expires_s
    certificates.refresh()
    assert (certificates.context, certificates.expires_s) == before

    Path(settings.cert_file).write_text("damaged")
    with structlog.testing.capture_logs() as logs:
        certificates.refresh()
    assert (certificates.context, certificates.expires_s) == before
    assert [line["event"] for line in logs] == ["certificate not changed"]

    end = datetime.now(UTC).replace(microsecond=0) + timedelta(days=9)
    authority.issue("server", not_after=end)
    certificates.refresh()
    assert certificates.context is not before[0]
    assert certificates.expires_s == end.timestamp()


@pytest.mark.parametrize(
    ("days", "event"),
    [(15, None), (13, "certificate expires soon"), (-1, "certificate expired")],
)
async def test_the_end_of_a_certificate_is_logged_once_a_day(
    authority: Authority, autojump_clock: object, days: int, event: str | None
) -> None:
    cert, key = authority.issue("short", not_after=datetime.now(UTC) + timedelta(days=days))
    settings = authority.server()._replace(cert_file=cert, key_file=key)
    certificates = TcpNetwork(TlsFile(settings, None, ())).certificates
    assert certificates is not None
    with structlog.testing.capture_logs() as logs, trio.move_on_after(3600):
        await certificates.run()
    assert [line["event"] for line in logs] == ([event] if event else [])


async def test_a_handshake_that_can_not_begin_costs_its_client_alone(authority: Authority) -> None:
    connect = tls_connector(authority.client())
    async with serving(authority.server()) as (address, server):
        assert server.certificates is not None
        usable = server.certificates.context
        server.certificates.context = client_context(authority.client())
        assert "it closed the connection during the handshake" in await failure(connect, address)
        assert server.unexpected_errors == 1
        server.certificates.context = usable
        assert await echo(connect, address, b"served") == b"served"


# -- hostile clients -------------------------------------------------------------------------------


async def test_a_handshake_may_come_byte_by_byte(authority: Authority) -> None:
    raw = Raw(client_context(authority.client()))
    async with (
        serving(authority.server()) as (address, _),
        await connect_tcp(address) as stream,
    ):
        for byte in raw.step():
            await stream.send(bytes((byte,)))
        raw.incoming.write(await stream.receive())
        raw.tls.do_handshake()
        raw.tls.write(frame(b"slowly"))
        for byte in raw.outgoing.read():
            await stream.send(bytes((byte,)))
        answer = b""
        while len(answer) < 8 + 2 + len(b"slowly"):
            raw.incoming.write(await stream.receive())
            try:
                answer += raw.tls.read(1000)
            except ssl.SSLWantReadError:
                continue
        assert answer[10:] == b"slowly"


async def test_half_a_handshake_is_closed(authority: Authority) -> None:
    hello = Raw(client_context(authority.client())).step()
    limits = ServerLimits(handshake_s=0.1, sweep_s=0.05)
    with structlog.testing.capture_logs() as logs:
        async with serving(authority.server(), limits) as (address, _):
            async with await connect_tcp(address) as stream:
                await stream.send(hello[:-1])
                with pytest.raises(anyio.EndOfStream):
                    await stream.receive()
            await trio.sleep(0.1)
    (line,) = [line for line in logs if line["event"] == "clients turned away"]
    assert line["reason"] == "no TLS handshake within 0.1 s"


@pytest.mark.parametrize(
    ("version", "is_served"),
    [("TLSv1", False), ("TLSv1_1", False), ("TLSv1_2", True), ("TLSv1_3", True)],
)
async def test_versions(authority: Authority, version: str, is_served: bool) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority.ca_file)
    # The system's policy may refuse older versions already here.
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
    with structlog.testing.capture_logs() as logs:
        async with serving(authority.server()) as (address, _):
            host, port = address.split(":")

            def handshake() -> str | None:
                with (
                    socket.create_connection((host, int(port))) as plain,
                    context.wrap_socket(plain, server_hostname=host) as secured,
                ):
                    return secured.version()

            if is_served:
                spoken = await trio.to_thread.run_sync(handshake)
                assert spoken == version.replace("_", ".").replace("v1.", "v1.")
            else:
                with pytest.raises(ssl.SSLError):
                    await trio.to_thread.run_sync(handshake)
    reasons = [line["reason"] for line in logs if line["event"] == "client closed"]
    expected = [] if is_served else ["TLS: the client speaks only versions before TLS 1.2"]
    assert reasons == expected


# -- blocking clients ------------------------------------------------------------------------------


async def blocking_request(address: str, settings: ClientTls | None, body: bytes) -> bytes:
    def work() -> bytes:
        with BlockingConnection.connect(address, settings) as connection:
            return bytes(connection.request(10, None, body, timeout_ms=5000).body)

    return await trio.to_thread.run_sync(work)


@dataclass
class Answering(Echo):
    """Answers each request with its body, a hundred times if it is large."""

    def handle(self, channel: ServerChannel, frames: list[Frame]) -> list[Frame]:
        for _, header, body in frames:
            opaque = json.loads(bytes(header))["opaque"]
            answer = b'{"code":0,"flag":1,"opaque":%d}' % opaque
            text = bytes(body) * (100 if len(body) > 1000 else 1)
            channel.write(frame_prefix(0, len(answer), len(text)) + answer, text)
        return []


@pytest.mark.parametrize("size", [0, 10, 20_000, 100_000])
async def test_blocking_clients_are_served(authority: Authority, size: int) -> None:
    async with serving(authority.server(), handler=Answering()) as (address, _):
        got = await blocking_request(address, authority.client(), b"x" * size)
    assert got == b"x" * (size * (100 if size > 1000 else 1))


async def test_blocking_clients_learn_why_they_are_not_served(
    authority: Authority, tmp_path: Path
) -> None:
    other = Authority.new(tmp_path / "other").client()
    required = authority.server(client_auth=ClientAuth.REQUIRE)
    for server, client, expected in (
        (authority.server(), None, PLAIN_ON_TLS),
        (None, authority.client(), TLS_ON_PLAIN),
        (authority.server(), other, "of an authority that is not trusted here"),
        (authority.server(), authority.client()._replace(server_name="x.org"), "not for x.org"),
        (required, authority.client(), "a certificate is required: set cert_file"),
    ):
        async with serving(server) as (address, _):
            with pytest.raises(WrongServer, match=expected):
                await blocking_request(address, client, b"hello")


# -- many handshakes -------------------------------------------------------------------------------


def test_a_host_waits_for_its_own_handshakes_and_for_no_others() -> None:
    handshakes = Handshakes()
    flood = [handshakes.take_of("flood", 100.0) for _ in range(1000)]
    waits = [wait for wait in flood if wait is not None]
    assert waits[: int(HOST_RATE)] == [0.0] * int(HOST_RATE)
    assert waits == sorted(waits)
    assert WAIT_S_MAX - 1 < waits[-1] <= WAIT_S_MAX
    assert flood[-1] is None
    assert handshakes.take_of("other", 100.0) == 0.0
    assert handshakes.take(100.0) == 0.0
    # What was refused is not owed.
    assert handshakes.take_of("flood", 100.0 + WAIT_S_MAX) is not None


def test_all_hosts_together_wait_in_turn() -> None:
    handshakes = Handshakes()
    waits = [handshakes.take(100.0) for _ in range(int(ALL_RATE) + 2)]
    assert waits[:-2] == [0.0] * int(ALL_RATE)
    assert waits[-2:] == [pytest.approx(1 / ALL_RATE), pytest.approx(2 / ALL_RATE)]


def test_hosts_at_rest_are_forgotten() -> None:
    handshakes = Handshakes()
    for number in range(25_000):
        handshakes.take_of(f"host {number}", 100.0 + number / 1000)
    assert handshakes.host_count <= 10_000


async def test_a_client_that_leaves_while_it_waits_is_closed(authority: Authority) -> None:
    hello = Raw(client_context(authority.client())).step()
    async with serving(authority.server()) as (address, server):
        streams = [await connect_tcp(address) for _ in range(int(HOST_RATE) + 20)]
        for stream in streams:
            await stream.send(hello)
        await until(lambda: len(server.channels) == len(streams))
        for stream in streams:
            await stream.aclose()
        await until(lambda: not server.channels)


async def test_a_burst_of_a_host_is_served_over_time(authority: Authority) -> None:
    connect = tls_connector(authority.client())
    began = trio.current_time()
    async with serving(authority.server()) as (address, _), trio.open_nursery() as nursery:
        for _ in range(int(HOST_RATE * 1.5)):
            nursery.start_soon(echo, connect, address, b"burst")
    assert trio.current_time() - began > 0.4
