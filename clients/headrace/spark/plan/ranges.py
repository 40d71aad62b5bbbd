"""Resolve the options of a read to ranges of queue offsets."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from headrace.spark.errors import DataLoss, OffsetOutOfRange, OptionError

if TYPE_CHECKING:
    from headrace.spark.chains import Queues
    from headrace.spark.cluster import Cluster
    from headrace.spark.options import Point
    from headrace.spark.plan.filters import Predicates
    from headrace.spark.tier.manifest import StoredTier
    from headrace_protocol.bodies import MessageQueue

Offsets = dict["MessageQueue", int]

_log = logging.getLogger("headrace.spark")
# If a broker's clock was set back while it wrote, a search by time is slightly off.
_CLOCK_SET_BACK_MS = 10_000


class Extent(NamedTuple):
    """The offsets in queues: of the oldest message, and one past the newest."""

    min: Offsets
    max: Offsets


class Range(NamedTuple):
    """Queue offsets from ``start`` up to, but not including, ``end``."""

    start: int
    end: int


Ranges = dict["MessageQueue", Range]


def not_empty(ranges: Ranges) -> Ranges:
    """The non-empty ``ranges``."""
    return {queue: each for queue, each in ranges.items() if each.start < each.end}


def extent(cluster: Cluster | StoredTier, queues: Queues) -> Extent:
    """The current extent of ``queues``."""
    return Extent(cluster.min_offsets(queues), cluster.max_offsets(queues))


def resolve(
    option: str, point: Point, cluster: Cluster | StoredTier, queues: Queues, has: Extent
) -> Offsets:
    """The offset of ``point`` in each queue.

    option: starting or ending, which ``point`` is the value of.

    Raises OffsetOutOfRange, and OptionError for a queue that does not exist.
    """
    match point.kind:
        case "earliest":
            return has.min
        case "latest":
            return has.max
        case "time":
            found = cluster.offsets_at(queues, point.timestamp_ms)
            return {queue: _clip(offset, queue, has) for queue, offset in found.items()}
    _check_offsets(option, point, queues, has)
    return {**(has.min if option == "starting" else has.max), **point.offsets}


def _clip(offset: int, queue: MessageQueue, has: Extent) -> int:
    return min(max(offset, has.min[queue]), has.max[queue])


def _check_offsets(option: str, point: Point, queues: Queues, has: Extent) -> None:
    for queue, offset in point.offsets.items():
        if queue not in queues:
            raise OptionError(
                option, shown(queue), f"is not read; the queues are {', '.join(map(shown, queues))}"
            )
        # A start below the minimum is left to the check for data loss.
        if offset > has.max[queue] or (option == "ending" and offset < has.min[queue]):
            raise OffsetOutOfRange(
                f"option {option}: offset {offset} of {shown(queue)} is outside its range "
                f"of {has.min[queue]} to {has.max[queue]}"
            )


def shown(queue: MessageQueue) -> str:
    """A queue as ``topic/broker/queue``, for messages."""
    return f"{queue.topic}/{queue.broker_name}/{queue.queue_id}"


def drop_lost(ranges: Ranges, min_offsets: Offsets, *, fail: bool) -> Ranges:
    """``ranges`` without messages that no longer exist at the start of their queues.

    fail: raise DataLoss if there are any; otherwise log them.
    """
    kept: Ranges = {}
    for queue, (start, end) in ranges.items():
        first = min_offsets[queue]
        if start < min(first, end):
            loss = DataLoss(
                queue.topic, queue.broker_name, queue.queue_id, start, f"the oldest is {first}"
            )
            report(loss, min(first, end) - start, fail=fail)
        kept[queue] = Range(min(max(start, first), end), end)
    return kept


def report(loss: DataLoss, message_count: int, *, fail: bool) -> None:
    """Raise a loss, or log it."""
    if fail:
        raise loss
    _log.warning("skipped %d messages: %s", message_count, loss)


def narrow(
    ranges: Ranges, predicates: Predicates, cluster: Cluster | StoredTier, queues: Queues
) -> Ranges:
    """The parts of ``ranges`` that can match ``predicates``, or slightly more."""
    ranges = {
        queue: Range(*predicates.queue_offsets.clip(*each))
        for queue, each in ranges.items()
        if predicates.queues is None or queue.queue_id in predicates.queues
    }
    stored = predicates.store_ms
    asked = {queue: queues[queue] for queue in ranges}
    if stored.start is not None:
        first = cluster.offsets_at(asked, max(0, stored.start - _CLOCK_SET_BACK_MS))
        ranges = {q: Range(max(start, first[q]), end) for q, (start, end) in ranges.items()}
    if stored.end is not None:
        after = cluster.offsets_at(asked, max(0, stored.end + _CLOCK_SET_BACK_MS))
        ranges = {q: Range(start, min(end, after[q])) for q, (start, end) in ranges.items()}
    return ranges
