"""Takers: they build data from the log in step with the appends.

A taker gets one row per record from the ring, in log order, once the record is confirmed. Rows
stay in the ring until its cursor has passed them, so a slow taker slows producers down; work that
may be minutes behind is a follower's. The store calls the takers in the order of its list but
does not depend on that order.
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
    """A taker's part of one flush.

    syncs: called first, in a thread. flushed: called when all syncs have succeeded; returns the
    updated checkpoint. save: called in a thread just before the checkpoint is saved.
    """

    syncs: Sequence[Callable[[], None]]
    flushed: Callable[[Checkpoint], Checkpoint] = _unchanged
    save: Callable[[], None] = _nothing


class Taker:
    """Takes rows from the ring. A subclass implements what raises NotImplementedError here."""

    name: str
    ring: Ring
    cursor: Cursor

    def join(self, ring: Ring) -> None:
        """Add a cursor to the ring, which keeps all rows from now on for this taker."""
        self.ring = ring
        self.cursor = ring.add_cursor(self.name)

    def directory(self, root: Path) -> Path:
        """The folder that a refusal names when the disk has no room for this taker."""
        return root / self.name

    def durable_offset(self) -> int:
        """The offset before which records are on disk here; a start puts those from there on."""
        raise NotImplementedError

    def put(self, rows: Rows) -> None:
        """Take one or more rows, in log order, from the ring or from the log at a start.

        Raises OSError. Then the same rows come again, so taking some of them twice must be safe.
        """
        raise NotImplementedError

    def drain(self, confirmed_offset: int | None) -> None:
        """Take the waiting rows, or as many as a turn of the loop has time for.

        confirmed_offset: see ``Ring.waiting``. Raises OSError as ``put``.
        """
        raise NotImplementedError

    def drain_all(self, confirmed_offset: int | None) -> None:
        """Take all waiting rows, however long that takes. Raises as ``drain``."""
        raise NotImplementedError

    def make_room(self, row_count: int, confirmed_offset: int | None) -> None:
        """Drain until this taker no longer prevents room for ``row_count`` rows in the ring."""

    def cut(self, physical_offset: int) -> None:
        """Discard what was built from records at or past an offset.

        Recovery calls it before it puts the rows again, and finally with the end of the log.
        """

    def recovered(self, newest: tuple[int, int] | None) -> None:
        """Note that a start has put all rows.

        newest: physical offset and store timestamp of the last record; None if none was read.
        """

    def start_flush(self, taken_offset: int) -> TakerFlush:
        """The flush of everything taken so far, which is all records before ``taken_offset``."""
        raise NotImplementedError

    def due_flushes(self, least_bytes: int) -> Iterator[TakerFlush]:
        """Flushes that are worthwhile between those of everything.

        least_bytes: minimum of dirty bytes for a flush; a full file is always flushed.
        """
        raise NotImplementedError


def taken_offset(taker: Taker, log_end: int) -> int:
    """The offset before which a taker has taken all records."""
    offset = taker.ring.next_offset_of(taker.cursor)
    return log_end if offset is None else offset
