"""Followers get each message that is on disk, once it is, whatever befalls them; nobody waits."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing

from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.cold_files import ColdFiles
from headrace_broker.store.files.config_file import ConfigFile
from headrace_broker.store.files.positions import Name, Position
from headrace_broker.store.followers import following as followers_module
from headrace_broker.store.followers.follower_work import POSITIONS_FOLDER, position_file
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.queues.consume_queue import BLANK_SIZE
from headrace_broker.store.queues.queue_blocks import (
    QueueBlock,
    QueueView,
    ReadLimits,
    read_block,
)
from headrace_broker.store.settings import Retention
from headrace_daemon.services import Services
from headrace_protocol.message import TRANSACTION_PREPARED
from tests.support import faulty_files
from tests.support.faulty_files import PowerCut, next_life
from tests.support.followers import CopyingFollower
from tests.support.stores import (
    FaultyFiles,
    SetClock,
    crash,
    open_store,
    put,
    small_settings,
    units_from,
)
from tests.support.until import until

HOUR_MS = 3_600_000
# The disk of whoever runs the tests is none of theirs.
AT_ONCE = Retention(
    reserved_ms=-HOUR_MS * 24 * 3650,
    delete_hours=frozenset(range(24)),
    clean_ratio=1.0,
    force_ratio=1.0,
    refuse_ratio=1.0,
)


class FailingSaves(FaultyFiles):
    """Fails to save positions; ``fails_late``: after it has saved them."""

    def __init__(self, *, fails_late: bool = False) -> None:
        super().__init__()
        self.failures = 0
        self._fails_late = fails_late

    def replace(
        self, path: Path, data: bytes | Iterable[bytes], backup_path: Path | None = None
    ) -> None:
        is_failing = path.parent.name == POSITIONS_FOLDER and self.failures > 0
        self.failures -= is_failing
        if not is_failing or self._fails_late:
            super().replace(path, data, backup_path)
        if is_failing:
            raise OSError(errno.EIO, "Input/output error")


def follow(store: MessageStore, **changes: Any) -> CopyingFollower:
    """A follower of a store that was opened."""
    follower = CopyingFollower(store.root / "copies", store.fs, **changes)
    store.followers.add(follower)
    return follower


def catch_up(store: MessageStore) -> None:
    """Have the followers take all that is on disk, and save."""
    store.followers.finish()


def fill(store: MessageStore, count: int, *, topic: str = "T", body_bytes: int = 300) -> None:
    """Messages for two queues in turn, on disk."""
    for number in range(count):
        queue = store.queue(topic, number % 2)
        put(store, queue, b"%d/%d " % (queue.queue_id, queue.next_offset) + bytes(body_bytes))
        store.index_tick()
    store.flusher.flush_now()


def stored(store: MessageStore) -> dict[Name, list[tuple[int, bytes]]]:
    """As ``CopyingFollower.copied``, of what the queues hold."""
    found: dict[Name, list[tuple[int, bytes]]] = {}
    for queue in store.queues:
        if not store.find_queue(queue.topic, queue.queue_id) or not queue.next_offset:
            continue
        units = units_from(queue.consume_queue, queue.consume_queue.first_offset)
        found[queue.topic, queue.queue_id] = [
            (offset, body_of(store, unit[0]))
            for offset, unit in enumerate(units, queue.consume_queue.first_offset)
            if unit[1] != BLANK_SIZE
        ]
    return found


def body_of(store: MessageStore, physical_offset: int) -> bytes:
    record = store.commit_log.record_at(physical_offset)
    assert record is not None
    size = int.from_bytes(record[84:88], "big")
    return bytes(record[88 : 88 + size])


def problems(store: MessageStore) -> list[str]:
    return [status.problem for status in store.statistics().followers]


# --- following -----------------------------------------------------------------------------


def test_a_follower_far_behind_gets_all_messages(tmp_path: Path) -> None:
    store = open_store(tmp_path, consume_queue_file_bytes=40)  # a block ends with a file of units
    fill(store, 60)
    assert len(store.commit_log.files.files) > 3
    follower = follow(store)
    catch_up(store)
    assert follower.copied() == stored(store)
    assert len(follower.blocks) > 10
    assert not store.statistics().followers[0].behind_messages


def test_blocks_are_of_the_queue_that_is_furthest_behind(store: MessageStore) -> None:
    for topic in "CAB":
        put(store, store.queue(topic, 0))
    store.flusher.flush_now()
    follower = follow(store)
    catch_up(store)
    assert [topic for topic, *_ in follower.blocks] == ["C", "A", "B"]


def test_a_block_has_the_units_and_records_of_its_queue(store: MessageStore) -> None:
    taken: list[QueueBlock] = []
    follower = follow(store)
    follower.follow = taken.append  # type: ignore[method-assign,assignment]
    for number in range(6):
        put(store, store.queue("T", number % 3 // 2), b"%d" % number, TAGS="AB"[number % 2])
    store.flusher.flush_now()
    catch_up(store)
    queue = store.queue("T", 0)
    block = taken[0]
    assert block[:4] == ("T", 0, 0, 4)
    assert block.units.tolist() == units_from(queue.consume_queue, 0)
    assert block.records.physical_offset.tolist() == block.units["physical_offset"].tolist()
    assert block.records.queue_offset.tolist() == [0, 1, 2, 3]
    assert len(block.records.data) == block.records.size.sum()
    assert [m.body for m in map(block.records.message, range(4))] == [b"0", b"1", b"3", b"4"]


@pytest.mark.parametrize("block_bytes", [1, 2000, 4 << 20])
@pytest.mark.parametrize(
    ("span_share", "span_bytes"), [(0, 4 << 20), (8, 4 << 20), (8, 1), (8, 1000), (2, 2000)]
)
def test_records_are_read_one_by_one_or_with_what_lies_between(
    tmp_path: Path, block_bytes: int, span_share: int, span_bytes: int
) -> None:
    rng = Random(7)
    store = open_store(tmp_path, ring_rows=1024)
    for _ in range(200):
        put(store, store.queue("T", rng.choice((0, 0, 0, 1))), rng.randbytes(rng.randrange(300)))
    store.flusher.flush_now()
    queue = store.queue("T", 0).consume_queue
    view = QueueView("T", 0, ColdFiles(queue.files), queue.max_offset)
    log, flushed_offset = ColdFiles(store.commit_log.files), store.commit_log.flushed_offset
    limits = ReadLimits(block_bytes, span_share, span_bytes)
    found: list[tuple[int, bytes]] = []
    while block := read_block(view, len(found), log, flushed_offset, limits):
        assert len(block.units) == 1 or block.records.size.sum() <= block_bytes
        found += zip(block.records.queue_offset.tolist(), block.records.bodies(), strict=True)
    assert found == stored(store)["T", 0]


def test_queue_offsets_without_a_record_are_left_out(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    queue = store.queue("T", 0)
    queue.next_offset = 13  # as of a queue whose first messages another broker had
    put(store, queue, b"first")
    store.flusher.flush_now()
    follower = follow(store)
    catch_up(store)
    assert follower.copied() == {("T", 0): [(13, b"first")]}
    assert position_file(tmp_path, "copies", store.fs).load()["T", 0].queue_offset == 14


def test_messages_without_a_unit_are_not_followed(store: MessageStore) -> None:
    put(store, store.queue("T", 0), b"prepared", sys_flag=TRANSACTION_PREPARED)
    put(store, store.queue("T", 0), b"sent")
    store.flusher.flush_now()
    follower = follow(store)
    catch_up(store)
    assert follower.copied() == {("T", 0): [(0, b"sent")]}


def test_only_topics_that_are_wanted_are_followed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    follower = follow(store, topics=("A",))
    fill(store, 4, topic="A")
    fill(store, 4, topic="B")
    catch_up(store)
    assert {name[0] for name in follower.copied()} == {"A"}
    assert store.followers.needed_from() > store.commit_log.max_offset
    follower.topics = ("B",)
    store.followers.notify(set(store.queues))
    catch_up(store)
    assert {name[0] for name in follower.copied()} == {"A", "B"}
    assert {topic for topic, _ in position_file(tmp_path, "copies", store.fs).load()} == {"B"}


@pytest.mark.parametrize("flush", ["async", "sync"])
def test_nothing_is_followed_before_it_is_on_disk(tmp_path: Path, flush: str) -> None:
    store = open_store(tmp_path, flush=flush)
    follower = follow(store)
    fill(store, 4)
    store.write_path.publish()
    put(store, store.queue("T", 0), b"in memory")
    catch_up(store)
    flushed = follower.copied()
    assert [body[:1] for _, body in flushed["T", 0]] == [b"0", b"0"]
    assert store.statistics().followers[0].behind_messages == (flush == "async")
    store.flusher.flush_log_now()
    store.write_path.publish()
    catch_up(store)
    assert follower.copied()["T", 0][-1] == (2, b"in memory")


# --- from start to start -------------------------------------------------------------------


def test_the_next_start_resumes(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    follow(store)
    fill(store, 10)
    store.close()
    store = open_store(tmp_path)
    follower = follow(store)
    fill(store, 4)
    catch_up(store)
    assert follower.copied() == stored(store)
    assert sorted(follower.resumed) == [("T", 0, 5), ("T", 1, 5)]
    assert sorted(follower.blocks) == [("T", 0, 5, 7), ("T", 1, 5, 7)]


def test_a_stop_follows_what_is_left(store: MessageStore) -> None:
    follower = follow(store)
    put(store, store.queue("T", 0), b"last")
    store.close()
    assert follower.copied() == {("T", 0): [(0, b"last")]}


def test_a_follower_that_lacks_what_it_had_begins_where_it_says(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    follow(store)
    fill(store, 10)
    catch_up(store)
    crash(store)
    store = open_store(tmp_path)
    follower = follow(store)
    resume = follower.resume
    follower.resume = lambda queue, _: resume(queue, 2)  # type: ignore[method-assign,assignment]
    catch_up(store)
    assert follower.copied() == stored(store)
    assert sorted(follower.blocks) == [("T", 0, 2, 5), ("T", 1, 2, 5)]


@pytest.mark.parametrize("failures", [0, 2])
def test_a_lower_position_is_saved_before_messages_are_followed_again(
    tmp_path: Path, failures: int
) -> None:
    store = open_store(tmp_path)
    follow(store)
    fill(store, 10)
    catch_up(store)
    crash(store)
    files = FailingSaves()
    store = open_store(tmp_path, files=files)
    follower = follow(store)
    resume, take = follower.resume, follower.follow
    saved: list[Position] = []

    def follow_once_saved(block: QueueBlock) -> None:
        positions = position_file(store.root, follower.name, store.fs).load()
        saved.append(positions[block.topic, block.queue_id])
        take(block)

    files.failures = failures
    follower.resume = lambda queue, _: resume(queue, 2)  # type: ignore[method-assign,assignment]
    follower.follow = follow_once_saved  # type: ignore[method-assign]
    for _ in range(failures + 1):
        catch_up(store)
    assert [position.queue_offset for position in saved] == [2, 2]
    assert follower.copied() == stored(store)


class KilledFiles(faulty_files.FaultyFiles):
    """The process is killed where the power would be cut."""

    def cut_power(self) -> None:
        self.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("kind", [faulty_files.FaultyFiles, KilledFiles])
def test_an_end_at_any_step_loses_nothing_and_repeats_nothing(
    tmp_path: Path, kind: type[faulty_files.FaultyFiles], first: int
) -> None:
    """Between block and position, within the save, while a queue is deleted and made again."""
    cut_after, is_over = first, False
    while not is_over:
        root = tmp_path / str(cut_after)
        root.mkdir()
        is_over = end_at(root, kind, cut_after)
        cut_after += 3
    assert cut_after > 150


def end_at(root: Path, kind: type[faulty_files.FaultyFiles], operation: int) -> bool:
    """True if the life was over before that operation of the disk."""
    files = kind(root / "store", Random(operation))
    files.cut_after = operation
    store = MessageStore(small_settings(root / "store"), SetClock(), files)
    try:
        live(store)
    except PowerCut:
        pass
    else:
        files.stop()
    store.abandon()
    is_over = files.operation_count < operation
    files = next_life(root / "store", Random(operation), before=files)
    store = MessageStore(small_settings(root / "store"), SetClock(), files)
    store.load()
    follower = follow(store)
    catch_up(store)
    wanted = stored(store)
    # A deletion that was cut off may leave the end of the queue alone.
    copied = {
        name: [entry for entry in entries if entry[0] >= wanted[name][0][0]]
        for name, entries in follower.copied().items()
    }
    assert copied == wanted, f"ended at operation {operation}"
    catch_up(store)
    store.close()
    files.stop()
    return is_over


def live(store: MessageStore) -> None:
    store.load()
    follow(store)
    for _ in range(2):
        fill(store, 4)
        catch_up(store)
    store.delete_topic("T")
    fill(store, 6)
    catch_up(store)
    store.close()


def test_a_queue_that_lost_its_end_is_followed_from_there(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    follow(store)
    fill(store, 10)
    catch_up(store)
    crash(store)
    path = tmp_path / "commitlog" / f"{0:020d}"
    physical_offset = store.queue("T", 0).consume_queue.unit(2)[0]
    with path.open("r+b") as file:
        file.seek(physical_offset)
        file.write(bytes(4096 - physical_offset))
    (tmp_path / "checkpoint").unlink()
    store = open_store(tmp_path)
    assert store.source(store.queue("T", 0)).max_offset() == 2
    follower = follow(store)
    for number in range(9):  # past where it was
        put(store, store.queue("T", 0), b"new %d" % number)
    store.flusher.flush_now()
    catch_up(store)
    assert follower.copied() == stored(store)
    assert not follower.told_gone
    assert ("T", 0, 2) in follower.resumed


def test_what_left_the_log_before_it_was_followed_is_a_gap(tmp_path: Path) -> None:
    """A follower that was switched off for a while keeps nothing back."""
    clock = SetClock()
    store = open_store(tmp_path, clock, retention=AT_ONCE)
    follow(store)
    fill(store, 4)
    store.close()
    store = open_store(tmp_path, clock, retention=AT_ONCE)
    fill(store, 40)
    trio.run(expire, store)
    store.close()
    store = open_store(tmp_path, clock, retention=AT_ONCE)
    follower = follow(store)
    with structlog.testing.capture_logs() as logs:
        catch_up(store)
    assert [line["event"] for line in logs] == [
        "messages left the log before a follower read them"
    ] * 2
    offsets = [offset for offset, _ in follower.copied()["T", 0]]
    assert offsets[:2] == [0, 1]
    assert offsets[2] == store.source(store.queue("T", 0)).min_offset() > 2
    assert offsets[-1] == 21


async def expire(store: MessageStore) -> None:
    """All that may go goes."""
    store.cleaner.request()
    await store.cleaner.round()


def test_positions_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    ConfigFile(tmp_path / "followers" / "copies.json").save(b'{"T": 3}')
    with pytest.raises(StoreFormatError, match="Expected `object`"):
        follow(store)


# --- what others notice --------------------------------------------------------------------


async def test_the_log_keeps_what_a_follower_needs(tmp_path: Path) -> None:
    store = open_store(tmp_path, retention=AT_ONCE)
    follow(store)
    fill(store, 60)
    with structlog.testing.capture_logs() as logs:
        await expire(store)
    assert not store.commit_log.min_offset
    assert [(line["event"], line["oldest"]) for line in logs] == [
        ("log files are kept because they are still needed", "follower copies")
    ]
    catch_up(store)
    await expire(store)
    assert store.commit_log.min_offset > 4 * 4096


def test_what_was_followed_but_not_saved_is_kept(store: MessageStore) -> None:
    follower = follow(store)
    fill(store, 60)
    follower.sync = no_room  # type: ignore[method-assign]
    catch_up(store)
    assert follower.blocks
    assert not store.followers.needed_from()


def no_room(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_quiet_queue_keeps_nothing_when_it_gets_a_message(store: MessageStore) -> None:
    """Or with many of them the log would never go: its last message may be years old."""
    follow(store)
    fill(store, 2, topic="Quiet")
    fill(store, 40)
    catch_up(store)
    end_offset = store.commit_log.max_offset
    put(store, store.queue("Quiet", 0))
    assert store.followers.needed_from() >= end_offset - 4096
    assert store.statistics().followers[0].behind_bytes < 4096 * 2


def test_a_follower_that_stands_still_slows_nobody(store: MessageStore) -> None:
    follow(store)
    fill(store, 1000, body_bytes=30)
    assert (store.ring.taken, store.ring.fill, store.write_path.pressure()) == (1000, 0, None)
    status = store.statistics().followers[0]
    assert (status.name, status.behind_bytes) == ("copies", store.commit_log.max_offset)
    assert not status.problem
    store.abandon()


def test_a_deleted_queue_is_told_and_its_successor_followed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    follower = follow(store)
    fill(store, 10)
    catch_up(store)
    store.delete_topic("T")
    fill(store, 4)
    catch_up(store)
    assert sorted(follower.told_gone) == [("T", 0), ("T", 1)]
    assert follower.copied() == stored(store)
    assert len(follower.copied()["T", 0]) == 2
    store.delete_topic("T")
    catch_up(store)
    assert follower.copied() == {}
    assert position_file(tmp_path, "copies", store.fs).load() == {}
    assert store.followers.needed_from() > store.commit_log.max_offset


@pytest.mark.parametrize("count", [0, 2, 10, 20])
def test_a_killed_broker_tells_a_queue_from_its_predecessor(tmp_path: Path, count: int) -> None:
    store = open_store(tmp_path)
    follow(store, topics=("T",))
    fill(store, 10)
    catch_up(store)
    store.delete_topic("T")
    fill(store, 2, topic="U")  # without any unit a start would make all anew
    fill(store, count)
    crash(store)
    store = open_store(tmp_path)
    follower = follow(store, topics=("T",))
    catch_up(store)
    assert sorted(follower.told_gone) == [("T", 0), ("T", 1)]
    assert follower.copied() == {
        name: copy for name, copy in stored(store).items() if name[0] == "T"
    }


def test_a_queue_that_is_deleted_while_it_is_read(store: MessageStore) -> None:
    """Its successor's files have the same names."""
    follower = follow(store)
    fill(store, 10)
    copy = follower.follow

    def copy_late(block: QueueBlock) -> None:
        copy(block)
        if len(follower.blocks) == 1:
            store.delete_topic("T")
            fill(store, 30)

    follower.follow = copy_late  # type: ignore[method-assign]
    catch_up(store)
    catch_up(store)
    assert follower.copied() == stored(store)
    assert len(follower.copied()["T", 0]) == 15


def test_a_damaged_record_stops_its_queue_alone(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, 10)
    physical_offset, size, _ = store.queue("T", 0).consume_queue.unit(1)
    with (tmp_path / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(physical_offset + size // 2)
        file.write(b"rot")
    follower = follow(store)
    with structlog.testing.capture_logs() as logs:
        catch_up(store)
    assert set(follower.copied()) == {("T", 1)}
    assert [line["event"] for line in logs] == [
        "follower skips a queue, the log is kept from there on",
        "follower is behind, the next start resumes",
    ]
    assert "queue T/0 points to" in problems(store)[0]
    assert store.followers.needed_from() == store.queue("T", 0).consume_queue.unit(0)[0]


# --- running -------------------------------------------------------------------------------


async def run_followers(store: MessageStore, nursery: trio.Nursery) -> Services:
    services = Services()
    store.upkeep._start_soon = services.start_soon
    await nursery.start(store.run)
    return services


async def test_a_running_store_is_followed(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    store = open_store(tmp_path)
    follower = follow(store)
    async with trio.open_nursery() as nursery:
        await run_followers(store, nursery)
        for count in (3, 5):
            for number in range(count):
                put(store, store.queue("T", 0), b"%d" % number)
            await until(lambda: len(follower.copied().get(("T", 0), ())) in {3, 8})
            positions = position_file(tmp_path, "copies", store.fs)
            end = store.queue("T", 0).next_offset
            await until(lambda: positions.load().get(("T", 0), (0,))[0] == end)  # noqa: B023
        nursery.cancel_scope.cancel()
    assert follower.copied() == stored(store)
    assert not store.statistics().followers[0].behind_bytes


async def test_a_full_disk_is_said_and_tried_again(
    store: MessageStore, autojump_clock: trio.testing.MockClock
) -> None:
    follower = follow(store)
    is_full = threading.Event()
    is_full.set()
    copy = follower.follow

    def copy_with_room(block: QueueBlock) -> None:
        if is_full.is_set():
            no_room()
        copy(block)

    follower.follow = copy_with_room  # type: ignore[method-assign]
    fill(store, 10)
    async with trio.open_nursery() as nursery:
        with structlog.testing.capture_logs() as logs:
            await run_followers(store, nursery)
            await until(lambda: problems(store) != [""])
            began = trio.current_time()
            await until(lambda: trio.current_time() - began > 3 * followers_module.RETRY_S)
        (line,) = logs
        assert line["event"] == (
            "follower copies is unavailable, retrying: [Errno 28] No space left on device"
        )
        assert problems(store) == ["[Errno 28] No space left on device"]
        assert store.followers.report()["copies"]["behindMessages"] == 10
        problem = store.followers.runtime_info()["follower.copies.problem"]
        assert problem == "[Errno 28] No space left on device"
        assert not store.followers.needed_from()
        assert store.statistics().followers[0].behind_seconds > 0
        fill(store, 10)  # messages are taken meanwhile
        is_full.clear()
        with structlog.testing.capture_logs() as logs:
            await until(lambda: follower.copied() == stored(store))
            await until(lambda: problems(store) == [""])
        await until(lambda: not store.statistics().followers[0].behind_seconds)
        (line,) = logs
        assert line["event"].startswith("follower copies is available again after ")
        nursery.cancel_scope.cancel()


async def test_an_unexpected_error_is_supervised(
    store: MessageStore, autojump_clock: trio.testing.MockClock
) -> None:
    follower = follow(store)
    copy, count = follower.follow, 0

    def copy_then_fail(block: QueueBlock) -> None:
        nonlocal count
        copy(block)
        count += 1
        if count == 2:
            raise RuntimeError("a bug")

    follower.follow = copy_then_fail  # type: ignore[method-assign]
    fill(store, 10)
    async with trio.open_nursery() as nursery:
        with structlog.testing.capture_logs() as logs:
            services = await run_followers(store, nursery)
            await until(lambda: len(follower.resumed) == 4)
            await until(lambda: follower.copied() == stored(store))
        assert services.unexpected_errors == 1
        assert [str(line["exc_info"]) for line in logs] == ["a bug"]
        nursery.cancel_scope.cancel()


def test_an_error_of_a_follower_does_not_spoil_the_stop(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    follower = follow(store)

    def fail(_: QueueBlock) -> None:
        raise RuntimeError("a bug")

    follower.follow = fail  # type: ignore[method-assign,assignment]
    fill(store, 2)
    with structlog.testing.capture_logs() as logs:
        store.close()
    assert [line["event"] for line in logs] == [
        "follower not finished",
        "follower is behind, the next start resumes",
    ]
    assert not (tmp_path / "abort").exists()


async def test_reads_wait_in_a_thread(
    store: MessageStore, autojump_clock: trio.testing.MockClock
) -> None:
    follower = follow(store)
    threads: set[int] = set()
    copy = follower.follow

    def copy_and_tell(block: QueueBlock) -> None:
        threads.add(threading.get_ident())
        copy(block)

    follower.follow = copy_and_tell  # type: ignore[method-assign]
    fill(store, 2)
    async with trio.open_nursery() as nursery:
        await run_followers(store, nursery)
        await until(lambda: follower.copied() == stored(store))
        nursery.cancel_scope.cancel()
    assert threads
    assert threading.get_ident() not in threads


def test_what_a_failed_save_covers_is_not_followed_anew(tmp_path: Path) -> None:
    """The positions may be on the disk all the same, so the copy must keep what they cover."""
    files = FailingSaves(fails_late=True)
    store = open_store(tmp_path, files=files)
    follower = follow(store)
    fill(store, 3)
    files.failures = 1
    catch_up(store)  # logs the error
    follower.resumed.clear()
    needed_from = store.followers.needed_from()
    catch_up(store)
    assert all(queue_offset for _, _, queue_offset in follower.resumed)
    assert needed_from == 0  # until a save has succeeded
    assert follower.copied() == stored(store)
