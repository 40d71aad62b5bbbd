"""Totals of compaction and static topics since the start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.metrics import table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace_broker.compaction.metrics import RunTotals
    from headrace_broker.static_topics import StaticTopics
    from headrace_daemon.metrics.samples import Samples
    from headrace_protocol.errors import NotReady


class CompactionMetrics:
    """Collects the sums over all runs."""

    def __init__(self, totals: RunTotals) -> None:
        self._totals = totals

    def __call__(self, samples: Samples) -> Iterator[NotReady | None]:
        """See ``Collect``."""
        totals = self._totals
        samples.add(table.COMPACTION_RUNS, totals.run_count)
        samples.add(table.COMPACTION_FAILURES, totals.failure_count)
        samples.add(table.COMPACTION_SECONDS, totals.run_s)
        samples.add(table.COMPACTION_DROPPED, totals.dropped_count)
        samples.add(table.COMPACTION_WRITTEN, totals.bytes_written)
        yield None


class StaticTopicMetrics:
    """Collects what this broker leads, and what it asks of others."""

    def __init__(self, static: StaticTopics) -> None:
        self._static = static

    def __call__(self, samples: Samples) -> Iterator[NotReady | None]:
        """See ``Collect``."""
        static = self._static
        samples.add(table.STATIC_LED, static.mappings.led_count())
        samples.add(table.STATIC_READS, static.relay.relayed_count)
        samples.add(table.STATIC_BYTES, static.relay.relayed_bytes)
        samples.add(table.STATIC_FORWARDED, static.forwarding.forwarded_count)
        yield None
