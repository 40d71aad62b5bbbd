"""Latency histograms that cost a turn of the loop less than a microsecond."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

# Upper bounds in seconds: a lone send takes some 100 µs, a flush of a slow disk a second.
LATENCY_BOUNDS_S: Final = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)


class Histogram:
    """Counts of values by bucket.

    bounds: upper bounds of the buckets, both ascending and inclusive; one more bucket has the rest.
    counts: by bucket, not cumulative. total: the sum of all values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BOUNDS_S) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Count ``count`` occurrences of one value."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count
