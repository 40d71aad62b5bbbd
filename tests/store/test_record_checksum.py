"""With enabledAppendPropCRC every record ends with a checksum of all of it, however it came."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace_broker.staging.blocks import StagedBlock, StagedRecords
from headrace_broker.store.errors import RecordTooLarge
from headrace_broker.store.log.batch_records import Origin
from headrace_broker.store.log.encoded_records import EncodedRecords
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store_tools.directory import open_directory
from headrace_broker.store_tools.fsck import check
from headrace_protocol.blocks import encode_records
from headrace_protocol.errors import CorruptRecord
from headrace_protocol.message import (
    PROPERTIES_BYTES_MAX,
    decode_records,
    encode_batch,
    encode_properties,
)
from tests.support.stores import HOST, crash, open_store, query_index, read_all, small_settings

LARGE: dict[str, Any] = {
    "commit_log_file_bytes": 1 << 17,
    "body_bytes_max": 1 << 16,
    "ring_rows": 1024,
}
PROPERTIES = encode_properties({"KEYS": "k", "TAGS": "t"})
BODIES = [b"one", b"two two", b"", b"four"]
ALIKE = [b"abc", b"xyz"]


def one_by_one(store: MessageStore, bodies: list[bytes], properties: bytes = PROPERTIES) -> None:
    queue = store.queue("T", 0)
    for body in bodies:
        store.write_path.append((queue, body, properties, 0, 0, 0, 1, 0), HOST)


def all_of_a_recv(store: MessageStore, bodies: list[bytes], properties: bytes = PROPERTIES) -> None:
    """As the processor does: the general way makes room for the fast one."""
    queue = store.queue("T", 0)
    messages = [(queue, body, properties, 0, 0, 0, 1, 0) for body in bodies]
    while messages:
        stored = len(store.write_path.append_each(messages, HOST))
        one_by_one(store, bodies[-len(messages) :][stored : stored + 1], properties)
        messages = messages[stored + 1 :]


def as_batch(store: MessageStore, bodies: list[bytes], properties: bytes = PROPERTIES) -> None:
    items = encode_batch([(0, body, properties) for body in bodies])
    store.write_path.append_batch(store.queue("T", 0), items, 0, Origin(1, HOST))


def block_of(bodies: list[bytes], properties: bytes) -> bytes | memoryview:
    return encode_records("T", bodies, properties, born_timestamp=1, born_host=HOST).body


def as_block(store: MessageStore, bodies: list[bytes], properties: bytes = PROPERTIES) -> None:
    store.write_path.append_records(
        EncodedRecords(store.queue("T", 0), len(bodies), block_of(bodies, properties))
    )


def as_staged_block(
    store: MessageStore, bodies: list[bytes], properties: bytes = PROPERTIES
) -> None:
    block = StagedBlock("T", 0, len(bodies), 0, block_of(bodies, properties))
    store.write_path.append_records(StagedRecords(store.queue("T", 0), block, 77))


WAYS = [one_by_one, all_of_a_recv, as_batch, as_block, as_staged_block]
each_way = pytest.mark.parametrize("put", WAYS)


def open_checked(root: Path) -> MessageStore:
    return open_store(root, appends_checksums=True, **LARGE)


def records_of(root: Path, byte_count: int) -> list[bytes]:
    """As they lie in the first file of the log."""
    log = (root / "commitlog" / f"{0:020d}").read_bytes()[:byte_count]
    return [message.encode() for message in decode_records(log)]


def has_right_checksum(record: bytes) -> bool:
    value = f"{zlib.crc32(record[:-20]) & 0x7FFFFFFF:010d}"
    return record.endswith(b"\x02__CRC32#\x01" + value[::-1].encode() + b"\x02")


@each_way
@pytest.mark.parametrize("bodies", [BODIES, ALIKE, ALIKE * 40])
def test_each_record_ends_with_its_checksum(
    put: Callable[[MessageStore, list[bytes]], None], bodies: list[bytes], tmp_path: Path
) -> None:
    store = open_checked(tmp_path)
    for _ in range(2):
        put(store, bodies)
        store.write_path.publish()
    end = store.commit_log.max_offset
    crash(store)
    records = records_of(tmp_path, end)
    assert len(records) == 2 * len(bodies)
    assert all(map(has_right_checksum, records))

    store = open_checked(tmp_path)
    messages = read_all(store, store.queue("T", 0))
    assert [message.body for message in messages] == bodies * 2
    assert all(message.keys == ["k"] for message in messages)
    assert len(query_index(store, "T", "k", 32, 0, 1 << 62)) == min(len(records), 32)
    store.close()
    with open_directory(tmp_path, small_settings(tmp_path, **LARGE)) as directory:
        assert check(directory, lambda _: None).findings == []


@each_way
def test_damage_that_no_other_checksum_covers_is_found(
    put: Callable[[MessageStore, list[bytes]], None], tmp_path: Path
) -> None:
    store = open_checked(tmp_path)
    put(store, BODIES)
    store.write_path.publish()
    second = read_all(store, store.queue("T", 0))[1].physical_offset
    crash(store)
    path = tmp_path / "commitlog" / f"{0:020d}"
    log = bytearray(path.read_bytes())
    log[second + 16] ^= 1  # the user's flag
    path.write_bytes(log)
    with open_directory(tmp_path, small_settings(tmp_path, **LARGE)) as directory:
        assert "own checksum" in check(directory, lambda _: None).damage[0].problem
    store = open_checked(tmp_path)
    assert [message.body for message in read_all(store, store.queue("T", 0))] == BODIES[:1]


def test_clients_that_leave_out_the_last_separator_get_one(tmp_path: Path) -> None:
    store = open_checked(tmp_path)
    queue = store.queue("T", 0)
    texts = [b"", b"KEYS\x01k", b"TAGS\x01t\x02", b"TAGS\x01u"]
    store.write_path.append_batch(
        queue, encode_batch([(0, b"b", text) for text in texts]), 0, Origin(1, HOST)
    )
    store.write_path.append((queue, b"b", b"KEYS\x01k", 0, 0, 0, 1, 0), HOST)
    store.write_path.append((queue, b"b", b"", 0, 0, 0, 1, 0), HOST)
    store.write_path.publish()
    messages = read_all(store, queue)
    assert [(message.keys, message.tags) for message in messages] == [
        ([], None),
        (["k"], None),
        ([], "t"),
        ([], "u"),
        (["k"], None),
        ([], None),
    ]
    assert all("__CRC32#" in message.properties for message in messages)
    crash(store)
    store = open_checked(tmp_path)
    assert store.source(store.queue("T", 0)).max_offset() == len(messages)


@each_way
def test_properties_must_leave_room_for_it(
    put: Callable[[MessageStore, list[bytes], bytes], None], tmp_path: Path
) -> None:
    store = open_checked(tmp_path)
    for length, is_taken in (
        (PROPERTIES_BYTES_MAX - 20, True),
        (PROPERTIES_BYTES_MAX - 19, False),
        (PROPERTIES_BYTES_MAX, False),
    ):
        end = store.commit_log.max_offset
        text = b"k\x01" + b"v" * (length - 3) + b"\x02"
        if is_taken:
            put(store, [b"body"], text)
            store.write_path.publish()
        else:
            with pytest.raises((RecordTooLarge, CorruptRecord), match="properties"):
                put(store, [b"body"], text)
        assert (store.commit_log.max_offset > end) == is_taken


@pytest.mark.parametrize("appends_checksums", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_properties_that_a_start_would_take_for_torn_are_refused(
    count: int, appends_checksums: bool, tmp_path: Path
) -> None:
    store = open_store(tmp_path, appends_checksums=appends_checksums)
    texts = [b"a\x01b\x02", b"", b"k\x01v"][: count - 1]
    items = encode_batch([(0, b"b", text) for text in (*texts, b"k\x01\0")])
    with pytest.raises(CorruptRecord, match="zero byte"):
        store.write_path.append_batch(store.queue("T", 0), items, 0, Origin(1, HOST))
    assert store.commit_log.max_offset == 0
