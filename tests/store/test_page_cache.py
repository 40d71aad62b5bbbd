"""Old data is read in a thread when it is not in memory; what is written lately needs no look."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace_broker.store.files.file_seal import StoreDamaged
from headrace_broker.store.files.filesystem import Files, Paged
from headrace_broker.store.files.page_cache import CHUNK_BYTES, PageCache
from headrace_broker.store.files.residency import is_resident
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.settings import BATCH_UNIT_BYTES, Retention
from headrace_broker.store.store_source import GetStatus, StoreSource
from headrace_protocol.errors import NotReady
from tests.support.stores import SetClock, crash, open_store, put, query_index, read_all, ready

BODY = b"b" * 1000


class ColdFiles(Files):
    """A disk whose pages are in memory once they were read."""

    def __init__(self) -> None:
        super().__init__()
        self.cached: set[tuple[str, int]] = set()
        self.asked: list[tuple[str, int, int]] = []
        self.is_broken = False

    def is_cached(self, file: Paged, start: int, end: int) -> bool:
        assert isinstance(file.is_resident(start, end), bool)
        self.asked.append((file.path.parent.name, start, end))
        return (str(file.path), start) in self.cached

    def open(self, path: Path, flags: int = os.O_RDWR) -> int:
        if flags == os.O_RDONLY:
            if self.is_broken:
                raise OSError(5, "Input/output error", str(path))
            self.cached |= {(str(path), chunk * CHUNK_BYTES) for chunk in range(8)}
        return super().open(path, flags)


@pytest.fixture
def files() -> ColdFiles:
    return ColdFiles()


def open_small(root: Path, files: ColdFiles) -> MessageStore:
    store = open_store(
        root,
        SetClock(),
        files,
        commit_log_file_bytes=4 * CHUNK_BYTES,
        consume_queue_file_bytes=20 * 300,
        batch_queue_file_bytes=BATCH_UNIT_BYTES * 300,
        ring_rows=4096,
    )
    store.commit_log.hot_bytes, store.commit_log.hot_units = 200_000, 200
    return store


def fill(root: Path, files: ColdFiles) -> MessageStore:
    """Two thousand messages in one queue, of which the last tenth counts as hot."""
    store = open_small(root, files)
    queue = store.queue("t", 0)
    for _ in range(2000):
        put(store, queue, BODY)
    assert know_min(store) == 0
    return store


def know_min(store: MessageStore) -> int:
    """Look for the oldest message, as the first pull does; then memory is empty again."""
    assert isinstance(store.fs, ColdFiles)
    found = ready(lambda: store.source(store.queue("t", 0)).min_offset())
    store.fs.cached.clear()
    store.fs.asked.clear()
    store.commit_log.page_cache = PageCache(store.fs)
    return found


@pytest.fixture
def store(tmp_path: Path, files: ColdFiles) -> MessageStore:
    return fill(tmp_path, files)


def get(store: MessageStore, queue_offset: int) -> GetStatus:
    queue = store.queue("t", 0)
    return store.source(queue).get(queue_offset, 32, 1 << 20, None).status


def get_bulk(store: MessageStore, queue_offset: int) -> GetStatus:
    queue = store.queue("t", 0)
    return store.source(queue).get_bulk(queue_offset, 32, 1 << 20, None).status


def earliest_time(source: StoreSource) -> int | None:
    return source.store_time_at(source.min_offset())


def get_in_the_end(store: MessageStore, queue_offset: int) -> GetStatus:
    for _ in range(2):
        try:
            return get(store, queue_offset)
        except NotReady as cold:
            cold.fetch()
    return get(store, queue_offset)


def test_what_is_hot_is_read_without_a_look(store: MessageStore, files: ColdFiles) -> None:
    assert get(store, 1950) is GetStatus.FOUND
    assert get_bulk(store, 1950) is GetStatus.FOUND
    assert files.asked == []


@pytest.mark.parametrize("read", [get, get_bulk])
def test_a_read_that_begins_cold_looks_even_if_it_ends_hot(
    store: MessageStore, files: ColdFiles, read: Callable[..., Any]
) -> None:
    # From here on units are hot; records are so from the middle of the read on.
    with pytest.raises(NotReady):
        read(store, 2000 - store.commit_log.hot_units)
    assert {folder for folder, _, _ in files.asked} == {"commitlog"}


@pytest.mark.parametrize("read", [get, get_bulk])
@pytest.mark.parametrize("is_clean", [True, False])
def test_after_a_start_the_newest_may_be_cold_too(
    tmp_path: Path, files: ColdFiles, is_clean: bool, read: Callable[..., Any]
) -> None:
    store = fill(tmp_path, files)
    store.close() if is_clean else crash(store)
    store = open_small(tmp_path, files)
    put(store, store.queue("t", 0), BODY)
    know_min(store)
    assert read(store, 2000) is GetStatus.FOUND
    assert files.asked == []
    for folder in ("0", "commitlog"):  # what is sealed is compared when it is fetched
        with pytest.raises(NotReady) as cold:
            read(store, 1950)
        assert files.asked[-1][0] == folder
        cold.value.fetch()
    assert read(store, 1950) is GetStatus.FOUND


@pytest.mark.parametrize("folder", ["consumequeue/t/0", "commitlog"])
def test_rot_is_found_when_it_is_fetched(tmp_path: Path, files: ColdFiles, folder: str) -> None:
    fill(tmp_path, files).close()
    store = open_small(tmp_path, files)
    files.cached.clear()
    path = tmp_path / folder / f"{0:020d}"
    time_ns = path.stat().st_mtime_ns
    with path.open("r+b") as file:
        file.seek(200)
        file.write(b"rotten")
    os.utime(path, ns=(time_ns, time_ns))
    with pytest.raises(StoreDamaged, match=str(path)):
        get_in_the_end(store, 5)
    crash(store)


@pytest.mark.parametrize("read", [get, get_bulk])
def test_what_is_cold_is_read_after_it_was_fetched(
    store: MessageStore, files: ColdFiles, read: Callable[..., Any]
) -> None:
    for folder in ("0", "commitlog"):
        with pytest.raises(NotReady) as cold:
            read(store, 10)
        assert files.asked[-1][0] == folder
        cold.value.fetch()
    assert read(store, 10) is GetStatus.FOUND


LOOKS: dict[str, Callable[[StoreSource], object]] = {
    "get": lambda source: source.get(10, 32, 1 << 20, None),
    "get_bulk": lambda source: source.get_bulk(10, 32, 1 << 20, None),
    "unit": lambda source: source.unit(10),
    "record_bytes": lambda source: source.record_bytes(10),
    "store_time_at": lambda source: source.store_time_at(10),
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_search_for_a_batch_waits_for_each_unit(
    tmp_path: Path, files: ColdFiles, name: str
) -> None:
    """The number of a unit is not its queue offset, so units of several files are looked at."""
    store = open_small(tmp_path, files)
    store.is_batch_topic = "t".__eq__
    for _ in range(2000):
        put(store, store.queue("t", 0), BODY)
    know_min(store)
    waits: list[str] = []
    while True:
        try:
            LOOKS[name](store.source(store.queue("t", 0)))
            break
        except NotReady as cold:
            waits.append(files.asked[-1][0])
            cold.fetch()
    assert waits.count("0") >= 3


def test_a_look_for_the_first_batch_waits(tmp_path: Path, files: ColdFiles) -> None:
    store = open_small(tmp_path, files)
    store.is_batch_topic = "t".__eq__
    for _ in range(400):
        put(store, store.queue("t", 0), BODY)
    know_min(store)
    source = store.source(store.queue("t", 0))
    with pytest.raises(NotReady):
        source.has_unit(10)
    assert ready(lambda: source.has_unit(10))
    assert not ready(lambda: source.has_unit(400))


def test_a_chunk_is_looked_at_once_for_many_reads(store: MessageStore, files: ColdFiles) -> None:
    for _ in range(2):
        with pytest.raises(NotReady) as cold:
            get(store, 10)
        cold.value.fetch()
    looks = len(files.asked)
    for queue_offset in range(10, 200, 10):
        assert get(store, queue_offset) is GetStatus.FOUND
    assert len(files.asked) == looks


def test_who_wants_what_is_being_fetched_for_another_waits_too(store: MessageStore) -> None:
    with pytest.raises(NotReady) as units:
        get(store, 10)
    units.value.fetch()
    with pytest.raises(NotReady) as first:
        get(store, 10)
    with pytest.raises(NotReady):
        get(store, 20)
    first.value.fetch()
    assert get(store, 20) is GetStatus.FOUND


def test_what_vanished_before_it_was_fetched_is_not_asked_for_again(
    store: MessageStore, files: ColdFiles
) -> None:
    with pytest.raises(NotReady) as cold:
        get(store, 10)
    path = store.queue("t", 0).consume_queue.files.files[0].path
    moved = path.rename(path.with_name("moved"))
    cold.value.fetch()
    files.cached |= {(str(store.commit_log.files.files[0].path), 0)}
    assert get(store, 10) is GetStatus.FOUND
    moved.rename(path)


def test_a_look_holds_good_for_some_seconds_only(store: MessageStore, files: ColdFiles) -> None:
    store.commit_log.page_cache.valid_s = -1.0
    for _ in range(2):
        with pytest.raises(NotReady) as cold:
            get(store, 10)
        cold.value.fetch()
    looks = len(files.asked)
    assert get(store, 10) is GetStatus.FOUND
    assert len(files.asked) > looks


def test_a_disk_that_fails_says_so(store: MessageStore, files: ColdFiles) -> None:
    with pytest.raises(NotReady) as cold:
        get(store, 10)
    files.is_broken = True
    with pytest.raises(OSError, match="Input/output error"):
        cold.value.fetch()


def test_a_file_that_expired_meanwhile_is_no_error(store: MessageStore) -> None:
    with pytest.raises(NotReady) as cold:
        get(store, 10)
    store.queue("t", 0).consume_queue.files.files[0].delete()
    cold.value.fetch()


def test_pages_that_were_never_touched_are_not_resident() -> None:
    pages = 16
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, pages * mmap.PAGESIZE, flags) as memory:
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert not is_resident(start, pages * mmap.PAGESIZE)
        for page in range(pages - 1):
            memory[page * mmap.PAGESIZE] = 1
        assert is_resident(start, (pages - 1) * mmap.PAGESIZE)
        assert not is_resident(start, pages * mmap.PAGESIZE)


def test_a_mapping_that_is_gone_is_an_error() -> None:
    with pytest.raises(OSError, match="memory"):
        is_resident(1 << 46, mmap.PAGESIZE)


def test_everything_is_read_in_the_end(store: MessageStore) -> None:
    for _ in range(100):
        try:
            messages = read_all(store, store.queue("t", 0))
        except NotReady as cold:
            cold.fetch()
        else:
            break
    assert len(messages) == 2000


@pytest.mark.parametrize(
    ("look", "folders"),
    [
        (lambda store, queue: store.source(queue).unit(5), ["0"]),
        (lambda store, _: store.commit_log.record_at(5000), ["commitlog"]),
        (lambda store, queue: store.source(queue).store_time_at(5), ["0", "commitlog"]),
        (lambda store, queue: earliest_time(store.source(queue)), ["0", "commitlog"]),
        (lambda store, _: query_index(store, "t", "k", 9, 0, 1), ["index"]),
    ],
)
def test_lookups_wait_for_what_is_cold(
    store: MessageStore, files: ColdFiles, look: Any, folders: list[str]
) -> None:
    queue = store.queue("t", 0)
    put(store, queue, KEYS="k")
    store.index_tick()
    for folder in folders:
        with pytest.raises(NotReady) as cold:
            look(store, queue)
        assert files.asked[-1][0] == folder
        cold.value.fetch()
    look(store, queue)


def test_a_search_by_time_waits_for_each_step(tmp_path: Path, files: ColdFiles) -> None:
    store = open_small(tmp_path, files)
    clock = store.clock
    assert isinstance(clock, SetClock)
    queue = store.queue("t", 0)
    for _ in range(2000):
        clock.ms += 10
        put(store, queue, BODY)
    know_min(store)
    for number in (1, 700, 1999):
        at_ms = clock.ms - 10 * (1999 - number)
        assert ready(partial(store.source(queue).offset_by_time, at_ms)) == number
    assert {folder for folder, *_ in files.asked} == {"0", "commitlog"}


async def test_a_clean_up_finds_the_oldest_messages_in_a_thread(
    store: MessageStore, files: ColdFiles
) -> None:
    queue = store.queue("t", 0)
    for _ in range(3000):
        put(store, queue, BODY)
    first, second = store.commit_log.files.files
    store.index_tick()
    store.flusher.flush_now()
    assert isinstance(store.clock, SetClock)
    os.utime(first.path, times=(0, store.clock.ms / 1000))
    store.clock.ms += 100 * 3_600_000
    ratios: dict[str, Any] = {"clean_ratio": 1.0, "force_ratio": 1.0, "refuse_ratio": 1.0}
    store.cleaner.retention = Retention(delete_hours=frozenset(range(24)), **ratios)
    await store.cleaner.round()
    assert store.commit_log.min_offset == second.start_offset
    asked = len(files.asked)
    min_offset = store.source(queue).min_offset()
    assert [folder for folder, *_ in files.asked[asked:]] == ["0"]  # one look at what was read
    assert store.source(queue).unit(min_offset)[0] == second.start_offset
    assert queue.consume_queue.first_offset == min_offset // 300 * 300 > 0


def test_looks_are_forgotten_before_they_are_too_many(
    store: MessageStore, files: ColdFiles
) -> None:
    cache = PageCache(files, checks_max=3)
    file = store.commit_log.files.files[0]
    files.cached = {(str(file.path), chunk * CHUNK_BYTES) for chunk in range(4)}
    for _ in range(3):
        cache.check(file, 0, 4 * CHUNK_BYTES)
    assert len(files.asked) > 4, "some are looked at again"
