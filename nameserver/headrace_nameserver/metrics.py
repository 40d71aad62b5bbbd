"""The metrics of a nameserver, besides those of both daemons."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_daemon.metrics.samples import Metric
from headrace_protocol.waiting import take_break

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_daemon.metrics.samples import Samples
    from headrace_nameserver.routes import RouteTable

BROKERS = Metric("headrace_registered_brokers", "gauge", "Registered addresses of brokers")
TOPICS = Metric(
    "headrace_registered_topics", "gauge", "Topics, counted once for each broker that has them"
)
LOST_BROKERS = Metric(
    "headrace_lost_brokers_total", "counter", "Addresses of brokers that left or were dropped"
)
DEPARTED_BROKERS = Metric(
    "headrace_departed_brokers",
    "gauge",
    "Brokers that left, and whose topics are therefore incomplete",
)
SILENCE = Metric(
    "headrace_broker_silence_seconds",
    "gauge",
    "Time since a broker was last heard",
    ("broker_cluster", "broker", "address"),
)

NAMESERVER_METRICS = (BROKERS, TOPICS, LOST_BROKERS, DEPARTED_BROKERS, SILENCE)


class NameServerMetrics:
    """Collects ``NAMESERVER_METRICS``. now_ms: the clock of the table."""

    def __init__(self, table: RouteTable, now_ms: Callable[[], int]) -> None:
        self._table = table
        self._now_ms = now_ms

    async def __call__(self, samples: Samples) -> None:
        """See ``Collect``."""
        live, now_ms = self._table.live(), self._now_ms()
        samples.add(BROKERS, len(live))
        samples.add(TOPICS, self._table.topic_count)
        samples.add(LOST_BROKERS, self._table.lost_count)
        samples.add(DEPARTED_BROKERS, len(self._table.departed))
        await take_break()
        for broker in live:
            silence_s = max(now_ms - broker.last_heard_ms, 0) / 1000
            samples.add(SILENCE, silence_s, broker.cluster, broker.name, broker.address)
            await take_break()
