"""32 members of one group that share one queue: SimpleConsumers beside Kafka's share consumers.

Each message is 5 ms of work. In each round Kafka 4 and then headrace has its turn: a filled queue
is worked off, the rate is measured, and then a process with 4 of the members is killed.
"""

from __future__ import annotations

import contextlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from headrace.blocking import Admin, Producer
from tests.bench.clients.share import NUMBER_BYTES, Task
from tests.bench.kafka_peer import java_command, running_kafka
from tests.bench.load import say
from tests.bench.options import option_parser
from tests.bench.processes import cpu_s
from tests.bench.results import keep, stamp
from tests.bench.table import rows_as_table, spread
from tests.conformance.peer import Daemon, running

TOPIC, GROUP = "SHARED", "members"
BODY_BYTES: Final = 1024
WORK_MS: Final = 5
MEMBERS: Final = 32
# The most that they can do, in messages a second.
CEILING: Final = MEMBERS * 1000 / WORK_MS
MESSAGES_AT_ONCE: Final = 32
# Kafka permits no less.
INVISIBLE_MS: Final = 15_000
START_S, TAIL_S, WORKED_OFF_S = 5, 4, 300
# Looking reads all that was done, on one of the cores that the members have.
LOOK_AGAIN_S: Final = 2
_LINE: Final = re.compile(r"^(\d+) (\d+) (\d+) (\d+)\n", re.MULTILINE)
KAFKA, OURS = "kafka", "headrace"


class Done(NamedTuple):
    """A message that a member has done. came_ms, done_ms: since 1970."""

    number: int
    attempt: int
    came_ms: int
    done_ms: int


@dataclass(frozen=True)
class Length:
    """The length of a run. settle_s: before the window, in which JVMs compile."""

    rounds: int
    settle_s: float
    seconds: float


FULL: Final = Length(rounds=3, settle_s=15, seconds=10)
SHORT: Final = Length(rounds=1, settle_s=5, seconds=3)


@dataclass(frozen=True)
class Place:
    """A running peer whose topic is filled.

    commands: of the processes of the members; the last has the 4 that are killed.
    """

    broker: Daemon
    commands: Sequence[Sequence[str]]


# -- peers -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def kafka(messages: int, directory: Path) -> Iterator[Place]:
    """Two JVMs: one for each 4 members would be busy with itself."""
    with running_kafka(directory) as peer:

        def program(work: str, *numbers: int) -> list[str]:
            texts = map(str, numbers)
            return java_command("headrace.kafka.Share", work, peer.address, TOPIC, GROUP, *texts)

        subprocess.run(program("fill", messages, BODY_BYTES, INVISIBLE_MS), check=True)
        commands = [program("work", count, MESSAGES_AT_ONCE, WORK_MS) for count in (28, 4)]
        yield Place(peer.broker, commands)


@contextlib.contextmanager
def headrace(messages: int, directory: Path) -> Iterator[Place]:
    """Eight processes, as one is one core at most."""
    padding = bytes(BODY_BYTES - NUMBER_BYTES)
    with running("headrace", directory) as peer:
        with Admin(nameserver=peer.nameserver) as admin:
            admin.create_topic(TOPIC, queues=1)
        with Producer(nameserver=peer.nameserver) as producer:
            bodies = [number.to_bytes(NUMBER_BYTES) + padding for number in range(messages)]
            producer.send_many(bodies, topic=TOPIC)
        seconds = WORK_MS / 1000, INVISIBLE_MS / 1000
        task = Task(peer.nameserver, TOPIC, GROUP, 4, MESSAGES_AT_ONCE, *seconds)
        text = msgspec.json.encode(task).decode()
        command = [sys.executable, "-m", "tests.bench.clients.share", text]
        yield Place(peer.daemons["broker"], [command] * (MEMBERS // task.members))


PEERS: Final = {KAFKA: kafka, OURS: headrace}


# -- a round ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def members(place: Place, directory: Path) -> Iterator[list[Daemon]]:
    """All members at work; each process writes what it has done into its log."""
    started: list[Daemon] = []
    try:
        for number, command in enumerate(place.commands):
            started.append(Daemon.start(command, directory / f"members-{number}.log"))
        for daemon in started:
            daemon.wait_for(r"\d \d+\n")
        yield started
    finally:
        for daemon in started:
            daemon.kill()


def done(daemons: Sequence[Daemon]) -> list[Done]:
    """All that the members have done; between their lines may be those of a client's log."""
    return [
        Done(*map(int, line))
        for daemon in daemons
        for line in _LINE.findall(daemon.log.read_text())
    ]


def run(name: str, length: Length, directory: Path) -> dict[str, float]:
    """The figures of one peer."""
    messages = int(CEILING * (START_S + length.settle_s + length.seconds + TAIL_S))
    with PEERS[name](messages, directory) as place, members(place, directory) as daemons:
        (began_ms, *before), (ended_ms, *after) = (
            sample(place, daemons, after_s=pause_s) for pause_s in (length.settle_s, length.seconds)
        )
        daemons[-1].kill()
        found = all_done(daemons, messages)
    count = sum(began_ms <= each.done_ms < ended_ms for each in found)
    broker_us, members_us = (
        (end - begin) / count * 1e6 for begin, end in zip(before, after, strict=True)
    )
    again = [each for each in found if each.attempt > 1 and each.came_ms >= ended_ms]
    return {
        "rate": count / (ended_ms - began_ms) * 1000,
        "broker_cpu_us": broker_us,
        "members_cpu_us": members_us,
        "again": len(again),
        "again_s": max((each.came_ms - ended_ms for each in again), default=0) / 1000,
        "duplicates": len(found) - (different := len({each.number for each in found})),
        "lost": messages - different,
    }


def sample(place: Place, daemons: Sequence[Daemon], *, after_s: float) -> tuple[float, ...]:
    """The time in ms, and the CPU seconds of the broker and of all members."""
    time.sleep(after_s)
    broker, members = [place.broker.process.pid], [each.process.pid for each in daemons]
    return time.time() * 1000, cpu_s(broker), cpu_s(members)


def all_done(daemons: Sequence[Daemon], messages: int) -> list[Done]:
    """What is done once each message is, or too late."""
    deadline_s = time.monotonic() + WORKED_OFF_S
    while True:
        found = done(daemons)
        if len({each.number for each in found}) == messages or time.monotonic() > deadline_s:
            return found
        time.sleep(LOOK_AGAIN_S)


# -- the table -------------------------------------------------------------------------------------

# Key of a report, heading, digits.
COLUMNS: Final = (
    ("rate", "messages/s", 0),
    ("broker_cpu_us", "broker CPU, µs/message", 2),
    ("members_cpu_us", "CPU of the members, µs/message", 2),
    ("again", "of the killed members, delivered again", 0),
    ("again_s", "the last of them after, s", 2),
    ("duplicates", "done twice", 0),
    ("lost", "lost", 0),
)
# headrace's broker is at most 100 ms late.
AGAIN_S: Final = INVISIBLE_MS / 1000 + 0.1


def measure(peers: Collection[str], length: Length, directory: Path) -> dict[str, Any]:
    """All figures: a report for each round, by peer."""
    reports: dict[str, list[dict[str, float]]] = {name: [] for name in peers}
    for number in range(length.rounds):
        for name in peers:
            report = run(name, length, directory)
            reports[name].append(report)
            figures = ", ".join(
                f"{title} {report[key]:,.{digits}f}" for key, title, digits in COLUMNS
            )
            say(f"round {number + 1} of {length.rounds}: {name:9} {figures}")
    return {**stamp(), "rounds": length.rounds, "seconds": length.seconds, "peers": reports}


def markdown(results: dict[str, Any]) -> str:
    """The tables of the document."""
    reports = results["peers"]
    rows = [
        [title, *(spread([each[key] for each in found], 1, digits) for found in reports.values())]
        for key, title, digits in COLUMNS
    ]
    title = (
        f"Measured {results['date']} on {results['machine']}; rounds: {results['rounds']} of "
        f"{results['seconds']:g} s. Median (smallest to largest round).\n"
    )
    bars = rows_as_table(["headrace", "measured", "bar", ""], list(_bars(reports)))
    return "\n".join([title, bars, rows_as_table(["", *reports], rows)])


def _bars(reports: dict[str, list[dict[str, float]]]) -> Iterator[list[str]]:
    def median(name: str, key: str) -> float:
        return statistics.median(each[key] for each in reports[name])

    def row(title: str, value: float, bar: str, *, is_met: bool) -> list[str]:
        return [title, f"{value:.2f}", bar, "met" if is_met else "**missed**"]

    if OURS in reports:
        share, again_s = median(OURS, "rate") / CEILING, median(OURS, "again_s")
        yield row("rate ÷ 6,400/s", share, "≥ 0.95", is_met=share >= 0.95)
        yield row("delivered again after, s", again_s, f"≤ {AGAIN_S:g}", is_met=again_s <= AGAIN_S)
        lost = sum(each["lost"] for each in reports[OURS])
        yield row("lost in all rounds", lost, "0", is_met=lost == 0)
    if reports.keys() == PEERS.keys():
        rate, cpu = (median(OURS, key) / median(KAFKA, key) for key in ("rate", "broker_cpu_us"))
        yield row("rate ÷ Kafka's", rate, "≥ 1", is_met=rate >= 1)
        yield row("broker CPU ÷ Kafka's", cpu, "≤ 1", is_met=cpu <= 1)


def main(options: list[str]) -> None:
    parser = option_parser("share", __doc__, peers=tuple(PEERS))
    parser.add_argument("--short", action="store_true", help="one round, some 2 minutes")
    chosen = parser.parse_args(options)
    if chosen.keep and (chosen.short or set(chosen.peers) != set(PEERS)):
        parser.error("--keep is for full runs")
    length = SHORT if chosen.short else FULL
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as directory:
        results = measure(chosen.peers, length, Path(directory))
    table = markdown(results)
    sys.stdout.write(table)
    if chosen.keep:
        keep("share", results, table)
