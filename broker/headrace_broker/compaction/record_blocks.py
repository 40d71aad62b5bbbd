"""Sealed segments as one sequence of numbered records, read in blocks; for threads."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace_broker.store.errors import StoreError
from headrace_protocol.columns import RecordColumns
from headrace_protocol.errors import CorruptRecord
from headrace_protocol.message import PROPERTIES_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from headrace_broker.compaction.segments import Segment
    from headrace_protocol.columns import Array

BLOCK_BYTES: Final = 4 << 20
# Records are read one by one if at most this part of a block is kept.
_SPARSE: Final = 4


class SegmentDamaged(StoreError):
    """A record of a compaction log can't be read, so its queue is not compacted."""

    def __init__(self, path: Path, position: int, reason: str) -> None:
        super().__init__(
            f"{path}: damaged at {position} ({reason}), so the queue is not compacted: stop the "
            "broker and run headrace store fsck on its directory"
        )
        self.path = path


class Marks:
    """One bit per record."""

    def __init__(self, count: int) -> None:
        self._bits = np.zeros(-(-count // 8), np.uint8)

    def set(self, numbers: Array) -> None:
        """Mark records."""
        bits = np.right_shift(np.uint8(0x80), (numbers & 7).astype(np.uint8))
        np.bitwise_or.at(self._bits, numbers >> 3, bits)

    def get(self, first: int, end: int) -> Array:
        """A mask of the marked records of a range."""
        bits = np.unpackbits(self._bits[first >> 3 : -(-end // 8)])
        return bits[first & 7 :][: end - first].astype(bool)

    def count(self) -> int:
        """The number of marked records."""
        return int(np.bitwise_count(self._bits).sum())

    def common_count(self, other: Marks) -> int:
        """The number of records that both have marked."""
        return int(np.bitwise_count(self._bits & other._bits).sum())


class Block(NamedTuple):
    """Records of a segment that are not dropped: their numbers, units and bytes."""

    segment: Segment
    numbers: Array
    units: Array
    records: RecordColumns

    def check_bodies(self) -> None:
        """Check the CRC of each body. Raises SegmentDamaged."""
        try:
            self.records.check_bodies()
        except CorruptRecord as error:
            raise _damaged(self.segment, self.units, self.records.start, error) from error


class RecordSequence:
    """The records of segments, numbered from 0 on in the order of the log.

    count: of all records. firsts: the number of each segment's first record, then ``count``.
    """

    def __init__(self, segments: Sequence[Segment], pace: Callable[[int], None]) -> None:
        """pace: called with the size of each block before it is read."""
        self.segments = segments
        self.firsts = [0, *accumulate(segment.count for segment in segments)]
        self.count = self.firsts[-1]
        self.bytes_read = 0
        self._pace = pace

    def queue_offset(self, number: int) -> int:
        """The queue offset of a record; the one after the last record for ``count``."""
        if number == self.count:
            return self.segments[-1].last_queue_offset + 1 if self.segments else 0
        at = bisect_right(self.firsts, number) - 1
        return int(self.segments[at].read_units(number - self.firsts[at], 1)["queue_offset"][0])

    def number_of(self, queue_offset: int) -> int:
        """The number of the first record at or after a queue offset; ``count`` without one."""
        at = bisect_left(self.segments, queue_offset, key=lambda each: each.last_queue_offset)
        if at == len(self.segments):
            return self.count
        offsets = self.segments[at].read_units()["queue_offset"]
        return self.firsts[at] + int(np.searchsorted(offsets, queue_offset))

    def range_of(self, queue_offset: int, stored_until_ms: int) -> tuple[int, int]:
        """Numbers of the records from a queue offset to the first one that was stored too late."""
        first = end = self.count
        for at, segment in zip(self.firsts, self.segments, strict=False):
            if segment.last_queue_offset < queue_offset:
                continue
            units = segment.read_units()
            if first == self.count:
                first = at + int(np.searchsorted(units["queue_offset"], queue_offset))
            is_late = units["store_timestamp"] > stored_until_ms
            if is_late.any():
                end = at + int(is_late.argmax())
                break
        return min(first, end), end

    def blocks(self, first: int, end: int, dropped: Marks) -> Iterator[Block]:
        """The records of a range of numbers that are not dropped; their bodies are not checked.

        Raises OSError, SegmentDamaged.
        """
        for at, segment in zip(self.firsts, self.segments, strict=False):
            start, upto = max(first - at, 0), min(end - at, segment.count)
            if start < upto:
                units = segment.read_units(start, upto - start)
                for part in _cut(units):
                    number = at + start + part.start
                    is_kept = ~dropped.get(number, at + start + part.stop)
                    if is_kept.any():
                        numbers = number + np.flatnonzero(is_kept)
                        yield self._read(segment, numbers, units[part][is_kept])

    def _read(self, segment: Segment, numbers: Array, units: Array) -> Block:
        sizes = units["size"].astype(np.int64)
        positions = units["physical_offset"].astype(np.int64) - segment.base
        span_bytes, kept_bytes = int(positions[-1] + sizes[-1] - positions[0]), int(sizes.sum())
        is_sparse = kept_bytes * _SPARSE < span_bytes
        read_bytes = kept_bytes if is_sparse else span_bytes
        self._pace(read_bytes)
        self.bytes_read += read_bytes
        if is_sparse:
            data, starts = _read_each(segment, positions, sizes), np.cumsum(sizes) - sizes
        else:
            first = int(positions[0])
            # Keys are copied as rows of fixed width, some of which end past the last record.
            data = segment.read_records(first, first + span_bytes + PROPERTIES_BYTES_MAX)
            starts = positions - first
        try:
            records = RecordColumns(data, starts, sizes)
            is_own = records.queue_offset == units["queue_offset"]
            is_own &= records.physical_offset == units["physical_offset"]
            records.require(is_own, "it states another offset than its unit")
        except CorruptRecord as error:
            raise _damaged(segment, units, starts, error) from error
        return Block(segment, numbers, units, records)


def _read_each(segment: Segment, positions: Array, sizes: Array) -> bytes:
    ranges = zip(positions.tolist(), sizes.tolist(), strict=True)
    with segment.log.opened() as descriptor:
        return b"".join([os.pread(descriptor, size, position) for position, size in ranges])


def _damaged(segment: Segment, units: Array, starts: Array, error: CorruptRecord) -> SegmentDamaged:
    number = int(np.searchsorted(starts, error.position, "right")) - 1
    position = int(units["physical_offset"][number]) - segment.base
    return SegmentDamaged(segment.log.path, position, error.reason)


def _cut(units: Array) -> Iterator[slice]:
    """Slices of units whose records have up to ``BLOCK_BYTES``, at least one record each."""
    ends = np.cumsum(units["size"], dtype=np.int64)
    first = 0
    while first < len(units):
        limit = (int(ends[first - 1]) if first else 0) + BLOCK_BYTES
        end = max(int(np.searchsorted(ends, limit, "right")), first + 1)
        yield slice(first, end)
        first = end
