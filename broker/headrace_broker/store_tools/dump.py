"""``headrace store dump``: the records of a log in order, and the damage between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headrace_broker.store_tools.compaction_files import compaction_queues, record_blocks
from headrace_broker.store_tools.directory import TopicNotFound
from headrace_broker.store_tools.log_reader import LogDamage, LogReader
from headrace_protocol.errors import CorruptRecord
from headrace_protocol.inner_batch import unwrap_messages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace_broker.store_tools.directory import Advance, StoreDirectory
    from headrace_protocol.columns import Array, RecordColumns
    from headrace_protocol.message import StoredMessage


class Wanted(NamedTuple):
    """Selects records; None stands for all. start: physical offset."""

    topic: str | None = None
    queue_id: int | None = None
    start: int = 0

    def numbers(self, columns: RecordColumns) -> Array:
        """The numbers of the wanted records of a block."""
        is_wanted = columns.physical_offset >= self.start
        if self.queue_id is not None:
            is_wanted &= columns.queue_id == self.queue_id
        if self.topic is not None:
            is_wanted &= has_topic(columns, self.topic.encode())
        return np.flatnonzero(is_wanted)


def has_topic(columns: RecordColumns, name: bytes) -> Array:
    """A mask of the records of a topic."""
    is_equal: Array = columns.topic_bytes == len(name)
    numbers = np.flatnonzero(is_equal)
    if len(numbers):
        part = columns.select(numbers)
        names, index = part.locate(part.data, f"V{len(name)}", part.topic_start - part.start)
        is_equal[numbers] = names[index] == np.void(name)
    return is_equal


def dump_compacted(
    directory: StoreDirectory, wanted: Wanted
) -> Iterator[StoredMessage | LogDamage]:
    """The records of compaction logs, queue by queue; physical offsets are positions there.

    Raises OSError and, at the end, TopicNotFound for a topic without a compaction log.
    """
    queues = [
        queue
        for queue in compaction_queues(directory)
        if wanted.topic in {None, queue.topic} and wanted.queue_id in {None, queue.queue_id}
    ]
    for segment in (segment for queue in queues for segment in queue.segments(directory)):
        try:
            for _, records in record_blocks(segment):
                for number in np.flatnonzero(records.physical_offset >= wanted.start).tolist():
                    yield records.message(number)
        except CorruptRecord as error:
            start, end = segment.base + error.position, segment.base + segment.log_end
            yield LogDamage(start, end, error.reason, is_tail=False)
    if not queues and wanted.topic is not None:
        raise TopicNotFound(directory.root, wanted.topic)


def _messages(record: StoredMessage) -> list[StoredMessage]:
    """The messages of a record; a batch that can't be unwrapped stays a record."""
    try:
        return unwrap_messages([record])
    except ValueError:  # damaged, too large, or its codec is missing
        return [record]


def dump(
    directory: StoreDirectory, wanted: Wanted, advance: Advance
) -> Iterator[StoredMessage | LogDamage]:
    """Messages in log order, also those of batches, and the damage between them.

    Raises OSError and, at the end, TopicNotFound for a topic with neither queues nor records.
    """
    count = 0
    first = wanted.start - directory.settings.commit_log_file_bytes
    paths = [path for path in directory.log_paths if int(path.name) > first]
    for found in LogReader(paths, directory.settings.commit_log_file_bytes, advance):
        if isinstance(found, LogDamage):
            yield found
            continue
        numbers = wanted.numbers(found.columns).tolist()
        count += len(numbers)
        for number in numbers:
            yield from _messages(found.columns.message(number))
    # Records of a deleted topic stay in the log, so a topic without queues may still have some.
    if not count and wanted.topic is not None:
        directory.check_topics([wanted.topic])
