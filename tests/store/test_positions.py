"""Positions of every owner: one format, and the old or the new ones whatever ends a save."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.config_file import sealed
from headrace_broker.store.files.filesystem import Files
from headrace_broker.store.files.positions import Position, PositionFile
from headrace_broker.store.followers.follower_work import position_file
from headrace_broker.store.retention.floor_file import floor_file
from tests.support.faulty_files import FaultyFiles, PowerCut, next_life

OWNERS = {
    "followers/copies.json": lambda root, files: position_file(root, "copies", files),
    "config/topicFloors.json": floor_file,
}
OLD = {("T", 0): Position(3, 100), ("T", 7): Position(0, -1), ("U", 0): Position(1, 0)}
NEW = {**OLD, ("T", 0): Position(2**40, 2**62)}
TEXT = b'{"T": {"0": [3, 100], "7": [0, -1]}, "U": {"0": [1, 0]}}'


@pytest.mark.parametrize("name", OWNERS)
def test_positions_are_read_as_they_were_saved(name: str, tmp_path: Path) -> None:
    file = OWNERS[name](tmp_path, Files())
    assert file.load() == {}
    file.save(OLD)
    assert (tmp_path / name).read_bytes() == sealed(TEXT)
    assert OWNERS[name](tmp_path, Files()).load() == OLD


@pytest.mark.parametrize(
    "text", [b"{}x", b"[]", b'{"T": [3]}', b'{"T": {"x": [3, 4]}}', b'{"T": {"0": [3]}}']
)
def test_text_that_holds_no_positions(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text)
    with pytest.raises(StoreFormatError, match=r"x\.json"):
        PositionFile(path, Files()).load()


@pytest.mark.parametrize("end", ["power cut", "kill"])
@pytest.mark.parametrize("after", range(8))
@pytest.mark.parametrize("name", OWNERS)
def test_any_end_of_a_save_leaves_the_old_or_the_new(
    name: str, after: int, end: str, tmp_path: Path
) -> None:
    life = FaultyFiles(tmp_path / "store", Random(after))
    OWNERS[name](life.root, life).save(OLD)
    ends_at = life.operation_count + after
    life.cut_after, life.kill_after = (ends_at, -1) if end == "power cut" else (-1, ends_at)
    is_over = False
    try:
        OWNERS[name](life.root, life).save(NEW)
    except PowerCut:
        is_over = True
    else:
        life.cut_power()
    found = OWNERS[name](life.root, next_life(life.root, life.rng, before=life)).load()
    assert found in ((OLD, NEW) if is_over else (NEW,))
    assert is_over == (after < 6)
