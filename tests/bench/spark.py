"""headrace's Spark source and sink beside Spark's own connector to Kafka, each on its broker.

Each round starts one broker after the other, fills it, and lets a Spark process for each number of
cores read and write. The jars of Spark's Kafka connector are Maven Central's for Spark 4.0, so
Kafka's turn runs on the oldest PySpark, ours on the newest.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace.blocking import Admin
from tests.bench.clients.job import Job as ClientJob
from tests.bench.kafka_peer import running_kafka
from tests.bench.load import say
from tests.bench.results import keep, stamp
from tests.bench.spark_job import Case, Job, Report
from tests.bench.table import rows_as_table, spread
from tests.conformance.peer import ROOT, PeerError, missing_tools, running
from tests.support.building import build

CORES = (1, 2)
BODY_BYTES = (1024, 100)
READS = ("batch", "stream")
WRITES = ("write", "copy", "copy-plain")
# They have a promise only for that many, and the time is short.
WRITE_CORES = 2
PROCESS_TIMEOUT_S = 900
OLDEST_PYTHON = ROOT / ".cache" / "oldest-spark" / "bin" / "python"
CONNECTOR = Path(__file__).resolve().with_name("spark_kafka")
CONNECTOR_JARS = ROOT / ".cache" / "spark-kafka" / "lib"


class Peer(NamedTuple):
    """A peer: its broker, the client that fills it, and Spark's Python."""

    fill: str
    python: Path
    works: tuple[str, ...]


NEWEST = Path(sys.executable)
PEERS = {
    # Not "write": into a topic that is made by it, two tasks time out after two minutes.
    "kafka": Peer("confluent-produce", OLDEST_PYTHON, READS),
    "headrace": Peer("send-many-bytes", NEWEST, (*READS, *WRITES)),
}
OURS, THEIRS = "headrace", "kafka"


@dataclass(frozen=True)
class Length:
    """The numbers of rows read, by size of the body, and written, and of the warm-ups."""

    rounds: int
    read: dict[int, int]
    written: int
    warm_up: int
    write_goes: int


# A JVM is compiled while it reads: with less the first case that counts is a third slower.
FULL = Length(
    2, {1024: 2_000_000, 100: 10_000_000}, written=2_000_000, warm_up=2_000_000, write_goes=3
)
SHORT = Length(1, {1024: 200_000, 100: 800_000}, written=400_000, warm_up=100_000, write_goes=1)
WRITTEN_BODY_BYTES = 100
WARM_UP = "warm"
COPIED = "copied"
QUEUES = 8
FILL_WARM_UP_PART = 4

# Least rate of ours by Kafka's, by size of the body.
RATIO_BARS = {"batch": {1024: 2.5, 100: 1.5}, "stream": {1024: 1.7, 100: 1.0}}
SINK_BAR = 500_000
EXACTLY_ONCE_BAR = 0.15

Reports = dict[str, list[dict[str, float]]]
# Case by case; what is said of those that failed.
Failures = list[str]


class Place(NamedTuple):
    """The addresses of a running broker."""

    address: str
    broker_pid: int


def compare(peers: Collection[str], length: Length, directory: Path) -> dict[str, Any]:
    """All figures: a report for each round, by peer and case; and what failed."""
    reports: dict[str, Reports] = {name: {} for name in peers}
    failures: Failures = []
    for number in range(length.rounds):
        for name in peers:
            say(f"round {number + 1} of {length.rounds}: {name}")
            try:
                with started(name, directory) as place:
                    run_round(name, place, length, reports[name])
            except PeerError as problem:  # the others' figures are worth having
                say(str(problem))
                failures.append(f"{name}, round {number + 1}: {problem}")
    return {**stamp(), "rounds": length.rounds, "peers": reports, "failures": failures}


@contextlib.contextmanager
def started(name: str, directory: Path) -> Iterator[Place]:
    """A fresh broker."""
    if name == "kafka":
        with running_kafka(directory) as kafka:
            yield Place(kafka.address, kafka.broker.process.pid)
    else:
        with running(name, directory) as peer:
            yield Place(peer.nameserver, peer.broker_pid)


def run_round(name: str, place: Place, length: Length, reports: Reports) -> None:
    """Fill the broker; then every work on each number of cores."""
    peer = PEERS[name]
    fill(peer, place, WARM_UP, WRITTEN_BODY_BYTES, length.warm_up)
    if "copy" in peer.works:
        fill(peer, place, COPIED, WRITTEN_BODY_BYTES, length.written)
    for body_bytes, rows in length.read.items():
        fill(peer, place, filled(body_bytes), body_bytes, rows)
    for cores in CORES:
        for report in run_spark(name, place, f"local[{cores}]", list(cases(peer, cores, length))):
            say(f"{report.name:28} {report.rate:>12,.0f}/s  broker {report.broker_cpu_us:6.2f} µs")
            reports.setdefault(report.name, []).append(msgspec.to_builtins(report))


def filled(body_bytes: int) -> str:
    return f"filled_{body_bytes}"


def fill(peer: Peer, place: Place, topic: str, body_bytes: int, rows: int) -> None:
    """Write what is read, by the peer's best client."""
    warm_up = rows // FILL_WARM_UP_PART
    job = ClientJob(
        peer.fill, place.address, place.broker_pid, topic, body_bytes, rows - warm_up, warm_up
    )
    for _ in run_python(NEWEST, "tests.bench.clients.run", job):
        pass


def cases(peer: Peer, cores: int, length: Length) -> Iterator[Case]:
    """Every work with every size, after a first go of each that does not count.

    What writes does so in turn, some times: the first goes of a session cost the most.
    """
    for work in peer.works:
        if work in READS:
            yield _warm_up(work, length, cores)
            for body_bytes, rows in length.read.items():
                yield _case(work, work, filled(body_bytes), body_bytes, rows, cores)
    writes = [work for work in peer.works if work in WRITES]
    if cores == WRITE_CORES:
        yield from (_warm_up(work, length, cores) for work in writes)
        for go, work in product(range(length.write_goes), writes):
            case = _case(work, work, COPIED, WRITTEN_BODY_BYTES, length.written, cores)
            yield msgspec.structs.replace(case, target=f"{work}_{go}")


def _warm_up(work: str, length: Length, cores: int) -> Case:
    case = _case(work, f"warm {work}", WARM_UP, WRITTEN_BODY_BYTES, length.warm_up, cores)
    target = f"warm_{work}" if work in WRITES else ""
    return msgspec.structs.replace(case, target=target, is_warm_up=True)


def _case(work: str, title: str, topic: str, body_bytes: int, rows: int, cores: int) -> Case:
    return Case(
        name=case_name(title, body_bytes, cores),
        work=work.removesuffix("-plain"),
        topic=topic,
        rows=rows,
        body_bytes=body_bytes,
        is_exactly_once=work == "copy",
    )


def case_name(work: str, body_bytes: int, cores: int) -> str:
    return f"{work} {body_bytes} B local[{cores}]"


def run_spark(name: str, place: Place, master: str, wanted: list[Case]) -> Iterator[Report]:
    """The measurements of a Spark process of its own, as they come."""
    is_kafka = name == "kafka"
    if not is_kafka:
        create_topics(place, [case.target for case in wanted if case.target])
    jars = connector_jars() if is_kafka else ""
    job = Job(name, place.address, place.broker_pid, master, wanted, jars)
    for line in run_python(PEERS[name].python, "tests.bench.spark_job", job):
        yield msgspec.json.decode(line, type=Report)


def create_topics(place: Place, topics: Iterable[str]) -> None:
    with Admin(nameserver=place.address) as admin:
        for topic in topics:
            admin.create_topic(topic, queues=QUEUES)


def run_python(python: Path, module: str, job: Any) -> Iterator[str]:
    """The output of ``python -m module`` for a job, line by line.

    Raises PeerError with what went wrong.
    """
    if not python.exists():
        raise PeerError(f"{python} does not exist: run `make bench-spark`")
    command = [str(python), "-m", module, msgspec.json.encode(job).decode()]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT
        ) as process,
    ):
        too_long = threading.Timer(PROCESS_TIMEOUT_S, process.kill)
        too_long.start()
        try:
            assert process.stdout is not None
            yield from process.stdout
        finally:
            too_long.cancel()
        if process.wait() != 0:
            errors.seek(0)
            raise PeerError(f"{module} failed: {_cause(errors.read())}")


def _cause(errors: str) -> str:
    """The last lines that are not of a Java stack, which may have hundreds."""
    lines = [line for line in errors.splitlines() if not line.lstrip().startswith(("at ", "..."))]
    return "\n".join(lines[-20:])


def connector_jars() -> str:
    """Class path of Spark's Kafka connector; Maven Central has it (10 MB)."""
    if not CONNECTOR_JARS.exists():
        if problem := missing_tools():
            raise PeerError(problem)
        build(
            ["mvn", "--batch-mode", "--quiet", "--settings", "settings.xml", "compile"], CONNECTOR
        )
    return f"{CONNECTOR_JARS}/*"


class Bar(NamedTuple):
    """A promise: what was measured, what was wanted, and whether that was met."""

    case: str
    beside: str
    measured: str
    wanted: str
    is_met: bool


def bars(peers: dict[str, Reports]) -> Iterator[Bar]:
    """Those whose cases were measured."""
    ours, theirs = peers.get(OURS, {}), peers.get(THEIRS, {})
    yield from _ratio_bars(ours, theirs)
    yield from _broker_cpu_bars(ours, theirs)
    yield from _sink_bars(ours)
    yield from _exactly_once_bars(ours)


def _ratio_bars(ours: Reports, theirs: Reports) -> Iterator[Bar]:
    for work, wanted_by_size in RATIO_BARS.items():
        for (body_bytes, wanted), cores in product(wanted_by_size.items(), CORES):
            name = case_name(work, body_bytes, cores)
            if name in ours and name in theirs:
                ratio = _median(ours[name], "rate") / _median(theirs[name], "rate")
                yield Bar(name, "Kafka", f"{ratio:.2f} ×", f"≥ {wanted} ×", ratio >= wanted)


def _broker_cpu_bars(ours: Reports, theirs: Reports) -> Iterator[Bar]:
    for name in sorted(ours.keys() & theirs.keys()):
        if name.split()[0] in READS:
            our_us, their_us = (_median(peer[name], "broker_cpu_us") for peer in (ours, theirs))
            wanted = f"≤ {their_us:.2f} µs"
            yield Bar(name, "Kafka's broker", f"{our_us:.2f} µs", wanted, our_us <= their_us)


def _sink_bars(ours: Reports) -> Iterator[Bar]:
    name = case_name("write", WRITTEN_BODY_BYTES, WRITE_CORES)
    if name in ours:
        rate = _median(ours[name], "rate")
        yield Bar(name, "", f"{rate:,.0f}/s", f"≥ {SINK_BAR:,}/s", rate >= SINK_BAR)


def _exactly_once_bars(ours: Reports) -> Iterator[Bar]:
    name, plain = (case_name(w, WRITTEN_BODY_BYTES, WRITE_CORES) for w in ("copy", "copy-plain"))
    if name in ours and plain in ours:
        cost = 1 - _median(ours[name], "rate") / _median(ours[plain], "rate")
        wanted = f"≤ {EXACTLY_ONCE_BAR:.0%}"
        yield Bar(name, "at least once", f"{cost:.0%}", wanted, cost <= EXACTLY_ONCE_BAR)


def markdown(results: dict[str, Any]) -> str:
    """The tables of the document."""
    peers: dict[str, Reports] = results["peers"]
    heading = (
        f"Measured {results['date']} on {results['machine']}; rounds: {results['rounds']}. "
        "Median (smallest to largest round); ratio of medians.\n"
    )
    rows = [
        [name, peer, *(spread([r[key] for r in series], 1, digits) for key, digits in COLUMNS)]
        for name in dict.fromkeys(name for reports in peers.values() for name in reports)
        for peer, reports in peers.items()
        if (series := reports.get(name))
    ]
    titles = ["case", "peer", "rows/s", "broker CPU, µs/row"]
    kept = [
        [bar.case, bar.beside, bar.measured, bar.wanted, "met" if bar.is_met else "**missed**"]
        for bar in bars(peers)
    ]
    bar_table = rows_as_table(["case", "beside", "measured", "bar", ""], kept) if kept else ""
    return "\n".join(filter(None, [heading, rows_as_table(titles, rows), bar_table]))


COLUMNS = (("rate", 0), ("broker_cpu_us", 2))


def _median(series: list[dict[str, float]], key: str) -> float:
    return statistics.median(report[key] for report in series)


def main(options: list[str]) -> None:
    chosen = _arguments(options)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as directory:
        results = compare(chosen.peers, SHORT if chosen.short else FULL, Path(directory))
    table = markdown(results)
    sys.stdout.write(table)
    if results["failures"]:
        sys.exit("\n".join(results["failures"]))
    if chosen.keep:
        keep("spark", results, table)


def _arguments(options: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("tests.bench spark", description=__doc__)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--short", action="store_true", help="a tenth of the rows, one round")
    length.add_argument(
        "--keep", action="store_true", help="publish this run: results and docs/benchmarks"
    )
    parser.add_argument("--peers", nargs="+", choices=tuple(PEERS), default=tuple(PEERS))
    return parser.parse_args(options)


if __name__ == "__main__":
    main(sys.argv[1:])
