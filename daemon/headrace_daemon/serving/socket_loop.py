"""The server of clients on sockets, one turn for all that are ready.

One task owns an epoll of its own and handles all ready clients in one turn: on many connections
this halves the cost of a task per connection. The replies of a turn leave in one send per client.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
from time import perf_counter
from typing import TYPE_CHECKING, Any

import structlog
import trio

from headrace_daemon.serving.socket_transport import READ, WRITE, SocketTransport
from headrace_protocol.errors import RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_daemon.serving.server import RemotingServer
    from headrace_daemon.serving.server_channel import ServerChannel
    from headrace_daemon.serving.tls_transport import Security

log = structlog.get_logger("headrace.server")

_RECEIVE_BYTES = 256 * 1024
# Most bytes of one read from a heavy client while others send: a millisecond of small messages.
_SHARED_RECEIVE_BYTES = 64 * 1024
# A read of this size makes a client heavy.
_HEAVY_BYTES = 16 * 1024
# A heavy client is alone if no light one has sent anything for so long.
_COMPANY_S = 0.1
# A read whose requests take longer than this is followed by a smaller one, down to the minimum.
_RECEIVE_S_MAX = 0.01
_RECEIVE_BYTES_MIN = 512
_ACCEPT_PAUSE_S = 1.0
_ACCEPTED_AT_ONCE = 64
# Longest time that the replies of a turn wait for the rest of it.
_LIGHT_TURN_S = 0.005
# Longest time that light clients keep heavy ones waiting.
_HEAVY_WAIT_S = 0.02
# Longest time that requests keep the rest of large answers waiting: 100 MB/s leave beside them.
LARGE_WAIT_S = 0.005


async def serve_sockets(
    server: RemotingServer,
    listeners: list[socket.socket],
    security: Security | None = None,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled; closes listeners and clients at the end.

    security: for ports that speak TLS.
    """
    sockets = SocketLoop(server, listeners, security)
    try:
        async with trio.open_nursery() as nursery:
            # First: clients may have sent their handshakes before the start.
            if security is not None:
                await nursery.start(security.run, server)
            nursery.start_soon(sockets.run)
            nursery.start_soon(server.sweep)
            task_status.started()
    finally:
        # Closing a client may notify clients that are still open, so their epoll must exist.
        server.close_all()
        sockets.close()


class SocketLoop:
    """The epoll of all TCP clients, and the order of their reads.

    A client is heavy after a large or slow read, or with deferred frames; otherwise it is light.
    """

    def __init__(
        self,
        server: RemotingServer,
        listeners: list[socket.socket],
        security: Security | None = None,
        now_s: Callable[[], float] = perf_counter,
    ) -> None:
        self._now_s = now_s
        self.epoll = select.epoll()
        self.server = server
        self._security = security
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self.channels: dict[int, ServerChannel] = {}
        self._buffer = memoryview(bytearray(_RECEIVE_BYTES))
        self._shared_buffer = self._buffer[:_SHARED_RECEIVE_BYTES]
        self._accept_again_at: float | None = None
        # Events for which the last turn had no time.
        self._postponed: list[tuple[int, int]] = []
        # Heavy clients with something to serve, the next one first.
        self._heavy: dict[int, ServerChannel] = {}
        # Clients that accept more of their answers, the next one first.
        self._writable: dict[int, ServerChannel] = {}
        # Bytes of large answers that may still leave in this turn.
        self.room = server.limits.turn_send_bytes
        self._light_at = self._heavy_at = self._large_at = 0.0
        for listener in listeners:
            listener.setblocking(False)
            self.epoll.register(listener, READ)

    def close(self) -> None:
        """Close the listeners."""
        self.epoll.close()
        for listener in self._listeners.values():
            listener.close()

    async def run(self) -> None:
        """Serve until cancelled."""
        others_at = trio.current_time()
        while True:
            # While clients are busy, polling again costs less than waiting through the scheduler.
            wait_s = 0 if self._heavy else self.server.busy_wait_s
            events = self._postponed or self.epoll.poll(wait_s)
            if events or self._heavy:
                self.handle(events)
                if trio.current_time() - others_at < self.server.busy_turns_s:
                    continue
                await trio.lowlevel.checkpoint()
            else:
                await self._wait()
            others_at = trio.current_time()

    async def _wait(self) -> None:
        if self._accept_again_at is None:
            await trio.lowlevel.wait_readable(self.epoll.fileno())
            return
        with trio.move_on_at(self._accept_again_at) as waited:
            await trio.lowlevel.wait_readable(self.epoll.fileno())
        if waited.cancelled_caught:
            self._accept_again_at = None
            for listener in self._listeners:
                self.epoll.modify(listener, READ)

    def handle(self, events: list[tuple[int, int]]) -> None:
        """Serve the light clients in one turn, then one heavy client in another.

        Events for which a turn has no time come first in the next, so no client starves. A heavy
        client is served when no light one is left, and at least every ``_HEAVY_WAIT_S``: while
        other processes keep the CPU busy, there is always a light client left.

        The rest of large answers leaves last, and of all clients together only so much: readers of
        history, however many, take a share of each turn and no more.
        """
        self.room = self.server.limits.turn_send_bytes
        server = self.server
        waiting = iter(events)
        served = bool(self._heavy)
        end = self._now_s() + _LIGHT_TURN_S
        server.begin_turn()
        try:
            for fd, mask in waiting:
                channel = self.channels.get(fd)
                if channel is None:
                    if fd in self._listeners:
                        self._accept(self._listeners[fd])
                    continue
                if mask & WRITE:
                    self._writable[fd] = channel
                if mask & ~WRITE and channel.is_open:
                    if channel.is_heavy:
                        self._heavy[fd] = channel
                        served = True
                        continue
                    self._readable(channel, self._buffer)
                    self._light_at = end
                    served = True
                if self._now_s() > end:
                    break
        finally:
            server.end_turn()
        self._postponed = list(waiting)
        if self._heavy and (not self._postponed or end > self._heavy_at + _HEAVY_WAIT_S):
            self._handle_heavy(end)
        if self._writable and (not served or end > self._large_at + LARGE_WAIT_S):
            self._send_large(end)

    def _send_large(self, now: float) -> None:
        self._large_at = now
        while self._writable and self.room > 0:
            channel = self._writable.pop(next(iter(self._writable)))
            if channel.is_open:
                self.server.guard(channel, self.server.send_more)

    def _handle_heavy(self, now: float) -> None:
        self._heavy_at = now
        channel = self._heavy.pop(next(iter(self._heavy)))
        is_alone = not self._heavy and now - self._light_at > _COMPANY_S
        self.server.begin_turn()
        try:
            if channel.deferred:
                self.server.guard(channel, self.server.serve_deferred)
                self._schedule_deferred(channel)
            elif channel.is_open:
                self._readable(channel, self._buffer if is_alone else self._shared_buffer)
        finally:
            self.server.end_turn()

    def _readable(self, channel: ServerChannel, buffer: memoryview) -> None:
        transport = channel.transport
        assert isinstance(transport, SocketTransport)
        began = self._now_s()
        try:
            data = transport.receive(channel, buffer[: channel.receive_bytes])
        except BlockingIOError:
            return
        except OSError:
            data = None
        except RemoteProtocolError as error:
            self.server.close_faulty(channel, error)
            return
        if data:
            count = len(data)
            channel.is_heavy = count >= _HEAVY_BYTES
            self.server.received(channel, data)
            self._schedule_deferred(channel)
            self._adjust_receive_bytes(channel, count, self._now_s() - began)
        else:
            self.server.close_channel(channel, "")

    def _schedule_deferred(self, channel: ServerChannel) -> None:
        """Queue a client with deferred frames as a heavy one."""
        if channel.deferred:
            channel.is_heavy = True
            transport = channel.transport
            assert isinstance(transport, SocketTransport)
            self._heavy[transport.socket.fileno()] = channel

    def _adjust_receive_bytes(self, channel: ServerChannel, count: int, seconds: float) -> None:
        """Set the size of a client's next read by the time that ``count`` bytes took."""
        if seconds > _RECEIVE_S_MAX:
            channel.is_heavy = True
            channel.receive_bytes = max(int(count * _RECEIVE_S_MAX / seconds), _RECEIVE_BYTES_MIN)
        elif channel.receive_bytes < _RECEIVE_BYTES and seconds < _RECEIVE_S_MAX / 2:
            channel.receive_bytes = min(2 * channel.receive_bytes, _RECEIVE_BYTES)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                client, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._accept_failed(error)
                return
            if self.server.has_room(address[0]):
                self.add(client, address)
            else:
                client.close()

    def _accept_failed(self, error: OSError) -> None:
        if error.errno not in {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}:
            return
        if self.server.close_oldest_newcomer(f"{error.strerror}, raise the limit of open files"):
            return
        # The listener stays readable: ignore it for a while instead of spinning.
        log.error("can't accept", reason=str(error), remedy="raise the limit of open files")
        for fd in self._listeners:
            self.epoll.modify(fd, 0)
        self._accept_again_at = trio.current_time() + _ACCEPT_PAUSE_S

    def add(self, client: socket.socket, address: Any) -> None:
        """Serve a client that is connected."""
        client.setblocking(False)
        with contextlib.suppress(OSError):  # not TCP
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        fd = client.fileno()
        if self._security is None:
            transport = SocketTransport(client, self)
        else:
            transport = self._security.transport(client, self)
        channel = self.server.open_channel(transport, address[0], address[1])
        self.channels[fd] = channel
        self.server.guard(channel, lambda _: self.epoll.register(fd, READ))
