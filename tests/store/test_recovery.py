"""Clean and crash starts: nothing acknowledged as flushed is lost, nothing is invented."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_broker.store.errors import LoadInterrupted, StoreError
from headrace_broker.store.files.filesystem import Files
from headrace_broker.store.index.index_file import ENTRY_BYTES
from headrace_broker.store.integrity.checkpoint import Checkpoint, IndexMark
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.recovery import (
    NOTHING,
    FirstRecord,
    LoadStage,
    RecoveryPlan,
    Scan,
    index_durable_offset,
    log_durable_offset,
    plan_recovery,
    queues_durable_offset,
    read_log,
)
from headrace_protocol.message import encode_properties, encode_record
from tests.support.stores import (
    HOST,
    FaultyFiles,
    SetClock,
    crash,
    new_store,
    open_store,
    put,
    query_index,
    read_all,
    small_settings,
)


def contents(store: MessageStore) -> dict[tuple[str, int], list[bytes]]:
    return {
        (queue.topic, queue.queue_id): [message.body for message in read_all(store, queue)]
        for queue in store.queues
        if queue.next_offset
    }


def image(root: Path) -> dict[str, bytes]:
    kinds = ("commitlog", "consumequeue")
    return {
        str(path.relative_to(root)): path.read_bytes()
        for kind in kinds
        for path in (root / kind).rglob("*")
        if path.is_file()
    }


# --- the plan ------------------------------------------------------------------------------

FILES = [FirstRecord(0, 1000), FirstRecord(100, 20_000), FirstRecord(200, 50_000)]
NO_CHECKPOINT = Checkpoint()


def planned(
    *,
    is_clean: bool,
    files: list[FirstRecord],
    newest_unit: int,
    index_end: int,
    checkpoint: Checkpoint,
) -> RecoveryPlan:
    """The plan for the two takers that every store has."""
    queues_durable = queues_durable_offset(
        is_clean=is_clean, files=files, newest_unit=newest_unit, checkpoint=checkpoint
    )
    index_durable = index_durable_offset(
        is_clean=is_clean, index_end=index_end, queues_durable=queues_durable
    )
    offsets = {"consumequeue": queues_durable, "index": index_durable}
    rewrite_from = log_durable_offset(is_clean=is_clean, files=files, checkpoint=checkpoint)
    return plan_recovery(files, newest_unit, offsets, rewrite_from)


def plan_of(
    scan_from: int, queues_from: int, index_from: int, rewrite_from: int | None = None
) -> RecoveryPlan:
    put_from = {"consumequeue": queues_from, "index": index_from}
    return RecoveryPlan(scan_from, put_from, rewrite_from)


@pytest.mark.parametrize(
    ("checkpoint", "queues_from", "rewrite_from"),
    [
        (NO_CHECKPOINT, 0, 0),
        (Checkpoint(logics_physical_offset=150), 150, 150),
        (Checkpoint(physic_msg_timestamp=23_000, logics_msg_timestamp=60_000), 100, 100),
        (Checkpoint(physic_msg_timestamp=22_999, logics_msg_timestamp=60_000), 0, 0),
        (Checkpoint(physic_msg_timestamp=60_000, logics_msg_timestamp=53_000), 200, 200),
        (Checkpoint(physic_msg_timestamp=60_000, logics_msg_timestamp=0), 0, 200),
    ],
)
def test_how_far_a_crash_start_goes_back(
    checkpoint: Checkpoint, queues_from: int, rewrite_from: int
) -> None:
    plan = planned(
        is_clean=False,
        files=FILES,
        newest_unit=290,
        index_end=120,
        checkpoint=checkpoint,
    )
    assert plan == plan_of(min(queues_from, 120), queues_from, 120, rewrite_from)


def test_a_crash_start_without_a_checkpoint_reads_all() -> None:
    plan = planned(
        is_clean=False,
        files=FILES,
        newest_unit=290,
        index_end=-1,
        checkpoint=NO_CHECKPOINT,
    )
    assert plan == plan_of(0, 0, 0, 0)


def test_a_clean_start_reads_from_the_newest_unit() -> None:
    plan = planned(
        is_clean=True,
        files=FILES,
        newest_unit=250,
        index_end=240,
        checkpoint=NO_CHECKPOINT,
    )
    assert plan == plan_of(250, 251, 251)


@pytest.mark.parametrize("is_clean", [True, False])
def test_an_empty_log_leaves_no_units(is_clean: bool) -> None:
    plan = planned(
        is_clean=is_clean,
        files=[],
        newest_unit=9,
        index_end=9,
        checkpoint=NO_CHECKPOINT,
    )
    assert plan == plan_of(0, 0, 0)


# --- cut and damaged tails -----------------------------------------------------------------


def fill(root: Path, count: int = 24) -> tuple[MessageStore, list[int]]:
    store = open_store(root)
    ends = []
    for number in range(count):
        put(store, store.queue("AB"[number % 2], 0), b"%d" % number * 60, KEYS=str(number))
        ends.append(store.commit_log.max_offset)
    return store, ends


def read_from(store: MessageStore, offset: int) -> list[int]:
    found: list[int] = []
    read_log(lambda some: found.extend(some.physical_offset.tolist()), store.commit_log, offset)
    return found


@pytest.mark.parametrize("is_clean", [False, True])
@pytest.mark.parametrize("inside", [0, 1])
@pytest.mark.parametrize("wanted", [0, 5, 12, 23, 24, 99])
def test_a_scan_gets_all_records_from_its_offset_on(
    wanted: int, inside: int, is_clean: bool, tmp_path: Path
) -> None:
    """In one pass with the takers, which need only some of them, or none."""
    store, _ = fill(tmp_path)
    store.flusher.flush_now()
    put(store, store.queue("C", 0))
    starts = read_from(store, 0)
    assert len(starts) == 25
    store.close() if is_clean else crash(store)
    offset = [*starts, NOTHING][min(wanted, 25)] + inside
    found: list[int] = []
    store = new_store(tmp_path)
    store.commit_log.scan_bytes = 500
    store.open()
    scan = Scan(lambda: offset, lambda some: found.extend(some.physical_offset.tolist()))
    store.recover((scan, Scan(lambda: NOTHING, lambda _some: pytest.fail("not wanted"))))
    assert found == starts[min(wanted, 25) + inside :]
    assert read_from(store, starts[3]) == starts[3:]
    assert read_from(store, store.commit_log.max_offset) == []
    assert contents(store)["C", 0] == [b"body"]
    store.close()


@pytest.mark.slow
def test_a_log_cut_anywhere_keeps_the_whole_records_before(tmp_path: Path) -> None:
    store, ends = fill(tmp_path / "full", 28)
    last_file = store.commit_log.files.files[-1].start_offset
    crash(store)
    for cut in (*range(ends[-2] - 1, ends[-1], 5), *range(ends[-1] - 7, ends[-1] + 1)):
        root = tmp_path / "cut"
        shutil.copytree(tmp_path / "full", root)
        with (root / "commitlog" / f"{last_file:020d}").open("r+b") as log:
            log.truncate(cut - last_file)
            log.truncate(4096)
        store = open_store(root)
        whole = sum(end <= cut for end in ends)
        assert store.commit_log.max_offset == ends[whole - 1]
        bodies = [b"%d" % number * 60 for number in range(whole)]
        assert contents(store) == {("A", 0): bodies[::2], ("B", 0): bodies[1::2]}
        assert len(query_index(store, "A", str((whole - 1) // 2 * 2), 9, 0, 1 << 62)) == 1
        crash(store)
        shutil.rmtree(root)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_damage_in_the_last_record_loses_that_one_only(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("store")
    store, ends = fill(root, 12)
    # Size, magic, CRC, physical offset or the body.
    positions = [*range(12), *range(28, 36), *range(88, 88 + 120)]
    at = ends[-2] + data.draw(st.sampled_from(positions))
    store.commit_log.files.files[0].map[at] ^= data.draw(st.integers(1, 255))
    crash(store)
    store = open_store(root)
    assert store.commit_log.max_offset == ends[-2]
    assert sum(map(len, contents(store).values())) == 11


@pytest.mark.parametrize("damaged", [0, 1, 20, 39])
def test_the_report_tells_what_a_cut_took(damaged: int, tmp_path: Path) -> None:
    store, ends = fill(tmp_path, 40)
    assert len(store.commit_log.files.files) > 1
    file = store.commit_log.files.find(ends[damaged] - 1)
    assert file
    file.map[ends[damaged] - 30 - file.start_offset] ^= 1  # in the body: the length still holds
    crash(store)
    store = MessageStore(small_settings(tmp_path), SetClock(), FaultyFiles())
    assert store.load().cut_count == 39 - damaged
    crash(store)
    store = MessageStore(small_settings(tmp_path), SetClock(), FaultyFiles())
    assert store.load().cut_count == 0


def test_what_a_cut_left_behind_does_not_come_back(tmp_path: Path) -> None:
    store, ends = fill(tmp_path, 5)
    store.commit_log.files.files[0].map[ends[1] + 90] ^= 1
    crash(store)
    store = open_store(tmp_path)
    assert store.commit_log.max_offset == ends[1]
    put(store, store.queue("A", 0), b"2" * 60, KEYS="2")  # as long as the damaged one
    assert store.commit_log.max_offset == ends[2]
    crash(store)
    store = open_store(tmp_path)
    assert store.commit_log.max_offset == ends[2]


@pytest.mark.parametrize("hole", range(0, 11 * 20, 7))
def test_a_queue_with_a_hole_is_made_anew(hole: int, tmp_path: Path) -> None:
    store, _ = fill(tmp_path, 22)
    wanted = contents(store)
    crash(store)
    path = tmp_path / "consumequeue" / "A" / "0" / f"{hole // 200 * 200:020d}"
    with path.open("r+b") as file:
        file.seek(hole % 200)
        file.write(bytes(min(9, 200 - hole % 200)))
    store = open_store(tmp_path)
    assert contents(store) == wanted


def test_units_are_made_again_however_many_files_ago_they_were_lost(tmp_path: Path) -> None:
    """Between two checkpoints small files can become many."""
    store, _ = fill(tmp_path, 3)
    store.flusher.flush_now()
    unit_bytes = (tmp_path / "consumequeue" / "A" / "0" / f"{0:020d}").read_bytes()
    while len(store.commit_log.files.files) < 15:
        put(store, store.queue("A", 0), KEYS="key")
    wanted = contents(store)
    crash(store)
    # The power cut leaves of the queue what was flushed.
    for path in sorted((tmp_path / "consumequeue" / "A" / "0").iterdir())[1:]:
        path.unlink()
    (tmp_path / "consumequeue" / "A" / "0" / f"{0:020d}").write_bytes(unit_bytes)
    store = open_store(tmp_path)
    assert contents(store) == wanted


@pytest.mark.parametrize("lost", ["consumequeue", "index", "checkpoint", "positions"])
def test_what_is_lost_is_made_from_the_log(lost: str, tmp_path: Path) -> None:
    store, _ = fill(tmp_path)
    store.flusher.flush_now()
    put(store, store.queue("A", 0), b"last", KEYS="last")
    wanted = contents(store)
    crash(store)
    path = tmp_path / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    store = open_store(tmp_path)
    assert contents(store) == wanted
    assert len(query_index(store, "A", "last", 9, 0, 1 << 62)) == 1
    assert len(query_index(store, "A", "0", 9, 0, 1 << 62)) == 1


def test_queues_without_a_log_are_emptied(tmp_path: Path) -> None:
    store, _ = fill(tmp_path, 3)
    store.close()
    shutil.rmtree(tmp_path / "commitlog")
    store = open_store(tmp_path)
    assert contents(store) == {}
    put(store, store.queue("A", 0))
    assert contents(store) == {("A", 0): [b"body"]}


@pytest.mark.parametrize("is_clean", [True, False])
def test_recovering_twice_changes_nothing(is_clean: bool, tmp_path: Path) -> None:
    store, _ = fill(tmp_path)
    store.close() if is_clean else crash(store)
    images = []
    for _ in range(2):
        store = open_store(tmp_path)
        store.close() if is_clean else crash(store)
        images.append(image(tmp_path))
    assert images[0] == images[1]


@pytest.mark.parametrize("blocks", [1, 7])
def test_an_interrupted_start_is_made_good_by_the_next(blocks: int, tmp_path: Path) -> None:
    store, _ = fill(tmp_path / "whole")
    crash(store)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    told: list[tuple[int, int]] = []

    def interrupt(stage: LoadStage, done: int, most: int) -> None:
        told.append((done, most))
        if stage is LoadStage.QUEUES:
            assert told == [(number, 2) for number in range(1, done + 1)]
        elif len(told) == 2 + blocks:
            raise LoadInterrupted("told to stop")

    interrupted = new_store(tmp_path / "cut")
    interrupted.commit_log.scan_bytes, interrupted.on_progress = 300, interrupt
    with pytest.raises(LoadInterrupted):
        interrupted.load()
    assert all(before < after for (before, _), (after, _) in pairwise(told[2:]))
    assert told[-1][0] < told[-1][1]
    queries = []
    for name in ("whole", "cut"):
        store = open_store(tmp_path / name)
        queries.append(
            [query_index(store, "A", str(number), 9, 0, 1 << 62) for number in range(40)]
        )
        crash(store)
    assert image(tmp_path / "cut") == image(tmp_path / "whole")
    assert queries[0] == queries[1]
    assert any(queries[0])


def test_an_empty_file_at_the_end_is_dropped(tmp_path: Path) -> None:
    store, ends = fill(tmp_path, 5)
    crash(store)
    made_ahead = tmp_path / "commitlog" / f"{4096:020d}"
    for content in (b"", bytes(4096)):
        made_ahead.write_bytes(content)
        store = open_store(tmp_path)
        assert store.commit_log.max_offset == ends[-1]
        assert not made_ahead.exists()
        crash(store)


def test_a_log_that_ends_with_its_file_goes_on_in_the_next(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    queue = store.queue("T", 0)
    put(store, queue, bytes(2000))
    put(store, queue, bytes(3000))
    assert store.commit_log.file_start == 4096
    crash(store)
    (tmp_path / "commitlog" / f"{4096:020d}").unlink()
    store = open_store(tmp_path)
    assert store.commit_log.max_offset == 4096
    put(store, store.queue("T", 0), b"after")
    assert [len(body) for body in contents(store)["T", 0]] == [2000, 5]


# --- records that need care ----------------------------------------------------------------


def write_log(root: Path, records: Iterable[dict[str, Any]]) -> None:
    (root / "commitlog").mkdir()
    raw = b""
    for fields in records:
        usual: dict[str, Any] = {"queue_id": 0, "born_host": HOST}
        raw += encode_record(**usual | fields, physical_offset=len(raw))
    (root / "commitlog" / f"{0:020d}").write_bytes(raw.ljust(4096, b"\0"))


def test_a_queue_offset_that_cannot_be_is_left_out(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"topic": "T", "body": b"%d" % number, "queue_offset": number} for number in (0, 1)
    ]
    records.append({"topic": "T", "body": b"wrong", "queue_offset": 1 << 50})
    records.append({"topic": "T", "body": b"2", "queue_offset": 2})
    write_log(tmp_path, records)
    store = open_store(tmp_path)
    assert contents(store) == {("T", 0): [b"0", b"1", b"2"]}


def test_a_topic_that_cannot_be_is_left_out(tmp_path: Path) -> None:
    topics = ["T", "../evil", "a/b", "T"]
    write_log(
        tmp_path,
        [
            {"topic": topic, "body": b"%d" % number, "queue_offset": number // 3}
            for number, topic in enumerate(topics)
        ],
    )
    store = open_store(tmp_path)
    assert contents(store) == {("T", 0): [b"0", b"3"]}


def test_a_queue_that_starts_late_begins_with_blank_units(tmp_path: Path) -> None:
    fillers = [{"topic": "U", "body": bytes(500), "queue_offset": n} for n in range(4)]
    write_log(
        tmp_path,
        [*fillers, *({"topic": "T", "body": b"%d" % n, "queue_offset": n} for n in (13, 14, 17))],
    )
    store = open_store(tmp_path)
    queue = store.queue("T", 0)
    assert (store.source(queue).min_offset(), store.source(queue).max_offset()) == (13, 18)
    assert contents(store)["T", 0] == [b"13", b"14", b"17"]
    unit = struct.Struct(">qiq")
    first = (tmp_path / "consumequeue" / "T" / "0" / f"{200:020d}").read_bytes()
    assert [unit.unpack_from(first, at * 20) for at in range(3)] == [(0, 0x7FFFFFFF, 0)] * 3


def test_a_topic_made_again_begins_anew(tmp_path: Path) -> None:
    lives = [("old", 3), ("new", 2)]
    write_log(
        tmp_path,
        [
            {"topic": "T", "body": f"{life}{number}".encode(), "queue_offset": number}
            for life, count in lives
            for number in range(count)
        ],
    )
    store = open_store(tmp_path)
    assert contents(store) == {("T", 0): [b"new0", b"new1"]}


def with_checksum(record: bytes) -> bytes:
    """A record whose properties end with room for its checksum, with that checksum in it."""
    value = zlib.crc32(record[:-20]) & 0x7FFFFFFF
    return record[:-11] + f"{value:010d}"[::-1].encode() + b"\x02"


@pytest.mark.parametrize("damaged_at", [None, 40, 60, 110])
def test_a_records_own_checksum_covers_all_of_it(damaged_at: int | None, tmp_path: Path) -> None:
    """Reconsume times, store host and properties are not covered by the body's CRC."""
    slot = b"__CRC32#\x010000000000\x02"
    fields: dict[str, Any] = {"topic": "T", "queue_id": 0, "born_host": HOST, "body": b"body"}
    raw = b""
    for number, properties in enumerate(
        (b"a\x01b\x02" * 9 + slot, slot, b"x__CRC32#\x01123456789\x02")
    ):
        record = encode_record(
            **fields, queue_offset=number, properties=properties, physical_offset=len(raw)
        )
        raw += record if number == 2 else with_checksum(record)
    if damaged_at is not None:
        raw = raw[:damaged_at] + bytes([raw[damaged_at] ^ 4]) + raw[damaged_at + 1 :]
    (tmp_path / "commitlog").mkdir()
    (tmp_path / "commitlog" / f"{0:020d}").write_bytes(raw.ljust(4096, b"\0"))
    store = open_store(tmp_path)
    assert store.source(store.queue("T", 0)).max_offset() == (3 if damaged_at is None else 0)


def test_scheduled_messages_get_their_due_time_as_tags_code(tmp_path: Path) -> None:
    write_log(
        tmp_path,
        [
            {
                "topic": "SCHEDULE_TOPIC_XXXX",
                "body": b"",
                "queue_id": 2,
                "queue_offset": number,
                "store_timestamp": 1000,
                "properties": encode_properties({"DELAY": level, "TAGS": "t"}),
            }
            for number, level in enumerate(["3", "99"])
        ],
    )
    store = open_store(tmp_path)
    queue = store.queue("SCHEDULE_TOPIC_XXXX", 2)
    assert queue.consume_queue.unit(0)[2] == 1000 + 10_000
    assert queue.consume_queue.unit(1)[2] == 1000 + 2 * 3600 * 1000


def test_topics_of_inner_batches_have_no_plain_queue(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for topic in ("Plain", "Batch"):
        put(store, store.queue(topic, 0), KEYS="k")
    store.close()
    shutil.rmtree(tmp_path / "consumequeue")
    shutil.rmtree(tmp_path / "index")
    (tmp_path / "abort").write_text("1")
    store = new_store(tmp_path)
    store.is_batch_topic = "Batch".__eq__
    store.load()
    assert list(contents(store)) == [("Plain", 0), ("Batch", 0)]
    assert [path.name for path in (tmp_path / "consumequeue").iterdir()] == ["Plain"]
    assert len(query_index(store, "Batch", "k", 9, 0, 1 << 62)) == 1


# --- index ---------------------------------------------------------------------------------


def test_an_index_file_is_kept_up_to_its_mark(tmp_path: Path) -> None:
    store, _ = fill(tmp_path, 30)
    store.index_tick()
    store.flusher.flush_now()
    mark = IndexMark.file(tmp_path, Files()).load()
    assert mark is not None
    assert mark.index_count == 30 - 19 + 1
    put(store, store.queue("A", 0), KEYS="after")
    store.index_tick()
    crash(store)
    store = open_store(tmp_path)
    assert len(store.index_files.files) == 2
    for number in range(30):
        found = query_index(store, "AB"[number % 2], str(number), 9, 0, 1 << 62)
        assert len(found) == 1, number
    assert len(query_index(store, "A", "after", 9, 0, 1 << 62)) == 1


def put_with_keys(store: MessageStore, count: int) -> None:
    first = store.queue("A", 0).next_offset
    for number in range(first, first + count):
        put(store, store.queue("A", 0), KEYS=f"key{number}")
    store.index_tick()


def test_an_index_file_that_was_full_after_the_mark_is_not_trusted(tmp_path: Path) -> None:
    """Its time does not tell that it was synced: the one before may have the same."""
    store = open_store(tmp_path)
    put_with_keys(store, 20)
    store.flusher.flush_now()
    put_with_keys(store, 20)
    first, second, _ = store.index_files.files
    assert second.is_full
    assert second.header.end_timestamp == first.header.end_timestamp
    crash(store)
    with second.file.path.open("r+b") as file:  # the page of its header was written back alone
        unsynced = file.seek(second.entries_at + 2 * ENTRY_BYTES)
        file.write(bytes(second.file.file_bytes - unsynced))
    store = open_store(tmp_path)
    for number in range(40):
        assert len(query_index(store, "A", f"key{number}", 9, 0, 1 << 62)) == 1, number


class EndsAtSecondRemoval(FaultyFiles):
    """The start is interrupted where it would remove a second file."""

    def __init__(self) -> None:
        super().__init__()
        self._removed_count = 0

    def unlink(self, path: Path) -> None:
        if self._removed_count:
            raise KeyboardInterrupt
        self._removed_count += 1
        super().unlink(path)


def test_index_files_are_removed_from_the_newest_on(tmp_path: Path) -> None:
    """A start that is cut off must not leave a gap, which nothing would tell from a whole index."""
    store = open_store(tmp_path)
    put_with_keys(store, 3 * 19)
    names = [index_file.file.path.name for index_file in store.index_files.files]
    crash(store)
    with pytest.raises(KeyboardInterrupt):
        open_store(tmp_path, files=EndsAtSecondRemoval())
    assert sorted(path.name for path in (tmp_path / "index").iterdir()) == names[:2]


class FailsFirstSync(FaultyFiles):
    """The first sync of the log fails; the kernel then takes its pages for clean."""

    def __init__(self) -> None:
        super().__init__()
        self.failed_in: int | None = None

    def sync(self, path: Path) -> None:
        if self.failed_in is None and path.parent.name == "commitlog":
            self.failed_in = threading.get_ident()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(path)


def test_a_sync_that_fails_while_the_log_is_read_ends_the_start(tmp_path: Path) -> None:
    store, _ = fill(tmp_path)
    crash(store)
    files = FailsFirstSync()
    store = new_store(tmp_path, files=files)
    store.use_threads, store.commit_log.scan_bytes = True, 300
    with pytest.raises(StoreError, match=os.strerror(errno.EIO)):
        store.load()
    assert files.failed_in not in {None, threading.get_ident()}


def test_whatever_ends_a_start_leaves_the_directory_unlocked(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, store.queue("A", 0))
    crash(store)

    def interrupt(_stage: LoadStage, _done: int, _most: int) -> None:
        raise KeyboardInterrupt

    ended = MessageStore(small_settings(tmp_path), SetClock(), FaultyFiles())
    ended.on_progress = interrupt
    with pytest.raises(KeyboardInterrupt):
        ended.load()
    store = open_store(tmp_path)
    assert len(read_all(store, store.queue("A", 0))) == 1


@pytest.mark.parametrize("is_clean", [True, False])
def test_queues_that_are_made_anew_are_whole_after_an_interruption(
    is_clean: bool, tmp_path: Path
) -> None:
    """The checkpoint spoke of the queues that were removed, not of the half that is there now."""
    store, _ = fill(tmp_path)
    store.flusher.flush_now()
    store.close() if is_clean else crash(store)
    shutil.rmtree(tmp_path / "consumequeue")

    def interrupt(_stage: LoadStage, _done: int, _most: int) -> None:
        raise LoadInterrupted("told to stop")

    interrupted = new_store(tmp_path)
    interrupted.commit_log.scan_bytes, interrupted.on_progress = 300, interrupt
    with pytest.raises(LoadInterrupted):
        interrupted.load()
    assert (tmp_path / "consumequeue").exists()  # some units are there
    store = open_store(tmp_path)
    assert [len(read_all(store, store.queue(topic, 0))) for topic in "AB"] == [12, 12]


@pytest.mark.parametrize(("is_clean", "has_queues"), [(True, False), (False, True), (False, False)])
def test_what_a_long_start_made_is_not_made_again(
    is_clean: bool, has_queues: bool, tmp_path: Path
) -> None:
    """Each minute it is brought to disk, and the checkpoint moves."""
    store, ends = fill(tmp_path / "whole")
    store.close() if is_clean else crash(store)
    if not has_queues:
        shutil.rmtree(tmp_path / "whole/consumequeue")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    clock = SetClock()
    synced: list[str] = []

    def interrupt(stage: LoadStage, done: int, _most: int) -> None:
        clock.ms += 30_000
        if stage is LoadStage.LOG and done >= ends[-1] // 2:
            synced[:] = files.synced
            raise LoadInterrupted("told to stop")

    files = FaultyFiles()
    interrupted = new_store(tmp_path / "cut", clock, files)
    interrupted.commit_log.scan_bytes, interrupted.on_progress = 300, interrupt
    with pytest.raises(LoadInterrupted):
        interrupted.load()
    # The log before what speaks of it, the checkpoint last.
    positions = [path.removeprefix(f"{tmp_path}/cut/").partition("/")[0] for path in synced]
    assert positions.index("commitlog") < positions.index("consumequeue")
    assert "checkpoint.tmp" in positions[-2:]
    starts, queries = [], []
    for name in ("whole", "cut"):
        store = new_store(tmp_path / name)
        store.commit_log.scan_bytes = 300
        starts.append(store.load().scanned_from)
        queries.append(
            [query_index(store, "A", str(number), 9, 0, 1 << 62) for number in range(40)]
        )
        crash(store)
    assert starts[0] == 0 < ends[-1] // 4 < starts[1]
    assert queries[0] == queries[1]
    assert image(tmp_path / "cut") == image(tmp_path / "whole")


@pytest.mark.parametrize("keys", ["", "key"])
def test_what_was_looked_at_for_keys_is_not_read_again(keys: str, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, store.queue("A", 0), KEYS=keys)
    for _ in range(50):
        last = put(store, store.queue("A", 0))
    store.index_tick()
    store.flusher.flush_now()
    crash(store)
    for _ in range(2):  # the second one goes by what the first one noted
        store = MessageStore(small_settings(tmp_path), SetClock(), FaultyFiles())
        assert store.load().scanned_from == last
        assert len(query_index(store, "A", "key", 9, 0, 1 << 62)) == bool(keys)
        crash(store)


def test_a_cut_checkpoint_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    assert Checkpoint.load(path) == Checkpoint()
    path.write_bytes(bytes(7))
    assert Checkpoint.load(path) == Checkpoint()
    Checkpoint(1, 2, 3, 4, 5, 6).save(path, Files())
    assert Checkpoint.load(path) == (1, 2, 3, 4, 5, 6)


# --- a killed process ----------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from tests.support.stores import open_store, put
store = open_store(Path(sys.argv[1]), commit_log_file_bytes=1 << 16)
queues = [store.queue("T", number) for number in range(3)]
number = 0
while True:
    for queue in queues:
        put(store, queue, b"%d" % number * 20, KEYS=str(number))
        number += 1
    sys.stdout.write(f"{number}\\n")
    sys.stdout.flush()
"""


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 200])
def test_a_killed_writer_loses_nothing_it_reported(lines: int, tmp_path: Path) -> None:
    root = tmp_path / "store"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        for _ in range(lines):
            reported = int(writer.stdout.readline())
        os.kill(writer.pid, signal.SIGKILL)
    store = open_store(root, SetClock(), commit_log_file_bytes=1 << 16)
    found = sorted(
        int(m.properties["KEYS"]) for n in range(3) for m in read_all(store, store.queue("T", n))
    )
    assert found == list(range(len(found)))
    assert len(found) >= reported
    assert len(query_index(store, "T", str(reported - 1), 9, 0, 1 << 62)) == 1


def test_the_smallest_settings_are_checked() -> None:
    from pathlib import Path

    with pytest.raises(ValueError, match="ring_rows 63 is not a power of two"):
        small_settings(Path(), ring_rows=63)
    with pytest.raises(ValueError, match="consume_queue_file_bytes 30 is not a multiple of 20"):
        small_settings(Path(), consume_queue_file_bytes=30)
