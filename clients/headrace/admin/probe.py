"""What is at an address: a nameserver, a broker, or something else, and then what.

Clients and servers only see that the other side does not speak the remoting protocol. This tries
other protocols too, so that a wrong port is called what it is.
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
from headrace_protocol.drivers.address import split_address
from headrace_protocol.errors import RemoteProtocolError
from headrace_protocol.frame import foreign_protocol

if TYPE_CHECKING:
    from headrace_protocol.command import Command

CONNECT_TIMEOUT_S = 3.0
ANSWER_TIMEOUT_S = 3.0
# Told apart by their first words, which servers say at once.
_FOREIGN_TIMEOUT_S = 1.0
_RECEIVE_BYTES = 64 * 1024

_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_HTTP2_SETTINGS = 4
_HTTP2_GOAWAY = 7


class Role(Enum):
    """What an address should be; the value is a request that only such a server serves."""

    NAMESERVER = RequestCode.GET_BROKER_CLUSTER_INFO
    BROKER = RequestCode.GET_BROKER_RUNTIME_INFO

    def __str__(self) -> str:
        return self.name.lower()


class Finding(NamedTuple):
    """What was found at an address.

    problem: what is wrong and the way out; None when nothing is.
    body: of the answer to the role's request; empty when there was a problem.
    """

    problem: str | None
    body: bytes = b""


async def examine(address: str, role: Role) -> Finding:
    """Connect, ask, and say what is there. Takes some seconds at most."""
    try:
        stream = await _connect(address)
    except OSError as error:
        return Finding(_connect_problem(error))
    except ValueError as error:  # a malformed address or name
        return Finding(str(error))
    async with stream:
        answer = await _ask(stream, role)
    if isinstance(answer, ResponseReceived):
        return _judge(answer.command, bytes(answer.body), role)
    return Finding(await _silence_problem(address, answer, role))


def recognise(start: bytes) -> str | None:
    """The protocol of a server whose first bytes are ``start``, if we know it."""
    if start.startswith((b"\x15\x03", b"\x16\x03")):
        return "TLS"
    is_frame = len(start) >= 9 and start[5:9] == b"\0\0\0\0"
    if is_frame and start[3] in {_HTTP2_SETTINGS, _HTTP2_GOAWAY}:
        return "HTTP/2 (gRPC speaks it: is this the port of a proxy?)"
    return foreign_protocol(start)


async def _connect(address: str) -> trio.SocketStream:
    """Raises OSError, the most telling one of several addresses of a name."""
    host, port = split_address(address)
    with trio.move_on_after(CONNECT_TIMEOUT_S):
        found = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
        family, kind, protocol, _, place = found[0]
        sock = trio.socket.socket(family, kind, protocol)
        try:
            await sock.connect(place)
        except BaseException:
            sock.close()
            raise
        return trio.SocketStream(sock)
    raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))


def _connect_problem(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: nothing listens on this port; start it, or mend the address"
    if isinstance(error, TimeoutError):
        return (
            f"no connection within {CONNECT_TIMEOUT_S:g} s: the machine is down, or a firewall "
            "drops what we send"
        )
    if isinstance(error, trio.socket.gaierror):
        return f"the name does not resolve ({error.strerror}): mend it, or the machine's DNS"
    return f"{error.strerror or error}: no way to that machine from here"


async def _ask(stream: trio.SocketStream, role: Role) -> ResponseReceived[Role] | bytes:
    """The answer to the role's request, or the bytes that came instead."""
    connection: Connection[Role] = Connection()
    _, buffers = connection.request(role.value, waiter=role)
    received = b""
    with trio.move_on_after(ANSWER_TIMEOUT_S):
        try:
            await stream.send_all(b"".join(buffers))
            while data := await stream.receive_some(_RECEIVE_BYTES):
                # The beginning identifies a server; some may send forever.
                received = (received + data)[:_RECEIVE_BYTES]
                for event in connection.receive_data(data):
                    if isinstance(event, ResponseReceived):
                        return event
        except (trio.BrokenResourceError, RemoteProtocolError):
            pass  # judged by what has come
    return received


def _judge(command: Command, body: bytes, role: Role) -> Finding:
    if command.code == ResponseCode.SUCCESS:
        return Finding(None, body)
    if command.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
        other = Role.BROKER if role is Role.NAMESERVER else Role.NAMESERVER
        return Finding(f"this is no {role}; it may be a {other}: mend the address")
    return Finding(f"it answers {command.code}: {command.remark or 'without a reason'}")


async def _silence_problem(address: str, received: bytes, role: Role) -> str:
    """Why there was no answer: names the protocol that the server does speak, if it can."""
    protocol = recognise(received) or await _foreign(address)
    if protocol:
        return f"this port speaks {protocol}: it is no {role}, mend the address"
    if received:
        return f"this is no {role}: it sent {received[:16]!r}..."
    return (
        f"it takes connections but does not answer: no {role}, or one that hangs; look at what "
        "listens there, and at its log"
    )


async def _foreign(address: str) -> str | None:
    for greeting in (b"GET / HTTP/1.0\r\n\r\n", _client_hello(), _HTTP2_PREFACE):
        protocol = recognise(await _greet(address, greeting))
        if protocol:
            return protocol
    return None


async def _greet(address: str, greeting: bytes) -> bytes:
    """The first bytes that a server sends to a new client that begins with ``greeting``."""
    with trio.move_on_after(_FOREIGN_TIMEOUT_S):
        try:
            async with await _connect(address) as stream:
                await stream.send_all(greeting)
                return bytes(await stream.receive_some(_RECEIVE_BYTES))
        except (OSError, trio.BrokenResourceError):
            pass
    return b""


def _client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    # It waits for the server's part; ours is what we want.
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()
