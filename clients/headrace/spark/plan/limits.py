"""Apply the limits of a streaming trigger to the available ranges."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from headrace.spark.plan.ranges import Range, not_empty
from headrace.spark.plan.splits import joined, size_curves

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace.spark.chains import Item, Queues
    from headrace.spark.cluster import Cluster
    from headrace.spark.options import Limits
    from headrace.spark.plan.ranges import Ranges

Key = TypeVar("Key")


def limited(cluster: Cluster, queues: Queues, ranges: Ranges, limits: Limits) -> Ranges:
    """The leading parts of ``ranges`` within ``limits``; at least one message if there is any.

    Each queue gets a share in proportion to its available messages, so that all queues reach their
    ends together: a queue that ran ahead in time would make the others' messages late.
    """
    ranges = not_empty(ranges)
    if limits.seconds is not None and ranges:
        ranges = not_empty(_within_seconds(cluster, queues, ranges, limits.seconds))
    if limits.rows is not None:
        ranges = not_empty(_within_rows(cluster, queues, ranges, limits.rows))
    if limits.bytes is not None and ranges:
        ranges = not_empty(_within_bytes(cluster, queues, ranges, limits.bytes))
    return ranges


def message_count(parts: Iterable[Item]) -> int:
    """The number of messages: less than the difference of offsets, where those jump."""
    return sum(part.message_count for part in parts)


def _within_seconds(cluster: Cluster, queues: Queues, ranges: Ranges, seconds: int) -> Ranges:
    """The messages stored within ``seconds`` of the oldest one."""
    asked = {queue: queues[queue] for queue in ranges}
    parts = cluster.parts(ranges, queues)
    times = cluster.store_times({queue: some[0].start for queue, some in parts.items()}, asked)
    if not times:
        return ranges
    after = cluster.offsets_at(asked, min(times.values()) + seconds * 1000)
    return {
        queue: Range(start, min(end, max(start, after[queue])))
        for queue, (start, end) in ranges.items()
    }


def _within_rows(cluster: Cluster, queues: Queues, ranges: Ranges, rows: int) -> Ranges:
    parts = cluster.parts(ranges, queues)
    shares = shared(rows, {queue: message_count(some) for queue, some in parts.items()})
    return {
        queue: Range(each.start, _end_after(shares[queue], parts[queue], each))
        for queue, each in ranges.items()
    }


def _end_after(count: int, parts: Iterable[Item], each: Range) -> int:
    """The end of the first ``count`` messages of a range."""
    end = each.start
    for part in parts:
        if count <= 0:
            return end
        end = part.start + min(count, part.message_count)
        count -= part.message_count
    return each.end if count == 0 else end


def shared(total: int, wanted: dict[Key, int]) -> dict[Key, int]:
    """``total`` divided in proportion to ``wanted``; shares of zero are rounded up first."""
    whole = sum(wanted.values())
    if whole <= total:
        return wanted
    shares = {key: count * total // whole for key, count in wanted.items()}
    rest = total - sum(shares.values())
    neediest = sorted(wanted, key=lambda key: (shares[key] > 0, -(wanted[key] * total % whole)))
    for key in neediest[:rest]:
        shares[key] += 1
    return shares


def _within_bytes(cluster: Cluster, queues: Queues, ranges: Ranges, bytes_max: int) -> Ranges:
    parts = cluster.parts(ranges, queues)
    filled = [part for some in parts.values() for part in some if part.message_count]
    by_queue = size_curves(cluster, filled, bytes_max)
    curves = {
        queue: joined([by_queue[part.physical] for part in some if part.message_count])
        for queue, some in parts.items()
    }
    whole = sum(curve.total_bytes for curve in curves.values())
    if whole <= bytes_max:
        return ranges
    share = bytes_max / whole
    shorter = {
        queue: Range(each.start, curves[queue].offset_at(curves[queue].total_bytes * share))
        for queue, each in ranges.items()
    }
    if all(each.start == each.end for each in shorter.values()):
        queue, each = next(iter(ranges.items()))
        return {queue: Range(each.start, _end_after(1, parts[queue], each))}
    return shorter
