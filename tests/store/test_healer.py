"""A store that finds no room where the usage of the disk shows some: a quota, or no inodes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from headrace_broker.store.errors import StoreNotWritable
from headrace_broker.store.files.filesystem import DiskUsage
from headrace_broker.store.life import State
from headrace_broker.store.log.log_refusals import RETRY_MS_MAX, ROOM_RETRY_MS
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.retention.healer import HEAL_S_MAX
from tests.support.running import running
from tests.support.stores import FaultyFiles, SetClock, open_store, put, read_all

HEALS_S = 15
REST_S = 300


class Quota(FaultyFiles):
    """Refuses blocks to this user only; counts how often they were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.error = 0
        self.missing_name: str | None = None
        self.attempts = 0
        self.usage = DiskUsage(1 << 20, 1 << 40)

    def allocate(self, descriptor: int, position: int, byte_count: int) -> None:
        if self.error:
            self.attempts += 1
            raise OSError(self.error, os.strerror(self.error), self.missing_name)
        super().allocate(descriptor, position, byte_count)

    def disk_usage(self, _path: Path) -> DiskUsage:
        return self.usage


def fill(store: MessageStore) -> StoreNotWritable:
    """Put until the next file finds no room."""
    while True:
        try:
            put(store, store.queue("T", 0), bytes(900))
        except StoreNotWritable as error:
            return error


@pytest.mark.parametrize("error", [errno.EDQUOT, errno.ENOSPC])
async def test_attempts_grow_rare_and_the_store_heals_by_itself(
    tmp_path: Path,
    autojump_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
    error: int,
) -> None:
    files = Quota()
    store = open_store(tmp_path, files=files, clean_interval_ms=10_000)
    put(store, store.queue("T", 0), b"before")
    async with running(store.run):
        files.error = error
        fill(store)
        since_ms = store.commit_log.life.since_ms
        await trio.sleep(REST_S)
        assert store.commit_log.life.state is State.REFUSING
        assert store.commit_log.life.since_ms == since_ms
        # Of the healer, and the clean-ups that it asks for.
        assert files.attempts < 4 * REST_S / HEAL_S_MAX
        files.error = 0
        await trio.sleep(HEALS_S)
        assert store.commit_log.life.state is State.OPEN
    put(store, store.queue("T", 0), b"after")
    assert [message.body for message in read_all(store, store.queue("T", 0))][-1] == b"after"
    store.close()
    lines = [line for line in caplog.messages if "room for messages" in line]
    assert len(lines) <= 2 + REST_S / 30, lines
    assert "is available again" in lines[-1]


@pytest.mark.parametrize(
    "look", [lambda store: store.commit_log.look_again(), lambda store: store.cleaner.ask()]
)
def test_a_look_at_the_usage_accepts_nothing_while_a_quota_refuses(
    tmp_path: Path, look: Callable[[MessageStore], None]
) -> None:
    files, clock = Quota(), SetClock()
    store = open_store(tmp_path, clock, files)
    files.error = errno.EDQUOT
    fill(store)
    since_ms = store.commit_log.life.since_ms
    for _ in range(10):
        clock.ms += RETRY_MS_MAX
        look(store)
        assert store.commit_log.life.state is State.REFUSING
        with pytest.raises(StoreNotWritable, match="quota"):
            store.commit_log.check_room(1)
        with pytest.raises(StoreNotWritable, match="quota"):
            put(store, store.queue("T", 0), bytes(900))
    assert store.commit_log.life.since_ms == since_ms
    files.error = 0
    clock.ms += RETRY_MS_MAX
    put(store, store.queue("T", 0), bytes(900))
    assert store.commit_log.life.state is State.OPEN


def test_a_full_disk_is_looked_at_again_when_the_refusal_is_old_enough(tmp_path: Path) -> None:
    files, clock = Quota(), SetClock()
    store = open_store(tmp_path, clock, files)
    files.usage = DiskUsage(95 << 20, 5 << 20)
    store.commit_log.look_again()
    files.usage = DiskUsage(1 << 20, 1 << 40)
    for _ in range(2):
        with pytest.raises(StoreNotWritable, match="full"):
            store.commit_log.check_room(1)
        clock.ms += ROOM_RETRY_MS // 2
    store.commit_log.check_room(1)
    assert store.commit_log.life.state is State.OPEN


def test_appends_try_a_quota_ever_less_often(tmp_path: Path) -> None:
    files, clock = Quota(), SetClock()
    store = open_store(tmp_path, clock, files)
    files.error = errno.EDQUOT
    fill(store)
    files.attempts = 0
    for _ in range(60_000):
        clock.ms += 1
        with pytest.raises(StoreNotWritable):
            store.commit_log.append((store.queue("T", 0), bytes(900), b"", 0, 0, 0, 0, 0), bytes(8))
    assert 60_000 / RETRY_MS_MAX <= files.attempts < 3 * 60_000 / RETRY_MS_MAX


@pytest.mark.parametrize(
    ("error", "inodes", "missing_name", "what"),
    [
        (errno.EDQUOT, 100, None, "the quota of the disk is used up"),
        (errno.ENOSPC, 0, None, "the disk has no free inodes"),
        (errno.ENOSPC, 1, "freed since a new file found none", "the disk has no free inodes"),
        (errno.ENOSPC, 100, None, "No space left on device"),
        (errno.ENOSPC, None, "no inodes here", "No space left on device"),
    ],
)
def test_a_refusal_names_what_is_used_up(
    tmp_path: Path, error: int, inodes: int | None, missing_name: str | None, what: str
) -> None:
    """The log and a taker are refused with the same words."""
    files = Quota()
    store = open_store(tmp_path, files=files)
    files.usage = DiskUsage(1 << 20, 1 << 40, inodes)
    put(store, store.queue("T", 0))
    files.error, files.missing_name = error, missing_name
    put(store, store.queue("New", 0), dispatch=False)
    store.write_path.publish()
    of_taker = store.commit_log.life.refusal
    assert of_taker is not None
    assert of_taker.reason.startswith(what)
    assert of_taker.error_number == error
    assert fill(store).reason.startswith(what)
    files.error = 0
