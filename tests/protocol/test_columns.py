"""Records by the block are the records that the one-by-one codec writes and reads."""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_protocol.blocks import EncodedBlock, encode_records, encode_uniform
from headrace_protocol.columns import (
    QUEUE_OFFSET_DTYPE,
    UNIT_DTYPE,
    RecordColumns,
    distinct_rows,
    split,
)
from headrace_protocol.compression import COMPRESSED, COMPRESSION_ZLIB
from headrace_protocol.errors import CorruptRecord
from headrace_protocol.headers import BulkPullResponseHeader
from headrace_protocol.message import (
    PROPERTIES_BYTES_MAX,
    StoredMessage,
    decode_properties,
    decode_records,
    encode_properties,
    encode_record,
)
from headrace_protocol.message_ids import encode_host
from headrace_protocol.property_columns import PropertyColumns
from tests.support.seeds import seeds

HOST = encode_host("10.0.0.1", 4711)
HOST_V6 = encode_host("::1", 4711)
PROPERTIES = st.dictionaries(
    st.sampled_from(["TAGS", "KEYS", "x"]), st.text("ab\u00e9", min_size=1, max_size=4)
).map(encode_properties)
INT = st.integers(-(2**31), 2**31 - 1)
LONG = st.integers(-(2**63), 2**63 - 1)


def decoded(block: EncodedBlock) -> list[StoredMessage]:
    messages = decode_records(block.data)
    assert block.sizes.tolist() == [message.size for message in messages]
    assert block.record_count == len(messages)
    return messages


# --- encoding ------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.binary(max_size=50), PROPERTIES, LONG), min_size=1), st.data())
def test_a_block_holds_what_single_records_would(
    items: list[tuple[bytes, bytes, int]], data: st.DataObject
) -> None:
    topic = data.draw(st.text("abc\u00e9", min_size=1, max_size=60))
    bodies, properties, times = map(list, zip(*items, strict=True))
    block = encode_records(
        topic, bodies, properties, born_timestamp=times, born_host=HOST, sys_flag=1
    )
    expected = [
        encode_record(
            topic=topic,
            queue_id=0,
            body=body,
            properties=raw,
            sys_flag=1,
            born_timestamp=time,
            born_host=HOST,
        )
        for body, raw, time in items
    ]
    assert block.data == b"".join(expected)
    assert block.sizes.tolist() == [len(record) for record in expected]
    assert bytes(block.body[: 4 * len(items)]) == block.sizes.tobytes()


@settings(deadline=None, max_examples=50)
@given(
    st.integers(0, 40).flatmap(
        lambda size: st.lists(st.binary(min_size=size, max_size=size), min_size=1, max_size=5)
    ),
    PROPERTIES,
)
def test_each_way_to_give_the_bodies_makes_the_same_block(bodies: list[bytes], raw: bytes) -> None:
    common: dict[str, Any] = {"born_timestamp": 7, "born_host": HOST}
    block = encode_records("T", bodies, raw, **common)
    joined = b"".join(bodies)
    values = np.frombuffer(joined, np.uint8).reshape(len(bodies), -1 if joined else 0)
    assert encode_uniform("T", values, raw, **common).body == block.body
    assert encode_records("T", bodies, [raw] * len(bodies), **common).body == block.body
    assert encode_records("T", [memoryview(b) for b in bodies], raw, **common).body == block.body


def test_rows_with_gaps_between_them_can_be_sent() -> None:
    values = np.arange(60, dtype=np.uint8).reshape(5, 12)[::2, 3:7]
    block = encode_uniform("T", values, b"", born_timestamp=0, born_host=HOST)
    assert [message.stored_body for message in decoded(block)] == [row.tobytes() for row in values]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"topic": "t" * 128}, "topic t+ has more than 127 bytes"),
        ({"bodies": []}, "no bodies"),
        ({"properties": b"x" * (PROPERTIES_BYTES_MAX + 1)}, "properties have 32768 bytes"),
        ({"properties": [b"x" * (PROPERTIES_BYTES_MAX + 1)]}, "properties have 32768 bytes"),
        ({"properties": [b"", b""]}, "2 properties for 1 bodies"),
        ({"born_host": HOST_V6}, "born host of 20 bytes"),
    ],
)
def test_what_has_no_place_in_a_block_is_refused(changes: dict[str, Any], reason: str) -> None:
    arguments = {"topic": "T", "bodies": [b"b"], "properties": b"", "born_host": HOST, **changes}
    with pytest.raises(ValueError, match=reason):
        encode_records(**arguments, born_timestamp=0)


# --- decoding ------------------------------------------------------------------------------

RECORDS = st.builds(
    encode_record,
    topic=st.sampled_from(["T", "t" * 127, "t" * 128, "t" * 200]),
    queue_id=INT,
    body=st.binary(max_size=20),
    properties=PROPERTIES,
    flag=INT,
    queue_offset=LONG,
    physical_offset=LONG,
    sys_flag=st.sampled_from([0, 2, 4, 8]),
    born_timestamp=LONG,
    born_host=st.sampled_from([HOST, HOST_V6]),
    store_timestamp=LONG,
    store_host=st.sampled_from([HOST, HOST_V6]),
    reconsume_times=INT,
)
NUMBERS = (
    "physical_offset",
    "queue_offset",
    "size",
    "magic",
    "body_crc",
    "queue_id",
    "flag",
    "sys_flag",
    "born_timestamp",
    "store_timestamp",
    "reconsume_times",
)


def check_same(columns: RecordColumns, messages: list[StoredMessage], data: bytes) -> None:
    assert len(columns) == len(messages)
    for name in NUMBERS:
        column = getattr(columns, name)
        assert column.dtype.isnative
        assert column.tolist() == [getattr(message, name) for message in messages], name
    assert columns.stored_bodies() == [message.stored_body for message in messages]
    assert columns.properties() == [message.raw_properties for message in messages]
    topics = split(data, columns.topic_start, columns.topic_bytes)
    assert [topic.decode(errors="replace") for topic in topics] == [m.topic for m in messages]
    for index, message in enumerate(messages):
        assert columns.message(index).stored_body == message.stored_body
    columns.check_bodies()


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(st.lists(RECORDS, max_size=6), st.integers(1, 3))
def test_columns_hold_what_single_records_say(records: list[bytes], times: int) -> None:
    data = b"".join(records * times)
    columns = RecordColumns.from_records(data)
    messages = decode_records(data)
    check_same(columns, messages, data)
    assert b"".join(map(columns.record, range(len(columns)))) == data
    check_same(columns.select(slice(1, None, 2)), messages[1::2], data)
    check_same(columns.select(np.arange(len(messages))[::-1]), messages[::-1], data)
    topics = {message.topic for message in messages}
    assert columns.has_topic("T") == (topics <= {"T"})
    assert columns.has_topic("t" * 128) == (topics <= {"t" * 128})


@pytest.mark.parametrize("flip", [1, 0x80, 0xFF])
@pytest.mark.parametrize("second", [b"body", b"larger body"], ids=["one size", "two sizes"])
@pytest.mark.parametrize("topic", ["T", "t" * 128])
def test_damage_at_any_place_is_found_or_harmless(flip: int, second: bytes, topic: str) -> None:
    whole = b"".join(
        encode_record(topic=topic, queue_id=0, body=body, properties=b"k\x01v\x02", born_host=host)
        for body in (b"body", second)
        for host in (HOST, HOST_V6 if second != b"body" else HOST)
    )
    for place in range(len(whole)):
        damaged = whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :]
        try:
            columns = RecordColumns.from_records(damaged)
            columns.check_bodies()
        except CorruptRecord:
            with pytest.raises(CorruptRecord):
                decode_records(damaged)
        else:
            check_same(columns, decode_records(damaged), damaged)


def test_the_smallest_record_has_no_text_at_all() -> None:
    data = encode_record(topic="", queue_id=0, body=b"") + encode_record(
        topic="T", queue_id=0, body=b"b"
    )
    check_same(RecordColumns.from_records(data), decode_records(data), data)


def test_any_bytes_are_records_or_corrupt() -> None:
    rng = np.random.default_rng(1)
    for _ in range(2000):
        data = rng.integers(0, 3, rng.integers(0, 400), np.uint8).tobytes()
        try:
            RecordColumns.from_records(data)
        except CorruptRecord:
            with pytest.raises(CorruptRecord):
                decode_records(data)
        else:
            assert decode_records(data) == []


def test_compressed_bodies_come_out_as_they_were_sent() -> None:
    bodies = [zlib.compress(b"a" * 100), b"plain"]
    flags = [COMPRESSED | COMPRESSION_ZLIB, 0]
    block = encode_records("T", bodies, b"", born_timestamp=0, born_host=HOST, sys_flag=flags)
    columns = RecordColumns.from_records(block.data)
    assert columns.bodies() == [b"a" * 100, b"plain"]
    assert columns.body(0) == b"a" * 100
    assert columns.stored_bodies() == bodies


def test_a_wrong_crc_is_named_by_its_position() -> None:
    for body_bytes in (10, 1000):
        good = encode_record(topic="T", queue_id=0, body=bytes(body_bytes))
        bad = good[:100] + b"!" + good[101:] if body_bytes > 12 else good[:90] + b"!" + good[91:]
        columns = RecordColumns.from_records(good + bad + good)
        with pytest.raises(CorruptRecord, match="CRC") as caught:
            columns.check_bodies()
        assert caught.value.position == len(good)


# --- the answer to BULK_PULL ---------------------------------------------------------------


def bulk(
    records: list[bytes], layout: Any, gaps: list[int]
) -> tuple[BulkPullResponseHeader, bytes]:
    """An answer as a broker makes it; ``gaps`` lie between the records in the log."""
    units = np.zeros(len(records), UNIT_DTYPE)
    at = 1000
    for number, (record, gap) in enumerate(zip(records, gaps, strict=True)):
        units[number] = (at, len(record), number * 7)
        at += len(record) + gap
    log = b"".join(record + b"?" * gap for record, gap in zip(records, gaps, strict=True))
    header = BulkPullResponseHeader(
        next_begin_offset=50,
        min_offset=0,
        max_offset=60,
        count=len(records),
        layout=layout,
        first_physical_offset=1000,
    )
    return header, units.tobytes() + (log if layout == "log" else b"".join(records))


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(st.lists(RECORDS, min_size=1, max_size=6), st.sampled_from(["log", "gathered"]), st.data())
def test_both_layouts_hold_the_same_records(
    records: list[bytes], layout: str, data: st.DataObject
) -> None:
    gaps = data.draw(st.lists(st.integers(0, 9), min_size=len(records), max_size=len(records)))
    header, body = bulk(records, layout, gaps)
    columns = RecordColumns.from_bulk(header, body)
    assert [bytes(columns.record(index)) for index in range(len(columns))] == records
    assert columns.queue_offset.tolist() == list(range(50 - len(records), 50))
    assert (
        columns.physical_offset.tolist()
        == np.frombuffer(body, UNIT_DTYPE, len(records))["physical_offset"].tolist()
    )
    assert columns.tags_code is not None
    assert columns.tags_code.tolist() == [number * 7 for number in range(len(records))]


def test_queue_offsets_with_gaps_are_told() -> None:
    record = encode_record(topic="T", queue_id=0, body=b"b")
    header, body = bulk([record, record], "gathered", [0, 0])
    header.has_queue_offsets = True
    offsets = np.array([4, 9], QUEUE_OFFSET_DTYPE).tobytes()
    columns = RecordColumns.from_bulk(header, body[:40] + offsets + body[40:])
    assert columns.queue_offset.tolist() == [4, 9]
    assert columns.bodies() == [b"b", b"b"]


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(st.sampled_from(["log", "gathered"]), st.data())
def test_a_damaged_answer_is_corrupt_or_harmless(layout: str, data: st.DataObject) -> None:
    record = encode_record(topic="T", queue_id=0, body=b"body", properties=b"k\x01v\x02")
    header, body = bulk([record] * 3, layout, [0, 0, 0])
    damaged = bytearray(body)
    for _ in range(data.draw(st.integers(0, 2))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    header.count = data.draw(st.sampled_from([0, 1, 3, 4, 2**31 - 1]))
    header.first_physical_offset = data.draw(st.sampled_from([1000, 999, 0, -(2**63), 2**63 - 1]))
    header.has_queue_offsets = data.draw(st.booleans())
    try:
        columns = RecordColumns.from_bulk(header, damaged)
        columns.check_bodies()
    except CorruptRecord:
        return
    for index in range(len(columns)):
        assert columns.message(index).stored_body == columns.stored_bodies()[index]


@given(st.lists(st.sampled_from(["a", "b", "topic", "other", "x" * 127, "\u00fc"]), max_size=40))
def test_topics_are_numbered(topics: list[str]) -> None:
    data = b"".join(
        encode_record(topic=topic, queue_id=0, body=b"b" * len(topic), born_host=HOST)
        for topic in topics
    )
    records = RecordColumns.from_records(data)
    for some in (records, records.select(slice(1, None))):
        names, numbers = some.topics
        expected = topics[len(topics) - len(some) :]
        assert [names[number].decode() for number in numbers.tolist()] == expected
    names, numbers = records.select(slice(1, None)).topics
    assert [names[number].decode() for number in numbers.tolist()] == topics[1:]


@pytest.mark.parametrize("have_equal_hashes", [False, True])
def test_rows_are_told_apart(have_equal_hashes: bool) -> None:
    given = {"hash_factor": np.uint64(0)} if have_equal_hashes else {}
    names, numbers = distinct_rows(np.frombuffer(b"abacabba", np.uint8).reshape(4, 2), **given)
    assert [names[number] for number in numbers] == [b"ab", b"ac", b"ab", b"ba"]
    assert sorted(names) == [b"ab", b"ac", b"ba"]


# --- properties -------------------------------------------------------------------------------

PROPERTY_NAMES = ("a", "KEYS", "UNIQ_KEY", "a_name_of_more_than_one_word", "n" * 70)


def properties_text(seeded: random.Random) -> bytes:
    """Some properties, also twice, empty, without an end, and with names in values."""
    entries = [
        b"%s\x01%s" % (seeded.choice(PROPERTY_NAMES).encode(), property_bytes(seeded))
        for _ in range(seeded.randrange(4))
    ]
    return b"\x02".join(entries) + seeded.choice((b"", b"\x02"))


def property_bytes(seeded: random.Random) -> bytes:
    text = seeded.choice(("", "7", "seven", "0123456", "01234567", "9" * 18, "9" * 19, "a\x01b"))
    return text.encode() * seeded.choice((1, 1, 2))


def columns_of_records(texts: list[bytes]) -> PropertyColumns:
    """The properties of records whose bodies look like properties."""
    body = b"\x02" + b"\x02".join(b"%s\x017" % name.encode() for name in PROPERTY_NAMES) + b"\x02"
    records = [
        encode_record(topic="T", queue_id=0, body=body[: 200 * (number % 2)], properties=text)
        for number, text in enumerate(texts)
    ]
    return PropertyColumns.of_records(RecordColumns.from_records(b"".join(records)))


@pytest.mark.parametrize("seed", seeds(80))
def test_a_column_of_properties_has_what_each_record_has(seed: int) -> None:
    seeded = random.Random(seed)
    texts = [properties_text(seeded) for _ in range(seeded.randrange(1, 60))]
    columns = seeded.choice((PropertyColumns, columns_of_records))(texts)
    for name in (*PROPERTY_NAMES, "S", "EYS", "none", "n" * 40_000):
        expected = [decode_properties(text).get(name) for text in texts]
        found = columns.find(name.encode())
        numbers = found.records.tolist()
        assert numbers == [number for number, each in enumerate(expected) if each is not None]
        values, which = columns.distinct(found)
        assert len({*values}) == len(values)
        wanted = [expected[number].encode() for number in numbers]
        assert [values[number] for number in which.tolist()] == wanted
        integers = [int(each) if each.isdigit() and len(each) <= 18 else -1 for each in wanted]
        assert columns.integers(found, -1).tolist() == integers


def test_no_records_have_no_properties() -> None:
    columns = PropertyColumns([])
    found = columns.find(b"a")
    assert columns.distinct(found)[0] == []
    assert len(found.records) == 0


def test_the_first_bytes_of_values() -> None:
    columns = PropertyColumns([encode_properties({"a": text}) for text in ("abc", "abd")])
    assert columns.cells(columns.find(b"a"), 3).tobytes() == b"abcabd"
