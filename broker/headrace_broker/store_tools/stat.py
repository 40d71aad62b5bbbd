"""``headrace store stat``: the contents of a store by topic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from headrace_broker.inner.topic_counts import TIMERS, TRANSACTIONS
from headrace_broker.store.queues.consume_queue import BLANK_SIZE
from headrace_broker.store_tools.compaction_files import compaction_queues
from headrace_broker.store_tools.directory import disk_bytes
from headrace_broker.store_tools.queue_check import open_queue
from headrace_broker.store_tools.waiting_check import delayed_count, read_config
from headrace_protocol import fastjson
from headrace_protocol.tier.stored_queue import HEAD_BYTES, read_head

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headrace_broker.compaction.segments import Segment
    from headrace_broker.store.queues.consume_queue import ConsumeQueue
    from headrace_broker.store_tools.directory import Advance, StoreDirectory

_BLOCK_UNITS: Final = 1 << 16


@dataclass(slots=True)
class TopicStat:
    """The readable messages of a topic and their bytes in the log; times are store times in ms.

    compacted_messages, compacted_bytes: those in compaction logs, some of which are in both.
    """

    topic: str
    queues: int = 0
    messages: int = 0
    record_bytes: int = 0
    compacted_messages: int = 0
    compacted_bytes: int = 0
    oldest_ms: int | None = None
    newest_ms: int | None = None


@dataclass(frozen=True, slots=True)
class StoreStat:
    """Figures of the whole directory.

    delayed_messages: those that wait. timers, open_transactions: that waited at the last save.
    """

    is_clean: bool
    log_files: int
    log_min_offset: int
    log_file_bytes: int
    queue_file_bytes: int
    index_files: int
    disk_bytes: int
    delayed_messages: int
    timers: int
    open_transactions: int


def store_stat(directory: StoreDirectory) -> StoreStat:
    """The figures of a directory. Raises OSError."""
    paths = directory.log_paths
    files = [path for path in directory.root.rglob("*") if path.is_file()]
    return StoreStat(
        is_clean=directory.is_clean,
        log_files=len(paths),
        log_min_offset=int(paths[0].name) if paths else 0,
        log_file_bytes=directory.settings.commit_log_file_bytes,
        queue_file_bytes=directory.settings.consume_queue_file_bytes,
        index_files=len(directory.index_paths),
        disk_bytes=sum(map(disk_bytes, files)),
        delayed_messages=delayed_count(directory),
        timers=_saved_count(directory, *TIMERS),
        open_transactions=_saved_count(directory, *TRANSACTIONS),
    )


def _saved_count(directory: StoreDirectory, name: str, table: str) -> int:
    """The sum of a table of counts by topic."""
    if (found := read_config(directory, name)) is None:
        return 0
    return sum(count.get("count", 0) for count in fastjson.loads(found[1]).get(table, {}).values())


def topic_stats(directory: StoreDirectory, advance: Advance) -> list[TopicStat]:
    """Figures per topic, from the units of its queues; ``advance`` counts queues.

    Raises OSError; StoreFormatError for files that are not those of a queue.
    """
    log = _Log(directory)
    topics: dict[str, TopicStat] = {}
    for folder in directory.queue_paths:
        topic = topics.setdefault(folder.parent.name, TopicStat(folder.parent.name))
        _add(topic, folder, directory, log)
        advance(1)
    for compacted in compaction_queues(directory):
        topic = topics.setdefault(compacted.topic, TopicStat(compacted.topic))
        _add_compacted(topic, compacted.segments(directory))
    return sorted(topics.values(), key=lambda topic: topic.topic)


def _add(topic: TopicStat, folder: Path, directory: StoreDirectory, log: _Log) -> None:
    queue = open_queue(folder, directory)
    topic.queues += 1
    first = last = None
    for units in _live_units(queue, log.min_offset):
        topic.messages += int(units["count"].sum()) if queue.is_batch else len(units)
        topic.record_bytes += int(units["size"].sum(dtype=np.int64))
        first = first or int(units["physical_offset"][0])
        last = int(units["physical_offset"][-1])
    queue.unmap()
    for physical_offset in (first, last):
        if physical_offset is None:
            continue
        if (time_ms := log.store_timestamp(physical_offset)) is not None:
            topic.oldest_ms = min(time_ms, topic.oldest_ms or time_ms)
            topic.newest_ms = max(time_ms, topic.newest_ms or time_ms)


def _add_compacted(topic: TopicStat, segments: list[Segment]) -> None:
    for segment in segments:
        topic.compacted_messages += segment.count
        topic.compacted_bytes += segment.log_end
        if segment.count:
            first_ms = int(segment.read_units(0, 1)["store_timestamp"][0])
            topic.oldest_ms = min(first_ms, topic.oldest_ms or first_ms)


def _live_units(queue: ConsumeQueue, log_min_offset: int) -> Iterator[np.ndarray]:
    number = queue.number_of(queue.first_at_or_after(log_min_offset))
    while number < queue.end_number:
        units = np.frombuffer(queue.units_view(number, _BLOCK_UNITS), queue.unit_dtype)
        number += len(units)
        live = units[units["size"] != BLANK_SIZE]
        if len(live):
            yield live


class _Log:
    """Reads store times of single records."""

    def __init__(self, directory: StoreDirectory) -> None:
        paths = directory.log_paths
        self.min_offset = int(paths[0].name) if paths else 0
        self._folder = directory.root / "commitlog"
        self._file_bytes = directory.settings.commit_log_file_bytes

    def store_timestamp(self, physical_offset: int) -> int | None:
        """Store time of the record there; None outside the log."""
        start = self.min_offset
        start += (physical_offset - start) // self._file_bytes * self._file_bytes
        path = self._folder / f"{start:020d}"
        if physical_offset < self.min_offset or not path.exists():
            return None
        with path.open("rb") as file:
            file.seek(physical_offset - start)
            head = read_head(file.read(HEAD_BYTES))
        return head.store_ms if head is not None else None
