"""Tiered storage beside a bare loop over its driver: make bench BENCH=tier.

Brokers in processes of their own upload a filled store to a folder and to a real S3 server, and
serve it by bulk pulls. The bare loop moves as many bytes in the same sizes. What a pull by tag
reads is counted in this process. ``tier_beside`` measures what others notice of it, ``tier_java``
drains a tier with the official Java client, and Apache RocketMQ's own tier as well.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headrace_broker.queue_directory import Use
from headrace_broker.store.store_source import GetStatus
from headrace_broker.tiered.driver.posix import PosixDriver
from headrace_protocol.message import encode_properties, tags_code
from tests.bench import tier_beside, tier_java
from tests.bench.bars import TIER, bars_table
from tests.bench.load import say
from tests.bench.processes import cpu_s
from tests.bench.table import OURS, tables
from tests.bench.tier_beside import Report, beside_folder, beside_hanging, idle_memory, requests
from tests.bench.tier_load import (
    BODY_BYTES,
    PIECE_BYTES,
    PLACES,
    SAMPLE_S,
    Cost,
    Place,
    cost_here,
    cost_of_upload,
    drain,
    fill,
)
from tests.bench.tier_load import broker as broker_on
from tests.support.broker import BrokerUnderTest, broker_config
from tests.support.stores import HOST, ready

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.conformance.peer import Peer

TOPIC: Final = "history"
MESSAGES: Final = 200_000
BODY: Final = bytes(1024)
TAGS: Final = 100
TAG_ROUNDS: Final = 7
TURN: Final = 1000
BULK: Final = 4096, 4 << 20
JAVA_MESSAGES: Final = 50_000
PARTS: Final = ("throughput", "tags", "java", "sends", "memory", "requests")
ONE_TAG: Final = f"one tag of {TAGS}"
CASES: Final = (
    *(f"{work}, {place}" for work in ("upload", "bulk pull") for place in PLACES),
    ONE_TAG,
    tier_java.CASE,
    *tier_beside.CASES,
)
COLUMNS: Final = (
    ("rate_ratio", "rate ÷ that of the bare driver, without the tag, of Apache's tier", 1, 2),
    ("cpu_ratio", "CPU of the same ÷ ours", 1, 2),
    ("read_ratio", "bytes read ÷ matching messages and all units", 1, 2),
    *tier_beside.COLUMNS,
)


class Calls:
    """The calls of the driver, as the broker makes them."""

    def __init__(self) -> None:
        self.reads: list[tuple[str, Any]] = []

    @property
    def read_bytes(self) -> int:
        return sum(end - start for _, ranges in self.reads for start, end in ranges)

    def watch(self) -> None:
        read = PosixDriver.read

        def noted_read(driver: PosixDriver, path: str, ranges: Any) -> Any:
            self.reads.append((path, ranges))
            return read(driver, path, ranges)

        PosixDriver.read = noted_read  # type: ignore[method-assign]


def start(folder: Path) -> BrokerUnderTest:
    config = broker_config(
        folder,
        message_store_plug_in="tieredstore",
        tiered_backend_service_provider="posix",
        tiered_store_file_path=folder / "tier",
        tiered_storage_level="FORCE",
    )
    broker = BrokerUnderTest(
        folder,
        config,
        commit_log_file_bytes=1 << 28,
        consume_queue_file_bytes=6_000_000,
        index_slot_count=5000,
        index_entry_count=20_000,
        ring_rows=1 << 17,
    )
    broker.create_topic(TOPIC, 1)
    return broker


def fill_tags(broker: BrokerUnderTest, count: int) -> None:
    store, queue = broker.store, broker.store.queue(TOPIC, 0)
    properties = [(encode_properties({"TAGS": f"t{n}"}), tags_code(f"t{n}")) for n in range(TAGS)]
    for first in range(0, count, TURN):
        store.write_path.begin()
        for number in range(first, first + TURN):
            raw, code = properties[number % TAGS]
            store.write_path.append(queue, BODY, raw, code, 0, 0, 1, HOST, 0)
        store.write_path.commit()
        store.write_path.publish()
        store.index_tick()
    store.flusher.flush_now()


def upload(broker: BrokerUnderTest) -> None:
    for following in broker.store.followers.all:
        following.catch_up()


def read_all(broker: BrokerUnderTest, tags: frozenset[int] | None) -> int:
    """Bytes of the messages read; nothing is in memory before."""
    assert broker.tier is not None
    broker.tier.reader.blocks.expire(math.inf)
    source = broker.directory.serve(TOPIC, 0, Use.PULL).source
    at, byte_count = 0, 0
    while at < source.max_offset():
        result = ready(partial(source.get_bulk, at, *BULK, tags))
        at = result.next_offset
        byte_count += result.body_bytes if result.status is GetStatus.FOUND else 0
    return byte_count


class Pair(NamedTuple):
    """What a broker and a bare loop cost."""

    ours: Cost
    bare: Cost


def one_tag(folder: Path, count: int) -> Report:
    """What a pull of one tag reads and costs, beside what matches, all units, and all messages."""
    calls = Calls()
    broker = start(folder)
    fill_tags(broker, count)
    upload(broker)
    calls.watch()
    matching = read_all(broker, frozenset({tags_code("t7")}))
    wanted = matching + 20 * count
    read_ratio = calls.read_bytes / wanted
    pairs = [
        Pair(
            cost_here(partial(read_all, broker, frozenset({tags_code("t7")})), 0),
            cost_here(partial(read_all, broker, None), 0),
        )
        for _ in range(TAG_ROUNDS)
    ]
    broker.close()
    ratios = [_ratios(pair) for pair in pairs]
    medians = {name: statistics.median(each[name] for each in ratios) for name in ratios[0]}
    return {"read_ratio": read_ratio, **medians}


def rounds(name: str, directory: Path, byte_count: int, count: int) -> Iterator[tuple[str, Report]]:
    """Upload to a place and drain it, each beside the bare loop."""
    filled = directory / "filled"
    with broker_on(directory, filled, {}) as (peer, _):
        messages = fill(peer, byte_count)
    for number in range(count):
        folder = directory / f"{name}-{number}"
        home = folder / "home"
        home.mkdir(parents=True)
        store = shutil.copytree(filled, folder / "store")
        with (
            PLACES[name](folder) as place,
            broker_on(home, store, place.settings) as (peer, sums),
        ):
            yield f"upload, {name}", _ratios(upload_beside(place, peer.broker_pid, messages))
            while sums().get("rocketmq_tiered_store_dispatch_behind", 1):
                time.sleep(SAMPLE_S)
            for _ in range(2):
                yield f"bulk pull, {name}", _ratios(drain_beside(place, peer))
        shutil.rmtree(folder)


def upload_beside(place: Place, pid: int, messages: int) -> Pair:
    """An upload, and then as many bytes by the driver."""
    ours = cost_of_upload(place, pid, messages * BODY_BYTES)
    bare = cost_here(lambda: place.write_bare(ours.byte_count, "bare"), ours.byte_count)
    for folder in list(place.folder.rglob("bare")):
        shutil.rmtree(folder)
    return Pair(ours, bare)


def drain_beside(place: Place, peer: Peer) -> Pair:
    """A drain of all queues, and then a read of all by the driver; neither finds files cached."""
    size = place.kept_bytes
    place.drop_cached()
    cpu, began = cpu_s([peer.broker_pid]), time.monotonic()
    drain(peer.broker)
    ours = Cost(size, time.monotonic() - began, cpu_s([peer.broker_pid]) - cpu)
    place.drop_cached()
    return Pair(ours, cost_here(lambda: place.read_bare(PIECE_BYTES), size))


def _ratios(pair: Pair) -> Report:
    ours, bare = pair
    return {"rate_ratio": bare.seconds / ours.seconds, "cpu_ratio": bare.cpu_s / ours.cpu_s}


class Run:
    """One run. reports: all figures so far, by case."""

    def __init__(self, directory: Path, *, is_short: bool, share: float = 0.5) -> None:
        self.reports: dict[str, list[Report]] = {}
        self._directory = directory
        self._share = share
        self._rounds = 1 if is_short else 3
        self._byte_count = (100 if is_short else 1000) << 20
        self._seconds = 2.0 if is_short else 8.0

    def throughput(self) -> None:
        for name in PLACES:
            self._add(rounds(name, self._folder(name), self._byte_count, self._rounds))

    def tags(self) -> None:
        report = one_tag(self._folder("tags"), MESSAGES * self._rounds // 3)
        self._add([(ONE_TAG, report)])

    def java(self) -> None:
        report = tier_java.drains(self._folder("java"), JAVA_MESSAGES, self._rounds)
        self._add([(tier_java.CASE, report)])

    def sends(self) -> None:
        length = 2 * self._rounds + 1, self._seconds, self._share
        self._add(beside_folder(self._folder("beside"), *length))
        self._add(beside_hanging(self._folder("hanging"), *length))

    def memory(self) -> None:
        self._add(idle_memory(self._folder("memory"), self._rounds))

    def requests(self) -> None:
        self._add(requests(self._folder("requests"), self._byte_count))

    def _folder(self, name: str) -> Path:
        folder = self._directory / name
        folder.mkdir()
        return folder

    def _add(self, measured: Iterable[tuple[str, Report]]) -> None:
        for case, report in measured:
            self.reports.setdefault(case, []).append(report)
            figures = "  ".join(f"{key} {value:,.2f}" for key, value in report.items())
            say(f"{case:28} {figures}  load {os.getloadavg()[0]:.1f}")


def markdown(reports: dict[str, list[Report]]) -> str:
    """The tables of a run."""
    peers = {OURS: reports}
    return f"{bars_table(TIER, peers)}\n{tables({'peers': peers}, CASES, COLUMNS)}"


def main(options: list[str]) -> None:
    parser = argparse.ArgumentParser("tests.bench tier", description=__doc__)
    parser.add_argument("--short", action="store_true", help="a tenth of the messages, one round")
    parser.add_argument("--share", type=float, default=0.5, help="of the peak, for paced sends")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    chosen = parser.parse_args(options)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        run = Run(Path(folder), is_short=chosen.short, share=chosen.share)
        for part in chosen.only:
            getattr(run, part)()
    sys.stdout.write(markdown(run.reports))
