"""All clients of a daemon: what they hold, who is read, and whose replies leave when.

The bytes are moved by ``socket_loop`` and ``stream_transport``.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import structlog
import trio

from headrace_daemon.host_log import HostLog
from headrace_daemon.process import connections_max
from headrace_daemon.serving.server_channel import Event, ServerChannel
from headrace_protocol.codes import code_name
from headrace_protocol.errors import RemoteProtocolError
from headrace_protocol.frame import FRAME_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace_daemon.serving.server_channel import Transport
    from headrace_protocol.frame import Buffer, Frame
    from headrace_protocol.serving import Request

log = structlog.get_logger("headrace.server")

_SWEEP_S = 5.0
_SWEPT_AT_ONCE = 200
_REPORTED_AT_ONCE = 10
# How long the server keeps others in its loop waiting; the least that epoll can wait.
BUSY_WAIT_S = 0.001


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

    def finish_turn(self) -> None:
        """All ready clients were handled; their replies, which must be true, leave after this."""

    def replied(self) -> None:
        """The replies are out; what they did not have to wait for is done now."""

    def closed(self, channel: ServerChannel) -> None:
        """A client is gone."""


class RemotingServer:
    """All clients of one daemon.

    A request can cost its client the connection, and nobody else anything. An error in what the
    handler does for all clients (``finish_turn``, ``replied``) ends the server: replies may be
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
        self.busy_wait_s = BUSY_WAIT_S if owns_loop else 0.0
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
        channel.apply(Event.FRAME)
        channel.reader.admit = None
        self._strangers.pop(channel, None)

    def end_batch(self) -> None:
        """Finish the batch and send its replies, then what follows from it."""
        try:
            self._handler.finish_turn()
            self._flush_dirty()
            self._handler.replied()
        except BaseException:
            # What the replies say may not be true: their clients must not wait for them either.
            dirty, self._dirty = self._dirty, []
            for channel in dirty:
                self.close_channel(channel, "")
            raise
        finally:
            self._is_in_batch = False
        self._flush_dirty()

    def alone(self, channel: ServerChannel, work: Callable[[], object]) -> None:
        """Run ``work`` for one client as a batch of its own; it may be called in a batch, too.

        A failure costs the clients that were to get replies.
        """
        if self._is_in_batch:
            work()
            return

        def run_batch(_channel: ServerChannel) -> None:
            self.begin_batch()
            try:
                work()
            finally:
                self.end_batch()

        self.guard(channel, run_batch)

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

    def open_channel(self, transport: Transport, host: str, port: int) -> ServerChannel:
        """A new client."""
        channel = ServerChannel(self, transport, host, port, self.limits.frame_bytes_max)
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
        channel.apply(Event.CLOSE)
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

    def close_all(self) -> None:
        """The server stops."""
        for channel in list(self.channels):
            self.close_channel(channel, "the server stops")

    async def sweep(self) -> None:
        """Close clients that are silent, and report what happened to many, until cancelled."""
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
