"""Rows to records: by Arrow, and as the clients' encoder would make them one by one."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from headrace import Message
from headrace.errors import InvalidMessage
from headrace.producer.block import BLOCK_BYTES
from headrace.producer.selector import queue_index
from headrace.spark.body.ddl import parse_ddl
from headrace.spark.errors import SchemaError
from headrace.spark.read.schema import source_schema
from headrace.spark.write.row_encoding import (
    QueueRows,
    RowBuffer,
    Rows,
    arrow_schema,
    check_schema,
    message_rows,
)
from headrace_protocol.columns import RecordColumns
from headrace_protocol.message import decode_properties
from tests.support.stores import HOST

MAP = pa.map_(pa.string(), pa.string())


def batch(**columns: Any) -> Any:
    kinds = {"properties": MAP, "value": pa.binary()}
    arrays = {
        name: pa.array(
            values, kinds.get(name, pa.binary() if bytes in map(type, values) else pa.string())
        )
        for name, values in columns.items()
    }
    return pa.RecordBatch.from_pydict(arrays)


def decoded(rows: Rows, topic: str = "T") -> RecordColumns:
    block = rows.for_headrace(topic, 7, HOST)
    return RecordColumns.from_records(bytes(block.data))


def slices(given: Any, topic: str | None = "T", queues: int = 4) -> list[QueueRows]:
    buffer = RowBuffer(topic, lambda _: queues)
    return [*buffer.add(given), *buffer.rest()]


def test_records_are_those_of_single_messages() -> None:
    given = {
        "key": ["k", None, "", "käse", "k k2"],
        "tags": [None, "t", "t", "", "u"],
        "properties": [[("a", "1"), ("b", "2")], None, [], [("ä", "ö")], [("c", "3")]],
        "value": [b"1", b"22", b"333", b"4444", b"55555"],
    }
    columns = decoded(message_rows("T", batch(**given)))
    rows = zip(*given.values(), strict=True)
    messages = [
        Message("T", value, key or "", tag or "", dict(properties or ()))
        for key, tag, properties, value in rows
    ]
    assert columns.bodies() == given["value"]
    assert columns.properties() == [message.encoded().properties for message in messages]
    assert columns.born_timestamp.tolist() == [7] * 5
    columns.check_bodies()
    whole = message_rows("T", batch(**given))
    part = decoded(message_rows("T", batch(**given).slice(2, 2)))
    assert part.properties() == decoded(whole.slice(2, 4)).properties()
    assert part.bodies() == given["value"][2:4]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_values_and_keys_are_text_or_bytes(kind: Any) -> None:
    column = pa.array(["aa", "bb"]).cast(kind)
    given = pa.RecordBatch.from_arrays([column, column], ["key", "value"])
    columns = decoded(message_rows("T", given))
    assert columns.bodies() == [b"aa", b"bb"]
    assert [decode_properties(raw)["KEYS"] for raw in columns.properties()] == ["aa", "bb"]


def test_rows_of_one_size_without_properties_take_the_short_way() -> None:
    given = batch(value=[b"%04d" % number for number in range(100)])
    assert decoded(message_rows("T", given)).bodies() == given.column("value").to_pylist()
    part = message_rows("T", given.slice(10, 5))
    assert decoded(part).bodies() == given.column("value").to_pylist()[10:15]


def test_keys_lead_to_queues_as_in_the_clients_and_keep_their_order() -> None:
    keys = [f"user-{number % 37}" if number % 5 else None for number in range(5000)]
    values = [b"%d" % number for number in range(5000)]
    for found in slices(batch(key=keys, value=values)):
        numbers = [int(value) for value in decoded(found.rows).bodies()]
        assert numbers == sorted(numbers)
        wanted = {queue_index(key, 4) if (key := keys[n]) else None for n in numbers}
        assert wanted == {found.number}
    bodies = [
        body
        for found in slices(batch(key=keys, value=values))
        for body in decoded(found.rows).bodies()
    ]
    assert sorted(bodies) == sorted(values)


def test_requests_are_full_but_not_too_full() -> None:
    value = bytes(1000)
    buffer = RowBuffer("T", lambda _: 4)
    sent = [found for _ in range(5) for found in buffer.add(batch(value=[value] * 999))]
    sent += buffer.rest()
    assert sum(len(found.rows) for found in sent) == 4995
    assert max(found.rows.size_bytes for found in sent) <= BLOCK_BYTES
    large = slices(batch(value=[bytes(BLOCK_BYTES), b"a", bytes(3 * BLOCK_BYTES)]))
    assert [len(found.rows) for found in large] == [1, 1, 1]


def test_rows_of_many_queues_do_not_wait_without_end() -> None:
    buffer = RowBuffer("T", lambda _: 1000)
    keys = [str(number) for number in range(100)]
    given = batch(key=keys, value=[bytes(100_000)] * 100)
    sent = [found for _ in range(5) for found in buffer.add(given)]
    assert sum(len(found.rows) for found in sent) >= 300


def test_a_column_may_say_the_topic() -> None:
    given = batch(topic=["A", "B", "A", "C"], key=["k"] * 4, value=[b"1", b"2", b"3", b"4"])
    found = {one.topic: decoded(one.rows, one.topic).bodies() for one in slices(given, None)}
    assert found == {"A": [b"1", b"3"], "B": [b"2"], "C": [b"4"]}


def test_properties_that_only_some_batches_have() -> None:
    buffer = RowBuffer("T", lambda _: 4)
    assert not [*buffer.add(batch(value=[b"a"]))]
    assert not [*buffer.add(batch(tags=["t"], value=[b"b"]))]
    (found,) = buffer.rest()
    assert decoded(found.rows).properties() == [b"", b"TAGS\x01t\x02"]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"value": [None]}, "null value"),
        ({"value": [b""]}, "value for T has 0 bytes"),
        ({"value": [bytes(4 * 1024 * 1024 + 1)]}, "4194305 bytes"),
        ({"value": [b"a"], "key": [b"\xff"]}, r"a key of a row for T is not UTF-8 but b'\\xff'"),
        ({"value": [b"a"] * 2, "key": [b"\xc3", b"\xa9"]}, r"not UTF-8 but b'\\xc3'"),
        ({"value": [b"a"], "key": ["a\x01b"]}, "a key of a row for T contains byte 1"),
        ({"value": [b"a"], "tags": ["\x02"]}, "a tag of a row"),
        ({"value": [b"a"] * 2, "tags": ["a", "a||b"]}, r"the tag of a row for T='a\|\|b' could"),
        ({"value": [b"a"], "tag": ["*"]}, r"the tag of a row for T='\*' could never"),
        ({"value": [b"a"], "key": ["k" * 33_000]}, "the maximum is"),
        ({"value": [b"a"], "properties": [[("", "b")]]}, "empty name"),
        ({"value": [b"a"], "properties": [[("a", "\x01")]]}, "property of a row"),
        ({"value": [b"a"], "properties": [[("DELAY", "3")]]}, "property DELAY"),
        ({"value": [b"a"], "properties": [[("KEYS", "k")]]}, "property KEYS.*columns key"),
        ({"value": [b"a"], "properties": [[("TAGS", "t")]], "key": ["k"]}, "property TAGS"),
        ({"value": [b"a"], "topic": [None]}, "topic is null"),
        ({"value": [b"a"], "topic": ["a b"]}, "a b"),
    ],
)
def test_rows_that_no_broker_would_take(columns: dict[Any, Any], reason: str) -> None:
    topic = None if "topic" in columns else "T"
    with pytest.raises(InvalidMessage, match=reason):
        slices(batch(**columns), topic)


@pytest.mark.parametrize(
    ("schema", "topic", "reason"),
    [
        ("key STRING", "T", "no column value"),
        ("value STRING", None, "no topic"),
        ("value STRING, key STRING, keys STRING", "T", "both columns key and keys"),
        ("value STRING, tag STRING, tags STRING", "T", "both columns tag and tags"),
        ("value INT", "T", "value is int: expected binary or string"),
        ("value STRING, tags BINARY", "T", "tags is binary: expected string"),
        ("value STRING, properties MAP<STRING, INT>", "T", "map<string,string>; cast"),
        ("value STRING, tag INT", "T", "tag is int: expected string"),
        ("value STRING, kye STRING", "T", "did you mean key"),
        ("value STRING, deliver_at TIMESTAMP", "T", "the sink writes no delayed messages"),
    ],
)
def test_schemas_that_do_not_fit(schema: str, topic: str | None, reason: str) -> None:
    with pytest.raises(SchemaError, match=reason):
        check_schema(parse_ddl(schema), topic)


def test_a_frame_of_the_source_can_be_written_as_it_is() -> None:
    schema = source_schema()
    check_schema(schema, "T")
    check_schema(schema, None)
    own = [("UNIQ_KEY", "id"), ("KEYS", "k"), ("TAGS", "t"), ("DELAY", "1"), ("a", "1"), ("b", "2")]
    given = batch(
        keys=["k", None], tags=["t", None], properties=[own, [("WAIT", "true")]], value=[b"1", b"2"]
    ).append_column("queue_offset", pa.array([7, 8]))
    columns = decoded(message_rows("T", given))
    assert columns.properties() == [b"KEYS\x01k\x02TAGS\x01t\x02a\x011\x02b\x012\x02", b""]
    expected = {queue_index("k", 4), None}
    assert {rows.number for rows in slices(given)} == expected


@pytest.mark.parametrize("name", ["key", "keys"])
def test_a_key_chooses_the_queue_under_both_names(name: str) -> None:
    given = batch(**{name: ["a", "b"]}, value=[b"1", b"2"])
    found = {rows.number for rows in slices(given)}
    assert found == {queue_index("a", 4), queue_index("b", 4)}


def test_the_option_topic_comes_before_the_column() -> None:
    given = batch(topic=["A", "B"], value=[b"1", b"2"])
    assert {rows.topic for rows in slices(given, "T")} == {"T"}


def test_columns_that_are_not_written_need_no_values() -> None:
    schema = arrow_schema(source_schema())
    assert schema.field("store_timestamp").type == pa.null()
    assert schema.field("properties").type == MAP


def test_a_schema_that_fits() -> None:
    ddl = "topic STRING, key BINARY, tags STRING, properties MAP<STRING, STRING>, value BINARY"
    check_schema(parse_ddl(ddl), None)
    check_schema(parse_ddl("value STRING"), "T")
