"""Removing what has expired, and nothing else."""

from __future__ import annotations

import datetime as dt
import errno
import os
import random
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import structlog
import trio
import trio.testing

from headrace_broker.store.errors import StoreNotWritable
from headrace_broker.store.files.filesystem import RESERVE_BYTES_MAX, DiskUsage
from headrace_broker.store.retention.rules import TRUST_S
from headrace_broker.store.retention.topic_floors import TopicLimit
from headrace_broker.store.settings import Retention
from headrace_broker.store.store_source import GetStatus
from tests.support.quota_files import QuotaFiles
from tests.support.running import running
from tests.support.stores import (
    FaultyFiles,
    SetClock,
    crash,
    open_store,
    put,
    query_index,
    read_all,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping
    from pathlib import Path

    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.store.retention.disk_forecast import LowestUnconsumed
    from headrace_protocol.frame import Buffer

HOUR_MS = 3600 * 1000
FILE_BYTES = 4096
ANY_HOUR = frozenset(range(24))
# The disk of whoever runs the tests is none of theirs.
NO_DISK = {"clean_ratio": 1.0, "force_ratio": 1.0, "refuse_ratio": 1.0}


def any_hour(**changes: Any) -> Retention:
    return Retention(**{"delete_hours": ANY_HOUR, **NO_DISK, **changes})


def fill(store: MessageStore, number: int) -> None:
    """Four messages, which fill a file."""
    for _ in range(4):
        put(store, store.queue("T", 0), bytes(900), KEYS=str(number))


def settle(store: MessageStore) -> None:
    store.index_tick()
    store.flusher.flush_now()


def set_ages(store: MessageStore, ages_h: Iterable[float]) -> None:
    assert isinstance(store.clock, SetClock)
    for file, age_h in zip(store.commit_log.files.files, ages_h, strict=False):
        os.utime(file.path, times=(0, store.clock.ms / 1000 - age_h * 3600))


def aged_store(root: Path, ages_h: list[float], **changes: Any) -> MessageStore:
    """One file for each age, oldest first, and one that is new; records and files are from then."""
    clock = SetClock()
    changes.setdefault("retention", any_hour())
    store = open_store(root, clock, **changes)
    now_ms = clock.ms
    for number, age_h in enumerate(ages_h):
        clock.ms = round(now_ms - age_h * HOUR_MS)
        fill(store, number)
    clock.ms = now_ms
    put(store, store.queue("T", 0), bytes(900), KEYS="last")
    settle(store)
    set_ages(store, [*ages_h, 0])
    return store


def log_file_names(root: Path) -> list[int]:
    return sorted(int(path.name) // FILE_BYTES for path in (root / "commitlog").iterdir())


async def clean(store: MessageStore) -> list[int]:
    """One round; returns the log files on disk after it, by number."""
    await store.cleaner.round()
    return log_file_names(store.root)


def unconsumed(lowest: Mapping[str, Mapping[int, int]]) -> LowestUnconsumed:
    def look(
        topic: str, queue_ids: Iterable[int]
    ) -> Generator[None, None, Mapping[int, tuple[int, str]]]:
        yield
        known = lowest.get(topic, {})
        return {queue_id: (known[queue_id], "g") for queue_id in queue_ids if queue_id in known}

    return look


# --- by age ---------------------------------------------------------------------------------


async def test_expired_files_go_oldest_first(tmp_path: Path) -> None:
    store = aged_store(tmp_path, [100, 73, 71, 90])
    assert await clean(store) == [2, 3, 4]  # the fourth stays: the third is still young
    assert store.commit_log.min_offset == 2 * FILE_BYTES
    queue = store.queue("T", 0)
    first = store.source(queue).min_offset()
    assert store.source(queue).get(0, 9, 9, None).status is GetStatus.OFFSET_TOO_SMALL
    assert read_all(store, queue)[0].queue_offset == first > 0
    assert query_index(store, "T", "0", 9, 0, 1 << 62) == []
    assert query_index(store, "T", "2", 9, 0, 1 << 62)
    assert await clean(store) == [2, 3, 4]
    for _ in range(2):
        crash(store)
        store = open_store(tmp_path, store.clock)
        assert store.source(store.queue("T", 0)).min_offset() == first


async def test_the_last_file_stays_and_a_round_is_bounded(tmp_path: Path) -> None:
    store = aged_store(tmp_path, [100] * 13)
    set_ages(store, [100] * 14)
    counts = [len(await clean(store)) for _ in range(3)]
    assert counts == [4, 1, 1]
    folders = [tmp_path / "consumequeue" / "T" / "0", tmp_path / "index"]
    assert [len(list(folder.iterdir())) for folder in folders] == [1, 1]
    put(store, store.queue("T", 0), b"goes on")
    assert read_all(store, store.queue("T", 0))[-1].body == b"goes on"


async def test_at_another_hour_nothing_goes_unless_asked_for(tmp_path: Path) -> None:
    clock = SetClock()
    hour = dt.datetime.fromtimestamp(clock.ms / 1000).astimezone().hour
    other = any_hour(delete_hours=frozenset({(hour + 1) % 24}))
    store = aged_store(tmp_path, [100, 100], retention=other)
    assert await clean(store) == [0, 1, 2]
    store.cleaner.retention = any_hour(delete_hours=frozenset({hour}), files_max=1)
    assert await clean(store) == [1, 2]
    store.cleaner.retention = other
    store.cleaner.request()
    assert await clean(store) == [2]


async def test_asking_is_good_for_twenty_rounds(tmp_path: Path) -> None:
    store = aged_store(tmp_path, [100], retention=any_hour(delete_hours=frozenset()))
    set_ages(store, [0, 0])
    store.cleaner.request()
    for _ in range(20):
        assert await clean(store) == [0, 1]
    set_ages(store, [100, 0])
    assert await clean(store) == [0, 1]
    store.cleaner.request()
    assert await clean(store) == [1]


async def test_it_cleans_by_itself(tmp_path: Path, autojump_clock: object) -> None:
    store = aged_store(tmp_path, [100])
    async with running(store.run):
        # No limit of the clock, which goes on while a thread flushes.
        while store.commit_log.min_offset != FILE_BYTES:  # noqa: ASYNC110
            await trio.sleep(1)


# --- copies and clocks ----------------------------------------------------------------------


async def test_a_copy_without_its_times_is_kept_as_if_new(tmp_path: Path) -> None:
    store = aged_store(tmp_path, [100, 90])
    set_ages(store, [0, 0, 0])
    assert await clean(store) == [0, 1, 2]


@pytest.mark.parametrize("age_h", [101, 400_000])
async def test_a_copy_with_times_of_long_ago_loses_nothing(tmp_path: Path, age_h: float) -> None:
    store = aged_store(tmp_path, [100, 5, 1])
    set_ages(store, [age_h] * 4)  # as an archive without times leaves it
    # By its records the first file was full when the second began, 5 h ago.
    assert await clean(store) == [0, 1, 2, 3]
    store.close()
    later = SetClock(store.commit_log.clock.now_ms() + 70 * HOUR_MS)
    store = open_store(tmp_path, later, retention=any_hour())
    assert await clean(store) == [1, 2, 3]


async def test_times_in_the_future_keep(tmp_path: Path) -> None:
    store = aged_store(tmp_path, [100, 90])
    set_ages(store, [-1000, -1000, -1000])
    assert await clean(store) == [0, 1, 2]


async def test_a_clock_that_jumps_removes_nothing(tmp_path: Path, autojump_clock: object) -> None:
    store = aged_store(tmp_path, [3, 2])
    store.cleaner.topic_limits = lambda: {"T": TopicLimit(HOUR_MS * 24, None)}
    await clean(store)
    assert isinstance(store.clock, SetClock)
    store.clock.ms += 1000 * HOUR_MS
    with structlog.testing.capture_logs() as logs:
        assert await clean(store) == [0, 1, 2]
    assert [entry["jump_hours"] for entry in logs] == [1000]
    await trio.sleep(TRUST_S - 1)
    store.clock.ms += round((TRUST_S - 1) * 1000)
    assert await clean(store) == [0, 1, 2]
    assert store.source(store.queue("T", 0)).min_offset() == 0
    store.clock.ms -= 1000 * HOUR_MS  # set right in time
    await clean(store)
    await trio.sleep(TRUST_S)
    store.clock.ms += round(TRUST_S * 1000)
    assert await clean(store) == [0, 1, 2]
    assert store.source(store.queue("T", 0)).min_offset() == 0


# --- who still needs it ---------------------------------------------------------------------


async def test_what_is_not_consumed_stays(tmp_path: Path) -> None:
    store = aged_store(tmp_path, [100, 100, 100])
    progress = {"T": {0: 5}}
    store.cleaner.unconsumed = lambda: unconsumed(progress)
    with structlog.testing.capture_logs() as logs:
        assert await clean(store) == [1, 2, 3]  # the sixth message is in the second file
    logs = [entry for entry in logs if "oldest" in entry]
    assert logs[0]["count"] == 2
    assert logs[0]["oldest"] == "group g, topic T, queue 0"
    assert store.statistics().cleaner.oldest_unconsumed == "group g, topic T, queue 0"
    progress["T"][0] = 8
    assert await clean(store) == [2, 3]
    progress["T"][0] = store.queue("T", 0).next_offset
    assert await clean(store) == [3]


async def test_it_goes_all_the_same_when_a_setting_says_so(tmp_path: Path) -> None:
    store = aged_store(tmp_path, [100, 100])
    store.cleaner.unconsumed = lambda: unconsumed({"T": {0: 0}})
    assert await clean(store) == [0, 1, 2]
    store.cleaner.retention = any_hour(removes_unconsumed=True)
    assert await clean(store) == [2]


async def test_offsets_of_what_is_gone_hold_nothing(tmp_path: Path) -> None:
    store = aged_store(tmp_path, [100, 100, 1])
    assert await clean(store) == [2, 3]
    for offset in (0, -1, 1 << 40):
        store.cleaner.unconsumed = partial(unconsumed, {"T": {0: offset}})
        set_ages(store, [100, 0])
        store.cleaner.retention = any_hour(reserved_ms=0)
        held = offset <= 0
        assert await clean(store) == ([2, 3] if held else [3])


async def test_a_file_that_is_not_flushed_or_indexed_stays(tmp_path: Path) -> None:
    store = open_store(tmp_path, retention=any_hour(reserved_ms=-(1 << 50)))
    for _ in range(9):
        put(store, store.queue("T", 0), bytes(900), KEYS="k")
    assert await clean(store) == [0, 1, 2]
    store.flusher.flush_log_now()
    assert await clean(store) == [0, 1, 2]
    store.index_tick()
    assert await clean(store) == [2]


async def test_a_reader_keeps_its_file(tmp_path: Path) -> None:
    store = aged_store(tmp_path, [100, 100])
    queue = store.queue("T", 0)
    result = store.source(queue).get(0, 1, 1, None)
    before = bytes(result.buffers[0])
    assert await clean(store) == [0, 1, 2]  # the second waits for the first: no gaps on disk
    assert store.commit_log.min_offset == 2 * FILE_BYTES  # nobody else gets it
    assert store.statistics().cleaner.waiting_files >= 2
    assert await clean(store) == [0, 1, 2]
    assert bytes(result.buffers[0]) == before
    del result
    assert await clean(store) == [2]
    assert store.statistics().cleaner.waiting_files == 0


async def test_killed_while_a_reader_holds_it_the_store_is_whole(tmp_path: Path) -> None:
    store = aged_store(tmp_path, [100, 100, 100])
    result = store.source(store.queue("T", 0)).get(4, 1, 1, None)  # of the second file
    assert await clean(store) == [1, 2, 3]
    crash(store)
    again = open_store(tmp_path, store.clock)
    assert again.commit_log.min_offset == FILE_BYTES
    # The first queue file is gone, and with it the way to the first of what lies in the log.
    assert [m.queue_offset for m in read_all(again, again.queue("T", 0))] == [10, 11, 12]
    again.close()
    del result


async def test_a_reader_of_units_holds_no_log_file(tmp_path: Path) -> None:
    store = aged_store(tmp_path, [100] * 4)
    units = store.queue("T", 0).consume_queue.units_view(0, 5)
    before = bytes(units)
    assert await clean(store) == [4]
    queue_files = list((tmp_path / "consumequeue" / "T" / "0").iterdir())
    assert len(queue_files) == 2
    assert bytes(units) == before
    del units
    await clean(store)
    assert len(list((tmp_path / "consumequeue" / "T" / "0").iterdir())) == 1


# --- disks that don't obey ------------------------------------------------------------------


class StubbornFiles(FaultyFiles):
    """Does not give up files while it says so."""

    def __init__(self) -> None:
        super().__init__()
        self.error = 0

    def unlink(self, path: Path) -> None:
        if self.error:
            raise OSError(self.error, os.strerror(self.error), str(path))
        super().unlink(path)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES])
async def test_a_file_that_can_not_be_removed_is_tried_again(tmp_path: Path, error: int) -> None:
    files = StubbornFiles()
    store = aged_store(tmp_path, [100, 100], files=files)
    files.error = error
    with structlog.testing.capture_logs() as logs:
        assert await clean(store) == [0, 1, 2]
    assert "file not removed, retrying" in {entry["event"] for entry in logs}
    put(store, store.queue("T", 0), b"goes on")
    files.error = 0
    assert await clean(store) == [2]
    assert read_all(store, store.queue("T", 0))[-1].body == b"goes on"


async def test_files_that_somebody_else_removed(tmp_path: Path) -> None:
    store = aged_store(tmp_path, [100, 100, 1])
    for path in sorted((tmp_path / "commitlog").iterdir())[:2]:
        path.unlink()
    assert await clean(store) == [2, 3]
    assert store.commit_log.min_offset == 2 * FILE_BYTES


async def test_an_error_of_a_round_does_not_end_the_broker(
    tmp_path: Path, autojump_clock: object
) -> None:
    class NoStatistics(FaultyFiles):
        def disk_usage(self, path: Path) -> DiskUsage:
            raise OSError(errno.EIO, "no answer", str(path))

    store = aged_store(tmp_path, [1], files=NoStatistics())
    with structlog.testing.capture_logs() as logs:
        async with running(store.run):
            await trio.sleep(25)
            put(store, store.queue("T", 0), b"goes on")
    assert [e["event"] for e in logs].count("clean-up failed, retrying") == 2


async def test_a_long_round_delays_the_next_by_no_more_than_the_interval(
    tmp_path: Path, autojump_clock: object
) -> None:
    cleaner = aged_store(tmp_path, []).cleaner
    began_s: list[float] = []

    async def long_round() -> None:
        began_s.append(trio.current_time())
        await trio.sleep(7)
        cleaner.ask()

    cleaner.round = long_round  # type: ignore[method-assign]
    cleaner.ask()
    with trio.move_on_after(60):
        await cleaner.run()
    interval_s = cleaner.settings.clean_interval_ms / 1000
    assert {later - sooner for sooner, later in pairwise(began_s)} == {7 + interval_s}


# --- a full disk ----------------------------------------------------------------------------


def small_disk(root: Path, file_count: float, **changes: Any) -> tuple[MessageStore, QuotaFiles]:
    """A store on a disk with room for about so many files of the log."""
    files = QuotaFiles(root, round(file_count * FILE_BYTES))
    retention = Retention(delete_hours=frozenset(), **changes)
    # No index, and queues of one page, so that it is the log that fills the disk.
    store = open_store(root, SetClock(), files, retention=retention, consume_queue_file_bytes=8000)
    return store, files


def try_put(store: MessageStore) -> str:
    try:
        put(store, store.queue("T", 0), bytes(900))
    except StoreNotWritable as error:
        return str(error)
    settle(store)
    return ""


async def test_young_files_make_room_as_far_as_they_are_consumed(tmp_path: Path) -> None:
    store, files = small_disk(tmp_path, 20)
    progress = {"T": {0: 0}}
    store.cleaner.unconsumed = lambda: unconsumed(progress)
    queue = store.queue("T", 0)
    refusal = ""
    for _ in range(200):
        if refusal := try_put(store):
            break
        await clean(store)
    assert "full, and 4096 bytes more would exceed 90%" in refusal
    assert str(tmp_path) in refusal
    count = queue.next_offset
    assert len(read_all(store, queue)) == count  # nothing was lost, and reads go on
    progress["T"][0] = count  # consumed, which heals
    await clean(store)
    assert files.disk_usage(tmp_path).ratio <= 0.9  # with the file that had found no room
    await clean(store)
    assert try_put(store) == ""
    assert 0 < len(read_all(store, queue)) < count


async def test_a_full_disk_heals_when_others_make_room(tmp_path: Path) -> None:
    store, files = small_disk(tmp_path, 20)
    assert try_put(store) == ""
    files.others_bytes = 17 * FILE_BYTES
    await clean(store)
    assert "messages are refused" in try_put(store)
    assert store.statistics().refusal is not None
    store.clock.ms += 60_000  # type: ignore[attr-defined]  # not even when it is tried for long
    await clean(store)
    assert "messages are refused" in try_put(store)
    files.others_bytes = 0
    await clean(store)
    assert try_put(store) == ""
    store.close()
    assert not (tmp_path / "abort").exists()


async def test_a_quota_that_the_disk_does_not_show(tmp_path: Path) -> None:
    class SilentQuota(QuotaFiles):
        def disk_usage(self, path: Path) -> DiskUsage:
            assert path == self.root
            return DiskUsage(1, 1 << 40)

    files = SilentQuota(tmp_path, RESERVE_BYTES_MAX + 10 * FILE_BYTES)
    retention = Retention(delete_hours=frozenset())
    clock = SetClock()
    store = open_store(tmp_path, clock, files, retention=retention, consume_queue_file_bytes=8000)
    refusals = 0
    for _ in range(100):
        refusal = try_put(store)
        refusals += bool(refusal)
        assert not refusal or "No space left on device" in refusal
        await clean(store)
        clock.ms += 10_000
    assert 0 < refusals < 20
    assert store.commit_log.max_offset > 15 * FILE_BYTES
    # Nobody has tried for a while: what is left stays.
    files.capacity_bytes = 0
    while not try_put(store):
        pass
    clock.ms += 20_000
    before = log_file_names(tmp_path)
    assert await clean(store) == before


async def test_stopping_while_it_refuses_is_a_clean_stop(
    tmp_path: Path, autojump_clock: object
) -> None:
    store, files = small_disk(tmp_path, 20)
    assert try_put(store) == ""
    async with running(store.run):
        files.others_bytes = 17 * FILE_BYTES
        await trio.sleep(10.5)
        assert "messages are refused" in try_put(store)
    store.close()
    assert not (tmp_path / "abort").exists()


async def test_the_alarm_comes_before_the_disk_is_full(
    tmp_path: Path, autojump_clock: object
) -> None:
    store, _files = small_disk(tmp_path, 60)
    store.cleaner.unconsumed = lambda: unconsumed({"T": {0: 0}})
    with structlog.testing.capture_logs() as logs:
        for _ in range(30):
            assert try_put(store) == ""
            await clean(store)
            await trio.sleep(60)
            store.clock.ms += 60_000  # type: ignore[attr-defined]
    alarms = [entry for entry in logs if "full_in_hours" in entry]
    assert len(alarms) == 1
    assert alarms[0]["waits_for"] == "group g, topic T, queue 0"
    status = store.statistics().cleaner
    # Some 17 bytes a second, 46 files to go.
    assert status.full_in_hours == pytest.approx(46 * FILE_BYTES / 17 / 3600, rel=0.2)


async def test_the_alarm_blames_no_group_for_files_of_other_programs(
    tmp_path: Path, autojump_clock: object
) -> None:
    store, files = small_disk(tmp_path, 60)
    store.cleaner.unconsumed = lambda: unconsumed({"T": {0: 0}})
    assert try_put(store) == ""
    with structlog.testing.capture_logs() as logs:
        for _ in range(30):
            files.others_bytes += 1000
            await clean(store)
            await trio.sleep(60)
    (alarm,) = [entry for entry in logs if "full_in_hours" in entry]
    assert alarm["event"] == "the disk will be full of files outside the log: make room"
    assert "waits_for" not in alarm


async def test_no_alarm_when_consumers_keep_up(tmp_path: Path, autojump_clock: object) -> None:
    store, _files = small_disk(tmp_path, 20)
    queue = store.queue("T", 0)
    store.cleaner.unconsumed = lambda: unconsumed({"T": {0: queue.next_offset}})
    with structlog.testing.capture_logs() as logs:
        for _ in range(120):
            assert try_put(store) == ""
            await clean(store)
            await trio.sleep(60)
            store.clock.ms += 60_000  # type: ignore[attr-defined]
    assert store.commit_log.min_offset > 10 * FILE_BYTES
    assert not [entry for entry in logs if "full_in_hours" in entry]


# --- at random ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
async def test_at_random_nothing_needed_is_lost(
    tmp_path: Path, seed: int, autojump_clock: object
) -> None:
    dice = random.Random(seed)
    store, files = small_disk(tmp_path, 30)
    clock = store.clock
    assert isinstance(clock, SetClock)
    consumed = {"A": {0: 0, 1: 0}, "B": {0: 0}}
    store.cleaner.unconsumed = lambda: unconsumed(consumed)
    held: list[tuple[Buffer, bytes]] = []
    for _ in range(400):
        topic = dice.choice("AB")
        queue = store.queue(topic, dice.choice(list(consumed[topic])))
        step = dice.random()
        if step < 0.5:
            files.others_bytes = dice.choice([0, 0, 0, 10]) * FILE_BYTES
            try:
                put(store, queue, bytes(dice.randrange(1500)))
            except StoreNotWritable:
                consumed[topic][queue.queue_id] = queue.consume_queue.max_offset
        elif step < 0.6:
            offset = consumed[topic][queue.queue_id]
            consumed[topic][queue.queue_id] = dice.randint(offset, queue.consume_queue.max_offset)
        elif step < 0.7:
            result = store.source(queue).get(store.source(queue).min_offset(), 3, 3000, None)
            held += [(view, bytes(view)) for view in result.buffers]
        elif step < 0.8:
            held = held[dice.randint(0, len(held)) :]
        else:
            settle(store)
            await trio.sleep(10)
            clock.ms += dice.choice([10_000, 10_000, 10_000, 80 * HOUR_MS, -80 * HOUR_MS])
            store.cleaner.retention = Retention(delete_hours=dice.choice([ANY_HOUR, frozenset()]))
            names = await clean(store)
            assert names == list(range(names[0], names[-1] + 1))
        for name, offsets in consumed.items():
            for queue_id, offset in offsets.items():
                assert store.source(store.queue(name, queue_id)).min_offset() <= offset
        assert all(bytes(view) == before for view, before in held)
    assert store.commit_log.min_offset > 0
    held.clear()
    crash(store)
    again = open_store(
        tmp_path, clock, QuotaFiles(tmp_path, 1 << 30), consume_queue_file_bytes=8000
    )
    for name, offsets in consumed.items():
        for queue_id, offset in offsets.items():
            queue = again.queue(name, queue_id)
            assert again.source(queue).min_offset() <= offset
            assert [m.queue_offset for m in read_all(again, queue)][-1:] == (
                [queue.next_offset - 1] if queue.next_offset else []
            )
