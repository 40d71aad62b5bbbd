"""``headrace tier rebuild`` of queues that have lost units, and of an index that is lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest

from headrace_broker.tiered.driver.posix import PosixDriver
from headrace_protocol.tier.driver import Buffer, Failure, FailureKind, Range
from tests.support.cli import headrace, succeed
from tests.support.rescued_tiers import LIMITS, QUEUES, fill, folder
from tests.support.tiers import BEGIN_MS, TOPIC, append, open_tier, queue_of, read_all

Files = list["Path"]
COUNT = QUEUES[TOPIC, 0]


def units_of(root: Path) -> Files:
    found = folder(root).rglob(f"{TOPIC}/0/CONSUME_QUEUE/*")
    return sorted(found, key=lambda path: path.name[8:])


def contents(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder(root).rglob("*") if path.is_file()}


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


LOSSES: dict[str, Callable[[Files], object]] = {
    "folder": lambda files: shutil.rmtree(files[0].parent),
    "first": lambda files: files[0].unlink(),
    "middle": lambda files: files[1].unlink(),
    "last": lambda files: files[-1].unlink(),
    "end of a unit": lambda files: cut(files[-1], files[-1].stat().st_size - 7),
    "end of the first": lambda files: cut(files[0], 33),
    "bytes of the last": lambda files: cut(files[-1], 0),
    "zeros": lambda files: files[-1].write_bytes(bytes(files[-1].stat().st_size)),
    "zeros at an end": lambda files: files[1].write_bytes(files[1].read_bytes()[:60] + bytes(140)),
}


@pytest.mark.parametrize("has_metadata", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
def test_lost_units_are_written_again(tmp_path: Path, loss: str, *, has_metadata: bool) -> None:
    root = tmp_path / "a"
    config = fill(root, "posix")
    before = contents(root)
    LOSSES[loss](units_of(root))
    assert contents(root) != before
    assert headrace("tier", "verify", "-c", str(config), "--deep").exit_code == 1
    if not has_metadata:
        shutil.rmtree(root / "config")
    done = succeed("tier", "rebuild", "-c", str(config), "--json").json()
    assert done == {"queues": len(QUEUES), "messages": sum(QUEUES.values()), "left_out": 0}
    assert contents(root) == before
    succeed("tier", "verify", "-c", str(config), "--deep")


@pytest.mark.parametrize("seed", range(8))
def test_with_gaps_and_expired_segments(tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    root = tmp_path / "a"
    config = fill(root, "posix")
    tier = open_tier(root, limits=LIMITS)
    queue = queue_of(tier)
    for _ in range(4):
        append(queue, rng.randrange(1, 12), queue.commit_offset + rng.randrange(3))
    assert tier.expire(TOPIC, 0, queue.log.segments[rng.randrange(3)].begin_timestamp, 0) is None
    expected = read_all(queue)
    tier.sync()
    tier.close()
    for path in units_of(root):
        match rng.randrange(4):
            case 0:
                path.unlink()
            case 1:
                cut(path, rng.randrange(path.stat().st_size))
            case 2:
                path.write_bytes(path.read_bytes()[: rng.randrange(150)] + bytes(50))
    succeed("tier", "rebuild", "-c", str(config))
    succeed("tier", "verify", "-c", str(config), "--deep")
    tier = open_tier(root, limits=LIMITS)
    assert read_all(tier.queues[TOPIC, 0]) == expected, f"seed {seed}"


def test_a_damaged_record_costs_only_itself(tmp_path: Path) -> None:
    root = tmp_path / "a"
    config = fill(root, "posix")
    log = next(
        path for path in root.rglob(f"{TOPIC}/0/COMMIT_LOG/*") if b"body 0 13 " in path.read_bytes()
    )
    data = log.read_bytes()
    at = data.rindex(b"\xda\xa3\x20\xa7", 0, data.index(b"body 0 13 ")) - 4
    log.write_bytes(data[:at] + b"\xff" * 8 + data[at + 8 :])
    LOSSES["folder"](units_of(root))
    succeed("tier", "rebuild", "-c", str(config))
    tier = open_tier(root, limits=LIMITS)
    assert read_all(tier.queues[TOPIC, 0]) == [*range(13), *range(14, COUNT)]


@pytest.mark.parametrize("lost", ["first", "middle", "last", "all", "torn"])
def test_a_lost_index_is_written_again(tmp_path: Path, lost: str) -> None:
    root = tmp_path / "a"
    config = fill(root, "posix")
    tier = open_tier(root, limits=LIMITS)
    for name in QUEUES:
        assert tier.index_again(*name, 0, 1 << 60) is None
    tier.clean_up(None, 1 << 60)  # uploads full index files
    tier.close()
    files = sorted(folder(root).rglob("INDEX/*"), key=lambda path: path.name[8:])
    assert len(files) > 2
    match lost:
        case "first":
            files[0].unlink()
        case "middle":
            files[1].unlink()
        case "last":
            files[-1].unlink()
        case "torn":
            cut(files[1], files[1].stat().st_size - 28)
        case "all":
            for path in files:
                path.unlink()
            shutil.rmtree(root / "tiered_index_file")
    succeed("tier", "rebuild", "-c", str(config))
    tier = open_tier(root, limits=LIMITS)
    for offset in range(COUNT):
        hits = tier.index.query(TOPIC, f"k{offset}", 0, 1 << 62, 10)
        assert not isinstance(hits, Failure), hits
        assert len(hits) == (2 if offset < QUEUES[TOPIC, 1] else 1), offset
    tier.close()


@pytest.mark.parametrize("loss", ["folder", "last", "bytes of the last", "end of a unit"])
def test_a_start_deletes_no_records_whose_units_are_lost(tmp_path: Path, loss: str) -> None:
    root = tmp_path / "a"
    config = fill(root, "posix")
    logs = {path: data for path, data in contents(root).items() if path.parent.name == "COMMIT_LOG"}
    LOSSES[loss](units_of(root))
    tier = open_tier(root, limits=LIMITS)
    assert "headrace tier rebuild" in str(tier.damaged[TOPIC, 0])
    tier.sync()
    tier.close()
    assert {path: contents(root)[path] for path in logs} == logs
    succeed("tier", "rebuild", "-c", str(config))
    tier = open_tier(root, limits=LIMITS)
    assert read_all(tier.queues[TOPIC, 0]) == [*range(COUNT)]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_start_without_metadata_writes_lost_units(tmp_path: Path, loss: str) -> None:
    """The disk of the broker is gone, and with it the only other copy of the records."""
    root = tmp_path / "a"
    fill(root, "posix")
    LOSSES[loss](units_of(root))
    for path in (root / "config").glob("tieredStoreMetadata.json*"):
        path.unlink()
    tier = open_tier(root, limits=LIMITS)
    assert tier.start(BEGIN_MS) is None
    assert not tier.damaged
    assert read_all(tier.queues[TOPIC, 0]) == [*range(COUNT)]
    tier.close()


def test_a_start_without_metadata_cuts_a_torn_record_alone(tmp_path: Path) -> None:
    root = tmp_path / "a"
    fill(root, "posix")
    LOSSES["last"](units_of(root))
    log = max(folder(root).rglob(f"{TOPIC}/0/COMMIT_LOG/*"), key=lambda path: path.name[8:])
    cut(log, log.stat().st_size - 1)
    shutil.rmtree(root / "config")
    tier = open_tier(root, limits=LIMITS)
    assert tier.start(BEGIN_MS) is None
    queue = tier.queues[TOPIC, 0]
    assert read_all(queue) == [*range(COUNT - 1)]
    append(queue, 2)
    assert read_all(queue) == [*range(COUNT + 1)]
    tier.close()


def test_a_start_without_metadata_fails_while_the_location_is_away(tmp_path: Path) -> None:
    class Away(PosixDriver):
        def read(self, path: str, _ranges: Sequence[Range]) -> list[Buffer] | Failure:
            return Failure(FailureKind.UNREACHABLE, path, "away")

    root = tmp_path / "a"
    fill(root, "posix")
    shutil.rmtree(root / "config")
    before = contents(root)
    tier = open_tier(root, Away(root / "tier"), limits=LIMITS)
    failure = tier.start(BEGIN_MS)
    assert failure is not None
    assert failure.reason == "away"
    assert contents(root) == before
