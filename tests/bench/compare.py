"""headrace beside Apache RocketMQ, driven by the same official Java client.

Each round starts one peer, warms it up, measures every case and stops it; then the other's turn.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench import regression
from tests.bench.bars import COMPARE, bars_table
from tests.bench.driver import Report
from tests.bench.load import SENDS, Load, loaded, say
from tests.bench.options import option_parser, parse
from tests.bench.processes import idle_cpu_percent, resident_mb
from tests.bench.results import keep, stamp
from tests.bench.table import COLUMNS, case_table, heading, tables

BODY_BYTES = (100, 1024)
IDLE_S = 3.0
DRAINS: dict[str, dict[str, Any]] = {
    "drain-lite": {"work": "drain_lite"},
    "drain-push": {"work": "drain_push"},
}
# The same to and from topics with queue.type=BatchCQ.
INNER_SENDS: dict[str, dict[str, Any]] = {"inner-batch-100": SENDS["batch-100"]}
INNER_DRAINS: dict[str, dict[str, Any]] = {"drain-inner": DRAINS["drain-lite"]}
DAEMON_COLUMNS = (
    ("first_send_s", "start to first accepted send, s", 1, 2),
    ("started_mb", "resident memory after the start, MB", 1, 0),
    ("loaded_mb", "resident memory after the load, less mapped files, MB", 1, 0),
    ("idle_cpu_percent", "idle CPU after the load, % of a core", 1, 1),
)


def case_name(name: str, body_bytes: int) -> str:
    return f"{name} {body_bytes} B"


NAMES = (*SENDS, *INNER_SENDS, *DRAINS, *INNER_DRAINS)
CASES = [case_name(name, size) for name in NAMES for size in BODY_BYTES]


@dataclass(frozen=True)
class Length:
    """The length of a run."""

    rounds: int
    repeats: int
    warm_up_s: float
    seconds: float
    drain_messages: int


FULL = Length(rounds=3, repeats=1, warm_up_s=5, seconds=3, drain_messages=1_000_000)
SHORT = Length(rounds=1, repeats=2, warm_up_s=3, seconds=1, drain_messages=100_000)


@dataclass
class Round:
    """One peer, from its start to its end: warmed up, then every case in turn."""

    load: Load
    length: Length
    only: Collection[str]
    reports: dict[str, list[Report]] = field(default_factory=dict)

    def run(self) -> None:
        peer = self.load.peer
        time.sleep(IDLE_S)
        started_mb = resident_mb(peer.pids)
        self.warm_up()
        self.fill()
        for number in range(self.length.repeats):
            for body_bytes in BODY_BYTES:
                self.sends(SENDS, f"SENDS_{body_bytes}", body_bytes)
                self.sends(INNER_SENDS, f"INNER_SENDS_{body_bytes}", body_bytes)
                self.drains(DRAINS, f"DRAIN_{body_bytes}", body_bytes, number)
                self.drains(INNER_DRAINS, f"INNER_DRAIN_{body_bytes}", body_bytes, number)
        self.load.job({"work": "close"})
        daemons = {
            "first_send_s": self.load.first_send_s,
            "started_mb": started_mb,
            "loaded_mb": resident_mb(peer.pids, mapped_files=False),
            "idle_cpu_percent": idle_cpu_percent(peer, IDLE_S),
        }
        self.reports.setdefault("daemons", []).append(daemons)

    def warm_up(self) -> None:
        self.load.warm_up(self.length.warm_up_s, BODY_BYTES[-1])
        messages = self.length.drain_messages // 10
        for work in ({"work": "fill"}, *DRAINS.values()):
            self.load.job(work, "WARM_UP_DRAIN", BODY_BYTES[-1], messages=messages)

    def chosen(self, cases: dict[str, Any]) -> list[str]:
        return [name for name in cases if name in self.only]

    def sends(self, cases: dict[str, Any], topic: str, body_bytes: int) -> None:
        for name in self.chosen(cases):
            report = self.load.job(cases[name], topic, body_bytes, seconds=self.length.seconds)
            self.add(name, body_bytes, report)

    def fill(self) -> None:
        inner = {*self.chosen(INNER_SENDS), *self.chosen(INNER_DRAINS)}
        for body_bytes in BODY_BYTES:
            if inner:
                self.load.create_batched(f"INNER_SENDS_{body_bytes}", f"INNER_DRAIN_{body_bytes}")
            for cases, topic in ((DRAINS, "DRAIN"), (INNER_DRAINS, "INNER_DRAIN")):
                if self.chosen(cases):
                    self.drain_job({"work": "fill"}, f"{topic}_{body_bytes}", body_bytes)

    def drains(self, cases: dict[str, Any], topic: str, body_bytes: int, number: int) -> None:
        for name in self.chosen(cases):
            fresh = {**cases[name], "group": f"{name}_{body_bytes}_{number}"}
            self.add(name, body_bytes, self.drain_job(fresh, topic, body_bytes))

    def drain_job(self, work: dict[str, Any], topic: str, body_bytes: int) -> Report:
        return self.load.job(work, topic, body_bytes, messages=self.length.drain_messages)

    def add(self, name: str, body_bytes: int, report: Report) -> None:
        case = case_name(name, body_bytes)
        self.reports.setdefault(case, []).append(report)
        say(
            f"{self.load.peer.name:9} {case:18} {report['rate']:>10,.0f}/s  "
            f"broker {report['broker_cpu_us']:6.2f} µs  errors {report['errors']}"
        )


def compare(
    peers: list[str], length: Length, only: Collection[str], directory: Path
) -> dict[str, Any]:
    """All figures: a report for each round, by peer and case."""
    reports: dict[str, dict[str, list[Report]]] = {name: {} for name in peers}
    for number in range(length.rounds):
        for name in peers:
            say(f"round {number + 1} of {length.rounds}: {name}")
            with loaded(name, directory) as load:
                Round(load, length, only, reports[name]).run()
    rounds = length.rounds * length.repeats
    return {**stamp(), "rounds": rounds, "seconds": length.seconds, "peers": reports}


def markdown(results: dict[str, Any]) -> str:
    """The tables of the document."""
    parts = [
        heading(results),
        bars_table(COMPARE, results["peers"]),
        tables(results, CASES, COLUMNS),
        case_table(results, "daemons", DAEMON_COLUMNS),
    ]
    return "\n".join(filter(None, parts))


def main(options: list[str]) -> None:
    parser = option_parser("compare", __doc__, list(NAMES))
    parser.add_argument(
        "--short", action="store_true", help="under 3 minutes; says what moved since the kept run"
    )
    chosen = parse(parser, options)
    if chosen.short and chosen.keep:
        parser.error("--keep is for full runs, which short ones are compared with")
    only = chosen.only or NAMES
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as directory:
        results = compare(chosen.peers, SHORT if chosen.short else FULL, only, Path(directory))
    table = markdown(results)
    sys.stdout.write(table)
    if chosen.keep:
        keep("compare", results, table)
    elif chosen.short:
        sys.stdout.write(regression.report(results))
