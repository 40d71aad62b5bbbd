"""Clients of a port that speaks TLS: the first byte of each tells whether it does."""

from __future__ import annotations

import contextlib
import socket
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from headrace_daemon.serving.handshakes import Handshakes
from headrace_daemon.serving.socket_transport import SocketTransport, drop_sent, first_of
from headrace_protocol.errors import RemoteProtocolError
from headrace_protocol.tls.session import RECORD_BYTES_MAX, TlsSession

if TYPE_CHECKING:
    from headrace_daemon.serving.certificates import Certificates
    from headrace_daemon.serving.server import RemotingServer
    from headrace_daemon.serving.server_channel import ServerChannel
    from headrace_daemon.serving.socket_transport import Loop

# A record of a handshake; a frame begins with 0, or with 1 if it has 16 MiB.
_HANDSHAKE: Final = b"\x16"
# Fatal alerts, "protocol version", by which a plain client recognises TLS: it reads 8 bytes.
_ALERT: Final = 2 * bytes((0x15, 3, 3, 0, 2, 2, 70))
_NO_TLS: Final = (
    "no TLS, which this port requires: connect with TLS (tls=True, HEADRACE_TLS=1; Apache "
    "RocketMQ's clients: -Dtls.enable=true)"
)
_PLAIN_BYTES: Final = 256 * 1024
# Most plaintext that becomes records at a time.
_PIECE_BYTES: Final = 128 * 1024


class Security:
    """Certificate, buffer and rates of handshakes, which all clients of a server share."""

    def __init__(self, certificates: Certificates) -> None:
        self.certificates = certificates
        self.room = memoryview(bytearray(_PLAIN_BYTES + RECORD_BYTES_MAX))
        self._handshakes = Handshakes()
        self._server: RemotingServer | None = None
        self._nursery: trio.Nursery | None = None

    async def run(self, server: RemotingServer, *, task_status: trio.TaskStatus[None]) -> None:
        """Watch the certificate's files and admit handshakes, until cancelled."""
        async with trio.open_nursery() as self._nursery:
            self._server = server
            task_status.started()
            self._nursery.start_soon(self.certificates.run)

    def transport(self, client: socket.socket, loop: Loop) -> SocketTransport:
        """The transport of a new client."""
        return _NewTransport(client, loop, self)

    def admit(self, channel: ServerChannel, transport: _NewTransport) -> None:
        """Have a client wait for its handshake."""
        assert self._nursery is not None
        transport.set_reading(reading=False)
        self._nursery.start_soon(self._admit, channel, transport)

    async def _admit(self, channel: ServerChannel, transport: _NewTransport) -> None:
        assert self._server is not None
        host = channel.address.rpartition(":")[0]
        for take in (partial(self._handshakes.take_of, host), self._handshakes.take):
            wait_s = take(trio.current_time())
            if wait_s is None:
                self._server.turn_away(channel, "too many TLS handshakes")
                return
            await trio.sleep(wait_s)
        if channel.is_open:
            self._server.guard(channel, partial(self._begin, transport))

    def _begin(self, transport: _NewTransport, channel: ServerChannel) -> None:
        """Begin the handshake."""
        channel.transport = transport.secured(self)
        channel.certificate = self.certificates.certificate
        channel.partial_since = trio.current_time()
        channel.is_shaking_hands = True
        transport.set_reading(reading=True)


class _NewTransport(SocketTransport):
    """A client that has sent nothing yet, or waits for its handshake."""

    __slots__ = ("_is_waiting", "_security")

    def __init__(self, client: socket.socket, loop: Loop, security: Security) -> None:
        super().__init__(client, loop)
        self._security = security
        self._is_waiting = False

    def receive(self, channel: ServerChannel, room: memoryview) -> memoryview:
        """See SocketTransport. Raises BlockingIOError until the client may begin its handshake."""
        if self._is_waiting:
            return room[:0]  # it is not read, so it has closed the connection
        first = self.socket.recv(1, socket.MSG_PEEK)
        if first == _HANDSHAKE:
            self._is_waiting = True
            self._security.admit(channel, self)
            raise BlockingIOError
        if first and self._security.certificates.is_enforced:
            with contextlib.suppress(OSError):
                # A socket that is closed with unread bytes takes back what it has sent.
                self.socket.recv_into(room)
                self.socket.send(_ALERT)
            self._loop.server.turn_away(channel, _NO_TLS)
            raise BlockingIOError
        channel.transport = plain = SocketTransport(self.socket, self._loop)
        return plain.receive(channel, room)

    def secured(self, security: Security) -> TlsTransport:
        """The transport of the same client for its handshake and all that follows."""
        return TlsTransport(self.socket, self._loop, security)


class TlsTransport(SocketTransport):
    """A client with TLS. Its channel's output is plaintext until the client accepts it.

    session: the connection's TLS.
    """

    __slots__ = ("_plain", "_unsent", "_unsent_plain_bytes", "session")

    def __init__(self, client: socket.socket, loop: Loop, security: Security) -> None:
        super().__init__(client, loop)
        self.session = TlsSession(security.certificates.context)
        self._plain = security.room
        self._unsent = memoryview(b"")
        self._unsent_plain_bytes = 0

    def receive(self, channel: ServerChannel, room: memoryview) -> memoryview:
        """See SocketTransport. Raises BlockingIOError without plaintext, RemoteProtocolError."""
        received = room[: self.socket.recv_into(room)]
        if not received:
            return received
        try:
            count = self.session.decrypt(received, self._plain)
        except RemoteProtocolError:
            with contextlib.suppress(OSError):
                self.socket.send(self.session.pending())
            raise
        if channel.is_shaking_hands and self.session.is_ready:
            self._end_handshake(channel)
        if self.session.has_pending:
            channel.write()  # it leaves with the answers of the turn
        if not count and not self.session.is_ended:
            raise BlockingIOError
        return self._plain[:count]

    def _end_handshake(self, channel: ServerChannel) -> None:
        channel.is_encrypted, channel.is_shaking_hands = True, False
        user = self.session.user
        if user is not None and self._loop.server.is_user(user):
            channel.log_in(user)
            self._loop.server.on_log_in(channel, user, True)

    def flush(self, channel: ServerChannel) -> None:
        """See SocketTransport."""
        room = max(self._loop.room, self._loop.server.limits.small_send_bytes)
        begin = channel.out_bytes
        try:
            while self._unsent or self._add_records(channel, room - begin + channel.out_bytes):
                self._send_records(channel)
        except BlockingIOError:
            pass
        except OSError:
            channel.close("")
            return
        self._loop.room -= begin - channel.out_bytes
        self._set_writing(writing=bool(self._unsent or channel.out))

    def _add_records(self, channel: ServerChannel, room: int) -> bool:
        """Make records of a piece of the output, as far as there is room; False without any."""
        out = channel.out
        if out and room > 0:
            piece = first_of(out, min(room, _PIECE_BYTES))
            self._unsent_plain_bytes = sum(map(len, piece))
            self.session.encrypt(piece[0] if len(piece) == 1 else b"".join(piece))
            drop_sent(out, self._unsent_plain_bytes)
        self._unsent = memoryview(self.session.pending())
        return bool(self._unsent)

    def _send_records(self, channel: ServerChannel) -> None:
        """Send all records. Raises BlockingIOError if the client accepts only some."""
        while self._unsent:
            self._unsent = self._unsent[self.socket.send(self._unsent) :]
        channel.out_bytes -= self._unsent_plain_bytes
        self._unsent_plain_bytes = 0

    def close(self) -> None:
        """See Transport. The client learns that nothing was cut off."""
        with contextlib.suppress(OSError):
            if not self._unsent:
                self.socket.send(self.session.end())
        super().close()
