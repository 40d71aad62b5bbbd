"""The reserve: what is saved on a full disk, and what may not take its room."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest

from headrace_broker.staging.state import QueryState, state_file
from headrace_broker.store.files.config_file import ConfigFile
from headrace_broker.store.files.filesystem import RESERVE_FOLDER, Files
from headrace_broker.store.files.positions import Position, PositionFile
from headrace_broker.store.followers.follower_work import position_file
from headrace_broker.store.integrity.checkpoint import Checkpoint, IndexMark
from headrace_broker.store.integrity.seal import Seals
from headrace_broker.store.queues.consume_queue import ALLOCATE_STEP_BYTES
from headrace_broker.timer.checkpoint import (
    TimerCheck,
    TimerCheckFile,
    TimerCheckpoint,
    TimerPosition,
)
from headrace_daemon.access.users_file import Account, UsersFile
from headrace_daemon.quotas.table import QuotaTable
from headrace_protocol.quotas import Quota
from headrace_protocol.rights.users import User, UserKind, UserStatus
from headrace_protocol.waiting import at_once
from tests.support.stores import FaultyFiles, crash, open_store, put, query_index, read_all


class NoRoom(FaultyFiles):
    """A disk without room: only what the reserve lends can be written. error: what it says."""

    def __init__(self) -> None:
        super().__init__()
        self.error = 0

    def _check(self) -> None:
        if self.error and self.reserve.lent_for is None:
            raise OSError(self.error, os.strerror(self.error))

    def allocate(self, descriptor: int, position: int, byte_count: int) -> None:
        self._check()
        super().allocate(descriptor, position, byte_count)

    def write(self, descriptor: int, data: bytes | bytearray | memoryview, position: int) -> None:
        self._check()
        super().write(descriptor, data, position)

    def open(self, path: Path, flags: int = os.O_RDWR) -> int:
        if flags & os.O_CREAT and not path.exists():  # no inode
            self._check()
        return super().open(path, flags)


ALICE = Account(User("alice", UserKind.NORMAL, UserStatus.ENABLE, None))


def save_timers(root: Path, files: Files) -> None:
    position = PositionFile(root / "timer.json", TimerCheckpoint, files)
    TimerCheckFile(root / "timercheck", files, position).save(TimerCheck(1), TimerPosition())


def save_quota(root: Path, files: Files) -> None:
    table = QuotaTable(ConfigFile(root / "quotas.json", files))
    at_once(table.put(Quota(of="topic", name="T", requests=1.0)))


SAVES: dict[str, Callable[[Path, Files], None]] = {
    "table": lambda root, files: ConfigFile(root / "config" / "t.json", files).save(b"{}"),
    "positions": lambda root, files: position_file(root, "tier", files).save(
        {("T", 0): Position(1, 2)}
    ),
    "checkpoint": lambda root, files: Checkpoint(1).save(root / "checkpoint", files),
    "index mark": lambda root, files: IndexMark.file(root, files).save(IndexMark("", 0, 0, 1)),
    "seals": lambda root, files: Seals(root, files).save(Checkpoint(), []),
    "staged state": lambda root, files: state_file(root, files).save(QueryState()),
    "timers": save_timers,
    "quotas": save_quota,
    "users": lambda root, files: UsersFile(root / "users.json", "b", replace=files.replace).save(
        {"alice": ALICE}
    ),
}


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("kind", SAVES)
def test_each_saved_file_has_room_on_a_full_disk(tmp_path: Path, kind: str, error: int) -> None:
    files = NoRoom()
    files.reserve.open(tmp_path)
    whole = blocks(tmp_path / RESERVE_FOLDER)
    files.error = error
    for _ in range(3):
        SAVES[kind](tmp_path, files)
    files.error = 0
    files.reserve.fill()
    assert blocks(tmp_path / RESERVE_FOLDER) == whole > 0


class Journaled(NoRoom):
    """A full disk whose freed blocks are those of the next file once its journal says so."""

    def __init__(self) -> None:
        super().__init__()
        self.is_freed = False

    def _check(self) -> None:
        if self.error and not self.is_freed:
            raise OSError(self.error, os.strerror(self.error))

    def fsync(self, descriptor: int) -> None:
        if self.reserve.lent_for is not None and os.fstat(descriptor).st_size == 0:
            self.is_freed = True
        super().fsync(descriptor)


def test_blocks_are_lent_once_they_are_free(tmp_path: Path) -> None:
    files = Journaled()
    files.reserve.open(tmp_path)
    files.error = errno.ENOSPC
    ConfigFile(tmp_path / "t.json", files).save(b"{}")
    assert ConfigFile(tmp_path / "t.json").load() == b"{}"


def blocks(folder: Path) -> int:
    return sum(path.stat().st_blocks for path in folder.rglob("*"))


def test_without_a_reserve_a_save_says_that_there_is_no_room(tmp_path: Path) -> None:
    files = NoRoom()
    files.error = errno.ENOSPC
    with pytest.raises(OSError, match="No space left"):
        ConfigFile(tmp_path / "t.json", files).save(b"{}")


def test_another_error_is_none_of_the_reserve(tmp_path: Path) -> None:
    files = NoRoom()
    files.reserve.open(tmp_path)
    files.error = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        ConfigFile(tmp_path / "t.json", files).save(b"{}")
    assert (tmp_path / RESERVE_FOLDER / "0").exists()


def test_what_is_lent_cannot_be_allocated_by_others(tmp_path: Path) -> None:
    files = FaultyFiles()
    files.reserve.open(tmp_path)
    descriptor = files.create(tmp_path / "log")
    refused: list[int | None] = []

    def save() -> None:
        if not refused:
            refused.append(None)
            raise OSError(errno.EDQUOT, "of the save", "its file")
        with pytest.raises(OSError, match="of the save") as refusal:
            files.allocate(descriptor, 0, 4096)
        assert (refusal.value.errno, refusal.value.filename) == (errno.EDQUOT, "its file")

    files.reserve.save(save)
    files.allocate(descriptor, 0, 4096)
    files.close(descriptor)


SHM = Path("/dev/shm")
STEP_BLOCKS = ALLOCATE_STEP_BYTES // 512


@pytest.mark.skipif(not os.access(SHM, os.W_OK), reason="no tmpfs to write to")
@pytest.mark.parametrize("is_clean", [False, True])
def test_a_start_reads_no_hole_through_a_map(
    tmp_path_factory: pytest.TempPathFactory, *, is_clean: bool
) -> None:
    """On a tmpfs such a read allocates the page, and kills the process if there is none."""
    root = SHM / f"headrace-{os.getpid()}-{tmp_path_factory.mktemp('holes').name}-{is_clean}"
    sizes: dict[str, Any] = {
        "consume_queue_file_bytes": 20 << 17,
        "commit_log_file_bytes": 1 << 20,
        "index_slot_count": 100_000,
        "index_entry_count": 100_000,
    }
    try:
        store = open_store(root, **sizes)
        queue = store.queue("T", 0)
        for number in range(20):
            put(store, queue, bytes(100), KEYS=f"k{number}")
        store.index_tick()
        store.flusher.flush_now()
        store.close() if is_clean else crash(store)
        used = {name: blocks(root / name) for name in ("consumequeue", "index", "commitlog")}
        again = open_store(root, **sizes)
        assert len(read_all(again, again.queue("T", 0))) == 20
        assert query_index(again, "T", "no such key", 9, 0, 1 << 62) == []
        now = {name: blocks(root / name) for name in used}
        again.close()
        # What was recovered may allocate ahead of its use.
        assert all(now[name] <= used[name] + STEP_BLOCKS for name in used)
    finally:
        rmtree(root, ignore_errors=True)
