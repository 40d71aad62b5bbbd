"""Events of popped messages, as the log of pops stores them.

An event is an array of numbers and names whose first is its kind; a frame of the log is an array of
events. ``Pops`` makes and replays them.

Source: docs/store-format.md "pop"; tests/broker/pop/test_pop_log.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from headrace_broker.pop.pop_queue import OrderedBatch

if TYPE_CHECKING:
    from headrace_broker.pop.pop_queue import Checkpoint, PopQueue

Event = Sequence[Any]


class Kind(IntEnum):
    """Kinds of events; a queue is named by its number, a checkpoint by its key."""

    # number, group, topic, queue id, next offset; what was out of the queue stays.
    QUEUE = 0
    # number, offsets, physical offset, pop time, invisible ms, revive queue, origin, settled,
    # named; of an orderly POP also its attempt, its counts and its times.
    CHECKPOINT = 1
    # number, next offset.
    MOVE = 2
    # number, first offset, pop time, bits.
    SETTLE = 3
    # As SETTLE, and where the log ends with the messages that take their places.
    REVIVE = 4
    # number, next offset: nothing is out any more.
    RESET = 5
    # number.
    FORGET = 6
    # As REVIVE: the bits that the log says in Apache's form; -1 once nothing is to come of it.
    NAME = 7
    # 0: what files before this one say is void. The first of a file that a start has written.
    ANEW = 8


def queue_event(queue: PopQueue) -> Event:
    """The event of a queue, new or as it is."""
    return (Kind.QUEUE, queue.number, *queue.name, queue.next_offset)


def checkpoint_event(checkpoint: Checkpoint) -> Event:
    """The event of a checkpoint, new or as it is."""
    more: tuple[object, ...] = ()
    if isinstance(checkpoint, OrderedBatch):
        more = (checkpoint.attempt_id, checkpoint.counts, checkpoint.visible_ms)
    return (
        Kind.CHECKPOINT,
        checkpoint.queue.number,
        _packed(checkpoint.offsets),
        checkpoint.physical_offset,
        checkpoint.pop_time,
        checkpoint.invisible_ms,
        checkpoint.revive_qid,
        checkpoint.origin,
        checkpoint.settled,
        checkpoint.named,
        *more,
    )


def _packed(offsets: Sequence[int]) -> Sequence[int]:
    """The first offset and the number of neighbours; else all offsets, by their distances."""
    if isinstance(offsets, range):
        return (offsets[0], len(offsets))
    first = offsets[0]
    return (first, 0, *(offset - first for offset in offsets))


def unpacked(packed: Sequence[int]) -> Sequence[int]:
    """The offsets of ``checkpoint_event``."""
    first, count, *distances = packed
    return range(first, first + count) if count else [first + each for each in distances]
