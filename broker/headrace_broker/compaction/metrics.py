"""What runs have done since the start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace_broker.compaction.run import Result


@dataclass
class RunTotals:
    """Sums over all runs. map_bytes_max: the largest map of a run."""

    run_count: int = 0
    run_s: float = 0.0
    failure_count: int = 0
    round_count: int = 0
    kept_count: int = 0
    dropped_count: int = 0
    key_count: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    map_bytes_max: int = 0

    def add(self, result: Result, seconds: float) -> None:
        """Count a finished run, which took so long."""
        self.run_count += 1
        self.run_s += seconds
        self.round_count += result.round_count
        self.kept_count += result.kept_count
        self.dropped_count += result.dropped_count
        self.key_count += result.key_count
        self.bytes_read += result.bytes_read
        self.bytes_written += result.bytes_written
        self.map_bytes_max = max(self.map_bytes_max, result.map_bytes)

    def runtime_info(self) -> dict[str, str]:
        """For GET_BROKER_RUNTIME_INFO."""
        return {
            "compactionRuns": str(self.run_count),
            "compactionRunMs": str(round(self.run_s * 1000)),
            "compactionFailures": str(self.failure_count),
            "compactionRounds": str(self.round_count),
            "compactionKept": str(self.kept_count),
            "compactionDropped": str(self.dropped_count),
            "compactionKeys": str(self.key_count),
            "compactionBytesRead": str(self.bytes_read),
            "compactionBytesWritten": str(self.bytes_written),
            "compactionMapBytesMax": str(self.map_bytes_max),
        }
