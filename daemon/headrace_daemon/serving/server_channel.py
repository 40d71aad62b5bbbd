"""One client of a daemon, as the server keeps it.

A client is a stranger until its first whole frame, known from then on, greeted after its first
request, and closed for good from any of these phases. What else is noted of it are facts that hold
in any combination: they are no phases.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Final, Protocol

import trio

from headrace_protocol.bounds import HEADER_BYTES_MAX
from headrace_protocol.drivers.address import pack_host
from headrace_protocol.frame import FrameReader
from headrace_protocol.serving import admit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headrace_protocol.frame import Buffer, Frame

# Bytes read at once from a new client.
_FIRST_RECEIVE_BYTES = 4 * 1024


class Phase(Enum):
    """How far a client has come."""

    STRANGER = auto()
    KNOWN = auto()
    GREETED = auto()
    CLOSED = auto()


class Event(Enum):
    """What takes a client from one phase to another."""

    FRAME = auto()
    REQUEST = auto()
    CLOSE = auto()


# A pair that is missing is a fault of ours.
NEXT_PHASE: Final[Mapping[tuple[Phase, Event], Phase]] = {
    (Phase.STRANGER, Event.FRAME): Phase.KNOWN,
    (Phase.STRANGER, Event.CLOSE): Phase.CLOSED,
    (Phase.KNOWN, Event.REQUEST): Phase.GREETED,
    (Phase.KNOWN, Event.CLOSE): Phase.CLOSED,
    (Phase.GREETED, Event.CLOSE): Phase.CLOSED,
    # The frames of one receive are served to the end, even if one of them closes the client.
    (Phase.CLOSED, Event.REQUEST): Phase.CLOSED,
}


class Transport(Protocol):
    """Moves the bytes of one client."""

    def flush(self, channel: ServerChannel) -> None:
        """Send what the client takes of ``channel.out``."""

    def set_reading(self, *, reading: bool) -> None:
        """Read the client, or stop."""

    def close(self) -> None:
        """Close the connection."""


class Accounts(Protocol):
    """What a channel needs of its server."""

    def written(self, channel: ServerChannel, added_bytes: int) -> None:
        """Account for what was queued on a channel."""

    def charged(self, added_bytes: int) -> None:
        """Account for what is kept for a client."""

    def close_channel(self, channel: ServerChannel, reason: str) -> None:
        """Cut a client off."""


class ServerChannel:
    """One client: what came in pieces, and what waits to go out.

    is_stranger, is_greeted, is_open: the phase, spelled out at each change because every frame
    asks. A client that was greeted stays so when it is closed.
    is_slow, is_held_back, and a ``later`` that is not empty are reasons not to read the client:
    they come and go independently, and it is read while none holds. is_dirty: it has replies that
    were not flushed in this batch. is_heavy: it sends much at a time; see ``socket_loop``.
    """

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
        "phase",
        "reader",
        "transport",
        "turn_bytes",
    )

    def __init__(
        self, server: Accounts, transport: Transport, host: str, port: int, frame_bytes_max: int
    ) -> None:
        self._server = server
        self.transport = transport
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.host_bytes = pack_host(host, port)
        self.reader = FrameReader(frame_bytes_max, admit, HEADER_BYTES_MAX)
        self.out: list[Buffer] = []
        # Frames deferred to the next turn; no more are read until they are served.
        self.later: list[Frame] = []
        self.out_bytes = self.partial_bytes = self.charged_bytes = 0
        self.partial_since = self.last_heard = trio.current_time()
        self._enter(Phase.STRANGER)
        self.is_greeted = False
        self.is_dirty = self.is_slow = self.is_held_back = self.is_heavy = False
        self.on_drained: Callable[[], None] | None = None
        # Bytes read of it at once.
        self.turn_bytes = _FIRST_RECEIVE_BYTES

    def apply(self, event: Event) -> None:
        """Enter the phase that ``event`` leads to; KeyError if it can't happen in this one."""
        self._enter(NEXT_PHASE[self.phase, event])

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self.is_stranger = phase is Phase.STRANGER
        self.is_open = phase is not Phase.CLOSED
        if phase is Phase.GREETED:
            self.is_greeted = True

    def greet(self) -> None:
        """Note the client's first request."""
        self.apply(Event.REQUEST)

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
