"""A queue whose records are parts of objects."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace_broker.tiered.container.stored_tier import Spans, Tail, TierQueue
from headrace_broker.tiered.container.tier_index import IndexHit
from headrace_broker.tiered.objects.batch import joined
from headrace_protocol.columns import UNIT_DTYPE
from headrace_protocol.tier.driver import (
    Extent,
    Failed,
    Failure,
    FailureKind,
    expect,
    read_extents,
    returns_failure,
)
from headrace_protocol.tier.rows import TIME_BYTES, UNIT_BYTES, Part, log_span, unit_span
from headrace_protocol.tier.stored_queue import UnitRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from headrace_broker.tiered.objects.part_reader import PartReader
    from headrace_protocol.columns import Array
    from headrace_protocol.tier.driver import Buffer, Range
    from headrace_protocol.tier.paths import QueueName

# A read of units goes over so many parts at most: each may be a request.
_PARTS_AT_ONCE: Final = 16


class Piece(NamedTuple):
    """A part, and the object that has it."""

    name: str
    part: Part


class State(NamedTuple):
    """The part of a queue that counts. pieces: in order of their queue offsets.

    end, log_end: one past the last queue offset and byte, also if all pieces have expired.
    """

    pieces: tuple[Piece, ...] = ()
    end: int = 0
    log_end: int = 0


class ObjectQueue(TierQueue):
    """Its state is replaced as a whole, so readers need no lock."""

    def __init__(self, name: QueueName, reader: PartReader) -> None:
        self.name, self.path = name, name.path
        self.state = State()
        self._reader = reader

    def extend(self, pieces: Iterable[Piece]) -> None:
        """Add pieces at the end; one without records only says where the queue ends."""
        state = self.state
        for piece in pieces:
            kept = (*state.pieces, piece) if piece.part.count else state.pieces
            state = State(kept, piece.part.end, piece.part.log_end)
        self.state = state

    @property
    def min_offset(self) -> int:
        """As ``StoredQueue.min_offset``."""
        state = self.state
        return state.pieces[0].part.first if state.pieces else state.end

    @property
    def commit_offset(self) -> int:
        """As ``StoredQueue.commit_offset``."""
        return self.state.end

    @property
    def log_end(self) -> int:
        """One past the last byte of the queue's log."""
        return self.state.log_end

    @property
    def log_bytes(self) -> int:
        """As ``TierQueue.log_bytes``."""
        return sum(piece.part.log_bytes for piece in self.state.pieces)

    @property
    def stored_bytes(self) -> int:
        """As ``TierQueue.stored_bytes``."""
        return sum(piece.part.stop - piece.part.position for piece in self.state.pieces)

    def tail(self) -> Tail | None:
        """As ``TierQueue.tail``: a start costs no request for each queue."""
        if not self.state.pieces:
            return None
        part = self.state.pieces[-1].part
        return Tail(part.first, part.end, part.log_bytes, part.end_ms)

    def _keeps(self, wanted: Range) -> bool:
        at, end = wanted
        while at < end:
            extent = self._extent(at)
            if isinstance(extent, Failure):
                return False
            at = extent.end
        return True

    @property
    def _log_limit(self) -> int:
        return self.state.log_end

    # -- columns -----------------------------------------------------------------------------------

    @returns_failure
    def units(self, queue_offset: int, count_max: int) -> UnitRange:
        """As ``StoredQueue.units``."""
        state = self.state
        number = self._number_of(state, queue_offset)
        if number == len(state.pieces):
            return UnitRange(state.end, np.empty(0, UNIT_DTYPE))
        first = at = max(queue_offset, state.pieces[number].part.first)
        found: list[Array] = []
        for piece in state.pieces[number : number + _PARTS_AT_ONCE]:
            part = piece.part
            if part.first > at or at - first >= count_max:
                break
            begin, end = at - part.first, min(part.count, first + count_max - part.first)
            found.append(self._units(piece, begin, end))
            at = part.first + end
        return UnitRange(first, found[0] if len(found) == 1 else joined(found, UNIT_DTYPE))

    def spans(self, wanted: Range, count_max: int) -> Spans:
        """As ``TierQueue.spans``."""
        state, (start, end) = self.state, wanted
        number = self._number_of(state, start)
        pieces = state.pieces[number : number + count_max]
        found = [piece for piece in pieces if piece.part.first < end]
        is_cut = len(found) == len(pieces) == count_max
        next_offset = min(found[-1].part.end, end) if is_cut else end
        parts = [(self._reader.path(piece.name), piece.part) for piece in found]
        return Spans(
            next_offset,
            [unit_span(path, part) for path, part in parts],
            [log_span(path, part) for path, part in parts],
        )

    def _number_of(self, state: State, queue_offset: int) -> int:
        """The index of the piece that has an offset, or else of the next one."""
        number = bisect_right(state.pieces, queue_offset, key=lambda piece: piece.part.first)
        if number and state.pieces[number - 1].part.end > queue_offset:
            return number - 1
        return number

    def _units(self, piece: Piece, begin: int, end: int) -> Array:
        """Units of a part. Fails with DAMAGED if they are not in its range of the log."""
        at = piece.part.position
        wanted = at + begin * UNIT_BYTES, at + end * UNIT_BYTES
        (data,) = expect(self._read_part(piece, [wanted]))
        units = np.frombuffer(data, UNIT_DTYPE)
        part, starts = piece.part, units["physical_offset"].astype(np.int64)
        ends = starts + units["size"]
        is_in_order = (starts[1:] == ends[:-1]).all() and (units["size"] > 0).all()
        if not is_in_order or starts[0] < part.log_base or ends[-1] > part.log_end:
            reason = f"units in {self._reader.path(piece.name)} are not in order"
            raise Failed(self._damaged(reason))
        return units

    def _times(self, piece: Piece, begin: int, end: int) -> Array:
        """Store times of a part's records."""
        at = piece.part.times_at
        wanted = at + begin * TIME_BYTES, at + end * TIME_BYTES
        return np.frombuffer(expect(self._read_part(piece, [wanted]))[0], ">i8")

    def _read_part(self, piece: Piece, ranges: Sequence[Range]) -> list[Buffer] | Failure:
        part = piece.part
        return self._reader.read(piece.name, (part.position, part.stop), ranges)

    def _read_log(self, ranges: Sequence[Range]) -> list[Buffer] | Failure:
        return read_extents(ranges, self._extent, self._read_part)

    def _extent(self, at: int) -> Extent[Piece] | Failure:
        pieces = self.state.pieces
        number = bisect_right(pieces, at, key=lambda piece: piece.part.log_base) - 1
        part = pieces[number].part if number >= 0 else None
        if part is None or at >= part.log_end:
            reason = f"has no byte {at} in its log: it has expired"
            return Failure(FailureKind.MISSING, self.path, reason)
        return Extent(pieces[number], part.log_base, part.log_end, part.records_at)

    # -- by time -----------------------------------------------------------------------------------

    @returns_failure
    def store_time(self, queue_offset: int) -> int:
        """As ``StoredQueue.store_time``."""
        state = self.state
        number = self._number_of(state, queue_offset)
        if number == len(state.pieces):
            raise Failed(self._damaged(f"has no queue offset {queue_offset}"))
        piece = state.pieces[number]
        begin = max(queue_offset - piece.part.first, 0)
        return int(self._times(piece, begin, begin + 1)[0])

    @returns_failure
    def _first_at_or_after(self, limit_ms: int) -> int:
        state = self.state
        piece = next((piece for piece in state.pieces if piece.part.end_ms >= limit_ms), None)
        if piece is None:
            return state.end
        times = self._times(piece, 0, piece.part.count)
        return piece.part.first + int((times >= limit_ms).argmax())

    # -- by key ------------------------------------------------------------------------------------

    @returns_failure
    def hits(self, piece: Piece, numbers: Array) -> list[IndexHit]:
        """Records of a part by their numbers in it."""
        if not len(numbers):
            return []
        begin, end = int(numbers.min()), int(numbers.max()) + 1
        if end > piece.part.count:
            reason = f"keys in {self._reader.path(piece.name)} name no records"
            raise Failed(self._damaged(reason))
        units, times = self._units(piece, begin, end), self._times(piece, begin, end)
        found = [(units[number], times[number]) for number in (numbers - begin).tolist()]
        return [
            IndexHit(self.name.queue_id, int(unit["physical_offset"]), int(unit["size"]), int(ms))
            for unit, ms in found
        ]
