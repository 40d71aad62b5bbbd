"""The samples of one scrape: values by metric, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from headrace_protocol.errors import NotReady

if TYPE_CHECKING:
    from headrace_daemon.metrics.histogram import Histogram

Result = TypeVar("Result")
Missing = TypeVar("Missing")

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

    may_wait: whether a collector may await a read that must wait for the disk; once it is False, a
    value that needs one is left out.
    """

    def __init__(self) -> None:
        self.values: dict[Metric, list[tuple[Labels, Value]]] = {}
        self.may_wait = True

    async def read(self, read: Callable[[], Result], missing: Missing) -> Result | Missing:
        """The result of a read; ``missing`` if it must wait, and there is no time for the disk."""
        while True:
            try:
                return read()
            except NotReady as away:
                if not self.may_wait:
                    return missing
                await away

    def add(self, metric: Metric, value: float, *labels: str) -> None:
        """Add one value. labels: as many as the metric's row names."""
        assert len(labels) == len(metric.labels), metric.name
        self.values.setdefault(metric, []).append((labels, value))

    def add_histogram(self, metric: Metric, histogram: Histogram, *labels: str) -> None:
        """Add a histogram as it is now. labels: as many as the metric's row names."""
        assert len(labels) == len(metric.labels), metric.name
        value = HistogramValue(histogram.bounds, tuple(histogram.counts), histogram.total)
        self.values.setdefault(metric, []).append((labels, value))


# Adds samples in the daemon's loop; awaits breaks and reads that must wait for the disk.
Collect = Callable[[Samples], Coroutine[NotReady | None, Any, None]]
