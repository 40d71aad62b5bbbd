"""The newest files are asked for after a start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace_broker.store.files.filesystem import Files
from headrace_broker.store.files.mapped_file import MappedFile
from headrace_broker.store.files.warmup import newest_files, warm
from tests.support.running import running
from tests.support.stores import open_store, put
from tests.support.until import until


def filled(root: Path) -> list[MappedFile]:
    """A log of five files, a queue of six and one of one; the log's files."""
    store = open_store(root, ring_rows=1024)
    for number in range(60):
        put(store, store.queue("T", 0 if number else 1), bytes(200))
    store.close()
    return store.commit_log.files.files


def test_the_last_three_files_of_each_in_the_order_of_their_use(tmp_path: Path) -> None:
    log = filled(tmp_path)
    assert len(log) == 5
    store = open_store(tmp_path)
    queues = [queue.consume_queue.used for queue in store.queues]
    found = newest_files(store.commit_log.used, queues)
    assert [str(path.relative_to(tmp_path)) for path, _ in found] == [
        f"commitlog/{4 * 4096:020d}",
        *(f"consumequeue/T/0/{start:020d}" for start in (600, 800, 1000)),
        f"consumequeue/T/1/{0:020d}",
        f"commitlog/{3 * 4096:020d}",
        f"commitlog/{2 * 4096:020d}",
    ]
    assert [used for path, used in found if "/T/" in str(path)] == [200, 200, 180, 20]
    store.close()
    assert newest_files([], []) == []


async def test_they_are_in_memory_after_a_start(tmp_path: Path) -> None:
    log = filled(tmp_path)
    for file in log:
        descriptor = os.open(file.path, os.O_RDONLY)
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    store = open_store(tmp_path, files=Files())
    store.use_threads = True
    async with running(store.run):
        await until(lambda: all(file.is_resident(0, 4096) for file in log[-3:]))


def test_it_ends_when_told_and_passes_by_what_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(20 << 20))
    calls = []
    warm([(tmp_path / "gone", 1), (path, 20 << 20)], Files(), lambda: calls.append(1))
    assert len(calls) == 3
    with pytest.raises(KeyboardInterrupt):
        warm([(path, 1)], Files(), lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    calls.clear()
    warm([(path, 1 << 50), (path, 1)], Files(), lambda: calls.append(1))
    assert not calls  # more than a quarter of the memory of any machine
