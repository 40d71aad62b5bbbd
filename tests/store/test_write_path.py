"""Promises of the write path: nothing is seen or acknowledged beyond the confirmed offset."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from headrace_broker.store.errors import StoreNotWritable
from headrace_broker.store.log.batch_records import Origin
from headrace_broker.store.log.encoded_records import EncodedRecords
from headrace_broker.store.log.ring import RUN_ROWS_MIN
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.queues.dispatch import BLOCK_ROWS
from headrace_broker.store.write.confirmation import Confirmation, Gate, OnConfirmed
from headrace_protocol.message import encode_batch
from headrace_protocol.waiting import at_once
from tests.support.batches import block
from tests.support.running import in_background, running
from tests.support.stores import HOST, FaultyFiles, open_store, put, query_index, read_all
from tests.support.until import until


def found(store: MessageStore) -> list[int]:
    return query_index(store, "T", "k", 9, 0, 1 << 62)


def test_a_query_by_key_finds_nothing_before_the_flush(tmp_path: Path) -> None:
    store = open_store(tmp_path, flush="sync")
    offset = put(store, store.queue("T", 0), KEYS="k")
    assert found(store) == []
    store.index_tick()
    assert found(store) == []
    store.flusher.flush_log_now()
    assert found(store) == [offset]


class HeldFiles(FaultyFiles):
    """Syncs of the log wait until they may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def fdatasync(self, descriptor: int) -> None:
        if "/commitlog/" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            self.has_begun.set()
            assert self.may_go_on.wait(5)
        super().fdatasync(descriptor)


async def test_the_indexing_thread_waits_for_the_flush(tmp_path: Path) -> None:
    files = HeldFiles()
    store = open_store(tmp_path, files=files, flush="sync", index_tick_ms=0)
    store.use_threads, store.upkeep.index_rows_max = True, 0
    async with running(store.run):
        offset = put(store, store.queue("T", 0), KEYS="k")
        await until(files.has_begun.is_set)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert found(store) == []
        files.may_go_on.set()
        await until(lambda: found(store) != [])
        assert found(store) == [offset]


def test_a_query_by_id_finds_nothing_before_the_flush(tmp_path: Path) -> None:
    store = open_store(tmp_path, flush="sync")
    offset = put(store, store.queue("T", 0))
    assert store.message_at(offset) is None
    store.flusher.flush_log_now()
    assert store.message_at(offset) is not None


# --- gates ---------------------------------------------------------------------------------


class HandGate:
    """Moved by hand."""

    def __init__(self) -> None:
        self.offset = 0
        self.advance_count = 0
        self.waiting: list[tuple[int, OnConfirmed]] = []

    def gate(self) -> Gate:
        return Gate(lambda: self.offset, self.advance, lambda *waiter: self.waiting.append(waiter))

    def advance(self) -> None:
        self.advance_count += 1

    def call_back(self, outcome: bool) -> None:
        waiting, self.waiting = self.waiting, []
        for _, callback in waiting:
            callback(outcome)


def test_without_a_gate_everything_is_confirmed() -> None:
    confirmation = Confirmation()
    answers: list[bool] = []
    confirmation.when_confirmed(1 << 40, answers.append)
    assert (confirmation.is_immediate, confirmation.offset, answers) == (True, None, [True])


@pytest.mark.parametrize("outcomes", [(True, True), (True, False), (False, True)])
def test_two_gates_are_passed_one_after_the_other(outcomes: tuple[bool, bool]) -> None:
    disk, replica = HandGate(), HandGate()
    confirmation = Confirmation()
    confirmation.add(disk.gate())
    confirmation.add(replica.gate())
    answers: list[bool] = []
    confirmation.when_confirmed(100, answers.append)
    disk.offset, replica.offset = 100, 50
    assert (confirmation.is_immediate, confirmation.offset) == (False, 50)
    confirmation.advance(100)
    assert (disk.advance_count, replica.advance_count) == (0, 1)
    disk.call_back(outcomes[0])
    assert answers == ([] if outcomes[0] else [False])
    replica.call_back(outcomes[1])
    assert answers == [all(outcomes)]


def test_a_second_gate_holds_back_what_is_on_disk(tmp_path: Path) -> None:
    store = open_store(tmp_path, flush="sync")
    replica = HandGate()
    store.write_path.confirmation.add(replica.gate())
    queue = store.queue("T", 0)
    first, second = put(store, queue, KEYS="k"), put(store, queue, KEYS="k")
    store.flusher.flush_log_now()
    store.write_path.publish()
    assert (read_all(store, queue), found(store)) == ([], [])
    replica.offset = second
    store.write_path.confirmation.moved()
    assert [m.physical_offset for m in read_all(store, queue)] == [first] == found(store)
    replica.offset = store.commit_log.max_offset
    store.write_path.confirmation.moved()
    assert found(store) == [second, first]


# --- writers inside the broker -------------------------------------------------------------


def block_for(store: MessageStore, count: int) -> EncodedRecords:
    return EncodedRecords(store.queue("T", 0), *block(*[b"body"] * count))


async def test_a_writer_inside_waits_for_room_and_for_the_gate(tmp_path: Path) -> None:
    store = open_store(tmp_path, flush="sync", commit_log_file_bytes=1 << 16)
    offsets: list[tuple[int, int]] = []
    async with running(store.run):
        for _ in range(5):  # several times what the ring holds
            await store.write_path.append_block(
                lambda: block_for(store, 40), lambda *stored: offsets.append(stored)
            )
        assert [queue_offset for queue_offset, _ in offsets] == list(range(0, 200, 40))
        await store.write_path.wait_confirmed()
        assert store.commit_log.flushed_offset == store.commit_log.max_offset
    store.write_path.publish()
    assert len(read_all(store, store.queue("T", 0))) == 200


@pytest.mark.parametrize(("row_count", "waits"), [(40, False), (60, True)])
async def test_a_writer_inside_waits_while_the_ring_is_nearly_full(
    tmp_path: Path, row_count: int, waits: bool
) -> None:
    store = open_store(tmp_path, flush="sync", commit_log_file_bytes=1 << 16)
    for _ in range(row_count):
        put(store, store.queue("T", 0))
    offsets: list[tuple[int, int]] = []

    async def write() -> None:
        await store.write_path.append_block(
            lambda: block_for(store, 1), lambda *stored: offsets.append(stored)
        )

    async with in_background(write):
        await trio.testing.wait_all_tasks_blocked()
        assert len(offsets) == (not waits)
        async with in_background(store.flusher.run_group_commit):
            await until(lambda: bool(offsets))


async def test_a_writer_inside_makes_room_itself(
    store: MessageStore, autojump_clock: trio.testing.MockClock
) -> None:
    for _ in range(store.ring.row_count):
        put(store, store.queue("T", 0), dispatch=False)
    began = trio.current_time()
    await store.write_path.append_block(lambda: block_for(store, 1))
    assert trio.current_time() == began
    assert len(read_all(store, store.queue("T", 0))) == store.ring.row_count + 1


async def test_a_block_that_was_noted_is_written_by_a_later_commit(
    files: FaultyFiles, store: MessageStore
) -> None:
    store.queue("T", 0)
    put(store, store.queue("T", 0))
    offsets: list[tuple[int, int]] = []
    files.is_unwritable = True
    with pytest.raises(StoreNotWritable):
        await store.write_path.append_block(
            lambda: block_for(store, 3), lambda *stored: offsets.append(stored)
        )
    assert len(offsets) == 1
    files.is_unwritable = False
    store.write_path.publish()
    assert len(read_all(store, store.queue("T", 0))) == 4


def test_subscribers_hear_of_queues_whose_units_are_there(store: MessageStore) -> None:
    heard: list[list[int]] = []
    for _ in range(2):
        store.write_path.on_published(
            lambda queues: heard.append([store.source(queue).max_offset() for queue in queues])
        )
    put(store, store.queue("T", 0), dispatch=False)
    put(store, store.queue("T", 0))
    store.write_path.publish()
    assert heard == [[2], [2]]


def test_a_subscriber_does_not_append(tmp_path: Path) -> None:
    def append(_queues: object) -> None:
        put(store, store.queue("other", 0), dispatch=False)

    store = open_store(tmp_path)
    store.write_path.on_published(append)
    with pytest.raises(AssertionError, match="a subscriber has appended"):
        put(store, store.queue("T", 0))


# --- rows that wait longer than their queue exists -----------------------------------------


def test_rows_held_by_a_gate_leave_nothing_of_a_deleted_topic(tmp_path: Path) -> None:
    store = open_store(tmp_path, flush="sync")
    replica = HandGate()
    store.write_path.confirmation.add(replica.gate())
    queue = store.queue("T", 0)
    store.write_path.begin()
    batch = encode_batch([(0, b"old", b"")] * RUN_ROWS_MIN)
    store.write_path.append_batch(queue, batch, 0, Origin(1, HOST))
    put(store, queue, b"old")
    store.delete_topic("T")
    replica.offset = store.commit_log.max_offset
    store.write_path.publish()
    assert not (tmp_path / "consumequeue/T").exists()


@pytest.mark.parametrize("old_count", [1, BLOCK_ROWS])
def test_rows_held_by_a_gate_do_not_reach_a_later_queue_of_the_name(
    tmp_path: Path, old_count: int
) -> None:
    sizes: dict[str, Any] = {"commit_log_file_bytes": 1 << 16, "ring_rows": 256}
    store = open_store(tmp_path, flush="sync", **sizes)
    replica = HandGate()
    store.write_path.confirmation.add(replica.gate())
    for _ in range(old_count):
        put(store, store.queue("T", 0), b"old")
    store.delete_topic("T")
    new = store.queue("T", 0)
    put(store, new, b"new")
    store.flusher.flush_log_now()
    replica.offset = store.commit_log.max_offset
    store.write_path.publish()
    assert [bytes(message.body) for message in read_all(store, new)] == [b"new"]
    store.close()
    store = open_store(tmp_path, **sizes)
    assert [bytes(message.body) for message in read_all(store, store.queue("T", 0))] == [b"new"]


def test_rows_held_by_a_full_disk_leave_nothing_of_a_deleted_topic(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    put(store, store.queue("other", 0))
    files.is_full = True
    put(store, store.queue("T", 0))
    store.delete_topic("T")
    files.is_full = False
    store.write_path.publish()
    assert not (tmp_path / "consumequeue/T").exists()


def test_a_deletion_confirms_nothing_after_a_failed_flush(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files, flush="sync")
    put(store, store.queue("other", 0))
    store.flusher.flush_log_now()
    queue = store.queue("T", 0)
    offset = put(store, queue)
    files.is_broken = True
    with pytest.raises(OSError, match="Input/output error"):
        store.flusher.flush_log_now()
    files.is_broken = False
    at_once(store.delete_queues("other"))
    called: list[bool] = []
    store.when_all_flushed(lambda: called.append(True))
    assert called
    store.write_path.publish()
    assert (store.message_at(offset), read_all(store, queue)) == (None, [])
