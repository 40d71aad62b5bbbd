"""Resources of a store that is closed, killed or garbage."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from traceback import walk_tb
from typing import Any

import pytest

from headrace_broker.store.errors import StoreError
from headrace_broker.store.files.filesystem import Files
from headrace_broker.store.log.ring import ROW
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.retention.cleaner import delete_files
from tests.support.stores import FaultyFiles, held, open_store, put, query_index, read_all

ROW_ITERATOR = type(ROW.iter_unpack(b""))


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """Objects held in loops are not freed by chance."""
    gc.disable()
    yield
    gc.enable()


def fill(store: MessageStore) -> None:
    """Several files of log, queues and index, all of them written and read."""
    for number in range(30):
        put(store, store.queue("T", number % 2), bytes(500), KEYS=f"key{number}")
    assert query_index(store, "T", "key7", 9, 0, 1 << 62)
    for queue in store.queues:
        assert len(read_all(store, queue)) >= 15
    for files in (store.commit_log.files.files, store.index_files.files):
        assert len(files) > 1


@pytest.mark.parametrize("end", [MessageStore.close, MessageStore.abandon])
def test_nothing_is_held_at_the_end(end: Callable[[MessageStore], None], tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store)
    store.close()
    again = open_store(tmp_path)  # with seals, which are compared
    fill(again)
    assert held(tmp_path)
    end(again)
    assert held(tmp_path) == []


@pytest.mark.parametrize("end", [MessageStore.close, MessageStore.abandon])
def test_a_reader_keeps_what_it_has_a_view_of(
    end: Callable[[MessageStore], None], tmp_path: Path
) -> None:
    store = open_store(tmp_path)
    fill(store)
    queue = store.queue("T", 0)
    [*records] = store.source(queue).get(0, 2, 9999, None).buffers
    units = queue.consume_queue.units_view(0, 2)
    before = [bytes(view) for view in (*records, units)]
    end(store)
    assert [bytes(view) for view in (*records, units)] == before
    assert sum("/commitlog/" in name for name in held(tmp_path)) == 2  # the map, and its descriptor
    records.clear()
    assert {"/consumequeue/T/0/" in name for name in held(tmp_path)} == {True}
    del units
    assert held(tmp_path) == []


def test_a_clean_stop_frees_what_was_allocated_ahead(tmp_path: Path) -> None:
    files = Files()
    sizes: dict[str, Any] = {"commit_log_file_bytes": 1 << 20, "consume_queue_file_bytes": 20 << 12}
    store = open_store(tmp_path, files=files, **sizes)
    put(store, store.queue("T", 0), b"x" * 5000, KEYS="key")
    paths = [file.path for file, _ in (*store.commit_log.used, *store.index_files.used)]
    before = [path.stat() for path in paths]
    assert before[0].st_blocks * 512 >= 1 << 20
    store.close()
    after = [path.stat() for path in paths]
    assert after[0].st_blocks * 512 <= 16384
    assert [status.st_size for status in after] == [status.st_size for status in before]
    assert after[0].st_mtime_ns == before[0].st_mtime_ns
    again = open_store(tmp_path, files=files, **sizes)
    put(again, again.queue("T", 0), b"y")
    assert len(read_all(again, again.queue("T", 0))) == 2


def test_a_file_that_waits_for_its_reader_goes_with_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store)
    view = store.commit_log.record_at(0)
    store.cleaner.detached += store.commit_log.files.detach_first(1)
    assert delete_files(store.cleaner.detached) == store.cleaner.detached
    store.close()
    assert held(tmp_path)
    del view
    assert held(tmp_path) == []


def test_abandoning_writes_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store)
    put(store, store.queue("T", 0), b"not written out", dispatch=False)
    before = contents(tmp_path)
    store.abandon()
    assert contents(tmp_path) == before


def contents(folder: Path) -> dict[Path, tuple[int, bytes]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_a_failed_stop_holds_nothing(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    fill(store)
    files.is_broken = True
    with pytest.raises(OSError, match="Input/output error"):
        store.close()
    assert held(tmp_path) == []


def test_a_failed_start_holds_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store)
    store.abandon()
    files = FaultyFiles()
    files.is_broken = True
    with pytest.raises(StoreError, match="Input/output error"):
        open_store(tmp_path, files=files)
    assert held(tmp_path) == []


def test_a_failed_dispatch_holds_no_iterator_over_a_view(
    files: FaultyFiles, store: MessageStore
) -> None:
    # Python before 3.12.7 can crash when such a traceback is garbage (python/cpython#77894).
    put(store, store.queue("T", 0), dispatch=False)
    store.write_path.commit()
    files.is_full = True
    with pytest.raises(OSError, match="No space left") as caught:
        store.dispatcher.drain(None)
    held = [value for frame, _ in walk_tb(caught.tb) for value in frame.f_locals.values()]
    iterators = [value for value in held if type(value) is ROW_ITERATOR]
    assert iterators
    assert not any(isinstance(each, memoryview) for each in gc.get_referents(*iterators))
