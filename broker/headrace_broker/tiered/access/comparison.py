"""Comparison of a queue in the tier with that in the log.

A store that was restored from a back-up, or replaced, gives queue offsets once more that the tier
has already. So log and tier have the same messages up to some offset, and others from there on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from headrace_broker.store.queues.queue_blocks import QueueDamaged
from headrace_protocol.tier.driver import expect, returns_failure

if TYPE_CHECKING:
    from headrace_broker.store.followers.follower_work import LocalQueue
    from headrace_broker.tiered.container.stored_tier import Tail, TierQueue

# The offset that a record states, which is another one in the tier.
_OFFSET: Final = slice(28, 36)


@returns_failure
def first_difference(queue: TierQueue, local: LocalQueue) -> int | None:
    """The first queue offset at which the tier has another message than the log; None without one.

    Messages that only the tier has are others if the log gives their offsets to new ones. If the
    last message that both have is the same, so are all before it.

    Fails as reads of the tier. Raises OSError.
    """
    low = max(queue.min_offset, local.first)
    end = min(queue.commit_offset, local.view.end)
    if end <= low:
        return local.view.end if local.view.end < queue.commit_offset else None
    if _has_tail(local, queue.tail()) or _is_same(queue, local, end - 1):
        return end if end < queue.commit_offset else None
    high = end - 1  # differs
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if _is_same(queue, local, middle) else (low, middle)
    return low


def _has_tail(local: LocalQueue, tail: Tail | None) -> bool:
    """True if the log has these records, as far as they are known: by their time and size."""
    if tail is None or tail.end > local.view.end:
        return False
    first = max(tail.first, local.first)
    units = local.view.units.units(first, tail.end - first)
    if len(units) < tail.end - first:  # fewer at the end of a file
        return False
    byte_count = int(units["size"].sum(dtype=np.int64))
    is_size_same = byte_count == tail.byte_count or first > tail.first
    newest_ms = local.log.store_time_ms(int(units["physical_offset"][-1]))
    return is_size_same and newest_ms == tail.newest_ms


def _is_same(queue: TierQueue, local: LocalQueue, queue_offset: int) -> bool:
    """True if log and tier have the same record; also if one of them has none to compare."""
    try:
        record = local.record(queue_offset)
    except QueueDamaged:  # which the log reports to those who read it
        return True
    if record is None:
        return True
    found = expect(queue.units(queue_offset, 1))
    if not len(found.units) or found.first != queue_offset:  # in a gap of the tier
        return True
    stored = expect(queue.records(found.units, np.array([queue_offset])))
    ours, theirs = bytearray(record.record(0)), bytearray(stored.record(0))
    ours[_OFFSET] = theirs[_OFFSET] = bytes(_OFFSET.stop - _OFFSET.start)
    return ours == theirs
