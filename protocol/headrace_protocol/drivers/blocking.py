"""A client's connection over a plain blocking socket, for scripts and Spark tasks.

Not thread-safe. Uses neither an event loop nor threads: bytes move only during calls that wait.
"""

from __future__ import annotations

import math
import select
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Self

from headrace_protocol.codes import RequestCode
from headrace_protocol.connection import Connection, Event, RequestReceived
from headrace_protocol.drivers.address import split_address
from headrace_protocol.drivers.errors import (
    ConnectFailed,
    ConnectionLost,
    RequestTimeout,
    connection_ended,
)
from headrace_protocol.drivers.response import Response
from headrace_protocol.errors import RemoteProtocolError
from headrace_protocol.rights.bearer import RENEWAL
from headrace_protocol.tls.names import ServerNames
from headrace_protocol.tls.sockets import connect_secured

if TYPE_CHECKING:
    import msgspec

    from headrace_protocol.frame import Buffer
    from headrace_protocol.rights.credentials import Credentials, Token
    from headrace_protocol.tls.settings import ClientTls

ResponseCallback = Callable[[Response], None]
_Waiter = tuple[int, ResponseCallback]

RECEIVE_BYTES = 64 * 1024
# A record of TLS that is not whole yet.
_TLS_WAITS = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


class BlockingConnection:
    """Requests and responses over one socket. A context manager.

    Requests from the peer, such as notices to consumers, are discarded.
    """

    def __init__(self, sock: socket.socket, address: str) -> None:
        """sock: connected, owned by this connection from now on. address: its name in errors."""
        self.address = address
        self._socket = sock
        self._socket.setblocking(False)
        self._connection: Connection[_Waiter] = Connection()
        self._outgoing = bytearray()
        self._poll = select.poll()
        self._is_open = True
        self._last_code = 0
        # When a log-in by a token is to be repeated, on the monotonic clock.
        self._due_s = math.inf

    @classmethod
    def connect(
        cls,
        address: str,
        tls: ClientTls | None = None,
        proof: Credentials | Token | None = None,
        names: ServerNames | None = None,
        *,
        timeout_ms: float = 5000,
    ) -> BlockingConnection:
        """Open a connection to ``host:port`` and log in, if there is a proof of a user.

        names: of servers with TLS, as the client learns them.

        Raises ConnectFailed, TlsFailed; with a proof also what ``log_in`` raises.
        """
        open_socket = partial(_open_socket, address, timeout_ms / 1000)
        sock = (
            open_socket()
            if tls is None
            else connect_secured(open_socket, tls, address, names or ServerNames())
        )
        connection = cls(sock, address)
        if proof is not None:
            connection._log_in(proof)
        return connection

    def _log_in(self, proof: Credentials | Token) -> None:
        from headrace_protocol.drivers.login import TIMEOUT_MS, log_in_blocking

        ask = partial(self.request, RequestCode.AUTH_SESSION, timeout_ms=TIMEOUT_MS)
        try:
            lifetime_s = log_in_blocking(self, ask, proof)
        except BaseException:
            self.close()
            raise
        if lifetime_s is not None:
            self._due_s = time.monotonic() + RENEWAL * lifetime_s

    @property
    def is_log_in_due(self) -> bool:
        """True if the token of the log-in ends soon, so that a new connection should be opened.

        Never while a response is outstanding, whose request would have to be sent again.
        """
        is_idle = not (self._connection.waiting_count or self._outgoing)
        return is_idle and time.monotonic() >= self._due_s

    @property
    def certificate(self) -> bytes | None:
        """The certificate that the peer has shown, DER; None without TLS."""
        sock = self._socket
        return sock.getpeercert(binary_form=True) if isinstance(sock, ssl.SSLSocket) else None

    def sign_as(self, credentials: Credentials) -> None:
        """Sign each request from now on."""
        self._connection.sign = credentials.signed

    @property
    def peer_is_headrace(self) -> bool:
        """True if the peer is headrace; known with its first response."""
        return self._connection.peer_is_headrace

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket and drop pending requests."""
        self._is_open = False
        self._connection.abandon()
        self._socket.close()

    def request(
        self,
        code: int,
        header: msgspec.Struct | None = None,
        body: Buffer = b"",
        *,
        timeout_ms: float,
    ) -> Response:
        """Send a request and wait for its response, whatever its code.

        Raises RequestTimeout, ConnectionLost, LocalProtocolError (too large for a frame).
        """
        answers: list[Response] = []
        opaque = self.submit(code, header, body, answers.append)
        deadline = time.monotonic() + timeout_ms / 1000
        try:
            while not answers:
                if not self._move_bytes(deadline):
                    raise RequestTimeout(self.address, code, timeout_ms)
        finally:
            self._connection.forget(opaque)
        return answers[0]

    def submit(
        self, code: int, header: msgspec.Struct | None, body: Buffer, callback: ResponseCallback
    ) -> int:
        """Queue a request; ``callback`` gets its response during a later call that waits."""
        self._last_code = code
        opaque, buffers = self._connection.request(code, header, body, waiter=(code, callback))
        self._queue(buffers)
        return opaque

    def oneway(self, code: int, header: msgspec.Struct | None = None, body: Buffer = b"") -> None:
        """Queue a one-way request, sent during the next call that waits."""
        self._queue(self._connection.oneway(code, header, body))

    def drain(self, waiting_max: int = 0, *, timeout_ms: float) -> None:
        """Send queued requests and wait until at most ``waiting_max`` responses are outstanding.

        Raises ConnectionLost, and RequestTimeout (for the last request) after ``timeout_ms``.
        """
        deadline = time.monotonic() + timeout_ms / 1000
        while self._outgoing or self._connection.waiting_count > waiting_max:
            if not self._move_bytes(deadline):
                raise RequestTimeout(self.address, self._last_code, timeout_ms)

    def _queue(self, buffers: list[Buffer]) -> None:
        if not self._is_open:
            raise ConnectionLost(self.address, "this client closed it")
        for buffer in buffers:
            self._outgoing += buffer

    def _move_bytes(self, deadline: float) -> bool:
        """Wait once, then send and receive what is possible; False at the deadline."""
        try:
            ready = self._wait(deadline)
            if ready & select.POLLOUT:
                del self._outgoing[: self._sent()]
            events = self._receive() if ready & ~select.POLLOUT else []
        except (OSError, RemoteProtocolError) as error:
            self.close()
            raise connection_ended(self.address, error) from error
        for event in events:
            if not isinstance(event, RequestReceived):
                code, callback = event.waiter
                callback(Response(self.address, code, event.command, event.body))
        return bool(ready)

    def _wait(self, deadline: float) -> int:
        """The poll events before the deadline; 0 if there are none."""
        # Poll for both directions: two sides that only send would deadlock.
        wanted = select.POLLIN | (select.POLLOUT if self._outgoing else 0)
        self._poll.register(self._socket, wanted)
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return select.POLLIN
        remaining_ms = max(0.0, deadline - time.monotonic()) * 1000
        return next((event for _, event in self._poll.poll(remaining_ms)), 0)

    def _sent(self) -> int:
        """Send what the socket takes; the number of bytes."""
        try:
            return self._socket.send(self._outgoing)
        except _TLS_WAITS:
            return 0

    def _receive(self) -> list[Event[_Waiter]]:
        room = self._connection.room()
        try:
            if room is None:
                data = self._socket.recv(RECEIVE_BYTES)
                received = len(data)
                events = self._connection.receive_data(data)
            else:
                received = self._socket.recv_into(room)
                events = self._connection.received(received)
        except _TLS_WAITS:
            return []
        if not received:
            raise ConnectionResetError("the peer closed it")
        return events


def _open_socket(address: str, timeout_s: float) -> socket.socket:
    try:
        sock = socket.create_connection(split_address(address), timeout_s)
    except (OSError, ValueError) as error:  # ValueError: a malformed address
        raise ConnectFailed(address, error) from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
