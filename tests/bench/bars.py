"""What headrace has to reach beside Apache RocketMQ, case by case."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace_daemon.serving.server import ServerLimits
from tests.bench.static_beside import BESIDE
from tests.bench.table import OURS, THEIRS, rows_as_table

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    "p99_ratio": "p99 with ÷ without it",
    "timer_bytes": "memory of a waiting timer, bytes",
    "memory_mb": "broker's memory beside it, MB",
    "stall_cpu_ms": "longest pause, ms of its own work",
    "first_send_s": "start to first accepted send, ratio",
    "rate_ratio": "rate, ratio, beside the same ratio on Apache's",
    "cpu_ratio": "broker CPU, ratio",
    "relay_serving_ratio": "CPU of the relaying ÷ of the serving broker",
    "more_mb": "more resident memory, MB",
    "more_start_s": "longer start, s",
    "change_ms": "a change on disk, ms",
    "long_steps": "steps of the loop over 20 ms in ten changes",
    "remap_s": "s",
    "failed": "failed sends",
    "remap_p99_ms": "p99 of sends due during a remap, ms",
    "silent_s": "longest time of a queue without acknowledgement, s",
    "latest_s": "latest message read, s after it was due",
    "read_ratio": "bytes read ÷ matching messages and all units",
    "behind_s": "oldest message to be uploaded, s",
    "idle_requests": "requests in an idle minute",
}
# Of bars on headrace's own figure, where the words above speak of a ratio.
OWN_TITLES = {
    "p99_us": "p99, µs",
    "first_send_s": "start to first accepted send, s",
    "rate_ratio": "rate, ratio",
}


def _bars(case: str, sizes: tuple[str, ...] = SIZES, **limits: float) -> list[Bar]:
    return [Bar(f"{case} {size}", key, limit) for key, limit in limits.items() for size in sizes]


COMPARE = (
    *_bars("sync-1", rate=1.1, broker_cpu_us=-0.5, p99_us=-0.7),
    *_bars("sync-32", rate=1.5, broker_cpu_us=-0.5, p99_us=-0.7),
    *_bars("async-1000", rate=1.8, broker_cpu_us=-0.45),
    *_bars("batch-100", ("100 B",), rate=1.4, broker_cpu_us=-0.5),
    *_bars("batch-100", ("1024 B",), rate=2.5, broker_cpu_us=-0.5),
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
BUDGET_MB = ServerLimits().total_bytes_max / 1e6
ABUSE = tuple(
    Bar(offender, key, limit, is_ratio=False)
    for key, limit in (("p99_ratio", -2), ("memory_mb", -BUDGET_MB))
    for offender in ("slow reader", "half frames", "silent connections", "flood")
)
COLD = (Bar("cold reader", "p99_ratio", -2, is_ratio=False),)
STORE = (
    Bar("crash", "first_send_s", -0.5),
    Bar("clean restart", "first_send_s", -0.5),
    *_bars("sync flush, sync-32", rate=1.0),
    *_bars("sync flush, async-1000", rate=1.0),
    Bar("sync flush, paced 50 %", "p99_us", -1.0),
)
WAITING = (
    Bar("level 1 at 10,000/s", "p99_us", -100_000, is_ratio=False),
    Bar("delay level 1", "rate", 1.0),
    Bar("timer of 2 s", "rate", 1.0),
    Bar("transactions", "rate", 1.0),
    Bar("send-back", "rate", 1.0),
    Bar("with what waits", "p99_ratio", -1.1, is_ratio=False),
    Bar("with what waits", "timer_bytes", -100, is_ratio=False),
    Bar("with what waits", "first_send_s", -5, is_ratio=False),
)
STATIC = (
    *(
        Bar(case, key, limit, is_ratio=False)
        for key, limit in (("rate_ratio", 0.98), ("cpu_ratio", -1.02))
        for case in BESIDE
    ),
    *(
        Bar(f"{work} on the leader", key, limit, is_ratio=False)
        for work in ("sends", "pulls")
        for key, limit in (("rate_ratio", 0.95), ("cpu_ratio", -1.05))
    ),
    Bar("items on another broker", "rate_ratio", 0.7, is_ratio=False),
    Bar("items on another broker", "rate_ratio", 1.0),
    Bar("items on another broker", "relay_serving_ratio", -0.7, is_ratio=False),
    *(
        Bar(f"5,000 items: {work}", "rate_ratio", 0.95, is_ratio=False)
        for work in ("sends", "pulls of the leader", "pulls of the first item")
    ),
    Bar("64,000 items", "more_mb", -30, is_ratio=False),
    Bar("64,000 items", "more_start_s", -1, is_ratio=False),
    Bar("64,000 items", "change_ms", -300, is_ratio=False),
    Bar("64,000 items", "long_steps", 0, is_ratio=False),
    Bar("remap of 64 queues", "remap_s", -2, is_ratio=False),
    *(
        Bar(f"remaps under load, {mode}", key, limit, is_ratio=False)
        for mode in ("strict", "available")
        for key, limit in (
            ("failed", 0),
            ("remap_p99_ms", -200),
            ("silent_s", -1),
            ("latest_s", -1),
        )
    ),
)
TIER = (
    *(
        Bar(f"{work}, {place}", "rate_ratio", 0.7, is_ratio=False)
        for work in ("upload", "bulk pull")
        for place in ("folder", "S3")
    ),
    Bar("one tag of 100", "read_ratio", -1.5, is_ratio=False),
    Bar("one tag of 100", "rate_ratio", 1.0, is_ratio=False),
    Bar("Java client, folder", "rate_ratio", 5, is_ratio=False),
    *(
        Bar(case, "p99_ratio", -1.2, is_ratio=False)
        for case in ("sends beside uploads", "sends beside 4 readers", "sends, store hangs")
    ),
    Bar("upload at half of the peak", "behind_s", -2, is_ratio=False),
    Bar("an idle broker", "more_mb", -15, is_ratio=False),
    Bar("requests for 1 GiB", "idle_requests", 0, is_ratio=False),
)


class Verdict(NamedTuple):
    """How a case stands to its bar."""

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


def _title(bar: Bar) -> str:
    return TITLES[bar.key] if bar.is_ratio else OWN_TITLES.get(bar.key, TITLES[bar.key])


def bars_table(bars: tuple[Bar, ...], peers: dict[str, Any]) -> str:
    """Empty when nothing that has a bar was measured."""
    rows = [
        [bar.case, _title(bar), str(bar), f"{value:.2f}", "met" if is_met else "**missed**"]
        for bar, value, is_met in (
            (verdict.bar, verdict.value, verdict.is_met) for verdict in verdicts(bars, peers)
        )
    ]
    return rows_as_table(["bar", "of", "wanted", "measured", ""], rows) if rows else ""
