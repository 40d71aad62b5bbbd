"""``headrace tier rebuild`` finds all queues by the objects alone."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from headrace_broker.store.integrity.lock import StoreLock
from headrace_broker.tiered.container.stored_tier import Group
from headrace_broker.tiered.container.tier import Tier
from headrace_broker.tiered.driver.posix import PosixDriver
from headrace_broker.tiered.objects.object_tier import ObjectTier
from headrace_broker.tiered.rescue.choice import choose
from headrace_broker.tiered.rescue.rebuild import rebuild_objects
from headrace_protocol.tier.driver import Failure, FailureKind
from headrace_protocol.tier.rows import ObjectRow, Part
from tests.support.cli import fail, headrace, succeed
from tests.support.object_tiers import append_next, one, open_objects_tier
from tests.support.rescued_tiers import (
    LIMITS,
    QUEUES,
    Layout,
    fill,
    folder,
    settings_of,
    write_config,
)
from tests.support.seeds import seeds
from tests.support.tiers import TOPIC, block, open_tier, read_all

both_layouts = pytest.mark.parametrize("layout", ["posix", "file"])
losses = pytest.mark.parametrize("loss", ["missing", "torn", "garbage", "sound"])
TOTAL = sum(QUEUES.values())


def reopen(root: Path, layout: Layout) -> Tier | ObjectTier:
    if layout == "posix":
        return open_tier(root, limits=LIMITS)
    return open_objects_tier(PosixDriver(folder(root)))


def lose(root: Path, layout: Layout, loss: str) -> None:
    (path,) = root.rglob("tieredStoreMetadata.json" if layout == "posix" else "manifest.json")
    if loss != "sound":
        path.with_name(path.name + ".bak").unlink(missing_ok=True)
    match loss:
        case "missing":
            path.unlink()
        case "torn":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        case "garbage":
            path.write_bytes(b"\x00" * 100)


def files(root: Path) -> dict[Path, bytes]:
    """All objects, which stay as they are."""
    paths = [path for path in folder(root).rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in paths if not path.name.startswith("manifest")}


@both_layouts
@losses
def test_all_messages_are_found(tmp_path: Path, layout: Layout, loss: str) -> None:
    root = tmp_path / "a"
    config = fill(root, layout)
    before = files(root)
    lose(root, layout, loss)
    done = succeed("tier", "rebuild", "-c", str(config), "--json").json()
    assert done == {"queues": len(QUEUES), "messages": TOTAL, "left_out": 0}
    after = files(root)
    assert {path: after[path] for path in before} == before
    assert headrace("tier", "verify", "-c", str(config), "--deep").exit_code == 0
    tier = reopen(root, layout)
    for (topic, queue_id), count in QUEUES.items():
        assert read_all(tier.queues[topic, queue_id]) == list(range(count))
    for offset in (0, 20, 39):
        hits = tier.index.query(TOPIC, f"k{offset}", 0, 1 << 62, 10)
        assert not isinstance(hits, Failure)
        assert len(hits) == (2 if offset < QUEUES[TOPIC, 1] else 1)
    records, codes = block(QUEUES[TOPIC, 0], 5)
    assert tier.append_all({(TOPIC, 0): Group(records, codes)}, 0) is None
    assert read_all(tier.queues[TOPIC, 0]) == list(range(QUEUES[TOPIC, 0] + 5))


@both_layouts
def test_what_is_replaced_is_kept(tmp_path: Path, layout: Layout) -> None:
    root = tmp_path / "a"
    config = fill(root, layout)
    lose(root, layout, "torn")
    (path,) = root.rglob("tieredStoreMetadata.json" if layout == "posix" else "manifest.json")
    torn = path.read_bytes()
    succeed("tier", "rebuild", "-c", str(config))
    suffix = ".damaged" if layout == "posix" else ".bak"
    assert path.with_name(path.name + suffix).read_bytes() == torn


@pytest.mark.parametrize("command", ["rebuild", "sweep"])
def test_not_while_a_broker_holds_the_store(tmp_path: Path, command: str) -> None:
    config = fill(tmp_path / "a", "posix")
    lock = StoreLock(tmp_path / "a")
    lock.acquire()
    try:
        assert "is in use by" in fail(1, "tier", command, "-c", str(config))
    finally:
        lock.release()


@losses
def test_a_running_broker_uploads_nothing_more(tmp_path: Path, loss: str) -> None:
    config = fill(tmp_path / "a", "file")
    running = open_objects_tier(PosixDriver(folder(tmp_path / "a")))
    append_next(running, one(3))
    lose(tmp_path / "a", "file", loss)
    succeed("tier", "rebuild", "-c", str(config))
    failure = append_next(running, one(3))
    assert failure is not None
    assert failure.kind is FailureKind.CHANGED
    tier = open_objects_tier(PosixDriver(folder(tmp_path / "a")))
    assert tier.queues[TOPIC, 0].commit_offset == QUEUES[TOPIC, 0] + 3


def test_an_old_manifest(tmp_path: Path) -> None:
    config = fill(tmp_path / "a", "file")
    (path,) = (tmp_path / "a").rglob("manifest.json")
    old = path.read_bytes()
    tier = open_objects_tier(PosixDriver(folder(tmp_path / "a")))
    for _ in range(40):
        append_next(tier, {(TOPIC, 0): 2, ("new", 0): 1})
    while tier.merge(0) is True:
        pass
    path.write_bytes(old)
    succeed("tier", "rebuild", "-c", str(config))
    tier = open_objects_tier(PosixDriver(folder(tmp_path / "a")))
    assert read_all(tier.queues[TOPIC, 0]) == list(range(QUEUES[TOPIC, 0] + 80))
    assert read_all(tier.queues["new", 0]) == list(range(40))


def test_a_damaged_object_is_left_out(tmp_path: Path) -> None:
    config = fill(tmp_path / "a", "file")
    lose(tmp_path / "a", "file", "missing")
    last = max(folder(tmp_path / "a").rglob("data/*"))
    last.write_bytes(last.read_bytes()[:-3])
    done = headrace("tier", "rebuild", "-c", str(config))
    assert done.exit_code == 1
    assert last.name in done.stderr
    tier = open_objects_tier(PosixDriver(folder(tmp_path / "a")))
    assert read_all(tier.queues[TOPIC, 0]) == list(range(32))


def test_a_hole_in_the_log_costs_only_its_messages(tmp_path: Path) -> None:
    root = tmp_path / "a"
    config = fill(root, "posix")
    lose(root, "posix", "missing")
    logs = sorted(root.rglob(f"{TOPIC}/0/COMMIT_LOG/*"), key=lambda path: path.name[8:])
    logs[1].unlink()
    before = files(root)
    succeed("tier", "rebuild", "-c", str(config))
    assert {path: files(root)[path] for path in before} == before
    queue = reopen(root, "posix").queues[TOPIC, 0]
    assert queue.commit_offset == QUEUES[TOPIC, 0]
    found = headrace("tier", "verify", "-c", str(config)).rows()
    assert [row[2] for row in found if row[0] == "damage"] == [
        f"follows {logs[0].stat().st_size} with a gap: messages are lost"
    ]


@pytest.mark.parametrize("seed", seeds(12))
def test_leftovers_do_not_count(tmp_path: Path, seed: int) -> None:
    """Leftovers of uploads that were repeated, sources of merges, and earlier lives of topics."""
    rng = Random(seed)
    tier = open_objects_tier(PosixDriver(tmp_path))
    ends = [0, 0]
    for number in range(60):
        queue_id = rng.randrange(2)
        match rng.randrange(12):
            case 0:  # its answer is lost, and more waits at the next try
                catalogs = tier.manifest.manifest.catalogs, tier.manifest.manifest.tail
                before = tier.inventory.queues.get((TOPIC, queue_id))
                state = before.state if before is not None else None
                append_next(tier, one(rng.randrange(1, 5), queue_id), number)
                tier.manifest.commit(*catalogs)
                tier = open_objects_tier(PosixDriver(tmp_path))
                ends[queue_id] = state.end if state is not None else 0
                append_next(tier, one(6, queue_id), number)
                ends[queue_id] += 6
            case 1 if number < 50:
                tier.delete(TOPIC, queue_id)
                tier.sync()
                ends[queue_id] = 0
            case _:
                count = rng.randrange(1, 5)
                append_next(tier, one(count, queue_id), number)
                ends[queue_id] += count
    while tier.merge(60) is True:
        pass
    append_next(tier, {(TOPIC, 0): 1, (TOPIC, 1): 1}, 61)
    (path,) = tmp_path.rglob("manifest.json")
    path.unlink()
    (tmp_path / "a").mkdir()
    settings = settings_of(write_config(tmp_path / "a", "file"))
    rebuilt = rebuild_objects(PosixDriver(tmp_path), settings, 62)
    assert not rebuilt.problems
    for queue_id in range(2):
        queue = rebuilt.tier.queues[TOPIC, queue_id]
        assert queue.commit_offset == ends[queue_id] + 1, f"seed {seed}"
        assert read_all(queue) == list(range(ends[queue_id] + 1)), f"seed {seed}"


def test_another_life_is_told_by_its_place_in_the_log() -> None:
    old = ObjectRow("data/1", 1, "", 0, 0, {TOPIC: [Part(0, 0, 10, 10, 900, 1000, 0, 0, 0)]})
    new = ObjectRow("data/2", 0, "", 0, 0, {TOPIC: [Part(0, 0, 0, 10, 0, 1000, 0, 0, 0)]})
    assert choose([old, new]) == [new]
    part = Part(0, 0, 10, 10, 1000, 1000, 0, 0, 0)
    assert choose([old, ObjectRow("data/3", 0, "", 0, 0, {TOPIC: [part]}), new])[1:] == [new]
