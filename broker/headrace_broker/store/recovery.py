"""Recovery: find the end of the log and bring ConsumeQueues and index in line with it.

``plan_recovery`` is a pure function; ``Recovery`` carries its plan out. The log is the truth:
units and index entries of the range that is read again are discarded first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace_broker.store.log.batch_units import COUNT_MAX
from headrace_broker.store.log.log_rows import LogScan, read_block, scan_from, stated_size
from headrace_broker.store.log.ring import WHOLE_BATCH, Rows, message_counts, select
from headrace_broker.store.queues.dispatch import Dispatcher
from headrace_protocol.message import RECORD_BYTES_MIN

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from headrace_broker.store.files.mapped_file import MappedFile
    from headrace_broker.store.integrity.checkpoint import Checkpoint
    from headrace_broker.store.log.commit_log import CommitLog
    from headrace_broker.store.log.log_blocks import LogBlock
    from headrace_broker.store.log.log_rows import LogRows
    from headrace_broker.store.log.takers import Taker
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_protocol.columns import Array, RecordColumns

CLOCK_MARGIN_MS: Final = 3000
# For a scan that wants no records.
NOTHING: Final = sys.maxsize


class Scan(NamedTuple):
    """A feature's part in the one pass over the log that a start makes.

    begin: returns the physical offset from which records are wanted, or NOTHING. It is called when
    queues are loaded but not recovered. take: gets them, in order and by blocks; both are called
    in the loading thread.
    """

    begin: Callable[[], int]
    take: Callable[[RecordColumns], None]


def _feed(take: Callable[[RecordColumns], None], block: LogBlock, start: int) -> None:
    # After a power cut no record may begin at the offset.
    if block.end_offset > start and len(records := block.since(start)):
        take(records)


def read_log(take: Callable[[RecordColumns], None], log: CommitLog, start: int) -> None:
    """Feed a scan that could not tell before recovery where it begins. Raises OSError."""
    if start < log.max_offset:  # no record begins at the end, so the whole file would be read
        for block in scan_from(log, max(start, log.min_offset)):
            _feed(take, block, start)


class LoadStage(StrEnum):
    """The stages of a start, in order."""

    QUEUES = "queues"  # counted in queues
    LOG = "log"  # counted in bytes


# Called with a stage, the amount done, and an upper bound of its total.
OnProgress = Callable[[LoadStage, int, int], None]


# --- the end of the log --------------------------------------------------------------------


def count_after(files: list[MappedFile], end_offset: int, block_bytes: int) -> int:
    """The number of whole records after the log's end; if any, the end is damage, not a torn tail.

    files: files of the log. block_bytes: read at once.
    """
    count = 0
    while files := _files_past(files, end_offset):
        begin_offset = _after(files[0], end_offset)
        scan = LogScan(_files_past(files, begin_offset), begin_offset, block_bytes)
        count += sum(len(block.columns) for block in scan)
        end_offset = scan.end_offset
    return count


def _files_past(files: list[MappedFile], offset: int) -> list[MappedFile]:
    return [file for file in files if file.end_offset > offset]


def _after(file: MappedFile, offset: int) -> int:
    """The next record's offset by the damaged one's stated size, else the end of the file."""
    size = stated_size(file, offset - file.start_offset)
    return offset + size if size else file.end_offset


# --- plan ----------------------------------------------------------------------------------


class FirstRecord(NamedTuple):
    """The first record of a log file; the timestamp is None without a whole record."""

    start_offset: int
    store_timestamp: int | None


def first_records(files: list[MappedFile]) -> list[FirstRecord]:
    """The first record of each log file."""
    firsts = []
    for file in files:
        block = read_block(file, 0, bytes_max=0)
        timestamp = int(block.columns.store_timestamp[0]) if block else None
        firsts.append(FirstRecord(file.start_offset, timestamp))
    return firsts


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """The physical offsets from which the log is read again.

    scan_from: where reading begins, or at the start of its file if no whole record is there.
    put_from: by the taker's name, where the records begin whose rows the taker gets.
    rewrite_from: where the part of the log begins that may not be on disk; None if all of it is.
    """

    scan_from: int
    put_from: Mapping[str, int]
    rewrite_from: int | None

    @property
    def queues_from(self) -> int:
        """Units of records at or past this offset are rebuilt."""
        return self.put_from[Dispatcher.name]


def plan_recovery(
    files: list[FirstRecord],
    newest_unit: int,
    durable_offsets: Mapping[str, int],
    rewrite_from: int | None,
) -> RecoveryPlan:
    """Decide how far back to read.

    newest_unit: as for ``queues_durable_offset``. durable_offsets: by taker name.
    rewrite_from: as for the plan.
    """
    if not files:
        return RecoveryPlan(0, dict.fromkeys(durable_offsets, 0), None)
    log_start = files[0].start_offset
    put_from = {name: max(offset, log_start) for name, offset in durable_offsets.items()}
    scan_from = min(put_from.values())
    # No record begins at newest_unit + 1; reading the newest record leads to those after it.
    if scan_from == newest_unit + 1 > log_start:
        scan_from = newest_unit
    return RecoveryPlan(scan_from, put_from, rewrite_from)


def log_durable_offset(
    *, is_clean: bool, files: list[FirstRecord], checkpoint: Checkpoint
) -> int | None:
    """The offset before which the log is on disk for certain; None if all of it is."""
    if is_clean or not files:
        return None
    # Not further back where only the queues are being rebuilt.
    stamp = checkpoint.physic_msg_timestamp
    return unclean_start(files, checkpoint._replace(logics_msg_timestamp=stamp))


def queues_durable_offset(
    *, is_clean: bool, files: list[FirstRecord], newest_unit: int, checkpoint: Checkpoint
) -> int:
    """The offset before which every record has its unit.

    newest_unit: largest physical offset in any ConsumeQueue, -1 without units.
    """
    if not files:
        return 0
    log_start = files[0].start_offset
    if is_clean:
        return max(newest_unit + 1, log_start)
    # The checkpoint is about existing queues; if somebody removed them all, rebuild them all.
    # The peer reads back ten files at most, so that acknowledged records before them lack units.
    return unclean_start(files, checkpoint) if newest_unit >= 0 else log_start


def index_durable_offset(*, is_clean: bool, index_end: int, queues_durable: int) -> int:
    """The offset before which every key has its index entry.

    index_end: physical offset of the newest remaining index entry, -1 without entries.
    """
    if is_clean:
        # A record with a unit has its index entries too.
        return max(index_end + 1, queues_durable)
    return max(index_end, 0)


def unclean_start(files: list[FirstRecord], checkpoint: Checkpoint) -> int:
    """The offset before which the checkpoint guarantees all units. files: at least one."""
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
    """The results of a recovery."""

    is_clean: bool
    scanned_from: int
    log_end: int
    record_count: int
    unplaced_count: int  # records whose topic or queue offset cannot be right
    cut_count: int  # whole records cut off because they lay after a damaged one

    def as_log(self) -> dict[str, object]:
        """The fields of a log line."""
        return asdict(self)


class Recovery:
    """Reads the log by the plan and feeds its rows to the takers.

    newest: physical offset and store timestamp of the last record read.
    """

    def __init__(
        self,
        commit_log: CommitLog,
        takers: Sequence[Taker],
        log_rows: LogRows,
        scans: Sequence[Scan] = (),
    ) -> None:
        """Reads nothing yet."""
        self._scans = [(scan.begin(), scan.take) for scan in scans]
        self.commit_log = commit_log
        self.takers = takers
        self._log_rows = log_rows
        self.record_count = self.unplaced_count = self._rewritten_to = 0
        self.newest: tuple[int, int] | None = None

    def run(self, plan: RecoveryPlan, *, is_clean: bool, on_progress: OnProgress) -> RecoveryReport:
        """Read the log, feed the takers, and cut the log and the takers at its end.

        on_progress: called after each block; an exception that it raises ends the run.
        Raises OSError.
        """
        for taker in self.takers:
            taker.cut(plan.put_from[taker.name])
        scan = scan_from(self.commit_log, self._first_wanted(plan))
        scanned_from = scan.end_offset
        bytes_max = scan.files[-1].end_offset - scanned_from if scan.files else 0
        for block in scan:
            self._rewrite(plan.rewrite_from, block.base)
            self._rewrite(plan.rewrite_from, block.end_offset, block)
            columns = block.columns
            self.record_count += len(columns)
            self.newest = int(columns.physical_offset[-1]), int(columns.store_timestamp[-1])
            if block.end_offset > plan.scan_from:
                self._put(self._rows(columns, plan), plan)
            for wanted_from, take in self._scans:
                _feed(take, block, wanted_from)
            on_progress(LoadStage.LOG, scan.end_offset - scanned_from, bytes_max)
        self._rewrite(plan.rewrite_from, scan.end_offset)  # the end of a full file, too
        cut_count = count_after(scan.files, scan.end_offset, self.commit_log.scan_bytes)
        self._cut_log(scan.end_offset, is_clean=is_clean)
        for taker in self.takers:
            taker.cut(scan.end_offset)
        return RecoveryReport(
            is_clean,
            scanned_from,
            scan.end_offset,
            self.record_count,
            self.unplaced_count,
            cut_count,
        )

    def _first_wanted(self, plan: RecoveryPlan) -> int:
        """Physical offset to read from: the takers', or an earlier one of a scan."""
        log_start = self.commit_log.files.min_offset
        wanted = [max(offset, log_start) for offset, _ in self._scans]
        return min(plan.scan_from, *wanted, NOTHING)

    def _rewrite(self, start: int | None, end: int, block: LogBlock | None = None) -> None:
        """Have the next sync write the log from ``start`` to ``end``, whatever an earlier one did.

        A failed sync leaves its pages in memory as if they were on disk. Records that follow such
        pages would be lost with them by a power cut, though they are on disk themselves.
        """
        if start is None or end <= start:
            return
        begin = max(start, self._rewritten_to)
        if block is None:
            self.commit_log.files.rewrite(begin, end)
        else:
            data = memoryview(block.columns.data)[begin - block.base : end - block.base]
            self.commit_log.files.write_again(data, begin)
        self._rewritten_to = end

    def _rows(self, columns: RecordColumns, plan: RecoveryPlan) -> Rows:
        """The records' rows, without those of impossible queues; impossible offsets get no unit."""
        deleted_count = self._log_rows.deleted_count
        rows, queues = self._log_rows.rows(columns)
        deleted_count = self._log_rows.deleted_count - deleted_count
        self.unplaced_count += len(columns) - len(rows) - deleted_count
        for key, numbers in _by_queue(rows["queue_key"]):
            self._leave_out(queues[key], rows, numbers[self._needs_unit(rows[numbers], plan)])
        return rows

    @staticmethod
    def _needs_unit(rows: Rows, plan: RecoveryPlan) -> Array:
        """A mask of the rows for which a unit is built."""
        is_queued: Array = message_counts(rows["sys_flag"]) > 0
        return is_queued & (rows["physical_offset"] >= plan.queues_from)

    def _leave_out(self, queue: StoreQueue, rows: Rows, numbers: Array) -> None:
        """Keep records out of their queue if their queue offsets cannot be right.

        No CRC covers queue offsets, and blank units for a gap caused by damage could fill the
        disk. A genuine gap is no longer than the number of records that fit the log before it.
        """
        offsets = rows["queue_offset"][numbers]
        if not len(offsets):
            return
        ends = offsets + message_counts(rows["sys_flag"][numbers])
        if offsets[0] == queue.next_offset and (offsets[1:] == ends[:-1]).all():
            queue.next_offset = int(ends[-1])
            return
        room = rows["physical_offset"][numbers] // RECORD_BYTES_MIN
        if queue.consume_queue.is_batch:
            room *= COUNT_MAX
        for number, offset, end, gap_max in zip(
            numbers.tolist(), offsets.tolist(), ends.tolist(), room.tolist(), strict=True
        ):
            gap = offset - queue.next_offset
            if gap and gap > gap_max:
                self.unplaced_count += 1
                rows["sys_flag"][number] = WHOLE_BATCH  # of no messages
            else:
                queue.next_offset = end

    def _put(self, rows: Rows, plan: RecoveryPlan) -> None:
        physical_offsets = rows["physical_offset"]
        for taker in self.takers:
            wanted = physical_offsets >= plan.put_from[taker.name]
            if wanted.any():
                taker.put(select(rows, wanted))

    def _cut_log(self, end_offset: int, *, is_clean: bool) -> None:
        files = self.commit_log.files
        files.delete_from(end_offset)
        if files.files:
            last = files.files[-1]
            position = end_offset - last.start_offset
            if position < last.file_bytes and (not is_clean or any(last.pread(position, 8))):
                last.clear_from(position)
                last.sync()  # else old bytes may follow new records after a power cut
        self.commit_log.open_at(end_offset)


def _by_queue(queue_keys: Array) -> Iterator[tuple[int, Array]]:
    """Each queue key with the indexes of its rows."""
    order = np.argsort(queue_keys, kind="stable")
    ordered = queue_keys[order]
    changes = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    for numbers in np.split(order, changes) if len(order) else ():
        yield int(queue_keys[numbers[0]]), numbers
