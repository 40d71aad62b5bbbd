"""Retention of single topics: finds the first queue offset of a queue that stays visible.

Records of all topics share the log, so those beyond a topic's own limits stay there, invisible to
consumers, until their file is removed. Plain functions over files, for a thread.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace_broker.store.files.gallop import gallop
from headrace_broker.store.queues.consume_queue import BLANK_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from headrace_broker.store.files.cold_files import ColdFiles
    from headrace_protocol.columns import Array

BLOCK_UNITS: Final = 1 << 14


class TopicLimit(NamedTuple):
    """A topic's own limits, None without one. reserved_bytes: for the records of all its queues."""

    reserved_ms: int | None
    reserved_bytes: int | None


class QueueView(NamedTuple):
    """A queue's files and numbers of its units for use in a thread.

    first: the oldest visible unit. end: everything from there on must be kept.
    max_offset: one past the newest unit.
    """

    queue_id: int
    units: ColdFiles
    first: int
    end: int
    max_offset: int


class Counted(NamedTuple):
    """Total size of a queue's records between two queue offsets."""

    first: int
    end: int
    byte_count: int


def find_floors(
    queues: Sequence[QueueView],
    log: ColdFiles,
    limit: TopicLimit,
    now_ms: int,
    counted: dict[int, Counted],
) -> dict[int, int]:
    """The first queue offset to keep visible, by queue id.

    counted: by queue id; kept from call to call, so each unit is counted once. Raises OSError.
    """
    floors = {queue.queue_id: queue.first for queue in queues}
    if limit.reserved_ms is not None:
        limit_ms = now_ms - limit.reserved_ms
        for queue in queues:  # usually little or nothing has expired since the last call
            is_expired = partial(_is_expired, queue, log, limit_ms)
            floors[queue.queue_id] = gallop(queue.first, queue.end, is_expired)
    if limit.reserved_bytes is not None:
        left = [queue._replace(first=floors[queue.queue_id]) for queue in queues]
        excess_bytes = _count(left, counted) - limit.reserved_bytes
        if excess_bytes > 0:
            floors.update(_drop(left, excess_bytes))
    return floors


def _is_expired(queue: QueueView, log: ColdFiles, limit_ms: int, queue_offset: int) -> bool:
    units = queue.units.units(queue_offset, 1)
    if not len(units) or units["size"][0] == BLANK_SIZE:
        return True  # a unit without a record counts as expired
    store_ms = log.store_time_ms(int(units["physical_offset"][0]))
    return store_ms is None or store_ms <= limit_ms


# --- size -----------------------------------------------------------------------------------


def _count(queues: Sequence[QueueView], counted: dict[int, Counted]) -> int:
    """Total size of all queues' records; updates ``counted``."""
    for queue in queues:
        known = counted.get(queue.queue_id)
        if known is None or not _can_continue(queue, known):
            known = Counted(queue.first, queue.first, 0)
        gone = _byte_count(queue, known.first, min(queue.first, known.end))
        more = _byte_count(queue, max(queue.first, known.end), queue.max_offset)
        counted[queue.queue_id] = Counted(
            queue.first, queue.max_offset, known.byte_count - gone + more
        )
    return sum(counted[queue.queue_id].byte_count for queue in queues)


def _can_continue(queue: QueueView, known: Counted) -> bool:
    """True if the units added and expired since the last count can still be read."""
    if queue.first < known.first or queue.max_offset < known.end:
        return False
    return queue.first == known.first or len(queue.units.units(known.first, 1)) > 0


def _byte_count(queue: QueueView, first: int, end: int) -> int:
    return sum(int(_sizes(units).sum()) for units in _blocks(queue, first, end))


def _blocks(queue: QueueView, first: int, end: int) -> Iterator[Array]:
    while first < end:
        units = queue.units.units(first, min(BLOCK_UNITS, end - first))
        if not len(units):
            return
        yield units
        first += len(units)


def _sizes(units: Array) -> Array:
    sizes = units["size"].astype(np.int64)
    return np.where(sizes == BLANK_SIZE, 0, sizes)


def _drop(queues: Sequence[QueueView], excess_bytes: int) -> Mapping[int, int]:
    """Floors that drop the oldest records across all queues, ``excess_bytes`` in total."""
    floors = {queue.queue_id: queue.first for queue in queues}
    while excess_bytes > 0:
        blocks = [
            (queue.queue_id, queue.units.units(first, min(BLOCK_UNITS, queue.end - first)))
            for queue in queues
            if (first := floors[queue.queue_id]) < queue.end
        ]
        blocks = [(queue_id, units) for queue_id, units in blocks if len(units)]
        if not blocks:
            break
        for queue_id, count, byte_count in _oldest(blocks, excess_bytes):
            floors[queue_id] += count
            excess_bytes -= byte_count
    return floors


def _oldest(
    blocks: Sequence[tuple[int, Array]], excess_bytes: int
) -> Iterator[tuple[int, int, int]]:
    """The number of units of each block to drop, and their bytes; at least one unit of one."""
    # Past the earliest end of a block, units that were not read yet may be older.
    horizon = min(int(units["physical_offset"][-1]) for _, units in blocks)
    numbers = np.repeat(np.arange(len(blocks)), [len(units) for _, units in blocks])
    units = np.concatenate([units for _, units in blocks])
    order = np.argsort(units["physical_offset"], kind="stable")
    order = order[units["physical_offset"][order] <= horizon]
    sizes = _sizes(units)
    count = int(np.searchsorted(np.cumsum(sizes[order]), excess_bytes)) + 1
    dropped = order[:count]
    for number, (queue_id, _) in enumerate(blocks):
        of_queue = dropped[numbers[dropped] == number]
        yield queue_id, len(of_queue), int(sizes[of_queue].sum())
