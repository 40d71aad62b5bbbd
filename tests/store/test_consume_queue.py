"""ConsumeQueues, and the dispatcher's two ways to fill them."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_broker.store.files.filesystem import Files
from headrace_broker.store.files.gallop import gallop
from headrace_broker.store.log.ring import WHOLE_BATCH
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.queues.cold_queue import ColdQueue
from headrace_broker.store.queues.consume_queue import BLANK_SIZE, UNIT_BYTES, ConsumeQueue
from headrace_broker.store.retention.cleaner import delete_files
from headrace_broker.store.store_queue import StoreQueue
from headrace_protocol.message import TRANSACTION_PREPARED
from tests.support.stores import open_store, put, read_all, units_from


def new_queue(folder: Path) -> ConsumeQueue:
    return ConsumeQueue(folder / "consumequeue" / "T" / "0", 200, Files())


def filled(folder: Path, count: int) -> ConsumeQueue:
    queue = new_queue(folder)
    for number in range(count):
        assert queue.put(number, 100 * number, 100, number)
    return queue


def units(queue: ConsumeQueue) -> list[tuple[int, int, int]]:
    return units_from(queue, queue.first_offset)


@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 35])
@pytest.mark.parametrize("is_clean", [True, False])
def test_units_come_back(count: int, is_clean: bool, tmp_path: Path) -> None:
    wanted = units(filled(tmp_path, count))
    assert wanted == [(100 * number, 100, number) for number in range(count)]
    queue = new_queue(tmp_path)
    queue.load(is_clean, durable_below=0)
    assert (queue.max_offset, units(queue)) == (count, wanted)
    assert queue.last_physical_offset == 100 * (count - 1) if count else -1
    assert queue.put(count, 10_000, 1, 1)
    assert queue.unit(count) == (10_000, 1, 1)


@pytest.mark.slow
@given(st.integers(0, 35), st.integers(0, 40))
@settings(max_examples=20, deadline=None)
def test_truncation_forgets_the_rest(count: int, kept: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        queue = filled(Path(folder), count)
        wanted = units(queue)[:kept]
        queue.truncate(kept)
        for is_clean in (True, False):
            again = new_queue(Path(folder))
            again.load(is_clean, durable_below=0)
            assert units(again) == units(queue) == wanted
        for number in range(queue.max_offset, 35):
            queue.put(number, 100 * number, 100, number)
        assert units(queue) == [(100 * number, 100, number) for number in range(35)][:35]


def test_a_hole_is_found_however_many_files_follow_it(tmp_path: Path) -> None:
    queue = filled(tmp_path, 65)
    first = queue.files.files[0]
    first.map[2 * UNIT_BYTES :] = bytes(first.file_bytes - 2 * UNIT_BYTES)
    again = new_queue(tmp_path)
    again.load(False, durable_below=100)
    assert again.max_offset == 2


def test_what_was_flushed_is_not_read_again(tmp_path: Path) -> None:
    queue = filled(tmp_path, 65)
    again = new_queue(tmp_path)
    again.load(False, durable_below=100 * 65)
    assert again.max_offset == queue.max_offset
    assert not again.files.files[0].is_mapped


def test_truncation_by_physical_offset(tmp_path: Path) -> None:
    queue = filled(tmp_path, 35)
    queue.truncate_from_physical(10_000)
    assert queue.max_offset == 35
    queue.truncate_from_physical(1201)
    assert queue.max_offset == 13
    queue.truncate_from_physical(0)
    assert queue.max_offset == 0
    assert queue.last_physical_offset == -1


def test_the_same_again_is_ignored(tmp_path: Path) -> None:
    queue = filled(tmp_path, 3)
    assert not queue.put(2, 200, 100, 2)
    assert not queue.put(0, 0, 100, 0)
    assert not queue.put(1, 900, 100, 9)
    assert queue.max_offset == 3


def test_a_gap_is_filled_with_blank_units(tmp_path: Path) -> None:
    queue = filled(tmp_path, 3)
    assert queue.put(14, 2000, 100, 0)
    assert units(queue)[3:14] == [(200, BLANK_SIZE, 0)] * 11
    assert queue.first_at_or_after(201) == 14


def test_files_below_the_logs_first_byte_go(tmp_path: Path) -> None:
    queue = filled(tmp_path, 35)
    assert queue.min_offset(0) == 0
    assert ColdQueue(queue).first_at(901) == queue.first_at_or_after(901) == 10
    assert queue.detach_before(9, 9) == []
    delete_files(queue.detach_before(10, 10))
    assert queue.first_offset == 10
    assert queue.min_offset(901) == 10
    assert ColdQueue(queue).first_at(1 << 40) == 35
    assert queue.min_offset(1901) == 20
    delete_files(queue.detach_before(35, 35))
    assert queue.min_offset(1 << 40) == 35
    names = [path.name for path in (tmp_path / "consumequeue" / "T" / "0").iterdir()]
    assert names == [f"{600:020d}"]  # the last file stays


def test_a_flush_covers_what_was_written_before_it(tmp_path: Path) -> None:
    queue = filled(tmp_path, 25)
    assert queue.dirty_bytes() == 500
    flush = queue.start_flush()
    queue.put(25, 5000, 1, 1)
    assert queue.dirty_bytes() == 20
    flush()
    queue.start_flush()()
    assert queue.dirty_bytes() == 0


# --- dispatch ------------------------------------------------------------------------------

SENDS = st.lists(
    st.tuples(
        st.integers(0, 2), st.integers(0, 3), st.sampled_from([0, 0, 0, TRANSACTION_PREPARED])
    ),
    max_size=200,
)


def note_names(touched: list[set[tuple[str, int]]], queues: set[StoreQueue]) -> None:
    touched.append({(queue.topic, queue.queue_id) for queue in queues})


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(SENDS, st.lists(st.integers(1, 50), min_size=1, max_size=5))
def test_rows_one_by_one_and_in_blocks_give_the_same_units(
    sends: list[tuple[int, int, int]], steps: list[int]
) -> None:
    seen = []
    for block_rows in (1, 1 << 30):
        with tempfile.TemporaryDirectory() as folder:
            store = open_store(Path(folder))
            store.dispatcher.block_rows = block_rows
            touched: list[set[tuple[str, int]]] = []

            store.write_path.on_published(partial(note_names, touched))
            for number, (topic, queue_id, sys_flag) in enumerate(sends):
                queue = store.queue(f"T{topic}", queue_id)
                put(store, queue, b"", dispatch=False, sys_flag=sys_flag, TAGS=str(topic))
                if number % steps[number % len(steps)] == 0:
                    store.write_path.publish()
            store.write_path.publish()
            found = {(q.topic, q.queue_id): units_from(q.consume_queue, 0) for q in store.queues}
            assert all(
                len(units) == q.next_offset
                for q, units in ((store.queue(*name), units) for name, units in found.items())
            )
            seen.append((found, touched))
            store.close()
    assert seen[0] == seen[1]


def test_a_block_with_gaps_and_repeats_is_put_one_by_one(
    store: MessageStore, queue: StoreQueue
) -> None:
    for _ in range(6):
        put(store, queue, dispatch=False)
    rows = store.ring.rows[:6].copy()
    rows["queue_offset"] = [0, 1, 1, 2, 5, 6]
    rows["sys_flag"][3] = WHOLE_BATCH
    store.dispatcher.put(rows)
    targets = rows["physical_offset"].tolist()
    found = [unit[0] for unit in units_from(queue.consume_queue, 0) if unit[1] != BLANK_SIZE]
    assert found == [targets[0], targets[1], targets[4], targets[5]]
    assert store.dispatcher.touched == {queue: None}


def test_a_bulk_append_and_single_ones_mix(tmp_path: Path) -> None:
    store = open_store(tmp_path, ring_rows=1024)
    queue = store.queue("T", 0)
    for round_count in (1, 200, 3, 500):
        for _ in range(round_count):
            put(store, queue, b"", dispatch=False)
        store.write_path.publish()
    assert [m.queue_offset for m in read_all(store, queue)] == list(range(704))


@given(st.integers(0, 50), st.integers(0, 200), st.integers(-5, 300))
def test_the_first_number_that_is_not_before(low: int, count: int, target: int) -> None:
    high = low + count
    looked: list[int] = []

    def is_before(number: int) -> bool:
        looked.append(number)
        return number < target

    found = gallop(low, high, is_before)
    assert found == min(max(target, low), high)
    assert all(low <= number < high for number in looked)
    assert len(looked) <= 2 * (found - low + 2).bit_length() + 1
