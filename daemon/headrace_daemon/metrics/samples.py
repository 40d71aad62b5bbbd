"""What one scrape finds: values by metric, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from headrace_daemon.metrics.histogram import Histogram
    from headrace_protocol.errors import NotReady

Labels = tuple[str, ...]


class Metric(NamedTuple):
    """A row of a daemon's table of metrics.

    labels: names of the labels besides those that all metrics of the daemon have.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: Labels = ()


class HistogramValue(NamedTuple):
    """A copy of a histogram, so that a thread can encode it."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


Value = float | HistogramValue


class Samples:
    """Values by metric and label values.

    may_wait: whether a collector may yield a read that must wait for the disk; once it is False, a
    value that needs one is left out.
    """

    def __init__(self) -> None:
        self.values: dict[Metric, list[tuple[Labels, Value]]] = {}
        self.may_wait = True

    def add(self, metric: Metric, value: float, *labels: str) -> None:
        """Add one value. labels: as many as the metric's row names."""
        assert len(labels) == len(metric.labels), metric.name
        self.values.setdefault(metric, []).append((labels, value))

    def add_histogram(self, metric: Metric, histogram: Histogram, *labels: str) -> None:
        """Add a histogram as it is now. labels: as many as the metric's row names."""
        assert len(labels) == len(metric.labels), metric.name
        value = HistogramValue(histogram.bounds, tuple(histogram.counts), histogram.total)
        self.values.setdefault(metric, []).append((labels, value))


# Adds samples in the daemon's loop. Yields None where others may have a turn, and the error of a
# read that must wait for the disk, which is repeated after that.
Collect = Callable[[Samples], Iterator["NotReady | None"]]
