"""The bars that headrace has to reach beside Apache RocketMQ, case by case."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.bench.table import OURS, THEIRS, rows_as_table

SIZES = ("100 B", "1024 B")


class Bar(NamedTuple):
    """A limit of one figure of one case.

    limit: at least this when positive, at most its absolute value when negative.
    is_ratio: of the medians, headrace ÷ Apache RocketMQ; else of headrace's median itself.
    """

    case: str
    key: str
    limit: float
    is_ratio: bool = True

    def is_met_by(self, value: float) -> bool:
        return value >= self.limit if self.limit > 0 else value <= -self.limit

    def __str__(self) -> str:
        return f"≥ {self.limit:g}" if self.limit > 0 else f"≤ {-self.limit:g}"


TITLES = {
    "rate": "messages/s, ratio",
    "broker_cpu_us": "broker CPU, ratio",
    "p50_us": "p50, ratio",
    "p99_us": "p99, ratio",
    "p999_us": "p99.9, ratio",
    "started_mb": "resident memory after the start, MB",
    "idle_cpu_percent": "idle CPU, % of a core",
    "p99_ratio": "p99 ÷ that without them",
    "stall_cpu_ms": "longest pause, ms of its own work",
    "first_send_s": "start to first accepted send, ratio",
}


def _bars(case: str, sizes: tuple[str, ...] = SIZES, **limits: float) -> list[Bar]:
    return [Bar(f"{case} {size}", key, limit) for key, limit in limits.items() for size in sizes]


COMPARE = (
    *_bars("sync-1", rate=1.1, broker_cpu_us=-0.5, p99_us=-0.7),
    *_bars("sync-32", rate=1.5, broker_cpu_us=-0.5, p99_us=-0.7),
    *_bars("async-1000", rate=1.8, broker_cpu_us=-0.45),
    *_bars("batch-100", ("100 B",), rate=1.4, broker_cpu_us=-0.5),
    *_bars("batch-100", ("1024 B",), rate=2.5, broker_cpu_us=-0.5),
    *_bars("inner-batch-100", rate=1.0),
    *_bars("drain-inner", rate=1.0),
    *_bars("drain-lite", rate=1.0, broker_cpu_us=-0.6),
    *_bars("drain-push", rate=1.0, broker_cpu_us=-0.6),
    Bar("daemons", "started_mb", -100, is_ratio=False),
    Bar("daemons", "idle_cpu_percent", -1, is_ratio=False),
)
LATENCY = (
    Bar("paced 50 %", "p99_us", -0.7),
    Bar("paced 50 %", "p999_us", -0.7),
    Bar("end to end 1,000/s", "p50_us", -0.7),
    Bar("end to end 1,000/s", "p99_us", -0.7),
    Bar("the broker's loop", "stall_cpu_ms", -20, is_ratio=False),
)
STORE = (
    Bar("crash", "first_send_s", -0.5),
    Bar("clean restart", "first_send_s", -0.5),
    *_bars("sync flush, sync-32", rate=1.0),
    *_bars("sync flush, async-1000", rate=1.0),
    Bar("sync flush, paced 50 %", "p99_us", -1.0),
)
FEATURES = (
    *(Bar(f"SQL92, {percent} % pass", "rate", 2.0) for percent in (100, 10, 1)),
    Bar("POP", "rate", 1.0),
    Bar("POP, 1,000/s", "p99_us", -1.0),
    Bar("POP, 1,000/s beside 100,000 out", "p99_ratio", -1.1, is_ratio=False),
    Bar("request-1", "p50_us", -1.0),
)


class Verdict(NamedTuple):
    """The figure of a case beside its bar."""

    bar: Bar
    value: float

    @property
    def is_met(self) -> bool:
        return self.bar.is_met_by(self.value)


def verdicts(bars: tuple[Bar, ...], peers: dict[str, Any]) -> Iterator[Verdict]:
    """For each bar whose case was measured. peers: reports of each round, by peer and case."""
    for bar in bars:
        wanted = (OURS, THEIRS) if bar.is_ratio else (OURS,)
        series = [
            [report[bar.key] for report in peers.get(name, {}).get(bar.case, ())] for name in wanted
        ]
        if all(series):
            medians = [statistics.median(values) for values in series]
            yield Verdict(bar, medians[0] / medians[1] if bar.is_ratio else medians[0])


def bars_table(bars: tuple[Bar, ...], peers: dict[str, Any]) -> str:
    """Empty when nothing that has a bar was measured."""
    rows = [
        [bar.case, TITLES[bar.key], str(bar), f"{value:.2f}", "met" if is_met else "**missed**"]
        for bar, value, is_met in (
            (verdict.bar, verdict.value, verdict.is_met) for verdict in verdicts(bars, peers)
        )
    ]
    return rows_as_table(["bar", "of", "wanted", "measured", ""], rows) if rows else ""
