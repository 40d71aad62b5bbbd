"""Simulations keep every promise; with a bug put in they do not. ``make sim`` runs more seeds."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import trio

from headrace.errors import NoQueue
from headrace_broker.inner.delivered import Delivered
from headrace_broker.processors.send import SendProcessor
from headrace_broker.schedule.service import Schedule
from headrace_broker.statictopic import changes
from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.file_seal import FileSeal, StoreDamaged
from headrace_broker.store.files.filesystem import Files
from headrace_broker.store.files.mapped_file import MappedFile
from headrace_broker.store.files.mapped_file_queue import MappedFileQueue
from headrace_broker.store.followers import follower_work
from headrace_broker.store.followers.followers import Following
from headrace_broker.store.log import commit_log, log_blocks, record_checksum
from headrace_broker.store.log.encoded_records import EncodedRecords
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.queues import queue_blocks
from headrace_broker.store.retention.cleaner import Cleaner
from headrace_broker.store.retention.disk_forecast import nothing_to_consume
from headrace_broker.store.retention.floor_file import FloorFile
from headrace_broker.store.retention.rules import ClockWatch
from headrace_broker.store.write.flush import Flusher
from headrace_broker.tiered.container.flat_queue import FlatQueue
from headrace_broker.tiered.objects.manifest_file import ManifestFile
from headrace_broker.tiered.objects.object_tier import ObjectTier
from headrace_broker.timer.arrivals import TIMER
from headrace_broker.timer.waiting_timers import WaitingTimers
from headrace_broker.transaction import rebuild
from headrace_protocol.errors import RequestError
from headrace_protocol.statictopic import plans
from tests.simulation import (
    followed_lives,
    object_lives,
    simulation,
    static_topics,
    store_lives,
    tiered_lives,
    waiting_lives,
)
from tests.simulation.history import PromiseBroken
from tests.simulation.network import FaultyNetwork
from tests.simulation.run import CLUSTER_EVERY, run_seed
from tests.simulation.static_promises import StaticHistory
from tests.simulation.totals import KindTotals, Totals
from tests.simulation.workload import TOPIC, Workload
from tests.support.followers import CopyingFollower
from tests.support.stores import held

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.store.retention.disk_forecast import LowestUnconsumed
    from headrace_broker.transaction.halves import Decision
    from headrace_protocol.columns import Array

FLUSH_LOG = Flusher.flush_log
DETACH_FIRST = MappedFileQueue.detach_first
SLOT = record_checksum.checksum_slot
SCAN_PROPERTIES = SendProcessor._scan_properties
CONTINUED = plans._continued
READ_BLOCK = queue_blocks.read_block
# Those that are frequent enough; the page has all.
FAULTS = {
    "cut answer", "cut request", "failed sync", "failed write", "flipped bit, found", "full disk",
    "ghost connection", "kill", "lost name", "lost page", "page dropped by a failed sync",
    "power cut", "reordered write-back", "restart", "slow connection", "slow disk", "torn page",
}  # fmt: skip
COUNTS = {
    "acknowledged, then expired", "log files cleaned", "power cuts while cleaning",
    "queue and index files cleaned", "records expired", "records in encoded blocks",
    "records trimmed",
}  # fmt: skip

# Each kind of seed; without what decides about chance, these differ.
SEEDS = [
    "store_lives 30",
    "store_lives 34",
    "followed_lives 11",
    "waiting_lives 5",
    "simulation 64",
    "static_topics 5",
    "compacted_chains 3",
    "compacted_lives 6",
    "tiered_lives 3",
    "object_lives 3",
]
HERE = "import gc, itertools, sys, time\n"
# Objects lie elsewhere, are collected at other times, and each look at a clock costs a second.
ELSEWHERE = f"""{HERE}
junk = [[None] * (number % 60) for number in range(9000)][::2]
gc.set_threshold(50)
time.perf_counter = itertools.count(1000.0).__next__
time.monotonic = itertools.count(9000.0).__next__
"""
RUN_SEEDS = """
import logging, structlog
from tests.simulation import (
    compacted_chains, compacted_lives, followed_lives, object_lives, simulation, static_topics,
    store_lives, tiered_lives, waiting_lives,
)

structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
for each in sys.argv[1:]:
    name, seed = each.split()
    print(vars()[name].run(int(seed)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first_seed", "count", "faults"),
    [
        (1, 32, FAULTS - {"reordered write-back"}),
        pytest.param(1, 250, FAULTS, marks=pytest.mark.long),
    ],
    ids=["1 to 32", "1 to 250"],
)
def test_seeds(first_seed: int, count: int, faults: set[str], tmp_path: Path) -> None:
    keep = tmp_path / "totals.json"
    command = ["tests.simulation.run", f"--seed={first_seed}", f"--count={count}", f"--keep={keep}"]
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    totals = Totals.load(keep)
    assert (totals.seed_count, totals.failed) == (count, [])
    assert {name for kind in totals.kinds.values() for name in kind.faults} >= faults
    assert {name for kind in totals.kinds.values() for name in kind.counts} >= COUNTS


@pytest.mark.slow
@pytest.mark.parametrize(
    "count", [10, pytest.param(100, marks=pytest.mark.long)], ids=["1 to 10", "1 to 100"]
)
def test_seeds_of_stores_with_a_follower(count: int, tmp_path: Path) -> None:
    kind = totals_of("followed", count, tmp_path)
    assert kind.counts["messages copied"] == kind.counts["records kept"] > 30 * count
    assert {"log files cleaned", "records expired"} <= kind.counts.keys()
    assert {"full disk", "kill", "lost page", "power cut", "failed sync"} <= kind.faults.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "count", [15, pytest.param(100, marks=pytest.mark.long)], ids=["1 to 15", "1 to 100"]
)
def test_seeds_of_messages_that_wait(count: int, tmp_path: Path) -> None:
    kind = totals_of("waiting", count, tmp_path)
    assert kind.counts["messages acknowledged"] > 40 * count
    assert kind.counts["messages that waited"] > 40 * count
    assert {
        "checks", "discarded messages resumed", "messages sent back", "timers recalled",
        "timers stored again", "transactions committed", "transactions discarded",
        "transactions rolled back",
    } <= {name for name, count in kind.counts.items() if count}  # fmt: skip
    assert {"full disk", "kill", "lost page", "power cut", "failed sync"} <= kind.faults.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "count", [10, pytest.param(60, marks=pytest.mark.long)], ids=["1 to 10", "1 to 60"]
)
def test_seeds_of_static_topics(count: int, tmp_path: Path) -> None:
    kind = totals_of("static", count, tmp_path)
    assert kind.counts["acknowledged"] > 50 * count
    assert {
        "changes half done", "expired", "items cleaned up", "moves, available", "moves, strict",
        "rebalances", "repairs",
    } <= {name for name, count in kind.counts.items() if count}  # fmt: skip
    assert {"admin cut off", "clock jump", "empty nameserver", "power cut"} <= kind.faults.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "count", [10, pytest.param(80, marks=pytest.mark.long)], ids=["1 to 10", "1 to 80"]
)
def test_seeds_of_compacted_topics(count: int, tmp_path: Path) -> None:
    kind = totals_of("compacted", count, tmp_path)
    assert kind.counts["messages dropped"] > 10 * count
    assert kind.counts["compactions"] > count
    assert kind.counts["rebuilds"] > count
    assert {"full disk", "kill", "lost page", "power cut"} <= kind.faults.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "count", [10, pytest.param(50, marks=pytest.mark.long)], ids=["1 to 10", "1 to 50"]
)
def test_seeds_of_compacted_static_topics(count: int, tmp_path: Path) -> None:
    kind = totals_of("chains", count, tmp_path)
    assert kind.counts["messages dropped"] > 10 * count
    assert kind.counts["moves"] > 2 * count
    assert kind.counts["markers kept for older items"] > 0
    assert {"kill", "restart"} <= kind.faults.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "count", [10, pytest.param(60, marks=pytest.mark.long)], ids=["1 to 10", "1 to 60"]
)
def test_seeds_of_tiered_topics(count: int, tmp_path: Path) -> None:
    kind = totals_of("tiered", count, tmp_path)
    assert kind.counts["messages sent"] > 50 * count
    assert {"log files cleaned", "segments expired", "topics deleted", "uploads"} <= {
        name for name, count in kind.counts.items() if count
    }
    assert {"kill", "power cut", "tier away", "tier flaky", "tier full", "tier lossy"} <= {
        name for name, count in kind.faults.items() if count
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "count", [10, pytest.param(80, marks=pytest.mark.long)], ids=["1 to 10", "1 to 80"]
)
def test_seeds_of_tiered_topics_in_a_bucket(count: int, tmp_path: Path) -> None:
    kind = totals_of("objects", count, tmp_path)
    assert kind.counts["messages sent"] > 50 * count
    assert {
        "log files cleaned", "objects made by merges", "segments expired", "takeovers",
        "topics deleted", "uploads", "uploads of a rival", "uploads refused",
    } <= {name for name, count in kind.counts.items() if count}  # fmt: skip
    assert {"kill", "power cut", "tier away", "tier busy", "tier lossy", "tier repeating"} <= {
        name for name, count in kind.faults.items() if count
    }


async def test_a_leader_that_the_nameserver_forgot_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    tries = []

    async def read(_: Workload) -> bool:
        tries.append(trio.current_time())
        if len(tries) == 1:
            raise NoQueue(TOPIC, "use")
        return True

    monkeypatch.setattr(Workload, "_read_queues", read)
    async with trio.open_nursery() as nursery:
        network = FaultyNetwork(Random(0), nursery)
        history = StaticHistory(is_sync=True, window_s=0.0)
        await static_topics.StaticWorkload(network, history, []).read_all()
    assert [tried_s - tries[0] for tried_s in tries] == [0, 1]


def totals_of(name: str, count: int, folder: Path, seed: int = 1) -> KindTotals:
    """What seeds of one kind come to in a process of their own, all promises kept."""
    keep = folder / "totals.json"
    command = ["tests.simulation.run", f"--kind={name}", f"--seed={seed}", f"--count={count}"]
    done = subprocess.run(
        [sys.executable, "-m", *command, f"--keep={keep}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (kind,) = Totals.load(keep).kinds.values()
    return kind


def test_the_page_has_the_totals_of_the_kept_run() -> None:
    totals = Totals.load(Path(__file__).with_name("totals.json"))
    page = Path(__file__).parents[2] / "docs" / "reliability.md"
    assert totals.as_text() in page.read_text()


@pytest.mark.slow
def test_a_seed_is_the_same_run_in_each_process() -> None:
    outcomes = outcomes_of(HERE, "1", SEEDS)
    assert len(outcomes) == len(SEEDS)
    assert outcomes_of(ELSEWHERE, "2", SEEDS[::-1]) == outcomes[::-1]


def outcomes_of(setup: str, hash_seed: str, seeds: list[str]) -> list[str]:
    """What each seed comes to in a process that begins with ``setup``."""
    done = subprocess.run(
        [sys.executable, "-c", setup + RUN_SEEDS, *seeds],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [CLUSTER_EVERY, 1])
def test_a_seed_leaves_nothing_open(seed: int) -> None:
    run_seed(seed)
    gc.collect()
    assert held(Path("/headrace-")) == []


def nothing(*_: Any) -> None:
    """In the place of what must be done."""


def always(*_: Any) -> bool:
    """In the place of what must be asked."""
    return True


def unwatched(*_: Any) -> LowestUnconsumed:
    """As if no group had anything to consume."""
    return nothing_to_consume


def detach_one_too_many(files: MappedFileQueue, count: int) -> list[MappedFile]:
    return DETACH_FIRST(files, count + bool(count and len(files.files) > count + 1))


def unflagged(record: bytes) -> bytes:
    """A checksum that is none."""
    return SLOT(record[:-1])


async def flush_log_too_late(flusher: Flusher) -> None:
    """As ``flush_log``, but what waits for it is answered when it begins."""
    flusher.commit_log.flushed_offset = flusher.commit_log.max_offset
    flusher._call_waiters()
    await FLUSH_LOG(flusher)


def wait_for_nothing(processor: SendProcessor, properties: str) -> Any:
    """As if each message had WAIT=false."""
    return *SCAN_PROPERTIES(processor, properties)[:-1], False


def read_unflushed(queue: Any, first: int, log: Any, _: int) -> Any:
    """As ``read_block``, whether or not the disk has it."""
    return READ_BLOCK(queue, first, log, 1 << 60)


def needs_nothing(_: Following) -> int:
    """As if the follower had all of the log on disk."""
    return sys.maxsize


def own_of_any_writer(manifest: ManifestFile) -> Any:
    """As ``_own``, whoever has written the manifest."""
    return manifest._read()


def names_nothing(_: ObjectTier) -> set[str]:
    """As if the manifest named no object."""
    return set()


def log_end_of(schedule: Schedule) -> int:
    """As if the offsets counted all that a start finds delivered."""
    return schedule._store.commit_log.max_offset


def drop_none(_timers: WaitingTimers, _sources: Array) -> Array:
    """As if the log held no deliveries."""
    return np.empty(0, TIMER)


def no_decisions(*_: Any) -> dict[int, Decision]:
    """As if each decision had its op record."""
    return {}


async def async_nothing(*_: Any) -> None:
    """In the place of what must be waited for."""


def continue_too_early(chain: Any, closed: Any, end: int) -> Any:
    """As if the old leader ended one message earlier."""
    return CONTINUED(chain, closed, max(end - 1, 0))


def at_once(_store: Any, then: Callable[[None], None]) -> None:
    """As ``when_on_disk``, without the wait."""
    then(None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "owner", "name", "bug", "first_seed"),
    [
        (simulation.run, MappedFile, "sync", nothing, 2),
        (simulation.run, Flusher, "flush_log", flush_log_too_late, 6),
        (store_lives.run, MappedFile, "sync", nothing, 0),
        (store_lives.run, Files, "sync_names", nothing, 0),
        (store_lives.run, MessageStore, "_mark_names_unsynced", nothing, 68),
        (store_lives.run, log_blocks, "_check", nothing, 50),
        (store_lives.run, FileSeal, "check", nothing, 0),
        (store_lives.run, commit_log, "checksum_slot", unflagged, 0),
        (store_lives.run, EncodedRecords, "_fill", nothing, 0),
        (store_lives.run, Cleaner, "_lowest_unconsumed", unwatched, 1),
        (store_lives.run, MappedFileQueue, "detach_first", detach_one_too_many, 3),
        (store_lives.run, MappedFile, "release", always, 5),
        (store_lives.run, ClockWatch, "is_trusted", always, 0),
        (store_lives.run, FloorFile, "save", nothing, 5),
        (simulation.run, SendProcessor, "_scan_properties", wait_for_nothing, 10),
        (followed_lives.run, follower_work, "read_block", read_unflushed, 5),
        (followed_lives.run, Following, "needed_from", needs_nothing, 4),
        (followed_lives.run, CopyingFollower, "sync", nothing, 0),
        (waiting_lives.run, Delivered, "scan", nothing, 0),
        (waiting_lives.run, Schedule, "_counted_to", log_end_of, 65),
        (waiting_lives.run, Flusher, "wait_flushed", async_nothing, 12),
        (waiting_lives.run, WaitingTimers, "drop_sources", drop_none, 0),
        (waiting_lives.run, rebuild, "_decisions", no_decisions, 6),
        (static_topics.run, plans, "_continued", continue_too_early, 1),
        (static_topics.run, changes, "when_on_disk", at_once, 5),
        pytest.param(
            *(static_topics.run, Cleaner, "_lowest_unconsumed", unwatched, 29),
            marks=pytest.mark.long,
        ),
        (tiered_lives.run, Following, "needed_from", needs_nothing, 2),
        (tiered_lives.run, FlatQueue, "_settle", nothing, 1),
        (object_lives.run, ManifestFile, "_own", own_of_any_writer, 0),
        (object_lives.run, ObjectTier, "named", names_nothing, 0),
        (object_lives.run, ObjectTier, "put", nothing, 0),
    ],
    ids=[
        "acknowledged without sync",
        "acknowledged before the sync",
        "flushed without sync",
        "names not synced",
        "names of a killed process not synced",
        "records not checked",
        "seals not checked",
        "wrong checksums of records",
        "encoded blocks not completed",
        "unconsumed cleaned",
        "one file too many cleaned",
        "cleaned under readers",
        "a clock believed that jumped",
        "limits of topics not saved",
        "no message waited for",
        "followed before the flush",
        "cleaned before it was followed",
        "positions saved before what was followed",
        "deliveries before a crash not looked for",
        "deliveries counted that were not",
        "offsets saved before the deliveries",
        "timers delivered before a crash not looked for",
        "commits without an op record not looked for",
        "a queue's new leader starts too early",
        "a queue closed before its messages are on disk",
        "unconsumed cleaned, of a static topic",
        "cleaned before it was uploaded",
        "parts of failed uploads kept",
        "an epoch that is over goes on",
        "objects swept that the manifest names",
        "objects named before they are there",
    ],
)
def test_a_planted_bug_is_found(
    run: Callable[[int], Any],
    owner: Any,
    name: str,
    bug: Callable[..., Any],
    first_seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The search begins at first_seed, which found the bug when it was planted."""
    monkeypatch.setattr(owner, name, bug)
    # Which of them comes first depends on how this process hashes strings. A tier that notices
    # another writer refuses by name, and nothing that is away explains it.
    found = (PromiseBroken, StoreFormatError, StoreDamaged, RequestError, AssertionError)
    with pytest.raises(found):
        run_seeds(run, first_seed)


def run_seeds(run: Callable[[int], Any], first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 100):
        run(seed)
