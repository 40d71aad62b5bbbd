"""Columns of a read are what the one-by-one codec says of each record."""

from __future__ import annotations

import datetime as dt
import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import IntegerType, StringType, StructField, StructType

from headrace.spark.body.format import body_format
from headrace.spark.errors import SchemaError
from headrace.spark.read.columns import RecordBlock, arrow_schema
from headrace.spark.read.gather import gather, text
from headrace.spark.read.properties import PropertyEntries
from headrace.spark.read.schema import own_columns, source_schema
from headrace_protocol.columns import RecordColumns
from headrace_protocol.message import (
    StoredMessage,
    decode_properties,
    decode_records,
    encode_properties,
    encode_record,
)
from headrace_protocol.message_ids import decode_host, encode_host

SCHEMA = arrow_schema(source_schema())
HOSTS = [encode_host("10.0.0.1", 4711), encode_host("10.0.0.2", 1), encode_host("fe80::1", 65535)]
NAMES = st.sampled_from(["TAGS", "KEYS", "UNIQ_KEY", "a", "a name that is longer than a view"])
VALUES = st.text("ab é\U0001f600", min_size=1, max_size=20)
PROPERTIES = st.dictionaries(NAMES, VALUES, max_size=4).map(encode_properties)
MAPS = pa.map_(pa.string(), pa.string())


def record(number: int, body: bytes, properties: bytes, born: bytes, store: bytes) -> bytes:
    return encode_record(
        topic="orders",
        queue_id=3,
        body=body,
        properties=properties,
        queue_offset=100 + number,
        physical_offset=(1 << 40) + number,
        born_timestamp=1_700_000_000_000 + number,
        store_timestamp=1_700_000_000_500 - number,
        born_host=born,
        store_host=store,
        reconsume_times=number % 3,
    )


def rows_of(records: list[bytes]) -> list[dict[str, Any]]:
    columns = RecordColumns.from_records(b"".join(records))
    block = RecordBlock("orders", "broker-a", 3, columns)
    arrays = [block.column(field.name, field.type) for field in SCHEMA]
    batch = pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)
    batch.validate(full=True)
    return [row | {"properties": dict(row["properties"])} for row in batch.to_pylist()]


def expected(message: StoredMessage) -> dict[str, Any]:
    ip, port = decode_host(message.born_host)
    return {
        "topic": "orders",
        "broker": "broker-a",
        "queue": 3,
        "queue_offset": message.queue_offset,
        "physical_offset": message.physical_offset,
        "message_id": message.message_id,
        "keys": message.properties.get("KEYS"),
        "tags": message.properties.get("TAGS"),
        "properties": message.properties,
        "born_timestamp": time(message.born_timestamp),
        "store_timestamp": time(message.store_timestamp),
        "born_host": f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}",
        "reconsume_times": message.reconsume_times,
        "value": message.body,
    }


def time(milliseconds: int) -> dt.datetime:
    return dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(milliseconds=milliseconds)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.binary(max_size=30), PROPERTIES, st.sampled_from(HOSTS), st.sampled_from(HOSTS)
        ),
        min_size=1,
        max_size=12,
    )
)
def test_mixed_records(items: list[tuple[bytes, bytes, bytes, bytes]]) -> None:
    records = [record(number, *item) for number, item in enumerate(items)]
    assert rows_of(records) == list(map(expected, decode_records(b"".join(records))))


@settings(deadline=None, max_examples=50)
@given(PROPERTIES, st.integers(1, 20), st.integers(0, 40), st.sampled_from(HOSTS))
def test_records_that_are_alike(raw: bytes, count: int, body_bytes: int, host: bytes) -> None:
    records = [record(number, bytes(body_bytes), raw, host, host) for number in range(count)]
    assert rows_of(records) == list(map(expected, decode_records(b"".join(records))))


def test_properties_that_differ_only_in_their_values() -> None:
    raws = [b"KEYS\x01order-%d\x02TAGS\x01%c\x02" % (n * 7**n, 97 + n % 3) for n in range(20)]
    records = [record(number, b"x", raw, *HOSTS[:2]) for number, raw in enumerate(raws)]
    assert rows_of(records) == list(map(expected, decode_records(b"".join(records))))


@settings(deadline=None, max_examples=500)
@given(st.lists(st.text("\x01\x02ab", max_size=9).map(str.encode), max_size=8))
def test_any_properties_are_read_as_the_codec_reads_them(raws: list[bytes]) -> None:
    entries = PropertyEntries(gather_all(raws))
    assert [dict(row) for row in entries.maps(MAPS).to_pylist()] == [
        decode_properties(raw) for raw in raws
    ]
    for name in ("a", "b", "ab"):
        found = text(entries.value_of(name.encode())).to_pylist()
        assert found == [decode_properties(raw).get(name) for raw in raws]


def gather_all(raws: list[bytes]) -> Any:
    size = np.array([len(raw) for raw in raws], np.int64)
    return gather(b"".join(raws), np.cumsum(size) - size, size)


def test_more_properties_than_are_compared_by_place() -> None:
    raw = encode_properties({f"name-{n}": f"value-{n}" for n in range(40)})
    raws = [raw, raw.replace(b"value-3", b"other-3")]
    found = PropertyEntries(gather_all(raws)).maps(MAPS).to_pylist()
    assert [dict(row) for row in found] == [decode_properties(raw) for raw in raws]


def test_bytes_that_are_no_utf8_stay_distinct() -> None:
    raws = [b"KEYS\x01caf\xe9\x02", b"KEYS\x01caf\xe8\x02", b"KEYS\x01tea\x02", b""]
    found = PropertyEntries(gather_all(raws)).value_of(b"KEYS")
    assert found.to_pylist() == [b"caf\xe9", b"caf\xe8", b"tea", None]
    assert text(found).to_pylist() == [r"caf\xe9", r"caf\xe8", "tea", None]


@given(st.binary(max_size=60), st.data())
def test_slices_of_a_buffer(data: bytes, drawn: st.DataObject) -> None:
    bounds = st.tuples(st.integers(0, len(data)), st.integers(0, len(data))).map(sorted)
    pairs = drawn.draw(st.lists(bounds, max_size=10))
    start = np.array([pair[0] for pair in pairs], np.int64)
    size = np.array([pair[1] - pair[0] for pair in pairs], np.int64)
    is_there = np.array(
        drawn.draw(st.lists(st.booleans(), min_size=len(pairs), max_size=len(pairs))), bool
    )
    wanted = [data[a:b] for a, b in pairs]
    assert gather(data, start, size).to_pylist() == wanted
    found = gather(memoryview(data), start, size, is_there).to_pylist()
    assert found == [each if there else None for each, there in zip(wanted, is_there, strict=True)]


def test_text_is_checked() -> None:
    assert text(pa.array([b"\xc3\xa9", None])).to_pylist() == ["é", None]


# --- the schema ----------------------------------------------------------------------------


def test_it_is_the_schema_that_spark_compares_with() -> None:
    assert [field.name for field in source_schema().fields] == SCHEMA.names
    assert not SCHEMA.field("value").nullable
    assert SCHEMA.field("keys").nullable
    assert SCHEMA.field("store_timestamp").type == pa.timestamp("us", tz="UTC")
    assert pickle.loads(pickle.dumps(SCHEMA)) == SCHEMA


def test_only_some_columns() -> None:
    some = StructType([StructField("value", source_schema()["value"].dataType)])
    assert arrow_schema(some) == pa.schema([pa.field("value", pa.binary())])


@pytest.mark.parametrize(
    ("field", "said"),
    [
        (StructField("valu", StringType()), "no column valu: .*; did you mean value"),
        (StructField("queue", StringType()), "column queue is int, not string: .* cast"),
    ],
)
def test_a_column_that_there_is_not(field: StructField, said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        arrow_schema(StructType([field]))


def test_columns_of_bodies_come_first_and_ours_give_way() -> None:
    body = body_format("queue int not null, total double", "json")
    schema = source_schema(body)
    assert schema.fieldNames()[:6] == ["queue", "total", "_corrupt", "topic", "broker", "_queue"]
    assert schema["queue"] == StructField("queue", IntegerType(), True)
    assert own_columns(body)["_queue"] == "queue"
    assert "queue" not in own_columns(body)


def test_ours_give_way_to_names_that_spark_takes_for_theirs() -> None:
    # Spark resolves names in any case: of `Tags` and `tags` neither could be read.
    body = body_format("Tags string, VALUE double", "json")
    schema = source_schema(body)
    assert schema.fieldNames()[:3] == ["Tags", "VALUE", "_corrupt"]
    assert {"_tags", "_value"} <= set(schema.fieldNames())
    assert own_columns(body)["_value"] == "value"
    assert not {"tags", "value"} & (own_columns(body).keys() | set(schema.fieldNames()))


@pytest.mark.parametrize(
    "ddl",
    [
        "_corrupt int",
        "queue int, _queue int",
        "a int, a string",
        "Id int, id int",
        "s struct<x: int, X: int>",
        "l array<struct<x: int, X: int>>",
        "m map<string, struct<x: int, X: int>>",
    ],
)
def test_a_column_twice(ddl: str) -> None:
    with pytest.raises(SchemaError, match="a duplicate column"):
        source_schema(body_format(ddl, "json"))
