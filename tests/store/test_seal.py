"""Checksums of files: taken as the log's files fill up, written at a clean stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_broker.store.files.file_seal import BLOCK_BYTES, FileSeal, StoreDamaged
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.store_queue import StoreQueue
from headrace_broker.store.store_source import GetResult
from headrace_broker.store_tools.directory import open_directory
from headrace_broker.store_tools.fsck import check
from headrace_protocol.errors import NotReady
from tests.support.running import running
from tests.support.stores import crash, open_store, put, query_index, small_settings
from tests.support.until import until

FILE_BYTES = 3 * BLOCK_BYTES
LARGE: dict[str, Any] = {"commit_log_file_bytes": FILE_BYTES, "body_bytes_max": FILE_BYTES}


async def test_a_daemon_seals_the_logs_files_as_they_fill_up(tmp_path: Path) -> None:
    store = open_store(tmp_path, commit_log_file_bytes=FILE_BYTES)
    store.use_threads = True
    queue = store.queue("T", 0)
    async with running(store.run):
        while len(store.commit_log.files.files) < 3:
            put(store, queue, bytes(300_000))
        await until(lambda: store.commit_log.files.files[1].seal is not None)
    *full, last = store.commit_log.files.files
    assert [len(file.seal.kept(FILE_BYTES)) for file in full if file.seal] == [3, 3]
    assert last.seal is None
    store.close()
    settings = small_settings(tmp_path, commit_log_file_bytes=FILE_BYTES)
    with open_directory(tmp_path, settings) as directory:
        assert check(directory, lambda _: None).findings == []


def test_blocks_that_were_sealed_before_are_not_sealed_anew(tmp_path: Path) -> None:
    """Or rot that nobody has read yet would become what should be there."""
    path = tmp_path / "file"
    path.write_bytes(b"a" * BLOCK_BYTES * 2)
    before = FileSeal.of_written(path, 2 * BLOCK_BYTES, None)
    before = FileSeal(2 * BLOCK_BYTES, before.checksums)  # as the next start reads it
    path.write_bytes(b"b" + b"a" * (2 * BLOCK_BYTES - 1) + b"c" * BLOCK_BYTES)
    seal = FileSeal.of_written(path, FILE_BYTES, before)
    data = path.read_bytes()

    def pread(position: int, byte_count: int) -> bytes:
        return data[position : position + byte_count]

    seal.check(path, pread, BLOCK_BYTES, FILE_BYTES)
    with pytest.raises(StoreDamaged) as damage:
        seal.check(path, pread, 0, 1)
    assert damage.value.position == 0


@pytest.fixture
def sealed(tmp_path: Path) -> MessageStore:
    """A store that was opened again after a clean stop.

    Its first message has two blocks; the start looked at the last one.
    """
    store = open_store(tmp_path, **LARGE)
    for body_bytes in (2 * BLOCK_BYTES, 1):
        put(store, store.queue("T", 0), bytes(body_bytes))
    store.close()
    return open_store(tmp_path, **LARGE)


def test_much_is_compared_in_a_thread(sealed: MessageStore) -> None:
    queue = sealed.queue("T", 0)
    with pytest.raises(NotReady) as wait:
        get(sealed, queue)
    wait.value.fetch()
    assert get(sealed, queue).count == 1
    sealed.close()


def test_what_a_thread_finds_damaged_is_told_to_who_asks_again(sealed: MessageStore) -> None:
    queue = sealed.queue("T", 0)
    file = sealed.commit_log.files.files[0]
    assert file.seal
    file.map[BLOCK_BYTES] ^= 1
    with pytest.raises(NotReady) as wait:
        get(sealed, queue)
    wait.value.fetch()
    for _ in range(2):
        with pytest.raises(StoreDamaged, match="damaged somewhere in the 1048576 bytes"):
            get(sealed, queue)
    crash(sealed)


def get(store: MessageStore, queue: StoreQueue) -> GetResult:
    return store.source(queue).get(0, 1, FILE_BYTES, None)


def test_a_large_index_is_compared_in_a_thread(tmp_path: Path) -> None:
    store = open_store(tmp_path, index_slot_count=400_000)
    offset = put(store, store.queue("T", 0), KEYS="k")
    store.close()
    store = open_store(tmp_path, index_slot_count=400_000)
    assert store.index_files.is_sealed
    with pytest.raises(NotReady) as wait:
        query_index(store, "T", "k", 9, 0, 1 << 62)
    wait.value.fetch()
    assert query_index(store, "T", "k", 9, 0, 1 << 62) == [offset]
    put(store, store.queue("T", 0), KEYS="k")
    store.index_tick()
    assert not store.index_files.is_sealed
