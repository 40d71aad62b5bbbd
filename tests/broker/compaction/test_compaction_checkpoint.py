"""``position-checkpoint``: read from Apache's broker, written for it, torn, ahead of the log."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from headrace_broker.compaction.checkpoint import NEVER, PositionCheckpoint
from headrace_broker.store.files.filesystem import Files
from tests.support.golden import golden_store


def loaded(root: Path) -> PositionCheckpoint:
    checkpoint = PositionCheckpoint(root, Files())
    checkpoint.load()
    return checkpoint


def test_the_file_of_apache_is_read_and_kept(tmp_path: Path) -> None:
    (tmp_path / "compaction").mkdir()
    path = tmp_path / "compaction" / "position-checkpoint"
    shutil.copy(golden_store("clean") / "compaction" / path.name, path)
    checkpoint = loaded(tmp_path)
    assert checkpoint.get("G_COMPACT", 0, 42) == 35
    assert checkpoint.get("G_COMPACT", 1, 23) == NEVER
    checkpoint.save("A_b", 7, 12)
    assert json.loads(path.read_bytes()) == {
        "empty": False,
        "queueOffsetMap": {"G_COMPACT_0": 35, "A_b_7": 12},
    }
    checkpoint.drop("G_COMPACT", 0)
    checkpoint.drop("G_COMPACT", 0)
    again = loaded(tmp_path)
    assert (again.get("A_b", 7, 13), again.get("G_COMPACT", 0, 42)) == (12, NEVER)


def test_a_torn_file_is_replaced_by_its_backup(tmp_path: Path) -> None:
    checkpoint = loaded(tmp_path)
    checkpoint.save("T", 0, 5)
    checkpoint.save("T", 0, 9)
    path = tmp_path / "compaction" / "position-checkpoint"
    path.write_bytes(path.read_bytes()[:30])
    assert loaded(tmp_path).get("T", 0, 100) == 5
    for torn in (path, path.with_name("position-checkpoint.bak")):
        torn.write_bytes(b'{"queueOffsetMap":[]}')
    assert loaded(tmp_path).get("T", 0, 100) == NEVER


@pytest.mark.parametrize(("end_offset", "expected"), [(10, 9), (9, NEVER), (0, NEVER)])
def test_a_position_ahead_of_the_log_counts_as_none(
    tmp_path: Path, end_offset: int, expected: int
) -> None:
    loaded(tmp_path).save("T", 0, 9)
    assert loaded(tmp_path).get("T", 0, end_offset) == expected
