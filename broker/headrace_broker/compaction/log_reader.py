"""Reads of a compaction log on the loop: by queue offset and by store time.

An offset without a record stands for the next one that has a record. Each read takes the segments
once and may raise NotReady, for cold pages or because a run has just replaced a segment.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headrace_broker.compaction.segments import look_again
from headrace_broker.compaction.units import COMPACTION_UNIT_BYTES, COMPACTION_UNIT_DTYPE
from headrace_broker.store.files.page_cache import CHUNK_BYTES
from headrace_broker.store.store_source import (
    BULK_SCAN_UNITS,
    LOG_FILL_MIN,
    PIECE_BYTES_MIN,
    SCAN_BYTES,
    GetResult,
    GetStatus,
    choose_units,
    take_units,
)
from headrace_protocol.columns import QUEUE_OFFSET_DTYPE, UNIT_DTYPE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace_broker.compaction.queue_log import QueueLog
    from headrace_broker.compaction.segments import Segment, SegmentFile
    from headrace_broker.compaction.units import CompactionUnit
    from headrace_broker.store.files.page_cache import PageCache
    from headrace_broker.store.store_source import Layout
    from headrace_protocol.columns import Array
    from headrace_protocol.message import Buffer

_SCAN_UNITS = SCAN_BYTES // COMPACTION_UNIT_BYTES


class _Place(NamedTuple):
    """A unit: its segment and its number there."""

    segment: Segment
    number: int


class LogReader:
    """Reads one compaction log.

    The place after each read is remembered: the next read usually begins there, without a search.
    """

    __slots__ = ("_log", "_next", "_page_cache")

    def __init__(self, log: QueueLog, page_cache: PageCache) -> None:
        self._log = log
        self._page_cache = page_cache
        self._next: _Place | None = None

    @property
    def min_offset(self) -> int | None:
        """The oldest queue offset; None without records."""
        segments = self._log.segments
        return segments[0].first_queue_offset if segments else None

    @property
    def last_offset(self) -> int:
        """The newest queue offset; -1 without records."""
        return self._log.end_offset - 1

    def record_bytes(self) -> int:
        """Bytes of all records."""
        return sum(segment.log_end for segment in self._log.segments)

    def count_from(self, queue_offset: int) -> int:
        """The number of records from ``queue_offset`` on. Raises NotReady."""
        segments = self._log.segments
        if (place := self._find(segments, queue_offset)) is None:
            return 0
        newer = segments[segments.index(place.segment) :]
        return sum(segment.count for segment in newer) - place.number

    # --- by queue offset -------------------------------------------------------------------

    def unit(self, queue_offset: int) -> CompactionUnit | None:
        """The unit at ``queue_offset`` or the next one; None if all are older. Raises NotReady."""
        if (place := self._find(self._log.segments, queue_offset)) is None:
            return None
        return self._unit(place.segment, place.number)

    def record(self, queue_offset: int) -> memoryview | None:
        """The record at exactly this offset, as a view; None without one. Raises NotReady."""
        if (place := self._find(self._log.segments, queue_offset)) is None:
            return None
        unit = self._unit(place.segment, place.number)
        if unit.queue_offset != queue_offset:
            return None
        start = unit.position - place.segment.base
        return self._records(place.segment, start, start + unit.size)

    def get(
        self,
        queue_offset: int,
        count_max: int,
        bytes_max: int,
        tags: frozenset[int] | None,
    ) -> GetResult:
        """As ``StoreSource.get``, for an offset up to ``last_offset``. Raises NotReady."""
        if (place := self._find(self._log.segments, queue_offset)) is None:
            return self._nothing(queue_offset)
        units = self._units(place, max(_SCAN_UNITS, count_max))
        numbers, seen = choose_units(units, count_max, bytes_max, tags, 0)
        self._next = _Place(place.segment, place.number + seen)
        return self._result(place.segment, units, numbers, seen)

    def get_bulk(
        self,
        queue_offset: int,
        count_max: int,
        bytes_max: int,
        tags: frozenset[int] | None,
    ) -> GetResult:
        """As ``StoreSource.get_bulk``, for an offset up to ``last_offset``. Raises NotReady."""
        if (place := self._find(self._log.segments, queue_offset)) is None:
            return self._nothing(queue_offset)
        units = self._units(place, count_max if tags is None else BULK_SCAN_UNITS)
        numbers, seen = choose_units(units, count_max, bytes_max, tags, 0)
        self._next = _Place(place.segment, place.number + seen)
        result = self._result(place.segment, units, numbers, seen)
        if not result.count:
            return result
        wanted = take_units(units, numbers)
        heads = np.empty(len(wanted), UNIT_DTYPE)
        for name in UNIT_DTYPE.names or ():
            heads[name] = wanted[name]
        offsets = wanted["queue_offset"].astype(QUEUE_OFFSET_DTYPE)
        has_gaps = result.next_offset - int(offsets[0]) != len(wanted)
        gaps: list[Buffer] = [offsets.tobytes()] if has_gaps else []
        layout, records = self._bulk_records(place.segment, wanted, result)
        return result._replace(
            buffers=[heads.tobytes(), *gaps, *records],
            layout=layout,
            first_physical_offset=int(heads["physical_offset"][0]),
            has_queue_offsets=has_gaps,
        )

    def _bulk_records(
        self, segment: Segment, units: Array, result: GetResult
    ) -> tuple[Layout, list[Buffer]]:
        """The records of units: one range of the segment if they fill most of it, else gathered."""
        start = int(units["physical_offset"][0])
        end = int(units["physical_offset"][-1]) + int(units["size"][-1])
        if result.body_bytes >= (end - start) * LOG_FILL_MIN:
            return "log", [self._records(segment, start - segment.base, end - segment.base)]
        if result.body_bytes < len(result.buffers) * PIECE_BYTES_MIN:
            return "gathered", [b"".join(result.buffers)]
        return "gathered", [*result.buffers]

    def _result(self, segment: Segment, units: Array, numbers: Array, seen: int) -> GetResult:
        nothing = self._nothing(int(units["queue_offset"][seen - 1]) + 1)
        if not len(numbers):
            return nothing
        chosen = units[numbers]
        return nothing._replace(
            status=GetStatus.FOUND,
            buffers=[self._records(segment, *run) for run in _runs(segment, chosen)],
            count=len(chosen),
            body_bytes=int(chosen["size"].sum(dtype=np.int64)),
        )

    def _nothing(self, next_offset: int) -> GetResult:
        min_offset, end_offset = self.min_offset or 0, self._log.end_offset
        status = GetStatus.NO_MATCHED_MESSAGE
        return GetResult(status, [], 0, 0, next_offset, min_offset, end_offset)

    # --- by time ---------------------------------------------------------------------------

    def store_time_at(self, queue_offset: int) -> int | None:
        """Store time of the record at ``queue_offset`` or the next one; None if all are older.

        Raises NotReady.
        """
        unit = self.unit(queue_offset)
        return None if unit is None else unit.store_timestamp

    def offsets_around(self, timestamp_ms: int) -> tuple[int | None, int | None]:
        """The newest queue offset stored before a time, and the oldest one stored later or at it.

        Raises NotReady.
        """
        segments = self._log.segments

        def newest_ms(segment: Segment) -> int:
            return self._unit(segment, segment.count - 1).store_timestamp

        index = bisect_left(segments, timestamp_ms, key=newest_ms)
        if index == len(segments):
            return (segments[-1].last_queue_offset if segments else None), None
        segment = segments[index]
        number = bisect_left(
            range(segment.count),
            timestamp_ms,
            key=lambda number: self._unit(segment, number).store_timestamp,
        )
        after = self._unit(segment, number).queue_offset
        if number:
            return self._unit(segment, number - 1).queue_offset, after
        return (segments[index - 1].last_queue_offset if index else None), after

    # --- pages -----------------------------------------------------------------------------

    def _find(self, segments: tuple[Segment, ...], queue_offset: int) -> _Place | None:
        """The place of the first unit at or after ``queue_offset``."""
        index = bisect_left(segments, queue_offset, key=lambda each: each.last_queue_offset)
        if index == len(segments):
            return None
        segment = segments[index]
        first = segment.first_queue_offset
        if queue_offset <= first:
            return _Place(segment, 0)
        if segment.last_queue_offset - first == segment.count - 1:  # without gaps
            return _Place(segment, queue_offset - first)
        if self._next is not None and self._is_next(self._next, segment, queue_offset):
            return _Place(segment, self._next.number)
        number = bisect_left(
            range(segment.count),
            queue_offset,
            key=lambda number: self._unit(segment, number).queue_offset,
        )
        return _Place(segment, number)

    def _is_next(self, place: _Place, segment: Segment, queue_offset: int) -> bool:
        """Whether the remembered place is that of ``queue_offset``."""
        number = place.number
        if place.segment.units_file is not segment.units_file or not 0 < number < segment.count:
            return False
        before, after = self._unit(segment, number - 1), self._unit(segment, number)
        return before.queue_offset < queue_offset <= after.queue_offset

    def _unit(self, segment: Segment, number: int) -> CompactionUnit:
        start = number * COMPACTION_UNIT_BYTES
        used_bytes = segment.count * COMPACTION_UNIT_BYTES
        self._check(segment.units_file, start, start + COMPACTION_UNIT_BYTES, used_bytes)
        return segment.unit(number)

    def _units(self, place: _Place, count: int) -> Array:
        segment, first = place
        end = min(first + count, segment.count)
        used_bytes = segment.count * COMPACTION_UNIT_BYTES
        start, stop = first * COMPACTION_UNIT_BYTES, end * COMPACTION_UNIT_BYTES
        self._check(segment.units_file, start, stop, used_bytes)
        # A copy: after a failed write the follower's thread clears units and writes them again.
        units = np.frombuffer(segment.units_file.view[start:stop], COMPACTION_UNIT_DTYPE).copy()
        if not units["size"].all():
            raise look_again()
        return units

    def _records(self, segment: Segment, start: int, end: int) -> memoryview:
        self._check(segment.log, start, end, segment.log_end)
        return segment.records(start, end)

    def _check(self, file: SegmentFile, start: int, end: int, used_bytes: int) -> None:
        """Raise NotReady unless the range is in memory and equal to its seal.

        The chunk that is being written counts as in memory: its unwritten part is not.
        """
        written_end = used_bytes // CHUNK_BYTES * CHUNK_BYTES
        if start < written_end:
            self._page_cache.check(file, start, min(end, written_end))
        file.check_soon(start, end)


def _runs(segment: Segment, units: Array) -> Iterable[tuple[int, int]]:
    """Ranges of the segment's log that hold the records of units."""
    starts = units["physical_offset"].astype(np.int64) - segment.base
    ends = starts + units["size"]
    is_apart = starts[1:] != ends[:-1]
    run_starts, run_ends = starts[np.append(True, is_apart)], ends[np.append(is_apart, True)]
    return zip(run_starts.tolist(), run_ends.tolist(), strict=True)
