"""Reads of a compaction log on the loop: by queue offset and by store time.

An offset without a record stands for the next one that has a record. Each read takes the segments
once and may raise NotReady, for cold pages or because a run has just replaced a segment.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headrace_broker.compaction.segments import look_again
from headrace_broker.store.files.page_cache import CHUNK_BYTES
from headrace_broker.store.log.batch_units import BATCH_UNIT_BYTES, BATCH_UNIT_DTYPE, UNIT_HEAD
from headrace_broker.store.store_source import (
    BULK_SCAN_UNITS,
    SCAN_BYTES,
    GetResult,
    GetStatus,
    bulk_records,
    choose_runs,
)
from headrace_protocol.choose import choose, likely_count
from headrace_protocol.columns import UNIT_DTYPE

if TYPE_CHECKING:
    from headrace_broker.compaction.queue_log import QueueLog
    from headrace_broker.compaction.segments import Segment, SegmentFile
    from headrace_broker.compaction.units import CompactionUnit
    from headrace_broker.store.files.page_cache import PageCache
    from headrace_protocol.columns import Array
    from headrace_protocol.message import Buffer

_SCAN_UNITS = SCAN_BYTES // BATCH_UNIT_BYTES
# The part of a unit that ConsumeQueues have, too.
_HEAD_DTYPE = np.dtype(
    {
        "names": ["head"],
        "formats": [f"V{UNIT_DTYPE.itemsize}"],
        "offsets": [0],
        "itemsize": BATCH_UNIT_BYTES,
    }
)
# More readers than that search for their slots.
_SLOTS_MAX = 1024


class _Slot(NamedTuple):
    """A unit: its segment and its number there."""

    segment: Segment
    number: int


class LogReader:
    """Reads one compaction log.

    The slot after each read is remembered: a later read usually begins there, without a search.
    """

    __slots__ = ("_cut_count", "_log", "_page_cache", "_slots")

    def __init__(self, log: QueueLog, page_cache: PageCache) -> None:
        self._log = log
        self._page_cache = page_cache
        self._cut_count = log.cut_count
        self._slots: dict[int, _Slot] = {}

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
        if (slot := self._find(segments, queue_offset)) is None:
            return 0
        newer = segments[segments.index(slot.segment) :]
        return sum(segment.count for segment in newer) - slot.number

    # --- by queue offset -------------------------------------------------------------------

    def unit(self, queue_offset: int) -> CompactionUnit | None:
        """The unit at ``queue_offset`` or the next one; None if all are older. Raises NotReady."""
        if (slot := self._find(self._log.segments, queue_offset)) is None:
            return None
        return self._unit(slot.segment, slot.number)

    def record(self, queue_offset: int) -> memoryview | None:
        """The record at exactly this offset, as a view; None without one. Raises NotReady."""
        if (slot := self._find(self._log.segments, queue_offset)) is None:
            return None
        unit = self._unit(slot.segment, slot.number)
        if unit.queue_offset != queue_offset:
            return None
        start = unit.position - slot.segment.base
        return self._records(slot.segment, start, start + unit.size)

    def get(
        self,
        queue_offset: int,
        count_max: int,
        bytes_max: int,
        tags: frozenset[int] | None,
        queue_end: int,
    ) -> GetResult:
        """As ``StoreSource.get``, for an offset up to ``last_offset``. Raises NotReady.

        queue_end: one past the newest queue offset, also of records that are not in this log yet.
        """
        segments = self._log.segments
        if (slot := self._find(segments, queue_offset)) is None:
            return _nothing(segments, queue_offset, queue_end)
        segment, first = slot
        scan_count = count_max if tags is None else max(_SCAN_UNITS, count_max)
        units = self._units(segment, first, scan_count)
        some = UNIT_HEAD.iter_unpack(units.view(np.uint8).data)
        runs, count, body_bytes, seen = choose_runs(some, count_max, bytes_max, tags)
        next_offset = int(units["queue_offset"][seen - 1]) + 1
        self._remember(segment, first + seen, next_offset)
        if not count:
            return _nothing(segments, next_offset, queue_end)
        buffers = self._ranges(segment, runs)
        min_offset = segments[0].first_queue_offset
        return GetResult(
            GetStatus.FOUND, buffers, count, body_bytes, next_offset, min_offset, queue_end
        )

    def get_bulk(
        self,
        queue_offset: int,
        count_max: int,
        bytes_max: int,
        tags: frozenset[int] | None,
        queue_end: int,
    ) -> GetResult:
        """As ``StoreSource.get_bulk``, for an offset up to ``last_offset``. Raises NotReady.

        queue_end: as for ``get``.
        """
        segments = self._log.segments
        if (slot := self._find(segments, queue_offset)) is None:
            return _nothing(segments, queue_offset, queue_end)
        segment, first = slot
        if tags is None:
            first_bytes = self._unit(segment, first).size
            scan_count = likely_count(first_bytes, count_max, bytes_max)
        else:
            scan_count = BULK_SCAN_UNITS
        units = self._units(segment, first, scan_count)
        where, _, seen = choose(units, tags, count_max, bytes_max)
        next_offset, units = int(units["queue_offset"][seen - 1]) + 1, units[where]
        self._remember(segment, first + seen, next_offset)
        if not len(units):
            return _nothing(segments, next_offset, queue_end)
        has_gaps = next_offset - int(units["queue_offset"][0]) != len(units)
        # A unit begins with that of a ConsumeQueue.
        buffers: list[Buffer] = [units.view(_HEAD_DTYPE)["head"].tobytes()]
        if has_gaps:
            buffers.append(units["queue_offset"].tobytes())
        body_bytes = int(units["size"].sum(dtype=np.int64))
        layout, records = bulk_records(units, partial(self._ranges, segment))
        return GetResult(
            GetStatus.FOUND,
            buffers + records,
            len(units),
            body_bytes,
            next_offset,
            segments[0].first_queue_offset,
            queue_end,
            layout,
            int(units["physical_offset"][0]),
            has_gaps,
        )

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

    def _find(self, segments: tuple[Segment, ...], queue_offset: int) -> _Slot | None:
        """The slot of the first unit at or after ``queue_offset``."""
        index = bisect_left(segments, queue_offset, key=lambda each: each.last_queue_offset)
        if index == len(segments):
            return None
        segment = segments[index]
        if queue_offset <= segment.first_queue_offset:
            return _Slot(segment, 0)
        if not segment.has_gaps:
            return _Slot(segment, queue_offset - segment.first_queue_offset)
        known = self._slots.pop(queue_offset, None)
        if known is not None and self._holds(known, segment):
            return _Slot(segment, known.number)
        number = bisect_left(
            range(segment.count),
            queue_offset,
            key=lambda number: self._unit(segment, number).queue_offset,
        )
        if number == segment.count:  # the follower's thread has just cleared units
            raise look_again()
        return _Slot(segment, number)

    def _remember(self, segment: Segment, number: int, queue_offset: int) -> None:
        if segment.has_gaps:
            if len(self._slots) >= _SLOTS_MAX:
                self._slots.clear()
            self._slots[queue_offset] = _Slot(segment, number)

    def _holds(self, slot: _Slot, segment: Segment) -> bool:
        """True if a remembered slot is that of the same unit in ``segment``."""
        if self._cut_count != self._log.cut_count:
            self._cut_count = self._log.cut_count
            self._slots.clear()
            return False
        return slot.segment.units_file is segment.units_file

    def _unit(self, segment: Segment, number: int) -> CompactionUnit:
        self._check_units(segment, number, number + 1)
        return segment.unit(number)

    def _units(self, segment: Segment, first: int, count: int) -> Array:
        """Units as they are now; the follower's thread may clear them and write them again.

        Raises NotReady for cleared units.
        """
        end = min(first + count, segment.count)
        self._check_units(segment, first, end)
        view = segment.units_file.view
        some = bytes(view[first * BATCH_UNIT_BYTES : end * BATCH_UNIT_BYTES])
        units = np.frombuffer(some, BATCH_UNIT_DTYPE)
        if not units["size"].all():
            raise look_again()
        return units

    def _check_units(self, segment: Segment, first: int, end: int) -> None:
        used_bytes = segment.count * BATCH_UNIT_BYTES
        start, stop = first * BATCH_UNIT_BYTES, end * BATCH_UNIT_BYTES
        self._check(segment.units_file, start, stop, used_bytes)

    def _ranges(self, segment: Segment, ranges: list[tuple[int, int]]) -> list[Buffer]:
        base = segment.base
        return [self._records(segment, start - base, end - base) for start, end in ranges]

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


def _nothing(segments: tuple[Segment, ...], next_offset: int, queue_end: int) -> GetResult:
    min_offset = segments[0].first_queue_offset if segments else 0
    status = GetStatus.NO_MATCHED_MESSAGE
    return GetResult(status, [], 0, 0, next_offset, min_offset, queue_end)
