"""The faulty disk does what a real one does, until it fails; and then no more than a disk may."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from random import Random

import pytest

from headrace_broker.store.files.filesystem import Files
from headrace_broker.store.files.mapped_file import MappedFile
from tests.support.faulty_files import (
    PAGE_BYTES,
    SECTOR_BYTES,
    FaultRates,
    FaultyFiles,
    Image,
    PowerCut,
    next_life,
)
from tests.support.seeds import seeds

SEEDS = range(60)


# -- real and faulty alike -------------------------------------------------------------------------


@pytest.fixture(params=["real", "faulty"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    return Files() if request.param == "real" else FaultyFiles(tmp_path, Random(1))


def test_what_is_written_is_read_and_mapped(files: Files, tmp_path: Path) -> None:
    descriptor = files.create(tmp_path / "a")
    files.truncate(descriptor, 2 * PAGE_BYTES)
    files.allocate(descriptor, 0, PAGE_BYTES)
    files.write(descriptor, b"written", 10)
    mapped = mmap.mmap(descriptor, 2 * PAGE_BYTES)
    mapped[20:26] = b"mapped"
    assert mapped[10:17] == b"written"
    files.fdatasync(descriptor)
    files.fsync(descriptor)
    files.sync_names()
    files.close(descriptor)
    data = (tmp_path / "a").read_bytes()
    assert len(data) == 2 * PAGE_BYTES
    assert data.strip(b"\0") == b"written" + bytes(3) + b"mapped"


def test_cut_and_grown_again_it_is_zero(files: Files, tmp_path: Path) -> None:
    descriptor = files.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    files.write(descriptor, b"x" * 100, 0)
    files.truncate(descriptor, 40)
    files.truncate(descriptor, 100)
    files.close(descriptor)
    assert (tmp_path / "a").read_bytes() == b"x" * 40 + bytes(60)


def test_names_move_and_go(files: Files, tmp_path: Path) -> None:
    for name in ("a", "b"):
        descriptor = files.open(tmp_path / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        files.write(descriptor, name.encode(), 0)
        files.close(descriptor)
    files.rename(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"a"
    files.unlink(tmp_path / "b")
    files.fsync_directory(tmp_path)
    assert not list(tmp_path.iterdir())


def test_folders_are_made_with_those_above(files: Files, tmp_path: Path) -> None:
    files.make_directories(tmp_path / "x" / "y")
    files.close(files.create(tmp_path / "x" / "y" / "a"))
    files.sync_names()
    assert (tmp_path / "x" / "y" / "a").exists()


def test_what_is_missing_or_there_already_is_an_error(files: Files, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.open(tmp_path / "a")
    files.close(files.create(tmp_path / "a"))
    with pytest.raises(FileExistsError):
        files.create(tmp_path / "a")


def test_a_mapped_file_has_what_was_written(files: Files, tmp_path: Path) -> None:
    file = MappedFile.create(tmp_path / f"{0:020d}", PAGE_BYTES, files, PAGE_BYTES)
    file.map[0:3] = b"abc"
    file.sync()
    assert files.is_cached(file, 0, PAGE_BYTES)
    file.clear_from(1)
    assert file.map[0:3] == b"a\0\0"


# -- power cuts ------------------------------------------------------------------------------------


def disk(root: Path, seed: int = 1, rates: FaultRates | None = None) -> FaultyFiles:
    return FaultyFiles(root, Random(seed), rates)


def written(files: FaultyFiles, name: str, data: bytes, *, sync: bool = False) -> int:
    descriptor = files.open(files.root / name, os.O_RDWR | os.O_CREAT)
    files.write(descriptor, data, 0)
    if sync:
        files.fdatasync(descriptor)
        files.fsync_directory(files.root)
    return descriptor


def after_cut(files: FaultyFiles) -> Image:
    files.cut_power()
    assert files.image is not None
    return files.image


@pytest.mark.parametrize("seed", seeds(60))
def test_what_was_synced_outlives_a_power_cut(tmp_path: Path, seed: int) -> None:
    files = disk(tmp_path, seed)
    descriptor = written(files, "a", b"1" * 3 * PAGE_BYTES, sync=True)
    files.write(descriptor, b"2" * PAGE_BYTES, PAGE_BYTES)
    data = after_cut(files).files[Path("a")]
    assert data[:PAGE_BYTES] == data[2 * PAGE_BYTES :] == b"1" * PAGE_BYTES
    for at in range(PAGE_BYTES, 2 * PAGE_BYTES, SECTOR_BYTES):
        assert data[at : at + SECTOR_BYTES] in (b"1" * SECTOR_BYTES, b"2" * SECTOR_BYTES)


def test_pages_are_lost_torn_and_reordered(tmp_path: Path) -> None:
    seen: set[str] = set()
    for seed in SEEDS:
        files = disk(tmp_path / str(seed), seed)
        descriptor = written(files, "a", bytes(4 * PAGE_BYTES), sync=True)
        files.write(descriptor, b"2" * 4 * PAGE_BYTES, 0)
        after_cut(files)
        seen |= {name for name, count in files.faults.items() if count}
    assert seen == {"power cut", "lost page", "torn page", "reordered write-back"}


def test_a_name_needs_a_sync_of_its_folder(tmp_path: Path) -> None:
    names = set()
    for seed in SEEDS:
        files = disk(tmp_path / str(seed), seed)
        files.fdatasync(written(files, "a", b"1"))
        names.add(tuple(map(str, after_cut(files).files)))
    assert names == {(), ("a",)}


def test_an_unsynced_rename_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    outcomes = set()
    for seed in SEEDS:
        files = disk(tmp_path / str(seed), seed)
        written(files, "a", b"old", sync=True)
        written(files, "b", b"new", sync=True)
        files.rename(files.root / "b", files.root / "a")
        image = after_cut(files)
        outcomes.add((image.files[Path("a")], Path("b") in image.files))
    assert outcomes == {(b"old", True), (b"new", False)}


def test_a_length_without_sync_may_be_the_old_one(tmp_path: Path) -> None:
    lengths = set()
    for seed in SEEDS:
        files = disk(tmp_path / str(seed), seed)
        descriptor = written(files, "a", b"x" * 100, sync=True)
        files.truncate(descriptor, 10)
        files.truncate(descriptor, 50)
        lengths.add(len(after_cut(files).files[Path("a")]))
    assert lengths == {10, 50, 100}


def test_after_the_cut_nothing_has_an_effect(tmp_path: Path) -> None:
    files = disk(tmp_path)
    descriptor = written(files, "a", b"1", sync=True)
    files.cut_after = files.operation_count + 1
    files.write(descriptor, b"2", 0)
    for operation in (lambda: files.write(descriptor, b"3", 0), lambda: files.fsync(descriptor)):
        with pytest.raises(PowerCut):
            operation()
    assert files.image is not None
    assert files.image.files[Path("a")] in {b"1", b"2"}


def test_who_is_killed_leaves_all_that_he_wrote(tmp_path: Path) -> None:
    files = disk(tmp_path)
    written(files, "a", b"1")
    files.make_directories(tmp_path / "x" / "y")
    files.kill()
    with pytest.raises(PowerCut):
        files.create(tmp_path / "b")
    assert files.as_written()[:2] == ([Path("x"), Path("x/y")], {Path("a"): b"1"})


def test_what_a_killed_program_wrote_is_not_durable_in_the_next_life_either(
    tmp_path: Path,
) -> None:
    found = set()
    for seed in SEEDS:
        files = disk(tmp_path / str(seed), seed)
        written(files, "a", b"1")
        files.kill()
        found.add(after_cut(next_life(files.root, files.rng, before=files)).files.get(Path("a")))
    assert found == {None, b"", b"\0", b"1"}


def test_an_image_is_what_the_next_life_finds(tmp_path: Path) -> None:
    image = Image([Path("x")], {Path("x/a"): b"1"}, {Path("x/a"): 1})
    (tmp_path / "old").write_bytes(b"")
    image.write_to(tmp_path)
    assert after_cut(disk(tmp_path)) == image


# -- failures --------------------------------------------------------------------------------------


def test_a_full_disk_takes_no_file_and_no_room(tmp_path: Path) -> None:
    files = disk(tmp_path)
    descriptor = written(files, "a", b"1")
    files.is_full = True
    for operation in (
        lambda: files.allocate(descriptor, 0, PAGE_BYTES),
        lambda: files.create(tmp_path / "b"),
    ):
        with pytest.raises(OSError, match="No space left") as caught:
            operation()
        assert caught.value.errno == errno.ENOSPC
    assert not (tmp_path / "b").exists()


def test_a_failed_write_leaves_a_part(tmp_path: Path) -> None:
    parts = set()
    for seed in SEEDS:
        files = disk(tmp_path / str(seed), seed, FaultRates(write=1.0))
        with pytest.raises(OSError, match="Input/output error"):
            written(files, "a", b"12")
        parts.add((tmp_path / str(seed) / "a").read_bytes())
    assert parts == {b"", b"1", b"12"}


def test_what_a_failed_sync_dropped_stays_gone_though_the_next_one_succeeds(
    tmp_path: Path,
) -> None:
    outcomes = set()
    for seed in SEEDS:
        files = disk(tmp_path / str(seed), seed)
        descriptor = written(files, "a", b"1", sync=True)
        files.write(descriptor, b"2", 0)
        files.rates = FaultRates(sync=1.0)
        with pytest.raises(OSError, match="Input/output error"):
            files.fdatasync(descriptor)
        files.rates = FaultRates()
        files.fdatasync(descriptor)
        assert (files.root / "a").read_bytes() == b"2"
        outcomes.add(after_cut(files).files[Path("a")])
    assert outcomes == {b"1", b"2"}


def test_a_disk_that_can_not_be_read(tmp_path: Path) -> None:
    files = disk(tmp_path, rates=FaultRates(read=1.0))
    files.close(written(files, "a", b"1"))
    with pytest.raises(OSError, match="Input/output error"):
        files.open(tmp_path / "a", os.O_RDONLY)
    files.close(files.open(tmp_path / "a"))


def test_a_calm_disk_does_not_fail(tmp_path: Path) -> None:
    files = disk(tmp_path, rates=FaultRates(write=1.0, sync=1.0))
    files.is_calm = True
    written(files, "a", b"1", sync=True)
    assert after_cut(files).files == {Path("a"): b"1"}


def test_a_flipped_bit_is_one_bit(tmp_path: Path) -> None:
    image = Image([], {Path("a"): b"\0" * 10 + b"abc" + b"\0" * 10, Path("b"): bytes(4)}, {})
    before = image.files[Path("a")]
    assert image.flip_bit(Random(1)) == Path("a")
    after = image.files[Path("a")]
    changed = int.from_bytes(before, "big") ^ int.from_bytes(after, "big")
    assert changed.bit_count() == 1
    assert image.flip_bit(Random(1), below="b") is None


def test_one_seed_is_one_outcome(tmp_path: Path) -> None:
    found = []
    for life in range(2):
        files = disk(tmp_path / str(life), 7)
        descriptor = written(files, "a", b"1" * 9 * PAGE_BYTES, sync=True)
        files.write(descriptor, b"2" * 9 * PAGE_BYTES, 0)
        found.append(after_cut(files).files)
    assert found[0] == found[1]
