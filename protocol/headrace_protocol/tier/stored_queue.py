"""Reads of a queue in the tier, whatever the layout of its bytes.

Records state their offset in the queue's own log; a unit of 20 bytes has offset, size, tags code.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np

from headrace_protocol.columns import RecordColumns
from headrace_protocol.errors import CorruptRecord
from headrace_protocol.message import BORN_HOST_V6, MAGIC_V1, MAGIC_V2
from headrace_protocol.tier.driver import Failure, FailureKind, expect, returns_failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_protocol.columns import Array
    from headrace_protocol.tier.driver import Buffer, Range

Boundary = Literal["LOWER", "UPPER"]

# What is read of a record to find its queue offset and store time.
_HEAD: Final = struct.Struct(">ii12xqqi")  # size, magic, queue offset, log_offset, sysFlag
HEAD_BYTES: Final = 80
_STORE_TIME_AT: Final = 56  # after an IPv4 born host
_V6_MORE: Final = 12
# Records closer than this are read together with what lies between them.
_GAP_BYTES_MAX: Final = 64 << 10


class UnitRange(NamedTuple):
    """Units in a row. first: queue offset of the first one."""

    first: int
    units: Array


class RecordHead(NamedTuple):
    """The start of a record."""

    size: int
    queue_offset: int
    log_offset: int
    store_ms: int


class StoredQueue(ABC):
    """One queue, for all threads. All reads may block.

    path: of the queue, for messages.
    """

    path: str

    @property
    @abstractmethod
    def min_offset(self) -> int:
        """Queue offset of the first record kept; 0 for a queue that has had no message."""

    @property
    @abstractmethod
    def commit_offset(self) -> int:
        """One past the last queue offset kept; 0 for a queue that has had no message."""

    @property
    @abstractmethod
    def _log_limit(self) -> int:
        """End of the log, for reads of heads."""

    @abstractmethod
    def _read_log(self, ranges: Sequence[Range]) -> list[Buffer] | Failure:
        """Ranges of the queue's log. Fails as ``Driver.read``."""

    @abstractmethod
    def units(self, queue_offset: int, count_max: int) -> UnitRange | Failure:
        """Up to ``count_max`` units from an offset on, or from the next one that is kept.

        Fewer are returned at a gap. Without a unit the result is empty, at ``commit_offset``.
        """

    @returns_failure
    def store_time(self, queue_offset: int) -> int:
        """The store time of a record that is kept."""
        found = expect(self.units(queue_offset, 1))
        return expect(self.head(int(found.units["physical_offset"][0]))).store_ms

    @returns_failure
    def _first_in(self, low: int, high: int, limit_ms: int) -> int:
        """The first of some records stored at or after a time; ``high`` if all are older."""
        while low < high:
            middle = (low + high) // 2
            if expect(self.store_time(middle)) < limit_ms:
                low = middle + 1
            else:
                high = middle
        return low

    @abstractmethod
    def _first_at_or_after(self, limit_ms: int) -> int | Failure:
        """The first record stored at or after a time; ``commit_offset`` if all are older."""

    def records(
        self, units: Array, queue_offsets: Array, *, check_bodies: bool = False
    ) -> RecordColumns | Failure:
        """The records of units, which may lie apart; each is checked against its unit.

        Fails with DAMAGED for bytes that are not these records.
        """
        starts = units["physical_offset"].astype(np.int64)
        sizes = units["size"].astype(np.int64)
        if not len(units):
            return RecordColumns(b"", starts, sizes)
        ends = starts + sizes
        gaps = starts[1:] - ends[:-1]
        if (sizes <= 0).any() or (gaps < 0).any() or starts[0] < 0:
            return self._damaged("units are not in order")
        first = np.append(True, gaps > _GAP_BYTES_MAX)
        last = np.append(first[1:], True)
        spans: list[Range] = list(zip(starts[first].tolist(), ends[last].tolist(), strict=True))
        read = self._read_log(spans)
        if isinstance(read, Failure):
            return read
        span_of = np.cumsum(first) - 1
        lengths = np.array([len(part) for part in read])
        moved = np.cumsum(lengths) - lengths - np.array([start for start, _ in spans])
        data = read[0] if len(read) == 1 else b"".join(read)
        return self._checked(data, starts, sizes, moved[span_of], queue_offsets, check_bodies)

    def _checked(
        self,
        data: Buffer,
        starts: Array,
        sizes: Array,
        moved: Array,
        queue_offsets: Array,
        check_bodies: bool,
    ) -> RecordColumns | Failure:
        try:
            records = RecordColumns(data, starts + moved, sizes)
            records.require(records.physical_offset == starts, "it states another offset")
            records.require(records.queue_offset == queue_offsets, "it states another queue offset")
            if check_bodies:
                records.check_bodies()
        except CorruptRecord as error:
            return self._damaged(str(error))
        return records

    def _damaged(self, reason: str) -> Failure:
        return Failure(FailureKind.DAMAGED, self.path, reason)

    def head(self, log_offset: int) -> RecordHead | Failure:
        """The start of the record at an offset of the log."""
        end = min(log_offset + HEAD_BYTES, self._log_limit)
        read = self._read_log([(log_offset, end)])
        if isinstance(read, Failure):
            return read
        return read_head(read[0]) or self._damaged(f"there is no record at {log_offset}")

    @returns_failure
    def offset_by_time(self, timestamp_ms: int, boundary: Boundary = "LOWER") -> int:
        """The queue offset for a store time.

        LOWER: first record stored at or after the time; ``commit_offset`` if all are older.
        UPPER: last record stored at or before the time; ``min_offset`` if all are newer.
        """
        limit_ms = timestamp_ms if boundary == "LOWER" else timestamp_ms + 1
        found = expect(self._first_at_or_after(limit_ms))
        return found if boundary == "LOWER" else self._last_before(found)

    def _last_before(self, end: int) -> int:
        """The last record before an offset; ``min_offset`` without one. A gap may lie between."""
        low, high = self.min_offset, end - 1
        middle = high
        while low < high:
            if expect(self.units(middle, 1)).first < end:
                low = middle
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        return low


def read_bytes(units: Array) -> Array:
    """Bytes that ``StoredQueue.records`` reads for the first, the first two ... of some units."""
    starts, sizes = units["physical_offset"].astype(np.int64), units["size"].astype(np.int64)
    gaps = starts[1:] - starts[:-1] - sizes[:-1]
    sizes[1:] += np.where(gaps <= _GAP_BYTES_MAX, gaps, 0)
    return np.cumsum(sizes)


def read_head(data: Buffer) -> RecordHead | None:
    """The head of the record at the start of ``data``; None if there is none."""
    if len(data) < HEAD_BYTES:
        return None
    size, magic, queue_offset, log_offset, sys_flag = _HEAD.unpack_from(data)
    if magic not in {MAGIC_V1, MAGIC_V2}:
        return None
    at = _STORE_TIME_AT + (_V6_MORE if sys_flag & BORN_HOST_V6 else 0)
    store_ms = int.from_bytes(data[at : at + 8], "big", signed=True)
    return RecordHead(size, queue_offset, log_offset, store_ms)
