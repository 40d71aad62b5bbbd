"""The index: hashes in blocks, chains, files that fill up, queries."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import structlog
import trio
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace_broker.store.files.filesystem import Files
from headrace_broker.store.index.index_file import ALLOCATE_STEP_BYTES, IndexFiles, IndexWalk
from headrace_broker.store.index.index_keys import Regions, index_prefixes, key_hashes, record_keys
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store_tools.directory import open_directory
from headrace_broker.store_tools.fsck import check, repair
from headrace_protocol.java_hash import index_key_hash, java_hash
from headrace_protocol.message import decode_properties, encode_properties
from tests.support.running import running
from tests.support.stores import (
    FaultyFiles,
    SetClock,
    crash,
    open_store,
    put,
    query_index,
    small_settings,
)
from tests.support.until import until

PAGE = mmap.PAGESIZE
TOPICS = ["T", "a longer topic", "Thème"]
NAMES = st.sampled_from(["UNIQ_KEY", "KEYS", "TAGS", "WAIT", "KEY", "KEYSX", "XTAGS", ""])
VALUES = st.text(st.sampled_from("ab z_é😀\x7f")) | st.text(min_size=60, max_size=70)
PROPERTIES = st.lists(st.tuples(NAMES, VALUES), max_size=6).map(
    lambda entries: "".join(f"{name}\x01{value}\x02" for name, value in entries).encode()
)
ODD = st.sampled_from([b"", b"\x02", b"KEYS\x01", b"KEYS\x01a b", b"TAGS\x01\xff\xfe\x02", b"KEYS"])
REGIONS = st.lists(st.tuples(st.sampled_from(TOPICS), PROPERTIES | ODD), min_size=1, max_size=20)


def walked(index: IndexFiles, key_hash: int) -> list[int]:
    """All that the entries with a hash lead to."""
    walk = IndexWalk(index, key_hash)
    while walk.step():
        pass
    return list(walk.offsets)


def exact_hashes(regions: list[tuple[str, bytes]]) -> list[tuple[int, int]]:
    """As RocketMQ has them, which replaces what is not UTF-8."""
    return [
        (number, index_key_hash(topic, key))
        for number, (topic, region) in enumerate(regions)
        for key in record_keys(decode_properties(region.decode(errors="replace").encode()))
    ]


def block_hashes(regions: list[tuple[str, bytes]]) -> list[tuple[int, int]]:
    prefixes = np.array([index_prefixes(topic) for topic, _ in regions], np.uint32)
    sizes = np.array([len(region) for _, region in regions])
    text = np.frombuffer(b"".join(region for _, region in regions), np.uint8)
    ranges = Regions(text, np.cumsum(sizes) - sizes, sizes)
    numbers, hashes = key_hashes(ranges, prefixes, lambda n: regions[n][0])
    return list(zip(numbers.tolist(), hashes.tolist(), strict=True))


@pytest.mark.slow
@given(REGIONS)
@example([("T", b"KEYS\x01_\x02KEYS\x01 \x02")])
def test_hashes_of_a_block_are_those_of_its_records(regions: list[tuple[str, bytes]]) -> None:
    assert block_hashes(regions) == exact_hashes(regions)


ALIKE = st.lists(st.sampled_from(["UNIQ_KEY", "KEYS", "TAGS", "WAIT", "X"]), max_size=4)
LETTERS = st.sampled_from(["ab9z", "ab ", "a\x7f", "aé"])


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(ALIKE, LETTERS, st.integers(0, 3), st.randoms(use_true_random=False))
def test_hashes_of_records_laid_out_alike(
    names: list[str], letters: str, odd_count: int, random: Random
) -> None:
    """Keys by columns, and some records of another layout or another length among them."""
    lengths = [random.randrange(12) for _ in names]
    regions = [
        (
            random.choice(TOPICS),
            "".join(
                f"{name}\x01{''.join(random.choices(letters, k=length))}\x02"
                for name, length in zip(names, lengths, strict=True)
            ).encode()
            or b"\x02",
        )
        for _ in range(40)
    ]
    odd = [("T", b"KEYS\x01a b\x02"), ("T", b"X"), ("T", regions[0][1].replace(b"\x01", b"\x02"))]
    for region in odd[:odd_count]:
        regions.insert(random.randrange(len(regions)), region)
    assert block_hashes(regions) == exact_hashes(regions)


def test_large_blocks_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    regions = [
        ("T", encode_properties({"KEYS": f"{number} k", "x": "y" * 31_000 * (number % 5 == 0)}))
        for number in range(60)
    ]
    assert sum(len(region) for _, region in regions) > 1 << 18
    assert block_hashes(regions) == exact_hashes(regions)


def test_the_keys_of_a_record_in_the_peers_order() -> None:
    properties = {"TAGS": "t u", "KEYS": " k1  k2 ", "UNIQ_KEY": "U"}
    assert record_keys(properties) == ["U", "k1", "k2", "T#t u"]
    assert record_keys({"KEYS": ""}) == []


# --- files ---------------------------------------------------------------------------------

ENTRIES = st.lists(st.tuples(st.integers(0, 25), st.integers(0, 3000)), max_size=70)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(ENTRIES, st.integers(1, 20))
def test_chains_lead_to_all_entries_of_a_hash(entries: list[tuple[int, int]], block: int) -> None:
    """Ten slots, so that hashes share them; files of 19 entries; any size of block."""
    with tempfile.TemporaryDirectory() as folder:
        index = IndexFiles(small_settings(Path(folder)), Files())
        hashes = np.array([key_hash for key_hash, _ in entries], np.int32)
        offsets = np.arange(len(entries)) * 100
        times = np.cumsum([step for _, step in entries]).astype(np.int64) + 1_000_000
        for at in range(0, len(entries), block):
            part = slice(at, at + block)
            index.put(hashes[part], offsets[part], times[part], 1_700_000_000_000)
        assert len(index.start_flush().full) == len(entries) // 19
        again = IndexFiles(small_settings(Path(folder)), Files())
        again.load()
        for key_hash in range(26):
            wanted = [n * 100 for n, (h, _) in enumerate(entries) if h == key_hash][::-1]
            assert walked(index, key_hash) == wanted == walked(again, key_hash)
        for number, file in enumerate(index.files):
            mine = slice(number * 19, number * 19 + 19)
            header = file.header
            assert header.index_count == len(hashes[mine]) + 1
            assert header.hash_slot_count == len(set((hashes[mine] % 10).tolist()))
            assert header.begin_timestamp == times[mine][0]
            assert header.end_timestamp == times[mine][-1]
            assert header.end_physical_offset == offsets[mine][-1]
            stored = file.entries[2 : header.index_count]["seconds"].tolist()
            assert stored == ((times[mine][1:] - times[mine][0]) // 1000).tolist()


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 25), min_size=2, max_size=19), st.data())
def test_a_truncated_file_is_as_if_the_rest_never_came(
    hashes: list[int], data: st.DataObject
) -> None:
    kept = data.draw(st.integers(1, len(hashes)))
    images = []
    for count in (kept, len(hashes)):
        with tempfile.TemporaryDirectory() as folder:
            index = IndexFiles(small_settings(Path(folder)), Files())
            values = np.array(hashes[:count], np.int32)
            index.put(values, np.arange(count) * 9, np.arange(count) + 5000, 1)
            if count > kept:
                index.files[0].truncate(kept + 1, 5000 + kept - 1)
            images.append(bytes(index.files[0].file.view))
    assert images[0] == images[-1]


def test_file_names_ascend_when_the_clock_does_not(tmp_path: Path) -> None:
    index = IndexFiles(small_settings(tmp_path), Files())
    for now_ms in (1_700_000_000_000, 1_600_000_000_000, 1_700_000_000_000):
        index.put(np.zeros(19, np.int32), np.arange(19), np.arange(19), now_ms)
    names = [file.file.path.name for file in index.files]
    assert names == sorted(set(names))
    assert all(len(name) == 17 for name in names)


def test_disk_blocks_are_asked_for_only_when_they_are_used_up(tmp_path: Path) -> None:
    index = IndexFiles(small_settings(tmp_path, index_entry_count=200_000), Files())
    for number in range(3):
        index.put(np.full(1, number), np.arange(1), np.arange(1), 1)
    (file,) = index.files
    assert file.file.allocated_bytes == ALLOCATE_STEP_BYTES
    index.put(np.zeros(60_000, np.int32), np.arange(60_000), np.arange(60_000), 1)
    assert file.file.allocated_bytes == 2 * ALLOCATE_STEP_BYTES


def test_a_broken_link_ends_the_walk(tmp_path: Path) -> None:
    index = IndexFiles(small_settings(tmp_path), Files())
    index.put(np.full(3, 7, np.int32), np.arange(3), np.arange(3), 1)
    index.files[0].entries["previous"][2] = 3
    assert walked(index, 7) == [2, 1]


# --- queries -------------------------------------------------------------------------------


def test_queries_by_kind_of_key_and_time(tmp_path: Path) -> None:
    clock = SetClock(10_000)
    store = open_store(tmp_path, clock)
    queue = store.queue("T", 0)
    offsets: list[int] = []
    for _ in range(4):
        offsets.append(put(store, queue, UNIQ_KEY=f"u{len(offsets)}", KEYS="k u0", TAGS="t"))
        clock.ms += 1500

    def query(key: str, *rest: object) -> list[int]:
        return [offsets.index(found) for found in query_index(store, "T", key, 9, *rest)]

    always = (0, 1 << 62)
    assert query("k", *always) == [3, 2, 1, 0]
    assert query("u1", *always) == [1]
    assert query("u0", *always) == [3, 2, 1, 0]  # a key of all, and the first one's UNIQ_KEY
    assert query("u0", *always, "U") == [0]
    assert query("u1", *always, "K") == []
    assert query("t", *always) == []
    assert query("t", *always, "T") == [3, 2, 1, 0]
    assert query("k", 11_500, 13_000) == [2, 1]
    assert query("k", 11_501, 12_999) == []
    assert query_index(store, "T", "k", 2, *always) == offsets[:1:-1]
    assert query_index(store, "Other", "k", 9, *always) == []


def test_keys_with_one_hash_do_not_mix(tmp_path: Path) -> None:
    assert java_hash("T#Aa") == java_hash("T#BB")
    store = open_store(tmp_path)
    first = put(store, store.queue("T", 0), KEYS="Aa")
    second = put(store, store.queue("T", 0), KEYS="BB")
    assert query_index(store, "T", "Aa", 9, 0, 1 << 62) == [first]
    assert query_index(store, "T", "BB", 9, 0, 1 << 62) == [second]


def test_an_entry_that_stands_twice_is_found_once(store: MessageStore) -> None:
    offset = put(store, store.queue("T", 0), KEYS="k k")
    store.index_tick()
    store.indexer.put(store.ring.rows[:1])
    assert query_index(store, "T", "k", 9, 0, 1 << 62) == [offset]


@pytest.mark.parametrize("rows", [1, 63, 64, 200])
def test_rows_across_the_rings_seam_and_file_ends_are_indexed(rows: int, tmp_path: Path) -> None:
    store = open_store(tmp_path, index_entry_count=500)
    queue = store.queue("T", 0)
    for number in range(rows):
        put(store, queue, bytes(700), KEYS=str(number))
        if number % 60 == 31:
            store.index_tick()
    for number in range(rows):
        assert len(query_index(store, "T", str(number), 9, 0, 1 << 62)) == 1


# --- in a thread ---------------------------------------------------------------------------


def entry_count(store: MessageStore) -> int:
    return sum(file.header.index_count - 1 for file in store.index_files.files)


def test_a_block_that_the_loop_was_quicker_with_is_left_alone(store: MessageStore) -> None:
    for number in range(5):
        put(store, store.queue("T", 0), KEYS=str(number))
    block = store.indexer.next_block(None, 3)
    store.index_tick()
    store.indexer.put_copied(block)
    assert entry_count(store) == 5


async def test_a_thread_indexes_while_the_loop_asks(tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    random = Random(seed)
    sizes: dict[str, Any] = {
        "commit_log_file_bytes": 1 << 20,
        "ring_rows": 1 << 12,
        "index_entry_count": 999,
    }
    store = open_store(tmp_path, index_tick_ms=0, **sizes)
    store.use_threads, store.upkeep.index_rows_max = True, 0
    offsets: list[int] = []
    async with running(store.run):
        while len(offsets) < 8000:
            for _ in range(random.randrange(1, 500)):
                number = len(offsets)
                queue = store.queue("T", number % 3)
                key, uniq_key = f"k{number}", f"{number:032x}"[: 32 - number % 2]
                offsets.append(
                    put(store, queue, dispatch=False, KEYS=key, UNIQ_KEY=uniq_key, TAGS="t")
                )
            store.write_path.publish()
            await trio.sleep(random.choice((0, 0, 0.0005)))
            if random.random() < 0.3:
                asked = random.randrange(len(offsets))
                found = query_index(store, "T", f"k{asked}", 9, 0, 1 << 62)
                assert found == [offsets[asked]], f"seed {seed}"
    store.index_tick()
    assert entry_count(store) == 3 * len(offsets), f"seed {seed}"
    for number in random.sample(range(len(offsets)), 200):
        found = query_index(store, "T", f"k{number}", 9, 0, 1 << 62)
        assert found == [offsets[number]], f"seed {seed}"
    assert len(query_index(store, "T", "t", 64, 0, 1 << 62, "T")) == 64


async def test_a_full_disk_in_the_thread_refuses_and_heals(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files, index_tick_ms=0)
    store.use_threads, store.upkeep.index_rows_max = True, 0
    put(store, store.queue("T", 0), KEYS="k0")
    async with running(store.run):
        files.is_full = True
        await until(lambda: store.commit_log.life.refusal is not None)
        assert os.strerror(errno.ENOSPC) in str(store.commit_log.life.refusal)
        files.is_full = False
        await until(lambda: not store.indexer.waiting_count)
    assert len(query_index(store, "T", "k0", 9, 0, 1 << 62)) == 1


# --- files that somebody else removes ------------------------------------------------------


def put_keys(store: MessageStore, *keys: str) -> None:
    for key in keys:
        put(store, store.queue("T", 0), KEYS=key)
    store.index_tick()


def found(store: MessageStore, *keys: str) -> list[int]:
    return [len(query_index(store, "T", key, 9, 0, 1 << 62)) for key in keys]


def index_paths(root: Path) -> list[Path]:
    return sorted((root / "index").iterdir())


def opened_again(root: Path, count: int) -> MessageStore:
    """With an index file that has yet to be mapped and given blocks."""
    store = open_store(root, index_entry_count=200_000)
    put_keys(store, *(f"before{number}" for number in range(count)))
    store.close()
    return open_store(root, index_entry_count=200_000)


def put_more(store: MessageStore) -> None:
    put_keys(store, "more")


def flush(store: MessageStore) -> None:
    store.flusher.flush_now()


def query(store: MessageStore) -> None:
    assert found(store, "before0") == [0]


def clean(store: MessageStore) -> None:
    assert store.index_files.detach_below(1 << 40) == []


@pytest.mark.parametrize("notice", [put_more, flush, query, clean])
@pytest.mark.parametrize("end", [MessageStore.close, crash])
def test_a_broker_goes_on_without_an_index_file_that_vanished(
    tmp_path: Path, notice: Callable[[MessageStore], None], end: Callable[[MessageStore], None]
) -> None:
    store = opened_again(tmp_path, 3)
    (path,) = index_paths(tmp_path)
    path.unlink()
    with structlog.testing.capture_logs() as logs:
        notice(store)
    assert [(line["log_level"], line["paths"]) for line in logs] == [("error", [str(path)])]
    put_keys(store, "after")
    assert store.commit_log.life.refusal is None
    assert found(store, "before0", "before2", "after") == [0, 0, 1]
    store.flusher.flush_now()
    end(store)
    store = open_store(tmp_path, index_entry_count=200_000)
    assert found(store, "before0", "before2", "after") == [1, 1, 1]
    store.close()
    assert not (tmp_path / "abort").exists()
    store = open_store(tmp_path, index_entry_count=200_000)
    assert found(store, "before0", "before2", "after") == [1, 1, 1]


def test_the_index_files_before_the_one_that_vanished_stay(tmp_path: Path) -> None:
    clock = SetClock()
    store = open_store(tmp_path, clock)
    put_keys(store, *map(str, range(25)))
    first, second = index_paths(tmp_path)
    second.unlink()
    store.flusher.flush_now()
    clock.ms -= 3_600_000  # as local time does in autumn: later names must ascend all the same
    put_keys(store, *map(str, range(25, 60)))
    assert found(store, "0", "18", "19", "24", "25", "59") == [1, 1, 0, 0, 1, 1]
    made = index_paths(tmp_path)[1:]
    assert min(made) > second
    store.close()
    before = first.stat().st_ino
    store = MessageStore(small_settings(tmp_path), clock, FaultyFiles())
    assert store.load().scanned_from > 0
    assert found(store, *map(str, range(60))) == [1] * 60
    assert first.stat().st_ino == before


def test_an_index_folder_that_vanished_is_made_anew(tmp_path: Path) -> None:
    store = opened_again(tmp_path, 1)
    shutil.rmtree(tmp_path / "index")
    put_keys(store, "after")
    assert store.commit_log.life.refusal is None
    assert found(store, "before0", "after") == [0, 1]
    store.close()
    store = open_store(tmp_path, index_entry_count=200_000)
    assert found(store, "before0", "after") == [1, 1]


def test_what_somebody_else_left_in_the_place_of_an_index_file_goes(tmp_path: Path) -> None:
    """Apache's broker indexes the end of the log in a file of its own before it gives up."""
    store = opened_again(tmp_path, 2)
    (path,) = index_paths(tmp_path)
    path.rename(path.with_name(str(int(path.name) + 1)))
    put_keys(store, "after")
    store.close()
    store = open_store(tmp_path, index_entry_count=200_000)
    assert found(store, "before0", "before1", "after") == [1, 1, 1]
    store.close()
    with open_directory(tmp_path, small_settings(tmp_path, index_entry_count=200_000)) as directory:
        assert check(directory, lambda _: None).findings == []


def test_fsck_tells_what_the_index_lacks(tmp_path: Path) -> None:
    store = opened_again(tmp_path, 2)
    index_paths(tmp_path)[0].unlink()
    put_keys(store, "after")
    store.close()
    with open_directory(tmp_path, small_settings(tmp_path, index_entry_count=200_000)) as directory:
        report = check(directory, lambda _: None)
        assert report.damage == []
        assert "2 keys of records in the log have no entry" in map(
            attrgetter("problem"), report.findings
        )
        assert repair(directory, report.findings, lambda _: None) is None


class _Recorder(FaultyFiles):
    """Keeps which pages of a file have been allocated, and by how many calls."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: set[int] = set()
        self.calls = 0

    def allocate(self, descriptor: int, position: int, byte_count: int) -> None:
        super().allocate(descriptor, position, byte_count)
        self.pages |= set(range(position // PAGE, -(-(position + byte_count) // PAGE)))
        self.calls += 1


SLOT_PAGES = 300


@pytest.mark.parametrize("counts", [[1, 1, 1], [20] * 10, [5000], [3, 2000, 3]])
def test_slots_have_blocks_before_they_are_written_and_few_others(
    tmp_path: Path, counts: list[int]
) -> None:
    files, rng = _Recorder(), np.random.default_rng(7)
    slot_count = SLOT_PAGES * PAGE // 4
    settings = small_settings(tmp_path, index_slot_count=slot_count, index_entry_count=1 << 17)
    index = IndexFiles(settings, files)
    for count in counts:
        hashes = rng.integers(0, 1 << 31, count, dtype=np.int32)
        index.put(hashes, np.arange(count), np.arange(count), now_ms=0)
        (file,) = index.files
        written = np.frombuffer(file.file.map[: file.entries_at], np.uint8)
        pages = np.flatnonzero(
            [written[n * PAGE : (n + 1) * PAGE].any() for n in range(SLOT_PAGES + 1)]
        )
        assert set(pages.tolist()) <= files.pages
    slots = {page for page in files.pages if page < SLOT_PAGES}
    assert len(slots) <= sum(counts) + 1
    assert files.calls <= 3 + sum(min(count, 64) for count in counts)


def test_a_full_disk_leaves_the_slots_as_they_were(tmp_path: Path) -> None:
    files = FaultyFiles()
    settings = small_settings(tmp_path, index_slot_count=10 * PAGE, index_entry_count=1 << 17)
    index = IndexFiles(settings, files)
    put_hashes(index, [1])
    before = index.files[0].file.map[:]
    files.is_full = True
    with pytest.raises(OSError, match="No space"):
        put_hashes(index, [9 * PAGE])
    assert index.files[0].file.map[:] == before
    files.is_full = False
    put_hashes(index, [9 * PAGE])
    assert len(walked(index, 9 * PAGE)) == 1


def put_hashes(index: IndexFiles, hashes: list[int]) -> None:
    numbers = np.arange(len(hashes))
    index.put(np.array(hashes, np.int32), numbers, numbers, now_ms=0)
