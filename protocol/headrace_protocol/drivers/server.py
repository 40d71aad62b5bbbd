"""Serves the protocol on sockets and streams, a batch of ready clients at a time.

One task owns an epoll of its own, waits for it as a whole, and handles every client that is ready
as one batch: on many connections this halves the cost of a task per connection
(docs/performance.md "Serving"). Replies of a batch leave in one send per client.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import select
import socket
import struct
from collections import Counter
from dataclasses import dataclass, field
from ipaddress import ip_address
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import structlog
import trio

from headrace_protocol.bounds import HEADER_BYTES_MAX
from headrace_protocol.codes import code_name
from headrace_protocol.drivers.host_log import HostLog
from headrace_protocol.drivers.process import connections_max
from headrace_protocol.errors import RemoteProtocolError
from headrace_protocol.frame import FRAME_BYTES_MAX, FrameReader
from headrace_protocol.serving import admit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace_protocol.frame import Buffer, Frame
    from headrace_protocol.serving import Request

log = structlog.get_logger("headrace.server")

_RECEIVE_BYTES = 256 * 1024
# What is read at once of somebody who sends much while others have something to say: a millisecond
# of small messages.
_SMALL_RECEIVE_BYTES = 64 * 1024
_HEAVY_BYTES = 16 * 1024
_COMPANY_S = 0.1
# What is read at once of somebody new, and of somebody whose requests take long: as many as take
# so long together.
_FIRST_RECEIVE_BYTES = 4 * 1024
_LEAST_RECEIVE_BYTES = 512
_TURN_S = 0.01
_BUFFERS_PER_SEND = 1024  # IOV_MAX on Linux
# How much of large answers is sent at once: a quarter of a millisecond.
_SENT_AT_ONCE = 512 * 1024
_BACKLOG = 1024
_SWEEP_S = 5.0
_ACCEPT_PAUSE_S = 1.0
_ACCEPTED_AT_ONCE = 64
_SWEPT_AT_ONCE = 200
_REPORTED_AT_ONCE = 10
# How long the replies of a batch may wait for the rest of it.
_BATCH_S = 0.005
# How long those who send little may keep those who send much waiting for their next turn.
_HEAVY_WAIT_S = 0.02
# How long the server keeps others in its loop waiting; the least that epoll can wait.
_BUSY_WAIT_S = 0.001
_READ = select.EPOLLIN
_WRITE = select.EPOLLOUT


@dataclass(frozen=True)
class ServerLimits:
    """What a client, and all of them together, may hold.

    frame_bytes_max: largest frame. connection_bytes_max: replies that one client has not taken
    before its requests are no longer read. total_bytes_max: unfinished frames, untaken replies and
    held requests of all clients; above it the greediest client is closed. connections_max: a
    client more takes the place of the oldest that has not said anything yet, or is refused when
    there is none. idle_s: silence before a client is closed, as the peer does. half_frame_s: how
    long an unfinished frame may take, and the first one from the start of the connection.
    """

    frame_bytes_max: int = FRAME_BYTES_MAX
    connection_bytes_max: int = 64 * 1024 * 1024
    total_bytes_max: int = 1024 * 1024 * 1024
    connections_max: int = field(default_factory=connections_max)
    idle_s: float = 120.0
    half_frame_s: float = 30.0


class FrameHandler(Protocol):
    """What a daemon does with frames."""

    def handle(self, channel: ServerChannel, frames: list[Frame]) -> list[Frame]:
        """Serve the frames that one client sent at once.

        Returns the remaining frames if the turn ran out of time: pass them again later.
        """

    def finish_batch(self) -> None:
        """All ready clients were handled; their replies, which must be true, leave after this."""

    def replied(self) -> None:
        """The replies are out; what they did not have to wait for is done now."""

    def closed(self, channel: ServerChannel) -> None:
        """A client is gone."""


class ServerChannel:
    """One client: what came in pieces, and what waits to go out."""

    __slots__ = (
        "_server",
        "address",
        "charged_bytes",
        "host_bytes",
        "is_dirty",
        "is_greeted",
        "is_heavy",
        "is_held_back",
        "is_open",
        "is_slow",
        "is_stranger",
        "last_heard",
        "later",
        "on_drained",
        "out",
        "out_bytes",
        "partial_bytes",
        "partial_since",
        "reader",
        "transport",
        "turn_bytes",
    )

    def __init__(self, server: RemotingServer, transport: _Transport, host: str, port: int) -> None:
        self._server = server
        self.transport = transport
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.host_bytes = pack_host(host, port)
        self.reader = FrameReader(server.limits.frame_bytes_max, admit, HEADER_BYTES_MAX)
        self.out: list[Buffer] = []
        # Frames deferred to the next turn; no more are read until they are served.
        self.later: list[Frame] = []
        self.out_bytes = self.partial_bytes = self.charged_bytes = 0
        self.partial_since = self.last_heard = trio.current_time()
        self.is_open = True
        self.is_dirty = self.is_greeted = self.is_slow = self.is_held_back = False
        self.on_drained: Callable[[], None] | None = None
        # Sends much at a time; see _SocketLoop.
        self.is_heavy = False
        # Until its first whole frame.
        self.is_stranger = True
        # What is read of it at once.
        self.turn_bytes = _FIRST_RECEIVE_BYTES

    @property
    def held_bytes(self) -> int:
        """What the daemon keeps for this client."""
        return self.out_bytes + self.partial_bytes + self.charged_bytes

    def charge(self, added_bytes: int) -> None:
        """Count memory that the handler keeps for this client, or less of it."""
        if self.is_open:
            self.charged_bytes += added_bytes
            self._server.charged(added_bytes)

    def write(self, *buffers: Buffer) -> None:
        """Queue bytes; they leave at the end of the batch, or now when there is none."""
        if self.is_open:
            added = 0
            for buffer in buffers:
                self.out.append(buffer)
                added += len(buffer)
            self.out_bytes += added
            self._server.written(self, added)

    def close(self, reason: str) -> None:
        """Cut the client off."""
        self._server.close_channel(self, reason)


class _Transport(Protocol):
    def flush(self, channel: ServerChannel) -> None: ...
    def set_reading(self, *, reading: bool) -> None: ...
    def close(self) -> None: ...


class RemotingServer:
    """All clients of one daemon.

    A request can cost its client the connection, and nobody else anything. An error in what the
    handler does for all clients (``finish_batch``, ``replied``) ends the server: replies may be
    false.

    unexpected_errors: how many there were; each is logged with its traceback.
    host_log: for events that clients can cause.
    owns_loop: nothing else in this event loop is urgent by a millisecond. While clients are busy
        the server then waits for them by itself, which saves most of the scheduler's share of a
        lone request's time.
    """

    def __init__(
        self,
        handler: FrameHandler,
        limits: ServerLimits | None = None,
        *,
        owns_loop: bool = False,
    ) -> None:
        self.limits = limits or ServerLimits()
        self.busy_wait_s = _BUSY_WAIT_S if owns_loop else 0.0
        self.held_bytes = 0
        self.channels: set[ServerChannel] = set()
        # The oldest first.
        self._strangers: dict[ServerChannel, None] = {}
        # What was done to clients without a line in the log for each: why and to whom, how often.
        self._turned_away: Counter[tuple[str, str]] = Counter()
        self.unexpected_errors = 0
        self.host_log = HostLog(log)
        self._handler = handler
        self._dirty: list[ServerChannel] = []
        self._is_in_batch = False

    async def run(
        self,
        listeners: list[socket.socket],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until cancelled; closes listeners and clients at the end."""
        sockets = _SocketLoop(self, listeners)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sockets.run)
                nursery.start_soon(self._sweep)
                task_status.started()
        finally:
            # Those still open may be told of each that goes, so their epoll must be there.
            for channel in list(self.channels):
                self.close_channel(channel, "the server stops")
            sockets.close()

    async def serve_stream(self, stream: trio.abc.Stream, host: str, port: int) -> None:
        """Serve one client on a stream, e.g. in memory, until it ends.

        host, port: the address that the client shall seem to have.
        """
        async with stream, trio.open_nursery() as nursery:
            transport = _StreamTransport(stream, nursery.cancel_scope)
            channel = self.open_channel(transport, host, port)
            nursery.start_soon(transport.send_all_written, channel)
            try:
                while data := await transport.receive():
                    self.begin_batch()
                    self.received(channel, data)
                    self.end_batch()
                    while channel.later:
                        await trio.lowlevel.checkpoint()
                        self.begin_batch()
                        self.guard(channel, self.serve_later)
                        self.end_batch()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            finally:
                self.close_channel(channel, "")
                nursery.cancel_scope.cancel()

    # -- a batch -----------------------------------------------------------------------------------

    def begin_batch(self) -> None:
        """Let replies wait for ``end_batch``."""
        self._is_in_batch = True

    def received(self, channel: ServerChannel, data: Buffer) -> None:
        """Take the bytes of one client; they may be overwritten after this."""
        if not channel.is_open:
            return
        channel.last_heard = trio.current_time()
        try:
            frames = channel.reader.feed(data)
            if frames:
                if channel.is_stranger:
                    self._got_to_know(channel)
                self._serve(channel, frames)
        except RemoteProtocolError as error:
            self.close_channel(channel, str(error), is_fault=True)
            return
        except Exception as error:  # noqa: BLE001 - a fault costs only the client that triggers it
            self.failed(channel, error)
            return
        if channel.is_open:
            self._count_partial(channel, progressed=bool(frames))

    def _serve(self, channel: ServerChannel, frames: list[Frame]) -> None:
        later = self._handler.handle(channel, frames)
        if channel.is_open and (later or channel.later):
            self._keep(channel, later)

    def serve_later(self, channel: ServerChannel) -> None:
        """Serve the frames that a client's last turn deferred, as far as this turn allows."""
        self._serve(channel, channel.later)

    def _keep(self, channel: ServerChannel, frames: list[Frame]) -> None:
        kept_bytes = [
            sum(len(header) + len(body) for _, header, body in each)
            for each in (channel.later, frames)
        ]
        channel.later = frames
        channel.charge(kept_bytes[1] - kept_bytes[0])
        self._update_reading(channel)

    def failed(self, channel: ServerChannel, error: Exception) -> None:
        """Close a client after a fault of ours; the others stay connected."""
        self._report_unexpected(channel.address, error)
        self.close_channel(channel, "")

    def request_failed(self, request: Request, error: Exception) -> None:
        """For ``Registry``: a request failed for a fault of ours."""
        code = code_name(request.command.code)
        self._report_unexpected(request.channel.address, error, request=code)

    def _report_unexpected(self, client: str, error: Exception, **fields: Any) -> None:
        """Count and log a fault of ours that a client triggered."""
        self.unexpected_errors += 1
        self.host_log.error(client, "unexpected error", exc_info=error, **fields)

    def guard(self, channel: ServerChannel, work: Callable[[ServerChannel], None]) -> None:
        """Run ``work`` for one client; close that client if it fails."""
        try:
            work(channel)
        except RemoteProtocolError as error:
            self.close_channel(channel, str(error), is_fault=True)
        except Exception as error:  # noqa: BLE001 - as in received
            self.failed(channel, error)

    def _got_to_know(self, channel: ServerChannel) -> None:
        channel.is_stranger = False
        channel.reader.admit = None
        self._strangers.pop(channel, None)

    def end_batch(self) -> None:
        """Finish the batch and send its replies, then what follows from it."""
        try:
            self._handler.finish_batch()
            self._flush_dirty()
            self._handler.replied()
        except BaseException:
            # What the replies say may not be true; the server ends with the error.
            self._dirty.clear()
            raise
        finally:
            self._is_in_batch = False
        self._flush_dirty()

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Let replies that are written in the block leave together."""
        assert not self._is_in_batch
        self._is_in_batch = True
        try:
            yield
        finally:
            self._is_in_batch = False
        self._flush_dirty()

    def written(self, channel: ServerChannel, added_bytes: int) -> None:
        """Account for what was queued on a channel."""
        self.held_bytes += added_bytes
        if not channel.is_dirty:
            channel.is_dirty = True
            self._dirty.append(channel)
        if not self._is_in_batch:
            self._flush_dirty()

    def _flush_dirty(self) -> None:
        dirty, self._dirty = self._dirty, []
        for channel in dirty:
            channel.is_dirty = False
            if channel.is_open:
                try:
                    self._flush(channel)
                except Exception as error:  # noqa: BLE001 - as in received
                    self.failed(channel, error)

    def _flush(self, channel: ServerChannel) -> None:
        before = channel.out_bytes
        channel.transport.flush(channel)
        self.sent(channel, before - channel.out_bytes)

    def send_more(self, channel: ServerChannel) -> None:
        """A client's socket accepts more of its replies.

        A client that reads its replies late is not silent, least of all while its requests are not
        read.
        """
        self._flush(channel)
        channel.last_heard = trio.current_time()
        if channel.is_slow:
            channel.partial_since = channel.last_heard

    def sent(self, channel: ServerChannel, sent_bytes: int) -> None:
        """Account for what left; a client that does not take its replies is no longer read."""
        self.held_bytes -= sent_bytes
        limit = self.limits.connection_bytes_max
        if channel.out_bytes > limit and not channel.is_slow:
            self.host_log.warning(channel.address, "slow reader paused", bytes=channel.out_bytes)
            channel.is_slow = True
            self._update_reading(channel)
        elif channel.is_slow and channel.out_bytes < limit // 2:
            channel.is_slow = False
            self._update_reading(channel)
            _notify_drained(channel)
        if self.held_bytes > self.limits.total_bytes_max:
            self._close_greediest()

    def charged(self, added_bytes: int) -> None:
        """Account for what the handler keeps for a client."""
        self.held_bytes += added_bytes
        if self.held_bytes > self.limits.total_bytes_max:
            self._close_greediest()

    def hold_back(self, channel: ServerChannel, *, is_held_back: bool) -> None:
        """Stop reading a client that asks for more than can be done now, or go on."""
        channel.is_held_back = is_held_back
        self._update_reading(channel)

    def _update_reading(self, channel: ServerChannel) -> None:
        if channel.is_open:
            is_paused = channel.is_slow or channel.is_held_back or bool(channel.later)
            channel.transport.set_reading(reading=not is_paused)

    def _count_partial(self, channel: ServerChannel, *, progressed: bool) -> None:
        partial_bytes = channel.reader.partial_bytes
        if progressed or not (channel.partial_bytes or channel.is_stranger):
            channel.partial_since = channel.last_heard
        self.held_bytes += partial_bytes - channel.partial_bytes
        channel.partial_bytes = partial_bytes
        if self.held_bytes > self.limits.total_bytes_max:
            self._close_greediest()

    def _close_greediest(self) -> None:
        greediest = max(self.channels, key=lambda channel: channel.held_bytes)
        self.close_channel(
            greediest,
            f"all clients hold {self.held_bytes} bytes, over the limit of "
            f"{self.limits.total_bytes_max}; this one holds most, {greediest.held_bytes}: "
            f"{greediest.out_bytes} of answers that it does not take, {greediest.partial_bytes} of "
            f"an unfinished frame, {greediest.charged_bytes} of requests that wait",
            is_fault=True,
        )

    # -- channels ----------------------------------------------------------------------------------

    def open_channel(self, transport: _Transport, host: str, port: int) -> ServerChannel:
        """A new client."""
        channel = ServerChannel(self, transport, host, port)
        self.channels.add(channel)
        self._strangers[channel] = None
        return channel

    def has_room(self, host: str) -> bool:
        """Whether one more client may come; the oldest stranger makes room for it."""
        if len(self.channels) < self.limits.connections_max:
            return True
        reason = f"connections_max = {self.limits.connections_max} are open"
        if self.close_oldest_stranger(reason):
            return True
        self._turned_away[host, f"refused: {reason}"] += 1
        return False

    def close_oldest_stranger(self, reason: str) -> bool:
        """Cut off who has said nothing for longest; False when all have said something."""
        oldest = next(iter(self._strangers), None)
        if oldest is None:
            return False
        self._turn_away(oldest, f"said nothing yet: {reason}")
        return True

    def _turn_away(self, channel: ServerChannel, reason: str) -> None:
        """Close one of possibly many: the log gets a line for all of a host."""
        self._turned_away[channel.address.rpartition(":")[0], reason] += 1
        self.close_channel(channel, "")

    def close_channel(self, channel: ServerChannel, reason: str, *, is_fault: bool = False) -> None:
        """Cut a client off; ``reason`` is logged when the client is to blame."""
        if not channel.is_open:
            return
        channel.is_open = False
        self.channels.discard(channel)
        self._strangers.pop(channel, None)
        self.held_bytes -= channel.held_bytes
        channel.out.clear()
        channel.later = []
        if is_fault:
            self.host_log.warning(channel.address, "client closed", reason=reason)
        self.guard(channel, lambda channel: channel.transport.close())
        self.guard(channel, self._handler.closed)
        self.guard(channel, _notify_drained)

    async def _sweep(self) -> None:
        while True:
            await trio.sleep(_SWEEP_S)
            now = trio.current_time()
            for number, channel in enumerate(list(self.channels), 1):
                self._close_if_silent(channel, now)
                if not number % _SWEPT_AT_ONCE:
                    await trio.lowlevel.checkpoint()
            self._report_turned_away()
            self.host_log.report()

    def _close_if_silent(self, channel: ServerChannel, now: float) -> None:
        if channel.partial_bytes or channel.is_stranger:
            if now - channel.partial_since > self.limits.half_frame_s:
                self._turn_away(channel, self._unfinished(channel))
        elif now - channel.last_heard > self.limits.idle_s:
            self.close_channel(channel, "idle")

    def _unfinished(self, channel: ServerChannel) -> str:
        what = "half a frame" if channel.partial_bytes else "connected"
        return f"{what}, and no whole one within {self.limits.half_frame_s:g} s"

    def _report_turned_away(self) -> None:
        turned_away, self._turned_away = self._turned_away, Counter()
        for (host, reason), count in turned_away.most_common(_REPORTED_AT_ONCE):
            log.warning("clients turned away", host=host, count=count, reason=reason)


def _notify_drained(channel: ServerChannel) -> None:
    callback, channel.on_drained = channel.on_drained, None
    if callback is not None:
        callback()


class _SocketLoop:
    """The epoll of all TCP clients."""

    def __init__(self, server: RemotingServer, listeners: list[socket.socket]) -> None:
        self.epoll = select.epoll()
        self._server = server
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._channels: dict[int, ServerChannel] = {}
        self._buffer = memoryview(bytearray(_RECEIVE_BYTES))
        self._small_buffer = self._buffer[:_SMALL_RECEIVE_BYTES]
        self._accept_again_at: float | None = None
        # Events that a batch had no time for, and clients that send much, the next one first.
        self._put_off: list[tuple[int, int]] = []
        self._heavy: dict[int, ServerChannel] = {}
        self._light_at = self._heavy_at = 0.0
        for listener in listeners:
            listener.setblocking(False)
            self.epoll.register(listener, _READ)

    def close(self) -> None:
        self.epoll.close()
        for listener in self._listeners.values():
            listener.close()

    async def run(self) -> None:
        others_at = trio.current_time()
        while True:
            # While clients are busy, looking again costs less than waiting through the scheduler.
            wait_s = 0 if self._heavy else self._server.busy_wait_s
            events = self._put_off or self.epoll.poll(wait_s)
            if events or self._heavy:
                self._handle(events)
                if trio.current_time() - others_at < _BUSY_WAIT_S:
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
                self.epoll.modify(listener, _READ)

    def _handle(self, events: list[tuple[int, int]]) -> None:
        """Serve those who send little as one batch, then one of those who send much as another.

        What a batch has no time for comes first in the next, so nobody waits for ever. One of
        those who send much has its turn when no light client is left, and at least every
        ``_HEAVY_WAIT_S``: whenever other processes keep the CPU busy, light clients are always left.
        """
        server = self._server
        waiting = iter(events)
        end = perf_counter() + _BATCH_S
        server.begin_batch()
        try:
            for fd, mask in waiting:
                channel = self._channels.get(fd)
                if channel is None:
                    if fd in self._listeners:
                        self._accept(self._listeners[fd])
                    continue
                if mask & _WRITE:
                    server.guard(channel, server.send_more)
                if mask & ~_WRITE and channel.is_open:
                    if channel.is_heavy:
                        self._heavy[fd] = channel
                        continue
                    self._readable(channel, self._buffer)
                    self._light_at = end
                if perf_counter() > end:
                    break
        finally:
            server.end_batch()
        self._put_off = list(waiting)
        if self._heavy and (not self._put_off or end > self._heavy_at + _HEAVY_WAIT_S):
            self._handle_heavy(end)

    def _handle_heavy(self, now: float) -> None:
        self._heavy_at = now
        channel = self._heavy.pop(next(iter(self._heavy)))
        is_alone = not self._heavy and now - self._light_at > _COMPANY_S
        self._server.begin_batch()
        try:
            if channel.later:
                self._server.guard(channel, self._server.serve_later)
                self._look_later(channel)
            elif channel.is_open:
                self._readable(channel, self._buffer if is_alone else self._small_buffer)
        finally:
            self._server.end_batch()

    def _readable(self, channel: ServerChannel, buffer: memoryview) -> None:
        transport = channel.transport
        assert isinstance(transport, _SocketTransport)
        began = perf_counter()
        try:
            count = transport.socket.recv_into(buffer, min(len(buffer), channel.turn_bytes))
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if count:
            channel.is_heavy = count >= _HEAVY_BYTES
            self._server.received(channel, buffer[:count])
            self._look_later(channel)
            self._fit_turn(channel, count, perf_counter() - began)
        else:
            self._server.close_channel(channel, "")

    def _look_later(self, channel: ServerChannel) -> None:
        """Schedule another turn for a client with deferred frames."""
        if channel.later:
            channel.is_heavy = True
            transport = channel.transport
            assert isinstance(transport, _SocketTransport)
            self._heavy[transport.socket.fileno()] = channel

    def _fit_turn(self, channel: ServerChannel, count: int, seconds: float) -> None:
        """Read less, or more again, of a client by what its last ``count`` bytes took."""
        if seconds > _TURN_S:
            channel.is_heavy = True
            channel.turn_bytes = max(int(count * _TURN_S / seconds), _LEAST_RECEIVE_BYTES)
        elif channel.turn_bytes < _RECEIVE_BYTES and seconds < _TURN_S / 2:
            channel.turn_bytes = min(2 * channel.turn_bytes, _RECEIVE_BYTES)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                client, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._accept_failed(error)
                return
            if self._server.has_room(address[0]):
                self._add(client, address)
            else:
                client.close()

    def _accept_failed(self, error: OSError) -> None:
        if error.errno not in {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}:
            return
        if self._server.close_oldest_stranger(f"{error.strerror}, raise the limit of open files"):
            return
        # The listener stays readable: look away for a while instead of spinning.
        log.error("can't accept", reason=str(error), remedy="raise the limit of open files")
        for fd in self._listeners:
            self.epoll.modify(fd, 0)
        self._accept_again_at = trio.current_time() + _ACCEPT_PAUSE_S

    def _add(self, client: socket.socket, address: Any) -> None:
        client.setblocking(False)
        with contextlib.suppress(OSError):  # not TCP
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        fd = client.fileno()
        transport = _SocketTransport(client, self.epoll, self._channels)
        channel = self._server.open_channel(transport, address[0], address[1])
        self._channels[fd] = channel
        self._server.guard(channel, lambda _: self.epoll.register(fd, _READ))


class _SocketTransport:
    __slots__ = ("_channels", "_epoll", "_mask", "socket")

    def __init__(
        self, client: socket.socket, epoll: select.epoll, channels: dict[int, ServerChannel]
    ) -> None:
        self.socket = client
        self._epoll = epoll
        self._channels = channels
        self._mask = _READ

    def flush(self, channel: ServerChannel) -> None:
        """Send what the client takes; the rest of much has to wait for its next turn."""
        out, room = channel.out, _SENT_AT_ONCE
        try:
            while out and room:
                if channel.out_bytes > room:
                    sent = self.socket.sendmsg(_first_of(out, room))
                elif len(out) == 1:
                    sent = self.socket.send(out[0])
                else:
                    sent = self.socket.sendmsg(itertools.islice(out, _BUFFERS_PER_SEND))
                room -= sent
                channel.out_bytes -= sent
                _drop_sent(out, sent)
        except BlockingIOError:
            pass
        except OSError:
            channel.close("")
            return
        self._set_mask(self._mask | _WRITE if out else self._mask & ~_WRITE)

    def set_reading(self, *, reading: bool) -> None:
        self._set_mask(self._mask | _READ if reading else self._mask & ~_READ)

    def close(self) -> None:
        self._channels.pop(self.socket.fileno(), None)
        with contextlib.suppress(OSError):  # never registered
            self._epoll.unregister(self.socket)
        self.socket.close()

    def _set_mask(self, mask: int) -> None:
        if mask != self._mask:
            self._mask = mask
            self._epoll.modify(self.socket, mask)


def _first_of(out: list[Buffer], bytes_max: int) -> list[Buffer]:
    """Buffers of so many bytes, or fewer."""
    some: list[Buffer] = []
    for buffer in itertools.islice(out, _BUFFERS_PER_SEND):
        some.append(memoryview(buffer)[:bytes_max])
        bytes_max -= len(some[-1])
        if not bytes_max:
            break
    return some


def _drop_sent(out: list[Buffer], sent: int) -> None:
    for count, buffer in enumerate(out):
        if len(buffer) > sent:
            out[: count + 1] = [memoryview(buffer)[sent:]]
            return
        sent -= len(buffer)
    out.clear()


class _StreamTransport:
    """A stream with tasks of its own: for clients in the same process, not for many."""

    def __init__(self, stream: trio.abc.Stream, scope: trio.CancelScope) -> None:
        self._stream = stream
        self._scope = scope
        self._written = trio.Event()
        self._readable = trio.Event()
        self._readable.set()

    def flush(self, channel: ServerChannel) -> None:  # noqa: ARG002 - the task does it
        self._written.set()

    def set_reading(self, *, reading: bool) -> None:
        if reading:
            self._readable.set()
        else:
            self._readable = trio.Event()

    def close(self) -> None:
        self._scope.cancel()

    async def receive(self) -> bytes | bytearray:
        await self._readable.wait()
        return await self._stream.receive_some(_RECEIVE_BYTES)

    async def send_all_written(self, channel: ServerChannel) -> None:
        try:
            while True:
                await self._written.wait()
                self._written = trio.Event()
                data = b"".join(channel.out)
                channel.out.clear()
                await self._stream.send_all(data)
                if channel.is_open:
                    channel.out_bytes -= len(data)
                    channel._server.sent(channel, len(data))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            channel.close("")
        except Exception as error:  # noqa: BLE001 - as in RemotingServer.received
            channel._server.failed(channel, error)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises OSError with a message that names the address and the way out.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, _listen_failed(host, port, error)) from error
    return listener


def _listen_failed(host: str, port: int, error: OSError) -> str:
    remedy = {
        errno.EADDRINUSE: "another process listens there: stop it or choose another port",
        errno.EACCES: "ports below 1024 are for root: choose a higher one",
        errno.EADDRNOTAVAIL: "no interface of this machine has that address",
    }.get(error.errno or 0, "choose another address or port")
    return f"can't listen on {host}:{port}: {error.strerror}; {remedy}"


def pack_host(host: str, port: int) -> bytes:
    """Address and port as message records hold them: 8 bytes for IPv4, 20 for IPv6."""
    return ip_address(host).packed + struct.pack(">i", port)
