"""A start after the power went at a bad moment."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
import trio
import trio.testing

from headrace_broker.store.errors import StoreNotWritable
from headrace_broker.store.log.ring import Ring
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.retention.cleaner import FREE_BYTES
from headrace_broker.store.retention.topic_floors import TopicLimit
from headrace_broker.store.settings import Retention
from tests.support.faulty_files import FaultRates, FaultyFiles, PowerCut, next_life
from tests.support.running import running
from tests.support.stores import FaultyFiles as BrokenFiles
from tests.support.stores import SetClock, crash, open_store, put, read_all, small_settings

# Whatever is old enough for the hour goes, and all is.
ALL_EXPIRED = Retention(delete_hours=frozenset(range(24)), reserved_ms=-(1 << 50))


def loaded(files: FaultyFiles, free_bytes: int = FREE_BYTES) -> MessageStore:
    settings = small_settings(files.root, retention=ALL_EXPIRED)
    store = MessageStore(settings, SetClock(), files)
    store.cleaner.free_bytes = free_bytes
    store.load()
    return store


async def cleaned(files: FaultyFiles, free_bytes: int) -> MessageStore:
    """A store whose first files of the log were just removed, with all of topic Old's records."""
    store = loaded(files, free_bytes)
    for topic in ("Old", "Old", *["New"] * 9):
        put(store, store.queue(topic, 0), bytes(900))
    store.index_tick()
    store.flusher.flush_log_now()
    await store.cleaner.round()
    assert store.commit_log.min_offset > 0
    return store


async def cleaned_and_cut(seed: int, root: Path, free_bytes: int = FREE_BYTES) -> MessageStore:
    """Such a store, started again after a power cut."""
    files = FaultyFiles(root, Random(seed))
    crash(await cleaned(files, free_bytes))
    files.cut_power()
    return loaded(next_life(files.root, files.rng, before=files))


@pytest.mark.parametrize("seed", range(5))
async def test_a_queue_goes_on_though_its_records_were_removed(seed: int, tmp_path: Path) -> None:
    store = await cleaned_and_cut(seed, tmp_path / "store")
    assert store.queue("Old", 0).next_offset == 2
    crash(store)


@pytest.mark.parametrize("seed", range(10))
def test_a_deleted_topic_does_not_come_back(seed: int, tmp_path: Path) -> None:
    files = FaultyFiles(tmp_path / "store", Random(seed))
    store = loaded(files)
    for topic in ("Gone", "Kept"):
        put(store, store.queue(topic, 0))
    store.flusher.flush_now()
    files.fsync_directory(files.root)  # the checkpoint is not new
    store.delete_topic("Gone")
    files.cut_power()
    crash(store)
    store = loaded(next_life(files.root, files.rng, before=files))
    assert store.find_queue("Gone", 0) is None, f"seed {seed}"
    crash(store)


@pytest.mark.slow
@pytest.mark.parametrize("is_cut", [False, True], ids=["kill", "power cut"])
def test_an_interrupted_deletion_leaves_a_topic_whole_or_empty(
    tmp_path: Path, *, is_cut: bool
) -> None:
    sent = [b"%d" % number for number in range(15)]
    results = []
    for number in range(25):
        files = FaultyFiles(tmp_path / str(number), Random(number))
        delete_interrupted(files, sent, number, is_cut=is_cut)
        results.append(bodies_of_gone(next_life(files.root, files.rng, before=files)))
    both: list[list[list[bytes]]] = [[sent, sent], [[], []]]
    assert all(found in results for found in both)
    assert [found for found in results if found not in both] == []


def delete_interrupted(files: FaultyFiles, sent: list[bytes], number: int, *, is_cut: bool) -> None:
    """Delete a topic of two queues with two files each, up to an operation of the disk."""
    store = loaded(files)
    for body in sent:
        for queue_id in range(2):
            put(store, store.queue("Gone", queue_id), body)
    store.flusher.flush_now()
    files.end_in(number, is_cut=is_cut)
    with suppress(PowerCut):
        store.delete_topic("Gone")
    files.stop()
    crash(store)


def bodies_of_gone(files: FaultyFiles) -> list[list[bytes]]:
    store = loaded(files)
    queues = [store.queue("Gone", queue_id) for queue_id in range(2)]
    found = [[message.body for message in read_all(store, queue)] for queue in queues]
    crash(store)
    return found


@pytest.mark.parametrize("seed", range(5))
async def test_what_a_topics_limit_gave_up_is_not_lost(seed: int, tmp_path: Path) -> None:
    files = FaultyFiles(tmp_path / "store", Random(seed))
    store = loaded(files)
    queue = store.queue("Topic", 0)
    for _ in range(9):
        put(store, queue)
    store.cleaner.topic_limits = lambda: {"Topic": TopicLimit(None, 0)}
    await store.cleaner.raise_floors()
    files.cut_power()
    crash(store)
    store = loaded(next_life(files.root, files.rng, before=files))
    queue = store.queue("Topic", 0)
    assert (store.source(queue).min_offset(), queue.next_offset) == (9, 9)
    crash(store)


@pytest.mark.parametrize("seed", range(5))
async def test_a_removed_file_does_not_come_back_shorter(seed: int, tmp_path: Path) -> None:
    store = await cleaned_and_cut(seed, tmp_path / "store", 1000)
    assert store.queue("New", 0).next_offset == 9
    crash(store)


@pytest.mark.parametrize("seed", range(5))
def test_names_that_a_killed_process_left_are_durable_after_the_next_start(
    seed: int, tmp_path: Path
) -> None:
    files = FaultyFiles(tmp_path / "store", Random(seed))
    store = loaded(files)
    put(store, store.queue("Topic", 0), b"kept")
    files.kill()
    crash(store)
    again = next_life(files.root, files.rng, before=files)
    crash(loaded(again))
    again.cut_power()
    store = loaded(next_life(files.root, files.rng, before=again))
    assert [m.body for m in read_all(store, store.queue("Topic", 0))] == [b"kept"]
    crash(store)


@pytest.mark.parametrize("name", ["commitlog/00000000000000004096", "index/20991231235959999"])
def test_a_file_that_got_its_name_and_nothing_else_is_removed(name: str, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, store.queue("Topic", 0), b"kept", KEYS="key")
    store.index_tick()
    store.commit_log.files.drop_prepared()
    (tmp_path / name).touch()
    crash(store)
    store = open_store(tmp_path)
    assert [m.body for m in read_all(store, store.queue("Topic", 0))] == [b"kept"]
    assert not (tmp_path / name).exists() or (tmp_path / name).stat().st_size


def test_a_row_whose_place_is_taken_is_not_the_newest_any_more() -> None:
    ring = Ring(4)
    cursor = ring.add_cursor("taker")
    rows = ring.rows[:4].copy()
    rows["physical_offset"] = range(4)
    ring.put(rows)
    ring.take(cursor, 1)
    assert ring.last_of(1) == (0, 0)
    ring.put(rows[3:])
    assert ring.last_of(1) is None
    assert ring.last_of(2) == (1, 0)


def test_after_a_failed_flush_no_other_one_counts_its_pages_as_on_disk(tmp_path: Path) -> None:
    files = BrokenFiles()
    store = open_store(tmp_path, files=files)
    store.flusher.flush_now()
    checkpoint = (tmp_path / "checkpoint").read_bytes()
    put(store, store.queue("Topic", 0))
    files.is_broken = True
    with pytest.raises(OSError, match="Input/output error"):
        store.flusher.flush_now()
    files.is_broken = False
    for flush in (store.flusher.flush_now, store.flusher.flush_log_now):
        with pytest.raises(StoreNotWritable, match="a flush failed, so messages may be lost"):
            flush()
    assert (tmp_path / "checkpoint").read_bytes() == checkpoint
    assert store.commit_log.flushed_offset == 0
    crash(store)


async def test_after_a_failed_flush_the_loop_rests(tmp_path: Path) -> None:
    files = BrokenFiles()
    store = open_store(tmp_path, files=files, flush="sync")
    async with running(store.run):
        files.is_broken = True
        put(store, store.queue("Topic", 0))
        tell, told = trio.open_memory_channel[bool](1)
        store.flusher.when_flushed(store.commit_log.max_offset, tell.send_nowait)
        with trio.fail_after(5):
            assert await told.receive() is False
            await trio.testing.wait_all_tasks_blocked(0.001)  # never, if it asked again and again
    crash(store)


@pytest.mark.parametrize("seed", range(10))
def test_what_a_failed_flush_dropped_is_on_disk_after_the_next_start(
    seed: int, tmp_path: Path
) -> None:
    files = FaultyFiles(tmp_path / "store", Random(seed))
    store = loaded(files)
    queue = store.queue("Topic", 0)
    put(store, queue, bytes(900))
    store.flusher.flush_now()
    bodies = [bytes([number]) * 900 for number in range(1, 12)]  # in four files of the log
    for body in bodies:
        put(store, queue, body)
    files.rates = FaultRates(sync=1.0)
    with pytest.raises(OSError, match="Input/output error"):
        store.flusher.flush_now()
    files.kill()
    crash(store)
    again = next_life(files.root, files.rng, before=files)
    store = loaded(again)
    put(store, store.queue("Topic", 0), b"acknowledged")
    store.flusher.flush_log_now()
    again.cut_power()
    crash(store)
    store = loaded(next_life(files.root, files.rng, before=again))
    read = [message.body for message in read_all(store, store.queue("Topic", 0))]
    assert read == [bytes(900), *bodies, b"acknowledged"]
    crash(store)
