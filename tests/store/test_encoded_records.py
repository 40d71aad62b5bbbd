"""Records that a producer encoded are stored as single ones would be, or not at all."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_broker.store.errors import RecordTooLarge, StoreBusy
from headrace_broker.store.log.encoded_records import EncodedRecords
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.store_queue import StoreQueue
from headrace_protocol.blocks import encode_records
from headrace_protocol.compression import COMPRESSED, COMPRESSION_ZLIB
from headrace_protocol.errors import CorruptRecord
from headrace_protocol.java_hash import tags_code_of
from headrace_protocol.message import (
    INNER_BATCH,
    MULTI_TAGS,
    TRANSACTION_PREPARED,
    StoredMessage,
    encode_properties,
    encode_record,
)
from headrace_protocol.message_ids import encode_host
from tests.support.stores import HOST, FaultyFiles, open_store, read_all, units_from

ITEMS = st.lists(
    st.tuples(
        st.integers(-(2**31), 2**31 - 1),
        st.binary(max_size=80),
        st.dictionaries(st.sampled_from(["TAGS", "KEYS"]), st.text("ab", min_size=1)).map(
            encode_properties
        ),
    ),
    min_size=1,
    max_size=20,
)
FIELDS = [name for name in StoredMessage.__slots__ if not name.startswith("_")]


def request_body(records: list[bytes]) -> bytes:
    return struct.pack(f">{len(records)}i", *map(len, records)) + b"".join(records)


def encoded(items: list[tuple[int, bytes, bytes]], **changes: Any) -> list[bytes]:
    common = {"topic": "T", "queue_id": 0, "born_timestamp": 7, "born_host": HOST}
    return [
        encode_record(**{**common, "flag": flag, "body": body, "properties": raw, **changes})
        for flag, body, raw in items
    ]


def put_block(store: MessageStore, queue: StoreQueue, records: list[bytes]) -> tuple[int, int]:
    body = request_body(records)
    return store.write_path.append_records(EncodedRecords(queue, len(records), body))


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.lists(ITEMS, max_size=4), st.integers(1, 3), st.booleans(), st.booleans())
def test_a_block_is_stored_as_single_records_would_be(
    blocks: list[list[tuple[int, bytes, bytes]]],
    times: int,
    is_writable: bool,
    appends_checksums: bool,
) -> None:
    seen = []
    for is_block in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            store = open_store(
                Path(folder),
                commit_log_file_bytes=1 << 16,
                ring_rows=1024,
                appends_checksums=appends_checksums,
            )
            queue = store.queue("T", 2)
            for items in [items * times for items in blocks]:
                first, end = queue.next_offset, store.commit_log.max_offset
                if is_block:
                    body = request_body(encoded(items))
                    buffer = bytearray(body) if is_writable else body
                    records = EncodedRecords(queue, len(items), buffer)
                    assert records.body_bytes == sum(len(body) for _, body, _ in items)
                    assert records.distinct_properties == {raw for _, _, raw in items}
                    assert store.write_path.append_records(records) == (first, end)
                else:
                    for flag, body, raw in items:
                        store.write_path.append(
                            (queue, body, raw, tags_code_of(raw), flag, 0, 7, 0), HOST
                        )
                store.write_path.publish()
            units = units_from(queue.consume_queue, 0)
            messages = read_all(store, queue)
            seen.append(([[getattr(m, name) for name in FIELDS] for m in messages], units))
            store.close()
    assert seen[0] == seen[1]


def test_what_the_producer_left_open_is_filled_in_whatever_stands_there(
    store: MessageStore,
) -> None:
    queue = store.queue("T", 1)
    junk = {
        "queue_id": 9,
        "queue_offset": -5,
        "physical_offset": 77,
        "store_timestamp": 1,
        "store_host": encode_host("9.9.9.9", 9),
    }
    put_block(store, queue, encoded([(1, b"a", b""), (2, b"bb", b"")], **junk))
    store.write_path.publish()
    first, second = read_all(store, queue)
    assert (first.queue_id, first.queue_offset, first.physical_offset) == (1, 0, 0)
    assert (second.queue_id, second.queue_offset, second.physical_offset) == (1, 1, first.size)
    assert {m.store_host for m in (first, second)} == {store.settings.store_host}
    assert {m.store_timestamp for m in (first, second)} == {store.commit_log.now_ms}


def test_the_topic_adds_its_flags(store: MessageStore, queue: StoreQueue) -> None:
    flags = [0, COMPRESSED | COMPRESSION_ZLIB]
    block = encode_records("T", [b"a", b"b"], b"", born_timestamp=0, born_host=HOST, sys_flag=flags)
    store.write_path.append_records(EncodedRecords(queue, 2, block.body, MULTI_TAGS))
    store.write_path.publish()
    assert [m.sys_flag for m in read_all(store, queue)] == [flag | MULTI_TAGS for flag in flags]


RECORD = encoded([(0, b"body", b"k\x01v\x02")])[0]
BODY = request_body([RECORD, RECORD])


def sizes(*numbers: int) -> bytes:
    return struct.pack(f">{len(numbers)}i", *numbers)


@pytest.mark.parametrize(
    ("count", "body", "reason"),
    [
        (2, b"", "0 bytes are not 2 sizes"),
        (2, BODY[:7], "7 bytes are not 2 sizes"),
        (2, BODY[:8], "8 bytes are not 2 sizes"),
        (0, BODY, "are not 0 sizes"),
        (-1, BODY, "are not -1 sizes"),
        (2, BODY[:-1], "sizes of"),
        (2, BODY + b"x", "sizes of"),
        (1, BODY, "sizes of"),
        (3, BODY, "sizes of"),
        (2, sizes(2 * len(RECORD), 0) + RECORD * 2, "within"),
        (2, sizes(len(RECORD) + 1, len(RECORD) - 1) + RECORD * 2, "size differs"),
        (2, sizes(3 * len(RECORD), -len(RECORD)) + RECORD * 2, "within"),
        (2, sizes(-(2**31), 2**31 - 1) + b"x", "sizes of"),
    ],
)
def test_wrong_sizes_are_refused(count: int, body: bytes, reason: str, store: MessageStore) -> None:
    with pytest.raises(CorruptRecord, match=reason):
        EncodedRecords(store.queue("T", 0), count, body)


GOOD = (0, b"a", b"")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (encoded([GOOD], topic="U")[0], "of topic T"),
        (encoded([GOOD], topic="TT")[0], "of topic T"),
        (encoded([GOOD], topic="t" * 200)[0], "not a V1 record"),
        (encoded([GOOD], born_host=bytes(20))[0], "sysFlag"),
        (encoded([GOOD], store_host=bytes(20))[0], "sysFlag"),
        (encoded([GOOD], sys_flag=TRANSACTION_PREPARED)[0], "sysFlag"),
        (encoded([GOOD], sys_flag=INNER_BATCH)[0], "sysFlag"),
        (encoded([(0, b"a", b"__CRC32#\x010123456789\x02")])[0], "reserved for the store"),
        (RECORD[:88] + b"B" + RECORD[89:], "CRC"),
        (RECORD[:-5] + b"\0" + RECORD[-4:], "properties"),
        (RECORD[:-1] + b"x", "separator"),
        (RECORD[:-1] + b"\0", "separator"),
        (RECORD[:7] + b"!" + RECORD[8:], "magic"),
        (RECORD[:84] + b"\xff" + RECORD[85:], "body length"),
        (RECORD[:92] + b"\xff" + RECORD[93:], "topic length"),
    ],
)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_one_wrong_record_is_named_and_refuses_all(
    record: bytes, reason: str, number: int, store: MessageStore, queue: StoreQueue
) -> None:
    records = [RECORD] * 2
    records.insert(number, record)
    with pytest.raises(CorruptRecord, match=reason) as caught:
        put_block(store, queue, records)
    if "of topic" not in reason and "reserved" not in reason:
        assert caught.value.position == number * len(RECORD)
    assert (queue.next_offset, store.commit_log.max_offset) == (0, 0)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_damage_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    body = bytearray(request_body([RECORD] * 3))
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    store = open_store(tmp_path_factory.mktemp("store"))
    queue = store.queue("T", 0)
    try:
        store.write_path.append_records(EncodedRecords(queue, 3, body))
    except CorruptRecord:
        assert queue.next_offset == 0
    else:
        store.write_path.publish()
        assert [m.queue_offset for m in read_all(store, queue)] == [0, 1, 2]


def test_a_block_goes_whole_to_the_next_file(store: MessageStore, queue: StoreQueue) -> None:
    put_block(store, queue, encoded([(0, bytes(1000), b"")] * 2))
    assert put_block(store, queue, encoded([(0, bytes(1000), b"")] * 2)) == (2, 4096)
    with pytest.raises(RecordTooLarge, match="record has"):
        put_block(store, queue, encoded([(0, bytes(1000), b"")] * 4))
    store.write_path.publish()
    assert len(read_all(store, queue)) == 4


def test_a_body_over_the_limit_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path, body_bytes_max=99)
    queue = store.queue("T", 0)
    put_block(store, queue, encoded([(0, bytes(99), b""), (0, bytes(99), b"")]))
    with pytest.raises(RecordTooLarge, match="body has 100 bytes, more than 99"):
        put_block(store, queue, encoded([(0, b"", b""), (0, bytes(100), b"")]))
    assert queue.next_offset == 2


def test_blocks_that_fill_the_ring_are_dispatched_to_make_room(tmp_path: Path) -> None:
    store = open_store(tmp_path, commit_log_file_bytes=1 << 16)
    touched: list[StoreQueue] = []
    store.write_path.on_published(touched.extend)
    queue = store.queue("T", 0)
    block = encoded([(0, b"", b"KEYS\x01k\x02")] * 40)
    assert put_block(store, queue, block)[0] == 0
    assert put_block(store, queue, block)[0] == 40
    assert touched == [queue]
    with pytest.raises(StoreBusy):
        put_block(store, queue, encoded([(0, b"", b"")] * 65))
    store.write_path.publish()
    assert len(read_all(store, queue)) == 80


def test_a_full_disk_refuses_and_heals(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files, commit_log_file_bytes=1 << 16)
    queue = store.queue("T", 0)
    put_block(store, queue, encoded([(0, b"", b"KEYS\x01k\x02")] * 40))
    files.is_full = True
    with pytest.raises(StoreBusy):
        put_block(store, queue, encoded([(0, b"", b"KEYS\x01k\x02")] * 40))
    files.is_full = False
    store.commit_log.resume()
    put_block(store, queue, encoded([(0, b"", b"")] * 40))
    store.write_path.publish()
    assert len(read_all(store, queue)) == 80
