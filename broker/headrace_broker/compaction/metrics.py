"""What runs have done since the start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace_broker.compaction.run import Result


@dataclass
class RunTotals:
    """Sums over all runs."""

    run_count: int = 0
    run_s: float = 0.0
    failure_count: int = 0
    dropped_count: int = 0
    bytes_written: int = 0

    def add(self, result: Result, seconds: float) -> None:
        """Count a finished run, which took so long."""
        self.run_count += 1
        self.run_s += seconds
        self.dropped_count += result.dropped_count
        self.bytes_written += result.bytes_written
