"""A queue in the tier: its own log and consume queue.

The log has the records verbatim, except that each states its offset in this log instead of its
physical offset. The consume queue has a unit of 20 bytes for each: offset, size, tags code.

What always holds:

1. Records are durable before their units, so a unit without its record is a damage.
2. A record counts once its unit is there: ``commit_offset`` is the end of the consume queue.
3. What a crash or a failed append leaves behind the last unit and its record is cut before more is
   appended.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace_broker.tiered.container.flat_file import FileAddress, FlatFile, Piece
from headrace_broker.tiered.container.stored_tier import Spans, TierQueue
from headrace_protocol.columns import UNIT_DTYPE, RecordColumns
from headrace_protocol.tier.driver import expect, returns_failure
from headrace_protocol.tier.paths import FileKind
from headrace_protocol.tier.stored_queue import UnitRange
from headrace_protocol.tier_bodies import LogSpan, UnitSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_broker.tiered.container.metadata import TierMetadata
    from headrace_protocol.columns import Array
    from headrace_protocol.tier.driver import AppendDriver, Buffer, Failure, Range
    from headrace_protocol.tier.paths import QueueName

UNIT_BYTES: Final = UNIT_DTYPE.itemsize
# The offset in the log that a record states.
_OFFSET_AT: Final = 28
_OFFSET_BYTES: Final = 8


class SegmentLimits(NamedTuple):
    """Sizes and ages at which segments end, with Apache's defaults."""

    log_bytes: int = 1 << 30
    units_bytes: int = 100 << 20
    log_age_ms: int = 24 * 3600 * 1000
    log_aged_bytes: int = 16 << 20


class FlatQueue(TierQueue):
    """A queue as two files of segments."""

    min_offset = 0

    def __init__(
        self,
        driver: AppendDriver,
        folder: str,
        name: QueueName,
        metadata: TierMetadata,
        limits: SegmentLimits,
    ) -> None:
        """Take over the rows of the metadata; ``recovery.recover`` compares them to the store."""
        self.name, self.path = name, name.path
        self.log, self.units_file = (
            FlatFile(driver, FileAddress(folder, name, kind), metadata)
            for kind in (FileKind.COMMIT_LOG, FileKind.CONSUME_QUEUE)
        )
        self._metadata = metadata
        self._limits = limits
        # One past the last record that has a unit.
        self.log_end = self.log.end

    @property
    def commit_offset(self) -> int:
        """As ``StoredQueue.commit_offset``."""
        return self.units_file.end // UNIT_BYTES

    @property
    def stored_bytes(self) -> int:
        """As ``TierQueue.stored_bytes``."""
        return sum(row.size for row in (*self.log.segments, *self.units_file.segments))

    @property
    def log_bytes(self) -> int:
        """As ``TierQueue.log_bytes``."""
        return self.log_end - self.log.base

    @property
    def _log_limit(self) -> int:
        return self.log.end

    def _keeps(self, wanted: Range) -> bool:
        return self.log.base <= wanted[0] and wanted[1] <= self.log_end

    @property
    def is_new(self) -> bool:
        """True if the saved metadata is older than the queue's first message."""
        row = self._metadata.queue(self.name)
        return row is not None and not row.max_offset

    # -- upload ------------------------------------------------------------------------------------

    @returns_failure
    def append(self, records: RecordColumns, tags_codes: Array, now_ms: int) -> None:
        """Keep records in the order of their queue offsets; durable when this returns.

        records: none before ``commit_offset``; behind it and between them there may be gaps, which
        stay gaps. tags_codes: one per record, as in a unit.

        After a failure a part of the records may be kept: ``commit_offset`` says how many.
        """
        self._settle()
        if not len(records):
            return
        offsets = records.queue_offset
        assert offsets[0] >= self.commit_offset
        breaks = np.flatnonzero(offsets[1:] != offsets[:-1] + 1) + 1
        bounds = [0, *breaks.tolist(), len(records)]
        for first, end in pairwise(bounds):
            run = slice(first, end)
            self._append_run(records.select(run), tags_codes[run], now_ms)

    def _settle(self) -> None:
        """Discard what a failed append has left behind the last unit."""
        for file in (self.log, self.units_file):
            expect(file.settle())
        if self.log.end > self.log_end:
            expect(self.log.cut(self.log_end))

    @returns_failure
    def cut(self, queue_offset: int, now_ms: int) -> None:
        """Discard all records from an offset on, which is past ``min_offset``."""
        found = expect(self.units(queue_offset, 1))
        if not len(found.units):
            return
        # Units first: those without a record would be damage.
        expect(self.units_file.cut(max(queue_offset * UNIT_BYTES, self.units_file.base)))
        self.log_end = int(found.units["physical_offset"][0])
        failure = self.log.cut(self.log_end)
        self.publish(now_ms)
        expect(failure)

    def _append_run(self, records: RecordColumns, tags_codes: Array, now_ms: int) -> None:
        """Append records with consecutive queue offsets."""
        first = int(records.queue_offset[0])
        if self.log.end == self.log.base:
            self.log.roll(self.log.base, now_ms)
            self.min_offset = first
        if not self.units_file.segments or first != self.commit_offset:
            self.units_file.roll(first * UNIT_BYTES, now_ms)
        begin = 0
        while begin < len(records):
            self._roll_log(int(records.size[begin]), now_ms)
            room = max(self._limits.log_bytes - self.log.segments[-1].size, 0)
            fitting = int(np.searchsorted(np.cumsum(records.size[begin:]), room, "right"))
            end = begin + max(fitting, 1)
            some = records.select(slice(begin, end))
            self._append_some(some, tags_codes[begin:end], now_ms)
            begin = end

    def _roll_log(self, record_bytes: int, now_ms: int) -> None:
        last, limits = self.log.segments[-1], self._limits
        is_old = last.begin_timestamp + limits.log_age_ms < now_ms
        is_full = last.size and last.size + record_bytes > limits.log_bytes
        if is_full or (is_old and last.size >= limits.log_aged_bytes):
            self.log.roll(self.log.end, now_ms)

    def _append_some(self, records: RecordColumns, tags_codes: Array, now_ms: int) -> None:
        """Append records that fit the last segment of the log, and then their units."""
        units = np.empty(len(records), UNIT_DTYPE)
        units["physical_offset"] = self.log.end + np.cumsum(records.size) - records.size
        units["size"] = records.size
        units["tags_code"] = tags_codes
        times = records.store_timestamp
        data = with_offsets(records, units["physical_offset"])
        expect(self.log.append(Piece(data, int(times.min()), int(times.max()))))
        self._append_units(units, times, now_ms)

    def _append_units(self, units: Array, times: Array, now_ms: int) -> None:
        begin = 0
        while begin < len(units):
            limit = self._limits.units_bytes // UNIT_BYTES
            room = limit - self.units_file.segments[-1].size // UNIT_BYTES
            if room <= 0:
                self.units_file.roll(self.units_file.end, now_ms)
                room = limit
            some, some_times = units[begin : begin + room], times[begin : begin + room]
            piece = Piece(some.tobytes(), int(some_times.min()), int(some_times.max()))
            expect(self.units_file.append(piece))
            self.log_end = int(some["physical_offset"][-1]) + int(some["size"][-1])
            begin += len(some)
        self.publish(now_ms)

    def publish(self, now_ms: int) -> None:
        """Set the queue's row in the metadata."""
        self._metadata.set_queue(self.name, self.min_offset, self.commit_offset, now_ms)

    # -- reading -----------------------------------------------------------------------------------

    def _read_log(self, ranges: Sequence[Range]) -> list[Buffer] | Failure:
        return self.log.read(ranges)

    @returns_failure
    def units(self, queue_offset: int, count_max: int) -> UnitRange:
        """As ``StoredQueue.units``."""
        position = max(queue_offset, self.min_offset) * UNIT_BYTES
        rows = [row for row in self.units_file.segments if row.size]
        row = next((row for row in rows if position < row.end), None)
        if row is None:
            return UnitRange(self.commit_offset, np.empty(0, UNIT_DTYPE))
        position = max(position, row.base_offset)
        end = position
        for other in rows:
            if other.base_offset <= end < other.end:
                end = other.end
        end = min(end, position + count_max * UNIT_BYTES)
        (data,) = expect(self.units_file.read([(position, end)]))
        return UnitRange(position // UNIT_BYTES, np.frombuffer(data, UNIT_DTYPE))

    def spans(self, wanted: Range, count_max: int) -> Spans:
        """As ``TierQueue.spans``, with the whole log: only units say what is where in it."""
        start, end = max(wanted[0], self.min_offset), wanted[1]
        rows = [
            row
            for row in self.units_file.segments
            if start * UNIT_BYTES < row.end and row.base_offset < end * UNIT_BYTES
        ]
        next_offset = end if len(rows) <= count_max else rows[count_max].base_offset // UNIT_BYTES
        units = [
            UnitSpan(
                self.units_file.address.segment_path(row.base_offset),
                first,
                row.end // UNIT_BYTES - first,
                first * UNIT_BYTES - row.base_offset,
                -1,
                row.begin_timestamp,
                row.end_timestamp,
            )
            for row in rows[:count_max]
            for first in [max(row.base_offset // UNIT_BYTES, self.min_offset)]
        ]
        log = [
            LogSpan(self.log.address.segment_path(row.base_offset), row.base_offset, row.size, 0)
            for row in self.log.segments
        ]
        return Spans(next_offset, units, log)

    # -- by time -----------------------------------------------------------------------------------

    def _first_at_or_after(self, limit_ms: int) -> int | Failure:
        rows = [row for row in self.units_file.segments if row.size]
        row = next((row for row in rows if row.end_timestamp >= limit_ms), None)
        if row is None:
            return self.commit_offset
        low = max(row.base_offset // UNIT_BYTES, self.min_offset)
        return self._first_in(low, row.end // UNIT_BYTES, limit_ms)

    # -- expiry ------------------------------------------------------------------------------------

    def expire(self, before_ms: int, now_ms: int) -> list[str] | Failure:
        """Drop segments whose last record was stored before a time; see ``drop``."""
        count = 0
        for row in self.log.segments[:-1]:
            if row.size and row.end_timestamp >= before_ms:
                break
            count += 1
        return self.drop(count, now_ms)

    @returns_failure
    def drop(self, count: int, now_ms: int) -> list[str]:
        """Drop the first segments of the log, but not the one that grows.

        Returns the paths of the dropped files: delete them once the metadata is saved.
        """
        # A failed append may leave the last segment without the record that says where it begins.
        while count and not self.log.segments[count].size:
            count -= 1
        if not count:
            return []
        self.min_offset = expect(self.head(self.log.segments[count].base_offset)).queue_offset
        rows = self.units_file.segments[:-1]
        expired = [row for row in rows if row.end <= self.min_offset * UNIT_BYTES]
        paths = self.log.drop_before(count) + self.units_file.drop_before(len(expired))
        self.publish(now_ms)
        return paths


def with_offsets(records: RecordColumns, log_offsets: Array) -> bytearray:
    """A copy of records back to back, each stating its offset in the log."""
    ends = np.cumsum(records.size)
    start, size = int(records.start[0]), int(ends[-1])
    if (records.start == start + ends - records.size).all():
        data = bytearray(memoryview(records.data)[start : start + size])
    else:
        view, stops = memoryview(records.data), records.start + records.size
        pairs = zip(records.start.tolist(), stops.tolist(), strict=True)
        data = bytearray().join([view[begin:stop] for begin, stop in pairs])
    at = (ends - records.size)[:, None] + np.arange(_OFFSET_AT, _OFFSET_AT + _OFFSET_BYTES)
    stated = np.ascontiguousarray(log_offsets, ">i8").view(np.uint8).reshape(-1, _OFFSET_BYTES)
    np.frombuffer(data, np.uint8)[at] = stated
    return data
