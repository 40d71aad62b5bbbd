"""Reads messages from a tier, as columns; all work per message is done in C.

Units are read first, a window at a time: they say which messages have a wanted tag, and where. The
records of some slices are in flight while one is decoded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from headrace.spark.errors import TierGone
from headrace_protocol.columns import UNIT_DTYPE, RecordColumns
from headrace_protocol.message import BORN_HOST_V6, CorruptRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.spark.tier.places import Range, Store
    from headrace.spark.tier.spans import TierRange
    from headrace_protocol.columns import Array

UNIT_BYTES: Final = UNIT_DTYPE.itemsize
_WINDOW_UNITS: Final = 65_536
_IN_FLIGHT: Final = 3
_QUEUE_OFFSET_AT: Final = 20
_STORE_TIME_AT: Final = 56  # after an IPv4 born host
_SYS_FLAG_AT: Final = 36
_HEAD_BYTES: Final = 80


class _Job(NamedTuple):
    """Records to read: their units and queue offsets, and the next queue offset after them."""

    next_offset: int
    units: Array
    offsets: Array


class TierReader:
    """Reads one range of a queue; raises TierGone and TierUnreachable."""

    def __init__(self, store: Store, tier: TierRange) -> None:
        self._store = store
        self._units = tier.units
        self._log = tier.log
        self._log_bases = [span.base for span in tier.log]

    # -- slices ------------------------------------------------------------------------------------

    def slices(
        self, start: int, end: int, tags: frozenset[int] | None, slice_bytes: int
    ) -> Iterator[tuple[int, RecordColumns | None]]:
        """The records of a range that have one of some hashes of tags, about ``slice_bytes`` each.

        Each comes with the next queue offset to read; the last one is that of the first message
        that no span has, or ``end``. At most three slices are in flight.
        """
        jobs = self._jobs(start, end, tags, slice_bytes)
        pending: deque[tuple[_Job, Any]] = deque()
        pool = ThreadPoolExecutor(_IN_FLIGHT)
        try:
            for job in jobs:
                pending.append((job, pool.submit(self._records, job)))
                if len(pending) >= _IN_FLIGHT:
                    done, future = pending.popleft()
                    yield done.next_offset, future.result()
            while pending:
                done, future = pending.popleft()
                yield done.next_offset, future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _jobs(
        self, start: int, end: int, tags: frozenset[int] | None, slice_bytes: int
    ) -> Iterator[_Job]:
        for first, stop in self._windows(start, end):
            units, offsets = self.units(first, stop), np.arange(first, stop)
            if tags is not None:
                matching = np.isin(units["tags_code"], list(tags))
                units, offsets = units[matching], offsets[matching]
            if not len(units):
                yield _Job(stop, units, offsets)
                continue
            ends = self._read_bytes(units)
            at = 0
            while at < len(units):
                before = int(ends[at - 1]) if at else 0
                upto = max(int(np.searchsorted(ends, before + slice_bytes, "right")), at + 1)
                after = int(offsets[upto]) if upto < len(units) else stop
                yield _Job(after, units[at:upto], offsets[at:upto])
                at = upto

    def _windows(self, start: int, end: int) -> Iterator[Range]:
        at = start
        for span in self._units:
            if span.end <= at or at >= end:
                continue
            if span.first > at:
                return
            stop = min(span.end, end)
            while at < stop:
                upto = min(at + _WINDOW_UNITS, stop)
                yield at, upto
                at = upto

    def _read_bytes(self, units: Array) -> Array:
        """Bytes to be read for the first, the first two ... records, with gaps between them."""
        starts, sizes = units["physical_offset"].astype(np.int64), units["size"].astype(np.int64)
        gaps = np.append(0, starts[1:] - starts[:-1] - sizes[:-1])
        ends: Array = np.cumsum(sizes + np.where(gaps <= self._store.gap_bytes, gaps, 0))
        return ends

    # -- bytes -------------------------------------------------------------------------------------

    def units(self, start: int, end: int) -> Array:
        """The units of a range, which is in one span."""
        span = next(span for span in self._units if span.first <= start < span.end)
        position = span.position + (start - span.first) * UNIT_BYTES
        wanted = position, position + (end - start) * UNIT_BYTES
        return np.frombuffer(self._store.read(span.path, [wanted])[0], UNIT_DTYPE)

    def _records(self, job: _Job) -> RecordColumns | None:
        """The records of a job, each checked against its unit."""
        if not len(job.units):
            return None
        starts = job.units["physical_offset"].astype(np.int64)
        sizes = job.units["size"].astype(np.int64)
        ends = starts + sizes
        gaps = starts[1:] - ends[:-1]
        if (sizes <= 0).any() or (gaps < 0).any() or starts[0] < 0:
            raise TierGone(f"offset {job.offsets[0]}", "its units are not in order")
        first = np.append(True, gaps > self._store.gap_bytes)
        last = np.append(first[1:], True)
        spans = list(zip(starts[first].tolist(), ends[last].tolist(), strict=True))
        parts = self.log(spans)
        lengths = np.array([len(part) for part in parts])
        moved = np.cumsum(lengths) - lengths - np.array([start for start, _ in spans])
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        try:
            records = RecordColumns(data, starts + moved[np.cumsum(first) - 1], sizes)
            records.require(records.physical_offset == starts, "it states another place")
            records.require(records.queue_offset == job.offsets, "it states another queue offset")
        except CorruptRecord as error:
            raise TierGone(f"offset {job.offsets[0]}", str(error)) from error
        return records

    def log(self, ranges: list[Range]) -> list[bytes | memoryview]:
        """Ranges of the queue's log, over any number of spans."""
        asked: dict[str, list[Range]] = {}
        owners: list[list[tuple[str, int]]] = []
        for start, end in ranges:
            owner: list[tuple[str, int]] = []
            at = start
            while at < end:
                number = bisect_right(self._log_bases, at) - 1
                span = self._log[number] if number >= 0 else None
                if span is None or at >= span.end:
                    raise TierGone(f"byte {at} of the log", "is in no span")
                upto = min(end, span.end)
                wanted = asked.setdefault(span.path, [])
                owner.append((span.path, len(wanted)))
                wanted.append((at - span.base + span.position, upto - span.base + span.position))
                at = upto
            owners.append(owner)
        found = {path: self._store.read(path, wanted) for path, wanted in asked.items()}
        parts = [[found[path][number] for path, number in owner] for owner in owners]
        return [part[0] if len(part) == 1 else b"".join(part) for part in parts]

    # -- single messages ---------------------------------------------------------------------------

    def store_time(self, queue_offset: int) -> int:
        """Store time of a message, in ms since 1970."""
        place = int(self.units(queue_offset, queue_offset + 1)["physical_offset"][0])
        (head,) = self.log([(place, place + _HEAD_BYTES)])
        is_v6 = int.from_bytes(head[_SYS_FLAG_AT : _SYS_FLAG_AT + 4], "big") & BORN_HOST_V6
        at = _STORE_TIME_AT + (12 if is_v6 else 0)
        return int.from_bytes(head[at : at + 8], "big")

    def first_kept(self) -> int:
        """Queue offset of the first record in the log, which has one."""
        base = self._log[0].base
        (head,) = self.log([(base, base + _HEAD_BYTES)])
        return int.from_bytes(head[_QUEUE_OFFSET_AT : _QUEUE_OFFSET_AT + 8], "big")
