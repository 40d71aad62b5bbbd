"""Reads of a queue through a SQL92 filter, whatever the queue is read from.

The records of a queue are read in blocks, as for a bulk pull, and judged by columns; bodies are not
touched. Those that pass are cut out. A batch that is one record becomes a record for each message,
since readers don't evaluate the filter; one that can't be unwrapped is left to the reader. A read
looks at records for about two milliseconds, and then returns what it has found. If that is nothing,
it is repeated when others had their turn, until it has looked at ``max_filter_message_size`` units;
so a filter that lets nothing through slows nobody.
"""

from __future__ import annotations

from functools import partial
from time import thread_time
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace_broker.store.store_source import PIECE_BYTES_MIN, GetResult, GetStatus, StoreSource
from headrace_protocol.choose import adjoining, choose
from headrace_protocol.columns import QUEUE_OFFSET_DTYPE, UNIT_DTYPE, RecordColumns
from headrace_protocol.errors import NotReady
from headrace_protocol.inner_batch import unwrap
from headrace_protocol.message import INNER_BATCH
from headrace_protocol.waiting import Unfinished, ready, take_break

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.consumer.filters import Filter, FilterPolicy
    from headrace_broker.queue_directory import Reader
    from headrace_protocol.columns import Array
    from headrace_protocol.filters.expression import Expression
    from headrace_protocol.message import Buffer

READ_S: Final = 0.002
# A block of 2048 records costs a quarter more for each.
_BLOCK_RECORDS_MAX: Final = 4096
_BLOCK_BYTES: Final = 8 * 1024 * 1024
# Most runs of records that pass that are kept for the next reads of a reader: 8 KiB.
_RUNS_MAX: Final = 512
# Most ranges of records that are read one by one; more are cut out of a block.
_RANGES_MAX: Final = 6
# Most reads of a reader that are repeated at a time; others return without a record.
_UNFINISHED_MAX: Final = 64
# Fixed cost of a block, and first estimates of the cost of a record and of a condition.
_BLOCK_S: Final = 0.0003
_RECORD_S: Final = 0.3e-6
_OPERAND_S: Final = 0.2e-6


class _Parts(NamedTuple):
    """The records of a bulk read, one per message: units and queue offsets are parallel to them.

    has_batches: whether some of them are of batches.
    """

    records: RecordColumns
    units: Array
    offsets: Array
    has_batches: bool


class _Block(NamedTuple):
    """Records that pass. data: of the records in ``start``; the others are parallel to it."""

    data: Buffer
    start: Array
    units: Array
    offsets: Array


class _Judged(NamedTuple):
    """The offsets that pass among those from ``first`` to before ``end``, as runs.

    starts, ends: of the runs, in ascending order.
    """

    first: int
    end: int
    starts: Array
    ends: Array

    @classmethod
    def ahead(cls, offsets: Array, end: int, is_wanted: Array) -> _Judged:
        """What is kept of a block. end: the queue offset behind it."""
        passing = offsets[is_wanted]
        is_cut = np.diff(passing) != 1
        is_any = len(passing) > 0
        starts = passing[np.append(is_any, is_cut)[: len(passing)]]
        ends = passing[np.append(is_cut, is_any)[: len(passing)]] + 1
        if len(starts) > _RUNS_MAX:
            end = int(starts[_RUNS_MAX])
        return cls(int(offsets[0]), end, starts[:_RUNS_MAX], ends[:_RUNS_MAX])

    def mask(self, offsets: Array) -> Array | None:
        """A mask of the records that pass; None unless all have been judged."""
        if not self.first <= offsets[0] or not offsets[-1] < self.end:
            return None
        # Offsets in a run are behind one more start than ends.
        is_wanted: Array = np.searchsorted(self.starts, offsets, "right") > np.searchsorted(
            self.ends, offsets, "right"
        )
        return is_wanted

    def ranges(self, queue_offset: int, count: int) -> list[tuple[int, int]]:
        """The next ``count`` offsets that pass: first ones and sizes of ranges.

        Empty unless all of them are known, and in so few ranges that each is read by itself.
        """
        found: list[tuple[int, int]] = []
        if not self.first <= queue_offset < self.end:
            return found
        run = int(np.searchsorted(self.ends, queue_offset, "right"))
        runs = slice(run, run + _RANGES_MAX)
        for start, end in zip(self.starts[runs].tolist(), self.ends[runs].tolist(), strict=True):
            first = max(start, queue_offset)
            found.append((first, min(end - first, count)))
            count -= end - first
            if count <= 0:
                return found
        return []

    def next_passing(self, queue_offset: int) -> int:
        """The first offset from an offset on that passes, or of which nothing is known."""
        if not self.first <= queue_offset < self.end:
            return queue_offset
        run = int(np.searchsorted(self.ends, queue_offset, "right"))
        return max(queue_offset, int(self.starts[run])) if run < len(self.starts) else self.end

    def likely(self, queue_offset: int, missing: int) -> int | None:
        """Records from one that passes on, among which ``missing`` pass, or as many as are known.

        None if nothing is known of the first.
        """
        if not self.first <= queue_offset < self.end:
            return None
        run = int(np.searchsorted(self.ends, queue_offset, "right"))
        ends = self.ends[run:]
        passed = np.cumsum(ends - np.maximum(self.starts[run:], queue_offset))
        last = int(np.searchsorted(passed, missing))
        end = int(ends[last] - passed[last]) + missing if last < len(ends) else int(ends[-1])
        return end - queue_offset


_NOTHING: Final = _Judged(0, 0, *np.empty((2, 0), np.int64))


class _Found:
    """The records that a read has found so far."""

    def __init__(self) -> None:
        self.count = self.byte_count = 0
        self._blocks: list[_Block] = []

    def add(self, block: _Block) -> None:
        self.count += len(block.units)
        self.byte_count += int(block.units["size"].sum(dtype=np.int64))
        self._blocks.append(block)

    def records(self) -> list[Buffer]:
        """The bytes of the records, as views."""
        pieces: list[Buffer] = []
        for block in self._blocks:
            data = memoryview(block.data)
            ranges = adjoining(block.start, block.units["size"].astype(np.int64))
            pieces += [data[start:end] for start, end in ranges]
        return pieces

    def bulk(self) -> list[Buffer]:
        """Units, queue offsets, and the records; see ``GetResult``."""
        units = b"".join([block.units.tobytes() for block in self._blocks])
        offsets = np.concatenate([block.offsets for block in self._blocks])
        records = self.records()
        if self.byte_count < len(records) * PIECE_BYTES_MIN:
            records = [b"".join(records)]
        return [units, offsets.astype(QUEUE_OFFSET_DTYPE).tobytes(), *records]


class FilteredReader:
    """A ``Reader`` of the records that pass a filter."""

    __slots__ = (
        "_expression",
        "_judged",
        "_now_s",
        "_policy",
        "_reader",
        "_record_s",
        "_unfinished",
    )

    def __init__(
        self,
        reader: Reader,
        expression: Expression,
        policy: FilterPolicy,
        now_s: Callable[[], float] = thread_time,
    ) -> None:
        self._reader = reader.in_place() if isinstance(reader, StoreSource) else reader
        self._expression = expression
        self._policy = policy
        self._now_s = now_s
        # Measured by the last reads.
        self._record_s = _RECORD_S + _OPERAND_S * expression.operand_count
        self._judged = _NOTHING
        # How far reads from an offset on have come that are to be repeated: nothing passed so far.
        self._unfinished: dict[int, int] = {}

    def known_range(self) -> tuple[int, int]:
        """See ``Reader``."""
        return self._reader.known_range()

    def get(
        self,
        queue_offset: int,
        count_max: int,
        bytes_max: int,
        _tags: frozenset[int] | None = None,
    ) -> GetResult:
        """See ``Reader``."""
        count_max = max(count_max, 1)
        if ranges := self._judged.ranges(queue_offset, count_max):
            return self._get_ranges(ranges, bytes_max)
        result, found = self._read(queue_offset, count_max, bytes_max)
        return result if not found.count else result._replace(buffers=found.records())

    def _get_ranges(self, ranges: list[tuple[int, int]], bytes_max: int) -> GetResult:
        """Records that pass, as many as fit. Raises NotReady before the first."""
        first, count = ranges[0]
        found = self._reader.get(first, count, bytes_max, None)
        end = first + count
        for first, count in ranges[1:]:
            room_bytes = bytes_max - found.body_bytes
            if found.next_offset != end or room_bytes <= 0:
                break
            try:
                more = self._reader.get(first, count, room_bytes, None)
            except NotReady:
                break
            if more.status is not GetStatus.FOUND or more.body_bytes > room_bytes:
                break
            found = more._replace(
                buffers=[*found.buffers, *more.buffers],
                count=found.count + more.count,
                body_bytes=found.body_bytes + more.body_bytes,
            )
            end = first + count
        return found

    def get_bulk(
        self,
        queue_offset: int,
        count_max: int,
        bytes_max: int,
        _tags: frozenset[int] | None = None,
    ) -> GetResult:
        """See ``Reader``."""
        result, found = self._read(queue_offset, count_max, bytes_max)
        if not found.count:
            return result
        return result._replace(buffers=found.bulk(), has_queue_offsets=True)

    def _read(self, first: int, count_max: int, bytes_max: int) -> tuple[GetResult, _Found]:
        """The result without its buffers, and what passes. Raises NotReady before the first."""
        found, queue_offset = _Found(), self._unfinished.pop(first, first)
        deadline_s, end = self._now_s() + READ_S, first + self._policy.max_filter_message_size
        while True:
            queue_offset = self._judged.next_passing(queue_offset)
            count = self._block_count(queue_offset, count_max - found.count)
            try:
                result = self._reader.get_bulk(
                    queue_offset, max(min(count, end - queue_offset), 1), _BLOCK_BYTES, None
                )
            except NotReady:
                if queue_offset == first:
                    raise
                break  # what comes next is fetched for the next read
            if result.status is GetStatus.FOUND:
                parts = _parts(result, queue_offset)
                queue_offset, is_full = self._take(
                    parts, result.next_offset, found, count_max, bytes_max
                )
            elif result.status is GetStatus.MESSAGE_WAS_REMOVING:
                queue_offset, is_full = result.next_offset, False
            elif queue_offset == first:
                return result, found
            else:
                break
            if is_full or queue_offset >= min(end, result.max_offset):
                break
            if self._now_s() >= deadline_s:
                if not found.count and len(self._unfinished) < _UNFINISHED_MAX:
                    self._unfinished[first] = queue_offset
                    raise Unfinished
                break
        status = GetStatus.FOUND if found.count else GetStatus.NO_MATCHED_MESSAGE
        return (
            GetResult(
                status,
                [],
                found.count,
                found.byte_count,
                queue_offset,
                *self._reader.known_range(),
            ),
            found,
        )

    def _block_count(self, queue_offset: int, missing: int) -> int:
        """The number of records to look at next, among which so many are missing."""
        if (known := self._judged.likely(queue_offset, missing)) is not None:
            return known
        in_time = int(READ_S / 2 / self._record_s) + 1
        return min(in_time, _BLOCK_RECORDS_MAX)

    def _take(
        self, parts: _Parts, end: int, found: _Found, count_max: int, bytes_max: int
    ) -> tuple[int, bool]:
        """Add the records of a block that pass and fit. end: the queue offset behind the block.

        Returns the queue offset behind those, and whether no more fit.
        """
        records, units, offsets, has_batches = parts
        is_wanted = self._judged.mask(offsets)
        if is_wanted is None:
            is_wanted = self._judge(records)
            if has_batches:
                is_wanted |= records.sys_flag & INNER_BATCH != 0
            else:
                self._judged = _Judged.ahead(offsets, end, is_wanted)
        room, room_bytes = count_max - found.count, bytes_max - found.byte_count
        where, _, seen = choose(units, None, room, room_bytes, is_there=is_wanted)
        chosen = units[where]
        is_full = seen < len(units)
        if found.count and len(chosen) and int(chosen["size"][0]) > room_bytes:
            return int(offsets[np.argmax(is_wanted)]), True
        if len(chosen):
            found.add(_Block(records.data, records.start[where], chosen, offsets[where]))
        next_offset = int(offsets[seen]) if is_full else end
        return next_offset, is_full or found.count >= count_max

    def _judge(self, records: RecordColumns) -> Array:
        before_s = self._now_s()
        is_wanted = self._expression.mask(records)
        took_s = max(self._now_s() - before_s - _BLOCK_S, 0) / len(records)
        self._record_s = max((self._record_s + took_s) / 2, 1e-7)
        return is_wanted


async def passing_offsets(
    reader: Reader, wanted: Filter, policy: FilterPolicy, first: int, end: int
) -> set[int]:
    """The offsets of a range of a queue whose messages pass, as a pull decides it."""
    if wanted.expression is not None:
        reader = FilteredReader(reader, wanted.expression, policy)
    passing: set[int] = set()
    while first < end:
        read = partial(reader.get_bulk, first, end - first, _BLOCK_BYTES, wanted.tags)
        result = await ready(read)
        if result.status is GetStatus.FOUND:
            passing.update(_parts(result, first).offsets.tolist())
        if result.next_offset <= first:
            break
        first = result.next_offset
        await take_break()
    return passing


def _parts(result: GetResult, first: int) -> _Parts:
    """The records of a bulk read from ``first`` on."""
    units = np.frombuffer(result.buffers[0], UNIT_DTYPE)
    sizes = units["size"].astype(np.int64)
    at = 2 if result.has_queue_offsets else 1
    if result.has_queue_offsets:
        offsets = np.frombuffer(result.buffers[1], QUEUE_OFFSET_DTYPE).astype(np.int64)
    else:
        offsets = np.arange(result.next_offset - len(units), result.next_offset)
    records = result.buffers[at:]
    data = records[0] if len(records) == 1 else b"".join(records)
    if result.layout == "log":
        start = units["physical_offset"].astype(np.int64) - result.first_physical_offset
    else:
        start = np.cumsum(sizes) - sizes
    columns = RecordColumns(data, start, sizes, is_passed_on=True)
    # Only the offsets of batches, and of compacted topics, have gaps.
    if not result.has_queue_offsets or not (columns.sys_flag & INNER_BATCH).any():
        return _Parts(columns, units, offsets, has_batches=False)
    columns.queue_offset = offsets
    columns = unwrap(columns, first, keeps_damaged=True)
    units = np.zeros(len(columns), UNIT_DTYPE)
    units["physical_offset"], units["size"] = columns.physical_offset, columns.size
    return _Parts(columns, units, columns.queue_offset, has_batches=True)
