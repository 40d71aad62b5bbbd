"""From what was asked for to ranges of queues: offsets that a read begins and ends at."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from headrace.spark.errors import DataLoss, OffsetOutOfRange, OptionError

if TYPE_CHECKING:
    from headrace.spark.cluster import Cluster, Queues
    from headrace.spark.options import Point
    from headrace.spark.plan.filters import Predicates
    from headrace_protocol.bodies import MessageQueue

Offsets = dict["MessageQueue", int]

_log = logging.getLogger("headrace.spark")
# Brokers' clocks may be set back while they write; a search by time then lands a little off.
_CLOCK_SET_BACK_MS = 10_000


class Extent(NamedTuple):
    """What queues have: offset of the oldest message, and the one after the newest."""

    min: Offsets
    max: Offsets


class Range(NamedTuple):
    """Queue offsets from ``start`` up to, and without, ``end``."""

    start: int
    end: int


Ranges = dict["MessageQueue", Range]


def not_empty(ranges: Ranges) -> Ranges:
    """Those of ``ranges`` with messages."""
    return {queue: each for queue, each in ranges.items() if each.start < each.end}


def extent(cluster: Cluster, queues: Queues) -> Extent:
    """What ``queues`` have now."""
    return Extent(cluster.min_offsets(queues), cluster.max_offsets(queues))


def resolve(option: str, point: Point, cluster: Cluster, queues: Queues, has: Extent) -> Offsets:
    """The offset that ``point`` means in each queue, as the ``option`` starting or ending.

    Raises OptionError for a queue that is not there, OffsetOutOfRange.
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
                option, place(queue), f"is not read; there are {', '.join(map(place, queues))}"
            )
        # A start below the minimum is a loss, if at all.
        if offset > has.max[queue] or (option == "ending" and offset < has.min[queue]):
            raise OffsetOutOfRange(
                f"option {option}: offset {offset} of {place(queue)} is outside of what it has: "
                f"{has.min[queue]} to {has.max[queue]}"
            )


def place(queue: MessageQueue) -> str:
    """A queue as people write it."""
    return f"{queue.topic}/{queue.broker_name}/{queue.queue_id}"


def without_lost(ranges: Ranges, min_offsets: Offsets, *, fail: bool) -> Ranges:
    """``ranges`` without what is gone from the beginnings of queues.

    fail: raise DataLoss if there is any, else say so in the log.
    """
    kept: Ranges = {}
    for queue, (start, end) in ranges.items():
        first = min_offsets[queue]
        if start < min(first, end):
            loss = DataLoss(
                queue.topic, queue.broker_name, queue.queue_id, start, f"the oldest is {first}"
            )
            if fail:
                raise loss
            _log.warning("skipped %d messages: %s", min(first, end) - start, loss)
        kept[queue] = Range(min(max(start, first), end), end)
    return kept


def narrowed(ranges: Ranges, predicates: Predicates, cluster: Cluster, queues: Queues) -> Ranges:
    """What of ``ranges`` can have messages that ``predicates`` let through, or a little more."""
    ranges = {
        queue: Range(*predicates.queue_offsets.clip(*each))
        for queue, each in ranges.items()
        if predicates.queues is None or queue.queue_id in predicates.queues
    }
    stored = predicates.store_ms
    places = {queue: queues[queue] for queue in ranges}
    if stored.start is not None:
        first = cluster.offsets_at(places, max(0, stored.start - _CLOCK_SET_BACK_MS))
        ranges = {q: Range(max(start, first[q]), end) for q, (start, end) in ranges.items()}
    if stored.end is not None:
        after = cluster.offsets_at(places, max(0, stored.end + _CLOCK_SET_BACK_MS))
        ranges = {q: Range(start, min(end, after[q])) for q, (start, end) in ranges.items()}
    return ranges
