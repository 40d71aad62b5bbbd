"""A batch request's items as records: every layout gives what single appends give."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_broker.store.log.batch_records import BatchRecords, Origin, Stamp
from headrace_broker.store.log.ring import ROW_DTYPE
from headrace_broker.store.log.uniform_batch import UniformBatch
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.store_queue import StoreQueue
from headrace_protocol.errors import CorruptRecord
from headrace_protocol.java_hash import tags_code_of
from headrace_protocol.message import (
    BATCH_ITEMS_MAX,
    MULTI_TAGS,
    StoredMessage,
    encode_batch,
    encode_properties,
    host_flags,
)
from headrace_protocol.message_ids import encode_host
from tests.support.batches import iter_batch
from tests.support.stores import HOST, open_store, read_all, units_from

Item = tuple[int, bytes, bytes]

FLAGS = st.integers(-(2**31), 2**31 - 1)
PROPERTIES = st.dictionaries(
    st.sampled_from(["TAGS", "KEYS", "UNIQ_KEY"]), st.text("ab", min_size=1)
).map(encode_properties)
ITEMS = st.lists(st.tuples(FLAGS, st.binary(max_size=80), PROPERTIES), min_size=1, max_size=20)
TAGS = st.sampled_from([b"A", b"B"])


@st.composite
def alike(draw: st.DrawFn) -> list[Item]:
    """Items of one layout; their tags and flags may differ all the same."""
    body_bytes = draw(st.integers(0, 40))
    start = draw(st.sampled_from([b"", b"KEYS\x01k\x02", b"K\x01TAGS\x02"]))
    bodies = draw(
        st.lists(st.binary(min_size=body_bytes, max_size=body_bytes), min_size=1, max_size=20)
    )
    flags = draw(st.sampled_from([st.just(draw(FLAGS)), FLAGS]))
    return [
        (draw(flags), body, start + b"TAGS\x01" + draw(TAGS) + b"\x02" if start else b"")
        for body in bodies
    ]


HOSTS = st.sampled_from([HOST, encode_host("::1", 1)])
NAMES = [name for name in StoredMessage.__slots__ if not name.startswith("_")]


def stored(store: MessageStore) -> tuple[list[list[object]], list[tuple[int, int, int]]]:
    """Records, field by field, and ConsumeQueue units."""
    store.write_path.publish()
    queue = store.queue("T", 2)
    records = [[getattr(message, name) for name in NAMES] for message in read_all(store, queue)]
    return records, units_from(queue.consume_queue, 0)


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(st.one_of(ITEMS, alike()), max_size=4), HOSTS, HOSTS, st.booleans())
def test_a_batch_is_stored_as_its_items_would_be(
    batches: list[list[Item]], born_host: bytes, store_host: bytes, appends_checksums: bool
) -> None:
    results = []
    for is_batch in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            store = open_store(
                Path(folder),
                store_host=store_host,
                commit_log_file_bytes=1 << 16,
                ring_rows=128,  # for all that is put before it is dispatched
                appends_checksums=appends_checksums,
            )
            queue = store.queue("T", 2)
            physical_offsets = []
            for items in batches:
                if is_batch:
                    body = memoryview(encode_batch(items))
                    _, offsets = store.write_path.append_batch(
                        queue, body, 2, Origin(7, born_host, 1)
                    )
                    physical_offsets += offsets.tolist()
                else:
                    physical_offsets += [
                        store.write_path.append(
                            (queue, body, raw, tags_code_of(raw), flag, 2, 7, 1), born_host
                        )
                        for flag, body, raw in items
                    ]
            results.append((physical_offsets, *stored(store)))
            store.close()
    assert results[0] == results[1]


@pytest.mark.slow
@settings(max_examples=300)
@given(st.one_of(ITEMS, alike()), st.data())
def test_a_damaged_batch_is_refused_or_another_batch(
    store_queue: StoreQueue, items: list[Item], data: st.DataObject
) -> None:
    raw = bytearray(encode_batch(items))
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))]
    try:
        expected = [tags_code_of(properties) for _, _, properties in iter_batch(bytes(raw))]
    except CorruptRecord:
        expected = []
    if expected:
        records = BatchRecords(bytes(raw), 0, store_queue)
        assert records.rows["tags_code"].tolist() == expected
    else:
        with pytest.raises(CorruptRecord):
            BatchRecords(bytes(raw), 0, store_queue)


@pytest.mark.parametrize(
    ("items", "is_uniform"),
    [
        ([(7, b"one", b"TAGS\x01A\x02"), (7, b"two", b"TAGS\x01B\x02")], True),
        ([(7, b"one", b"")] * 3, True),
        ([(7, b"one", b"K\x01#G\x02")], True),
        ([(7, b"one", b""), (8, b"two", b"")], False),
        ([(7, b"one", b""), (7, b"three", b"")], False),
        ([(7, b"one", b"K\x01vw\x02"), (7, b"twoo", b"K\x01v\x02")], False),
        ([(7, b"one", b"K\x01v")] * 2, False),
        ([(7, b"", b"K\x01v\x02")] * 2, False),
        ([(7, b"one", b"__CRC32#\x010123456789\x02")] * 2, False),
        ([(7, b"o", b"")] * (BATCH_ITEMS_MAX + 1), False),
    ],
)
def test_only_items_of_one_layout_are_uniform(
    store_queue: StoreQueue, items: list[Item], is_uniform: bool
) -> None:
    batch = UniformBatch.of(memoryview(encode_batch(items)), 0, store_queue)
    assert (batch is not None) == is_uniform


@pytest.mark.slow
@settings(max_examples=300)
@given(alike(), HOSTS, HOSTS, st.data())
def test_a_uniform_batch_gives_the_records_and_rows_of_any_batch(
    store_queue: StoreQueue,
    items: list[Item],
    born_host: bytes,
    store_host: bytes,
    data: st.DataObject,
) -> None:
    raw = bytearray(encode_batch(items))
    if data.draw(st.booleans()):  # damage, which mostly is no uniform batch any more
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    sys_flag = data.draw(st.sampled_from([0, MULTI_TAGS])) | host_flags(born_host, store_host)
    uniform = UniformBatch.of(bytes(raw), sys_flag, store_queue)
    if uniform is not None:
        found = []
        for records in (uniform, BatchRecords(bytes(raw), sys_flag, store_queue)):
            block = records.encode(Stamp(5, 1 << 33, 77, store_host, Origin(7, born_host, 1)))
            rows = np.zeros(records.count, ROW_DTYPE)
            records.fill(rows)
            physical_offsets = records.physical_offsets.tolist()
            found.append((bytes(block), rows.tobytes(), physical_offsets, records.total_bytes))
        assert found[0] == found[1]


@pytest.fixture(scope="module")
def store_queue(tmp_path_factory: pytest.TempPathFactory) -> StoreQueue:
    return open_store(tmp_path_factory.mktemp("store")).queue("T", 0)


def test_a_checksum_that_only_the_store_may_write_is_refused(store_queue: StoreQueue) -> None:
    items = [(0, b"a", b""), (0, b"a", b"x\x01y\x02__CRC32#\x010123456789\x02")]
    for batch in (items, items[1:]):
        with pytest.raises(CorruptRecord, match="reserved for the store"):
            BatchRecords(encode_batch(batch), 0, store_queue)
