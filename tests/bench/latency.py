"""Latency under load: both peers at the same absolute rates, sent by a schedule.

The rates are shares of what Apache RocketMQ reaches asynchronously in the same run. A message's
latency counts from when it was due, so a pause shows in all messages that were due meanwhile.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from headrace.blocking import Admin
from tests.bench.bars import LATENCY, bars_table
from tests.bench.charts import draw_latency
from tests.bench.driver import Report
from tests.bench.load import SENDS, Load, loaded, say
from tests.bench.options import option_parser, parse
from tests.bench.results import keep, stamp
from tests.bench.table import OURS, heading, tables

SHARES = (10, 25, 50, 75, 90)
BODY_BYTES = 1024
END_TO_END = "end to end 1,000/s"
END_TO_END_RATE = 1000
PAUSES = "the broker's loop"
CASES = [*(f"paced {share} %" for share in SHARES), END_TO_END]
WARM_UP_S = 4
PEAK_S = 3
COLUMNS = (
    ("wanted_rate", "messages/s, due", 1, 0),
    ("rate", "messages/s, done", 1, 0),
    ("p50_us", "p50, ms", 1000, 2),
    ("p99_us", "p99, ms", 1000, 2),
    ("p999_us", "p99.9, ms", 1000, 2),
    ("max_us", "longest, ms", 1000, 2),
    ("broker_cpu_us", "broker CPU, µs/message", 1, 2),
)
PAUSE_COLUMNS = (
    ("stall_cpu_ms", "longest pause, ms of its own work", 1, 1),
    ("stall_ms", "longest pause, ms that passed", 1, 1),
    ("collection_ms", "longest garbage collection, ms", 1, 1),
)


def peak_rate(load: Load) -> float:
    """The rate that a peer reaches asynchronously, of which the loads are shares."""
    return load.job(SENDS["async-1000"], "PEAK", BODY_BYTES, seconds=PEAK_S)["rate"]


def sweep(
    load: Load, peak: float, seconds: float, number: int, reports: dict[str, list[Report]]
) -> None:
    """Every share of the peak, then the way through to a consumer."""
    cases = {f"paced {share} %": ("paced", peak * share / 100) for share in SHARES}
    cases[END_TO_END] = ("end_to_end", END_TO_END_RATE)
    for case, (work, rate) in cases.items():
        topic = f"PACED_{number}" if work == "paced" else f"END_TO_END_{number}"
        report = load.job({"work": work, "rate": rate}, topic, BODY_BYTES, seconds=seconds)
        report["wanted_rate"] = rate
        reports.setdefault(case, []).append(report)
        say(
            f"{load.peer.name:9} {case:18} {rate:>8,.0f}/s  p50 {report['p50_us'] / 1000:8.2f}  "
            f"p99 {report['p99_us'] / 1000:8.2f}  p99.9 {report['p999_us'] / 1000:8.2f} ms  "
            f"errors {report['errors']}"
        )


def pauses(load: Load) -> Report:
    """The pauses that the broker's watchdog has seen since its start."""
    with Admin(nameserver=load.peer.nameserver) as admin:
        told = admin.runtime_info(load.peer.broker)
    say(
        f"{load.peer.name:9} longest pause {told['longestLoopStallMs']} ms: it ran "
        f"{told['longestLoopStallRan']}"
    )
    return {
        "stall_ms": float(told["longestLoopStallMs"]),
        "stall_cpu_ms": float(told["longestLoopStallCpuMs"]),
        "collection_ms": float(told["longestGarbageCollectionMs"]),
    }


def measure(peers: list[str], rounds: int, seconds: float, directory: Path) -> dict[str, Any]:
    """All figures; the first peer's first peak sets the loads of everybody."""
    reports: dict[str, dict[str, list[Report]]] = {name: {} for name in peers}
    peak = 0.0
    for number in range(rounds):
        for name in peers:
            with loaded(name, directory) as load:
                load.warm_up(WARM_UP_S, BODY_BYTES)
                own_peak = peak_rate(load)
                peak = peak or own_peak
                say(f"round {number + 1} of {rounds}: {name}, peak {own_peak:,.0f}/s")
                sweep(load, peak, seconds, number, reports[name])
                if name == OURS:
                    reports[name].setdefault(PAUSES, []).append(pauses(load))
    return {**stamp(), "rounds": rounds, "seconds": seconds, "peak": peak, "peers": reports}


def markdown(results: dict[str, Any]) -> str:
    """The chart and the tables of the document."""
    parts = [
        heading(results),
        "![Latency against load](../charts/latency.png)\n",
        bars_table(LATENCY, results["peers"]),
        tables(results, CASES, COLUMNS),
        tables({"peers": {OURS: results["peers"].get(OURS, {})}}, [PAUSES], PAUSE_COLUMNS),
    ]
    return "\n".join(filter(None, parts))


def main(options: list[str]) -> None:
    parser = option_parser("latency", __doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5, help="of each load")
    chosen = parse(parser, options)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as directory:
        results = measure(chosen.peers, chosen.rounds, chosen.seconds, Path(directory))
    table = markdown(results)
    sys.stdout.write(table)
    if chosen.keep:
        keep("latency", results, table)
        draw_latency(results)
