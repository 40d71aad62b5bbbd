"""Other users of the machine: a store never writes through their links or waits for their FIFOs."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio

from headrace_broker.store.errors import StoreError, StoreFormatError, StoreNotWritable
from headrace_broker.store.files.config_file import ConfigFile
from headrace_broker.store.integrity.checkpoint import Checkpoint
from headrace_broker.store.integrity.lock import StoreLock
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.upkeep import LOCK_CHECK_S
from tests.support.running import running
from tests.support.stores import open_store, put


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MessageStore]:
    store = open_store(tmp_path / "store")
    put(store, store.queue("T", 0), b"body", KEYS="key")
    store.index_tick()
    yield store
    store.abandon()


def remove(lock: Path) -> None:
    lock.unlink()


def replace(lock: Path) -> None:
    lock.unlink()
    lock.touch()


def remove_all(lock: Path) -> None:
    shutil.rmtree(lock.parent)


LOSSES = [remove, replace, remove_all]


@pytest.mark.parametrize("lose", LOSSES)
async def test_a_store_whose_lock_is_lost_soon_stops_writing(
    store: MessageStore, lose: Callable[..., Any], autojump_clock: object
) -> None:
    with structlog.testing.capture_logs() as logs:
        async with running(store.run):
            lose(store.root / "lock")
            await trio.sleep(2 * LOCK_CHECK_S)
    with pytest.raises(StoreNotWritable, match="lock was removed or replaced while this broker"):
        put(store, store.queue("T", 0), b"body")
    assert "lock was removed or replaced" in (store.failure() or "")
    (stopped,) = (entry for entry in logs if entry["event"].startswith("messages are refused"))
    assert "make sure that none does, then restart this one" in stopped["reason"]


@pytest.mark.parametrize("lose", LOSSES)
def test_a_store_whose_lock_is_lost_makes_no_files(
    store: MessageStore, lose: Callable[..., Any]
) -> None:
    lose(store.root / "lock")
    put(store, store.queue("NEW", 0), b"its queue has no file yet")
    assert not (store.root / "consumequeue/NEW").exists()
    with pytest.raises(StoreNotWritable, match="lock was removed or replaced"):
        put(store, store.queue("T", 0), b"body")
    with pytest.raises(OSError, match="lock was removed or replaced"):
        ConfigFile(store.root / "config/topics.json", store.fs).save(b"{}")
    assert not (store.root / "config").exists()


def test_a_store_whose_lock_is_lost_writes_nothing_at_its_end(store: MessageStore) -> None:
    replace(store.root / "lock")
    with pytest.raises(OSError, match="lock was removed or replaced"):
        store.close()
    assert not (store.root / "checkpoint").exists()
    assert (store.root / "abort").exists()


def test_a_store_without_its_folder_still_reports_statistics(store: MessageStore) -> None:
    remove_all(store.root / "lock")
    assert store.statistics().disk_ratio == 1


def test_files_are_for_their_user_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = open_store(tmp_path / "a/store")
        put(store, store.queue("T", 0), b"body", KEYS="key")
        store.index_tick()
        ConfigFile(store.root / "config/topics.json", store.fs).save(b"{}")
        store.close()
    finally:
        os.umask(before)
    paths = [tmp_path / "a", *(tmp_path / "a").rglob("*")]
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in paths}
    assert {path.name for path in paths} > {"lock", "checkpoint", "topics.json", "commitlog"}
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in modes.items()), modes


def test_a_folder_that_was_there_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    open_store(tmp_path).close()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_a_link_of_somebody_else_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    config = ConfigFile(tmp_path / "topics.json")
    (tmp_path / "topics.json.tmp").symlink_to(victim)
    config.save(b"{}")
    assert config.load() == b"{}"
    assert victim.read_bytes() == b"precious"


@pytest.mark.parametrize("name", ["abort", "checkpoint", "lock"])
def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path, name: str) -> None:
    root, victim = tmp_path / "store", tmp_path / "victim"
    open_store(root).close()
    victim.write_bytes(b"precious")
    (root / name).unlink(missing_ok=True)
    (root / name).symlink_to(victim)
    if name == "lock":
        with pytest.raises(StoreError, match="Too many levels of symbolic links"):
            open_store(root)
    else:
        open_store(root).close()
    assert victim.read_bytes() == b"precious"


def test_what_a_crash_left_does_not_stop_the_next_save(tmp_path: Path) -> None:
    config = ConfigFile(tmp_path / "topics.json")
    (tmp_path / "topics.json.tmp").write_bytes(b"half of a")
    config.save(b"{}")
    assert config.load() == b"{}"


def test_a_fifo_in_the_place_of_a_file_is_an_error(tmp_path: Path) -> None:
    for name in ("topics.json", "checkpoint"):
        os.mkfifo(tmp_path / name)
    message = "is not a regular file; move it out of the store folder"
    with pytest.raises(StoreFormatError, match=f"topics.json: {message}"):
        ConfigFile(tmp_path / "topics.json").load()
    with pytest.raises(StoreFormatError, match=f"checkpoint: {message}"):
        Checkpoint.load(tmp_path / "checkpoint")


def test_a_fifo_in_the_place_of_abort_keeps_no_start_waiting(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    os.mkfifo(tmp_path / "abort")
    open_store(tmp_path).close()


def test_a_lock_that_is_held_is_ours(tmp_path: Path) -> None:
    lock = StoreLock(tmp_path)
    lock.acquire()
    lock.check()
    (tmp_path / "lock").unlink()
    with pytest.raises(OSError, match="was removed or replaced") as error:
        lock.check()
    assert error.value.errno == errno.ENOLCK
    lock.release()
