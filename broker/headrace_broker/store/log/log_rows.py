"""Rows of the ring made from the log: the same rows that appending its records would have made.

Needed where a log exists without rows: at a start, and later in a slave, whose log comes from its
master.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from headrace_broker.store.log.log_blocks import RECORD_MAGICS, LogBlock, checked, place_of, walk
from headrace_broker.store.log.ring import ROW_DTYPE, Rows
from headrace_protocol.columns import split
from headrace_protocol.message import (
    DELAY,
    INNER_BATCH,
    MAGIC_BLANK,
    RECORD_BYTES_MIN,
    property_number,
    tags_code_of,
)
from headrace_protocol.system_topics import SCHEDULE_TOPIC

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from headrace_broker.store.files.mapped_file import MappedFile
    from headrace_broker.store.files.mapped_file_queue import MappedFileQueue
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_protocol.columns import Array, RecordColumns


TAGS_MARK: Final = b"TAGS\x01"
# Some thousands of records: larger blocks save nothing, and progress is reported after each.
SCAN_BYTES: Final = 4 << 20
# Stands for the queue of a deleted topic.
_GONE: Final = (b"", -1)

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
    size, magic = place_of(file.pread(position, 8))
    fits = RECORD_BYTES_MIN <= size <= file.file_bytes - position
    return size if magic in RECORD_MAGICS and fits else 0


class LogScan:
    """Iterates over blocks of records and stops at the first that is not whole.

    end_offset: one past the last record so far.
    """

    def __init__(self, files: list[MappedFile], start_offset: int) -> None:
        """files: files of the log, from the one that contains ``start_offset`` on."""
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
    size, magic = place_of(file.pread(position, 8))
    return bool(magic == MAGIC_BLANK and size == file.file_bytes - position)


def scan_from(log: MappedFileQueue, wanted: int) -> LogScan:
    """A scan from the record at ``wanted`` if it is whole, else from the start of its file."""
    if not log.files:
        return LogScan([], 0)
    file = log.find(wanted) or log.files[-1]
    start = file.start_offset
    if start <= wanted < file.end_offset and read_block(file, wanted - start, 0):
        start = wanted
    return LogScan(log.files[log.files.index(file) :], start)


# --- rows ----------------------------------------------------------------------------------


class LogRows:
    """Makes rows from records of the log, without state between blocks.

    find_queue: returns the queue of a topic and queue id, created if missing; raises ValueError
    for a topic that cannot be a folder name.
    batch_topics: topics whose units are inner batches, which no plain ConsumeQueue holds.
    deleted_ends: physical offset below which the records are those of a deleted topic.
    deleted_count: the number of such records so far.
    """

    def __init__(
        self,
        find_queue: FindQueue,
        batch_topics: frozenset[str],
        delay_levels_ms: tuple[int, ...],
        deleted_ends: Mapping[str, int],
    ) -> None:
        self.deleted_count = 0
        self._deleted_ends = {topic.encode(): end for topic, end in deleted_ends.items()}
        self._find_queue = find_queue
        self._batch_topics = batch_topics
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
        for name in ("physical_offset", "queue_offset", "store_timestamp", "size", "sys_flag"):
            rows[name] = getattr(columns, name)
        for queue in queues.values():
            if queue.topic in self._batch_topics:
                rows["sys_flag"][queue_keys == queue.key] |= INNER_BATCH
            if queue.topic == SCHEDULE_TOPIC:
                self._set_due_ms(rows, np.flatnonzero(queue_keys == queue.key), properties)
        return rows, queues

    def _queues(self, columns: RecordColumns) -> tuple[dict[int, StoreQueue], Array]:
        """The queues, and the queue_key of each record; -1 if its queue is impossible or gone."""
        topics = split(columns.data, columns.topic_start, columns.topic_bytes.astype(np.int64))
        names = list(zip(topics, columns.queue_id.tolist(), strict=True))
        queues: dict[int, StoreQueue] = {}
        known: dict[tuple[bytes, int], int] = {}
        if not self._deleted_ends.keys().isdisjoint(topics):
            known[_GONE] = -1
            names = self._without_deleted(names, columns.physical_offset.tolist())
        for name in (each for each in dict.fromkeys(names) if each not in known):
            topic, queue_id = name
            try:
                queue = self._find_queue(topic.decode(), queue_id)
            except ValueError:
                known[name] = -1
            else:
                known[name] = queue.key
                queues[queue.key] = queue
        return queues, np.array([known[name] for name in names], np.int32)

    def _without_deleted(
        self, names: list[tuple[bytes, int]], physical_offsets: list[int]
    ) -> list[tuple[bytes, int]]:
        """The names of queues, _GONE for records of deleted topics."""
        ends = self._deleted_ends
        found = [
            name if offset >= ends.get(name[0], 0) else _GONE
            for name, offset in zip(names, physical_offsets, strict=True)
        ]
        self.deleted_count += found.count(_GONE)
        return found

    def _set_due_ms(self, rows: Rows, numbers: Array, properties: list[bytes]) -> None:
        """Put the delivery time of delayed messages where their units have the tags code."""
        levels_ms = self._delay_levels_ms
        for number in numbers.tolist():
            level = property_number(properties[number], DELAY.encode(), 0)
            if level > 0:
                delay_ms = levels_ms[min(level, len(levels_ms)) - 1]
                rows["tags_code"][number] = int(rows["store_timestamp"][number]) + delay_ms


def _tags_codes(properties: list[bytes]) -> list[int] | int:
    if TAGS_MARK not in b"".join(properties):
        return 0
    return [tags_code_of(raw) for raw in properties]
