"""``headrace tier sweep`` deletes what nothing names, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_broker.tiered.driver.posix import PosixDriver
from headrace_protocol.tier.paths import segment_name
from tests.support.cli import fail, succeed
from tests.support.object_tiers import append_next, one, open_objects_tier
from tests.support.rescued_tiers import LIMITS, QUEUES, Layout, fill, folder
from tests.support.tiers import TOPIC, append, open_tier, queue_of, read_all

NOW_MS = 1 << 42  # in the year 2109, so never old


def sweep(config: Path, *options: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = succeed(
        "tier", "sweep", "-c", str(config), "--json", *options
    ).json()
    return found


def leave(root: Path, layout: Layout) -> list[Path]:
    """Leave files or objects behind that nothing names."""
    (cluster,) = (path for path in folder(root).iterdir() if path.is_dir())
    if layout == "posix":
        paths = [cluster / "broker" / "gone" / "0" / "COMMIT_LOG" / segment_name(0)]
    else:
        paths = [cluster / "broker" / "data" / "00000001-0000000900-00000000001000"]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"12345")
    return paths


@pytest.mark.parametrize("layout", ["posix", "file"])
def test_only_leftovers_are_deleted_and_only_with_yes(tmp_path: Path, layout: Layout) -> None:
    config = fill(tmp_path / "a", layout)
    assert sweep(config) == []
    (left,) = leave(tmp_path / "a", layout)
    before = {path for path in folder(tmp_path / "a").rglob("*") if path.is_file()}
    for options, is_deleted in (((), False), (("--yes",), True)):
        (found,) = sweep(config, *options)
        assert str(found["path"]).endswith(left.name)
        assert (found["bytes"], found["deleted"]) == (5, is_deleted)
        assert left.exists() != is_deleted
    after = {path for path in folder(tmp_path / "a").rglob("*") if path.is_file()}
    assert before - after == {left}
    assert sweep(config, "--yes") == []


def test_young_objects_stay(tmp_path: Path) -> None:
    config = fill(tmp_path / "a", "file")
    (path,) = (tmp_path / "a").rglob("manifest.json")
    before = path.read_bytes()
    tier = open_objects_tier(PosixDriver(folder(tmp_path / "a")))
    append_next(tier, one(5), NOW_MS)
    path.write_bytes(before)
    assert sweep(config, "--yes") == []


def test_files_that_are_ahead_of_the_metadata_stay(tmp_path: Path) -> None:
    config = fill(tmp_path / "a", "posix")
    tier = open_tier(tmp_path / "a", limits=LIMITS)
    append(queue_of(tier), 60)  # and no sync
    assert sweep(config, "--yes") == []
    queue = open_tier(tmp_path / "a", limits=LIMITS).queues[TOPIC, 0]
    assert read_all(queue) == list(range(QUEUES[TOPIC, 0] + 60))


@pytest.mark.parametrize("layout", ["posix", "file"])
def test_not_without_the_names(tmp_path: Path, layout: Layout) -> None:
    config = fill(tmp_path / "a", layout)
    name = "tieredStoreMetadata.json*" if layout == "posix" else "manifest.json"
    for path in (tmp_path / "a").rglob(name):
        path.unlink()
    before = sorted(folder(tmp_path / "a").rglob("*"))
    fail(1, "tier", "sweep", "-c", str(config), "--yes")
    assert sorted(folder(tmp_path / "a").rglob("*")) == before
