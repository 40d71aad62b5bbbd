"""Simulations keep every promise, and a seed is one run. ``make sim`` runs more seeds."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import NamedTuple

import pytest
import trio

from headrace.errors import NoQueue
from tests.simulation import static_topics
from tests.simulation.network import FaultyNetwork
from tests.simulation.run import ALL, KINDS, run_seed
from tests.simulation.static_promises import StaticHistory
from tests.simulation.totals import KindTotals, Totals
from tests.simulation.workload import TOPIC, Workload
from tests.support.stores import held

# Each kind of seed; without what decides about chance, these differ.
SEEDS = [
    "store 30",
    "store 34",
    "followed 11",
    "waiting 5",
    "pop 4",
    "cluster 64",
    "static 5",
    "chains 3",
    "compacted 6",
    "tiered 3",
    "objects 3",
    "users 3",
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
from tests.simulation.run import run_seed

structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
for each in sys.argv[1:]:
    kind, seed = each.split()
    print(run_seed(kind, int(seed)))
"""
DISK_FAULTS = {"full disk", "kill", "lost page", "power cut"}


class Wanted(NamedTuple):
    """Findings that seeds of a kind must have, so that its promises mean something.

    quick, long: how many seeds. faults: those that are frequent enough; the page has all. least:
    of a count, for each seed.
    """

    quick: int
    long: int
    faults: set[str]
    counts: Collection[str] = ()
    least: Mapping[str, float] = MappingProxyType({})


WANTED = {
    ALL: Wanted(
        *(32, 250),
        {
            "cut answer", "cut request", "failed sync", "failed write", "flipped bit, found",
            "ghost connection", "lost name", "page dropped by a failed sync", "restart",
            "slow connection", "slow disk", "torn page", *DISK_FAULTS,
        },
        {
            "acknowledged, then expired", "log files cleaned", "power cuts while cleaning",
            "queue and index files cleaned", "records expired", "records in encoded blocks",
            "records trimmed",
        },
    ),
    "followed": Wanted(
        *(10, 100),
        {"failed sync", *DISK_FAULTS},
        {"log files cleaned", "records expired"},
        {"messages copied": 30},
    ),
    "waiting": Wanted(
        *(15, 100),
        {"failed sync", *DISK_FAULTS},
        {
            "checks", "discarded messages resumed", "messages sent back", "timers recalled",
            "timers stored again", "transactions committed", "transactions discarded",
            "transactions rolled back",
        },
        {"messages acknowledged": 40, "messages that waited": 40},
    ),
    "pop": Wanted(
        *(15, 100),
        {"failed sync", "failed write", "kill", "lost page", "power cut"},
        {"times changed"},
        {"messages acked": 15, "messages popped": 30, "retries popped": 15},
    ),
    "static": Wanted(
        *(10, 60),
        {"admin cut off", "clock jump", "empty nameserver", "power cut"},
        {
            "changes half done", "expired", "items cleaned up", "moves, available",
            "moves, strict", "rebalances", "repairs",
        },
        {"acknowledged": 50},
    ),
    "compacted": Wanted(
        *(10, 80),
        DISK_FAULTS,
        {"losses of older messages", "topics deleted"},
        {"messages dropped": 10, "compactions": 1, "rebuilds": 1},
    ),
    "chains": Wanted(
        *(10, 50),
        {"kill", "restart"},
        {"markers kept for older items"},
        {"messages dropped": 10, "moves": 2},
    ),
    "tiered": Wanted(
        *(10, 60),
        {"kill", "power cut", "tier away", "tier flaky", "tier full", "tier lossy"},
        {"log files cleaned", "segments expired", "topics deleted", "uploads"},
        {"messages sent": 50},
    ),
    "objects": Wanted(
        *(10, 80),
        {"kill", "power cut", "tier away", "tier busy", "tier lossy", "tier repeating"},
        {
            "log files cleaned", "objects made by merges", "segments expired", "takeovers",
            "topics deleted", "uploads", "uploads of a rival", "uploads refused",
        },
        {"messages sent": 50},
    ),
    "users": Wanted(
        *(10, 200),
        {"failed write", "kill", "power cut"},
        {"changes rejected", "log-ins"},
        {"changes answered": 5, "sends denied": 20, "sends stored": 10},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("length", ["quick", pytest.param("long", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", WANTED)
def test_seeds(kind: str, length: str, tmp_path: Path) -> None:
    wanted = WANTED[kind]
    count = getattr(wanted, length)
    kinds = totals_of(kind, count, tmp_path)
    counts = sum_of(each.counts for each in kinds)
    assert counts.keys() >= set(wanted.counts)
    assert {name for name, least in wanted.least.items() if counts[name] <= least * count} == set()
    rare = {"reordered write-back"} if (kind, length) == (ALL, "long") else set()
    assert sum_of(each.faults for each in kinds).keys() >= wanted.faults | rare


def totals_of(kind: str, count: int, folder: Path) -> list[KindTotals]:
    """Totals of seeds that run in a process of their own and keep all promises."""
    keep = folder / "totals.json"
    command = ["tests.simulation.run", f"--kind={kind}", "--seed=1", f"--count={count}"]
    done = subprocess.run(
        [sys.executable, "-m", *command, f"--keep={keep}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    totals = Totals.load(keep)
    assert (totals.seed_count, totals.failed) == (count, [])
    return list(totals.kinds.values())


def sum_of(counts: Iterable[dict[str, int]]) -> Counter[str]:
    """Those that are not 0."""
    return sum(map(Counter, counts), Counter())


def test_every_kind_has_seeds_in_the_gate() -> None:
    assert WANTED.keys() | {"cluster", "store"} == {ALL, *KINDS}  # which are those of ALL


async def test_a_leader_that_the_nameserver_forgot_is_waited_for(autojump_clock: object) -> None:
    tries = []

    class Forgotten(Workload):
        async def read_queues(self) -> bool:
            tries.append(trio.current_time())
            if len(tries) == 1:
                raise NoQueue(TOPIC, "use")
            return True

    class OfStaticTopic(static_topics.StaticWorkload, Forgotten):
        """One whose first route lacks the leader."""

    async with trio.open_nursery() as nursery:
        network = FaultyNetwork(Random(0), nursery)
        history = StaticHistory(is_sync=True, window_s=0.0)
        await OfStaticTopic(network, history, []).read_all()
    assert [tried_s - tries[0] for tried_s in tries] == [0, 1]


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
    """The outcome of each seed in a process that begins with ``setup``."""
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
@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_leaves_nothing_open(seed: str) -> None:
    before = {*held(Path("/headrace-"))}  # of a test whose seed was to fail
    kind, number = seed.split()
    run_seed(kind, int(number))
    gc.collect()
    assert {*held(Path("/headrace-"))} - before == set()
