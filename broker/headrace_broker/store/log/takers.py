"""What is made of the log's rows in step with the appends: the protocol of a taker.

A taker gets one row per record out of the ring, in log order, once the record is confirmed. Its
cursor holds the rows back until it has taken them, so a slow taker slows producers down; what may
be minutes behind has no place here. The store asks each taker in the order of its list, and no
taker is known by its place there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from headrace_broker.store.integrity.checkpoint import Checkpoint
    from headrace_broker.store.log.ring import Cursor, Ring, Rows


def _unchanged(checkpoint: Checkpoint) -> Checkpoint:
    return checkpoint


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class TakerFlush:
    """What a taker brings to disk in one flush of everything.

    syncs: called first, in a thread. flushed: called when those have succeeded; returns what the
    checkpoint may say then. save: called in a thread just before the checkpoint is written.
    """

    syncs: Sequence[Callable[[], None]] = ()
    flushed: Callable[[Checkpoint], Checkpoint] = _unchanged
    save: Callable[[], None] = _nothing


class Taker:
    """Takes rows of the ring. A subclass has at least ``put`` and ``durable_offset``."""

    name: str
    ring: Ring
    cursor: Cursor

    def join(self, ring: Ring) -> None:
        """Get a cursor, which holds rows from now on."""
        self.ring = ring
        self.cursor = ring.add_cursor(self.name)

    def directory(self, root: Path) -> Path:
        """What a refusal names when the taker gets no room on the disk."""
        return root / self.name

    def durable_offset(self) -> int:
        """Records before it are on disk here; a start puts those from there on anew."""
        raise NotImplementedError

    def put(self, rows: Rows) -> None:
        """Take one row or more, in log order, from the ring or read anew by a start.

        Raises OSError; then the same rows come again, and what was taken of them must do no harm.
        """
        raise NotImplementedError

    def drain(self, confirmed_offset: int | None) -> None:
        """Take what waits in the ring, or as much as a batch of requests can wait for.

        confirmed_offset: see ``Ring.waiting``. Raises OSError as ``put``.
        """
        while True:
            waiting = self.ring.waiting(self.cursor, confirmed_offset)
            if waiting.start == waiting.stop:
                return
            self.put(self.ring.copy(waiting))
            self.ring.take(self.cursor, waiting.stop - waiting.start)

    def drain_all(self, confirmed_offset: int | None) -> None:
        """Take all that waits, however long that is: the store stops. Raises as ``drain``."""
        self.drain(confirmed_offset)

    def make_room(self, row_count: int, confirmed_offset: int | None) -> None:
        """Drain until the ring has room for so many rows, as far as this taker holds it back."""

    def cut(self, physical_offset: int) -> None:
        """Forget what was made of records from there on: recovery makes it anew, or they are gone.

        Called by a start alone, before rows are put and where the log turned out to end.
        """

    def recovered(self, newest: tuple[int, int] | None) -> None:
        """A start has put all rows up to this one: its physical offset and store timestamp."""

    def start_flush(self, taken_offset: int) -> TakerFlush:  # noqa: ARG002 - nothing to flush
        """Begin to bring to disk what was taken, all records before ``taken_offset``."""
        return TakerFlush()

    def due_flushes(self, least_bytes: int) -> Iterator[TakerFlush]:  # noqa: ARG002 - see above
        """What is worth a flush between those of everything: much of one file, or a full one."""
        yield from ()


def taken_offset(taker: Taker, log_end: int) -> int:
    """Up to where a taker has taken the log's records."""
    offset = taker.ring.next_offset_of(taker.cursor)
    return log_end if offset is None else offset
