"""Identifies the server at an address: a nameserver, a broker, or another protocol's server.

Clients and servers notice only that the other side does not speak the remoting protocol. The probe
also tries other protocols, so the error names what listens on a wrong port.
"""

from __future__ import annotations

import contextlib
import errno
import os
import ssl
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import trio

from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.connection import Connection, ResponseReceived
from headrace_protocol.departed import ClusterInfoHeader
from headrace_protocol.drivers.address import split_address
from headrace_protocol.errors import RemoteProtocolError, reason_of
from headrace_protocol.frame import TLS, foreign_protocol
from headrace_protocol.tls.contexts import client_context
from headrace_protocol.tls.reasons import is_of_another, why

if TYPE_CHECKING:
    from headrace_protocol.command import Command
    from headrace_protocol.tls.settings import ClientTls

# A server that serves the role's request does so in less.
_PATIENCE_S = 0.5
_RECEIVE_BYTES = 64 * 1024

_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_HTTP2_SETTINGS = 4
_HTTP2_GOAWAY = 7


class Timeouts(NamedTuple):
    """Seconds for a connection, for an answer, and for the first bytes of a foreign server."""

    connect_s: float = 3.0
    answer_s: float = 3.0
    foreign_s: float = 1.0


_TIMEOUTS = Timeouts()


class Role(Enum):
    """The expected kind of server; the value is a request that only this kind serves."""

    NAMESERVER = RequestCode.GET_BROKER_CLUSTER_INFO
    BROKER = RequestCode.GET_BROKER_RUNTIME_INFO

    @property
    def header(self) -> ClusterInfoHeader | None:
        """The header of that request."""
        return ClusterInfoHeader(departed=True) if self is Role.NAMESERVER else None

    def __str__(self) -> str:
        return self.name.lower()


class Finding(NamedTuple):
    """The result of probing an address.

    problem: the problem and its remedy; None if there is none.
    body: body of the response to the role's request; empty if there was a problem.
    expires_s: Unix time at which the server's certificate expires; None without TLS.
    is_denied: whether it serves users only, which is the problem then; the probe logs nobody in.
    is_of_another: whether its certificate is for another name, which is the problem then.
    """

    problem: str | None
    body: bytes = b""
    expires_s: float | None = None
    is_denied: bool = False
    is_of_another: bool = False


async def examine(
    address: str, role: Role, tls: ClientTls | None = None, timeouts: Timeouts = _TIMEOUTS
) -> Finding:
    """Connect, send the role's request and evaluate the response; takes at most some seconds."""
    try:
        stream = await _connect(address, timeouts)
    except OSError as error:
        return Finding(_connect_problem(error, timeouts))
    except ValueError as error:  # a malformed address or name
        return Finding(str(error))
    async with stream:
        if tls is None:
            return await _examine(stream, address, role, timeouts)
        name = tls.name_of(address)
        secured = trio.SSLStream(
            stream, client_context(tls), server_hostname=name, https_compatible=True
        )
        if (found := await _handshake(secured, name, timeouts)) is not None:
            return found
        found = await _examine(secured, address, role, timeouts)
        end = ssl.cert_time_to_seconds(secured.getpeercert()["notAfter"])
        return found._replace(expires_s=end)


async def _handshake(
    stream: trio.SSLStream[trio.SocketStream], name: str, timeouts: Timeouts
) -> Finding | None:
    """The problem of a handshake that fails. name: that the certificate must have."""
    try:
        with trio.fail_after(timeouts.connect_s):
            await stream.do_handshake()
    except trio.BrokenResourceError as error:
        cause = error.__cause__ or error
        return Finding(why(cause, (name,)), is_of_another=is_of_another(cause))
    except trio.TooSlowError:
        return Finding(f"no TLS handshake within {timeouts.connect_s:g} s")
    return None


async def _examine(
    stream: trio.abc.Stream, address: str, role: Role, timeouts: Timeouts
) -> Finding:
    answer, protocol = await _answer_or_protocol(stream, address, role, timeouts)
    if isinstance(answer, ResponseReceived):
        return _judge(answer.command, bytes(answer.body), role)
    # A server of one client at a time serves no other before the first is closed.
    await stream.aclose()
    protocol = protocol or await _foreign(address, timeouts)
    return Finding(_silence_problem(answer, protocol, role))


def recognise(start: bytes) -> str | None:
    """The protocol of a server whose first bytes are ``start``; None if unknown."""
    if start.startswith((b"\x15\x03", b"\x16\x03")):
        return TLS
    is_frame = len(start) >= 9 and start[5:9] == b"\0\0\0\0"
    if is_frame and start[3] in {_HTTP2_SETTINGS, _HTTP2_GOAWAY}:
        return "HTTP/2 (used by gRPC: is this a proxy's port?)"
    return foreign_protocol(start)


async def _connect(address: str, timeouts: Timeouts) -> trio.SocketStream:
    """Connect to the first address that the name resolves to. Raises OSError."""
    host, port = split_address(address)
    with trio.move_on_after(timeouts.connect_s):
        found = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
        family, kind, protocol, _, peer = found[0]
        sock = trio.socket.socket(family, kind, protocol)
        try:
            await sock.connect(peer)
        except BaseException:
            sock.close()
            raise
        return trio.SocketStream(sock)
    raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))


def _connect_problem(error: OSError, timeouts: Timeouts) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: nothing listens there; start the server, or fix the address"
    if isinstance(error, TimeoutError):
        return (
            f"no connection within {timeouts.connect_s:g} s: the machine is down, or a firewall "
            "drops the packets"
        )
    if isinstance(error, trio.socket.gaierror):
        return f"the name does not resolve ({error.strerror}): fix the name, or this machine's DNS"
    return f"{reason_of(error)}: that machine is not reachable from here"


async def _answer_or_protocol(
    stream: trio.abc.Stream, address: str, role: Role, timeouts: Timeouts
) -> tuple[ResponseReceived[Role] | bytes, str | None]:
    """The answer, and the protocol of a server that is silent for half a second."""
    answer: ResponseReceived[Role] | bytes = b""
    protocol: str | None = None

    async def look(scope: trio.CancelScope) -> None:
        nonlocal protocol
        await trio.sleep(_PATIENCE_S)
        protocol = await _foreign(address, timeouts)
        if protocol:
            scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look, nursery.cancel_scope)
        answer = await _ask(stream, role, timeouts)
        protocol = None if isinstance(answer, ResponseReceived) else recognise(answer)
        if protocol or isinstance(answer, ResponseReceived):
            nursery.cancel_scope.cancel()
    return answer, protocol


async def _ask(
    stream: trio.abc.Stream, role: Role, timeouts: Timeouts
) -> ResponseReceived[Role] | bytes:
    """The response to the role's request, or the bytes received instead."""
    connection: Connection[Role] = Connection()
    _, buffers = connection.request(role.value, role.header, waiter=role)
    received = b""
    with trio.move_on_after(timeouts.answer_s):
        try:
            await stream.send_all(b"".join(buffers))
            while data := await stream.receive_some(_RECEIVE_BYTES):
                # The beginning identifies a server, and some servers never stop sending.
                received = (received + data)[:_RECEIVE_BYTES]
                for event in connection.receive_data(data):
                    if isinstance(event, ResponseReceived):
                        return event
        except (trio.BrokenResourceError, RemoteProtocolError):
            pass  # the bytes received so far are evaluated
    return received


def _judge(command: Command, body: bytes, role: Role) -> Finding:
    if command.code == ResponseCode.SUCCESS:
        return Finding(None, body)
    if command.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
        other = Role.BROKER if role is Role.NAMESERVER else Role.NAMESERVER
        return Finding(f"this is not a {role}, but perhaps a {other}; fix the address")
    return Finding(
        f"it responded with code {command.code}: {command.remark or 'no reason given'}",
        is_denied=command.code == ResponseCode.NO_PERMISSION,
    )


def _silence_problem(received: bytes, protocol: str | None, role: Role) -> str:
    """The problem of a missing response: names the server's protocol if it is recognised."""
    if protocol == TLS:
        return (
            "this port speaks TLS: connect with TLS, by HEADRACE_TLS=1 and HEADRACE_TLS_CA, or by "
            f"a context with --ca-file; if it is no {role}, fix the address"
        )
    if protocol:
        return f"this port speaks {protocol}, so it is not a {role}; fix the address"
    if received:
        return f"this is not a {role}: it sent {received[:16]!r}..."
    return (
        f"it accepts connections but does not respond: it is not a {role}, or it hangs; check what "
        "listens there, and its log"
    )


async def _foreign(address: str, timeouts: Timeouts) -> str | None:
    for greeting in (b"GET / HTTP/1.0\r\n\r\n", _client_hello(), _HTTP2_PREFACE):
        protocol = recognise(await _greet(address, greeting, timeouts))
        if protocol:
            return protocol
    return None


async def _greet(address: str, greeting: bytes, timeouts: Timeouts) -> bytes:
    """The first bytes that a server sends to a new client after ``greeting``."""
    with trio.move_on_after(timeouts.foreign_s):
        try:
            async with await _connect(address, timeouts) as stream:
                await stream.send_all(greeting)
                return bytes(await stream.receive_some(_RECEIVE_BYTES))
        except (OSError, trio.BrokenResourceError):
            pass
    return b""


def _client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    # The handshake stops to wait for the server; the client's hello is all that is needed.
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()
