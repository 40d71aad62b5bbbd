"""The server's state of one client.

A client has phases: CONNECTED until its first whole frame, SENT_FRAME until its first request,
GREETED from then on, and CLOSED for good from any of them. The other flags hold in any
combination, so they are not phases.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final, Protocol

import trio

from headrace_protocol.bounds import HEADER_BYTES_MAX
from headrace_protocol.drivers.address import pack_host
from headrace_protocol.frame import FrameReader
from headrace_protocol.header_codecs import admit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from headrace_protocol.frame import Buffer, Frame
    from headrace_protocol.rights.proofs import Proof

# Most bytes of one read from a new client.
_FIRST_RECEIVE_BYTES = 4 * 1024


class Phase(Enum):
    """Phase of a client's connection."""

    CONNECTED = auto()
    SENT_FRAME = auto()
    GREETED = auto()
    CLOSED = auto()


class Event(Enum):
    """Event that moves a client to another phase."""

    FRAME = auto()
    REQUEST = auto()
    CLOSE = auto()


# A missing pair is a bug in this server.
NEXT_PHASE: Final[Mapping[tuple[Phase, Event], Phase]] = {
    (Phase.CONNECTED, Event.FRAME): Phase.SENT_FRAME,
    (Phase.CONNECTED, Event.CLOSE): Phase.CLOSED,
    (Phase.SENT_FRAME, Event.REQUEST): Phase.GREETED,
    (Phase.SENT_FRAME, Event.CLOSE): Phase.CLOSED,
    (Phase.GREETED, Event.CLOSE): Phase.CLOSED,
    # The frames of one receive are served to the end, even if one of them closes the client.
    (Phase.CLOSED, Event.REQUEST): Phase.CLOSED,
}


class Transport(Protocol):
    """The connection of one client."""

    def flush(self, channel: ServerChannel) -> None:
        """Send as much of ``channel.out`` as the client accepts."""

    def set_reading(self, *, reading: bool) -> None:
        """Resume or pause reading."""

    def close(self) -> None:
        """Close the connection."""


class Owner(Protocol):
    """The part of the server that a channel calls."""

    def written(self, channel: ServerChannel, added_bytes: int) -> None:
        """Account for bytes queued on a channel."""

    def charged(self, added_bytes: int) -> None:
        """Account for memory kept for a client."""

    def close_channel(self, channel: ServerChannel, reason: str) -> None:
        """Disconnect a client."""


class ServerChannel:
    """One client: its unfinished input and its unsent output.

    has_sent_frame, is_greeted, is_open: the phase as flags, because every frame reads them.
    has_sent_frame and is_greeted stay True in a closed client.
    is_slow, holds, deferred: three independent reasons not to read the client; it is read while it
    is neither slow nor held back by anybody, and no frame is deferred.
    sent_bytes: sent since they were last taken. written_bytes: queued since the client connected.
    is_dirty: it has replies that were not flushed in this turn.
    is_heavy: it sends much at a time; see ``socket_loop``.
    is_shaking_hands: its handshake of TLS has begun and is not done.
    ip, user, signer, proof, login, certificate, is_encrypted: see
    ``headrace_protocol.channel.Channel``.
    """

    __slots__ = (
        "_notices",
        "_server",
        "address",
        "certificate",
        "charged_bytes",
        "deferred",
        "has_sent_frame",
        "holds",
        "host_bytes",
        "ip",
        "is_dirty",
        "is_encrypted",
        "is_greeted",
        "is_heavy",
        "is_open",
        "is_shaking_hands",
        "is_slow",
        "last_heard",
        "login",
        "on_drained",
        "out",
        "out_bytes",
        "partial_bytes",
        "partial_since",
        "phase",
        "proof",
        "reader",
        "receive_bytes",
        "sent_bytes",
        "signer",
        "transport",
        "user",
        "written_bytes",
    )

    def __init__(
        self, server: Owner, transport: Transport, host: str, port: int, frame_bytes_max: int
    ) -> None:
        self._server = server
        self.transport = transport
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        # Rules on IPv4 networks also speak of IPv4 clients of an IPv6 socket.
        self.ip = host.removeprefix("::ffff:") if "." in host else host
        self.host_bytes = pack_host(host, port)
        self.user: str | None = None
        self.signer: str | None = None
        self.proof: Proof | None = None
        self.login: Any = None
        self.certificate: bytes | None = None
        self.is_encrypted = False
        self.reader = FrameReader(frame_bytes_max, admit, HEADER_BYTES_MAX)
        self.out: list[Buffer] = []
        # Frames deferred to the next turn; no more are read until they are served.
        self.deferred: list[Frame] = []
        self.out_bytes = self.partial_bytes = self.charged_bytes = self.written_bytes = 0
        # By the end of what may be lost, in bytes written.
        self._notices: deque[tuple[int, Callable[[], None]]] | None = None
        self.partial_since = self.last_heard = trio.current_time()
        self.phase = Phase.CONNECTED
        self.is_open = True
        self.has_sent_frame = self.is_greeted = False
        self.is_dirty = self.is_slow = self.is_heavy = False
        self.holds = self.sent_bytes = 0
        self.is_shaking_hands = False
        self.on_drained: Callable[[], None] | None = None
        # Most bytes of the next read.
        self.receive_bytes = _FIRST_RECEIVE_BYTES

    def apply(self, event: Event) -> None:
        """Enter the phase that ``event`` leads to; KeyError if it can't happen in this one."""
        self.phase = phase = NEXT_PHASE[self.phase, event]
        self.is_open = phase is not Phase.CLOSED
        if phase is Phase.SENT_FRAME:
            self.has_sent_frame = True
        elif phase is Phase.GREETED:
            self.is_greeted = True

    def greet(self) -> None:
        """Note the client's first request."""
        self.apply(Event.REQUEST)

    def log_in(self, user: str, proof: Proof | None = None) -> None:
        """See ``headrace_protocol.channel.Channel``."""
        self.user, self.proof = user, proof

    @property
    def held_bytes(self) -> int:
        """Memory that the daemon keeps for this client."""
        return self.out_bytes + self.partial_bytes + self.charged_bytes

    def charge(self, added_bytes: int) -> None:
        """Account for memory that the handler keeps for this client; negative to release it."""
        if self.is_open:
            self.charged_bytes += added_bytes
            self._server.charged(added_bytes)

    def take_sent_bytes(self) -> int:
        """The bytes sent since the last call."""
        sent_bytes, self.sent_bytes = self.sent_bytes, 0
        return sent_bytes

    def write(self, *buffers: Buffer) -> None:
        """Queue bytes; they leave at the end of the turn, or now outside of a turn."""
        if self.is_open:
            added = 0
            for buffer in buffers:
                self.out.append(buffer)
                added += len(buffer)
            self.out_bytes += added
            self.written_bytes += added
            self._server.written(self, added)

    def when_lost(self, notify: Callable[[], None]) -> None:
        """See ``headrace_protocol.channel.Channel``. What is closed already has lost it."""
        if not self.is_open:
            notify()
        elif self.out_bytes:
            if self._notices is None:
                self._notices = deque()
            self._drop_sent_notices()
            self._notices.append((self.written_bytes, notify))

    def _drop_sent_notices(self) -> None:
        sent_bytes, notices = self.written_bytes - self.out_bytes, self._notices
        while notices and notices[0][0] <= sent_bytes:
            notices.popleft()

    def take_notices(self) -> Iterable[Callable[[], None]]:
        """The functions to call for what a closed client was not sent."""
        self._drop_sent_notices()
        notices, self._notices = self._notices or (), None
        return [notify for _, notify in notices]

    def read_little(self) -> None:
        """Have the next read take little, as the first one does."""
        self.receive_bytes = _FIRST_RECEIVE_BYTES

    def close(self, reason: str) -> None:
        """Disconnect the client."""
        self._server.close_channel(self, reason)
