"""Checksums of files: taken as the log's files fill up, written at a clean stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from headrace_broker.store.seal import BLOCK_BYTES, FileSeal, StoreDamaged
from headrace_broker.store_tools.directory import open_directory
from headrace_broker.store_tools.fsck import check
from tests.support.stores import open_store, put, small_settings

if TYPE_CHECKING:
    from pathlib import Path

FILE_BYTES = 3 * BLOCK_BYTES


async def test_a_daemon_seals_the_logs_files_as_they_fill_up(tmp_path: Path) -> None:
    store = open_store(tmp_path, commit_log_file_bytes=FILE_BYTES)
    store.works_aside = True
    queue = store.queue("T", 0)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        while len(store.commit_log.files.files) < 3:
            put(store, queue, bytes(300_000))
        with trio.fail_after(10):
            while store.commit_log.files.files[1].seal is None:  # noqa: ASYNC110 - a thread's work
                await trio.sleep(0.001)
        nursery.cancel_scope.cancel()
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
    before = FileSeal.of_full(path, 2 * BLOCK_BYTES, None)
    before = FileSeal(2 * BLOCK_BYTES, before.checksums)  # as the next start reads it
    path.write_bytes(b"b" + b"a" * (2 * BLOCK_BYTES - 1) + b"c" * BLOCK_BYTES)
    seal = FileSeal.of_full(path, FILE_BYTES, before)
    view = memoryview(path.read_bytes())
    seal.check(path, view, BLOCK_BYTES, FILE_BYTES)
    with pytest.raises(StoreDamaged) as damage:
        seal.check(path, view, 0, 1)
    assert damage.value.position == 0
