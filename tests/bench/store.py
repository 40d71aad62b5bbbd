"""The store beside Apache RocketMQ's: starts after a crash and with many queues, and sync flush.

The peers take turns. A crash is a kill -9 while messages come in, with gigabytes in the log; what
was acknowledged must be there afterwards.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.blocking import Admin
from headrace.errors import HeadraceError
from headrace_protocol.message import encode_batch
from tests.bench.bars import STORE, bars_table
from tests.bench.driver import Report
from tests.bench.growth import room_gb
from tests.bench.growth_cases import QUEUES_PER_TOPIC, call_all, send_frames
from tests.bench.load import FIRST_SEND_TIMEOUT_S, SENDS, Load, loaded, say
from tests.bench.options import option_parser, parse
from tests.bench.processes import raise_open_files_limit
from tests.bench.results import keep, stamp
from tests.bench.table import heading, tables
from tests.bench.wire import QUEUES, Client, call_until_accepted, send_frame, topic_frame
from tests.conformance.peer import Peer, PeerError, running
from tests.conformance.probe import wait_for_send

CRASH, RESTART, PACED = "crash", "clean restart", "sync flush, paced 50 %"
FLUSHES = ("sync-32", "async-1000")
FLUSH_BODY_BYTES = (100, 1024)
SYNC_FLUSH = {"flushDiskType": "SYNC_FLUSH"}
ROUNDS, FLUSH_ROUNDS = 3, 2
FILL = "FILL"
BODY_BYTES = 1024
BATCH_MESSAGES = 1000
START_TIMEOUT_S = 180
LOOK_S = 0.02
UNDER_LOAD_S = 1.0
WARM_UP_S = 3
COLUMNS = (
    ("first_send_s", "start to first accepted send, s", 1, 2),
    ("readable_s", "start to all messages in their queues, s", 1, 2),
    ("stop_s", "stop in order, s", 1, 2),
    ("rate", "messages/s", 1, 0),
    ("broker_cpu_us", "broker CPU, µs/message", 1, 2),
    ("p50_us", "p50, ms", 1000, 2),
    ("p99_us", "p99, ms", 1000, 2),
    ("p999_us", "p99.9, ms", 1000, 2),
)


# -- starts ----------------------------------------------------------------------------------------


class Filler:
    """Sends batches of 1 KiB messages; ``acknowledged`` is how many the broker has taken."""

    def __init__(self, address: str) -> None:
        batch = encode_batch([(0, os.urandom(BODY_BYTES), b"")] * BATCH_MESSAGES)
        frames = [send_frame(FILL, queue, batch, is_batch=True) for queue in range(QUEUES)]
        self._frames = itertools.cycle(frames)
        self._address = address
        self.acknowledged = 0

    def fill(self, messages: int) -> None:
        with Client(self._address) as client:
            while self.acknowledged < messages:
                self._send(client)

    def fill_until_killed(self) -> None:
        with suppress(OSError), Client(self._address) as client:
            while True:
                self._send(client)

    def _send(self, client: Client) -> None:
        call_until_accepted(client, next(self._frames))
        self.acknowledged += BATCH_MESSAGES


def crashes(peer: Peer, gigabytes: float) -> Iterator[Report]:
    """Kill it under load and start it again, with so much in its log and more each time."""
    with Client(peer.broker) as client:
        client.call(topic_frame(FILL, QUEUES))
    filler = Filler(peer.broker)
    filler.fill(int(gigabytes * 1e9 / BODY_BYTES))
    for _ in range(ROUNDS):
        load = threading.Thread(target=filler.fill_until_killed)
        load.start()
        time.sleep(UNDER_LOAD_S)
        peer.daemons["broker"].kill()
        load.join()
        began, report = started_again(peer)
        wait_until_readable(peer, filler.acknowledged)
        yield report | {"readable_s": time.monotonic() - began}


def restarts(peer: Peer, queues: int) -> Iterator[Report]:
    """Stop it in order and start it again, with messages in so many queues."""
    with Client(peer.broker) as client:
        for first in range(0, queues, QUEUES_PER_TOPIC):
            topic, count = f"QUEUES_{first}", min(QUEUES_PER_TOPIC, queues - first)
            client.call(topic_frame(topic, count))
            call_all(client, send_frames(topic, count))
    for _ in range(ROUNDS):
        began = time.monotonic()
        peer.daemons["broker"].stop()
        stopped = {"stop_s": time.monotonic() - began}
        yield started_again(peer)[1] | stopped


def started_again(peer: Peer) -> tuple[float, Report]:
    """Start the broker on what it has: when, and how long until it has accepted a message."""
    began = time.monotonic()
    peer.daemons["broker"] = peer.daemons["broker"].again()
    wait_for_send(peer.broker, START_TIMEOUT_S)
    return began, {"first_send_s": time.monotonic() - began}


def wait_until_readable(peer: Peer, acknowledged: int) -> None:
    """Wait until the queues have all that was acknowledged. Raises PeerError."""
    until = time.monotonic() + START_TIMEOUT_S
    count = 0
    with Admin(nameserver=peer.nameserver) as admin:
        while count < acknowledged:
            if time.monotonic() > until:
                raise PeerError(f"{peer.name}: {count} of {acknowledged} messages after a crash")
            # Its registration may be on its way yet.
            with suppress(HeadraceError):
                count = sum(each.max_offset for each in admin.topic_stats(FILL).values())
            time.sleep(LOOK_S)


# -- flushes ---------------------------------------------------------------------------------------


@dataclass
class Flushes:
    """Sends that are answered when they are on disk; the first peer's peak sets the pace."""

    seconds: float
    peak: float = 0.0

    def run(self, load: Load) -> Iterator[tuple[str, Report]]:
        load.warm_up(WARM_UP_S, BODY_BYTES)
        report: Report = {}
        for body_bytes, send in itertools.product(FLUSH_BODY_BYTES, FLUSHES):
            topic = f"{send}_{body_bytes}"
            report = load.job(SENDS[send], topic, body_bytes, seconds=self.seconds)
            yield flush_case(send, body_bytes), report
        # The last was asynchronous, of 1 KiB.
        self.peak = self.peak or report["rate"]
        paced = {"work": "paced", "rate": self.peak / 2}
        yield PACED, load.job(paced, "PACED", BODY_BYTES, seconds=self.seconds)


def flush_case(send: str, body_bytes: int) -> str:
    return f"sync flush, {send} {body_bytes} B"


CASES = [
    CRASH,
    RESTART,
    *(flush_case(send, size) for size, send in itertools.product(FLUSH_BODY_BYTES, FLUSHES)),
    PACED,
]


# -- a run -----------------------------------------------------------------------------------------


class Run:
    """Collects all reports by peer and case."""

    def __init__(self, chosen: argparse.Namespace, directory: Path) -> None:
        self.reports: dict[str, dict[str, list[Report]]] = {name: {} for name in chosen.peers}
        self._chosen = chosen
        self._directory = directory

    def run(self) -> None:
        parts = {"crash": self.crash, "restart": self.restart, "flush": self.flush}
        for name in self._chosen.only or parts:
            parts[name]()

    def crash(self) -> None:
        gigabytes = min(self._chosen.gigabytes, room_gb(self._directory))
        for peer in self._peers():
            for report in crashes(peer, gigabytes):
                self._add(peer.name, CRASH, report)

    def restart(self) -> None:
        for peer in self._peers():
            for report in restarts(peer, self._chosen.queues):
                self._add(peer.name, RESTART, report)

    def flush(self) -> None:
        flushes = Flushes(self._chosen.seconds)
        for _, name in itertools.product(range(FLUSH_ROUNDS), self._chosen.peers):
            with loaded(name, self._directory, settings=SYNC_FLUSH) as load:
                for case, report in flushes.run(load):
                    self._add(name, case, report)

    def _peers(self) -> Iterator[Peer]:
        """Each in turn, with its own defaults, in two processes."""
        for name in self._chosen.peers:
            with running(name, self._directory, settings={}) as peer:
                wait_for_send(peer.broker, FIRST_SEND_TIMEOUT_S)
                yield peer

    def _add(self, name: str, case: str, report: Report) -> None:
        self.reports[name].setdefault(case, []).append(report)
        figures = (f"{key} {report[key]:,.2f}" for key, *_ in COLUMNS if key in report)
        say(f"{name:9} {case:28} {'  '.join(figures)}")


def markdown(results: dict[str, Any]) -> str:
    """The tables of the document."""
    starts = (
        f"{results['gigabytes']:g} GB in the log at the crash, {results['queues']:,} queues at the "
        f"clean restart; {ROUNDS} starts each.\n"
    )
    parts = [
        heading(results),
        starts,
        bars_table(STORE, results["peers"]),
        tables(results, CASES, COLUMNS),
    ]
    return "\n".join(filter(None, parts))


def main(options: list[str]) -> None:
    parser = option_parser("store", __doc__, ["crash", "restart", "flush"])
    parser.add_argument("--gigabytes", type=float, default=5, help="in the log at the crash")
    parser.add_argument("--queues", type=int, default=10_000, help="at the clean restart")
    parser.add_argument("--seconds", type=float, default=4, help="of each kind of sending")
    chosen = parse(parser, options)
    raise_open_files_limit()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as directory:
        run = Run(chosen, Path(directory))
        run.run()
    results = {
        **stamp(),
        "rounds": FLUSH_ROUNDS,
        "seconds": chosen.seconds,
        "gigabytes": chosen.gigabytes,
        "queues": chosen.queues,
        "peers": run.reports,
    }
    table = markdown(results)
    sys.stdout.write(table)
    if chosen.keep:
        keep("store", results, table)
