"""All clients of a daemon: their memory, limits, reading and replies.

``socket_loop`` and ``stream_transport`` move the bytes. A turn handles one read of each client
that is ready; its replies leave together at its end.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import structlog
import trio

from headrace_daemon.host_log import HostLog
from headrace_daemon.late import LateRequests
from headrace_daemon.process import connections_max
from headrace_daemon.serving.server_channel import Event, ServerChannel
from headrace_protocol.codes import code_name
from headrace_protocol.errors import ForeignProtocol, RemoteProtocolError
from headrace_protocol.frame import FRAME_BYTES_MAX, TLS_CLIENT, frame_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace_daemon.serving.certificates import Certificates
    from headrace_daemon.serving.server_channel import Transport
    from headrace_protocol.frame import Buffer, Frame
    from headrace_protocol.serving import Request

    # As ``FrameHandler.handle``.
    Serve = Callable[[ServerChannel, list[Frame]], list[Frame]]

log = structlog.get_logger("headrace.server")

_SWEPT_AT_ONCE = 200
_REPORTED_AT_ONCE = 10
_TLS_ON_PLAIN = (
    "TLS, which this port does not speak: connect without it (tls=False), or name a file with a "
    "certificate in tlsConfigFile"
)
# Longest time that the server keeps other tasks of its loop waiting; epoll's shortest timeout.
BUSY_WAIT_S = 0.001


@dataclass(frozen=True)
class ServerLimits:
    """Limits of a client, and of all clients together.

    frame_bytes_max: largest frame.
    connection_bytes_max: unread replies of one client above which its requests are not read.
    total_bytes_max: unfinished frames, unread replies and held requests of all clients, above
    which the client that holds most is closed.
    connections_max: number of clients; one more replaces the oldest that has not sent a frame
    yet, or is refused if there is none.
    idle_s: silence before a client is closed, as the peer does.
    half_frame_s: longest time for an unfinished frame, and for the first frame of a connection.
    turn_send_bytes: most bytes of large answers that leave in one turn, of all clients: a quarter
    of a millisecond. small_send_bytes: what each client gets of its answers whatever others got in
    this turn: all of most answers.
    handshake_s: longest time for the handshake of TLS, of which a client sends half.
    sweep_s: pause between two looks for silent clients.
    """

    frame_bytes_max: int = FRAME_BYTES_MAX
    connection_bytes_max: int = 64 * 1024 * 1024
    total_bytes_max: int = 1024 * 1024 * 1024
    connections_max: int = field(default_factory=connections_max)
    idle_s: float = 120.0
    half_frame_s: float = 30.0
    turn_send_bytes: int = 512 * 1024
    small_send_bytes: int = 64 * 1024
    handshake_s: float = 10.0
    sweep_s: float = 5.0


class HoldBack(Protocol):
    """The signature of ``RemotingServer.hold_back``."""

    def __call__(self, channel: ServerChannel, *, is_held_back: bool) -> None:
        """Stop reading from a client, or resume."""


class FrameHandler(Protocol):
    """The daemon behind the server."""

    def handle(self, channel: ServerChannel, frames: list[Frame]) -> list[Frame]:
        """Serve the frames of one client's read.

        Returns the frames for which its share of the turn has no time: pass them again later.
        """

    def finish_turn(self) -> None:
        """Called when all ready clients were handled, before their replies leave.

        Afterwards the replies must be true.
        """

    def replied(self) -> None:
        """Called when the replies have left, for work that they need not wait for."""

    def closed(self, channel: ServerChannel) -> None:
        """Called when a client was closed."""


class RemotingServer:
    """All clients of one daemon.

    An error in a request costs at most its client's connection. An error in the handler's work for
    all clients (``finish_turn``, ``replied``) ends the server, since replies may be false.

    unexpected_errors: their number; each is logged with its traceback.
    turned_away_count: connections refused, or closed before they sent a frame.
    faulty_client_count: clients closed for broken frames or for holding too much.
    host_log: log of events that clients can cause.
    late: log and number of late answers.
    certificates: of its ports; None without TLS.
    is_user: whether there is a user of a name, who logs in by a certificate with it.
    on_certificate: called each time that certificates are read again, with the file and the
        reason if it is unusable. on_log_in: called after a log-in by a certificate, with True.
    busy_wait_s, busy_turns_s: how long the loop waits for clients, and serves them, before other
        tasks run.
    owns_loop: no other task of this loop minds a delay of a millisecond. While clients are busy,
        the server then waits for them in its own epoll, which saves most of the scheduler's share
        of a lone request's time.
    """

    def __init__(
        self,
        handler: FrameHandler,
        limits: ServerLimits | None = None,
        *,
        owns_loop: bool = False,
    ) -> None:
        self.limits = limits or ServerLimits()
        self._owns_loop = owns_loop
        self.busy_wait_s = BUSY_WAIT_S if owns_loop else 0.0
        self.busy_turns_s = BUSY_WAIT_S
        self.held_bytes = 0
        self.channels: set[ServerChannel] = set()
        # Clients without a whole frame yet, the oldest first.
        self._newcomers: dict[ServerChannel, None] = {}
        # Rejected clients by host and reason: too many for a log line each.
        self._turned_away: Counter[tuple[str, str]] = Counter()
        self.unexpected_errors = 0
        self.turned_away_count = self.faulty_client_count = 0
        self.host_log = HostLog(log)
        self.late = LateRequests()
        self.certificates: Certificates | None = None
        self.is_user: Callable[[str], bool] = lambda _name: False
        self.on_certificate: Callable[[str, str], None] = lambda _file, _reason: None
        self.on_log_in: Callable[[ServerChannel, str, bool], None] = lambda *_: None
        self._handler = handler
        self._dirty: list[ServerChannel] = []
        self._in_turn = False

    def share_loop(self, *, is_shared: bool) -> None:
        """Let other tasks run after each turn: one of them waits for a socket of its own."""
        self.busy_turns_s = 0.0 if is_shared else BUSY_WAIT_S
        self.busy_wait_s = self.busy_turns_s if self._owns_loop else 0.0

    # -- turns -------------------------------------------------------------------------------------

    def begin_turn(self) -> None:
        """Hold replies until ``end_turn``."""
        self._in_turn = True

    def received(self, channel: ServerChannel, data: Buffer) -> None:
        """Serve the bytes of one read; the caller may overwrite ``data`` afterwards."""
        if not channel.is_open:
            return
        channel.last_heard = trio.current_time()
        try:
            frames = channel.reader.feed(data)
            if frames:
                if not channel.has_sent_frame:
                    self._sent_first_frame(channel)
                self._serve(channel, frames)
        except RemoteProtocolError as error:
            self.close_faulty(channel, error)
            return
        except Exception as error:  # noqa: BLE001 - a bug costs only the client that triggers it
            self.failed(channel, error)
            return
        if channel.is_open:
            self._count_partial(channel, progressed=bool(frames))

    def _serve(self, channel: ServerChannel, frames: list[Frame]) -> None:
        deferred = self._handler.handle(channel, frames)
        if channel.is_open and (deferred or channel.deferred):
            self._set_deferred(channel, deferred)

    def serve_deferred(self, channel: ServerChannel) -> None:
        """Serve frames that were deferred to this turn, as far as its time allows."""
        self._serve(channel, channel.deferred)

    def _set_deferred(self, channel: ServerChannel, frames: list[Frame]) -> None:
        added_bytes = frame_bytes(frames) - frame_bytes(channel.deferred)
        channel.deferred = frames
        channel.charge(added_bytes)
        self._update_reading(channel)

    def failed(self, channel: ServerChannel, error: Exception) -> None:
        """Close a client after an unexpected error; the others stay connected."""
        self._report_unexpected(channel.address, error)
        self.close_channel(channel, "")

    def request_failed(self, request: Request, error: Exception) -> None:
        """Report an unexpected error in a request; called by ``Registry``."""
        code = code_name(request.command.code)
        self._report_unexpected(request.channel.address, error, request=code)

    def _report_unexpected(self, client: str, error: Exception, **fields: Any) -> None:
        """Count and log an unexpected error that a client triggered."""
        self.unexpected_errors += 1
        self.host_log.error(client, "unexpected error", exc_info=error, **fields)

    def guard(self, channel: ServerChannel, work: Callable[[ServerChannel], None]) -> None:
        """Run ``work`` for one client; close the client if it fails."""
        try:
            work(channel)
        except RemoteProtocolError as error:
            self.close_faulty(channel, error)
        except Exception as error:  # noqa: BLE001 - as in received
            self.failed(channel, error)

    def _sent_first_frame(self, channel: ServerChannel) -> None:
        channel.apply(Event.FRAME)
        channel.reader.admit = None
        self._newcomers.pop(channel, None)

    def end_turn(self) -> None:
        """Finish the turn: send its replies, then the data that the handler's ``replied`` adds."""
        try:
            self._handler.finish_turn()
            self._flush_dirty()
            self._handler.replied()
        except BaseException:
            # The replies may be false, so close their clients instead of letting them wait.
            dirty, self._dirty = self._dirty, []
            for channel in dirty:
                self.close_channel(channel, "")
            raise
        finally:
            self._in_turn = False
        self._flush_dirty()

    def alone(self, channel: ServerChannel, work: Callable[[], object]) -> None:
        """Run ``work`` for one client as a turn of its own, or as a part of the current turn.

        A failure closes the clients whose replies are queued.
        """
        if self._in_turn:
            work()
            return

        def run_turn(_channel: ServerChannel) -> None:
            self.begin_turn()
            try:
                work()
            finally:
                self.end_turn()

        self.guard(channel, run_turn)

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Hold the replies that are written within this context, then send them together."""
        assert not self._in_turn
        self._in_turn = True
        try:
            yield
        finally:
            self._in_turn = False
        self._flush_dirty()

    def written(self, channel: ServerChannel, added_bytes: int) -> None:
        """Account for bytes queued on a channel."""
        self.held_bytes += added_bytes
        if not channel.is_dirty:
            channel.is_dirty = True
            self._dirty.append(channel)
        if not self._in_turn:
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
        """Send more replies to a client whose socket accepts them again.

        This counts as activity: a client that reads late is not idle, and while its requests are
        not read, it can't show any other.
        """
        self._flush(channel)
        channel.last_heard = trio.current_time()
        if channel.is_slow:
            channel.partial_since = channel.last_heard

    def sent(self, channel: ServerChannel, sent_bytes: int) -> None:
        """Account for bytes sent; pause reading a client that does not read its replies."""
        self.held_bytes -= sent_bytes
        channel.sent_bytes += sent_bytes
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
        """Account for memory that the handler keeps for a client."""
        self.held_bytes += added_bytes
        if self.held_bytes > self.limits.total_bytes_max:
            self._close_greediest()

    def hold_back(self, channel: ServerChannel, *, is_held_back: bool) -> None:
        """Pause reading a client, or resume once all who paused it have resumed."""
        channel.holds += 1 if is_held_back else -1
        self._update_reading(channel)

    def _update_reading(self, channel: ServerChannel) -> None:
        if channel.is_open:
            is_paused = channel.is_slow or channel.holds > 0 or bool(channel.deferred)
            channel.transport.set_reading(reading=not is_paused)

    def _count_partial(self, channel: ServerChannel, *, progressed: bool) -> None:
        partial_bytes = channel.reader.partial_bytes
        is_within_frame = channel.partial_bytes or not channel.has_sent_frame
        if progressed or not is_within_frame:
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
            f"{greediest.out_bytes} of unread answers, {greediest.partial_bytes} of an unfinished "
            f"frame, {greediest.charged_bytes} of waiting requests",
            is_fault=True,
        )

    # -- channels ----------------------------------------------------------------------------------

    def open_channel(self, transport: Transport, host: str, port: int) -> ServerChannel:
        """Add a client."""
        channel = ServerChannel(self, transport, host, port, self.limits.frame_bytes_max)
        self.channels.add(channel)
        self._newcomers[channel] = None
        return channel

    def has_room(self, host: str) -> bool:
        """True if one more client may connect, if need be in place of the oldest newcomer."""
        if len(self.channels) < self.limits.connections_max:
            return True
        reason = f"connections_max = {self.limits.connections_max} are open"
        if self.close_oldest_newcomer(reason):
            return True
        self._turned_away[host, f"refused: {reason}"] += 1
        self.turned_away_count += 1
        return False

    def close_oldest_newcomer(self, reason: str) -> bool:
        """Close the oldest client that has not sent a frame yet; False if all have sent one."""
        oldest = next(iter(self._newcomers), None)
        if oldest is None:
            return False
        self.turn_away(oldest, f"no frame sent yet: {reason}")
        return True

    def turn_away(self, channel: ServerChannel, reason: str) -> None:
        """Close a client; the log gets one line for all clients of its host."""
        self._turned_away[channel.address.rpartition(":")[0], reason] += 1
        self.turned_away_count += 1
        self.close_channel(channel, "")

    def close_faulty(self, channel: ServerChannel, error: RemoteProtocolError) -> None:
        """Close a client that violates the protocol."""
        if isinstance(error, ForeignProtocol) and error.protocol == TLS_CLIENT:
            # It is not hostile, and retries forever.
            self.turn_away(channel, _TLS_ON_PLAIN)
        else:
            self.close_channel(channel, str(error), is_fault=True)

    def close_channel(self, channel: ServerChannel, reason: str, *, is_fault: bool = False) -> None:
        """Close a client; ``reason`` is logged if the client is to blame."""
        if not channel.is_open:
            return
        channel.apply(Event.CLOSE)
        self.channels.discard(channel)
        self._newcomers.pop(channel, None)
        self.held_bytes -= channel.held_bytes
        channel.out.clear()
        channel.deferred = []
        if is_fault:
            self.faulty_client_count += 1
            self.host_log.warning(channel.address, "client closed", reason=reason)
        self.guard(channel, lambda channel: channel.transport.close())
        self.guard(channel, self._handler.closed)
        self.guard(channel, _notify_drained)

    def close_all(self) -> None:
        """Close all clients because the server stops."""
        for channel in list(self.channels):
            self.close_channel(channel, "the server stops")

    async def sweep(self) -> None:
        """Close silent clients and report suppressed log lines, until cancelled."""
        while True:
            await trio.sleep(self.limits.sweep_s)
            now = trio.current_time()
            for number, channel in enumerate(list(self.channels), 1):
                self.close_if_silent(channel, now)
                if not number % _SWEPT_AT_ONCE:
                    await trio.lowlevel.checkpoint()
            self._report_turned_away()
            self.host_log.report()

    def close_if_silent(self, channel: ServerChannel, now: float) -> None:
        """Close a client that has sent nothing for too long. now: by trio's clock."""
        if not channel.is_open:
            return
        if channel.is_shaking_hands:
            if now - channel.partial_since > self.limits.handshake_s:
                self.turn_away(channel, f"no TLS handshake within {self.limits.handshake_s:g} s")
        elif channel.partial_bytes or not channel.has_sent_frame:
            if now - channel.partial_since > self.limits.half_frame_s:
                self.turn_away(channel, self._unfinished(channel))
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
