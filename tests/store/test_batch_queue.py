"""Batch queues: units of 46 bytes that stand for records of one or more messages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.file_seal import StoreDamaged
from headrace_broker.store.files.filesystem import Files
from headrace_broker.store.log.batch_units import BATCH_UNIT_BYTES, make_units
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.queues.batch_queue import BatchConsumeQueue
from headrace_broker.store.queues.cold_queue import ColdQueue
from headrace_broker.store.retention.cleaner import delete_files
from headrace_broker.store.settings import StoreSettings
from headrace_broker.store.store_queue import StoreQueue
from headrace_broker.store.store_source import GetStatus
from headrace_protocol.columns import RecordColumns
from headrace_protocol.inner_batch import unwrap
from headrace_protocol.java_hash import tags_code
from headrace_protocol.message import StoredMessage, encode_batch, encode_properties
from tests.support.stores import HOST, SetClock, crash, get_ready, new_store, put, ready

FILE_BYTES = 4 * BATCH_UNIT_BYTES
# Of batches, one after the other.
COUNTS = (5, 2, 1, 9, 1, 1, 32, 3, 7)
STARTS = tuple(sum(COUNTS[:number]) for number in range(len(COUNTS)))
TOPIC = "Batches"


# --- one queue --------------------------------------------------------------------------------


def new_queue(folder: Path) -> BatchConsumeQueue:
    return BatchConsumeQueue(folder / "batchconsumequeue" / "T" / "0", FILE_BYTES, Files())


def units(count: int = len(COUNTS), first: int = 0) -> np.ndarray:
    numbers = np.arange(count)
    return make_units(
        100 * numbers, numbers + 50, numbers, numbers + 1000, STARTS[:count], COUNTS[:count]
    )[first:]


def filled(folder: Path, count: int = len(COUNTS)) -> BatchConsumeQueue:
    queue = new_queue(folder)
    if count:
        queue.put_units(units(count))
    return queue


def content(queue: BatchConsumeQueue) -> np.ndarray:
    views = []
    number = queue.first_number
    while number < queue.end_number:
        view = np.frombuffer(queue.units_view(number, 100), queue.unit_dtype)
        views.append(view)
        number += len(view)
    return np.concatenate([*views, units(0)])


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("is_clean", [True, False])
def test_units_come_back(count: int, is_clean: bool, tmp_path: Path) -> None:
    filled(tmp_path, count)
    queue = new_queue(tmp_path)
    queue.load(is_clean, durable_below=0)
    assert (content(queue) == units(count)).all()
    assert (queue.end_number, queue.max_offset) == (count, sum(COUNTS[:count]))
    assert queue.last_physical_offset == 100 * (count - 1) if count else -1
    queue.put_units(units(first=count) if count < len(COUNTS) else units())
    assert (content(queue) == units()).all()


def test_every_message_has_the_unit_of_its_batch(tmp_path: Path) -> None:
    queue = filled(tmp_path)
    for number, (start, count) in enumerate(zip(STARTS, COUNTS, strict=True)):
        assert queue.offset_of(number) == start
        for queue_offset in range(start, start + count):
            assert queue.number_of(queue_offset) == number
            assert queue.unit(queue_offset) == (100 * number, number + 50, number)
    assert queue.number_of(sum(COUNTS)) == queue.end_number
    assert queue.offset_of(queue.end_number) == sum(COUNTS)


def test_a_gap_belongs_to_the_unit_behind_it(tmp_path: Path) -> None:
    queue = new_queue(tmp_path)
    queue.put_units(make_units([0, 90], [9, 9], 0, 0, [10, 40], [3, 2]))
    assert [queue.number_of(offset) for offset in (0, 10, 12, 13, 39, 40, 41, 42)] == [
        *(0, 0, 0, 1, 1, 1, 1, 2)
    ]
    assert (queue.first_offset, queue.max_offset) == (10, 42)


@pytest.mark.parametrize("kept", [0, 1, 4, 5, 9, 60, 61])
def test_truncation_leaves_no_part_of_a_batch(kept: int, tmp_path: Path) -> None:
    queue = filled(tmp_path)
    queue.truncate(kept)
    count = sum(start + size <= kept for start, size in zip(STARTS, COUNTS, strict=True))
    for each in (queue, new_queue(tmp_path)):
        if each is not queue:
            each.load(False, durable_below=0)
        assert (content(each) == units(count)).all()
        assert each.max_offset == sum(COUNTS[:count])


def test_truncation_by_physical_offset(tmp_path: Path) -> None:
    queue = filled(tmp_path)
    queue.truncate_from_physical(201)
    assert (content(queue) == units(3)).all()
    assert queue.max_offset == STARTS[3]


def test_the_same_again_is_ignored(tmp_path: Path) -> None:
    queue = filled(tmp_path, 4)
    queue.put_units(units(6))
    queue.put_units(units(2))
    assert (content(queue) == units(6)).all()


def test_a_queue_that_was_made_anew_begins_at_zero(tmp_path: Path) -> None:
    queue = filled(tmp_path, 4)
    queue.put_units(make_units([900, 950], [50, 50], 0, 0, [0, 3], [3, 3]))
    assert (queue.end_number, queue.max_offset) == (2, 6)


@pytest.mark.parametrize("field", ["size", "count", "physical_offset"])
def test_a_torn_unit_ends_the_queue_after_a_crash(field: str, tmp_path: Path) -> None:
    queue = filled(tmp_path)
    torn = units()[5:6].copy()
    torn[field] = 0
    file = queue.files.files[1]
    file.map[BATCH_UNIT_BYTES : 2 * BATCH_UNIT_BYTES] = torn.tobytes()
    again = new_queue(tmp_path)
    again.load(False, durable_below=0)
    assert (content(again) == units(5)).all()


def test_files_of_expired_records_are_detached(tmp_path: Path) -> None:
    queue = filled(tmp_path)
    number = ColdQueue(queue).first_at(401)
    assert number == 5
    delete_files(queue.detach_before(number, STARTS[number]))
    assert (queue.first_number, queue.first_offset) == (4, STARTS[4])
    assert queue.min_offset(401) == STARTS[5]
    assert (content(queue) == units(first=4)).all()
    again = new_queue(tmp_path)
    again.load(True, durable_below=0)
    assert again.min_offset(401) == STARTS[5]
    assert again.max_offset == queue.max_offset


def test_the_floor_is_a_queue_offset(tmp_path: Path) -> None:
    queue = filled(tmp_path)
    queue.restore_floor(STARTS[3], 200)
    assert queue.min_offset(0) == STARTS[3]
    queue.restore_floor(STARTS[4], 200)  # its predecessor is another unit
    assert queue.min_offset(0) == STARTS[3]


def test_nothing_is_added_to_a_deleted_queue(tmp_path: Path) -> None:
    queue = filled(tmp_path, 3)
    queue.delete()
    queue.put_units(units())
    assert (queue.end_number, queue.max_offset) == (0, 0)
    assert not queue.files.directory.exists()


# --- a store ----------------------------------------------------------------------------------


def open_batches(root: Path, **changes: Any) -> MessageStore:
    """A store in which the queues of one topic are batch queues."""
    changes = {"batch_queue_file_bytes": FILE_BYTES, **changes}
    store = new_store(root, **changes)
    store.is_batch_topic = TOPIC.__eq__
    store.load()
    return store


def put_batch(store: MessageStore, queue: StoreQueue, count: int, *, dispatch: bool = True) -> int:
    first = queue.next_offset
    items = [(0, f"{first + n}".encode(), b"TAGS\x01a\x02") for n in range(count)]
    properties = encode_properties({"INNER_NUM": str(count), "INNER_BASE": str(first)})
    store.write_path.begin()
    message = (queue, encode_batch(items), properties, 0, 0, 0, 1, 0)
    physical_offset = store.write_path.append(message, HOST, inner_count=count)
    if dispatch:
        store.write_path.publish()
    return physical_offset


def fill(store: MessageStore, queue: StoreQueue, *, dispatch: bool = True) -> None:
    """Batches, and single messages for counts of 1, as often as there are ``COUNTS``."""
    for count in COUNTS:
        if count > 1:
            put_batch(store, queue, count, dispatch=dispatch)
        else:
            put(store, queue, f"{queue.next_offset}".encode(), dispatch=dispatch, TAGS="b")


def read(store: MessageStore, queue: StoreQueue, first: int) -> list[StoredMessage]:
    """The messages from an offset on, as clients see them."""
    found: list[StoredMessage] = []
    while (result := get_ready(store, queue, first)).status is GetStatus.FOUND:
        columns = RecordColumns.from_records(b"".join(result.buffers))
        columns = unwrap(columns, first)
        found += [columns.message(number) for number in range(len(columns))]
        first = result.next_offset
    assert first == queue.consume_queue.max_offset
    return found


def assert_whole(store: MessageStore, queue: StoreQueue, first: int = 0) -> None:
    messages = read(store, queue, first)
    assert [message.queue_offset for message in messages] == [*range(first, sum(COUNTS))]
    assert all(message.body == f"{message.queue_offset}".encode() for message in messages)


def test_a_reader_gets_each_message_from_any_offset_on(tmp_path: Path) -> None:
    store = open_batches(tmp_path)
    queue = store.queue(TOPIC, 0)
    fill(store, queue)
    assert queue.next_offset == queue.consume_queue.max_offset == sum(COUNTS)
    for first in range(sum(COUNTS)):
        assert_whole(store, queue, first)
    assert not (tmp_path / "consumequeue" / TOPIC).exists()


def test_a_read_from_the_middle_of_a_batch_begins_with_all_of_it(tmp_path: Path) -> None:
    store = open_batches(tmp_path, batch_queue_file_bytes=100 * BATCH_UNIT_BYTES)
    queue = store.queue(TOPIC, 0)
    fill(store, queue)
    for get in (store.source(queue).get, store.source(queue).get_bulk):
        result = get(STARTS[3] + 4, 1, 1, None)
        assert (result.status, result.next_offset) == (GetStatus.FOUND, STARTS[4])
        result = get(STARTS[3] + 4, COUNTS[3] + 1, 1 << 20, None)
        assert result.next_offset == STARTS[5]
        assert get(sum(COUNTS), 1, 1, None).status is GetStatus.OFFSET_OVERFLOW_ONE


def test_a_filter_by_tags_leaves_batches_to_the_reader(tmp_path: Path) -> None:
    store = open_batches(tmp_path, batch_queue_file_bytes=100 * BATCH_UNIT_BYTES)
    queue = store.queue(TOPIC, 0)
    fill(store, queue)
    wanted = frozenset({tags_code("none")})
    result = store.source(queue).get(0, 1000, 1 << 20, wanted)
    assert result.count == sum(count for count in COUNTS if count > 1)
    result = store.source(queue).get(STARTS[4], 2, 1 << 20, wanted)
    assert result.next_offset > STARTS[5]


@pytest.mark.parametrize("block_rows", [1, 1000])
@pytest.mark.parametrize("rebuilds", [False, True])
def test_after_a_crash_all_units_are_there(block_rows: int, rebuilds: bool, tmp_path: Path) -> None:
    store = open_batches(tmp_path)
    store.dispatcher.block_rows = block_rows
    queue = store.queue(TOPIC, 0)
    plain = store.queue("Plain", 0)
    fill(store, queue)
    put(store, plain)
    fill(store, store.queue(TOPIC, 1), dispatch=False)
    store.write_path.publish()
    before = content_of(tmp_path)
    crash(store)
    if rebuilds:
        for path in (tmp_path / "batchconsumequeue").rglob("0*"):
            if path.is_file():
                path.unlink()
        (tmp_path / "checkpoint").unlink(missing_ok=True)
    store = open_batches(tmp_path)
    for queue_id in (0, 1):
        assert_whole(store, store.queue(TOPIC, queue_id))
        assert store.queue(TOPIC, queue_id).next_offset == sum(COUNTS)
    assert content_of(tmp_path) == before
    store.close()
    assert_whole(store := open_batches(tmp_path), store.queue(TOPIC, 1), 7)


def content_of(root: Path) -> dict[str, bytes]:
    paths = (root / "batchconsumequeue").rglob("*")
    return {path.as_posix(): path.read_bytes() for path in paths if path.is_file()}


def test_a_record_that_is_cut_takes_all_its_messages_along(tmp_path: Path) -> None:
    store = open_batches(tmp_path)
    queue = store.queue(TOPIC, 0)
    put_batch(store, queue, 5)
    cut = put_batch(store, queue, 8)
    crash(store)
    with (tmp_path / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(cut + 100)
        file.write(bytes(20))
    store = open_batches(tmp_path)
    queue = store.queue(TOPIC, 0)
    assert queue.next_offset == queue.consume_queue.max_offset == 5
    assert put_batch(store, queue, 3) == cut
    assert len(read(store, queue, 0)) == 8


@pytest.mark.parametrize("stated", ["0", "-1", "99999", "x", ""])
def test_a_batch_that_states_no_count_gets_no_unit(stated: str, tmp_path: Path) -> None:
    store = open_batches(tmp_path)
    queue = store.queue(TOPIC, 0)
    put_batch(store, queue, 5)
    store.write_path.begin()
    raw = encode_properties({"INNER_NUM": stated})
    store.write_path.append((queue, b"bad", raw, 0, 0, 0, 1, 0), HOST, inner_count=3)
    queue.next_offset -= 3
    crash(store)
    store = open_batches(tmp_path)
    queue = store.queue(TOPIC, 0)
    assert queue.consume_queue.max_offset == 5
    assert len(read(store, queue, 0)) == 5


def test_a_sender_cannot_claim_a_batch(tmp_path: Path) -> None:
    store = open_batches(tmp_path)
    for topic in (TOPIC, "Plain"):
        queue = store.queue(topic, 0)
        put(store, queue, sys_flag=0x7FFF00C0, INNER_NUM="30")
        assert queue.next_offset == queue.consume_queue.max_offset == 1
        assert not store.source(queue).get(0, 1, 1, None).buffers[0][36 + 3] & 0xC0


def test_times_are_those_of_records(tmp_path: Path) -> None:
    store = open_batches(tmp_path, clock=(clock := SetClock()))
    queue = store.queue(TOPIC, 0)
    for _ in range(3):
        put_batch(store, queue, 4)
        clock.ms += 1000
    source = store.source(queue)
    first = store.clock.now_ms() - 3000
    assert [source.offset_by_time(first + ms) for ms in (0, 1, 1000, 2001)] == [0, 4, 4, 12]
    assert [source.offset_by_time(first + ms, "UPPER") for ms in (-1, 0, 999, 5000)] == [
        *(0, 3, 3, 11)
    ]
    assert source.store_time_at(7) == first + 1000
    assert source.record_bytes() == store.commit_log.max_offset


def test_a_topic_that_is_deleted_leaves_no_folder(tmp_path: Path) -> None:
    store = open_batches(tmp_path)
    fill(store, store.queue(TOPIC, 0))
    store.delete_topic(TOPIC)
    assert not (tmp_path / "batchconsumequeue" / TOPIC).exists()
    store.is_batch_topic = "Other".__eq__
    put(store, store.queue(TOPIC, 0))
    assert (tmp_path / "consumequeue" / TOPIC / "0").exists()
    crash(store)
    store = new_store(tmp_path, batch_queue_file_bytes=FILE_BYTES)
    store.load()
    assert store.queue(TOPIC, 0).next_offset == 1


def test_queues_of_both_kinds_stop_the_start(tmp_path: Path) -> None:
    store = open_batches(tmp_path)
    fill(store, store.queue(TOPIC, 0))
    put(store, store.queue("Plain", 0))
    store.close()
    (tmp_path / "consumequeue" / "Plain").rename(tmp_path / "consumequeue" / TOPIC)
    with pytest.raises(StoreFormatError, match="Apache RocketMQ does not open such a store"):
        open_batches(tmp_path)


def test_a_plain_queue_of_a_batch_topic_stops_the_start(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    store.load()
    put(store, store.queue(TOPIC, 0))
    store.close()
    with pytest.raises(StoreFormatError, match=r"queue\.type"):
        open_batches(tmp_path)


def test_a_seal_proves_units(tmp_path: Path) -> None:
    store = open_batches(tmp_path)
    fill(store, store.queue(TOPIC, 0))
    store.close()
    path = tmp_path / "batchconsumequeue" / TOPIC / "0" / f"{0:020d}"
    times, data = path.stat(), bytearray(path.read_bytes())
    data[BATCH_UNIT_BYTES + 3] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    store = open_batches(tmp_path)
    with pytest.raises(StoreDamaged, match=path.name):
        read(store, store.queue(TOPIC, 0), 0)


def test_files_are_whole_units() -> None:
    with pytest.raises(ValueError, match="not a multiple of 46"):
        StoreSettings(root=Path("x"), batch_queue_file_bytes=100)


def test_the_oldest_messages_leave_with_their_log_file(tmp_path: Path) -> None:
    store = open_batches(tmp_path)
    queue = store.queue(TOPIC, 0)
    while len(store.commit_log.files.files) < 3:
        put_batch(store, queue, 6)
    store.index_tick()
    detached = store.commit_log.files.detach_first(1)
    cold = ColdQueue(queue.consume_queue)
    number = cold.first_at(store.commit_log.min_offset)
    expired = queue.consume_queue.detach_before(number, cold.offset_of(number))
    delete_files([*detached, *expired])
    first = ready(lambda: store.source(queue).min_offset())
    assert first % 6 == 0 < first
    assert read(store, queue, first)[0].queue_offset == first
    assert store.source(queue).get(0, 1, 1, None).status is GetStatus.OFFSET_TOO_SMALL
