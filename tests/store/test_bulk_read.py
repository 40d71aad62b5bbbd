"""A bulk read finds what ordinary reads find, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.store_queue import StoreQueue
from headrace_broker.store.store_source import GetStatus
from tests.support.bulk import columns_of
from tests.support.golden import STORES, copy_golden_store, golden_settings
from tests.support.stores import FaultyFiles, open_store, put

EVERYTHING = (1 << 16, 1 << 24)


def read_bulk(
    store: MessageStore, queue: StoreQueue, count_max: int, bytes_max: int
) -> tuple[list[bytes], list[int]]:
    """All records and their queue offsets."""
    records: list[bytes] = []
    offsets: list[int] = []
    offset = store.source(queue).min_offset()
    while offset < store.source(queue).max_offset():
        result = store.source(queue).get_bulk(offset, count_max, bytes_max, None)
        assert offset < result.next_offset <= store.source(queue).max_offset()
        offset = result.next_offset
        if result.status is not GetStatus.FOUND:
            continue
        columns = columns_of(result)
        assert 0 < len(columns) == result.count <= count_max
        assert result.body_bytes == columns.size.sum()
        assert result.body_bytes <= bytes_max or result.count == 1
        assert columns.queue_offset.max() < offset
        records += [bytes(columns.record(index)) for index in range(len(columns))]
        offsets += columns.queue_offset.tolist()
    return records, offsets


def read_single(store: MessageStore, queue: StoreQueue) -> list[bytes]:
    records = []
    for offset in range(store.source(queue).min_offset(), store.source(queue).max_offset()):
        result = store.source(queue).get(offset, 1, 1 << 24, None)
        if result.status is GetStatus.FOUND and result.next_offset == offset + 1:
            records += [bytes(buffer) for buffer in result.buffers]
    return records


@pytest.mark.slow
@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("limits", [EVERYTHING, (7, 3000), (1, 1)])
def test_all_that_apache_wrote_is_found(name: str, limits: tuple[int, int], tmp_path: Path) -> None:
    root = copy_golden_store(name, tmp_path / "store")
    store = MessageStore(golden_settings(root), files=FaultyFiles())
    store.load()
    layouts = set()
    for queue in store.queues:
        records, offsets = read_bulk(store, queue, *limits)
        assert records == read_single(store, queue)
        low, high = store.source(queue).min_offset(), store.source(queue).max_offset()
        if queue.consume_queue.is_batch:
            assert offsets == [0, 5, 7]
        else:
            assert offsets == list(range(low, high))
        result = store.source(queue).get_bulk(store.source(queue).min_offset(), *limits, None)
        layouts.add(result.layout if result.count else None)
    assert {"log", "gathered"} <= layouts or limits != EVERYTHING


# --- layouts -------------------------------------------------------------------------------


def test_neighbours_go_as_they_lie_without_a_copy(store: MessageStore, queue: StoreQueue) -> None:
    for _ in range(9):
        put(store, queue, bytes(100))
    result = store.source(queue).get_bulk(2, 5, 1 << 20, None)
    assert (result.layout, result.count, result.has_queue_offsets) == ("log", 5, False)
    size = result.body_bytes // 5
    assert result.first_physical_offset == 2 * size
    units, log = result.buffers
    assert isinstance(log, memoryview)
    assert log.obj is store.commit_log.files.files[0].map
    assert bytes(units) == bytes(queue.consume_queue.units_view(2, 5))


def test_a_little_of_others_between_them_is_sent_along(store: MessageStore) -> None:
    queue, other = store.queue("T", 0), store.queue("U", 0)
    for number in range(9):
        put(store, queue, bytes(100))
        if number % 3 == 1:
            put(store, other, bytes(100))
    result = store.source(queue).get_bulk(0, 99, 1 << 20, None)
    assert (result.layout, result.count) == ("log", 9)
    assert len(result.buffers[-1]) > result.body_bytes
    assert columns_of(result).bodies() == [bytes(100)] * 9


def test_much_of_others_between_them_is_left_out(store: MessageStore) -> None:
    queue, other = store.queue("T", 0), store.queue("U", 0)
    for _ in range(5):
        put(store, queue, bytes(100))
        put(store, other, bytes(100))
    result = store.source(queue).get_bulk(0, 99, 1 << 20, None)
    assert (result.layout, result.count) == ("gathered", 5)
    assert sum(map(len, result.buffers[1:])) == result.body_bytes
    assert columns_of(result).bodies() == [bytes(100)] * 5


def test_large_pieces_are_gathered_without_a_copy(tmp_path: Path) -> None:
    store = open_store(tmp_path, commit_log_file_bytes=1 << 20, consume_queue_file_bytes=2000)
    queue, other = store.queue("T", 0), store.queue("U", 0)
    for _ in range(3):
        for _ in range(5):
            put(store, queue, bytes(1000))
        put(store, other, bytes(9000))
    result = store.source(queue).get_bulk(0, 99, 1 << 20, None)
    assert (result.layout, result.count, len(result.buffers)) == ("gathered", 15, 1 + 3)
    assert columns_of(result).bodies() == [bytes(1000)] * 15


def test_records_in_two_log_files_are_gathered(store: MessageStore, queue: StoreQueue) -> None:
    for _ in range(12):
        put(store, queue, bytes(700))
    result = store.source(queue).get_bulk(0, 9, 1 << 20, None)
    assert (result.layout, result.count) == ("gathered", 9)
    assert len(store.commit_log.files.files) == 3
    assert columns_of(result).bodies() == [bytes(700)] * 9


def test_records_that_end_with_their_file_do_not_run_into_the_next(
    store: MessageStore, queue: StoreQueue
) -> None:
    size = len(bytes(store.commit_log.record_at(put(store, queue, b"")) or b""))
    fill = 4096 - 8 - 2 * size
    put(store, queue, bytes(fill))
    put(store, queue, b"next")
    assert [len(record) for record in read_bulk(store, queue, *EVERYTHING)[0]] == [
        size,
        fill + size,
        size + 4,
    ]


# --- how a read ends -----------------------------------------------------------------------


def test_what_is_not_dispatched_is_not_seen(store: MessageStore, queue: StoreQueue) -> None:
    put(store, queue, b"one")
    put(store, queue, b"two", dispatch=False)
    assert columns_of(store.source(queue).get_bulk(0, 9, 999, None)).bodies() == [b"one"]
    store.write_path.publish()
    assert columns_of(store.source(queue).get_bulk(0, 9, 999, None)).bodies() == [b"one", b"two"]
