"""A taker that the store has never heard of is treated as ConsumeQueues and index are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from headrace_broker.store.errors import StoreBusy
from headrace_broker.store.integrity.checkpoint import Checkpoint
from headrace_broker.store.log.ring import Rows
from headrace_broker.store.log.takers import Taker, TakerFlush
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.settings import Retention
from tests.support.stores import (
    SetClock,
    crash,
    open_store,
    put,
    query_index,
    read_all,
)


class NotingTaker(Taker):
    """Notes physical offsets, and in a file up to where it did; it can be made to lag."""

    name = "noting"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.noted: list[int] = []
        self.cuts: list[int] = []
        self.is_stuck = False

    def durable_offset(self) -> int:
        return int(self.path.read_text()) if self.path.exists() else 0

    def put(self, rows: Rows) -> None:
        assert len(rows)
        self.noted += rows["physical_offset"].tolist()

    def drain(self, confirmed_offset: int | None) -> None:
        if not self.is_stuck:
            super().drain(confirmed_offset)

    def cut(self, physical_offset: int) -> None:
        self.cuts.append(physical_offset)

    def start_flush(self, taken_offset: int) -> TakerFlush:
        def flushed(checkpoint: Checkpoint) -> Checkpoint:
            self.path.write_text(str(taken_offset))
            return checkpoint

        return TakerFlush(flushed=flushed)


def opened(root: Path, taker: Taker, **changes: Any) -> MessageStore:
    return open_store(root, more_takers=[taker], **changes)


@pytest.fixture
def taker(tmp_path: Path) -> NotingTaker:
    return NotingTaker(tmp_path / "noted")


def test_it_gets_every_row_once_and_in_order(tmp_path: Path, taker: NotingTaker) -> None:
    store = opened(tmp_path / "store", taker)
    offsets = [put(store, store.queue("T", number % 3)) for number in range(200)]
    assert taker.noted == offsets


def test_a_start_puts_no_empty_block(tmp_path: Path, taker: NotingTaker) -> None:
    store = opened(tmp_path / "store", taker)
    for _ in range(5):
        put(store, store.queue("T", 0))
    taker.path.write_text(str(store.commit_log.max_offset))
    crash(store)
    again = NotingTaker(taker.path)
    store = opened(tmp_path / "store", again)  # queues and index get rows anew
    assert again.noted == []
    assert len(read_all(store, store.queue("T", 0))) == 5


def test_a_stuck_one_holds_the_ring_and_is_named(tmp_path: Path, taker: NotingTaker) -> None:
    store = opened(tmp_path / "store", taker, commit_log_file_bytes=1 << 16)
    taker.is_stuck = True
    for _ in range(64):
        put(store, store.queue("T", 0))
        store.index_tick()
    assert store.write_path.pressure() == "noting"
    assert store.statistics().behind_rows == {"consumequeue": 0, "index": 0, "noting": 64}
    with pytest.raises(StoreBusy, match="dispatch is behind: noting"):
        put(store, store.queue("T", 0))
    taker.is_stuck = False
    store.write_path.publish()
    assert store.write_path.pressure() is None
    put(store, store.queue("T", 0))
    assert len(taker.noted) == 65


def aged(root: Path, taker: NotingTaker) -> MessageStore:
    """Files of the log that clean-up removes as soon as nobody needs them."""
    retention = Retention(
        delete_hours=frozenset(range(24)), clean_ratio=1.0, force_ratio=1.0, refuse_ratio=1.0
    )
    store = opened(root, taker, retention=retention)
    assert isinstance(store.clock, SetClock)
    now_ms, store.clock.ms = store.clock.ms, store.clock.ms - 100 * 3600 * 1000
    for _ in range(6):
        put(store, store.queue("T", 0), bytes(2000))
    store.clock.ms = now_ms
    store.index_tick()
    for file in store.commit_log.files.files:
        os.utime(file.path, times=(0, now_ms / 1000 - 100 * 3600))
    return store


async def test_no_log_file_goes_that_it_needs(tmp_path: Path, taker: NotingTaker) -> None:
    taker.is_stuck = True
    store = aged(tmp_path / "store", taker)
    await store.flusher.flush_thoroughly()
    await store.cleaner.round()
    assert store.commit_log.min_offset == 0
    taker.is_stuck = False
    store.write_path.publish()
    await store.cleaner.round()
    assert store.commit_log.min_offset > 0
    assert taker.durable_offset() >= store.commit_log.min_offset


class ForgetfulTaker(NotingTaker):
    """A flush brings nothing of it to disk."""

    def start_flush(self, _taken_offset: int) -> TakerFlush:
        return TakerFlush()


async def test_no_log_file_goes_before_it_has_on_disk_what_it_took(tmp_path: Path) -> None:
    taker = ForgetfulTaker(tmp_path / "noted")
    store = aged(tmp_path / "store", taker)
    await store.flusher.flush_thoroughly()
    await store.cleaner.round()
    assert store.commit_log.min_offset == 0
    taker.path.write_text(str(store.commit_log.max_offset))
    await store.cleaner.round()
    assert store.commit_log.min_offset > 0


@pytest.mark.parametrize("is_clean", [True, False])
def test_a_start_puts_what_it_has_not_on_disk(
    tmp_path: Path, taker: NotingTaker, is_clean: bool
) -> None:
    root = tmp_path / "store"
    store = opened(root, taker)
    offsets = [put(store, store.queue("T", 0), KEYS="k") for _ in range(5)]
    store.flusher.flush_now()
    durable = taker.durable_offset()
    assert durable == store.commit_log.max_offset
    offsets += [put(store, store.queue("T", 0), KEYS="k") for _ in range(5)]
    if is_clean:
        store.close()
    else:
        crash(store)
    if is_clean:
        taker.path.write_text(str(durable))  # as if a broker without it had gone on
    again = NotingTaker(taker.path)
    store = opened(root, again)
    assert again.noted == offsets[5:]
    assert again.cuts == [durable, store.commit_log.max_offset]
    assert len(read_all(store, store.queue("T", 0))) == 10
    assert query_index(store, "T", "k", 20, 0, 1 << 62) == offsets[::-1]
    assert put(store, store.queue("T", 0)) == again.noted[-1]


def test_one_that_is_new_gets_the_whole_log(tmp_path: Path, taker: NotingTaker) -> None:
    store = open_store(tmp_path / "store")
    offsets = [put(store, store.queue("T", 0), bytes(500)) for _ in range(30)]
    store.close()
    store = opened(tmp_path / "store", taker)
    assert taker.noted == offsets
    assert len(read_all(store, store.queue("T", 0))) == 30


def test_it_sees_nothing_before_the_flush(tmp_path: Path, taker: NotingTaker) -> None:
    store = opened(tmp_path / "store", taker, flush="sync")
    offset = put(store, store.queue("T", 0))
    assert taker.noted == []
    store.flusher.flush_log_now()
    store.write_path.publish()
    assert taker.noted == [offset]
