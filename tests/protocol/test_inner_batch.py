"""Inner batches: records that hold a whole batch, unwrapped to records of one message each."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

from headrace_protocol.columns import RecordColumns
from headrace_protocol.compression import COMPRESSED, COMPRESSION_ZLIB
from headrace_protocol.errors import CorruptRecord
from headrace_protocol.inner_batch import unwrap, unwrap_messages, unwrap_record
from headrace_protocol.message import (
    INNER_BATCH,
    NEED_UNWRAP,
    StoredMessage,
    decode_record,
    encode_batch,
    encode_properties,
    encode_record,
)
from headrace_protocol.message_ids import encode_host

INNER = INNER_BATCH | NEED_UNWRAP
NO_COUNT = "-"


def batch(
    count: int,
    queue_offset: int = 0,
    *,
    stated: str | None = None,
    body: bytes | None = None,
    **head: Any,
) -> bytes:
    items = [
        (number, b"%d" % (queue_offset + number), encode_properties({"KEYS": f"k{number}"}))
        for number in range(count)
    ]
    fields = {"sys_flag": INNER, "born_timestamp": 7, "store_timestamp": 9, "queue_id": 3, **head}
    return encode_record(
        topic="T",
        body=encode_batch(items) if body is None else body,
        properties=encode_properties({"INNER_NUM": stated or str(count), "UNIQ_KEY": "batch"}),
        queue_offset=queue_offset,
        physical_offset=1000 + queue_offset,
        **fields,
    )


def single(queue_offset: int) -> bytes:
    return encode_record(
        topic="T", queue_id=3, body=b"%d" % queue_offset, queue_offset=queue_offset
    )


def messages(columns: RecordColumns) -> list[StoredMessage]:
    columns.check_bodies()
    return [columns.message(number) for number in range(len(columns))]


def test_records_without_batches_stay_as_they_are() -> None:
    columns = RecordColumns.from_records(single(4) + single(5))
    assert unwrap(columns, 5) is columns


def test_a_batch_becomes_a_record_per_message() -> None:
    columns = unwrap(RecordColumns.from_records(single(4) + batch(3, 5) + single(8) + batch(1, 9)))
    found = messages(columns)
    assert [message.queue_offset for message in found] == columns.queue_offset.tolist()
    assert columns.queue_offset.tolist() == [4, 5, 6, 7, 8, 9]
    assert [message.body for message in found] == [b"%d" % offset for offset in range(4, 10)]
    message = found[2]
    assert (message.flag, message.queue_id, message.physical_offset) == (1, 3, 1005)
    assert (message.born_timestamp, message.store_timestamp, message.sys_flag) == (7, 9, 0)
    assert message.properties == {"KEYS": "k1"}
    assert columns.physical_offset.tolist() == [0, 1005, 1005, 1005, 0, 1009]


@pytest.mark.parametrize(
    "hosts",
    [
        {"born_host": encode_host("::1", 9)},
        {"store_host": encode_host("::1", 9)},
        {"born_host": encode_host("::1", 9), "store_host": encode_host("::2", 9)},
    ],
)
def test_hosts_are_those_of_the_batch(hosts: dict[str, Any]) -> None:
    for message in messages(unwrap(RecordColumns.from_records(batch(2, **hosts)))):
        assert {name: getattr(message, name) for name in hosts} == hosts
        assert message.encode()


def test_a_compressed_batch_is_inflated() -> None:
    items = encode_batch([(0, b"a" * 500, b""), (0, b"", b"")])
    flags = INNER | COMPRESSED | COMPRESSION_ZLIB
    record = batch(2, body=zlib.compress(items), sys_flag=flags)
    found = unwrap(RecordColumns.from_records(record))
    assert [message.body for message in messages(found)] == [b"a" * 500, b""]


def test_only_wanted_offsets_stay() -> None:
    columns = RecordColumns.from_records(batch(5, 10) + single(15) + batch(4, 16))
    assert unwrap(columns, 12, 18).queue_offset.tolist() == [12, 13, 14, 15, 16, 17]
    assert len(unwrap(columns, 99)) == 0


def test_a_batch_that_was_read_twice_comes_once() -> None:
    columns = RecordColumns.from_records(batch(5, 10) + batch(5, 10) + single(15) + single(15))
    assert unwrap(columns, 11).queue_offset.tolist() == [11, 12, 13, 14, 15]


def test_offsets_of_a_static_topic_are_kept() -> None:
    columns = RecordColumns.from_records(batch(2, 10) + single(12))
    columns.queue_offset = columns.queue_offset + 100
    assert unwrap(columns, 111).queue_offset.tolist() == [111, 112]


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (batch(3, stated="2"), "states 2 messages and has 3"),
        (batch(3, stated="4"), "states 4 messages and has 3"),
        (batch(3, stated="0"), "states 0"),
        (batch(3, stated="-1"), "states 0"),
        (batch(3, stated="x"), "states 0"),
        (batch(1, body=b""), "no items"),
        (batch(1, body=b"short"), "5 bytes are no batch item"),
        (batch(1, body=encode_batch([(0, b"a", b"")])[:-1]), "an item of"),
        (batch(1, body=encode_batch([(0, b"a", b"")]) + b"torn"), "no batch item"),
    ],
)
def test_a_bad_batch_is_refused_at_its_place(record: bytes, problem: str) -> None:
    good = single(4)
    with pytest.raises(CorruptRecord, match=problem) as refused:
        unwrap(RecordColumns.from_records(good + record))
    assert refused.value.position == len(good)
    assert unwrap_record(record) == [record]
    kept = unwrap(RecordColumns.from_records(record + good + batch(2, 20)), keeps_damaged=True)
    assert [kept.record(number) for number in range(2)] == [record, good]
    assert kept.queue_offset.tolist()[2:] == [20, 21]


def test_a_batch_in_a_batch_stays_a_message() -> None:
    inner = encode_batch([(0, b"a", b"")])
    properties = encode_properties({"INNER_NUM": "1"})
    outer = batch(1, body=encode_batch([(0, inner, properties)]))
    (message,) = messages(unwrap(RecordColumns.from_records(outer)))
    assert (message.body, message.sys_flag) == (inner, 0)
    assert len(unwrap(RecordColumns.from_records(message.encode()))) == 1


def test_single_records() -> None:
    assert unwrap_record(single(4)) == [single(4)]
    records = unwrap_record(memoryview(batch(3, 5)))
    assert [decode_record(record).queue_offset for record in records] == [5, 6, 7]
    found = unwrap_messages([decode_record(single(4)), decode_record(batch(2, 5))])
    assert [message.queue_offset for message in found] == [4, 5, 6]
    assert np.diff([message.size for message in found[1:]]).tolist() == [0]
