"""How far a trigger of a stream goes, when it must not read all there is."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from headrace.spark.plan.ranges import Range, not_empty
from headrace.spark.plan.splits import size_curves

if TYPE_CHECKING:
    from headrace.spark.cluster import Cluster, Queues
    from headrace.spark.options import Limits
    from headrace.spark.plan.ranges import Ranges

Key = TypeVar("Key")


def limited(cluster: Cluster, queues: Queues, ranges: Ranges, limits: Limits) -> Ranges:
    """The beginnings of ``ranges`` that are within ``limits``; some message if there is any.

    Queues get shares of what they have, so that all come to their ends together: one that ran
    ahead in time would make the others' messages late.
    """
    ranges = not_empty(ranges)
    if limits.seconds is not None and ranges:
        ranges = not_empty(_within_seconds(cluster, queues, ranges, limits.seconds))
    if limits.rows is not None:
        ranges = not_empty(_within_rows(ranges, limits.rows))
    if limits.bytes is not None and ranges:
        ranges = not_empty(_within_bytes(cluster, queues, ranges, limits.bytes))
    return ranges


def _within_seconds(cluster: Cluster, queues: Queues, ranges: Ranges, seconds: int) -> Ranges:
    """Up to so many seconds after the oldest message was stored."""
    places = {queue: queues[queue] for queue in ranges}
    times = cluster.store_times({queue: each.start for queue, each in ranges.items()}, places)
    if not times:
        return ranges
    after = cluster.offsets_at(places, min(times.values()) + seconds * 1000)
    return {
        queue: Range(start, min(end, max(start, after[queue])))
        for queue, (start, end) in ranges.items()
    }


def _within_rows(ranges: Ranges, rows: int) -> Ranges:
    shares = shared(rows, {queue: end - start for queue, (start, end) in ranges.items()})
    return {queue: Range(each.start, each.start + shares[queue]) for queue, each in ranges.items()}


def shared(total: int, wanted: dict[Key, int]) -> dict[Key, int]:
    """``total`` in proportion to what is wanted; those that would get nothing round up first."""
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
    curves = size_curves(cluster, queues, ranges, bytes_max)
    whole = sum(curve.total_bytes for curve in curves.values())
    if whole <= bytes_max:
        return ranges
    part = bytes_max / whole
    shorter = {
        queue: Range(each.start, curves[queue].offset_at(curves[queue].total_bytes * part))
        for queue, each in ranges.items()
    }
    if all(each.start == each.end for each in shorter.values()):
        queue, each = next(iter(ranges.items()))
        return {queue: Range(each.start, each.start + 1)}
    return shorter
