"""Counts of static topics for the metrics page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.metrics import table
from headrace_protocol.waiting import take_break

if TYPE_CHECKING:
    from headrace_broker.statictopic.traffic import StaticTraffic
    from headrace_daemon.metrics.samples import Samples


class StaticTopicMetrics:
    """Collects the counts."""

    def __init__(self, traffic: StaticTraffic) -> None:
        self._traffic = traffic

    async def __call__(self, samples: Samples) -> None:
        """See ``Collect``."""
        traffic = self._traffic
        samples.add(table.STATIC_LED, traffic.mappings.led_count())
        samples.add(table.STATIC_READS, traffic.remote.relayed_count)
        samples.add(table.STATIC_BYTES, traffic.remote.relayed_bytes)
        samples.add(table.STATIC_FORWARDED, traffic.forwarding.forwarded_count)
        await take_break()
