"""Reads blocks of a queue's units with their records from the disk, in any thread.

For readers that must not block the loop and that want flushed records only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace_broker.store.errors import StoreError
from headrace_broker.store.queues.consume_queue import BLANK_SIZE
from headrace_protocol.columns import RecordColumns
from headrace_protocol.errors import CorruptRecord

if TYPE_CHECKING:
    from headrace_broker.store.files.cold_files import ColdFiles
    from headrace_protocol.columns import Array

BLOCK_UNITS: Final = 4096


class ReadLimits(NamedTuple):
    """block_bytes: most bytes of a block with more than one message.

    span_share: reading what lies between records costs less than many reads, up to this factor.
    span_bytes: of one read: larger buffers come from the system each time, and a page of them costs
    more than the bytes that are read into it.
    """

    block_bytes: int = 4 << 20
    span_share: int = 8
    span_bytes: int = 4 << 20


_LIMITS: Final = ReadLimits()


class QueueNotFollowed(StoreError):
    """A queue can't be followed any further, while others can."""


class QueueDamaged(QueueNotFollowed):
    """A unit of a queue points to a record that is damaged or missing."""

    def __init__(self, topic: str, queue_id: int, physical_offset: int, reason: str) -> None:
        super().__init__(
            f"queue {topic}/{queue_id} points to {physical_offset} in the log, where no record of "
            f"it can be read ({reason}): stop the broker and run headrace store fsck on its "
            "directory; headrace store copy leaves out what fsck can't repair"
        )
        self.physical_offset = physical_offset


class QueueBlock(NamedTuple):
    """Messages of one queue in order, every length and CRC checked.

    first, end: the range of queue offsets covered, without ``end``. Blank units, as at the start
    of a queue that begins late, are left out.
    units: shape (n,), UNIT_DTYPE. records: the same n, back to back.
    """

    topic: str
    queue_id: int
    first: int
    end: int
    units: Array
    records: RecordColumns


class QueueView(NamedTuple):
    """A queue's units for use in a thread. end: one past the last unit to read."""

    topic: str
    queue_id: int
    units: ColdFiles
    end: int


def read_block(
    queue: QueueView,
    first: int,
    log: ColdFiles,
    flushed_offset: int,
    limits: ReadLimits = _LIMITS,
) -> QueueBlock | None:
    """The messages from ``first`` on: a few MiB, but at least one message.

    flushed_offset: reading stops before the first record that ends past it.

    Returns None if there is nothing to read. Raises OSError, QueueDamaged.
    """
    units = queue.units.units(first, min(BLOCK_UNITS, queue.end - first))
    units = units[: _readable_count(units, flushed_offset, limits.block_bytes)]
    if not len(units):
        return None
    numbers = np.flatnonzero(units["size"] != BLANK_SIZE)
    kept = units[numbers]
    records = read_records(queue, kept, numbers + first, log, limits)
    return QueueBlock(queue.topic, queue.queue_id, first, first + len(units), kept, records)


def read_records(
    queue: QueueView,
    units: Array,
    queue_offsets: Array,
    log: ColdFiles,
    limits: ReadLimits = _LIMITS,
) -> RecordColumns:
    """The checked records of units, which may lie apart. Raises OSError, QueueDamaged.

    units: in ascending order, none blank.
    """
    first_record = int(units["physical_offset"][0]) if len(units) else -1
    try:
        records = _gather(units, log, limits)
        _check(records, queue, units, queue_offsets)
    except CorruptRecord as error:
        raise QueueDamaged(queue.topic, queue.queue_id, first_record, error.reason) from error
    return records


def _readable_count(units: Array, flushed_offset: int, block_bytes: int) -> int:
    """The number of units whose records are on disk and fit the maximum size of a block."""
    sizes = units["size"].astype(np.int64)
    sizes[sizes == BLANK_SIZE] = 0
    is_readable = (units["size"] > 0) & (units["physical_offset"] + sizes <= flushed_offset)
    count = len(units) if is_readable.all() else int(is_readable.argmin())
    fitting = int(np.searchsorted(np.cumsum(sizes[:count]), block_bytes, "right"))
    return min(count, max(fitting, 1))


def _gather(units: Array, log: ColdFiles, limits: ReadLimits) -> RecordColumns:
    """The records of units, back to back."""
    sizes = units["size"].astype(np.int64)
    starts = units["physical_offset"].astype(np.int64)
    ends = starts + sizes
    parts, at = [], 0
    while at < len(starts):
        fitting = int(np.searchsorted(ends, starts[at] + limits.span_bytes, "right"))
        stop = max(fitting, at + 1)
        parts.append(_read_span(starts[at:stop], ends[at:stop], log, limits.span_share))
        at = stop
    data = parts[0] if len(parts) == 1 else b"".join(parts)
    return RecordColumns(data, np.cumsum(sizes) - sizes, sizes)


def _read_span(starts: Array, ends: Array, log: ColdFiles, span_share: int) -> bytes:
    """The bytes of some records."""
    first, span_bytes = int(starts[0]), int(ends[-1] - starts[0])
    own_bytes = int((ends - starts).sum())
    if span_bytes <= span_share * own_bytes:
        data = log.read(first, span_bytes)
        if len(data) == span_bytes == own_bytes:
            return data
        if len(data) == span_bytes:  # fewer at the end of a file
            bounds = zip((starts - first).tolist(), (ends - first).tolist(), strict=True)
            return b"".join([data[begin:end] for begin, end in bounds])
    is_apart = (starts[1:] != ends[:-1]) | (starts[1:] % log.file_bytes == 0)
    run_starts = starts[np.append(True, is_apart)].tolist()
    run_ends = ends[np.append(is_apart, True)].tolist()
    runs = zip(run_starts, run_ends, strict=True)
    return b"".join([log.read(start, end - start) for start, end in runs])


def _check(records: RecordColumns, queue: QueueView, units: Array, queue_offsets: Array) -> None:
    """Raise CorruptRecord unless these are the records of the units."""
    records.check_bodies()
    is_there = records.physical_offset == units["physical_offset"]
    records.require(is_there, "it states another physical offset")
    is_own = (records.queue_id == queue.queue_id) & (records.queue_offset == queue_offsets)
    records.require(is_own, "it states another queue or queue offset")
    if len(records) and not records.has_topic(queue.topic):
        raise CorruptRecord(0, "it states another topic")
