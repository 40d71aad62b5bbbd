"""Cold reads: what a consumer that reads old messages from the disk does to hot sends.

A store is filled, the broker restarted and the system's cache of the store's files dropped. Then a
probe sends 1,000 messages a second by a schedule: alone, and beside a consumer that reads all of
it from the beginning as fast as it can; so several times in turn, since the disk has still to do
with the filling for a while. The consumer has the lowest priority: it stands for one on a machine
of its own, which would take no core from broker and probe.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace import blocking
from tests.bench.abuse import PROBE, WARM_UP_S
from tests.bench.bars import COLD, bars_table
from tests.bench.load import Load, loaded, say
from tests.bench.options import option_parser, parse
from tests.bench.results import keep, stamp
from tests.bench.table import heading, tables
from tests.conformance.peer import running

if TYPE_CHECKING:
    import argparse

    from tests.bench.driver import Report

TOPIC, QUEUES = "COLD", 8
CASE = "cold reader"
BODY_BYTES = 1024
# Bodies that no disk can compress.
BODIES = [os.urandom(BODY_BYTES) for _ in range(1000)]
CALL_MESSAGES = 50_000
ONSET_S = 1
PATIENCE_MS = 600_000
COLUMNS = (
    ("p50_us", "p50 beside it, ms", 1000, 2),
    ("alone_p50_us", "p50 alone, ms", 1000, 2),
    ("p99_us", "p99 beside it, ms", 1000, 2),
    ("alone_p99_us", "p99 alone, ms", 1000, 2),
    ("p99_ratio", "p99 beside it ÷ alone", 1, 2),
    ("max_us", "longest beside it, ms", 1000, 2),
    ("read_mb_s", "read by the consumer, MB/s", 1, 0),
    ("from_disk", "of it fetched from the disk, %", 0.01, 0),
)


class Reader:
    """A process that reads the topic from its beginning, while it is let."""

    def __init__(self, load: Load) -> None:
        context = multiprocessing.get_context("spawn")
        self._body_bytes = context.Value("q")
        arguments = load.peer.nameserver, self._body_bytes
        self._process = context.Process(target=_read, args=arguments, daemon=True)
        self._process.start()
        while not self.body_bytes:
            self.check_alive()
            time.sleep(0.1)

    @property
    def body_bytes(self) -> int:
        """What it has read so far."""
        return int(self._body_bytes.value)

    def check_alive(self) -> None:
        """Whether there was always more to read."""
        assert self._process.is_alive(), "nothing is left to read: more gigabytes, fewer seconds"

    def pause(self) -> None:
        os.kill(self._process.pid or 0, signal.SIGSTOP)
        time.sleep(ONSET_S)

    def go_on(self) -> None:
        os.kill(self._process.pid or 0, signal.SIGCONT)
        time.sleep(ONSET_S)

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


def _read(nameserver: str, body_bytes: Any) -> None:
    os.nice(19)
    with blocking.PullConsumer(nameserver=nameserver) as consumer:
        consumer.assign(consumer.queues(TOPIC))
        consumer.seek_to("earliest")
        while (batch := consumer.receive_many(timeout_ms=PATIENCE_MS)) is not None:
            body_bytes.value += len(batch) * BODY_BYTES


def fill(name: str, store: Path, directory: Path, store_bytes: int) -> None:
    """A store with so many bytes of bodies, of a broker that was stopped."""
    with running(name, directory, store=store) as peer:
        with blocking.Admin(nameserver=peer.nameserver) as admin:
            admin.create_topic(TOPIC, queues=QUEUES)
        with blocking.Producer(nameserver=peer.nameserver) as producer:
            for _ in range(store_bytes // BODY_BYTES // CALL_MESSAGES):
                producer.send_many(list(islice(cycle(BODIES), CALL_MESSAGES)), topic=TOPIC)
        peer.daemons["broker"].stop()


def drop_cached(store: Path) -> None:
    """Let the system forget what it holds of a store that nobody has open."""
    for path in store.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def beside_reader(load: Load, reader: Reader, seconds: float) -> Report:
    """The probe alone, then beside the reader, which is paused before and after."""
    alone = load.job(PROBE, "PROBE", BODY_BYTES, seconds=seconds)
    reader.go_on()
    pid = load.peer.broker_pid
    began, fetched, read = time.monotonic(), fetched_bytes(pid), reader.body_bytes
    report = load.job(PROBE, "PROBE", BODY_BYTES, seconds=seconds)
    fetched, read = fetched_bytes(pid) - fetched, reader.body_bytes - read
    report["read_mb_s"] = read / (time.monotonic() - began) / 1e6
    report["from_disk"] = fetched / max(read, 1)
    reader.check_alive()
    reader.pause()
    report |= {f"alone_{key}": alone[key] for key in ("p50_us", "p99_us")}
    report["p99_ratio"] = report["p99_us"] / report["alone_p99_us"]
    return report


def fetched_bytes(pid: int) -> int:
    """What a process has made the disk read."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def rounds(load: Load, chosen: argparse.Namespace) -> list[Report]:
    """So many reports of one peer."""
    reader = Reader(load)
    reader.pause()
    reports = []
    for _ in range(chosen.rounds):
        report = beside_reader(load, reader, chosen.seconds)
        say(
            f"p99 {report['alone_p99_us'] / 1000:.2f} -> {report['p99_us'] / 1000:.2f} ms "
            f"beside {report['read_mb_s']:.0f} MB/s, {report['from_disk']:.0%} from the disk"
        )
        reports.append(report)
    reader.stop()
    return reports


def measure(chosen: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """All figures: a report by peer."""
    reports: dict[str, dict[str, list[Report]]] = {}
    for name in chosen.peers:
        store = directory / f"store-{name}"
        say(f"{name}: {chosen.gigabytes:g} GB")
        fill(name, store, directory, int(chosen.gigabytes * 1e9))
        drop_cached(store)
        with loaded(name, directory, store=store) as load:
            load.warm_up(WARM_UP_S, BODY_BYTES)
            reports[name] = {CASE: rounds(load, chosen)}
    return {
        **stamp(),
        "rounds": chosen.rounds,
        "seconds": chosen.seconds,
        "gigabytes": chosen.gigabytes,
        "peers": reports,
    }


def markdown(results: dict[str, Any]) -> str:
    """The tables of the document."""
    parts = [
        heading(results),
        f"A store of {results['gigabytes']:g} GB.\n",
        bars_table(COLD, results["peers"]),
        tables(results, [CASE], COLUMNS),
    ]
    return "\n".join(parts)


def main(options: list[str]) -> None:
    parser = option_parser("cold", __doc__)
    parser.add_argument("--gigabytes", type=float, default=20, help="of bodies in the store")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=5, help="of each probe")
    chosen = parse(parser, options)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as directory:
        results = measure(chosen, Path(directory))
    table = markdown(results)
    sys.stdout.write(table)
    if chosen.keep:
        keep("cold", results, table)
