"""The store's face: what goes in comes out, limits, locks and a disk that fails."""

from __future__ import annotations

import errno
import os
import random
import struct
import subprocess
import sys
import tempfile
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_broker.store.errors import (
    RecordTooLarge,
    StoreBusy,
    StoreError,
    StoreFormatError,
    StoreLocked,
    StoreNotWritable,
)
from headrace_broker.store.integrity.checkpoint import Checkpoint
from headrace_broker.store.log.batch_records import Origin
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.queues.consume_queue import UNIT, UNIT_BYTES
from headrace_broker.store.retention.cleaner import delete_files
from headrace_broker.store.store_queue import StoreQueue
from headrace_broker.store.store_source import SAMPLE_UNITS, SAMPLES, GetStatus
from headrace_protocol.errors import CorruptRecord
from headrace_protocol.message import (
    BORN_HOST_V6,
    STORE_HOST_V6,
    TRANSACTION_COMMIT,
    TRANSACTION_PREPARED,
    TRANSACTION_ROLLBACK,
    decode_record,
    encode_batch,
)
from headrace_protocol.message_ids import encode_host
from tests.support.running import running
from tests.support.stores import (
    HOST,
    FaultyFiles,
    SetClock,
    crash,
    open_store,
    put,
    query_index,
    read_all,
    small_settings,
)
from tests.support.until import until

MESSAGES = st.lists(
    st.tuples(
        st.sampled_from(["A", "B", "a topic with a longer name", "t" * 200]),
        st.integers(0, 2),
        st.binary(max_size=1500),
        st.dictionaries(st.sampled_from(["KEYS", "TAGS", "x"]), st.text("abé", min_size=1)),
    ),
    max_size=60,
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(MESSAGES, st.integers(1, 12), st.booleans())
def test_what_goes_in_comes_out(
    messages: list[tuple[str, int, bytes, dict[str, Any]]], batch: int, is_clean: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(Path(folder) / "store")
        wanted: dict[tuple[str, int], list[tuple[bytes, dict[str, str]]]] = {}
        for number, (topic, queue_id, body, properties) in enumerate(messages, 1):
            put(store, store.queue(topic, queue_id), body, dispatch=False, **properties)
            wanted.setdefault((topic, queue_id), []).append((body, properties))
            if number % batch == 0:
                store.write_path.publish()
        store.write_path.publish()
        for _ in range(2):
            for name, sent in wanted.items():
                found = read_all(store, store.queue(*name))
                assert [(m.body, m.properties) for m in found] == sent
                assert [m.queue_offset for m in found] == list(range(len(sent)))
            store.close() if is_clean else crash(store)
            store = open_store(Path(folder) / "store")
        store.close()


def test_a_record_holds_what_was_given(tmp_path: Path) -> None:
    clock = SetClock(5000)
    store = open_store(tmp_path, clock)
    store.write_path.begin()
    queue = store.queue("T", 3)
    first = store.write_path.append((queue, b"one", b"k\x01v\x02", 7, -1, 0, 17, 2), HOST, 99)
    clock.ms = 6000
    second = store.write_path.append((queue, b"two", b"", 0, 0, 0, 17, 0), HOST)
    message = decode_record(store.commit_log.record_at(first) or b"")
    assert (message.topic, message.queue_id, message.queue_offset) == ("T", 3, 0)
    assert (message.flag, message.born_timestamp, message.born_host) == (-1, 17, HOST)
    assert (message.reconsume_times, message.prepared_transaction_offset) == (2, 99)
    assert (message.store_host, message.raw_properties) == (
        store.settings.store_host,
        b"k\x01v\x02",
    )
    assert message.store_timestamp == 5000
    assert decode_record(store.commit_log.record_at(second) or b"").store_timestamp == 5000
    assert store.commit_log.record_at(first + 1) is None
    assert store.commit_log.record_at(store.commit_log.max_offset) is None
    assert store.commit_log.record_at(1 << 40) is None


def test_a_record_is_written_before_it_is_read_and_not_for_an_older_one(
    store: MessageStore,
) -> None:
    queue, log = store.queue("T", 0), store.commit_log
    first, second = put(store, queue), put(store, queue, dispatch=False)
    (file,) = log.files.files
    assert decode_record(log.record_at(first) or b"").physical_offset == first
    assert file.view[second : second + 4] == bytes(4)
    assert decode_record(log.record_at(second) or b"").physical_offset == second


def test_a_message_is_found_by_both_its_offsets_only(store: MessageStore) -> None:
    queue, other = store.queue("T", 0), store.queue("U", 0)
    first, second, elsewhere = put(store, queue), put(store, queue), put(store, other)
    found = store.message_in("T", 0, 1, second)
    assert found is not None
    assert (found.topic, found.queue_offset) == ("T", 1)
    for both in [(0, second), (1, first), (2, second), (-1, first), (0, elsewhere), (0, 1 << 40)]:
        assert store.message_in("T", 0, *both) is None
    assert store.message_in("V", 0, 0, first) is None


def test_ipv6_hosts(tmp_path: Path) -> None:
    host = encode_host("2001:db8::7", 1234)
    store = open_store(tmp_path, store_host=encode_host("::1", 10911))
    queue = store.queue("T", 0)
    store.write_path.append((queue, b"one", b"", 0, 0, 0, 1, 0), host)
    store.write_path.append((queue, b"two", b"", 0, 0, 0, 1, 0), HOST)
    store.write_path.publish()
    one, two = read_all(store, queue)
    assert one.sys_flag == BORN_HOST_V6 | STORE_HOST_V6
    assert two.sys_flag == STORE_HOST_V6
    assert (one.born_host, two.born_host) == (host, HOST)
    assert store.source(queue).offset_by_time(0) == 0


def test_transaction_halves_have_no_place_in_the_queue(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    queue = store.queue("T", 0)
    for sys_flag in (TRANSACTION_PREPARED, TRANSACTION_COMMIT, TRANSACTION_ROLLBACK, 0):
        put(store, queue, b"%d" % sys_flag, sys_flag=sys_flag, KEYS="k")
    for _ in range(2):
        assert [m.body for m in read_all(store, store.queue("T", 0))] == [b"8", b"0"]
        assert len(query_index(store, "T", "k", 10, 0, 1 << 62)) == 3  # not the rolled back one
        crash(store)
        store = open_store(tmp_path)


def test_senders_do_not_set_the_stores_flags(store: MessageStore, queue: StoreQueue) -> None:
    put(store, queue, sys_flag=0x7FF & ~TRANSACTION_ROLLBACK)
    store.write_path.append_batch(
        queue, memoryview(encode_batch([(0, b"b", b"")])), 0xF0, Origin(1, HOST)
    )
    with pytest.raises(CorruptRecord, match="part of a transaction"):
        store.write_path.append_batch(
            queue, memoryview(encode_batch([(0, b"b", b"")])), 4, Origin(1, HOST)
        )
    store.write_path.publish()
    messages = read_all(store, queue)
    assert [m.sys_flag for m in messages] == [0x703, 0]
    assert [m.born_host for m in messages] == [HOST, HOST]


# --- reading -------------------------------------------------------------------------------


def test_a_pull_keeps_its_limits(store: MessageStore, queue: StoreQueue) -> None:
    for _ in range(9):
        put(store, queue, bytes(100))
    size = len(store.commit_log.record_at(0) or b"")
    assert store.source(queue).get(0, 5, 1 << 18, None).count == 5
    assert store.source(queue).get(0, 5, 3 * size, None).count == 3
    assert store.source(queue).get(0, 5, 3 * size + 1, None).body_bytes == 3 * size
    assert store.source(queue).get(0, 5, 1, None).count == 1  # the first always
    assert len(store.source(queue).get(0, 5, 1 << 18, None).buffers) == 1  # neighbours are one view


def test_a_rare_tag_is_looked_for_in_steps(tmp_path: Path) -> None:
    store = open_store(
        tmp_path, consume_queue_file_bytes=20_000, commit_log_file_bytes=1 << 20, ring_rows=1024
    )
    queue = store.queue("T", 0)
    for _ in range(900):
        put(store, queue, b"", dispatch=False)
    store.write_path.publish()
    result = store.source(queue).get(0, 32, 1 << 18, frozenset((1,)))
    assert (result.status, result.next_offset) == (GetStatus.NO_MATCHED_MESSAGE, 800)


@pytest.mark.parametrize("target", [1 << 40, 4000])
@pytest.mark.parametrize("is_cold", [True, False])
def test_a_unit_that_leads_nowhere_is_told(
    target: int, is_cold: bool, store: MessageStore, queue: StoreQueue
) -> None:
    for _ in range(3):
        put(store, queue)
    store.commit_log.started_at = store.commit_log.max_offset if is_cold else 0
    (file,) = queue.consume_queue.files.files
    UNIT.pack_into(file.map, UNIT_BYTES, target, 1000, 0)
    for offset in (0, 1):
        with pytest.raises(StoreFormatError, match=f"points to {target}.*fsck --repair"):
            store.source(queue).get(offset, 9, 9999, None)
    assert store.source(queue).get(2, 9, 9999, None).count == 1


def test_views_outlive_the_file(store: MessageStore, queue: StoreQueue) -> None:
    for number in range(20):
        put(store, queue, b"%d" % number * 500)
    result = store.source(queue).get(0, 1, 1 << 18, None)
    delete_files(store.commit_log.files.detach_first(2))
    assert decode_record(result.buffers[0]).body == b"0" * 500
    assert store.source(queue).min_offset() > 0
    assert store.source(queue).get(0, 1, 1, None).status is GetStatus.OFFSET_TOO_SMALL


TIMES = st.lists(st.integers(0, 20), max_size=30).map(sorted)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(TIMES, st.integers(-2, 22))
def test_offsets_by_time_are_those_of_a_plain_search(times: list[int], wanted: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        clock = SetClock()
        store = open_store(Path(folder), clock, consume_queue_file_bytes=60)
        queue = store.queue("T", 0)
        for time in times:
            clock.ms = time
            put(store, queue)
        lower = next((n for n, time in enumerate(times) if time >= wanted), len(times))
        upper = max((n for n, time in enumerate(times) if time <= wanted), default=0)
        assert store.source(queue).offset_by_time(wanted, "LOWER") == lower
        assert store.source(queue).offset_by_time(wanted, "UPPER") == upper
        source = store.source(queue)
        earliest = source.store_time_at(source.min_offset())
        assert earliest == (times[0] if times else None)
        store.close()


# --- limits --------------------------------------------------------------------------------


def test_parts_that_are_too_large_are_named(tmp_path: Path) -> None:
    store = open_store(tmp_path, commit_log_file_bytes=1 << 17, body_bytes_max=5000)
    queue = store.queue("T", 0)

    def append(body_bytes: int, properties_bytes: int) -> None:
        store.write_path.append(
            (queue, bytes(body_bytes), bytes(properties_bytes), 0, 0, 0, 1, 0), HOST
        )

    append(5000, 32767)
    with pytest.raises(RecordTooLarge, match="body has 5001 bytes, more than 5000"):
        append(5001, 0)
    for body_bytes in (0, 5000):
        with pytest.raises(RecordTooLarge, match="properties has 32768 bytes, more than 32767"):
            append(body_bytes, 32768)
    assert queue.next_offset == 1
    store.close()
    store = open_store(tmp_path / "small")
    queue = store.queue("T", 0)
    with pytest.raises(RecordTooLarge, match="record has 4090 bytes, more than 4088"):
        append(3998, 0)
    append(3996, 0)


def test_a_number_that_does_not_fit_leaves_nothing_behind(
    store: MessageStore, queue: StoreQueue
) -> None:
    with pytest.raises(struct.error, match="format requires"):
        store.write_path.append((queue, b"body", b"", 0, 1 << 40, 0, 1, 0), HOST)
    assert queue.next_offset == store.commit_log.max_offset == 0
    put(store, queue)
    assert len(read_all(store, queue)) == 1


def test_a_full_ring_names_the_slow_taker(store: MessageStore, queue: StoreQueue) -> None:
    for number in range(64):
        assert (store.write_path.pressure() is None) == (number < 52)
        put(store, queue, dispatch=False)
    with pytest.raises(StoreBusy, match="dispatch is behind: consumequeue"):
        put(store, queue)
    store.write_path.publish()
    assert store.write_path.pressure() is None
    put(store, queue)
    assert len(read_all(store, queue)) == 65


@pytest.mark.parametrize("topic", ["", ".", "..", "a/b", "a\0b"])
def test_a_topic_that_is_no_folder_name_is_refused(topic: str, store: MessageStore) -> None:
    with pytest.raises(ValueError, match="cannot be the name of a queue"):
        store.queue(topic, 0)


# --- directories ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_second_store_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, store.queue("T", 0))
    for _ in range(2):
        with pytest.raises(StoreLocked, match=f"store {tmp_path} is in use by another store of"):
            open_store(tmp_path)
    command = (
        "from pathlib import Path; from tests.support.stores import open_store;"
        f"open_store(Path({str(tmp_path)!r}))"
    )
    other = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=False
    )
    assert "StoreLocked" in other.stderr
    assert "in use by another broker (process" in other.stderr
    assert (tmp_path / "lock").read_bytes() == b"lock"
    store.close()
    open_store(tmp_path).close()


def test_a_foreign_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(StoreFormatError, match=r"is no store: it holds thesis\.tex; name an empty"):
        open_store(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(StoreFormatError, match="is a file"):
        open_store(tmp_path / "thesis.tex")


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file/store cannot be opened: Not a directory"):
        open_store(tmp_path / "file" / "store")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"commit_log_file_bytes": 8192}, "has 4096 bytes, but commit_log_file_bytes is 8192"),
        ({"consume_queue_file_bytes": 400}, "has 200 bytes, but consume_queue_file_bytes is 400"),
        ({"index_entry_count": 21}, "has 480 bytes, but index_slot_count 10 and index_entry_co"),
    ],
)
def test_files_of_another_size_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    store = open_store(tmp_path)
    put(store, store.queue("T", 0), KEYS="k")
    store.close()
    before = sorted(path for path in tmp_path.rglob("*"))
    with pytest.raises(StoreFormatError, match=message):
        open_store(tmp_path, **changes)
    assert sorted(path for path in tmp_path.rglob("*")) == before
    open_store(tmp_path).close()


@pytest.mark.parametrize("name", ["commitlog/notes", "index/notes", "consumequeue/T/one"])
def test_a_file_that_does_not_belong_is_named(name: str, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, store.queue("T", 0), KEYS="k")
    store.close()
    (tmp_path / name).write_text("")
    (tmp_path / name).write_text("x")
    with pytest.raises(StoreFormatError, match=name.rsplit("/", maxsplit=1)[-1]):
        open_store(tmp_path)


def test_a_gap_in_the_log_is_named(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for _ in range(9):
        put(store, store.queue("T", 0), bytes(1500))
    store.close()
    (tmp_path / "commitlog" / f"{4096:020d}").unlink()
    with pytest.raises(StoreFormatError, match="follows 00000000000000000000 with a gap"):
        open_store(tmp_path)


def test_nothing_is_stored_before_load_or_after_close(tmp_path: Path) -> None:
    store = MessageStore(small_settings(tmp_path / "store"))
    with pytest.raises(StoreNotWritable, match="not loaded"):
        put(store, store.queue("T", 0))
    store.close()
    assert not (tmp_path / "store").exists()
    store.load()
    store.close()
    with pytest.raises(StoreNotWritable, match="closed"):
        put(store, store.queue("T", 0))


# --- topics --------------------------------------------------------------------------------


def test_a_deleted_topic_is_gone_also_after_a_crash(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(30):
        put(store, store.queue("Old", number % 2), b"old")
        put(store, store.queue("Kept", 0), b"kept")
    store.delete_topic("Old")
    assert store.queues_of("Old") == []
    assert store.find_queue("Old", 0) is None
    assert not (tmp_path / "consumequeue" / "Old").exists()
    store.delete_topic("Missing")
    put(store, store.queue("Old", 0), b"new")
    crash(store)
    store = open_store(tmp_path)
    assert [m.body for m in read_all(store, store.queue("Old", 0))] == [b"new"]
    assert len(read_all(store, store.queue("Kept", 0))) == 30


def test_keys_of_deleted_queues_are_used_again(store: MessageStore) -> None:
    for number in range(50):
        put(store, store.queue(f"T{number}", 0), KEYS="k")
        store.delete_topic(f"T{number}")
    queue = store.queue("Last", 0)
    offset = put(store, queue, b"last", KEYS="k")
    assert len(store.queues) == 1
    assert query_index(store, "T49", "k", 9, 0, 1 << 62) != [offset]
    assert query_index(store, "Last", "k", 9, 0, 1 << 62) == [offset]
    assert [message.body for message in read_all(store, queue)] == [b"last"]


def test_queues_are_interned_and_listed(store: MessageStore) -> None:
    queues = [store.queue("T", number) for number in (2, 0, 1)]
    assert store.queue("T", 2) is queues[0] is store.find_queue("T", 2)
    assert [queue.queue_id for queue in store.queues_of("T")] == [0, 1, 2]
    assert store.find_queue("T", 3) is None


def test_statistics(store: MessageStore) -> None:
    put(store, store.queue("T", 0), dispatch=False)
    statistics = store.statistics()
    record = store.commit_log.record_at(0) or b""
    assert statistics.max_offset == store.commit_log.max_offset == len(record)
    assert (statistics.flushed_offset, statistics.behind_rows["consumequeue"]) == (0, 1)
    assert statistics.ring_fill == 1 / 64
    assert 0 < statistics.disk_ratio < 1
    assert statistics.refusal is None


# --- a disk that fails ---------------------------------------------------------------------


def test_a_full_disk_stops_sends_by_name_and_heals(tmp_path: Path) -> None:
    files, clock = FaultyFiles(), SetClock()
    store = open_store(tmp_path, clock, files)
    queue = store.queue("T", 0)
    put(store, queue, bytes(1000))
    files.is_full = True
    for _ in range(2):
        put(store, queue, bytes(1000))
    with pytest.raises(StoreNotWritable, match=r"No space left on device \(.*commitlog\)"):
        put(store, queue, bytes(1000))
    assert store.statistics().refusal is not None
    assert len(read_all(store, queue)) == 3
    files.is_full = False
    with pytest.raises(StoreNotWritable, match="No space left"):
        put(store, queue)  # not tried again at once
    clock.ms += 1000
    put(store, queue, bytes(1000))
    assert len(read_all(store, queue)) == 4
    store.close()
    assert not (tmp_path / "abort").exists()


def test_units_that_found_no_room_come_later(tmp_path: Path) -> None:
    files, clock = FaultyFiles(), SetClock()
    store = open_store(tmp_path, clock, files)
    queue = store.queue("T", 0)
    for _ in range(8):
        put(store, queue)
    published: list[object] = []
    store.write_path.on_published(published.extend)
    files.is_full = True
    for _ in range(5):
        put(store, queue, dispatch=False)
    store.write_path.publish()
    assert store.source(queue).max_offset() == 10
    with pytest.raises(StoreNotWritable, match=r"No space left on device \(.*consumequeue\)"):
        put(store, queue)
    files.is_full = False
    store.write_path.publish()
    assert published == [queue, queue]
    assert [m.queue_offset for m in read_all(store, queue)] == list(range(13))


def test_an_index_without_room_does_not_stop_readers(
    files: FaultyFiles, store: MessageStore, queue: StoreQueue
) -> None:
    put(store, queue, KEYS="a")
    files.is_full = True
    assert query_index(store, "T", "a", 9, 0, 1 << 62) == []
    assert len(read_all(store, queue)) == 1
    files.is_full = False
    assert query_index(store, "T", "a", 9, 0, 1 << 62) == [0]


async def test_a_failed_flush_stops_sends_for_good(tmp_path: Path) -> None:
    files, clock = FaultyFiles(), SetClock()
    store = open_store(tmp_path, clock, files, flush="sync")
    queue = store.queue("T", 0)
    answers: list[bool] = []
    async with running(store.run):
        files.is_broken = True
        put(store, queue)
        done = trio.Event()
        store.flusher.when_flushed(store.commit_log.max_offset, answers.append)
        store.flusher.when_flushed(store.commit_log.max_offset, lambda _ok: done.set())
        await done.wait()
        files.is_broken = False
        clock.ms += 10_000
        with pytest.raises(StoreNotWritable, match="a flush failed, so messages may be lost"):
            put(store, queue)
        store.flusher.when_flushed(store.commit_log.max_offset, answers.append)
    assert answers == [False, False]
    store.close()
    assert (tmp_path / "abort").exists()
    with pytest.raises(StoreNotWritable):
        put(store, queue)


@pytest.mark.parametrize("fault", ["full", "unwritable", "broken"])
def test_a_refused_send_leaves_nothing_behind(
    fault: str, files: FaultyFiles, store: MessageStore, queue: StoreQueue
) -> None:
    put(store, queue, bytes(3000))
    files.is_full, files.is_unwritable = fault == "full", fault == "unwritable"
    files.is_broken = fault == "broken"
    with suppress(OSError, StoreNotWritable):
        put(store, queue, bytes(3000))
        store.flusher.flush_log_now()
    body = memoryview(bytes(3000))
    known = weakref.ref(body)
    with suppress(StoreNotWritable):
        put(store, queue, body)
    assert store.commit_log.life.refusal is not None
    del body
    assert known() is None
    files.is_full = files.is_unwritable = files.is_broken = False


# --- the running store ---------------------------------------------------------------------


async def test_one_flush_answers_all_that_wait(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files, flush="sync")
    queue = store.queue("T", 0)
    answers: list[bool] = []
    async with running(store.run):
        arrived = trio.Event()
        store.write_path.on_published(lambda queues: arrived.set() if queue in queues else None)
        for _ in range(3):
            put(store, queue)
            store.flusher.when_flushed(store.commit_log.max_offset, answers.append)
        # Not readable before it is safe.
        assert (answers, store.source(queue).max_offset()) == ([], 0)
        await arrived.wait()
        assert answers == [True, True, True]
        assert len(read_all(store, queue)) == 3
        assert store.statistics().flushed_offset == store.commit_log.max_offset
        store.flusher.when_flushed(store.commit_log.max_offset, answers.append)
        assert len(answers) == 4  # at once: it is known already
    assert len([path for path in files.synced if "commitlog" in path]) == 1


async def test_few_bytes_wait_for_the_thorough_flush(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files, flush_thorough_interval_ms=10_000_000)
    async with running(store.run):
        await trio.sleep(0.6)  # the first round is thorough
        put(store, store.queue("T", 0))
        await trio.sleep(50)
    assert not [path for path in files.synced if "commitlog" in path]
    store.close()
    assert files.synced


async def test_dirty_bytes_are_flushed_in_time(tmp_path: Path) -> None:
    store = open_store(tmp_path, flush_interval_ms=1, flush_least_bytes=1)
    async with running(store.run):
        for _ in range(3):
            put(store, store.queue("T", 0), bytes(2000))
            await until(lambda: store.statistics().flushed_offset == store.commit_log.max_offset)
    assert store.flusher.checkpoint.physic_msg_timestamp == store.commit_log.now_ms


async def test_the_checkpoint_says_what_is_on_disk(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = open_store(
        tmp_path, files=files, queue_flush_interval_ms=1, queue_flush_thorough_interval_ms=1
    )
    path = tmp_path / "checkpoint"
    async with running(store.run):
        put(store, store.queue("T", 0), KEYS="k")
        offset = put(store, store.queue("T", 0), KEYS="k")
        store.index_tick()
        await until(lambda: Checkpoint.load(path).logics_physical_offset == offset)
    assert path.stat().st_size == 4096
    checkpoint = Checkpoint.load(path)
    assert (
        checkpoint.logics_msg_timestamp
        == checkpoint.physic_msg_timestamp
        == store.commit_log.now_ms
    )
    folders = {
        Path(path).parent.parent.name + "/" + Path(path).parent.name for path in files.synced
    }
    assert {"T/0", f"{tmp_path.name}/commitlog", f"{tmp_path.name}/index"} <= folders


async def test_much_that_the_checkpoint_does_not_speak_of_is_flushed_soon(tmp_path: Path) -> None:
    store = open_store(tmp_path, queue_flush_interval_ms=1)
    store.flusher.unchecked_bytes_max = 500
    async with running(store.run):
        offset = put(store, store.queue("T", 0), bytes(500))
        await until(lambda: store.flusher.checkpoint.logics_physical_offset == offset)


class SlowFiles(FaultyFiles):
    """The first sync of a folder's files waits until it may go on."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def fdatasync(self, descriptor: int) -> None:
        if f"/{self.folder}/" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            self.has_begun.set()
            assert self.may_go_on.wait(5)
        super().fdatasync(descriptor)


async def test_the_checkpoint_waits_for_a_flush_that_began_before(tmp_path: Path) -> None:
    files = SlowFiles("consumequeue/Slow")
    store = open_store(tmp_path, files=files)
    flusher = store.flusher
    put(store, store.queue("Slow", 0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(flusher.flush_thoroughly)
        await until(files.has_begun.is_set)
        last = put(store, store.queue("T", 0))
        nursery.start_soon(flusher.flush_thoroughly)
        await trio.testing.wait_all_tasks_blocked()
        assert flusher.checkpoint.logics_physical_offset == 0
        files.may_go_on.set()
    assert flusher.checkpoint.logics_physical_offset == last


async def test_a_stop_brings_to_disk_what_a_cancelled_flush_had_begun(tmp_path: Path) -> None:
    files = SlowFiles("commitlog")
    store = open_store(tmp_path, files=files)
    put(store, store.queue("T", 0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.flusher.flush_thoroughly)
        await until(files.has_begun.is_set)
        nursery.cancel_scope.cancel()
        files.may_go_on.set()
    assert not [path for path in files.synced if "consumequeue" in path]
    store.close()
    assert [path for path in files.synced if "consumequeue/T/0/" in path]


async def test_a_full_index_file_moves_the_checkpoint(tmp_path: Path) -> None:
    store = open_store(tmp_path, queue_flush_interval_ms=1)
    async with running(store.run):
        for number in range(25):
            put(store, store.queue("T", 0), KEYS=str(number))
        await until(lambda: store.flusher.checkpoint.index_msg_timestamp == store.commit_log.now_ms)


async def test_the_next_file_is_made_ahead(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    names = tmp_path / "commitlog"
    async with running(store.run):
        await until(lambda: len(list(names.glob("*"))) == 1)
        put(store, store.queue("T", 0), bytes(1000))
        assert len(list(names.iterdir())) == 1
        put(store, store.queue("T", 0), bytes(1000))
        put(store, store.queue("T", 0), bytes(10))  # past the half
        await until(lambda: len(list(names.iterdir())) == 2)
    store.close()
    assert len(list(names.iterdir())) == 1  # a clean stop leaves no empty file


@pytest.mark.slow
async def test_zeros_written_ahead_never_meet_a_record(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"commit_log_file_bytes": 1 << 26, "ring_rows": 1 << 14}
    sizes |= {"consume_queue_file_bytes": 20 * 100_000}
    store = open_store(tmp_path, **sizes)
    body = bytes(range(256)) * 8
    count = 0
    async with running(store.run):
        while store.commit_log.file_start == 0 or store.commit_log.position < 1 << 24:
            for _ in range(500):
                store.write_path.append((store.queue("T", 0), body, b"", 0, 0, 0, 1, 0), HOST)
            count += 500
            store.write_path.publish()
            await trio.sleep(0.0005)
    crash(store)
    store = open_store(tmp_path, **sizes)  # reads the log again and checks each body's CRC
    assert store.source(store.queue("T", 0)).max_offset() == count


async def test_the_index_follows_by_itself(store: MessageStore) -> None:
    async with running(store.run):
        put(store, store.queue("T", 0), KEYS="k")
        await until(lambda: not store.statistics().behind_rows["index"])
    assert query_index(store.reader, "T", "k", 9, 0, 1 << 62) == [0]


async def test_a_full_disk_heals_without_a_send(
    files: FaultyFiles,
    store: MessageStore,
    queue: StoreQueue,
    autojump_clock: trio.testing.MockClock,
) -> None:
    touched: list[object] = []
    store.write_path.on_published(touched.extend)
    put(store, queue, dispatch=False)
    files.is_full = True
    store.write_path.publish()
    async with running(store.run):
        await trio.sleep(5)
        assert touched == []
        files.is_full = False
        await trio.sleep(2)
        assert touched == [queue]
    assert len(read_all(store, queue)) == 1


def test_what_cannot_be_written_is_not_promised_and_not_lost(
    files: FaultyFiles, store: MessageStore, queue: StoreQueue
) -> None:
    put(store, queue, b"before")
    files.is_unwritable = True
    put(store, queue, b"kept", dispatch=False)
    for _ in range(2):
        with pytest.raises(StoreNotWritable, match=r"can't be written: .*commitlog"):
            store.write_path.publish()
    assert store.source(queue).max_offset() == 1
    files.is_unwritable = False
    store.write_path.publish()
    assert [message.body for message in read_all(store, queue)] == [b"before", b"kept"]


def test_names_that_were_not_synced_are_synced_by_the_next_flush(tmp_path: Path) -> None:
    """A flush that lacks a file descriptor is tried again."""

    class Files(FaultyFiles):
        synced_folders: list[Path]

        def fsync_directory(self, path: Path) -> None:
            if self.is_broken:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            self.synced_folders.append(path)

    files = Files()
    files.synced_folders = []
    files.close(files.create(tmp_path / "file"))
    files.is_broken = True
    with pytest.raises(OSError, match="Too many open files"):
        files.sync_names()
    files.is_broken = False
    files.sync_names()
    assert files.synced_folders == [tmp_path]


@pytest.mark.parametrize("file_units", [10, 1000])
def test_the_bytes_of_a_short_queue_are_counted(tmp_path: Path, file_units: int) -> None:
    store = open_store(
        tmp_path, commit_log_file_bytes=1 << 20, consume_queue_file_bytes=20 * file_units
    )
    queue = store.queue("T", 0)
    assert store.source(queue).record_bytes() == 0
    ends = [put(store, queue, b"x" * size) for size in range(1, 700)]
    ends.append(store.commit_log.max_offset)
    assert store.source(queue).record_bytes() == ends[-1] - ends[0]


def test_the_bytes_of_a_long_queue_are_estimated_from_few_units(tmp_path: Path) -> None:
    count = 2 * SAMPLES * SAMPLE_UNITS
    store = open_store(
        tmp_path, commit_log_file_bytes=1 << 22, consume_queue_file_bytes=20 * count, ring_rows=8192
    )
    queue = store.queue("T", 0)
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    for _ in range(count):
        put(store, queue, b"x" * rng.randrange(1, 200))
    source = store.source(queue)
    written = store.commit_log.max_offset
    assert source.record_bytes() == pytest.approx(written, rel=0.05), seed
