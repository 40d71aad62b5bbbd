"""A client's connection over a plain blocking socket, for scripts and Spark tasks.

Used by one thread at a time. No event loop, no threads: bytes move while a call waits.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from headrace_protocol.connection import Connection, Event, RequestReceived
from headrace_protocol.drivers.address import split_address
from headrace_protocol.drivers.errors import ConnectFailed, ConnectionLost, RequestTimeout
from headrace_protocol.drivers.response import Response
from headrace_protocol.errors import RemoteProtocolError

if TYPE_CHECKING:
    import msgspec

    from headrace_protocol.frame import Buffer

ResponseCallback = Callable[[Response], None]
_Waiter = tuple[int, ResponseCallback]

RECEIVE_BYTES = 64 * 1024


class BlockingConnection:
    """Requests and their answers over one socket; use it in a ``with`` block.

    The other side's own requests (notices to consumers) are not for such clients and dropped.
    """

    def __init__(self, sock: socket.socket, address: str) -> None:
        """sock: connected; from here on this connection's. address: its name in errors."""
        self.address = address
        self._socket = sock
        self._socket.setblocking(False)
        self._connection: Connection[_Waiter] = Connection()
        self._outgoing = bytearray()
        self._poll = select.poll()
        self._is_open = True
        self._last_code = 0

    @classmethod
    def connect(cls, address: str, *, timeout_ms: float = 5000) -> BlockingConnection:
        """Open a TCP connection to ``host:port``. Raises ConnectFailed."""
        try:
            sock = socket.create_connection(split_address(address), timeout_ms / 1000)
        except (OSError, ValueError) as error:  # ValueError: a malformed address
            raise ConnectFailed(address, error) from error
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(sock, address)

    @property
    def peer_is_headrace(self) -> bool:
        """Whether the other side is ours; known with its first answer."""
        return self._connection.peer_is_headrace

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket; requests that wait are forgotten."""
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
        """Ask and wait for the answer, whatever its code.

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
        """Queue a request; ``callback`` gets its answer during a later call that waits."""
        self._last_code = code
        opaque, buffers = self._connection.request(code, header, body, waiter=(code, callback))
        self._queue(buffers)
        return opaque

    def oneway(self, code: int, header: msgspec.Struct | None = None, body: Buffer = b"") -> None:
        """Queue a request that gets no answer; it goes out with the next call that waits."""
        self._queue(self._connection.oneway(code, header, body))

    def drain(self, waiting_max: int = 0, *, timeout_ms: float) -> None:
        """Send what is queued and wait until at most ``waiting_max`` answers are outstanding.

        Raises RequestTimeout (naming the last request) if they don't come in time, ConnectionLost.
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
                del self._outgoing[: self._socket.send(self._outgoing)]
            events = self._receive() if ready & ~select.POLLOUT else []
        except (OSError, RemoteProtocolError) as error:
            self.close()
            raise ConnectionLost(self.address, error) from error
        for event in events:
            if not isinstance(event, RequestReceived):
                code, callback = event.waiter
                callback(Response(self.address, code, event.command, event.body))
        return bool(ready)

    def _wait(self, deadline: float) -> int:
        """The poll events that came before the deadline, 0 if none did."""
        # Both ways at once: two sides that only send would wait for each other for ever.
        wanted = select.POLLIN | (select.POLLOUT if self._outgoing else 0)
        self._poll.register(self._socket, wanted)
        remaining_ms = max(0.0, deadline - time.monotonic()) * 1000
        return next((event for _, event in self._poll.poll(remaining_ms)), 0)

    def _receive(self) -> list[Event[_Waiter]]:
        room = self._connection.room()
        if room is None:
            data = self._socket.recv(RECEIVE_BYTES)
            received = len(data)
            events = self._connection.receive_data(data)
        else:
            received = self._socket.recv_into(room)
            events = self._connection.received(received)
        if not received:
            raise ConnectionResetError("the other side closed it")
        return events
