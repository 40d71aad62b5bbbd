"""Removing what has expired."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import trio

from headrace_broker.store.cleaner import delete_files
from headrace_broker.store.reader import GetStatus
from tests.support.stores import SetClock, crash, open_store, put, read_all

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_broker.store.message_store import MessageStore

HOUR_MS = 3600 * 1000


def clean(store: MessageStore) -> int:
    """One round; returns how many log files went."""
    expired = store.cleaner.detach_expired()
    delete_files(expired)
    return sum(file.path.parent.name == "commitlog" for file in expired)


def aged_store(root: Path, clock: SetClock, ages_h: list[int]) -> MessageStore:
    """One file for each age, oldest first; about four messages in each."""
    store = open_store(root, clock, retention_ms=72 * HOUR_MS)
    for number, age_h in enumerate(ages_h):
        while store.commit_log.file_start == number * 4096:
            put(store, store.queue("T", 0), bytes(900), KEYS=str(number))
            path = store.commit_log.files.files[number].path
            os.utime(path, times=(0, clock.ms / 1000 - age_h * 3600))
            if number == len(ages_h) - 1:
                break
    store.index_tick()
    return store


def test_expired_files_go_oldest_first(tmp_path: Path) -> None:
    clock = SetClock()
    store = aged_store(tmp_path, clock, [100, 73, 71, 90, 0])
    assert clean(store) == 2  # not the fourth: the third is still young
    assert store.commit_log.min_offset == 2 * 4096
    queue = store.queue("T", 0)
    first = store.min_offset(queue)
    assert store.get(queue, 0, 9, 9, None).status is GetStatus.OFFSET_TOO_SMALL
    assert read_all(store, queue)[0].queue_offset == first > 0
    assert store.query_index("T", "0", 9, 0, 1 << 62) == []
    assert store.query_index("T", "2", 9, 0, 1 << 62)
    assert clean(store) == 0
    for _ in range(2):
        crash(store)
        store = open_store(tmp_path, clock)
        assert store.min_offset(store.queue("T", 0)) == first
    store.close()


def test_the_last_file_stays_and_a_round_is_bounded(tmp_path: Path) -> None:
    clock = SetClock()
    store = aged_store(tmp_path, clock, [100] * 14)
    for path in (tmp_path / "commitlog").iterdir():
        os.utime(path, times=(0, 0))
    assert [clean(store) for _ in range(3)] == [10, 3, 0]
    folders = [tmp_path / "consumequeue" / "T" / "0", tmp_path / "index"]
    assert [len(list(folder.iterdir())) for folder in folders] == [1, 1]
    put(store, store.queue("T", 0), b"goes on")
    assert read_all(store, store.queue("T", 0))[-1].body == b"goes on"
    store.close()


async def test_it_cleans_by_itself(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    store = aged_store(tmp_path, SetClock(), [100, 0])
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        await trio.sleep(10.5)
        assert store.commit_log.min_offset == 4096
        nursery.cancel_scope.cancel()
    store.close()
