"""Reads of one queue: by queue offset and by store time."""

from __future__ import annotations

import enum
from bisect import bisect_left
from copy import copy
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np

from headrace_broker.store.queues.consume_queue import BLANK_SIZE, UNIT, UNIT_BYTES
from headrace_protocol.choose import ONE_FILE, adjoining, choose, likely_count
from headrace_protocol.columns import QUEUE_OFFSET_DTYPE, UNIT_DTYPE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from headrace_broker.store.log.commit_log import CommitLog
    from headrace_broker.store.queues.consume_queue import ConsumeQueue
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_protocol.columns import Array
    from headrace_protocol.message import Buffer

# Most bytes of units that one pull scans, so that a rare tag does not stall the loop.
SCAN_BYTES: Final = 16_000
# Most units that one bulk read scans, at ten million a second or more.
BULK_SCAN_UNITS: Final = 65_536
# Share of a range of the log that the wanted records must fill for the whole range to be sent.
LOG_FILL_MIN: Final = 0.75
# The same for a reader in this process, to which other records in between cost nothing. They lie in
# the chunks that are read from disk anyway.
_IN_PLACE_FILL_MIN: Final = 1 / 8
# Smaller pieces cost more to send one by one than to copy.
PIECE_BYTES_MIN: Final = 4096
# A queue's bytes are summed up to SAMPLES * SAMPLE_UNITS units, and estimated from so many beyond.
SAMPLES: Final = 16
SAMPLE_UNITS: Final = 256
Boundary = Literal["LOWER", "UPPER"]
Layout = Literal["log", "gathered"]


class GetStatus(enum.Enum):
    """The outcome of a read; its name goes over the wire. Only the broker sets OFFSET_RESET."""

    FOUND = enum.auto()
    NO_MATCHED_MESSAGE = enum.auto()
    MESSAGE_WAS_REMOVING = enum.auto()
    NO_MESSAGE_IN_QUEUE = enum.auto()
    OFFSET_TOO_SMALL = enum.auto()
    OFFSET_OVERFLOW_ONE = enum.auto()
    OFFSET_OVERFLOW_BADLY = enum.auto()
    OFFSET_RESET = enum.auto()


class GetResult(NamedTuple):
    """The result of a read.

    buffers: views of the log, whole records back to back. ``get_bulk`` puts the records' units
    before them, and their queue offsets if these have gaps.
    body_bytes: total size of the records.
    layout, first_physical_offset, has_queue_offsets: as in BulkPullResponseHeader.
    offset_delta: what the reader adds to the queue offsets in records and in ``buffers``.
    """

    status: GetStatus
    buffers: Sequence[Buffer]
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs
    body_bytes: int
    next_offset: int
    min_offset: int
    max_offset: int
    layout: Layout = "gathered"
    first_physical_offset: int = 0
    has_queue_offsets: bool = False
    offset_delta: int = 0


class StoreSource:
    """Reads a queue through its ConsumeQueue and the log. Each read may raise NotReady."""

    __slots__ = ("_commit_log", "_fill_min", "_queue")

    def __init__(self, queue: StoreQueue, commit_log: CommitLog) -> None:
        self._queue = queue.consume_queue
        self._commit_log = commit_log
        self._fill_min = LOG_FILL_MIN

    def in_place(self) -> StoreSource:
        """The source for a reader that looks at the records of bulk reads, and sends few of them.

        It rarely copies: a range of the log is returned even if most of it is of other queues.
        """
        source = copy(self)
        source._fill_min = _IN_PLACE_FILL_MIN
        return source

    # --- by queue offset -------------------------------------------------------------------

    def get(
        self,
        queue_offset: int,
        count_max: int,
        bytes_max: int,
        tags: frozenset[int] | None,
    ) -> GetResult:
        """Records from ``queue_offset`` on, at least one if any matches.

        count_max, bytes_max: limits; the first record is returned whatever its size.
        tags: wanted tags codes, or None for all.

        The next read starts at ``next_offset``. Adjacent records in the log share one buffer.
        Raises NotReady for old units or records that must first be read from disk.
        """
        consume_queue = self._queue
        log_min_offset = self._commit_log.files.min_offset
        min_offset = consume_queue.min_offset(log_min_offset, self._units)
        max_offset = consume_queue.max_offset
        if not min_offset <= queue_offset < max_offset:
            return outside(queue_offset, min_offset, max_offset)
        scan_count = max(SCAN_BYTES // UNIT_BYTES, count_max)
        units = self._units(consume_queue, queue_offset, scan_count)
        runs, count, body_bytes, seen = choose_runs(
            UNIT.iter_unpack(units),
            count_max,
            bytes_max,
            tags,
            log_min_offset,
            self._commit_log.file_bytes,
        )
        next_offset = queue_offset + seen
        if not count:
            return empty(nothing_found(tags), next_offset, min_offset, max_offset)
        buffers = self._commit_log.slices(runs)
        return GetResult(
            GetStatus.FOUND, buffers, count, body_bytes, next_offset, min_offset, max_offset
        )

    def get_bulk(
        self,
        queue_offset: int,
        count_max: int,
        bytes_max: int,
        tags: frozenset[int] | None,
    ) -> GetResult:
        """As ``get``, for many records: their units, and the parts of the log that hold them.

        Neither is copied, unless the records are scattered in pieces too small to send singly.
        """
        consume_queue = self._queue
        log_min_offset = self._commit_log.files.min_offset
        min_offset = consume_queue.min_offset(log_min_offset, self._units)
        max_offset = consume_queue.max_offset
        if not min_offset <= queue_offset < max_offset:
            return outside(queue_offset, min_offset, max_offset)
        scan_count = count_max if tags is None else BULK_SCAN_UNITS
        units = np.frombuffer(self._units(consume_queue, queue_offset, scan_count), UNIT_DTYPE)
        if tags is None:
            units = units[: likely_count(int(units["size"][0]), count_max, bytes_max)]
        is_there = (units["size"] != BLANK_SIZE) & (units["physical_offset"] >= log_min_offset)
        where, first, seen = choose(units, tags, count_max, bytes_max, is_there=is_there)
        next_offset, units = queue_offset + seen, units[where]
        if not len(units):
            return empty(nothing_found(tags), next_offset, min_offset, max_offset)
        buffers: list[Buffer] = [units.view(np.uint8).data]
        has_gaps = seen - first != len(units)
        if has_gaps:
            offsets = np.arange(queue_offset, next_offset)[where]
            buffers.append(offsets.astype(QUEUE_OFFSET_DTYPE).tobytes())
        log = self._commit_log
        layout, records = bulk_records(units, log.slices, log.file_bytes, self._fill_min)
        return GetResult(
            GetStatus.FOUND,
            buffers + records,
            len(units),
            int(units["size"].sum(dtype=np.int64)),
            next_offset,
            min_offset,
            max_offset,
            layout,
            int(units["physical_offset"][0]),
            has_gaps,
        )

    def _units(self, queue: ConsumeQueue, number: int, count: int) -> memoryview:
        """As ``ConsumeQueue.units_view``. Raises NotReady as ``CommitLog.slices``."""
        unit_bytes = queue.unit_bytes
        if (file := queue.files.find(number * unit_bytes)) is not None:
            start = number * unit_bytes - file.start_offset
            end = min(start + count * unit_bytes, file.file_bytes)
            if number < max(queue.end_number - self._commit_log.hot_units, queue.started_at):
                queue.view_of(file)  # within the map budget, before the check maps it
                self._commit_log.page_cache.check(file, start, end)
            file.check_soon(start, end)
        return queue.units_view(number, count)

    def min_offset(self) -> int:
        """The oldest queue offset whose record is still in the log. Raises NotReady."""
        return self._queue.min_offset(self._commit_log.min_offset, self._units)

    def max_offset(self) -> int:
        """One past the newest queue offset that can be read."""
        return self._queue.max_offset

    def known_range(self) -> tuple[int, int]:
        """``min_offset`` as of the last read, and ``max_offset``; never waits for the disk."""
        return self._queue.min_offset_seen, self._queue.max_offset

    def unit(self, queue_offset: int) -> tuple[int, int, int]:
        """Physical offset, size and tags code of a unit that exists. Raises NotReady."""
        number = self._queue.number_of(queue_offset, self._units)
        physical_offset, size, tags_code = UNIT.unpack_from(self._units(self._queue, number, 1))
        return physical_offset, size, tags_code

    def missing_from(self, _queue_offset: int) -> int:
        """0: offsets have no gaps."""
        return 0

    def record_bytes(self, first: int = 0) -> int:
        """Bytes of the records that can be read: their sum, or an estimate for a long queue.

        The estimate is from samples of the units at equal distances. first: only those from this
        queue offset on. Raises NotReady.
        """
        queue = self._queue
        number = queue.number_of(max(self.min_offset(), first), self._units)
        end = queue.end_number
        count = end - number
        step = count // SAMPLES if count > SAMPLES * SAMPLE_UNITS else 1
        sampled = sampled_bytes = 0
        while number < end:
            view = self._units(queue, number, min(SAMPLE_UNITS, end - number))
            sizes = np.frombuffer(view, queue.unit_dtype)["size"]
            number += max(len(sizes), step)
            sampled += len(sizes)
            sampled_bytes += int(sizes[sizes != BLANK_SIZE].sum(dtype=np.int64))
        return sampled_bytes * count // sampled if sampled else 0

    def has_unit(self, queue_offset: int) -> bool:
        """True if the queue has this unit, even if the record is gone. Raises NotReady."""
        queue = self._queue
        first_offset = queue.offset_of(queue.first_number, self._units)
        return first_offset <= queue_offset < queue.max_offset

    # --- by time ---------------------------------------------------------------------------

    def offset_by_time(self, timestamp_ms: int, boundary: Boundary = "LOWER") -> int:
        """The queue offset for a store time.

        LOWER: first record stored at or after the time; max_offset if all are older.
        UPPER: last record stored at or before the time; 0 if all are newer.
        Raises NotReady.
        """
        min_offset = self.min_offset()
        limit_ms = timestamp_ms if boundary == "LOWER" else timestamp_ms + 1

        def is_found(queue_offset: int) -> bool:
            store_ms = self.store_time_at(queue_offset)
            # A unit without a record is older than every record.
            return store_ms is not None and store_ms >= limit_ms

        offsets = range(min_offset, self._queue.max_offset)
        low = min_offset + bisect_left(offsets, True, key=is_found)
        if boundary == "LOWER":
            return low
        return low - 1 if low > min_offset else 0

    def store_time_at(self, queue_offset: int) -> int | None:
        """Store time of the record at a queue offset; None if it is gone. Raises NotReady."""
        if not self.has_unit(queue_offset):
            return None
        return self._commit_log.store_timestamp_at(self.unit(queue_offset)[0])


class EmptySource:
    """The source of a queue that was never written."""

    def get(
        self, queue_offset: int, _count_max: int, _bytes_max: int, _tags: frozenset[int] | None
    ) -> GetResult:
        """An empty result."""
        return outside(queue_offset, 0, 0)

    get_bulk = get

    def min_offset(self) -> int:
        """0."""
        return 0

    max_offset = min_offset

    def known_range(self) -> tuple[int, int]:
        """An empty range."""
        return 0, 0

    def missing_from(self, _queue_offset: int) -> int:
        """0."""
        return 0

    def record_bytes(self) -> int:
        """0."""
        return 0

    def unit(self, queue_offset: int) -> tuple[int, int, int]:
        """Raises LookupError: no unit exists."""
        raise LookupError(queue_offset)

    def offset_by_time(self, _timestamp_ms: int, _boundary: Boundary = "LOWER") -> int:
        """0."""
        return 0

    def store_time_at(self, _queue_offset: int) -> int | None:
        """None."""
        return None


def nothing_found(tags: frozenset[int] | None) -> GetStatus:
    """The status of a read that found none of its units wanted."""
    return GetStatus.MESSAGE_WAS_REMOVING if tags is None else GetStatus.NO_MATCHED_MESSAGE


def empty(status: GetStatus, next_offset: int, min_offset: int, max_offset: int) -> GetResult:
    """A result without records."""
    return GetResult(status, [], 0, 0, next_offset, min_offset, max_offset)


def outside(queue_offset: int, min_offset: int, max_offset: int) -> GetResult:
    """The result for an offset without a unit."""
    if max_offset == 0 or (min_offset == max_offset and queue_offset < max_offset):
        status, next_offset = GetStatus.NO_MESSAGE_IN_QUEUE, max_offset
    elif queue_offset < min_offset:
        status, next_offset = GetStatus.OFFSET_TOO_SMALL, min_offset
    elif queue_offset == max_offset:
        status, next_offset = GetStatus.OFFSET_OVERFLOW_ONE, queue_offset
    else:
        status, next_offset = GetStatus.OFFSET_OVERFLOW_BADLY, max_offset
    return empty(status, next_offset, min_offset, max_offset)


def choose_runs(
    units: Iterable[tuple[int, int, int]],
    count_max: int,
    bytes_max: int,
    tags: frozenset[int] | None,
    log_min_offset: int = 0,
    file_bytes: int = ONE_FILE,
) -> tuple[list[tuple[int, int]], int, int, int]:
    """Ranges of the log, record count, their total bytes, and the number of units scanned.

    units: physical offset, size and tags code. As ``choose``, but faster for few units.
    """
    runs = []
    count = body_bytes = seen = 0
    start = end = -1
    for physical_offset, size, tags_code in units:
        if tags is not None and tags_code not in tags:
            seen += 1
            continue
        if size == BLANK_SIZE or physical_offset < log_min_offset:
            seen += 1
            continue
        if count and body_bytes + size > bytes_max:
            break
        if physical_offset != end or not end % file_bytes:
            if count:
                runs.append((start, end))
            start = physical_offset
        end = physical_offset + size
        count += 1
        body_bytes += size
        seen += 1
        if count >= count_max:
            break
    if count:
        runs.append((start, end))
    return runs, count, body_bytes, seen


def bulk_records(
    units: Array,
    read: Callable[[list[tuple[int, int]]], Sequence[Buffer]],
    file_bytes: int = ONE_FILE,
    fill_min: float = LOG_FILL_MIN,
) -> tuple[Layout, list[Buffer]]:
    """The records of units: one range of the log if they fill most of it, else gathered.

    read: ranges of the log. fill_min: the share that they must fill.
    """
    starts, sizes = units["physical_offset"].astype(np.int64), units["size"].astype(np.int64)
    start, end = int(starts[0]), int(starts[-1] + sizes[-1])
    body_bytes = int(sizes.sum())
    is_one_file = start // file_bytes == (end - 1) // file_bytes
    if body_bytes >= (end - start) * fill_min and is_one_file:
        return "log", [*read([(start, end)])]
    pieces = read(adjoining(starts, sizes, file_bytes))
    if body_bytes < len(pieces) * PIECE_BYTES_MIN:
        return "gathered", [b"".join(pieces)]
    return "gathered", [*pieces]
