"""Samples in Prometheus' text format. The only module that imports prometheus_client."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.samples import Sample

from headrace_daemon.metrics.samples import HistogramValue

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from headrace_daemon.metrics.samples import Metric, Samples

# Half a millisecond of encoding, after which the daemon's loop gets the interpreter.
_SAMPLES_AT_ONCE = 64
_PAUSE_S = 0.0001


class Encoder:
    """Encodes samples, with those of the process added.

    labels: of every sample but those of the process.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._process = ProcessCollector(registry=None)

    def encode(self, samples: Samples) -> bytes:
        """The page; called in a thread."""
        return generate_latest(_Families([*self._families(samples), *self._process.collect()]))

    def _families(self, samples: Samples) -> Iterator[Family]:
        for metric, values in samples.values.items():
            name = metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name
            family = Family(name, metric.meaning, metric.kind)
            # An iterator where the type wants a list: the samples are made, and encoded, with
            # breaks.
            lazy: Any = _with_breaks(self._samples(metric, values))
            family.samples = lazy
            yield family

    def _samples(self, metric: Metric, values: list[Any]) -> Iterator[Sample]:
        for label_values, value in values:
            labels = self._labels | dict(zip(metric.labels, label_values, strict=True))
            if isinstance(value, HistogramValue):
                yield from _histogram_samples(metric.name, labels, value)
            else:
                yield Sample(metric.name, labels, value)


class _Families(list[Family]):
    """A registry for ``generate_latest``."""

    def collect(self) -> Iterator[Family]:
        return iter(self)


def _histogram_samples(
    name: str, labels: dict[str, str], value: HistogramValue
) -> Iterator[Sample]:
    count = 0
    for bound, in_bucket in zip((*value.bounds, math.inf), value.counts, strict=True):
        count += in_bucket
        yield Sample(f"{name}_bucket", labels | {"le": _bound_text(bound)}, count)
    yield Sample(f"{name}_count", labels, count)
    yield Sample(f"{name}_sum", labels, value.total)


def _bound_text(bound: float) -> str:
    return "+Inf" if bound == math.inf else str(bound)


def _with_breaks(samples: Iterator[Sample]) -> Iterator[Sample]:
    """The samples; without the breaks the loop would wait 5 ms for the interpreter each time."""
    for number, sample in enumerate(samples, 1):
        if not number % _SAMPLES_AT_ONCE:
            time.sleep(_PAUSE_S)
        yield sample
