"""SQL92 filters, POP and requests with replies beside Apache RocketMQ, by the official Java client.

Each round starts one peer, warms it up, measures every case and stops it; then the other's turn.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from headrace_protocol.bodies import SetMessageRequestModeRequestBody
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.pop.headers import ANY_QUEUE, INIT_MIN, POP_MESSAGES_MAX
from tests.bench.bars import FEATURES, bars_table
from tests.bench.driver import Report
from tests.bench.load import Load, loaded, say
from tests.bench.options import option_parser, parse
from tests.bench.results import keep, stamp
from tests.bench.table import COLUMNS, heading, tables
from tests.bench.wire import QUEUES, Client, Refused, frame, topic_frame
from tests.conformance.peer import Peer

BODY_BYTES: Final = 1024
# By default Apache's broker has none; with settings, headrace is two processes, too.
SETTINGS: Final = {"enablePropertyFilter": "true"}
PERCENTAGES: Final = (100, 10, 1)
PACED_RATE: Final = 1000
OUT_MESSAGES: Final = 100_000
# Longer than any run.
OUT_MS: Final = 3_600_000
POP_DRAIN, POP_PACED, POP_BESIDE = "POP", "POP, 1,000/s", "POP, 1,000/s beside 100,000 out"
THREADS: Final = (1, 32)


def filtered(percent: int) -> str:
    return f"SQL92, {percent} % pass"


def requests(threads: int) -> str:
    return f"request-{threads}"


CASES: Final = [
    *map(filtered, PERCENTAGES),
    *(POP_DRAIN, POP_PACED, POP_BESIDE),
    *map(requests, THREADS),
]


@dataclass(frozen=True)
class Length:
    """The length of a run. filtered, popped: messages of a drain."""

    rounds: int
    warm_up_s: float
    seconds: float
    filtered: int
    popped: int


FULL: Final = Length(rounds=3, warm_up_s=3, seconds=10, filtered=1_000_000, popped=300_000)
SHORT: Final = Length(rounds=1, warm_up_s=1, seconds=3, filtered=100_000, popped=30_000)


@dataclass
class Round:
    """One peer, from its start to its end."""

    load: Load
    length: Length
    reports: dict[str, list[Report]] = field(default_factory=dict)

    def run(self, only: Collection[str]) -> None:
        self.load.warm_up(self.length.warm_up_s, BODY_BYTES)
        for name in only:
            KINDS[name](self)

    def add(self, case: str, report: Report) -> None:
        self.reports.setdefault(case, []).append(report)
        latencies = "".join(
            f"  {key} {report[f'{key}_us'] / 1000:6.2f} ms"
            for key in ("p50", "p99")
            if f"{key}_us" in report
        )
        say(
            f"{self.load.peer.name:9} {case:32} {report['rate']:>10,.0f}/s  "
            f"broker {report['broker_cpu_us']:6.2f} µs{latencies}"
        )

    # -- SQL92 -------------------------------------------------------------------------------------

    def sql92(self) -> None:
        messages = self.length.filtered
        fill = {"work": "fill", "filter": _expression(100)}
        self.load.job(fill, "FILTERED", BODY_BYTES, messages=messages)
        self._drain_filtered(10, "warm_up")
        for percent in PERCENTAGES:
            self.add(filtered(percent), self._drain_filtered(percent, f"percent_{percent}"))

    def _drain_filtered(self, percent: int, group: str) -> Report:
        drain = {"work": "drain_push", "filter": _expression(percent), "group": group}
        messages = self.length.filtered * percent // 100
        return self.load.job(drain, "FILTERED", BODY_BYTES, messages=messages)

    # -- POP ---------------------------------------------------------------------------------------

    def pop(self) -> None:
        self._drain_popped("POP_WARM_UP", self.length.popped // 4)
        self.add(POP_DRAIN, self._drain_popped("POP_DRAIN", self.length.popped))
        self._paced("POP_PACED_WARM_UP", self.length.seconds)
        self.add(POP_PACED, alone := self._paced("POP_PACED", self.length.seconds))
        beside = self._paced("POP_BESIDE", self.length.seconds, out=OUT_MESSAGES)
        self.add(POP_BESIDE, {**beside, "p99_ratio": beside["p99_us"] / alone["p99_us"]})

    def _drain_popped(self, topic: str, messages: int) -> Report:
        self._open(topic, messages)
        return self._popped({"work": "drain_push"}, topic, messages=messages)

    def _paced(self, topic: str, seconds: float, *, out: int = 0) -> Report:
        """out: messages that are invisible meanwhile."""
        self._open(topic, out)
        if out:
            take_out(self.load.peer, topic, _group(topic), out)
        return self._popped({"work": "end_to_end", "rate": PACED_RATE}, topic, seconds=seconds)

    def _open(self, topic: str, messages: int) -> None:
        """Create a topic, whose group pops, with so many messages."""
        mode = SetMessageRequestModeRequestBody(
            topic=topic, consumer_group=_group(topic), mode="POP"
        )
        with Client(self.load.peer.broker) as client:
            client.call(topic_frame(topic, QUEUES))
            client.call(frame(RequestCode.SET_MESSAGE_REQUEST_MODE, {}, mode.encode()))
        if messages:
            self.load.job({"work": "fill"}, topic, BODY_BYTES, messages=messages)

    def _popped(self, work: dict[str, Any], topic: str, **length: Any) -> Report:
        popping = {**work, "pop": True, "group": _group(topic)}
        return self.load.job(popping, topic, BODY_BYTES, **length)

    # -- requests ----------------------------------------------------------------------------------

    def requests(self) -> None:
        self._request(THREADS[-1], self.length.warm_up_s)
        for threads in THREADS:
            self.add(requests(threads), self._request(threads, self.length.seconds))

    def _request(self, threads: int, seconds: float) -> Report:
        work = {"work": "request", "threads": threads}
        return self.load.job(work, "REQUESTS", BODY_BYTES, seconds=seconds)


KINDS: Final[dict[str, Callable[[Round], None]]] = {
    "sql92": Round.sql92,
    "pop": Round.pop,
    "requests": Round.requests,
}


def _expression(percent: int) -> str:
    """Three terms, of which the first lets this part of the messages pass."""
    return f"place < {percent} AND region IN ('north', 'south') AND price BETWEEN 0 AND 1000"


def _group(topic: str) -> str:
    return f"group_of_{topic}"


def take_out(peer: Peer, topic: str, group: str, messages: int) -> None:
    """POP all messages of a topic, and acknowledge none."""
    fields = {
        "consumerGroup": group,
        "topic": topic,
        "queueId": ANY_QUEUE,
        "maxMsgNums": POP_MESSAGES_MAX,
        "invisibleTime": OUT_MS,
        "pollTime": 0,
        "initMode": INIT_MIN,
        "expType": "TAG",
        "exp": "*",
        "order": False,
    }
    with Client(peer.broker) as client:
        for number in itertools.count():
            born_ms = time.time_ns() // 1_000_000
            try:
                client.call(frame(RequestCode.POP_MESSAGE, {**fields, "bornTime": born_ms}))
            except Refused as refusal:
                if refusal.code != ResponseCode.POLLING_TIMEOUT:
                    raise
                assert number >= messages / POP_MESSAGES_MAX, f"nothing left after {number} POPs"
                return


def measure(
    peers: list[str], length: Length, only: Collection[str], directory: Path
) -> dict[str, Any]:
    """All figures: a report for each round, by peer and case."""
    reports: dict[str, dict[str, list[Report]]] = {name: {} for name in peers}
    for number in range(length.rounds):
        for name in peers:
            say(f"round {number + 1} of {length.rounds}: {name}")
            with loaded(name, directory, settings=SETTINGS) as load:
                Round(load, length, reports[name]).run(only)
    return {**stamp(), "rounds": length.rounds, "seconds": length.seconds, "peers": reports}


def markdown(results: dict[str, Any]) -> str:
    """The tables of the document."""
    parts = [
        heading(results),
        bars_table(FEATURES, results["peers"]),
        tables(results, CASES, COLUMNS),
    ]
    return "\n".join(filter(None, parts))


def main(options: list[str]) -> None:
    parser = option_parser("features", __doc__, KINDS)
    parser.add_argument("--short", action="store_true", help="one round, some 3 minutes")
    chosen = parse(parser, options)
    if chosen.short and chosen.keep:
        parser.error("--keep is for full runs")
    length = SHORT if chosen.short else FULL
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as directory:
        results = measure(chosen.peers, length, chosen.only or KINDS, Path(directory))
    table = markdown(results)
    sys.stdout.write(table)
    if chosen.keep:
        keep("features", results, table)
