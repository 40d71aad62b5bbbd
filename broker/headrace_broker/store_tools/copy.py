"""``headrace store copy --topic``: copies topics of a store into a new directory."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import numpy as np

from headrace_broker.store.errors import StoreError
from headrace_broker.store.files.config_file import ConfigFile
from headrace_broker.store.files.filesystem import Files, make_private
from headrace_broker.store.index.index_file import IndexFiles
from headrace_broker.store.integrity.checkpoint import Checkpoint
from headrace_broker.store.integrity.lock import StoreLock
from headrace_broker.store.log.log_blocks import LogBlock
from headrace_broker.store.log.record_checksum import has_checksum, put_checksums
from headrace_broker.store.queues.batch_queue import QUEUE_KINDS, BatchConsumeQueue, queue_at
from headrace_broker.store_tools.compaction_copy import check_swaps, copy_compaction
from headrace_broker.store_tools.directory import StoreDirectory
from headrace_broker.store_tools.dump import has_topic
from headrace_broker.store_tools.log_reader import LogDamage, LogReader
from headrace_broker.store_tools.records import QueueNumbers, batch_units
from headrace_broker.store_tools.seal_check import seal
from headrace_broker.timer.checkpoint import CHECK_BYTES, TIMER_CHECK_FILE, TimerCheck
from headrace_protocol import fastjson
from headrace_protocol.columns import UNIT_DTYPE, RecordColumns, split
from headrace_protocol.message import (
    BLANK_RECORD,
    INNER_BATCH,
    MAGIC_BLANK,
    RECORD_BYTES_MIN,
    TRANSACTION_PREPARED,
)
from headrace_protocol.system_topics import (
    HALF_TOPIC,
    OP_HALF_TOPIC,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.store.queues.consume_queue import ConsumeQueue
    from headrace_broker.store.settings import StoreSettings
    from headrace_broker.store_tools.directory import Advance
    from headrace_broker.store_tools.records import Records
    from headrace_protocol.columns import Array

_PHYSICAL_OFFSET_AT: Final = 28


@dataclass(slots=True)
class CopyReport:
    """The contents of a copy. damage: parts of the source that are no records and were left out."""

    record_count: int = 0
    record_bytes: int = 0
    unplaced_count: int = 0
    damage: list[LogDamage] = field(default_factory=list)


def copy_topics(
    source: StoreDirectory, target: Path, topics: list[str], advance: Advance
) -> CopyReport:
    """Copy records, queues, index, offsets and settings of some topics.

    target: a directory that does not exist yet, or is empty. Queue offsets stay the same, physical
    offsets change. Until the end the target looks like a store after a crash, which a start would
    recover.

    Raises TopicNotFound for a topic without queues, StoreError for a target that is not empty, for
    transactions without their decisions and for an unfinished swap of a compaction log; OSError.
    """
    _check(source, target, topics)
    make_private(target)
    lock = StoreLock(target)
    lock.acquire()
    try:
        abort = target / "abort"
        abort.write_text(str(os.getpid()))
        report = _copy(source, target, topics, advance)
        abort.unlink()
    finally:
        lock.release()
    return report


def _check(source: StoreDirectory, target: Path, topics: list[str]) -> None:
    source.check_topics(topics)
    if HALF_TOPIC in topics and OP_HALF_TOPIC not in topics:
        raise StoreError(
            f"{HALF_TOPIC} without {OP_HALF_TOPIC} would be transactions that nobody has decided: "
            f"copy both, with --topic {OP_HALF_TOPIC}"
        )
    check_swaps(source, topics)
    if target.exists() and any(target.iterdir()):
        raise StoreError(f"{target} is not empty: name a new directory")


def _copy(source: StoreDirectory, target: Path, topics: list[str], advance: Advance) -> CopyReport:
    settings = replace(source.settings, root=target)
    report = CopyReport()
    writer = _Writer(settings, source, report)
    names = [topic.encode() for topic in topics]
    file_bytes = settings.commit_log_file_bytes
    for found in LogReader(source.log_paths, file_bytes, advance):
        if isinstance(found, LogDamage):
            report.damage.append(found)
            continue
        is_wanted = np.zeros(len(found.columns), bool)
        for name in names:
            is_wanted |= has_topic(found.columns, name)
        if is_wanted.any():
            writer.write(found.columns.select(np.flatnonzero(is_wanted)))
    writer.finish()
    copy_compaction(source, target, topics)
    if TIMER_TOPIC in topics:
        _copy_timer_check(source.root, target)
    for file_name, keep in _kept(set(topics)).items():
        _copy_table(source.root / "config" / file_name, target / "config" / file_name, keep)
    return report


# --- log, queues and index -----------------------------------------------------------------


class _Writer:
    def __init__(self, settings: StoreSettings, source: StoreDirectory, report: CopyReport) -> None:
        self._report = report
        self._root = settings.root
        self._settings = settings
        self._log = _LogWriter(settings)
        self._queue_numbers = QueueNumbers(settings.delay_levels_ms)
        self._batch_topics = source.batch_topics
        self._fs = source.fs
        self._index = IndexFiles(settings, source.fs)
        self._queues: dict[int, ConsumeQueue] = {}
        self._newest: tuple[int, int] | None = None

    def write(self, columns: RecordColumns) -> None:
        """Append records in log order, with their units and index entries."""
        sizes = columns.size
        data = bytearray(b"".join(split(columns.data, columns.start, sizes)))
        ends = np.cumsum(sizes)
        done = 0
        while done < len(sizes):
            base = int(ends[done - 1]) if done else 0
            count = self._log.room_for(ends[done:] - base)
            piece = memoryview(data)[base : int(ends[done + count - 1])]
            self._write_piece(piece, ends[done : done + count] - base, columns, done)
            done += count

    def _write_piece(
        self, piece: memoryview, ends: Array, columns: RecordColumns, first: int
    ) -> None:
        """Write records that fit into one file of the copy."""
        sizes = np.diff(ends, prepend=0)
        starts = ends - sizes
        physical_offset = starts + self._log.offset
        stated_offsets = np.ndarray((len(piece) - 7,), ">i8", piece, strides=(1,))
        stated_offsets[starts + _PHYSICAL_OFFSET_AT] = physical_offset
        copied = RecordColumns(bytes(piece), starts, sizes)
        if (is_marked := has_checksum(copied)).any():
            put_checksums(piece, starts[is_marked], sizes[is_marked])
        records = self._queue_numbers.records(LogBlock(copied, self._log.offset))
        self._put_units(records, columns.physical_offset[first : first + len(sizes)])
        numbers, hashes = self._queue_numbers.index_keys(records)
        times = records.store_timestamp
        now_ms = int(time.time() * 1000)
        self._index.put(hashes, physical_offset[numbers], times[numbers], now_ms)
        self._log.write(piece, int(times.max()))
        self._newest = int(physical_offset[-1]), int(times[-1])
        self._report.record_count += len(sizes)
        self._report.record_bytes += len(piece)

    def _put_units(self, records: Records, source_offset: Array) -> None:
        is_queued = (records.sys_flag & TRANSACTION_PREPARED == 0) & (records.counts > 0)
        queued = np.flatnonzero(is_queued)
        for queue_number in np.unique(records.queue_number[queued]).tolist():
            group = queued[records.queue_number[queued] == queue_number]
            queue = self._queue(queue_number)
            if isinstance(queue, BatchConsumeQueue):
                queue.put_units(batch_units(records, group))
                continue
            group = group[records.sys_flag[group] & INNER_BATCH == 0]
            units = np.empty(len(group), UNIT_DTYPE)
            units["physical_offset"] = records.physical_offset[group]
            units["size"], units["tags_code"] = records.size[group], records.tags_code[group]
            offsets = records.queue_offset[group]
            is_next = offsets == queue.max_offset + np.arange(len(group))
            done = 0
            while done < len(group) and is_next.all():
                done += queue.put_block(units[done:])
            for number in range(done, len(group)):
                self._put_unit(queue, int(offsets[number]), units[number], source_offset)

    def _put_unit(
        self, queue: ConsumeQueue, queue_offset: int, unit: Any, source_offset: Array
    ) -> None:
        # As at a start: a gap too large for the source's log is the result of damage.
        if (queue_offset - queue.max_offset) * RECORD_BYTES_MIN > source_offset[-1]:
            self._report.unplaced_count += 1
        else:
            queue.put(queue_offset, *unit.tolist())

    def _queue(self, queue_number: int) -> ConsumeQueue:
        if queue_number not in self._queues:
            topic, queue_id = self._queue_numbers.name(queue_number)
            kind = QUEUE_KINDS[topic in self._batch_topics]
            folder = self._root / kind.folder / topic / str(queue_id)
            self._queues[queue_number] = queue_at(folder, self._settings, self._fs)
        return self._queues[queue_number]

    def finish(self) -> None:
        """Bring everything to disk, and save a checkpoint that covers it."""
        self._log.finish()
        for queue in self._queues.values():
            queue.start_flush()()
        for file in self._index.files:
            file.file.sync()
        self._fs.sync_names()
        physical_offset, time_ms = self._newest or (0, 0)
        checkpoint = Checkpoint(time_ms, time_ms, 0, 0, 0, physical_offset)
        checkpoint.save(self._root / "checkpoint", self._fs)
        seal(StoreDirectory(self._settings, self._fs), self._log.offset)


class _LogWriter:
    """Writes the log of the copy. offset: the physical offset of the next record."""

    def __init__(self, settings: StoreSettings) -> None:
        self.offset = 0
        self._folder = settings.root / "commitlog"
        self._folder.mkdir()
        self._file_bytes = settings.commit_log_file_bytes
        self._file: BinaryIO | None = None
        self._newest_ms = 0

    def room_for(self, ends: Array) -> int:
        """Number of records with these ends that fit; starts another file if none does."""
        position = self.offset % self._file_bytes
        if self._file is None:
            self._open()
        room = self._file_bytes - position - BLANK_RECORD.size
        count = int(np.searchsorted(ends, room, "right"))
        if count:
            return count
        self._roll(position)
        return self.room_for(ends)

    def write(self, data: memoryview, newest_ms: int) -> None:
        """Append; ``newest_ms`` becomes the file's modification time, which retention uses."""
        assert self._file is not None
        self._file.write(data)
        self.offset += len(data)
        self._newest_ms = newest_ms

    def finish(self) -> None:
        """Bring the current file to disk and close it."""
        if self._file is None:
            return
        self._file.close()
        Files().sync(Path(self._file.name))
        os.utime(self._file.name, ns=(self._newest_ms * 1_000_000,) * 2)
        self._file = None

    def _open(self) -> None:
        self._file = (self._folder / f"{self.offset:020d}").open("xb")
        self._file.truncate(self._file_bytes)

    def _roll(self, position: int) -> None:
        remaining = self._file_bytes - position
        assert self._file is not None
        assert position, "a record is larger than a file"
        self._file.write(BLANK_RECORD.pack(remaining, MAGIC_BLANK))
        self.finish()
        self.offset += remaining
        self._open()


# --- config --------------------------------------------------------------------------------


def _kept(topics: set[str]) -> dict[str, Callable[[dict[Any, Any]], dict[Any, Any]]]:
    """By config file, the function that keeps the parts of these topics."""

    def of_topics(fields: dict[Any, Any]) -> dict[Any, Any]:
        return {key: _entries(value, topics) for key, value in fields.items()}

    def of_names(fields: dict[Any, Any]) -> dict[Any, Any]:
        return {topic: fields[topic] for topic in fields if topic in topics}

    # Without it a copy would deliver again what its queues of delayed messages still hold.
    delayed = {"delayOffset.json": lambda fields: fields} if SCHEDULE_TOPIC in topics else {}
    return {
        **delayed,
        "topics.json": of_topics,
        "topicQueueMapping.json": of_topics,
        "consumerOffset.json": of_topics,
        # The copy keeps the queue offsets, so consumers that saved some must see the same topic.
        "topicIncarnation.json": of_names,
        "staticTopic.json": of_names,
        "subscriptionGroup.json": lambda fields: fields,
    }


_VERSIONS: Final = frozenset(("counter", "stateVersion", "timestamp"))


def _entries(table: Any, topics: set[str]) -> Any:
    """A table reduced to these topics: its keys are TOPIC or TOPIC@GROUP, or its values topics."""
    if not isinstance(table, dict) or table.keys() <= _VERSIONS:
        return table
    kept = {}
    for key, value in table.items():
        if isinstance(value, list):
            if found := [topic for topic in value if topic in topics]:
                kept[key] = found
        elif str(key).partition("@")[0] in topics:
            kept[key] = value
    return kept


def _copy_timer_check(source: Path, target: Path) -> None:
    """Say what is delivered; the start of a copy makes the wheel and the timer log anew."""
    path = Path("config") / TIMER_CHECK_FILE
    if (source / path).exists():
        check = TimerCheck.decode((source / path).read_bytes())
        make_private(target / "config")
        data = check._replace(log_position=0).encode()
        (target / path).write_bytes(data.ljust(CHECK_BYTES, b"\0"))


def _copy_table(
    source: Path, target: Path, keep: Callable[[dict[Any, Any]], dict[Any, Any]]
) -> None:
    data = ConfigFile(source).load()
    if data is not None:
        ConfigFile(target).save(fastjson.dumps(keep(fastjson.loads(data)), pretty=True))
