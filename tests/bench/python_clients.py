"""headrace's Python clients beside Kafka's Python clients, each on its broker.

In each round Kafka 4 and then headrace has its turn: one client process after the other sends or
reads. What is read is what the peer's best producer has written before.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tests.bench.clients.job import Job, Report
from tests.bench.kafka_peer import running_kafka
from tests.bench.load import say
from tests.bench.results import keep, stamp
from tests.bench.table import rows_as_table, spread
from tests.conformance.peer import Daemon, PeerError, running

BODY_BYTES = (100, 1024)
JOB_TIMEOUT_S = 300
# What fills the topic that all readers of a peer read, in the order of the table.
WORKS = {
    "kafka": (
        FILL_KAFKA := "confluent-produce",
        "aiokafka-send",
        "aiokafka-for",
        "confluent-consume",
    ),
    "headrace": (
        FILL_HEADRACE := "send-many-bytes",
        "pipeline",
        "async-for",
        "receive-columns",
        "receive-values",
    ),
}
FILLS = (FILL_KAFKA, FILL_HEADRACE)
READS = {"aiokafka-for", "confluent-consume", "async-for", "receive-columns", "receive-values"}
ONE_BY_ONE = {"aiokafka-send", "aiokafka-for", "pipeline", "async-for"}


@dataclass(frozen=True)
class Length:
    """The amounts sent and read: messages by size of the body, one by one and in bulk.

    fresh: whoever sends has a new broker, and its store goes with it. Gigabytes that wait for the
        disk would slow all but the first.
    """

    rounds: int
    one_by_one: dict[int, int]
    bulk: dict[int, int]
    fresh: bool

    def messages(self, work: str, body_bytes: int) -> int:
        return (self.one_by_one if work in ONE_BY_ONE else self.bulk)[body_bytes]


FULL = Length(
    rounds=3,
    one_by_one={100: 1_000_000, 1024: 400_000},
    bulk={100: 4_000_000, 1024: 1_200_000},
    fresh=True,
)
SHORT = Length(
    rounds=1,
    one_by_one={100: 100_000, 1024: 50_000},
    bulk={100: 600_000, 1024: 200_000},
    fresh=False,
)
WARM_UP_PART = 4


class Bar(NamedTuple):
    """A bar for one work: its rate divided by that of another."""

    work: str
    other: str
    ratio: float


BARS = (
    Bar("pipeline", "aiokafka-send", 1.2),
    Bar("async-for", "aiokafka-for", 1.2),
    Bar("send-many-bytes", "confluent-produce", 1.0),
    Bar("receive-columns", "confluent-consume", 1.0),
    Bar("receive-values", "confluent-consume", 1.0),
)
# Most broker CPU per message, in µs, by size of the body.
BROKER_CPU_BARS = {"send-many-bytes": (0.5, 1.5)}

Reports = dict[str, list[dict[str, float]]]
# A work and the size of the body.
Case = tuple[str, int]


class Place(NamedTuple):
    """The addresses at which clients find a running peer."""

    address: str
    broker: Daemon


def compare(
    peers: Collection[str], length: Length, only: Collection[str], directory: Path
) -> dict[str, Any]:
    """All figures: a report for each round, by peer and case."""
    reports: dict[str, Reports] = {name: {} for name in peers}
    for number in range(length.rounds):
        for name in peers:
            say(f"round {number + 1} of {length.rounds}: {name}")
            for cases in sessions(name, only, fresh=length.fresh):
                with started(name, directory) as place:
                    run_session(place, cases, length, only, reports[name])
    return {**stamp(), "rounds": length.rounds, "peers": reports}


@contextlib.contextmanager
def started(name: str, directory: Path) -> Iterator[Place]:
    """A fresh peer."""
    if name == "kafka":
        with running_kafka(directory) as kafka:
            yield Place(kafka.address, kafka.broker)
    else:
        with running(name, directory) as headrace:
            yield Place(headrace.nameserver, headrace.daemons["broker"])


def sessions(name: str, only: Collection[str], *, fresh: bool) -> Iterator[list[Case]]:
    """The cases of a peer by the broker that they have, with what fills the topic for readers."""
    wanted = {*only, *(FILLS if READS & set(only) else ())}
    works = [work for work in WORKS[name] if work in wanted]
    if not fresh:
        yield [(work, body_bytes) for body_bytes in BODY_BYTES for work in works]
        return
    together = [work for work in works if work in READS or work in FILLS]
    for body_bytes in BODY_BYTES:
        for group in [together, *([work] for work in works if work not in together)]:
            if group:
                yield [(work, body_bytes) for work in group]


def run_session(
    place: Place, cases: list[Case], length: Length, only: Collection[str], reports: Reports
) -> None:
    """One case after the other; those that only fill the topic are not reported."""
    for work, body_bytes in cases:
        report = run_client(place, work, body_bytes, length)
        say(
            f"{work:24} {body_bytes:5} B {report.rate:>12,.0f}/s  "
            f"broker {report.broker_cpu_us:6.2f} µs  client {report.client_cpu_us:6.2f} µs"
        )
        if work in only:
            reports.setdefault(case(work, body_bytes), []).append(msgspec.to_builtins(report))


def run_client(place: Place, work: str, body_bytes: int, length: Length) -> Report:
    """The measurements of a process of its own. Raises PeerError with its output if it failed."""
    messages = length.messages(work, body_bytes)
    is_of_filled = work in READS or work in FILLS
    job = Job(
        work,
        address=place.address,
        broker_pid=place.broker.process.pid,
        topic=f"{'filled' if is_of_filled else work}_{body_bytes}",
        body_bytes=body_bytes,
        messages=messages,
        warm_up=messages // WARM_UP_PART,
    )
    command = [sys.executable, "-m", "tests.bench.clients.run", msgspec.json.encode(job).decode()]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=JOB_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise PeerError(
            f"{job} failed:\n{done.stderr[-4000:]}\nThe broker said last:\n{place.broker.tail()}"
        )
    return msgspec.json.decode(done.stdout, type=Report)


def case(work: str, body_bytes: int) -> str:
    return f"{work} {body_bytes} B"


def markdown(results: dict[str, Any]) -> str:
    """The tables of the document."""
    reports: Reports = {
        name: series for peer in results["peers"].values() for name, series in peer.items()
    }
    heading = (
        f"Measured {results['date']} on {results['machine']}; rounds: {results['rounds']}. "
        "Median (smallest to largest round); ratio of medians.\n"
    )
    parts = [heading, _rates_table(reports), _bars_table(reports)]
    return "\n".join(filter(None, parts))


def _rates_table(reports: Reports) -> str:
    rows = [
        [
            name,
            spread([report["rate"] for report in series], 1, 0),
            spread([report["broker_cpu_us"] for report in series], 1, 2),
            spread([report["client_cpu_us"] for report in series], 1, 2),
        ]
        for name, series in reports.items()
    ]
    return rows_as_table(["case", "messages/s", "broker CPU, µs", "client CPU, µs"], rows)


def _bars_table(reports: Reports) -> str:
    rows = [*_ratio_rows(reports), *_broker_cpu_rows(reports)]
    return rows_as_table(["case", "beside", "measured", "bar", ""], rows) if rows else ""


def _ratio_rows(reports: Reports) -> Iterator[list[str]]:
    for bar in BARS:
        for body_bytes in BODY_BYTES:
            name, other = case(bar.work, body_bytes), case(bar.other, body_bytes)
            if name in reports and other in reports:
                ratio = _median(reports[name], "rate") / _median(reports[other], "rate")
                yield [
                    name,
                    bar.other,
                    f"{ratio:.2f} ×",
                    f"≥ {bar.ratio} ×",
                    _met(ratio >= bar.ratio),
                ]


def _broker_cpu_rows(reports: Reports) -> Iterator[list[str]]:
    for work, limits in BROKER_CPU_BARS.items():
        for body_bytes, limit in zip(BODY_BYTES, limits, strict=True):
            name = case(work, body_bytes)
            if name in reports:
                cpu_us = _median(reports[name], "broker_cpu_us")
                yield [
                    name,
                    "broker CPU",
                    f"{cpu_us:.2f} µs",
                    f"≤ {limit} µs",
                    _met(cpu_us <= limit),
                ]


def _median(series: list[dict[str, float]], key: str) -> float:
    return statistics.median(report[key] for report in series)


def _met(is_met: bool) -> str:
    return "met" if is_met else "**missed**"


def main(options: list[str]) -> None:
    chosen = _arguments(options)
    works = [work for name in chosen.peers for work in WORKS[name]]
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as directory:
        results = compare(
            chosen.peers, SHORT if chosen.short else FULL, chosen.only or works, Path(directory)
        )
    table = markdown(results)
    sys.stdout.write(table)
    if chosen.keep:
        keep("python-clients", results, table)


def _arguments(options: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("tests.bench python-clients", description=__doc__)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--short", action="store_true", help="about a minute, one round")
    length.add_argument(
        "--keep", action="store_true", help="publish this run: results and docs/benchmarks"
    )
    works = [work for names in WORKS.values() for work in names]
    parser.add_argument("--only", nargs="+", choices=works, metavar="WORK")
    parser.add_argument("--peers", nargs="+", choices=tuple(WORKS), default=tuple(WORKS))
    return parser.parse_args(options)


if __name__ == "__main__":
    main(sys.argv[1:])
