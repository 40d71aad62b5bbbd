"""The schedule of compaction, and the store after a run."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace_broker.compaction.checkpoint import PositionCheckpoint
from headrace_broker.compaction.compactor import Compactor, Request
from headrace_broker.compaction.queue_log import QueueLog
from headrace_broker.compaction.queues import CompactedQueues
from headrace_broker.compaction.run import Result
from headrace_broker.compaction.run_state import RunState, StateFile, own_folder
from headrace_broker.compaction.schedule import CompactionSchedule, RunTotals
from headrace_broker.compaction.segments import Folders
from headrace_broker.compaction.swap import Swap
from headrace_broker.compaction.throttle import Throttle
from headrace_broker.compaction.worker import Task, run_here
from headrace_broker.store.files.filesystem import Files
from headrace_broker.topics.attributes import CompactionPolicy
from tests.support.compaction_entries import SMALL, TOPIC, Entry, fill, read_entries
from tests.support.running import in_background
from tests.support.until import until

POLICY = CompactionPolicy(delete_retention_ms=1_000, min_lag_ms=0, max_lag_ms=500)
NAME = (TOPIC, 0)


class Store:
    """One compacted queue with a compactor; stands in for ``CompactedQueues``."""

    def __init__(self, root: Path) -> None:
        self.lock = threading.RLock()
        fs = Files()
        folders, own = Folders.of(root, TOPIC, 0), own_folder(root, TOPIC, 0)
        self.log = QueueLog(folders, SMALL, fs)
        self.state_file = StateFile(own, fs)
        self.queue: Any = SimpleNamespace(
            log=self.log, swap=Swap(folders, own, fs), state_file=self.state_file
        )
        self.positions = PositionCheckpoint(root, fs)
        self.throttle = Throttle(lambda: 0, lambda: False)
        self.during: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None
        self.free_bytes = 1 << 40
        self.compactor = Compactor(
            cast("CompactedQueues", self),
            self.positions,
            self.run,
            self.throttle,
            self.require_free,
        )

    def require_free(self, byte_count: int) -> None:
        if byte_count > self.free_bytes:
            raise OSError(errno.ENOSPC, f"{byte_count} bytes may be needed")

    def all(self) -> dict[tuple[str, int], Any]:
        return {NAME: self.queue} if self.queue else {}

    def run(self, task: Task, pace: Callable[[int], None]) -> Result:
        self.during()
        result = run_here(task, pace)
        self.after()
        return result

    def compact(self, now_ms: int = 1_000, *, is_forced: bool = False) -> Result | None:
        return self.compactor.compact(Request(NAME, POLICY, now_ms, 1 << 16, is_forced))

    @property
    def entries(self) -> list[Entry]:
        return read_entries(self.log.segments)


def some(count: int, first: int = 0, keys: int = 5, at_ms: int = 1_000) -> list[Entry]:
    return [
        Entry(f"k{number % keys}", b"x" * 100, number, at_ms)
        for number in range(first, first + count)
    ]


def offsets(entries: Sequence[Entry]) -> list[int]:
    return [entry.queue_offset for entry in entries]


def test_the_live_segment_waits_for_the_maximum_lag(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.compact() is None
    fill(store.log, some(8))
    assert store.compact(1_499) is None
    assert store.compact(1_500) is not None
    assert offsets(store.entries) == [3, 4, 5, 6, 7]
    assert store.compact(9_000) is None, "nothing is dirty"
    assert store.positions.get(*NAME, 8) == 7
    fill(store.log, some(2, 8, at_ms=9_000))
    assert store.compact(9_001) is None
    assert store.compact(9_001, is_forced=True) is not None
    assert offsets(store.entries) == [5, 6, 7, 8, 9]


@pytest.mark.slow
def test_sealed_segments_wait_until_half_of_the_log_is_dirty(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store.log, some(100, keys=90))
    assert store.compact() is not None
    sealed = len(store.log.segments)
    count = 100
    while store.compact(1_001) is None:
        fill(store.log, some(5, count, at_ms=1_001))
        count += 5
    assert sealed < len(store.log.segments) + 5
    assert 150 < count < 250


def test_messages_that_arrive_during_a_run_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store.log, some(100))
    store.during = lambda: fill(store.log, some(100, 100, keys=3))
    assert store.compact() is not None
    assert offsets(store.entries)[-100:] == [*range(100, 200)]
    assert store.state_file.load().position < 100


def test_a_log_that_is_cut_during_a_run_is_not_swapped(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store.log, some(100))
    store.after = lambda: store.log.cut(20)
    assert store.compact() is None
    assert offsets(store.entries) == [*range(20)]
    assert store.state_file.load() == RunState()
    store.after = lambda: None
    assert store.compact(is_forced=True) is not None
    assert len(store.entries) == 5


def test_a_queue_that_is_deleted_during_a_run_is_left_alone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store.log, some(100))

    def delete() -> None:
        store.queue = None

    store.after = delete
    assert store.compact() is None
    assert len(store.entries) == 100
    assert not [*tmp_path.rglob("compacting/*")]


def test_the_files_of_a_queue_may_vanish_during_a_run(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store.log, some(100))

    def delete() -> None:
        shutil.rmtree(tmp_path / "compaction")
        store.queue = None

    store.during = delete
    assert store.compact() is None


def test_markers_are_dropped_without_new_messages(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store.log, [Entry("a", b"1", 0), Entry("a", b"", 1), Entry("b", b"1", 2)])
    assert store.compact(2_000) is not None
    assert offsets(store.entries) == [1, 2]
    assert store.compact(3_000) is None
    assert store.compact(3_001) is not None
    assert offsets(store.entries) == [2]
    assert store.compact(9_000) is None


def test_a_run_that_might_not_fit_does_not_begin(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store.log, some(100))
    size = sum(segment.log_end for segment in store.log.segments)
    began: list[int] = []
    store.during = lambda: began.append(1)
    store.free_bytes = size - 1
    with pytest.raises(OSError, match=f"{size} bytes may be needed"):
        store.compact(is_forced=True)
    assert not began
    store.free_bytes = size
    assert store.compact(is_forced=True) is not None


def test_a_full_disk_gets_its_space_back(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store.log, some(100))

    def fail() -> None:
        assert [*tmp_path.rglob("compacting/*")]
        raise OSError(28, "No space left on device")

    store.after = fail
    with pytest.raises(OSError, match="No space left"):
        store.compact()
    assert not [*tmp_path.rglob("compacting/*")]
    assert len(store.entries) == 100


def test_the_position_of_another_broker_counts(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store.log, some(10))
    store.positions.save(*NAME, 9)
    assert store.compact(9_000) is None
    store.positions.save(*NAME, 99)
    assert store.compact(9_000) is not None, "it is that of a log that was lost"


def test_the_state_describes_the_last_run(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store.log, some(100))
    store.compact(1_700)
    state = store.state_file.load()
    assert (state.position, state.last_run_ms) == (100, 1_700)
    assert (state.kept_count, state.dropped_count) == (5, 95)
    assert state.bytes_before > 10 * state.bytes_after
    assert state.bytes_after == sum(segment.log_end for segment in store.log.segments)


# --- the schedule ---------------------------------------------------------------------------------


def make_schedule(store: Store, interval_ms: int = 1_000) -> tuple[CompactionSchedule, RunTotals]:
    config: Any = SimpleNamespace(
        compaction_schedule_internal=interval_ms,
        compaction_thread_num=2,
        max_offset_map_size=1 << 20,
        enable_compaction=True,
    )
    schedule = CompactionSchedule(
        store.compactor,
        lambda _topic: POLICY,
        lambda _topic, _queue_id: False,
        config,
        lambda: 1_000,
        Random(1),
    )
    return schedule, schedule.totals


@pytest.mark.slow
async def test_a_request_compacts_at_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store.log, some(10))
    schedule, totals = make_schedule(store, 1_000_000)
    assert schedule.request("other") == 0
    async with in_background(schedule.run):
        assert schedule.request(TOPIC) == 1
        assert schedule.is_pending(TOPIC)
        await until(lambda: totals.run_count == 1)
        assert not schedule.is_pending(TOPIC)
    assert len(store.entries) == 5
    assert totals.run_s > 0
    assert totals.dropped_count == 5


@pytest.mark.slow
async def test_each_queue_is_compacted_at_intervals(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store.log, some(100))
    schedule, totals = make_schedule(store, 20)
    async with in_background(schedule.run):
        await until(lambda: totals.run_count == 1)
        fill(store.log, some(200, 100))
        await until(lambda: totals.run_count == 2)
    assert totals.dropped_count == 280


async def test_a_stop_ends_a_run_on_the_way(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store.log, some(100))
    schedule, totals = make_schedule(store)
    is_running = threading.Event()

    def wait() -> None:
        is_running.set()
        while True:
            store.throttle.pace(0)

    store.during = wait
    async with in_background(schedule.run):
        schedule.request(TOPIC)
        await until(is_running.is_set)
    assert totals == RunTotals()
    assert len(store.entries) == 100


@pytest.mark.slow
async def test_a_run_that_fails_is_retried(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store.log, some(100))
    schedule, totals = make_schedule(store, 20)

    def fail() -> None:
        if not totals.failure_count:
            raise OSError(28, "No space left on device")

    store.during = fail
    async with in_background(schedule.run):
        await until(lambda: totals.run_count == 1)
    assert totals.failure_count == 1
