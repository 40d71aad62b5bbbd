"""Counts of static topics for the metrics page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.metrics import table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace_broker.statictopic.traffic import StaticTraffic
    from headrace_daemon.metrics.samples import Samples
    from headrace_protocol.errors import NotReady


class StaticTopicMetrics:
    """Collects the counts."""

    def __init__(self, traffic: StaticTraffic) -> None:
        self._traffic = traffic

    def __call__(self, samples: Samples) -> Iterator[NotReady | None]:
        """See ``Collect``."""
        traffic = self._traffic
        samples.add(table.STATIC_LED, traffic.mappings.led_count())
        samples.add(table.STATIC_READS, traffic.relay.relayed_count)
        samples.add(table.STATIC_BYTES, traffic.relay.relayed_bytes)
        samples.add(table.STATIC_FORWARDED, traffic.forwarding.forwarded_count)
        yield None
