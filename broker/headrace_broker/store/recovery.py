"""Start: find where the log ends and bring ConsumeQueues and index in line with it.

``plan_recovery`` decides from facts alone; ``Recovery`` carries the plan out. The log is the
truth: what queues and index say about a range that is read again is thrown away first.
"""

from __future__ import annotations

import struct
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from zlib_ng.zlib_ng import crc32

from headrace_broker.store.dispatch import NOT_QUEUED
from headrace_broker.store.ring import ROW_DTYPE
from headrace_protocol.message import (
    CRC_MASK,
    DELAY,
    INNER_BATCH,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    RECORD_BYTES_MIN,
    RECORD_HEADS,
    property_value,
    tags_code_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace_broker.store.checkpoint import Checkpoint
    from headrace_broker.store.commit_log import CommitLog
    from headrace_broker.store.dispatch import Dispatcher
    from headrace_broker.store.indexer import Indexer
    from headrace_broker.store.mapped_file import MappedFile
    from headrace_broker.store.store_queue import StoreQueue

SCHEDULE_TOPIC: Final = b"SCHEDULE_TOPIC_XXXX"
CLOCK_MARGIN_MS: Final = 3000
_BLOCK_ROWS: Final = 8192
_START = struct.Struct(">ii28xi")
_SHORT = struct.Struct(">h")


class Record(NamedTuple):
    """What dispatch needs to know of a checked record."""

    physical_offset: int
    size: int
    queue_id: int
    queue_offset: int
    sys_flag: int
    store_timestamp: int
    topic: bytes
    properties: bytes


# --- reading the log -----------------------------------------------------------------------


def check_record(file: MappedFile, position: int) -> Record | None:
    """The record at ``position`` of a log file, every length and the body's CRC checked."""
    remaining = file.file_bytes - position
    if remaining < RECORD_BYTES_MIN:
        return None
    size, magic, sys_flag = _START.unpack_from(file.map, position)
    if magic not in (MAGIC_V1, MAGIC_V2) or not RECORD_BYTES_MIN <= size <= remaining:
        return None
    head = RECORD_HEADS[sys_flag >> 4 & 3]
    body_at = position + head.size
    end = position + size
    if body_at > end:
        return None
    fields = head.unpack_from(file.map, position)
    crc, queue_id, queue_offset, physical_offset = fields[2], fields[3], fields[5], fields[6]
    topic_at = body_at + fields[14]
    prefix = 1 if magic == MAGIC_V1 else 2
    if topic_at < body_at or topic_at + prefix > end:
        return None
    topic_bytes = file.map[topic_at] if prefix == 1 else _SHORT.unpack_from(file.map, topic_at)[0]
    length_at = topic_at + prefix + topic_bytes
    if topic_bytes < 0 or length_at + 2 > end:
        return None
    properties_bytes = end - length_at - 2
    if _SHORT.unpack_from(file.map, length_at)[0] != properties_bytes:
        return None
    # No CRC covers the properties, but they end with a separator, and a torn tail with zeros.
    if properties_bytes and not file.map[end - 1]:
        return None
    if physical_offset != file.start_offset + position or queue_id < 0 or queue_offset < 0:
        return None
    if crc32(file.view[body_at:topic_at]) & CRC_MASK != crc:
        return None
    return Record(
        physical_offset,
        size,
        queue_id,
        queue_offset,
        sys_flag,
        fields[10],
        file.map[topic_at + prefix : length_at],
        file.map[length_at + 2 : end],
    )


class LogScan:
    """Iterates over the records from ``end_offset`` on and stops at the first that is none."""

    def __init__(self, files: list[MappedFile], start_offset: int) -> None:
        """files: those of the log, from the one that holds ``start_offset``."""
        self.files = files
        self.end_offset = start_offset

    def __iter__(self) -> Iterator[Record]:
        for file in self.files:
            if file.start_offset > self.end_offset:
                return
            while record := check_record(file, self.end_offset - file.start_offset):
                self.end_offset += record.size
                yield record
            if not _is_file_end(file, self.end_offset - file.start_offset):
                return
            self.end_offset = file.end_offset


def _is_file_end(file: MappedFile, position: int) -> bool:
    if position + 8 > file.file_bytes:
        return True
    size, magic = struct.unpack_from(">ii", file.map, position)
    return bool(magic == MAGIC_BLANK and size == file.file_bytes - position)


# --- plan ----------------------------------------------------------------------------------


class FirstRecord(NamedTuple):
    """A log file by its first record; the timestamp is None when there is no whole record."""

    start_offset: int
    store_timestamp: int | None


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
    files_max: int,
) -> RecoveryPlan:
    """Decide how far to go back.

    newest_unit: largest physical offset in any ConsumeQueue, -1 without units.
    index_end: physical offset of the newest index entry that is kept, -1 without entries.
    files_max: an unclean start goes back that many files at most.
    """
    if not files:
        return RecoveryPlan(0, 0, 0)
    log_start = files[0].start_offset
    if is_clean:
        # What has a unit has its index entries too; the newest record leads to those after it.
        new_from = max(newest_unit + 1, log_start)
        return RecoveryPlan(max(newest_unit, log_start), new_from, max(index_end + 1, new_from))
    oldest = files[-files_max:][0].start_offset
    # The checkpoint speaks of queues that are there; who removed them all wants them made anew.
    queues_from = max(_unclean_start(files, checkpoint), oldest) if newest_unit >= 0 else log_start
    index_from = max(index_end, oldest)
    return RecoveryPlan(min(queues_from, index_from), queues_from, index_from)


def _unclean_start(files: list[FirstRecord], checkpoint: Checkpoint) -> int:
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
        self._queues: dict[tuple[bytes, int], StoreQueue] = {}

    def first_records(self) -> list[FirstRecord]:
        """One per log file."""
        firsts = []
        for file in self.commit_log.files.files:
            record = check_record(file, 0)
            firsts.append(FirstRecord(file.start_offset, record and record.store_timestamp))
        return firsts

    def run(self, plan: RecoveryPlan, *, is_clean: bool) -> RecoveryReport:
        """Read, dispatch and cut. Raises OSError."""
        for queue in self.dispatcher.queues:
            queue.consume_queue.truncate_from_physical(plan.queues_from)
            queue.next_offset = queue.consume_queue.max_offset
        scanned_from, scan = self._scan(plan)
        rows: list[tuple[int, ...]] = []
        for record in scan:
            self.record_count += 1
            self.newest = (record.physical_offset, record.store_timestamp)
            if owner := self._queue(record):
                rows.append(self._row(record, owner, plan))
            if len(rows) == _BLOCK_ROWS:
                self._put(rows, plan)
                rows.clear()
        self._put(rows, plan)
        self._cut_log(scan.end_offset, is_clean=is_clean)
        for queue in self.dispatcher.queues:
            queue.consume_queue.truncate_from_physical(scan.end_offset)
            queue.next_offset = queue.consume_queue.max_offset
        return RecoveryReport(
            is_clean, scanned_from, scan.end_offset, self.record_count, self.unplaced_count
        )

    def _scan(self, plan: RecoveryPlan) -> tuple[int, LogScan]:
        """Where reading begins: at the wanted record if it is whole, else at its file's start."""
        files = self.commit_log.files.files
        if not files:
            return 0, LogScan([], 0)
        wanted = plan.scan_from
        file = self.commit_log.files.find(wanted) or files[-1]
        start = file.start_offset
        if file.start_offset <= wanted < file.end_offset and check_record(file, wanted - start):
            start = wanted
        return start, LogScan(files[files.index(file) :], start)

    def _row(self, record: Record, queue: StoreQueue, plan: RecoveryPlan) -> tuple[int, ...]:
        sys_flag = record.sys_flag
        if queue.topic in self.batch_topics:
            sys_flag |= INNER_BATCH
        elif record.physical_offset >= plan.queues_from and not sys_flag & NOT_QUEUED:
            sys_flag |= self._place(queue, record)
        return (
            record.physical_offset,
            record.queue_offset,
            self._tags_code(record),
            record.store_timestamp,
            record.size,
            queue.key,
            len(record.properties),
            sys_flag,
        )

    def _queue(self, record: Record) -> StoreQueue | None:
        name = (record.topic, record.queue_id)
        queue: StoreQueue | None = self._queues.get(name)
        if queue is None:
            try:
                queue = self.find_queue(record.topic.decode(), record.queue_id)
            except ValueError:  # no folder can have this name
                self.unplaced_count += 1
                return None
            self._queues[name] = queue
        return queue

    def _place(self, queue: StoreQueue, record: Record) -> int:
        """Flags that keep a record out of its queue when its queue offset cannot be right.

        The CRC does not cover it, and filling a gap that damage made could fill the disk: the
        records of a gap would have needed room in the log.
        """
        gap = record.queue_offset - queue.next_offset
        if gap and gap * RECORD_BYTES_MIN > record.physical_offset:
            self.unplaced_count += 1
            return INNER_BATCH
        queue.next_offset = record.queue_offset + 1
        return 0

    def _tags_code(self, record: Record) -> int:
        if record.topic == SCHEDULE_TOPIC:
            level = property_value(record.properties, DELAY.encode())
            if level.isdigit() and int(level) > 0:
                index = min(int(level), len(self.delay_levels_ms)) - 1
                return record.store_timestamp + self.delay_levels_ms[index]
        return tags_code_of(record.properties)

    def _put(self, rows: list[tuple[int, ...]], plan: RecoveryPlan) -> None:
        block = np.array(rows, ROW_DTYPE)
        physical_offsets = block["physical_offset"]
        self.dispatcher.put_block(block[physical_offsets >= plan.queues_from], self.touched)
        self.indexer.put_rows(block[physical_offsets >= plan.index_from])

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
        self.commit_log.open_at(end_offset)
