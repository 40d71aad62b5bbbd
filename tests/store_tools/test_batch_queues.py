"""The tools on a store with batch queues."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_broker.store.log.batch_units import BATCH_UNIT_BYTES, BATCH_UNIT_DTYPE
from headrace_broker.store_tools.copy import copy_topics
from headrace_broker.store_tools.directory import StoreDirectory, open_directory
from headrace_broker.store_tools.dump import Wanted, dump
from headrace_broker.store_tools.fsck import check, repair
from headrace_broker.store_tools.stat import topic_stats
from headrace_protocol.message import StoredMessage
from tests.store.test_batch_queue import COUNTS, FILE_BYTES, TOPIC, fill, open_batches, read
from tests.support.damage import quiet
from tests.support.golden import STORES, copy_golden_store, golden_settings
from tests.support.stores import crash, put, small_settings

QUEUE = Path("batchconsumequeue") / TOPIC / "0"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A closed store with a batch queue of three files, and a plain queue."""
    store = open_batches(tmp_path / "store")
    for _ in range(3):
        put(store, store.queue("Plain", 0), KEYS="k")
    fill(store, store.queue(TOPIC, 0))
    store.close()
    return tmp_path / "store"


@pytest.fixture
def opened(root: Path) -> Iterator[StoreDirectory]:
    with open_directory(root, small_settings(root, batch_queue_file_bytes=FILE_BYTES)) as directory:
        yield directory


def units_of(root: Path, number: int) -> Any:
    """The units of a file of the queue, to be changed."""
    path = root / QUEUE / f"{number * FILE_BYTES:020d}"
    return np.memmap(path, BATCH_UNIT_DTYPE, "r+", shape=FILE_BYTES // BATCH_UNIT_BYTES)


def content(root: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted((root / QUEUE).iterdir())).rstrip(b"\0")


def test_a_store_of_ours_is_sound(opened: StoreDirectory) -> None:
    assert check(opened, quiet).findings == []


def test_progress_ends_at_the_length_of_all_files(opened: StoreDirectory) -> None:
    advances: list[int] = []
    check(opened, advances.append)
    files = (path for folder in opened.queue_paths for path in folder.iterdir())
    assert sum(advances) == opened.log_bytes + sum(path.stat().st_size for path in files)


@pytest.mark.parametrize("name", STORES)
def test_queues_of_apaches_broker_are_compared(name: str, tmp_path: Path) -> None:
    root = copy_golden_store(name, tmp_path / "store")
    path = root / "batchconsumequeue" / "G_BCQ" / "0" / f"{0:020d}"
    units = np.memmap(path, BATCH_UNIT_DTYPE, "r+", shape=path.stat().st_size // 46)
    with open_directory(root, golden_settings(root)) as directory:
        assert check(directory, quiet).damage == []
        units["count"][1] = 9
        (finding,) = check(directory, quiet).damage
        assert (finding.path, finding.position) == (path, BATCH_UNIT_BYTES)


@pytest.mark.parametrize(
    ("field", "file", "number"),
    [
        *((field, 1, 1) for field in BATCH_UNIT_DTYPE.names or ()),
        ("size", 0, 0),
        ("physical_offset", 0, 3),
        ("count", 2, 0),
    ],
)
def test_a_wrong_unit_is_found_and_repaired(
    field: str, file: int, number: int, root: Path, opened: StoreDirectory
) -> None:
    before = content(root)
    unit = units_of(root, file)[number : number + 1]
    unit[field] ^= 1 << 6
    found = check(opened, quiet).damage
    assert [(f.path.name, f.position) for f in found] == [
        (f"{file * FILE_BYTES:020d}", number * BATCH_UNIT_BYTES)
    ]
    assert "not those of the records in the log" in found[0].problem
    repair(opened, found, quiet)
    assert content(root) == before
    assert check(opened, quiet).damage == []


@pytest.mark.parametrize("count", [1, 3, len(COUNTS)])
def test_missing_units_are_added(count: int, root: Path, opened: StoreDirectory) -> None:
    before, left = content(root), len(COUNTS) - count
    for number in range(left, len(COUNTS)):
        units_of(root, number // 4)[number % 4 : number % 4 + 1] = np.zeros(1, BATCH_UNIT_DTYPE)
    found = check(opened, quiet).damage
    assert {f.problem.partition(": ")[2] for f in found} == {"without a unit"}
    repair(opened, found, quiet)
    assert content(root) == before


def test_units_without_records_are_cleared(root: Path, opened: StoreDirectory) -> None:
    before = content(root)
    more = units_of(root, 2)
    more[1:3] = more[0]
    more["physical_offset"][1:3] += 1 << 20
    found = check(opened, quiet).damage
    assert ["at the queue's end" in f.problem for f in found] == [True]
    repair(opened, found, quiet)
    assert content(root) == before


def test_a_unit_too_few_between_others_is_reported(root: Path, opened: StoreDirectory) -> None:
    units = units_of(root, 0)
    units[2:4] = units[1:2]
    found = check(opened, quiet).damage
    assert [f.path.name for f in found][:1] == [f"{0:020d}"]
    repair(opened, found, quiet)
    assert check(opened, quiet).damage == []


def test_the_index_of_apaches_broker_lacks_no_key(root: Path, opened: StoreDirectory) -> None:
    """Only ours has the keys of messages in batches; those of Apache's broker are no fault."""
    assert check(opened, quiet).findings == []
    for path in opened.index_paths:
        path.unlink()
    (finding,) = check(opened, quiet).findings
    assert finding.problem == "6 keys of records in the log have no entry"


def test_a_copy_has_the_same_messages(tmp_path: Path, opened: StoreDirectory) -> None:
    copy = tmp_path / "copy"
    report = copy_topics(opened, copy, [TOPIC], quiet)
    assert report.record_count == len(COUNTS)
    store = open_batches(copy)
    messages = read(store, store.queue(TOPIC, 0), 0)
    assert [message.body for message in messages] == [b"%d" % n for n in range(sum(COUNTS))]
    crash(store)
    assert not (copy / "consumequeue" / TOPIC).exists()


def test_figures_count_messages(opened: StoreDirectory) -> None:
    stats = {stat.topic: stat for stat in topic_stats(opened, quiet)}
    assert (stats[TOPIC].queues, stats[TOPIC].messages) == (1, sum(COUNTS))
    assert stats["Plain"].messages == 3


def test_a_dump_has_each_message(opened: StoreDirectory) -> None:
    found = [*dump(opened, Wanted(TOPIC), quiet)]
    assert all(isinstance(each, StoredMessage) for each in found)
    offsets = [each.queue_offset for each in found if isinstance(each, StoredMessage)]
    assert offsets == [*range(sum(COUNTS))]


def test_sizes_are_found_by_themselves(root: Path) -> None:
    shutil.rmtree(root / "index")
    with open_directory(root) as directory:
        assert directory.settings.batch_queue_file_bytes == FILE_BYTES


@pytest.mark.parametrize(
    ("is_more", "problem"),
    [(False, "1 records have no unit, the first at"), (True, "in place of 0 records of the log")],
)
def test_what_has_no_place_is_reported_only(
    is_more: bool, problem: str, root: Path, opened: StoreDirectory
) -> None:
    """A unit too few or too many, with right units on both sides."""
    units = np.frombuffer(content(root).ljust(12 * BATCH_UNIT_BYTES, b"\0"), BATCH_UNIT_DTYPE)
    if is_more:
        odd = units[1:2].copy()
        odd["physical_offset"] -= 1
        changed = np.concatenate([units[:1], odd, units[1:11]])
    else:
        changed = np.concatenate([units[:1], units[2:], units[-1:]])
    for number in range(3):
        units_of(root, number)[:] = changed[4 * number : 4 * number + 4]
    (finding,) = check(opened, quiet).damage
    assert problem in finding.problem
    assert finding.fix is None
