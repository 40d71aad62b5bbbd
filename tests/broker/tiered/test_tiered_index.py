"""Query by key in the tier: open and finished index files."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest

from headrace_broker.store.files.filesystem import Files
from headrace_broker.tiered.container.index_file import (
    FINISHED_MAGIC,
    HEADER,
    ITEM,
    OPEN_ITEM,
    SLOT,
    IndexSize,
    OpenIndex,
)
from headrace_broker.tiered.container.metadata import LONG_MAX, TierMetadata
from headrace_broker.tiered.container.tier_index import FOLDER, TierIndex
from headrace_broker.tiered.driver.posix import PosixDriver
from headrace_protocol.columns import Array, RecordColumns
from headrace_protocol.java_hash import index_key_hash, java_hash
from headrace_protocol.message import encode_properties, encode_record
from headrace_protocol.tier.driver import Failure, FailureKind
from headrace_protocol.tier.paths import Home
from tests.support.faulty_files import FaultyFiles, PowerCut, next_life
from tests.support.seeds import seeds
from tests.support.tiers import BEGIN_MS, TOPIC, block, open_tier, queue_of, read, store_ms

SMALL = IndexSize(slot_count=13, item_count=50)


def open_index(root: Path, files: Files | None = None, *, size: IndexSize = SMALL) -> TierIndex:
    files = files or Files()
    metadata = TierMetadata(root / "config" / "tieredStoreMetadata.json", files)
    (root / "tier").mkdir(parents=True, exist_ok=True)
    driver = PosixDriver(root / "tier", files)
    return TierIndex(root, driver, metadata, Home("cluster", "broker"), files, size)


def add(index: TierIndex, first: int, count: int, queue_id: int = 0, topic: str = TOPIC) -> None:
    """Add records whose offset in the log is a thousand times their queue offset."""
    records, _codes = block(first, count, queue_id, topic)
    log_offsets = records.queue_offset * 1000
    index.add(topic, queue_id, records, log_offsets, store_ms(first + count))


def offsets(
    index: TierIndex, key: str, begin: int = 0, end: int = 10**6, topic: str = TOPIC
) -> list[int]:
    """The queue offsets that a key finds."""
    hits = index.query(topic, key, store_ms(begin), store_ms(end), 1000)
    assert not isinstance(hits, Failure), hits
    return [hit.log_offset // 1000 for hit in hits]


# -- files -----------------------------------------------------------------------------------------


def items_of(hashes: list[int]) -> Array:
    items = np.zeros(len(hashes), ITEM)
    items["key_hash"] = hashes
    items["log_offset"] = np.arange(len(hashes)) * 1000
    return items


def linked(file: OpenIndex) -> dict[int, list[int]]:
    """The offsets in the log found by each hash, the newest first."""
    return {value: file.find(value, 1000)["log_offset"].tolist() for value in range(100)}


@pytest.mark.parametrize("seed", range(10))
def test_items_are_found_however_they_were_added(tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    size = IndexSize(slot_count=rng.choice([1, 7, 64]), item_count=500)
    file = OpenIndex(tmp_path / str(BEGIN_MS), size, Files())
    expected: dict[int, list[int]] = {value: [] for value in range(100)}
    while file.room > 40:
        hashes = [rng.randrange(100) for _ in range(rng.randrange(1, 40))]
        items = items_of(hashes)
        items["log_offset"] += file.count
        for value, log_offset in zip(hashes, items["log_offset"].tolist(), strict=True):
            expected[value].insert(0, log_offset)
        file.add(items, np.full(len(items), BEGIN_MS + 5000))
    assert linked(file) == expected, f"seed {seed}"
    again = OpenIndex(file.path, size, Files())
    assert linked(again) == expected
    assert (again.count, again.end_ms) == (file.count, BEGIN_MS + 5000)
    slots = np.memmap(file.path, ">i4", "r+", HEADER.size, size.slot_count * 2)
    slots[::2] = again.count + 5
    np.memmap(file.path, OPEN_ITEM, "r+", size.items_at, size.item_count)["previous"] = 1
    again.link_anew()
    assert linked(again) == expected


def test_a_finished_file_has_the_form_of_the_peer(tmp_path: Path) -> None:
    size = IndexSize(slot_count=4, item_count=100)
    file = OpenIndex(tmp_path / str(BEGIN_MS), size, Files())
    file.add(items_of([1, 2, 5, 1, 9]), BEGIN_MS + np.array([-1, 0, 999, 1000, 5000]))
    data = b"".join(file.finished())
    assert HEADER.size == 28
    assert OPEN_ITEM.itemsize == 32
    header = FINISHED_MAGIC, BEGIN_MS, BEGIN_MS + 5000, 2, 5
    assert HEADER.unpack_from(data) == header
    slots = [SLOT.unpack_from(data, 28 + 8 * number) for number in range(4)]
    assert slots == [(60, 0), (60, 4 * 28), (60 + 4 * 28, 28), (60 + 5 * 28, 0)]
    items = np.frombuffer(data, ITEM, 5, 60)
    assert items["key_hash"].tolist() == [9, 1, 5, 1, 2]
    assert items["log_offset"].tolist() == [4000, 3000, 2000, 0, 1000]
    assert items["seconds"].tolist() == [5, 1, 0, -1, 0]
    assert len(data) == 60 + 5 * 28


def key_of_least_hash(topic: str) -> str:
    """A key for which Java's hash of ``topic#key`` is the least integer."""
    count, least = 7, 40
    wanted = (1 << 31) - java_hash(f"{topic}#" + chr(least) * count)
    digits = [wanted % (1 << 32) // 31**at % 31 for at in range(count)]
    return "".join(chr(least + digit) for digit in reversed(digits))


def test_a_key_of_the_least_hash_has_slot_0(tmp_path: Path) -> None:
    # Java's absolute value of it is negative, and so is the slot there.
    key = key_of_least_hash(TOPIC)
    assert java_hash(f"{TOPIC}#{key}") == -(1 << 31)
    assert SMALL.slot_at(index_key_hash(TOPIC, key)) == HEADER.size
    index = open_index(tmp_path)
    data = encode_record(
        topic=TOPIC,
        queue_id=0,
        body=b"",
        properties=encode_properties({"KEYS": key}),
        store_timestamp=BEGIN_MS,
    )
    index.add(TOPIC, 0, RecordColumns.from_records(data), np.array([5000]), BEGIN_MS)
    assert offsets(index, key) == [5]


# -- all files together ----------------------------------------------------------------------------


def test_keys_are_found_in_local_and_uploaded_files(tmp_path: Path) -> None:
    index = open_index(tmp_path)
    fill(index, 0, 100)
    add(index, 5, 1, topic="other")
    assert len(list((tmp_path / FOLDER).iterdir())) > 4
    for uploads in (False, True):
        if uploads:
            assert index.upload(BEGIN_MS) is None
            assert len(list((tmp_path / FOLDER).iterdir())) == 1
        for offset in (0, 1, 41, 99):
            assert offsets(index, f"k{offset}") == [offset]
            assert offsets(index, f"u{offset}") == [offset]
        assert offsets(index, "even") == list(range(99, -1, -1))
        assert offsets(index, "k5", topic="other") == [5]
        assert offsets(index, "k6", topic="other") == []
        assert offsets(index, "k6", topic="never seen") == []
        found = offsets(index, "even", 40, 50)
        assert set(range(40, 51)) <= set(found) <= set(range(38, 53))
    again = open_index(tmp_path)
    assert offsets(again, "even") == list(range(99, -1, -1))


def test_a_time_range_asks_all_files_that_overlap_it(tmp_path: Path) -> None:
    index = open_index(tmp_path)
    add(index, 90, 10)
    # Another queue is behind: its records are older than the file that they come into.
    add(index, 0, 30, queue_id=1)
    index.upload(BEGIN_MS)
    assert offsets(index, "k3", 2, 5) == [3]
    assert offsets(index, "k95", 95, 95) == [95]


def test_a_file_has_its_times_after_a_restart(tmp_path: Path) -> None:
    """Apache's broker takes another end time then, so that a time range misses the file."""
    index = open_index(tmp_path)
    add(index, 0, 20)
    index.metadata.save()
    index.close()
    index = open_index(tmp_path)
    assert offsets(index, "k15", 15, 15) == [15]
    add(index, 20, 10)
    index.metadata.save()
    index.close()
    index = open_index(tmp_path)
    index.upload(BEGIN_MS)
    assert offsets(index, "k15", 15, 15) == [15]
    assert offsets(index, "k25", 25, 25) == [25]
    index.close()


def test_a_file_begins_at_its_first_record(tmp_path: Path) -> None:
    """Apache's broker asks no file that begins after the oldest message of its log."""
    index = open_index(tmp_path)
    add(index, 7, 5)  # five seconds later
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == [str(store_ms(7))]
    index.close()


def test_items_added_again_are_found_once(tmp_path: Path) -> None:
    index = open_index(tmp_path)
    add(index, 0, 20)
    add(index, 10, 20)
    assert offsets(index, "even") == list(range(29, -1, -1))


def test_a_topic_made_again_does_not_find_its_predecessor(tmp_path: Path) -> None:
    index = open_index(tmp_path)
    add(index, 0, 5)
    metadata = index.metadata
    row = metadata.topic(TOPIC)
    assert row is not None
    metadata.adopt_topics([type(row)(row.topic_id + 1, TOPIC)])
    assert offsets(index, "k3") == []


def test_uploaded_files_expire(tmp_path: Path) -> None:
    index = open_index(tmp_path)
    fill(index, 0, 100)
    index.upload(BEGIN_MS)
    assert index.expire(0) is None
    before = list((tmp_path / "tier").rglob("0/INDEX/*"))
    assert index.expire(store_ms(50)) is None
    after = list((tmp_path / "tier").rglob("0/INDEX/*"))
    assert 0 < len(after) < len(before)
    assert offsets(index, "k99") == [99]
    assert offsets(index, "k1") == []
    assert offsets(index, "k60") == [60]
    assert index.expire(LONG_MAX) is None


def test_a_spoiled_slot_is_damage(tmp_path: Path) -> None:
    index = open_index(tmp_path)
    for first in range(0, 40, 10):
        add(index, first, 10)
    index.upload(BEGIN_MS)
    for path in (tmp_path / "tier").rglob("0/INDEX/*"):
        data = bytearray(path.read_bytes())
        data[28 : 28 + 13 * 8] = b"\x00\x00\x00\x05\x00\x00\x00\x07" * 13
        path.write_bytes(data)
    failure = index.query(TOPIC, "k1", 0, LONG_MAX, 10)
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.DAMAGED


def fill(index: TierIndex, first: int, end: int) -> None:
    for offset in range(first, end, 10):
        add(index, offset, 10)


def test_a_full_disk_is_an_error_and_heals(tmp_path: Path) -> None:
    disk = FaultyFiles(tmp_path, Random(1))
    size = IndexSize(slot_count=5000, item_count=100_000)
    index = open_index(tmp_path, disk, size=size)
    add(index, 0, 20)
    disk.is_full = True
    # What was allocated ahead still takes some.
    with pytest.raises(OSError, match="No space"):
        fill(index, 20, 5000)
    disk.is_full = False
    fill(index, 20, 200)
    assert set(offsets(index, "even")) >= set(range(200))
    assert all(offset in offsets(index, f"u{offset}") for offset in range(0, 200, 13))
    index.close()


def test_a_file_of_full_size_takes_little_room(tmp_path: Path) -> None:
    index = open_index(tmp_path, size=IndexSize())
    add(index, 0, 100)
    index.sync()
    index.metadata.save()
    (path,) = (tmp_path / FOLDER).iterdir()
    assert path.stat().st_size == 28 + 5_000_000 * 8 + 20_000_000 * 32
    assert path.stat().st_blocks * 512 < 4 << 20
    again = open_index(tmp_path, size=IndexSize())
    assert path.stat().st_blocks * 512 < 4 << 20
    assert offsets(again, "k7") == [7]


@pytest.mark.parametrize("seed", range(5))
def test_a_file_of_a_killed_process_survives_a_power_cut(tmp_path: Path, seed: int) -> None:
    rng, root = Random(seed), tmp_path / "disk"
    life = next_life(root, rng)
    index = open_index(root, life)
    index.metadata.topic_id(TOPIC, BEGIN_MS)
    index.metadata.save()
    add(index, 0, 5)
    life.kill()
    index.close()
    life = next_life(root, rng, before=life)
    index = open_index(root, life)
    index.sync()
    life.cut_power()
    index.close()
    index = open_index(root, next_life(root, rng, before=life))
    assert offsets(index, "k3") == [3]
    index.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(15))
@pytest.mark.parametrize("end", ["power cut", "kill"])
def test_all_kept_records_are_found_after_a_crash(tmp_path: Path, seed: int, end: str) -> None:
    rng, root = Random(f"{seed} {end}"), tmp_path / "disk"
    life = next_life(root, rng)
    position = 0
    for _ in range(3):
        after = life.operation_count + rng.randrange(30, 150)
        life.kill_after, life.cut_after = (after, -1) if end == "kill" else (-1, after)
        try:
            tier = open_tier(root, files=life)
            queue = queue_of(tier)
            assert tier.index_again(TOPIC, 0, position, BEGIN_MS) is None
            while True:
                records, codes = block(queue.commit_offset, rng.randrange(1, 20))
                assert tier.append(TOPIC, 0, records, codes, BEGIN_MS) is None
                if rng.random() < 0.3:
                    tier.sync()
                    # What a follower saves, and begins at after a crash.
                    position = queue.commit_offset
                elif rng.random() < 0.3:
                    tier.clean_up(None, BEGIN_MS)  # which uploads full index files
        except PowerCut:
            pass
        life.kill() if end == "kill" else life.cut_power()
        life = next_life(root, rng, before=life)
    tier = open_tier(root, files=life)
    queue, index = queue_of(tier), tier.index
    assert index is not None
    assert tier.index_again(TOPIC, 0, position, BEGIN_MS) is None
    hits = index.query(TOPIC, "even", 0, LONG_MAX, 10**6)
    assert not isinstance(hits, Failure)
    log_offsets = sorted(hit.log_offset for hit in hits)
    expected = [read(queue, at, 1).physical_offset[0] for at in range(queue.commit_offset)]
    assert log_offsets == expected, f"seed {seed}"
    index.close()
