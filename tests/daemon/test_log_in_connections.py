"""Log-ins over real sockets, by both drivers, with TLS and with somebody in between."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import anyio
import pytest
import trio

from headrace.accounts import Account
from headrace.spark.connections import Connections, Dial
from headrace_daemon.network import TcpNetwork
from headrace_daemon.serving.server import RemotingServer
from headrace_protocol.drivers.aio import AsyncConnection, connect_tcp, open_stream
from headrace_protocol.drivers.blocking import BlockingConnection
from headrace_protocol.drivers.errors import LogInFailed
from headrace_protocol.drivers.login import log_in
from headrace_protocol.rights.credentials import Credentials, Token
from headrace_protocol.tls.connect import tls_connector
from headrace_protocol.tls.contexts import server_context
from headrace_protocol.tls.settings import ClientTls, ServerTls, TlsFile
from tests.support.certificates import Authority
from tests.support.running import in_background, running
from tests.support.sessions import ALICE, PASSWORD, WHO, Door, users
from tests.support.tokens import NOW_S, ec_key, public, settings, token, write_keys

TIMEOUT_MS = 5000

# Logs in at an address, and returns whose connection the server takes it for.
Proof = Credentials | Token
Who = Callable[[str, ClientTls | None, Proof], Awaitable[str | None]]


async def by_async(address: str, tls: ClientTls | None, proof: Proof) -> str | None:
    stream = await open_stream(connect_tcp if tls is None else tls_connector(tls), address)
    connection = AsyncConnection(stream, address)
    answer: str | LogInFailed | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(connection.run)
        try:
            await log_in(connection, proof)
            answer = (await connection.request(WHO, timeout_ms=TIMEOUT_MS)).command.remark
        except LogInFailed as error:
            answer = error
        tasks.cancel_scope.cancel()
    if isinstance(answer, LogInFailed):
        raise answer
    return answer


async def by_asyncio(address: str, tls: ClientTls | None, proof: Proof) -> str | None:
    return await trio.to_thread.run_sync(
        partial(anyio.run, by_async, address, tls, proof, backend="asyncio")
    )


async def by_blocking(address: str, tls: ClientTls | None, proof: Proof) -> str | None:
    def ask() -> str | None:
        with BlockingConnection.connect(address, tls, proof) as connection:
            return connection.request(WHO, timeout_ms=TIMEOUT_MS).command.remark

    return await trio.to_thread.run_sync(ask)


EACH_DRIVER = pytest.mark.parametrize("who", [by_async, by_asyncio, by_blocking])


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.new(tmp_path / "ca")


@asynccontextmanager
async def serving(door: Door, settings: ServerTls | None) -> AsyncIterator[str]:
    network = TcpNetwork(TlsFile(settings, None, ()))
    listener = network.listen("127.0.0.1", 0)
    async with running(partial(network.serve, listener, RemotingServer(door))):
        yield listener.address


@EACH_DRIVER
@pytest.mark.parametrize("secured", [False, True], ids=["tcp", "tls"])
async def test_each_driver_logs_in(who: Who, secured: bool, authority: Authority) -> None:
    door = Door(users("alice"))
    tls = authority.client() if secured else None
    async with serving(door, authority.server() if secured else None) as address:
        assert await who(address, tls, ALICE) == "alice"
        for wrong in (Credentials("alice", "hidden"), Credentials("nobody", PASSWORD)):
            with pytest.raises(LogInFailed, match=f"cannot log in to {address} as") as caught:
                await who(address, tls, wrong)
            assert wrong.user in str(caught.value)
            assert wrong.password not in str(caught.value)


@EACH_DRIVER
async def test_each_driver_logs_in_by_a_token(
    who: Who, authority: Authority, tmp_path: Path
) -> None:
    write_keys(tmp_path / "jwks.json", public(ec_key(), "k"))
    door = Door(users("alice"), settings(tmp_path / "jwks.json"))
    good, wrong = Token(token()), Token(token(ec_key(1)))
    async with serving(door, authority.server()) as address:
        assert await who(address, authority.client(), good) == "alice"
        with pytest.raises(LogInFailed, match=r"by a token: .* its signature is wrong") as caught:
            await who(address, authority.client(), wrong)
        assert wrong.text not in str(caught.value)
        with pytest.raises(LogInFailed, match="no bearer token has"):
            await who(address, authority.client(), Token("two words"))
    async with serving(door, None) as address:
        with pytest.raises(LogInFailed, match=r"a token needs TLS.* \(set HEADRACE_TLS=1 or "):
            await who(address, None, good)


async def test_tasks_open_another_connection_before_the_token_ends(
    authority: Authority, tmp_path: Path
) -> None:
    write_keys(tmp_path / "jwks.json", public(ec_key(), "k"))
    door = Door(users("alice"), settings(tmp_path / "jwks.json"))
    tokens = [token(), token(exp=NOW_S + 0.001)]

    def is_kept(address: str) -> bool:
        dial = Dial(authority.client(), Account(token=tokens.pop))
        with Connections(dial) as connections:
            return connections.open(address) is connections.open(address)

    async with serving(door, authority.server()) as address:
        assert not await trio.to_thread.run_sync(is_kept, address)
        assert not tokens
        tokens.append(token())
        assert await trio.to_thread.run_sync(is_kept, address)


async def test_no_connection_is_given_up_while_an_answer_is_outstanding(
    authority: Authority, tmp_path: Path
) -> None:
    write_keys(tmp_path / "jwks.json", public(ec_key(), "k"))
    door = Door(users("alice"), settings(tmp_path / "jwks.json"))

    def found(address: str) -> list[bool]:
        proof = Token(token(exp=NOW_S + 0.001))
        with BlockingConnection.connect(address, authority.client(), proof) as connection:
            due = [connection.is_log_in_due]
            connection.submit(WHO, None, b"", lambda _response: None)
            due.append(connection.is_log_in_due)
            connection.drain(timeout_ms=TIMEOUT_MS)
            return [*due, connection.is_log_in_due]

    async with serving(door, authority.server()) as address:
        assert await trio.to_thread.run_sync(found, address) == [True, False, True]


async def test_each_connection_is_bound_to_the_certificate_that_it_was_shown(
    authority: Authority,
) -> None:
    door = Door(users("alice"))
    settings = authority.server()
    network = TcpNetwork(TlsFile(settings, None, ()))
    listener = network.listen("127.0.0.1", 0)
    server = RemotingServer(door)
    async with running(partial(network.serve, listener, server)):
        stream = await open_stream(tls_connector(authority.client()), listener.address)
        old = AsyncConnection(stream, listener.address)
        async with in_background(old.run):
            await old.request(WHO, timeout_ms=TIMEOUT_MS)
            authority.server()  # the same files with another certificate
            assert server.certificates is not None
            server.certificates.refresh()
            await log_in(old, ALICE)
            assert await by_async(listener.address, authority.client(), ALICE) == "alice"


@asynccontextmanager
async def man_in_the_middle(settings: ServerTls, to: str, tls: ClientTls) -> AsyncIterator[str]:
    """Somebody with a certificate of a trusted authority, who passes all bytes on."""
    context = server_context(settings)

    async def pass_on(client: trio.SocketStream) -> None:
        secured = trio.SSLStream(client, context, server_side=True)
        server = await open_stream(tls_connector(tls), to)
        async with secured, server, trio.open_nursery() as nursery:

            async def forth() -> None:
                with suppress(trio.BrokenResourceError):
                    async for data in secured:
                        await server.send(bytes(data))

            nursery.start_soon(forth)
            try:
                while True:
                    await secured.send_all(await server.receive())
            except (anyio.EndOfStream, anyio.BrokenResourceError, trio.BrokenResourceError):
                nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, pass_on, 0, host="127.0.0.1"))
        yield f"127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


@EACH_DRIVER
async def test_nobody_between_can_pass_a_log_in_on(who: Who, authority: Authority) -> None:
    door = Door(users("alice"))
    between = authority.server(name="between")
    async with (
        serving(door, authority.server()) as address,
        man_in_the_middle(between, address, authority.client()) as trap,
    ):
        with pytest.raises(LogInFailed, match="whoever terminates TLS in between is rejected"):
            await who(trap, authority.client(), ALICE)
        assert door.outcomes == [("alice", False)]
