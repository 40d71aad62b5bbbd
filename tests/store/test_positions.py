"""Positions of every owner: one format, and the old or the new ones whatever ends a save."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from headrace_broker.compaction.replica import RebuildCheckpoint
from headrace_broker.compaction.run_state import MarkerTimes, RunState
from headrace_broker.schedule.offsets import DeliveredLevels
from headrace_broker.staging.state import QueryState, state_file
from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.config_file import sealed
from headrace_broker.store.files.filesystem import Files
from headrace_broker.store.files.positions import FOLDER, Position, PositionFile, QueuePositions
from headrace_broker.store.followers.follower_work import position_file
from headrace_broker.store.integrity.checkpoint import IndexMark
from headrace_broker.store.old_positions import replace_old_positions
from headrace_broker.store.retention.floor_file import floor_file
from headrace_broker.timer.checkpoint import TimerCheckpoint
from headrace_broker.transaction.rebuild import Checkpoint
from headrace_protocol.staging import Decision, StagedAttempt
from tests.support.faulty_files import FaultyFiles, PowerCut, next_life

GOLDEN = Path(__file__).parents[1] / "golden" / "old-positions"
QUEUES = {("T", 0): Position(3, 100), ("T", 7): Position(0, -1), ("U", 0): Position(1, 0)}
TEXT = b'{"T":{"0":[3,100],"7":[0,-1]},"U":{"0":[1,0]}}'
DECISION = Decision("d", 5, {"broker-a": (StagedAttempt("one", 100, 2),)})


class Owner(NamedTuple):
    """A file of a store, and two of its values."""

    file: Callable[[Path, Files], PositionFile[Any] | QueuePositions]
    old: Any
    new: Any


def owner(name: str, old: Any, new: Any) -> Owner:
    return Owner(lambda root, files: PositionFile(root / name, type(old), files), old, new)


OWNERS = {
    "followers/copies.json": Owner(
        lambda root, files: position_file(root, "copies", files),
        QUEUES,
        {**QUEUES, ("T", 0): Position(2**40, 2**62)},
    ),
    "config/topicFloors.json": Owner(floor_file, QUEUES, {}),
    "config/stagedQueries.json": owner("config/stagedQueries.json", ["a"], ["a", "ü"]),
    "staged/q/state.json": Owner(
        lambda root, files: state_file(root / "staged/q", files),
        QueryState(),
        QueryState(4, DECISION, 77, 8192),
    ),
    "positions/index.json": Owner(
        IndexMark.file, IndexMark("", 0, 0, 5), IndexMark("20261121043334916", 7, 1 << 40, 1 << 50)
    ),
    **{
        name: owner(name, old, new)
        for name, old, new in (
            ("positions/deletedTopics.json", {"Gone": 4096}, {}),
            (
                "positions/schedule.json",
                DeliveredLevels({1: 3}, 9),
                DeliveredLevels({1: 4, 18: 1 << 33}, 1000),
            ),
            ("positions/timer.json", TimerCheckpoint(*range(6)), TimerCheckpoint(*range(1, 7))),
            ("positions/transaction.json", Checkpoint(0, 0, 0), Checkpoint(5, 6, 2000)),
            ("compaction/headrace/T/0/state.json", RunState(), RunState(7, MarkerTimes([7], [1]))),
            (
                "compaction/headrace/T/0/rebuild.json",
                RebuildCheckpoint("a:1", 2, 3, 4),
                RebuildCheckpoint("b", 0, 0, 0),
            ),
        )
    },
}


@pytest.mark.parametrize("name", OWNERS)
def test_positions_are_read_as_they_were_saved(name: str, tmp_path: Path) -> None:
    file, old, new = OWNERS[name]
    assert not file(tmp_path, Files()).load()
    for value in (old, new):
        file(tmp_path, Files()).save(value)
        assert file(tmp_path, Files()).load() == value
    assert (tmp_path / name).exists()


def test_positions_in_queues_are_short(tmp_path: Path) -> None:
    QueuePositions(tmp_path / "x.json", Files()).save(QUEUES)
    assert (tmp_path / "x.json").read_bytes() == sealed(TEXT)


@pytest.mark.parametrize(
    "text", [b"{}x", b"[]", b'{"T": [3]}', b'{"T": {"x": [3, 4]}}', b'{"T": {"0": [3]}}']
)
def test_text_that_holds_no_positions(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text)
    with pytest.raises(StoreFormatError, match=r"x\.json"):
        QueuePositions(path, Files()).load()


@pytest.mark.parametrize("has_backup", [True, False])
def test_an_older_position_serves_only_where_it_may(tmp_path: Path, has_backup: bool) -> None:
    file = PositionFile(tmp_path / "x.json", list[int], Files(), has_backup=has_backup)
    for value in ([1], [2]):
        file.save(value)
    (tmp_path / "x.json").write_bytes(b"[2")
    if has_backup:
        assert file.load() == [1]
    else:
        with pytest.raises(StoreFormatError, match="truncated"):
            file.load()


@pytest.mark.parametrize("name", OWNERS)
def test_removed_positions_are_gone(name: str, tmp_path: Path) -> None:
    file, old, new = OWNERS[name]
    for value in (old, new):
        file(tmp_path, Files()).save(value)
    PositionFile(tmp_path / name, dict, Files()).remove()
    assert not list((tmp_path / name).parent.iterdir())


@pytest.mark.parametrize("is_cut", [False, True], ids=["kill", "power cut"])
@pytest.mark.parametrize("after", range(8))
@pytest.mark.parametrize("name", OWNERS)
def test_any_end_of_a_save_leaves_the_old_or_the_new(
    name: str, after: int, tmp_path: Path, *, is_cut: bool
) -> None:
    file, old, new = OWNERS[name]
    life = FaultyFiles(tmp_path / "store", Random(after))
    file(life.root, life).save(old)
    begun = life.operation_count
    file(life.root, life).save(old)
    operations = life.operation_count - begun
    life.end_in(after, is_cut=is_cut)
    is_over = False
    try:
        file(life.root, life).save(new)
    except PowerCut:
        is_over = True
    else:
        life.cut_power()
    found = file(life.root, next_life(life.root, life.rng, before=life)).load() or type(new)()
    assert found in ((old, new) if is_over else (new,))
    assert is_over == (after < operations)


# -- files of earlier builds -----------------------------------------------------------------------

REPLACED: dict[str, Any] = {
    "positions/schedule.json": DeliveredLevels({1: 3, 18: 1 << 33}, 1000),
    "positions/transaction.json": Checkpoint(5, 6, 2000),
    "positions/timer.json": TimerCheckpoint(11, 12, 3000, 13, 1_700_000_000_123, 9),
    "positions/deletedTopics.json": {"Gone": 4096, "Tön": 1 << 40},
    "positions/index.json": IndexMark("20261121043334916", 7, 1 << 40, 1 << 50),
    "staged/query/state.json": QueryState(4, DECISION, 77, 8192),
}


def found(root: Path, files: Files) -> dict[str, Any]:
    return {
        name: PositionFile(root / name, type(value), files).load()
        for name, value in REPLACED.items()
    }


@pytest.mark.parametrize("is_only_backup", [False, True])
def test_old_files_are_replaced_once(tmp_path: Path, is_only_backup: bool) -> None:
    root, files = tmp_path / "store", Files()
    shutil.copytree(GOLDEN, root)
    if is_only_backup:
        for name in ("config/secondOrder.json", "deletedTopics.json"):
            (root / name).rename(root / f"{name}.bak")
    replace_old_positions(root, files)
    assert found(root, files) == REPLACED
    assert sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()) == (
        sorted(REPLACED)
    )
    # A power cut has undone the removal of the old files.
    newer = DeliveredLevels({1: 5}, 1 << 34)
    PositionFile(root / "positions/schedule.json", DeliveredLevels, files).save(newer)
    shutil.copytree(GOLDEN, root, dirs_exist_ok=True, ignore=shutil.ignore_patterns("staged"))
    replace_old_positions(root, files)
    assert found(root, files) == {**REPLACED, "positions/schedule.json": newer}


def test_a_start_with_new_files_reads_no_states(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "store")
    (tmp_path / "store" / FOLDER).mkdir()
    before = (tmp_path / "store/staged/query/state.json").read_bytes()
    replace_old_positions(tmp_path / "store", Files())
    assert (tmp_path / "store/staged/query/state.json").read_bytes() == before


def test_a_power_cut_loses_no_old_file(tmp_path: Path) -> None:
    for after in range(200):
        root = tmp_path / str(after)
        shutil.copytree(GOLDEN, root)
        life = FaultyFiles(root, Random(after))
        life.cut_after = after
        try:
            replace_old_positions(root, life)
        except PowerCut:
            files = next_life(root, life.rng, before=life)
            replace_old_positions(root, files)
            assert found(root, files) == REPLACED
        else:
            assert after > 20
            return
    pytest.fail("it never ended")


def test_old_marks_that_hold_nothing_are_named(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config/secondOrder.json").write_bytes(b'{"schedule": {}}')
    with pytest.raises(StoreFormatError, match=r"secondOrder\.json: holds no marks"):
        replace_old_positions(tmp_path, Files())
    assert FOLDER not in {path.name for path in tmp_path.iterdir()}
