"""While a store runs, very many new queues at once get their files by and by."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from pathlib import Path

import pytest
import trio

from headrace_broker.store.files.filesystem import Files
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.store_queue import StoreQueue
from headrace_broker.store.write.write_path import NEW_FILES_AT_ONCE
from tests.support.running import running
from tests.support.stores import HOST, FaultyFiles, SetClock, read_all, small_settings
from tests.support.until import until

QUEUES = 300


def new_store(root: Path, files: Files | None = None) -> MessageStore:
    settings = small_settings(root, commit_log_file_bytes=1 << 20, ring_rows=4096)
    store = MessageStore(settings, SetClock(), files or FaultyFiles())
    store.use_threads = True
    store.load()
    return store


def append(store: MessageStore, topic: str, queue_id: int) -> None:
    store.write_path.append((store.queue(topic, queue_id), b"body", b"", 0, 0, 0, 0, 0), HOST)


async def dispatched(store: MessageStore) -> None:
    await until(lambda: store.dispatcher.cursor.taken == store.ring.written)


@pytest.mark.parametrize("per_batch", [1, 50, QUEUES])
async def test_all_queues_get_their_files(tmp_path: Path, per_batch: int) -> None:
    store = new_store(tmp_path)
    told: list[Collection[StoreQueue]] = []
    store.write_path.on_published(told.append)
    async with running(store.run):
        await trio.testing.wait_all_tasks_blocked()
        for start in range(0, QUEUES, per_batch):
            store.write_path.begin()
            for number in range(start, start + per_batch):
                append(store, f"t{number % 100}", number // 100)
                append(store, "common", 0)
            store.write_path.publish()
            assert max(map(len, told)) <= NEW_FILES_AT_ONCE + 1
        await dispatched(store)
        topics = {queue.topic for queues in told for queue in queues}
        assert topics == {"common", *(f"t{number}" for number in range(100))}
        assert len(read_all(store, store.queue("common", 0))) == QUEUES
        for number in range(QUEUES):
            assert store.queue(f"t{number % 100}", number // 100).consume_queue.max_offset == 1


async def test_a_few_new_queues_can_be_read_at_once(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    async with running(store.run):
        await trio.testing.wait_all_tasks_blocked()
        for number in range(NEW_FILES_AT_ONCE):
            append(store, "t", number)
        store.write_path.publish()
        for number in range(NEW_FILES_AT_ONCE):
            assert len(read_all(store, store.queue("t", number))) == 1


async def test_order_within_a_queue_is_kept(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    async with running(store.run):
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(50):
            store.write_path.begin()
            for number in range(20):
                append(store, "t", number)
            store.write_path.publish()
            await trio.lowlevel.checkpoint()
        await dispatched(store)
    for number in range(20):
        offsets = [message.queue_offset for message in read_all(store, store.queue("t", number))]
        assert offsets == list(range(50))


async def test_a_full_disk_refuses_and_heals(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = new_store(tmp_path, files)
    async with running(store.run):
        store.write_path.begin()
        append(store, "first", 0)  # makes the log's file
        store.write_path.publish()
        files.is_full = True
        for number in range(2 * NEW_FILES_AT_ONCE):
            append(store, "second", number)
        store.write_path.publish()
        assert os.strerror(errno.ENOSPC) in str(store.commit_log.life.refusal)
        files.is_full = False
        await dispatched(store)
    for number in range(2 * NEW_FILES_AT_ONCE):
        assert len(read_all(store, store.queue("second", number))) == 1


async def test_what_waits_for_a_file_is_dispatched_at_the_end(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    async with running(store.run):
        await trio.testing.wait_all_tasks_blocked()
        store.write_path.begin()
        for number in range(100):
            append(store, "t", number)
        store.write_path.publish()
        assert store.dispatcher.cursor.taken < store.ring.written
    store.close()
    again = new_store(tmp_path)
    for number in range(100):
        assert len(read_all(again, again.queue("t", number))) == 1
