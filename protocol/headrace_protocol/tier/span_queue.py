"""A queue of which only spans are known: as a manifest, a listing or a broker states them."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import numpy as np

from headrace_protocol.columns import UNIT_DTYPE
from headrace_protocol.tier.driver import Extent, Failure, FailureKind, read_extents
from headrace_protocol.tier.rows import UNIT_BYTES
from headrace_protocol.tier.stored_queue import StoredQueue, UnitRange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_protocol.tier.driver import Buffer, Range, Readable
    from headrace_protocol.tier_bodies import LogSpan, UnitSpan


class SpanQueue(StoredQueue):
    """Reads one queue without its broker."""

    def __init__(
        self, driver: Readable, path: str, units: Sequence[UnitSpan], log: Sequence[LogSpan]
    ) -> None:
        """units, log: in order, without overlaps."""
        self.path = path
        self._driver = driver
        self._units = units
        self._log = log

    @property
    def min_offset(self) -> int:
        """As ``StoredQueue.min_offset``."""
        return self._units[0].first if self._units else 0

    @property
    def commit_offset(self) -> int:
        """As ``StoredQueue.commit_offset``."""
        return self._units[-1].end if self._units else 0

    @property
    def _log_limit(self) -> int:
        return self._log[-1].end if self._log else 0

    def units(self, queue_offset: int, count_max: int) -> UnitRange | Failure:
        """As ``StoredQueue.units``; fewer at the end of a span."""
        number = bisect_right(self._units, queue_offset, key=lambda span: span.first) - 1
        if number < 0 or self._units[number].end <= queue_offset:
            number += 1
        if number == len(self._units):
            return UnitRange(self.commit_offset, np.empty(0, UNIT_DTYPE))
        span = self._units[number]
        first = max(queue_offset, span.first)
        start = span.position + (first - span.first) * UNIT_BYTES
        wanted = start, start + min(span.end - first, count_max) * UNIT_BYTES
        read = self._driver.read(span.path, [wanted])
        if isinstance(read, Failure):
            return read
        return UnitRange(first, np.frombuffer(read[0], UNIT_DTYPE))

    def _read_log(self, ranges: Sequence[Range]) -> list[Buffer] | Failure:
        return read_extents(ranges, self._extent, self._driver.read)

    def _extent(self, at: int) -> Extent[str] | Failure:
        number = bisect_right(self._log, at, key=lambda span: span.base) - 1
        span = self._log[number] if number >= 0 else None
        if span is None or at >= span.end:
            return Failure(FailureKind.MISSING, self.path, f"has no byte {at} in its log")
        return Extent(span.path, span.base, span.end, span.position)

    def _first_at_or_after(self, limit_ms: int) -> int | Failure:
        for span in self._units:
            if span.end_ms < limit_ms:
                continue
            if span.begin_ms >= limit_ms:
                return span.first
            found = self._first_in(span.first, span.end, limit_ms)
            if isinstance(found, Failure) or found < span.end:
                return found
        return self.commit_offset
