"""``headrace tier verify`` finds what is missing, short, changed or left over."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_broker.tiered.driver.posix import PosixDriver
from headrace_protocol.tier.paths import Home
from tests.support.cli import Outcome, fail, headrace, succeed
from tests.support.object_tiers import append_next, open_objects_tier
from tests.support.rescued_tiers import LIMITS, QUEUES, Layout, fill, folder, write_config
from tests.support.tiers import TOPIC, append, open_tier, queue_of

both_layouts = pytest.mark.parametrize("layout", ["posix", "file"])


def verify(config: Path, *options: str) -> Outcome:
    return headrace("tier", "verify", "-c", str(config), *options)


def spoil(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))


@both_layouts
def test_a_sound_tier(tmp_path: Path, layout: Layout) -> None:
    config = fill(tmp_path / "a", layout)
    report = succeed("tier", "verify", "-c", str(config), "--deep", "--json").json()
    expected = {"queues": len(QUEUES), "messages": sum(QUEUES.values()), "damaged": 0}
    assert report == {**expected, "findings": []}
    assert "no problems found" in verify(config).stderr


@both_layouts
def test_missing_and_short_files(tmp_path: Path, layout: Layout) -> None:
    config = fill(tmp_path / "a", layout)
    pattern = f"broker/{TOPIC}/0/COMMIT_LOG/*" if layout == "posix" else "data/*"
    first, second, *_ = sorted(
        folder(tmp_path / "a").rglob(pattern), key=lambda path: path.name[8:]
    )
    first.unlink()
    second.write_bytes(second.read_bytes()[:-10])
    done = verify(config)
    assert done.exit_code == 1
    found = {row[1].rpartition("/")[2]: row for row in done.rows()}
    if layout == "file":  # its directory is a part of the manifest
        assert found.keys() == {first.name}
        assert "headrace tier rebuild" in found[first.name][2]
        return
    assert found[first.name][0] == found[second.name][0] == "damage"
    assert found[first.name][2].startswith("is missing")
    assert found[second.name][2].startswith(f"has {second.stat().st_size} bytes")
    assert verify(config, "--deep").exit_code == 1


@both_layouts
@pytest.mark.parametrize("queue_offset", [0, 13, 39])
def test_a_changed_byte_of_a_body_is_named(
    tmp_path: Path, layout: Layout, queue_offset: int
) -> None:
    config = fill(tmp_path / "a", layout)
    text = f"body 0 {queue_offset} ".encode()
    if not queue_offset % 7:  # without a body: a byte of its key
        text = f"u{queue_offset}\x02".encode()
    pattern = f"broker/{TOPIC}/0/COMMIT_LOG/*" if layout == "posix" else "data/*"
    paths = [path for path in folder(tmp_path / "a").rglob(pattern) if text in path.read_bytes()]
    spoil(paths[0], paths[0].read_bytes().index(text))
    assert verify(config).exit_code == 0
    found = verify(config, "--deep")
    if queue_offset % 7:
        assert found.exit_code == 1
        (row,) = found.rows()
        assert row[0] == "damage"
        assert row[2].startswith(f"queue offset {queue_offset}: ")


def test_missing_and_short_objects_behind_a_checkpoint(tmp_path: Path) -> None:
    config = fill(tmp_path / "a", "file")
    tier = open_objects_tier(PosixDriver(folder(tmp_path / "a")))
    tier.checkpoint(0)
    first, second, *_ = sorted(folder(tmp_path / "a").rglob("data/*"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:900])
    done = verify(config)
    assert done.exit_code == 1
    found = {row[1].rpartition("/")[2]: row[2] for row in done.rows()}
    assert found[first.name] == "is missing"
    assert found[second.name].startswith("has 900 bytes")


@both_layouts
def test_metadata_that_is_torn_or_lost(tmp_path: Path, layout: Layout) -> None:
    config = fill(tmp_path / "a", layout)
    name = "tieredStoreMetadata.json" if layout == "posix" else "manifest.json"
    (path,) = (tmp_path / "a").rglob(name)
    path.write_bytes(path.read_bytes()[:-60])
    for other in path.parent.glob("*.bak"):
        other.unlink()
    (row,) = verify(config).rows()
    assert row[0] == "damage"
    assert "headrace tier rebuild" in row[2]
    path.unlink()
    done = verify(config)
    assert done.exit_code == 1
    assert "headrace tier rebuild" in done.rows()[0][2]


@both_layouts
def test_an_empty_tier_is_sound(tmp_path: Path, layout: Layout) -> None:
    (tmp_path / "a").mkdir()
    config = write_config(tmp_path / "a", layout)
    assert "is not there: mount its file system" in verify(config, "--deep").stderr
    (tmp_path / "a" / "tier").mkdir()
    assert verify(config, "--deep").exit_code == 0


def test_the_metadata_of_another_broker(tmp_path: Path) -> None:
    fill(tmp_path / "a", "posix")
    config = write_config(tmp_path / "a", "posix", Home("cluster", "broker-b"))
    done = verify(config)
    assert done.exit_code == 1
    assert all("another broker" in row[2] for row in done.rows())


def test_the_manifest_of_another_broker(tmp_path: Path) -> None:
    config = fill(tmp_path / "a", "file")
    (path,) = (tmp_path / "a").rglob("manifest.json")
    path.write_bytes(path.read_bytes().replace(b'"broker":"broker"', b'"broker":"other"'))
    done = verify(config)
    assert done.exit_code == 1
    assert "belongs to broker other" in done.rows()[0][2]


def test_files_that_are_ahead_of_the_metadata_are_notes(tmp_path: Path) -> None:
    config = fill(tmp_path / "a", "posix")
    tier = open_tier(tmp_path / "a", limits=LIMITS)
    append(queue_of(tier), 30)  # and no sync
    done = verify(config, "--deep")
    assert done.exit_code == 0
    assert {row[0] for row in done.rows()} == {"note"}
    assert any("more than the metadata says" in row[2] for row in done.rows())


def test_objects_without_a_name_are_notes(tmp_path: Path) -> None:
    config = fill(tmp_path / "a", "file")
    (path,) = (tmp_path / "a").rglob("manifest.json")
    tier = open_objects_tier(PosixDriver(folder(tmp_path / "a")))
    before = path.read_bytes()
    append_next(tier, {(TOPIC, 0): 5})
    path.write_bytes(before)
    done = verify(config)
    assert done.exit_code == 0
    (row,) = done.rows()
    assert row[0] == "note"
    assert "headrace tier sweep" in row[2]


def test_units_of_other_tags(tmp_path: Path) -> None:
    config = fill(tmp_path / "a", "posix")
    units = next((tmp_path / "a").rglob(f"broker/{TOPIC}/0/CONSUME_QUEUE/*0"))
    spoil(units, 3 * 20 + 19)
    (row,) = verify(config, "--deep").rows()
    assert row[2].startswith("queue offset ")
    assert row[2].endswith("its unit has other tags")


def test_a_broker_without_a_tier(tmp_path: Path) -> None:
    (tmp_path / "broker.conf").write_text("brokerName=a\n")
    said = fail(2, "tier", "verify", "-c", str(tmp_path / "broker.conf"))
    assert "has no tiered storage" in said
