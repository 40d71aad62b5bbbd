"""headrace beside Apache RocketMQ, driven by the same official Java client.

    python -m tests.bench.compare [--short] [--only sync-32 ...] [--json FILE] [--markdown FILE]

Each round starts one peer, warms it up, measures every case and stops it; then the other's turn.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.driver import Driver, Report
from tests.bench.table import markdown, replace_table
from tests.conformance.peer import STARTERS, Peer, PeerError, running
from tests.conformance.probe import wait_for_send

BODY_BYTES = (100, 1024)
IDLE_S = 3.0
FIRST_SEND_TIMEOUT_S = 60
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Length:
    """How long a run is."""

    rounds: int
    repeats: int
    warm_up_s: float
    seconds: float
    drain_messages: int


FULL = Length(rounds=3, repeats=1, warm_up_s=5, seconds=4, drain_messages=1_000_000)
SHORT = Length(rounds=1, repeats=2, warm_up_s=3, seconds=1, drain_messages=100_000)

SENDS: dict[str, dict[str, Any]] = {
    "sync-1": {"work": "sync", "threads": 1},
    "sync-32": {"work": "sync", "threads": 32},
    "async-1000": {"work": "async", "inFlight": 1000},
    "batch-100": {"work": "batch", "threads": 1},
}
DRAINS: dict[str, dict[str, Any]] = {
    "drain-lite": {"work": "drain_lite"},
    "drain-push": {"work": "drain_push"},
}


@dataclass
class PeerResults:
    """Everything measured of one peer: a report for each round."""

    cases: dict[str, list[Report]] = field(default_factory=dict)
    daemons: list[Report] = field(default_factory=list)

    def add(self, case: str, report: Report) -> None:
        self.cases.setdefault(case, []).append(report)


@dataclass
class Round:
    """One peer, from its start to its end: warmed up, then every case in turn."""

    peer: Peer
    driver: Driver
    length: Length
    only: set[str]
    results: PeerResults

    def run(self) -> None:
        wait_for_send(self.peer.broker, FIRST_SEND_TIMEOUT_S)
        first_send_s = time.monotonic() - self.peer.started
        time.sleep(IDLE_S)
        started_mb = resident_mb(self.peer)
        self.load()
        self.results.daemons.append(
            {
                "first_send_s": first_send_s,
                "started_mb": started_mb,
                "loaded_mb": resident_mb(self.peer, mapped_files=False),
                "idle_cpu_percent": idle_cpu_percent(self.peer),
            }
        )

    def load(self) -> None:
        self.job({"work": "open"})
        self.warm_up()
        self.fill()
        for number in range(self.length.repeats):
            for body_bytes in BODY_BYTES:
                self.sends(body_bytes)
                self.drains(body_bytes, number)
        self.job({"work": "close"})

    def warm_up(self) -> None:
        for send in SENDS.values():
            self.job(send, "WARM_UP", BODY_BYTES[-1], seconds=self.length.warm_up_s)
        messages = self.length.drain_messages // 10
        self.job({"work": "fill"}, "WARM_UP_DRAIN", BODY_BYTES[-1], messages=messages)
        for drain in DRAINS.values():
            self.job(drain, "WARM_UP_DRAIN", BODY_BYTES[-1], messages=messages)

    def sends(self, body_bytes: int) -> None:
        for name, send in SENDS.items():
            if name in self.only:
                report = self.job(send, f"SENDS_{body_bytes}", body_bytes)
                self.keep(name, body_bytes, report)

    def fill(self) -> None:
        if self.only & DRAINS.keys():
            for body_bytes in BODY_BYTES:
                messages = self.length.drain_messages
                self.job({"work": "fill"}, f"DRAIN_{body_bytes}", body_bytes, messages=messages)

    def drains(self, body_bytes: int, number: int) -> None:
        for name, drain in DRAINS.items():
            if name in self.only:
                fresh = {**drain, "group": f"{name}_{body_bytes}_{number}"}
                messages = self.length.drain_messages
                report = self.job(fresh, f"DRAIN_{body_bytes}", body_bytes, messages=messages)
                self.keep(name, body_bytes, report)

    def job(
        self,
        work: dict[str, Any],
        topic: str = "",
        body_bytes: int = 0,
        *,
        messages: int = 0,
        seconds: float | None = None,
    ) -> Report:
        return self.driver.run(
            {
                "nameserver": self.peer.nameserver,
                "topic": topic,
                "group": f"{work['work']}_{topic}",
                "bodyBytes": body_bytes,
                "seconds": self.length.seconds if seconds is None else seconds,
                "messages": messages,
                "brokerPid": self.peer.broker_pid,
                **work,
            }
        )

    def keep(self, name: str, body_bytes: int, report: Report) -> None:
        case = case_name(name, body_bytes)
        self.results.add(case, report)
        say(
            f"{self.peer.name:9} {case:18} {report['rate']:>10,.0f}/s  "
            f"broker {report['broker_cpu_us']:6.2f} µs  errors {report['errors']}"
        )


def case_name(name: str, body_bytes: int) -> str:
    return f"{name} {body_bytes} B"


def idle_cpu_percent(peer: Peer) -> float:
    """CPU of a peer that nobody uses any more, as a share of one core."""
    before = cpu_s(peer)
    time.sleep(IDLE_S)
    return (cpu_s(peer) - before) / IDLE_S * 100


def cpu_s(peer: Peer) -> float:
    return sum(_cpu_ticks(pid) for pid in peer.pids) / CLOCK_TICKS


def _cpu_ticks(pid: int) -> int:
    # The name in parentheses may hold blanks, so count the fields from behind it.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def resident_mb(peer: Peer, *, mapped_files: bool = True) -> float:
    """Resident memory of all daemons; a store's mapped files are page cache, so may be left out."""
    kib = 0
    for pid in peer.pids:
        values = _process_status(pid)
        kib += values["VmRSS"] if mapped_files else values["VmRSS"] - values["RssFile"]
    return kib * 1024 / 1e6


def _process_status(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines if line.endswith("kB"))
    return {key: int(value.split()[0]) for key, value in pairs}


def compare(peers: list[str], length: Length, only: set[str], directory: Path) -> dict[str, Any]:
    results = {name: PeerResults() for name in peers}
    for number in range(length.rounds):
        for name in peers:
            say(f"round {number + 1} of {length.rounds}: {name}")
            # A new driver for each, so that none finds its client warmed up by the other.
            with Driver(directory) as driver, running(name, directory) as peer:
                Round(peer, driver, length, only, results[name]).run()
    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}",
        "rounds": length.rounds * length.repeats,
        "seconds": length.seconds,
        "cases": [
            case_name(name, body_bytes)
            for name in (*SENDS, *DRAINS)
            for body_bytes in BODY_BYTES
            if name in only
        ],
        "peers": {
            name: {"cases": result.cases, "daemons": result.daemons}
            for name, result in results.items()
        },
    }


def say(line: str) -> None:
    sys.stderr.write(line + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--short", action="store_true", help="under 3 minutes, wider spread")
    parser.add_argument("--only", nargs="+", choices=[*SENDS, *DRAINS], metavar="CASE")
    parser.add_argument(
        "--peers", nargs="+", choices=sorted(STARTERS), default=["apache", "headrace"]
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="put the table in a document")
    return parser.parse_args()


def main() -> None:
    chosen = arguments()
    length = SHORT if chosen.short else FULL
    only = set(chosen.only or [*SENDS, *DRAINS])
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as directory:
        try:
            results = compare(chosen.peers, length, only, Path(directory))
        except PeerError as problem:
            sys.exit(str(problem))
    table = markdown(results)
    sys.stdout.write(table)
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=1) + "\n")
    if chosen.markdown:
        replace_table(chosen.markdown, table)


if __name__ == "__main__":
    main()
