"""Reads messages from a tier, as columns; all work per message is done in C.

Units are read first, a window at a time: they say which messages have a wanted tag, and where. The
records of some slices are in flight while one is decoded.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from headrace.spark.tier.locations import expect
from headrace_protocol.choose import choose
from headrace_protocol.tier.stored_queue import read_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace_protocol.columns import Array, RecordColumns
    from headrace_protocol.tier.span_queue import SpanQueue

_WINDOW_UNITS: Final = 65_536
_IN_FLIGHT: Final = 3


class _Job(NamedTuple):
    """Records to read: their units and queue offsets, and the next queue offset after them."""

    next_offset: int
    units: Array
    offsets: Array


def slices(
    queue: SpanQueue, start: int, end: int, tags: frozenset[int] | None, slice_bytes: int
) -> Iterator[tuple[int, RecordColumns | None]]:
    """The records of a range that have one of some hashes of tags, about ``slice_bytes`` each.

    Each comes with the next queue offset to read; the last one is that of the first message that no
    span has, or ``end``. At most three slices are in flight. Raises TierGone, TierUnreachable.
    """
    pending: deque[tuple[int, Any]] = deque()
    pool = ThreadPoolExecutor(_IN_FLIGHT)

    def done() -> tuple[int, RecordColumns | None]:
        next_offset, future = pending.popleft()
        records = expect(future.result())
        return next_offset, records if len(records) else None

    try:
        for job in _jobs(queue, start, end, tags, slice_bytes):
            pending.append((job.next_offset, pool.submit(queue.records, job.units, job.offsets)))
            if len(pending) >= _IN_FLIGHT:
                yield done()
        while pending:
            yield done()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _jobs(
    queue: SpanQueue, start: int, end: int, tags: frozenset[int] | None, slice_bytes: int
) -> Iterator[_Job]:
    while start < end:
        first, units = expect(queue.units(start, min(end - start, _WINDOW_UNITS)))
        if first > start or not len(units):
            return
        while len(units):
            where, _, seen = choose(units, tags, len(units), slice_bytes, bytes_of=read_bytes)
            offsets = np.arange(start, start + seen)[where]
            yield _Job(start + seen, units[where], offsets)
            start, units = start + seen, units[seen:]
