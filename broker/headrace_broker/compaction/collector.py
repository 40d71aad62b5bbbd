"""Totals of compaction since the start, for the metrics page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.metrics import table
from headrace_protocol.waiting import take_break

if TYPE_CHECKING:
    from headrace_broker.compaction.schedule import RunTotals
    from headrace_daemon.metrics.samples import Samples


class CompactionMetrics:
    """Collects the sums over all runs."""

    def __init__(self, totals: RunTotals) -> None:
        self._totals = totals

    async def __call__(self, samples: Samples) -> None:
        """See ``Collect``."""
        totals = self._totals
        samples.add(table.COMPACTION_RUNS, totals.run_count)
        samples.add(table.COMPACTION_FAILURES, totals.failure_count)
        samples.add(table.COMPACTION_SECONDS, totals.run_s)
        samples.add(table.COMPACTION_DROPPED, totals.dropped_count)
        samples.add(table.COMPACTION_WRITTEN, totals.bytes_written)
        await take_break()
