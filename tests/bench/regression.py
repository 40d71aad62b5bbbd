"""A short run beside the last full one that was kept.

Absolute figures differ from machine to machine, so the ratios to the peer of the same run are
compared, each with the spread that its rounds allow.
"""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

from tests.bench.results import kept
from tests.bench.table import OURS, THEIRS

# Key, title, whether more is better.
COMPARED = (
    ("rate", "rate", True),
    ("broker_cpu_us", "broker CPU", False),
    ("p99_us", "p99", False),
)
# A short run is colder and has few rounds: less than this beyond the spreads says nothing.
MARGIN = 1.1


class Ratio(NamedTuple):
    """headrace ÷ Apache RocketMQ: of the medians, and the least and most of any two rounds."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, ours: list[float], theirs: list[float]) -> Ratio:
        return cls(
            statistics.median(ours) / statistics.median(theirs),
            min(ours) / max(theirs),
            max(ours) / min(theirs),
        )

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratios(results: dict[str, Any]) -> dict[tuple[str, str], Ratio]:
    """By case and key; what one of the two has not is left out."""
    ours, theirs = (results["peers"].get(name, {}) for name in (OURS, THEIRS))
    found = {}
    for case in ours.keys() & theirs.keys():
        for key, _, _ in COMPARED:
            series = [
                [report[key] for report in reports if report.get(key)]
                for reports in (ours[case], theirs[case])
            ]
            if all(series):
                found[case, key] = Ratio.of(*series)
    return found


def moved(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """A line for each figure whose two spreads, and a margin, do not touch."""
    old, new = ratios(before), ratios(now)
    lines = []
    for key, title, more_is_better in COMPARED:
        for case in sorted(case for case, other in old.keys() & new.keys() if other == key):
            was, is_now = old[case, key], new[case, key]
            grew, shrank = is_now.low > was.high * MARGIN, is_now.high * MARGIN < was.low
            if grew or shrank:
                word = "better" if grew == more_is_better else "WORSE"
                lines.append(f"{word:6}  {case:18} {title:10}  {was}  ->  {is_now}")
    return lines


def report(now: dict[str, Any]) -> str:
    """The text for the developer."""
    before = kept("compare")
    if before is None:
        return "\nNothing to compare with: no full run was kept (make bench BENCH=--keep).\n"
    compared = len(ratios(before).keys() & ratios(now).keys())
    if not compared:
        return "\nNothing to compare: ratios need both peers, here and in the kept run.\n"
    lines = moved(now, before)
    found = "\n".join(lines) or "nothing moved beyond its spread"
    return f"\nRatios to the peer, {compared} compared with {before['date']}:\n{found}\n"
