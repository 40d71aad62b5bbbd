"""Rows of the ring made from the log: the same rows that appending its records would have made.

Needed where a log exists without rows: at a start, and later in a slave, whose log comes from its
master.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import numpy as np

from headrace_broker.store.log.batch_units import COUNT_MAX
from headrace_broker.store.log.log_blocks import RECORD_MAGICS, LogBlock, checked, stated_head, walk
from headrace_broker.store.log.ring import COUNT_SHIFT, FLAGS_MASK, ROW_DTYPE, WHOLE_BATCH, Rows
from headrace_protocol.java_hash import tags_code_of
from headrace_protocol.message import DELAY, INNER_BATCH, INNER_NUM, MAGIC_BLANK, RECORD_BYTES_MIN
from headrace_protocol.property_columns import PropertyColumns
from headrace_protocol.system_topics import SCHEDULE_TOPIC

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from headrace_broker.store.files.mapped_file import MappedFile
    from headrace_broker.store.log.commit_log import CommitLog
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_protocol.columns import Array, RecordColumns


TAGS_MARK: Final = b"TAGS\x01"
_SHORT_BYTES: Final = 256 << 10
# More queues than a table by their ids may have.
_TABLE_MAX: Final = 1 << 16

FindQueue = Callable[[str, int], "StoreQueue"]


# --- reading the log -----------------------------------------------------------------------


def read_block(file: MappedFile, position: int, bytes_max: int) -> LogBlock | None:
    """The whole records of a log file from ``position`` on; None if no whole record begins there.

    bytes_max: most bytes to read, but one record is always read.
    """
    size = stated_size(file, position)
    if not size:
        return None
    data = file.pread(position, min(max(size, bytes_max), file.file_bytes - position))
    starts, end = walk(data)
    return checked(data, starts, end, file.start_offset + position)[0]


def stated_size(file: MappedFile, position: int) -> int:
    """The size stated by the record that appears to begin at ``position``; 0 if none can."""
    size, magic = stated_head(file.pread(position, 8))
    fits = RECORD_BYTES_MIN <= size <= file.file_bytes - position
    return size if magic in RECORD_MAGICS and fits else 0


class LogScan:
    """Iterates over blocks of records and stops at the first that is not whole.

    end_offset: one past the last record so far.
    """

    def __init__(self, files: list[MappedFile], start_offset: int, block_bytes: int) -> None:
        """files: files of the log, from the one that contains ``start_offset`` on."""
        self.files = files
        self.end_offset = start_offset
        self._bytes_max = self._bytes = block_bytes

    def __iter__(self) -> Iterator[LogBlock]:
        for file in self.files:
            if file.start_offset > self.end_offset:
                return
            while block := read_block(file, self.end_offset - file.start_offset, self._bytes):
                # A block ends where the sizes of records change: read little ahead of a short one.
                self._bytes = max(2 * (block.end_offset - block.base), _SHORT_BYTES)
                self._bytes = min(self._bytes, self._bytes_max)
                self.end_offset = block.end_offset
                yield block
            if not _is_file_end(file, self.end_offset - file.start_offset):
                return
            self.end_offset = file.end_offset


def _is_file_end(file: MappedFile, position: int) -> bool:
    if position + 8 > file.file_bytes:
        return True
    size, magic = stated_head(file.pread(position, 8))
    return bool(magic == MAGIC_BLANK and size == file.file_bytes - position)


def scan_from(log: CommitLog, wanted: int) -> LogScan:
    """A scan from the record at ``wanted`` if it is whole, else from the start of its file."""
    files = log.files.files
    if not files:
        return LogScan([], 0, log.scan_bytes)
    file = log.files.find(wanted) or files[-1]
    start = file.start_offset
    if start <= wanted < file.end_offset and read_block(file, wanted - start, 0):
        start = wanted
    return LogScan(files[files.index(file) :], start, log.scan_bytes)


# --- rows ----------------------------------------------------------------------------------


class LogRows:
    """Makes rows from records of the log, without state between blocks.

    find_queue: returns the queue of a topic and queue id, created if missing; raises ValueError
    for a topic that cannot be a folder name.
    deleted_ends: physical offset below which the records are those of a deleted topic.
    deleted_count: the number of such records so far.
    """

    def __init__(
        self,
        find_queue: FindQueue,
        delay_levels_ms: tuple[int, ...],
        deleted_ends: Mapping[str, int],
    ) -> None:
        self.deleted_count = 0
        self._deleted_ends = {topic.encode(): end for topic, end in deleted_ends.items()}
        self._find_queue = find_queue
        self._delay_levels_ms = delay_levels_ms

    def rows(self, columns: RecordColumns) -> tuple[Rows, dict[int, StoreQueue]]:
        """One row per record, in order, and the rows' queues by queue_key.

        Records of impossible queues and of deleted topics have no row.
        """
        queues, queue_keys = self._queues(columns)
        is_owned = queue_keys >= 0
        if not is_owned.all():
            queue_keys, columns = queue_keys[is_owned], columns.select(np.flatnonzero(is_owned))
        properties = columns.properties()
        rows = np.empty(len(columns), ROW_DTYPE)
        rows["queue_key"] = queue_keys
        rows["properties_size"] = columns.properties_bytes
        rows["tags_code"] = _tags_codes(properties)
        for name in ("physical_offset", "queue_offset", "store_timestamp", "size"):
            rows[name] = getattr(columns, name)
        rows["sys_flag"] = columns.sys_flag & FLAGS_MASK
        is_inner = columns.sys_flag & INNER_BATCH != 0
        if is_inner.any():
            rows["sys_flag"][is_inner] |= WHOLE_BATCH  # of no messages, unless its queue says more
        for queue in queues.values():
            if queue.row_flag:
                _set_counts(rows, np.flatnonzero(queue_keys == queue.key), queue, properties)
            if queue.topic == SCHEDULE_TOPIC:
                self._set_due_ms(rows, np.flatnonzero(queue_keys == queue.key), properties)
        return rows, queues

    def _queues(self, columns: RecordColumns) -> tuple[dict[int, StoreQueue], Array]:
        """The queues, and the queue_key of each record; -1 if its queue is impossible or gone."""
        topics, topic_numbers = columns.topics
        ends = np.array([self._deleted_ends.get(topic, 0) for topic in topics])
        is_gone = columns.physical_offset < ends[topic_numbers]
        self.deleted_count += int(is_gone.sum())
        queues: dict[int, StoreQueue] = {}
        ids = int(columns.queue_id.max(initial=0)) + 1
        names = topic_numbers * ids + columns.queue_id
        if len(topics) * ids > _TABLE_MAX:
            distinct, numbers = np.unique(names, return_inverse=True)
        else:
            distinct, numbers = np.arange(len(topics) * ids), names
        keys = np.full(len(distinct), -1, np.int32)
        for number in np.flatnonzero(np.bincount(numbers[~is_gone])).tolist():
            topic_number, queue_id = divmod(int(distinct[number]), ids)
            with suppress(ValueError):
                queue = self._find_queue(topics[topic_number].decode(), queue_id)
                keys[number] = queue.key
                queues[queue.key] = queue
        return queues, np.where(is_gone, np.int32(-1), keys[numbers])

    def _set_due_ms(self, rows: Rows, numbers: Array, properties: list[bytes]) -> None:
        """Put the delivery time of delayed messages where their units have the tags code."""
        columns = PropertyColumns([properties[number] for number in numbers.tolist()])
        found = columns.find(DELAY.encode())
        levels = columns.integers(found, 0)
        numbers, levels = numbers[found.records[levels > 0]], levels[levels > 0]
        levels_ms = np.array(self._delay_levels_ms)
        delays_ms = levels_ms[np.minimum(levels, len(levels_ms)) - 1]
        rows["tags_code"][numbers] = rows["store_timestamp"][numbers] + delays_ms


def _set_counts(rows: Rows, numbers: Array, queue: StoreQueue, properties: list[bytes]) -> None:
    """Put the count of messages into rows of a batch queue; 0 where a batch states none."""
    flags = rows["sys_flag"][numbers] | queue.row_flag
    is_inner = rows["sys_flag"][numbers] & WHOLE_BATCH == WHOLE_BATCH
    if is_inner.any():
        columns = PropertyColumns([properties[number] for number in numbers[is_inner].tolist()])
        found = columns.find(INNER_NUM.encode())
        counts = np.zeros(int(is_inner.sum()), np.int64)
        counts[found.records] = columns.integers(found, 0)
        counts[(counts < 0) | (counts > COUNT_MAX)] = 0
        flags[is_inner] = rows["sys_flag"][numbers[is_inner]] | counts << COUNT_SHIFT
    rows["sys_flag"][numbers] = flags


def _tags_codes(properties: list[bytes]) -> list[int] | int:
    if TAGS_MARK not in b"".join(properties):
        return 0
    return [tags_code_of(raw) for raw in properties]
