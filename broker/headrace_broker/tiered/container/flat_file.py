"""A file that is cut into segments, as one address space.

Segments follow each other without a gap, unless messages left the broker's log before they were
uploaded: then a segment of the consume queue begins past the end of the one before.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from headrace_broker.tiered.container.metadata import LONG_MAX, STATUS_SEALED, SegmentRow
from headrace_protocol.tier.driver import (
    REWRITTEN_BYTES_MAX,
    Extent,
    Failure,
    FailureKind,
    read_extents,
)
from headrace_protocol.tier.paths import segment_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_broker.tiered.container.metadata import TierMetadata
    from headrace_protocol.tier.driver import AppendDriver, Buffer, Range
    from headrace_protocol.tier.paths import FileKind, QueueName


class FileAddress(NamedTuple):
    """The address of a file's segments. folder: the cluster's. queue: owns the file."""

    folder: str
    queue: QueueName
    kind: FileKind

    @property
    def path(self) -> str:
        """The folder of the segments."""
        return f"{self.folder}/{self.queue.path}/{self.kind.name}"

    def segment_path(self, base: int) -> str:
        """The path of a segment."""
        return f"{self.path}/{segment_name(base)}"


class Piece(NamedTuple):
    """Bytes to append to one segment. begin_ms, end_ms: their lowest and highest store time."""

    data: Buffer
    begin_ms: int
    end_ms: int


class FlatFile:
    """The segments of a file; one thread appends, cuts and drops while others read.

    segments: their rows in the metadata, in order. The last one is the one that grows.
    """

    def __init__(self, driver: AppendDriver, address: FileAddress, metadata: TierMetadata) -> None:
        self.address = address
        self.segments = tuple(metadata.segments(address.queue, address.kind))
        self._driver = driver
        self._metadata = metadata
        # After a failed append the segment may be longer than its row says.
        self._is_end_unknown = False

    @property
    def base(self) -> int:
        """Begin of the first segment; 0 without segments."""
        return self.segments[0].base_offset if self.segments else 0

    @property
    def end(self) -> int:
        """One past the last byte; 0 without segments."""
        return self.segments[-1].end if self.segments else 0

    def segment_at(self, position: int) -> SegmentRow | None:
        """The segment that a position is in, or the last one before it; None before all."""
        number = bisect_right(self.segments, position, key=lambda row: row.base_offset)
        return self.segments[number - 1] if number else None

    # -- reading -----------------------------------------------------------------------------------

    def read(self, ranges: Sequence[Range]) -> list[Buffer] | Failure:
        """The bytes of each range, over any number of segments.

        Fails as ``Driver.read``, and with SHORT for a range that is not all there.
        """
        return read_extents(ranges, self._extent, self._driver.read)

    def _extent(self, position: int) -> Extent[str] | Failure:
        row = self.segment_at(position)
        if row is None or position >= row.end:
            reason = f"nothing is kept at {position}"
            return Failure(FailureKind.SHORT, self.address.path, reason)
        return Extent(self.address.segment_path(row.base_offset), row.base_offset, row.end, 0)

    # -- the end -----------------------------------------------------------------------------------

    def roll(self, base: int, now_ms: int) -> None:
        """Begin a segment at ``base``; its file is made by the first append."""
        assert base >= self.end
        assert not self._is_end_unknown
        rows = list(self.segments)
        if rows:
            if rows[-1].base_offset == base:
                return
            rows[-1] = msgspec.structs.replace(
                rows[-1], status=STATUS_SEALED, seal_timestamp=now_ms
            )
        path, kind = self.address.queue.path, self.address.kind
        self._set([*rows, SegmentRow(path, kind, base, create_timestamp=now_ms)])

    def settle(self) -> Failure | None:
        """After a failed append, discard what it may have left; else nothing happens."""
        return self._cut_last(self.segments[-1]) if self._is_end_unknown else None

    def append(self, piece: Piece) -> Failure | None:
        """Append to the last segment; durable when this returns. Fails as the driver's append."""
        assert not self._is_end_unknown
        row = self.segments[-1]
        path = self.address.segment_path(row.base_offset)
        failure = self._driver.append(path, row.size, piece.data)
        if failure is not None:
            self._is_end_unknown = True
            return failure
        is_new = row.begin_timestamp == LONG_MAX
        changed = msgspec.structs.replace(
            row,
            size=row.size + len(piece.data),
            begin_timestamp=min(row.begin_timestamp, piece.begin_ms),
            end_timestamp=piece.end_ms if is_new else max(row.end_timestamp, piece.end_ms),
        )
        self._set([*self.segments[:-1], changed])
        return None

    def cut(self, end: int) -> Failure | None:
        """Discard all bytes from ``end`` on, which must not be before the first segment."""
        while len(self.segments) > 1 and self.segments[-1].base_offset >= end:
            row = self.segments[-1]
            failure = self._driver.delete([self.address.segment_path(row.base_offset)])
            if failure is not None:
                return failure
            self._set(self.segments[:-1])
        row = self.segments[-1]
        size = end - row.base_offset
        assert 0 <= size <= row.size
        cut = msgspec.structs.replace(row, size=size, status=0, seal_timestamp=0)
        # Before the file is cut, which may happen although a failure is returned: ``settle`` cuts
        # to the row.
        self._set([*self.segments[:-1], cut])
        return self._cut_last(cut)

    def _cut_last(self, row: SegmentRow) -> Failure | None:
        failure = self._driver.cut(self.address.segment_path(row.base_offset), row.size)
        is_not_made = failure is not None and failure.kind is FailureKind.MISSING and not row.size
        self._is_end_unknown = failure is not None and not is_not_made
        return failure if self._is_end_unknown else None

    # -- the start ---------------------------------------------------------------------------------

    def drop_before(self, count: int) -> list[str]:
        """Drop the first segments; returns their paths, to delete once the metadata is saved."""
        dropped = self.segments[:count]
        self._set(self.segments[count:])
        return [self.address.segment_path(row.base_offset) for row in dropped]

    def secure(self, saved: Sequence[SegmentRow]) -> Failure | None:
        """Bring what a killed process wrote to disk. saved: the rows before the start.

        It is written once more: after a sync that failed there, a sync alone does nothing. That was
        of an append, and the last one.
        """
        known = {row.base_offset: row.size for row in saved}
        for row in self.segments:
            if row.size and row.size != known.get(row.base_offset):
                start = min(known.get(row.base_offset, 0), row.size)
                start = max(start, row.size - REWRITTEN_BYTES_MAX)
                failure = self._driver.rewrite(self.address.segment_path(row.base_offset), start)
                if failure is not None:
                    return failure
        return None

    def adopt(self, rows: Sequence[SegmentRow]) -> None:
        """Take over the segments that a start has found in the store."""
        if tuple(rows) != self.segments:
            self._set(rows)

    def _set(self, rows: Sequence[SegmentRow]) -> None:
        self.segments = tuple(rows)
        self._metadata.set_segments(self.address.queue, self.address.kind, rows)
