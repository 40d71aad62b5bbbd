"""Start: find where the log ends and bring ConsumeQueues and index in line with it.

``plan_recovery`` decides from facts alone; ``Recovery`` carries the plan out. The log is the
truth: what queues and index say about a range that is read again is thrown away first.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from headrace_broker.store.dispatch import NOT_QUEUED
from headrace_broker.store.log_blocks import RECORD_MAGICS, LogBlock, checked, place_of, walk
from headrace_broker.store.ring import ROW_DTYPE, Rows, select
from headrace_protocol.columns import split
from headrace_protocol.message import (
    DELAY,
    INNER_BATCH,
    MAGIC_BLANK,
    RECORD_BYTES_MIN,
    property_value,
    tags_code_of,
)
from headrace_protocol.system_topics import SCHEDULE_TOPIC

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace_broker.store.checkpoint import Checkpoint
    from headrace_broker.store.commit_log import CommitLog
    from headrace_broker.store.dispatch import Dispatcher
    from headrace_broker.store.indexer import Indexer
    from headrace_broker.store.mapped_file import MappedFile
    from headrace_broker.store.mapped_file_queue import MappedFileQueue
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_protocol.columns import Array, RecordColumns

TAGS_MARK: Final = b"TAGS\x01"
CLOCK_MARGIN_MS: Final = 3000
# Some thousands of records: larger blocks save nothing, and progress is told after each.
SCAN_BYTES: Final = 4 << 20


class LoadStage(StrEnum):
    """What a start is at, in this order."""

    QUEUES = "queues"  # counted in queues
    LOG = "log"  # counted in bytes


# Called with what was done of a stage, and the most that there can be.
OnProgress = Callable[[LoadStage, int, int], None]


# --- reading the log -----------------------------------------------------------------------


def read_block(file: MappedFile, position: int, bytes_max: int) -> LogBlock | None:
    """The whole records of a log file from ``position`` on; None if there is none.

    bytes_max: where to stop, but one record is always read.
    """
    size = _stated_size(file, position)
    if not size:
        return None
    data = file.map[position : position + min(max(size, bytes_max), file.file_bytes - position)]
    starts, end = walk(data)
    return checked(data, starts, end, file.start_offset + position)[0]


def _stated_size(file: MappedFile, position: int) -> int:
    """Of the record that seems to begin there; 0 where none can."""
    size, magic = place_of(file.map[position : position + 8])
    fits = RECORD_BYTES_MIN <= size <= file.file_bytes - position
    return size if magic in RECORD_MAGICS and fits else 0


class LogScan:
    """Iterates over the records from ``end_offset`` on and stops at the first that is none."""

    def __init__(self, files: list[MappedFile], start_offset: int) -> None:
        """files: those of the log, from the one that holds ``start_offset``."""
        self.files = files
        self.end_offset = start_offset

    def __iter__(self) -> Iterator[LogBlock]:
        for file in self.files:
            if file.start_offset > self.end_offset:
                return
            while block := read_block(file, self.end_offset - file.start_offset, SCAN_BYTES):
                self.end_offset = block.end_offset
                yield block
            if not _is_file_end(file, self.end_offset - file.start_offset):
                return
            self.end_offset = file.end_offset


def _is_file_end(file: MappedFile, position: int) -> bool:
    if position + 8 > file.file_bytes:
        return True
    size, magic = struct.unpack_from(">ii", file.map, position)
    return bool(magic == MAGIC_BLANK and size == file.file_bytes - position)


def scan_from(log: MappedFileQueue, wanted: int) -> LogScan:
    """Reads on from the record at ``wanted`` if it is whole, else from the start of its file."""
    if not log.files:
        return LogScan([], 0)
    file = log.find(wanted) or log.files[-1]
    start = file.start_offset
    if start <= wanted < file.end_offset and read_block(file, wanted - start, 0):
        start = wanted
    return LogScan(log.files[log.files.index(file) :], start)


def count_behind(files: list[MappedFile], end_offset: int) -> int:
    """Whole records after the first that is none: with some, that one is more than a cut tail.

    files: those of the log.
    """
    count = 0
    while files := _files_past(files, end_offset):
        begin_offset = _after(files[0], end_offset)
        scan = LogScan(_files_past(files, begin_offset), begin_offset)
        count += sum(len(block.columns) for block in scan)
        end_offset = scan.end_offset
    return count


def _files_past(files: list[MappedFile], offset: int) -> list[MappedFile]:
    return [file for file in files if file.end_offset > offset]


def _after(file: MappedFile, offset: int) -> int:
    """Where a damaged record says that the next one begins, else the end of the file."""
    size = _stated_size(file, offset - file.start_offset)
    return offset + size if size else file.end_offset


# --- plan ----------------------------------------------------------------------------------


class FirstRecord(NamedTuple):
    """A log file by its first record; the timestamp is None when there is no whole record."""

    start_offset: int
    store_timestamp: int | None


def first_records(files: list[MappedFile]) -> list[FirstRecord]:
    """One per log file."""
    firsts = []
    for file in files:
        block = read_block(file, 0, bytes_max=0)
        timestamp = int(block.columns.store_timestamp[0]) if block else None
        firsts.append(FirstRecord(file.start_offset, timestamp))
    return firsts


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """From where the log is read again, by physical offset.

    Units at or past ``queues_from`` are made anew, index entries from ``index_from`` on. Reading
    begins at ``scan_from``, or at the start of its file if no whole record is there.
    """

    scan_from: int
    queues_from: int
    index_from: int


def plan_recovery(
    *,
    is_clean: bool,
    files: list[FirstRecord],
    newest_unit: int,
    index_end: int,
    checkpoint: Checkpoint,
) -> RecoveryPlan:
    """Decide how far to go back.

    newest_unit: largest physical offset in any ConsumeQueue, -1 without units.
    index_end: physical offset of the newest index entry that is kept, -1 without entries.
    """
    if not files:
        return RecoveryPlan(0, 0, 0)
    log_start = files[0].start_offset
    if is_clean:
        # What has a unit has its index entries too; the newest record leads to those after it.
        new_from = max(newest_unit + 1, log_start)
        return RecoveryPlan(max(newest_unit, log_start), new_from, max(index_end + 1, new_from))
    # The checkpoint speaks of queues that are there; who removed them all wants them made anew.
    # The peer goes back ten files at most, and acknowledged records before them have no unit then.
    queues_from = unclean_start(files, checkpoint) if newest_unit >= 0 else log_start
    index_from = max(index_end, log_start)
    return RecoveryPlan(min(queues_from, index_from), queues_from, index_from)


def unclean_start(files: list[FirstRecord], checkpoint: Checkpoint) -> int:
    """Up to where all queues are on disk, by the checkpoint. files: at least one."""
    if checkpoint.logics_physical_offset > 0:
        return max(checkpoint.logics_physical_offset, files[0].start_offset)
    stamps = (checkpoint.physic_msg_timestamp, checkpoint.logics_msg_timestamp)
    limit_ms = min(stamps) - CLOCK_MARGIN_MS
    for file in reversed(files):
        if file.store_timestamp and file.store_timestamp <= limit_ms:
            return file.start_offset
    return files[0].start_offset


# --- carrying it out -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What a start found and did."""

    is_clean: bool
    scanned_from: int
    log_end: int
    record_count: int
    unplaced_count: int  # records whose topic or queue offset cannot be right
    cut_count: int  # whole records that lay behind one that was none

    def as_log(self) -> dict[str, object]:
        """The fields of a log line."""
        return asdict(self)


class Recovery:
    """Reads the log by the plan and gives its rows to dispatcher and indexer.

    Then ``touched`` are the queues that got units, and ``newest`` is the physical offset and
    store timestamp of the last record.
    """

    def __init__(
        self,
        commit_log: CommitLog,
        dispatcher: Dispatcher,
        indexer: Indexer,
        find_queue: Callable[[str, int], StoreQueue],
        batch_topics: frozenset[str],
        delay_levels_ms: tuple[int, ...],
    ) -> None:
        """Nothing is read yet.

        find_queue: the queue of a topic and queue id, made if missing.
        batch_topics: topics whose units are inner batches, which no plain ConsumeQueue holds.
        """
        self.commit_log = commit_log
        self.dispatcher = dispatcher
        self.indexer = indexer
        self.find_queue = find_queue
        self.batch_topics = batch_topics
        self.delay_levels_ms = delay_levels_ms
        self.record_count = self.unplaced_count = 0
        self.newest: tuple[int, int] | None = None
        self.touched: set[StoreQueue] = set()
        self._keys: dict[tuple[bytes, int], int] = {}

    def run(
        self, plan: RecoveryPlan, newest_unit: int, *, is_clean: bool, on_progress: OnProgress
    ) -> RecoveryReport:
        """Read, dispatch and cut. Raises OSError.

        newest_unit: what the plan was made with; most starts need not look at each queue.
        on_progress: called after each block; what it raises ends the work.
        """
        self._cut_queues(plan.queues_from, newest_unit)
        scan = scan_from(self.commit_log.files, plan.scan_from)
        scanned_from = scan.end_offset
        bytes_max = scan.files[-1].end_offset - scanned_from if scan.files else 0
        for block in scan:
            columns = block.columns
            self.record_count += len(columns)
            self.newest = int(columns.physical_offset[-1]), int(columns.store_timestamp[-1])
            self._put(self._rows(columns, plan), plan)
            on_progress(LoadStage.LOG, scan.end_offset - scanned_from, bytes_max)
        self.indexer.index_files.last_seen = self.newest[0] if self.newest else -1
        cut_count = count_behind(scan.files, scan.end_offset)
        self._cut_log(scan.end_offset, is_clean=is_clean)
        self._cut_queues(scan.end_offset, newest_unit)
        return RecoveryReport(
            is_clean,
            scanned_from,
            scan.end_offset,
            self.record_count,
            self.unplaced_count,
            cut_count,
        )

    def _cut_queues(self, physical_offset: int, newest_unit: int) -> None:
        """Forget the units from there on, if any points so far; queues go on where they end."""
        for queue in self.dispatcher.queues:
            if newest_unit >= physical_offset:
                queue.consume_queue.truncate_from_physical(physical_offset)
            queue.next_offset = queue.consume_queue.max_offset

    def _rows(self, columns: RecordColumns, plan: RecoveryPlan) -> Rows:
        """Rows of the ring, without the records of queues that cannot be."""
        queue_keys = self._queue_keys(columns)
        is_owned = queue_keys >= 0
        if not is_owned.all():
            self.unplaced_count += int((~is_owned).sum())
            queue_keys, columns = queue_keys[is_owned], columns.select(np.flatnonzero(is_owned))
        properties = columns.properties()
        rows = np.empty(len(columns), ROW_DTYPE)
        rows["queue_key"] = queue_keys
        rows["properties_size"] = columns.properties_bytes
        rows["tags_code"] = _tags_codes(properties)
        for name in ("physical_offset", "queue_offset", "store_timestamp", "size", "sys_flag"):
            rows[name] = getattr(columns, name)
        for queue, numbers in self._by_queue(queue_keys):
            if queue.topic in self.batch_topics:
                rows["sys_flag"][numbers] |= INNER_BATCH
            else:
                self._place(queue, rows, numbers[self._is_new(rows[numbers], plan)])
            if queue.topic == SCHEDULE_TOPIC:
                due = [self._due_ms(rows[number], properties[number]) for number in numbers]
                rows["tags_code"][numbers] = due
        return rows

    def _queue_keys(self, columns: RecordColumns) -> Array:
        """The queue_key of each record, made if missing; -1 where no folder can have the name."""
        topics = split(columns.data, columns.topic_start, columns.topic_bytes.astype(np.int64))
        names = zip(topics, columns.queue_id.tolist(), strict=True)
        known = self._keys
        keys = [known[name] if name in known else self._new_key(*name) for name in names]
        return np.array(keys, np.int32)

    def _new_key(self, topic: bytes, queue_id: int) -> int:
        try:
            key = self.find_queue(topic.decode(), queue_id).key
        except ValueError:
            key = -1
        self._keys[topic, queue_id] = key
        return key

    def _by_queue(self, queue_keys: Array) -> Iterator[tuple[StoreQueue, Array]]:
        """Each queue with the numbers of its rows."""
        order = np.argsort(queue_keys, kind="stable")
        ordered = queue_keys[order]
        changes = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
        for numbers in np.split(order, changes) if len(order) else ():
            yield self.dispatcher.queues[int(queue_keys[numbers[0]])], numbers

    @staticmethod
    def _is_new(rows: Rows, plan: RecoveryPlan) -> Array:
        """Which get a unit."""
        is_queued: Array = rows["sys_flag"] & NOT_QUEUED == 0
        return is_queued & (rows["physical_offset"] >= plan.queues_from)

    def _place(self, queue: StoreQueue, rows: Rows, numbers: Array) -> None:
        """Keep records out of their queue when their queue offsets cannot be right.

        The CRC does not cover those, and filling a gap that damage made could fill the disk: the
        records of a gap would have needed room in the log.
        """
        offsets = rows["queue_offset"][numbers]
        if not len(offsets):
            return
        if offsets[0] == queue.next_offset and (offsets[1:] - offsets[:-1] == 1).all():
            queue.next_offset = int(offsets[-1]) + 1
            return
        room = rows["physical_offset"][numbers] // RECORD_BYTES_MIN
        for number, offset, most in zip(
            numbers.tolist(), offsets.tolist(), room.tolist(), strict=True
        ):
            gap = offset - queue.next_offset
            if gap and gap > most:
                self.unplaced_count += 1
                rows["sys_flag"][number] |= INNER_BATCH
            else:
                queue.next_offset = offset + 1

    def _due_ms(self, row: Any, properties: bytes) -> int:
        """What units of scheduled messages have in the place of the tags code."""
        level = property_value(properties, DELAY.encode())
        if not level.isdigit() or int(level) <= 0:
            return int(row["tags_code"])
        index = min(int(level), len(self.delay_levels_ms)) - 1
        return int(row["store_timestamp"]) + self.delay_levels_ms[index]

    def _put(self, rows: Rows, plan: RecoveryPlan) -> None:
        physical_offsets = rows["physical_offset"]
        self.dispatcher.put_block(select(rows, physical_offsets >= plan.queues_from), self.touched)
        self.indexer.put_rows(select(rows, physical_offsets >= plan.index_from))

    def _cut_log(self, end_offset: int, *, is_clean: bool) -> None:
        files = self.commit_log.files
        files.delete_from(end_offset)
        if files.files:
            last = files.files[-1]
            position = end_offset - last.start_offset
            if position < last.file_bytes and (
                not is_clean or any(last.map[position : position + 8])
            ):
                last.clear_from(position)
                last.sync()  # else what stood there may follow new records after a power cut
        self.commit_log.open_at(end_offset)


def _tags_codes(properties: list[bytes]) -> list[int] | int:
    if TAGS_MARK not in b"".join(properties):
        return 0
    return [tags_code_of(raw) for raw in properties]
