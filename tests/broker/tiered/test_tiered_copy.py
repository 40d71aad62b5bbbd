"""``headrace tier copy`` moves a tier from one layout to the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace_broker.tiered.container.location_mark import mark_path
from headrace_broker.tiered.driver.posix import PosixDriver
from headrace_protocol.tier.paths import Home
from tests.support.cli import fail, headrace, succeed
from tests.support.object_tiers import HOME, append_next, one, open_objects_tier
from tests.support.rescued_tiers import LIMITS, QUEUES, Layout, fill, folder, mark, write_config
from tests.support.tiers import TOPIC, append, open_tier, queue_of, read_all

TOTAL = sum(QUEUES.values())
ways = pytest.mark.parametrize(
    ("source", "target"),
    [("posix", "file"), ("file", "posix"), ("file", "file"), ("posix", "posix")],
)


def copy(source: Path, target: Path) -> dict[str, int]:
    counts: dict[str, int] = succeed(
        "tier", "copy", "--from", str(source), "--to", str(target), "--json"
    ).json()
    return counts


def config_of(root: Path, layout: Layout) -> Path:
    root.mkdir()
    return write_config(root, layout)


def check(root: Path, layout: Layout, counts: dict[tuple[str, int], int]) -> None:
    if layout == "posix":
        queues = open_tier(root, limits=LIMITS).queues
        found = {name: read_all(queue) for name, queue in queues.items()}
    else:
        objects = open_objects_tier(PosixDriver(folder(root))).queues
        found = {name: read_all(queue) for name, queue in objects.items()}
    assert found == {name: list(range(count)) for name, count in counts.items()}


@ways
def test_all_messages_are_copied_once(tmp_path: Path, source: Layout, target: Layout) -> None:
    old, new = fill(tmp_path / "a", source), config_of(tmp_path / "b", target)
    expected = {"queues": len(QUEUES), "messages": TOTAL, "copied": TOTAL, "damaged": 0}
    assert copy(old, new) == expected
    check(tmp_path / "b", target, QUEUES)
    assert copy(old, new) == {**expected, "copied": 0}


@ways
def test_a_copy_continues_where_it_was_cut_short(
    tmp_path: Path, source: Layout, target: Layout
) -> None:
    old, new = fill(tmp_path / "a", source), config_of(tmp_path / "b", target)
    if target == "posix":
        tier = open_tier(tmp_path / "b", limits=LIMITS)
        append(queue_of(tier), 17)  # killed before the metadata was saved
    else:
        append_next(open_objects_tier(PosixDriver(folder(tmp_path / "b"))), one(17))
    assert copy(old, new)["copied"] == TOTAL - 17
    check(tmp_path / "b", target, QUEUES)


@ways
def test_a_target_with_other_messages(tmp_path: Path, source: Layout, target: Layout) -> None:
    old, new = fill(tmp_path / "a", source), fill(tmp_path / "b", target)
    if target == "posix":
        tier = open_tier(tmp_path / "b", limits=LIMITS)
        append(queue_of(tier), 1)
        tier.sync()
    else:
        append_next(open_objects_tier(PosixDriver(folder(tmp_path / "b"))), one(1))
    said = fail(1, "tier", "copy", "--from", str(old), "--to", str(new))
    assert f"queue {TOPIC}/0 ends at 41 in the target" in said


def test_a_damaged_source(tmp_path: Path) -> None:
    old, new = fill(tmp_path / "a", "posix"), config_of(tmp_path / "b", "file")
    path = next(
        path for path in tmp_path.rglob("COMMIT_LOG/*") if b"body 0 13 " in path.read_bytes()
    )
    path.write_bytes(path.read_bytes().replace(b"body 0 13 ", b"bodx 0 13 "))
    said = headrace("tier", "copy", "--from", str(old), "--to", str(new))
    assert said.exit_code == 1
    assert "headrace tier verify --deep" in said.stderr


def test_two_folders_of_one_store(tmp_path: Path) -> None:
    old, new = fill(tmp_path / "a", "posix"), tmp_path / "new.conf"
    new.write_text(old.read_text().replace(str(tmp_path / "a" / "tier"), str(tmp_path / "b")))
    assert "copy the folder" in fail(1, "tier", "copy", "--from", str(old), "--to", str(new))


def test_a_tier_onto_itself(tmp_path: Path) -> None:
    config = str(fill(tmp_path / "a", "posix"))
    assert "the same tier" in fail(1, "tier", "copy", "--from", config, "--to", config)


@ways
@pytest.mark.parametrize("home", [HOME, Home("another", "b")], ids=["same home", "another home"])
def test_a_copy_has_the_mark_of_its_source(
    tmp_path: Path, source: Layout, target: Layout, home: Home
) -> None:
    old = fill(tmp_path / "a", source)
    text = mark(tmp_path / "a")
    (tmp_path / "b").mkdir()
    new = write_config(tmp_path / "b", target, home)
    for copied in (TOTAL, 0):
        assert copy(old, new)["copied"] == copied
        found = json.loads((folder(tmp_path / "b") / mark_path(home)).read_bytes())
        expected = {**json.loads(text), "cluster": home.cluster, "broker": home.broker}
        assert found == expected
    assert (folder(tmp_path / "a") / mark_path(HOME)).read_bytes() == text


def test_a_copy_leaves_a_tier_with_another_mark(tmp_path: Path) -> None:
    old, new = fill(tmp_path / "a", "posix"), config_of(tmp_path / "b", "posix")
    mark(tmp_path / "a")
    text = mark(tmp_path / "b", id_="fedcba9876543210")
    said = fail(1, "tier", "copy", "--from", str(old), "--to", str(new))
    assert "the target has the mark of another tier" in said
    paths = [path for path in folder(tmp_path / "b").rglob("*") if path.is_file()]
    assert [path.read_bytes() for path in paths] == [text]
