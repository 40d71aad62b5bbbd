"""Static topics: beside plain ones, across brokers, with long chains and many items, and remaps.

Every figure that compares is a ratio of two measurements taken in turn in one run. Drains of items
on another broker are also measured on two of Apache's.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace_protocol.statictopic.plans import Mode
from tests.bench.bars import STATIC, bars_table
from tests.bench.load import say
from tests.bench.options import option_parser, parse
from tests.bench.processes import raise_open_files_limit
from tests.bench.results import keep, stamp
from tests.bench.static_beside import BESIDE, beside
from tests.bench.static_cases import (
    elsewhere,
    elsewhere_headrace,
    fill,
    long_chain,
    many_items,
    on_leader,
    pid_of,
    remaps,
)
from tests.bench.static_load import under_load
from tests.bench.table import OURS, THEIRS, case_table, tables
from tests.bench.wire import QUEUES
from tests.conformance.console import console
from tests.conformance.peer import headrace_cluster, running, second_apache
from tests.conformance.probe import wait_for_send

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.bench.driver import Report

ELSEWHERE = "items on another broker"
MANY = "64,000 items"
REMAP = "remap of 64 queues"
LOADED = {mode: f"remaps under load, {mode.value}" for mode in Mode}
LEADER = ("sends on the leader", "pulls on the leader")
CHAIN = tuple(
    f"5,000 items: {case}" for case in ("sends", "pulls of the leader", "pulls of the first item")
)
CASES = (*BESIDE, *LEADER, ELSEWHERE, *CHAIN, MANY, REMAP, *LOADED.values())
PARTS = ("beside", "leader", "elsewhere", "chain", "many", "remaps")
COLUMNS = (
    ("rate_ratio", "rate, ratio", 1, 2),
    ("cpu_ratio", "broker CPU, ratio", 1, 2),
    ("rate", "messages/s of the drain", 1, 0),
    ("local_rate", "messages/s of a drain on the leader", 1, 0),
    ("broker_cpu_us", "broker CPU, µs/message", 1, 2),
    ("base_cpu_us", "broker CPU of what it is compared with, µs/message", 1, 2),
    ("leader_cpu_us", "CPU of a leader with the items, µs/message", 1, 2),
    ("relaying_cpu_us", "CPU of a leader without the items, µs/message", 1, 2),
    ("serving_cpu_us", "CPU of the broker with the items, µs/message", 1, 2),
    ("relay_leader_ratio", "leader without ÷ leader with the items, CPU", 1, 2),
    ("relay_serving_ratio", "leader without ÷ broker with the items, CPU", 1, 2),
    ("total_ratio", "both brokers ÷ leader with the items, CPU", 1, 2),
    ("more_mb", "more resident memory, MB", 1, 1),
    ("changed_mb", "more resident memory a minute after ten changes, MB", 1, 1),
    ("more_start_s", "longer start, s", 1, 2),
    ("more_start_cpu_s", "CPU of the longer start, s", 1, 2),
    ("change_ms", "a change on disk, ms", 1, 0),
    ("longest_change_ms", "slowest of ten changes, ms", 1, 0),
    ("long_steps", "steps of the loop over 20 ms during ten changes", 1, 0),
    ("remap_s", "remap, s", 1, 2),
    ("failed", "failed sends", 1, 0),
    ("unread", "messages not read", 1, 0),
    ("remap_p99_ms", "p99 of sends due during a remap, ms", 1, 1),
    ("any_p99_ms", "p99 of all sends, ms", 1, 1),
    ("silent_s", "longest time of a queue without acknowledgement, s", 1, 2),
    ("latest_s", "latest message read, s after it was due", 1, 2),
    ("longest_remap_s", "longest remap, s", 1, 2),
)


@dataclass(frozen=True)
class Length:
    """How long a run is. messages: of each measured pass."""

    rounds: int
    messages: int
    loads: int


FULL = Length(rounds=10, messages=96_000, loads=2)
SHORT = Length(rounds=3, messages=32_000, loads=1)


def elsewhere_apache(directory: Path, rounds: int, messages: int) -> Iterator[Report]:
    """Two of Apache's brokers, whose topics mqadmin makes and moves."""
    with (
        running("apache", directory) as peer,
        second_apache(peer, _folder(directory, "second"), "broker-b") as second,
        console(_folder(directory, "console")) as mqadmin,
    ):
        for address in (peer.broker, second):
            wait_for_send(address, 60)
        for topic, broker in (("LOCAL", "broker-b"), ("MOVED", "broker-a")):
            words = ("updateStaticTopic", "-t", topic, "-qn", str(QUEUES), "-b", broker)
            mqadmin.printed(peer, *words)
        fill(second, "LOCAL", messages // QUEUES)
        fill(peer.broker, "MOVED", messages // QUEUES)
        mqadmin.printed(peer, "remappingStaticTopic", "-t", "MOVED", "-b", "broker-b")
        pids = pid_of(peer, "broker"), pid_of(peer, "broker-b")
        yield from elsewhere(rounds, messages, (peer.broker, second), pids)


def _folder(directory: Path, name: str) -> Path:
    folder = directory / name
    folder.mkdir()
    return folder


@contextmanager
def three_brokers(directory: Path) -> Iterator[Any]:
    names = ["broker-a", "broker-b", "broker-c"]
    with headrace_cluster(_folder(directory, "three"), names, {}) as peer:
        yield peer


class Run:
    """The parts of a run. reports: of each round, by peer and case."""

    def __init__(self, chosen: Any, directory: Path) -> None:
        self.reports: dict[str, dict[str, list[Report]]] = {OURS: {}, THEIRS: {}}
        self._chosen = chosen
        self._directory = directory
        self._length = SHORT if chosen.short else FULL

    def run(self) -> None:
        for part in self._chosen.only or PARTS:
            getattr(self, part)()

    def beside(self) -> None:
        for case, report in beside(_folder(self._directory, "beside"), self._length.rounds):
            self._add(OURS, case, report)

    def leader(self) -> None:
        folder, length = _folder(self._directory, "leader"), self._length
        for case, report in on_leader(folder, length.rounds, length.messages):
            self._add(OURS, case, report)

    def elsewhere(self) -> None:
        length = self._length
        measures = {OURS: elsewhere_headrace, THEIRS: elsewhere_apache}
        for name in self._chosen.peers:
            folder = _folder(self._directory, f"elsewhere-{name}")
            for report in measures[name](folder, length.rounds, length.messages):
                self._add(name, ELSEWHERE, report)

    def chain(self) -> None:
        folder, length = _folder(self._directory, "chain"), self._length
        for case, report in long_chain(folder, length.rounds, length.messages // 3):
            self._add(OURS, f"5,000 items: {case}", report)

    def many(self) -> None:
        self._add(OURS, MANY, many_items(_folder(self._directory, "many")))

    def remaps(self) -> None:
        with three_brokers(self._directory) as peer:
            for report in remaps(peer, self._length.rounds):
                self._add(OURS, REMAP, report)
            for number in range(self._length.loads):
                for mode in Mode:
                    self._add(OURS, LOADED[mode], under_load(peer.nameserver, mode, number))

    def _add(self, name: str, case: str, report: Report) -> None:
        self.reports[name].setdefault(case, []).append(report)
        figures = (f"{key} {report[key]:,.2f}" for key, *_ in COLUMNS if key in report)
        say(f"{name:9} {case:40} {'  '.join(figures)}")


def markdown(results: dict[str, Any]) -> str:
    """The tables of the document."""
    heading = (
        f"Measured {results['date']} on {results['machine']}; {results['rounds']} rounds of "
        f"{results['messages']:,} messages. Median (smallest to largest round).\n"
    )
    ours = {"peers": {OURS: results["peers"].get(OURS, {})}}
    parts = [
        heading,
        bars_table(STATIC, results["peers"]),
        tables(ours, (*BESIDE, *LEADER, *CHAIN), COLUMNS),
        case_table(results, ELSEWHERE, COLUMNS),
        case_table(ours, MANY, COLUMNS),
        case_table(ours, REMAP, COLUMNS),
        tables(ours, LOADED.values(), COLUMNS),
    ]
    return "\n".join(filter(None, parts))


def main(options: list[str]) -> None:
    parser = option_parser("static", __doc__, PARTS)
    parser.add_argument("--short", action="store_true", help="some three minutes")
    chosen = parse(parser, options)
    if chosen.short and chosen.keep:
        parser.error("--keep is for full runs")
    raise_open_files_limit()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as directory:
        run = Run(chosen, Path(directory))
        run.run()
    length = SHORT if chosen.short else FULL
    results = {**stamp(), "rounds": length.rounds, "messages": length.messages}
    results |= {"peers": {name: cases for name, cases in run.reports.items() if cases}}
    table = markdown(results)
    sys.stdout.write(table)
    if chosen.keep:
        keep("static", results, table)
