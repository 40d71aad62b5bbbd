"""Rows read back from the log are those that the appends put in the ring."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from headrace_broker.store.files.cold_files import ColdFiles
from headrace_broker.store.log.batch_records import Origin
from headrace_broker.store.log.encoded_records import EncodedRecords
from headrace_broker.store.log.log_blocks import checked, walk
from headrace_broker.store.log.log_rows import LogRows, LogScan
from headrace_broker.store.log.ring import ROW_DTYPE, Rows, message_counts
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.store_queue import StoreQueue
from headrace_protocol.columns import RecordColumns
from headrace_protocol.java_hash import tags_code_of
from headrace_protocol.message import (
    INNER_BATCH,
    TRANSACTION_COMMIT,
    TRANSACTION_PREPARED,
    TRANSACTION_ROLLBACK,
    encode_batch,
    encode_properties,
    encode_record,
)
from headrace_protocol.message_ids import encode_host
from headrace_protocol.system_topics import SCHEDULE_TOPIC
from tests.support.batches import block
from tests.support.stores import HOST, SetClock, open_store

TOPICS = ("T", "Téléphone", "x" * 200, SCHEDULE_TOPIC)
HOSTS = (HOST, encode_host("::1", 1))
RING_ROWS = 4096


class Producer:
    """Appends messages of all kinds that a seed chooses."""

    def __init__(self, store: MessageStore, clock: SetClock, rng: Random) -> None:
        self.store = store
        self.clock = clock
        self.rng = rng

    def send(self) -> None:
        """One request."""
        self.clock.ms += self.rng.choice((0, 1, 300))
        self.store.write_path.begin()
        queue = self.store.queue(self.rng.choice(TOPICS), self.rng.randrange(3))
        if queue.topic == SCHEDULE_TOPIC:
            self.send_delayed(queue)
        else:
            self.rng.choice((self.send_one, self.send_each, self.send_batch, self.send_encoded))(
                queue
            )
        self.store.write_path.commit()

    def properties(self) -> bytes:
        names = self.rng.sample(("TAGS", "KEYS", "UNIQ_KEY", "PGROUP"), self.rng.randrange(5))
        return encode_properties({name: self.rng.choice("abc") * 3 for name in names})

    def body(self) -> bytes:
        return self.rng.randbytes(self.rng.choice((0, 1, 30, 300)))

    def send_one(self, queue: StoreQueue) -> None:
        kinds = (0, TRANSACTION_PREPARED, TRANSACTION_COMMIT, TRANSACTION_ROLLBACK)
        raw = self.properties()
        self.store.write_path.append(
            (
                queue,
                self.body(),
                raw,
                tags_code_of(raw),
                self.rng.randrange(9),
                self.rng.choice(kinds),
                7,
                self.rng.randrange(3),
            ),
            self.rng.choice(HOSTS),
        )

    def send_delayed(self, queue: StoreQueue) -> None:
        """As delivery of delayed messages reads them: the units hold the delivery time."""
        levels_ms = self.store.settings.delay_levels_ms
        level = self.rng.choice(("1", "18", "99", "0", "x", ""))
        raw = encode_properties({"DELAY": level, "TAGS": "a"} if level else {"TAGS": "a"})
        code = tags_code_of(raw)
        if level in {"1", "18", "99"}:
            code = self.store.commit_log.now_ms + levels_ms[min(int(level), len(levels_ms)) - 1]
        self.store.write_path.append((queue, self.body(), raw, code, 0, 0, 7, 0), HOST)

    def send_each(self, queue: StoreQueue) -> None:
        messages: list[Any] = []
        for _ in range(self.rng.randrange(1, 5)):
            raw = self.properties()
            messages.append((queue, self.body(), raw, tags_code_of(raw), 0, 0, 7, 0))
        self.store.write_path.append_each(messages, self.rng.choice(HOSTS))

    def send_batch(self, queue: StoreQueue) -> None:
        items = [(0, self.body(), self.properties()) for _ in range(self.rng.randrange(1, 20))]
        self.store.write_path.append_batch(queue, encode_batch(items), 0, Origin(7, HOST))

    def send_encoded(self, queue: StoreQueue) -> None:
        if len(queue.topic) > 100 or self.store.commit_log.store_flag:
            return
        bodies = [self.body() for _ in range(self.rng.randrange(1, 20))]
        properties = [self.properties() for _ in bodies]
        encoded = block(*bodies, topic=queue.topic, properties=properties)
        self.store.write_path.append_records(EncodedRecords(queue, *encoded))


def as_columns(rows: Rows) -> dict[str, list[int]]:
    return {name: rows[name].tolist() for name in ROW_DTYPE.names or ()}


def scan(store: MessageStore) -> list[RecordColumns]:
    """As a start reads it."""
    return [block.columns for block in LogScan(store.commit_log.files.files, 0, 1 << 20)]


def scan_cold(store: MessageStore) -> list[RecordColumns]:
    """As a thread reads it: file by file from the disk."""
    columns = []
    cold = ColdFiles(store.commit_log.files)
    for file in store.commit_log.files.files:
        data = cold.read(file.start_offset, file.file_bytes)
        found, _, _ = checked(data, *walk(data), file.start_offset)
        columns += [found.columns] if found else []
    return columns


@pytest.mark.parametrize("read", [scan, scan_cold])
@pytest.mark.parametrize("store_host", HOSTS, ids=["IPv4", "IPv6"])
@pytest.mark.parametrize("appends_checksums", [False, True], ids=["plain", "checksums"])
def test_rows_from_the_log_are_those_of_the_appends(
    tmp_path: Path, read: Any, store_host: bytes, appends_checksums: bool
) -> None:
    seed = Random().getrandbits(32)
    clock = SetClock()
    store = open_store(
        tmp_path,
        clock,
        commit_log_file_bytes=1 << 16,
        ring_rows=RING_ROWS,
        store_host=store_host,
        appends_checksums=appends_checksums,
    )
    producer = Producer(store, clock, Random(seed))
    for _ in range(150):
        producer.send()
    appended = store.ring.copy(slice(0, store.ring.written))
    log_rows = LogRows(store.queue, store.settings.delay_levels_ms, {})
    found = [log_rows.rows(columns) for columns in read(store)]
    read_back = np.concatenate([rows for rows, _ in found])
    assert as_columns(read_back) == as_columns(appended), f"seed {seed}"
    for rows, queues in found:
        assert queues == {key: store.queues[key] for key in rows["queue_key"].tolist()}
    assert len(store.commit_log.files.files) > 1


def records(*names: tuple[str, int]) -> RecordColumns:
    return RecordColumns.from_records(
        b"".join(
            encode_record(topic=topic, queue_id=queue_id, body=b"a", properties=b"")
            for topic, queue_id in names
        )
    )


def test_records_of_queues_that_no_folder_can_have_get_no_row(store: MessageStore) -> None:
    log_rows = LogRows(store.queue, store.settings.delay_levels_ms, {})
    columns = records(("A", 0), ("..", 0), ("B", 1), ("a/b", 0), ("A", 0))
    rows, queues = log_rows.rows(columns)
    assert [queues[key].topic for key in rows["queue_key"].tolist()] == ["A", "B", "A"]
    nothing, none = log_rows.rows(records(("..", 0)))
    assert (len(nothing), none) == (0, {})


def test_a_queue_made_again_is_found_by_its_new_key(store: MessageStore) -> None:
    """At run time topics come and go, so nothing may be remembered from block to block."""
    log_rows = LogRows(store.queue, store.settings.delay_levels_ms, {})
    columns = records(("A", 0))
    log_rows.rows(columns)
    store.delete_topic("A")
    store.queue("B", 0)
    rows, queues = log_rows.rows(columns)
    assert queues[int(rows["queue_key"][0])] is store.find_queue("A", 0)


def test_rows_of_batch_queues_state_a_count(store: MessageStore) -> None:
    store.is_batch_topic = "B".__eq__
    log_rows = LogRows(store.queue, store.settings.delay_levels_ms, {})
    rows, _ = log_rows.rows(records(("A", 0), ("B", 0), ("A", 0)))
    assert (rows["sys_flag"] & INNER_BATCH != 0).tolist() == [False, True, False]
    assert message_counts(rows["sys_flag"]).tolist() == [1, 1, 1]


def test_a_batch_in_a_plain_queue_gets_no_unit(store: MessageStore) -> None:
    log_rows = LogRows(store.queue, store.settings.delay_levels_ms, {})
    record = encode_record(topic="A", queue_id=0, body=b"a", sys_flag=INNER_BATCH | 0x70000)
    rows, _ = log_rows.rows(RecordColumns.from_records(record))
    assert message_counts(rows["sys_flag"]).tolist() == [0]
