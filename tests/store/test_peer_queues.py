"""After a crash, a start leaves to Apache's broker what only that can bring in order."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.queues.peer_queues import BATCH_UNIT_DTYPE
from tests.support.golden import copy_golden_store, golden_settings
from tests.support.stores import FaultyFiles, crash

BATCH = "batchconsumequeue/G_BCQ/0"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """After a crash, with all of the log to be read again."""
    root = copy_golden_store("kill9", tmp_path / "store")
    (root / "checkpoint").unlink()
    return root


def content(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def change_newest_unit(folder: Path, **fields: int) -> None:
    path = max(path for path in folder.iterdir() if path.is_file())
    units = np.memmap(path, BATCH_UNIT_DTYPE, "r+", shape=path.stat().st_size // 46)
    newest = np.flatnonzero(units["size"] > 0)[-1]
    for name, value in fields.items():
        units[name][newest] = value
    units.flush()


def test_what_the_peer_has_entered_is_left_to_it(root: Path) -> None:
    files = FaultyFiles()
    store = MessageStore(golden_settings(root), files=files)
    assert store.load().scanned_from == 0
    # A checkpoint that moves on will say that they are on disk.
    synced = [path for path in files.synced if f"{root}/{BATCH}" in path]
    assert len(synced) == 1
    crash(store)


@pytest.mark.parametrize(
    ("folder", "fields", "problem"),
    [
        (BATCH, {"size": 0}, "lacks the message at physical offset"),
        (BATCH, {"physical_offset": 1 << 40}, "points to 1099511627776, the log ends at"),
    ],
)
def test_what_a_crash_left_half_done_is_refused(
    folder: str, fields: dict[str, int], problem: str, root: Path
) -> None:
    change_newest_unit(root / folder, **fields)
    shutil.copy(Path(__file__).parents[1] / "golden/old-positions/deletedTopics.json", root)
    before = content(root)
    with pytest.raises(StoreFormatError, match=problem) as refusal:
        MessageStore(golden_settings(root), files=FaultyFiles()).load()
    assert str(refusal.value).startswith(f"{root / folder}: ")
    assert "start Apache's broker on this store once" in str(refusal.value)
    assert content(root) | {root / "lock": b""} == before | {root / "lock": b""}


def test_after_a_clean_stop_nothing_is_half_done(root: Path) -> None:
    (root / "abort").unlink()
    change_newest_unit(root / BATCH, size=0)
    store = MessageStore(golden_settings(root), files=FaultyFiles())
    store.load()
    crash(store)
