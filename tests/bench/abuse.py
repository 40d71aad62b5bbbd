"""Bad company: what one offender does to everybody else's latency and to the broker's memory.

A probe sends 1,000 messages a second by a schedule, alone and then beside the offender. The
offenders are threads of this process on plain sockets, with the lowest priority: they stand for
some on machines of their own, which would take no core from broker and probe.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench.bars import ABUSE, bars_table
from tests.bench.load import Load, loaded, say
from tests.bench.options import option_parser, parse
from tests.bench.processes import raise_open_files_limit, resident_mb
from tests.bench.results import keep, stamp
from tests.bench.table import heading, tables
from tests.bench.wire import (
    COMMIT_OFFSET,
    QUEUES,
    SUBSCRIPTION,
    Client,
    Rotation,
    pull_frame,
    send_frame,
)

if TYPE_CHECKING:
    import argparse
    import socket

    from tests.bench.driver import Report

PROBE: dict[str, Any] = {"work": "paced", "rate": 1000}
BODY = bytes(1024)
WARM_UP_S = 3
ONSET_S = 0.5
SLOW_READERS = 4
HALF_FRAMES = 100
HALF_FRAME_BYTES = 1 << 19
SILENT, SILENT_MANY = 2000, 10_000
FLOODERS = 4
FRAMES_PER_TURN = 64
STORED = 9600
COLUMNS = (
    ("p99_us", "p99 beside it, ms", 1000, 2),
    ("alone_p99_us", "p99 alone, ms", 1000, 2),
    ("p99_ratio", "p99 beside it ÷ alone", 1, 2),
    ("p999_us", "p99.9 beside it, ms", 1000, 2),
    ("memory_mb", "broker's memory beside it, less mapped files, MB", 1, 0),
    ("alone_memory_mb", "broker's memory before, MB", 1, 0),
    ("cut_off", "connections of the offender that the broker closed", 1, 0),
)


class Offender(threading.Thread):
    """Goes round its connections: on each it sends what fits of ``data``, and reads a little."""

    def __init__(
        self, clients: list[Client], data: bytes, *, read_bytes: int = 0, pause_s: float = 0
    ) -> None:
        """data: sent over and over again; read_bytes: at each turn; pause_s: after each round."""
        super().__init__(daemon=True)
        self.cut_off = 0
        self._sockets = {client.socket: memoryview(data) for client in clients}
        self._data = memoryview(data)
        self._read_bytes = read_bytes
        self._pause_s = pause_s
        self._end = threading.Event()
        for open_one in self._sockets:
            open_one.setblocking(False)

    def run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while not self._end.wait(self._pause_s):
            for open_one in list(self._sockets):
                try:
                    self._turn(open_one)
                except OSError:
                    del self._sockets[open_one]
                    self.cut_off += 1

    def _turn(self, open_one: socket.socket) -> None:
        with suppress(BlockingIOError):
            rest = self._sockets[open_one]
            self._sockets[open_one] = rest[open_one.send(rest) :] or self._data
        if self._read_bytes:
            with suppress(BlockingIOError):
                if not open_one.recv(self._read_bytes):
                    raise ConnectionResetError

    def stop(self) -> int:
        """Returns how many of its connections the broker closed."""
        self._end.set()
        self.join()
        return self.cut_off


Counted = Callable[[], int]


@contextmanager
def connected(address: str, count: int) -> Iterator[list[Client]]:
    with ExitStack() as open_ones:
        yield [open_ones.enter_context(Client(address)) for _ in range(count)]


@contextmanager
def offending(clients: list[Client], data: bytes, **habits: Any) -> Iterator[Counted]:
    """Gives what tells, at the end, how many connections were closed."""
    offender = Offender(clients, data, **habits)
    offender.start()
    try:
        yield offender.stop
    finally:
        offender.stop()


@contextmanager
def slow_reader(address: str) -> Iterator[Counted]:
    """Asks for far more than it takes."""
    with Client(address) as filler:
        frames = itertools.cycle(send_frame("SLOW", number, BODY) for number in range(QUEUES))
        Rotation([filler], frames).run(count=STORED)
    pull = pull_frame("slow_readers", "SLOW", 0, 0, COMMIT_OFFSET | SUBSCRIPTION)
    with (
        connected(address, SLOW_READERS) as clients,
        offending(clients, pull * FRAMES_PER_TURN, read_bytes=4096, pause_s=0.01) as cut_off,
    ):
        yield cut_off


@contextmanager
def half_frames(address: str) -> Iterator[Counted]:
    """Begins large messages, and then sends a byte at a time."""
    whole = send_frame("HALF", 0, bytes(2 * HALF_FRAME_BYTES))
    with connected(address, HALF_FRAMES) as clients:
        for client in clients:
            client.send(whole[:HALF_FRAME_BYTES])
        with offending(clients, b"\0", read_bytes=1, pause_s=0.01) as cut_off:
            yield cut_off


@contextmanager
def silent(address: str, count: int) -> Iterator[Counted]:
    """Connects and says nothing."""
    with connected(address, count) as clients:
        yield lambda: sum(_is_closed(client.socket) for client in clients)


def _is_closed(open_one: socket.socket) -> bool:
    open_one.setblocking(False)
    try:
        return not open_one.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextmanager
def flood(address: str) -> Iterator[Counted]:
    """Sends to one topic as fast as the sockets take it."""
    frames = b"".join(
        send_frame("FLOOD", number % QUEUES, BODY) for number in range(FRAMES_PER_TURN)
    )
    with (
        connected(address, FLOODERS) as clients,
        offending(clients, frames, read_bytes=1 << 20) as cut_off,
    ):
        yield cut_off


def offenders(silent_count: int) -> dict[str, Callable[[str], AbstractContextManager[Counted]]]:
    """By the name of the case."""
    return {
        "slow reader": slow_reader,
        "half frames": half_frames,
        "silent connections": lambda address: silent(address, silent_count),
        "flood": flood,
    }


def probe(load: Load, seconds: float) -> Report:
    """The steady 1,000 a second, and the broker's memory at the end of it."""
    report = load.job(PROBE, "PROBE", len(BODY), seconds=seconds)
    memory = resident_mb([load.peer.broker_pid], mapped_files=False)
    return {**report, "memory_mb": memory}


def beside(
    load: Load, offender: Callable[[str], AbstractContextManager[Counted]], seconds: float
) -> Report:
    """The probe alone, then beside an offender."""
    alone = probe(load, seconds)
    with offender(load.peer.broker) as cut_off:
        time.sleep(ONSET_S)
        report = probe(load, seconds)
        report["cut_off"] = cut_off()
    report |= {f"alone_{key}": alone[key] for key in ("p99_us", "memory_mb")}
    report["p99_ratio"] = report["p99_us"] / alone["p99_us"]
    return report


def measure(chosen: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """All figures: a report for each round, by peer and offender."""
    reports: dict[str, dict[str, list[Report]]] = {name: {} for name in chosen.peers}
    for number, name in itertools.product(range(chosen.rounds), chosen.peers):
        say(f"round {number + 1} of {chosen.rounds}: {name}")
        # A new broker: one that was flooded may refuse long after.
        with loaded(name, directory) as load:
            load.warm_up(WARM_UP_S, len(BODY))
            cases = offenders(SILENT_MANY if chosen.many else SILENT)
            for case in chosen.only or cases:
                report = beside(load, cases[case], chosen.seconds)
                reports[name].setdefault(case, []).append(report)
                say(
                    f"{name:9} {case:18} p99 {report['alone_p99_us'] / 1000:7.2f} -> "
                    f"{report['p99_us'] / 1000:8.2f} ms  memory "
                    f"{report['alone_memory_mb']:5.0f} -> {report['memory_mb']:5.0f} MB  "
                    f"errors {report['errors']}"
                )
    return {**stamp(), "rounds": chosen.rounds, "seconds": chosen.seconds, "peers": reports}


def markdown(results: dict[str, Any]) -> str:
    """The tables of the document."""
    parts = [
        heading(results),
        bars_table(ABUSE, results["peers"]),
        tables(results, offenders(0), COLUMNS),
    ]
    return "\n".join(filter(None, parts))


def main(options: list[str]) -> None:
    parser = option_parser("abuse", __doc__, offenders(0))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3, help="of each probe")
    parser.add_argument(
        "--many", action="store_true", help=f"{SILENT_MANY:,} silent connections, not {SILENT:,}"
    )
    chosen = parse(parser, options)
    raise_open_files_limit()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as directory:
        results = measure(chosen, Path(directory))
    table = markdown(results)
    sys.stdout.write(table)
    if chosen.keep:
        keep("abuse", results, table)
