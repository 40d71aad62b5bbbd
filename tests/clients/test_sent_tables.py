"""Tables that ``send_many`` takes: of pyarrow, pandas, polars and DuckDB."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import headrace
from headrace.errors import InvalidMessage
from headrace.producer.sources import chunks

VALUES, KEYS, TAGS = ["one", "two", "three"], ["k", "k", "l"], ["red", "red", "green"]
ROWS = list(zip(VALUES, KEYS, TAGS, strict=True))
COLUMNS = {"value": VALUES, "key": KEYS, "tag": TAGS}


def rows(table: Any, topic: str | None = "T") -> list[tuple[str, str, str]]:
    """The contents of a table's chunks: bodies, keys and tags."""
    found = []
    for chunk in chunks(table, topic, None, None):
        properties = chunk.block.properties
        for index, body in enumerate(chunk.block.bodies):
            raw = properties if isinstance(properties, bytes) else properties[index]
            entries = dict(entry.split("\x01") for entry in raw.decode().split("\x02") if entry)
            found.append((body.decode(), entries.get("KEYS", ""), entries.get("TAGS", "")))
    return found


def arrow(kind: Any) -> Any:
    """Three rows whose columns have a type."""
    is_bytes = pa.types.is_binary(kind) or pa.types.is_binary_view(kind)
    return pa.table(
        {
            name: pa.array([each.encode() if is_bytes else each for each in column], kind)
            for name, column in COLUMNS.items()
        }
    )


def dictionaries(kind: Any, index: Any) -> Any:
    """Dictionary-encoded columns with values of a type."""
    return pa.table(
        {
            name: pa.DictionaryArray.from_arrays(
                pa.array([*map(sorted(set(column)).index, column)], index),
                pa.array(sorted(set(column)), kind),
            )
            for name, column in COLUMNS.items()
        }
    )


def frame(**more: Any) -> Any:
    return pd.DataFrame({**COLUMNS, **more})


def named_index() -> Any:
    return frame().set_index("key")


def polars(kind: Any) -> Any:
    return pl.DataFrame(COLUMNS).with_columns(pl.all().cast(kind))


def extension(name: str) -> Any:
    return pa.table({"value": pa.array(VALUES, getattr(pa, name)()), "key": KEYS, "tag": TAGS})


class Opaque:
    """A table of another library: only the capsule interface."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


class OpaqueBatch:
    """A single batch by the capsule interface."""

    def __arrow_c_array__(self, requested_schema: object = None) -> object:
        return pa.record_batch(COLUMNS).__arrow_c_array__(requested_schema)


TABLES: dict[str, Callable[[], Any]] = {
    "string": lambda: arrow(pa.string()),
    "large_string": lambda: arrow(pa.large_string()),
    "string_view": lambda: arrow(pa.string_view()),
    "binary": lambda: arrow(pa.binary()),
    "large_binary": lambda: arrow(pa.string()).cast(
        pa.schema([(name, pa.large_binary()) for name in COLUMNS])
    ),
    "binary_view": lambda: arrow(pa.binary_view()),
    "dictionary": lambda: dictionaries(pa.string(), pa.int32()),
    "dictionary of large strings": lambda: dictionaries(pa.large_string(), pa.uint64()),
    "dictionary of views": lambda: dictionaries(pa.string_view(), pa.uint32()),
    "run-end encoded": lambda: pa.table(
        {name: pc.run_end_encode(pa.array(column)) for name, column in COLUMNS.items()}
    ),
    "extension arrow.json": lambda: extension("json_"),
    "batch": lambda: pa.record_batch(COLUMNS),
    "reader": lambda: pa.table(COLUMNS).to_reader(max_chunksize=1),
    "chunked": lambda: pa.concat_tables([pa.table(COLUMNS)[:1], pa.table(COLUMNS)[1:]]),
    "sliced": lambda: pa.concat_tables([pa.table(COLUMNS)] * 3).combine_chunks()[3:6],
    "chunks with and without a dictionary's values": lambda: pa.table(
        {
            name: pa.chunked_array([pa.array([each]).dictionary_encode() for each in column])
            for name, column in COLUMNS.items()
        }
    ),
    "capsule stream": lambda: Opaque(pa.table(COLUMNS)),
    "capsule array": OpaqueBatch,
    "pandas": frame,
    "pandas strings": lambda: frame().astype("string"),
    "pandas strings in Arrow": lambda: frame().convert_dtypes(dtype_backend="pyarrow"),
    "pandas categories": lambda: frame().astype("category"),
    "pandas bytes": lambda: frame(value=[each.encode() for each in VALUES]),
    "pandas filtered": lambda: (
        frame(value=VALUES).iloc[[0, 1, 2]].reset_index().query("index >= 0")[[*COLUMNS]]
    ),
    "pandas with gaps in its index": lambda: pd.concat([frame(), frame()])[3:],
    "pandas sorted": frame()[::-1].sort_index,
    "pandas with a named index": named_index,
    "pandas with an index of times": lambda: frame().set_index(
        pd.date_range("2026-01-01", periods=3)
    ),
    "polars": lambda: pl.DataFrame(COLUMNS),
    "polars categorical": lambda: polars(pl.Categorical),
    "polars enum": lambda: polars(pl.Enum([*VALUES, "k", "l", "red", "green"])),
    "polars binary": lambda: polars(pl.Binary),
    "polars chunked": lambda: pl.concat([pl.DataFrame(COLUMNS)[:1], pl.DataFrame(COLUMNS)[1:]]),
    "polars filtered": lambda: pl.DataFrame(COLUMNS).filter(pl.col("key") != "x"),
    "polars collected": lambda: pl.DataFrame(COLUMNS).lazy().collect(),
    "duckdb relation": lambda: duckdb.sql(
        "select * from (values ('one', 'k', 'red'), ('two', 'k', 'red'), ('three', 'l', 'green')) "
        "as t(value, key, tag)"
    ),
    "duckdb enum": lambda: duckdb.sql(
        "select value, key::enum('k', 'l') as key, tag from (values ('one', 'k', 'red'), "
        "('two', 'k', 'red'), ('three', 'l', 'green')) as t(value, key, tag)"
    ),
    "duckdb blob": lambda: duckdb.sql(
        "select value::blob as value, key, tag from (values ('one', 'k', 'red'), "
        "('two', 'k', 'red'), ('three', 'l', 'green')) as t(value, key, tag)"
    ),
    "duckdb table": lambda: duckdb.from_arrow(pa.table(COLUMNS)).to_arrow_table(),
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_tables_hold_their_rows(table: Callable[[], Any]) -> None:
    assert rows(table()) == ROWS


NOTHING = [None, None, None]
WITHOUT_KEYS: dict[str, Callable[[], Any]] = {
    "of type null": lambda: pa.table({**COLUMNS, "key": pa.nulls(3)}),
    "of null strings": lambda: pa.table({**COLUMNS, "key": pa.nulls(3, pa.string())}),
    "of a dictionary of nulls": lambda: pa.table(
        {**COLUMNS, "key": pa.nulls(3, pa.dictionary(pa.int8(), pa.string()))}
    ),
    "of pandas": lambda: frame(key=NOTHING),
    "of pandas, nan": lambda: frame(key=pd.Series([np.nan] * 3, dtype=object)),
    "of pandas, NA": lambda: frame(key=pd.Series([pd.NA] * 3, dtype="string")),
    "of polars": lambda: pl.DataFrame({**COLUMNS, "key": NOTHING}),
    "of DuckDB": lambda: duckdb.sql(
        "select value, null as key, tag from (values ('one', 'red'), ('two', 'red'), "
        "('three', 'green')) as t(value, tag)"
    ),
}


@pytest.mark.parametrize("table", WITHOUT_KEYS.values(), ids=WITHOUT_KEYS)
def test_a_column_of_only_nulls_gives_no_keys(table: Callable[[], Any]) -> None:
    assert rows(table()) == [(value, "", tag) for value, _, tag in ROWS]


EMPTY: dict[str, Callable[[], Any]] = {
    "pyarrow": lambda: arrow(pa.string())[:0],
    "pyarrow without types": lambda: pa.table({name: pa.nulls(0) for name in COLUMNS}),
    "pandas": lambda: frame()[:0],
    "pandas without types": lambda: pd.DataFrame(columns=[*COLUMNS]),
    "pandas filtered": lambda: frame()[frame().key > "x"],
    "polars": lambda: pl.DataFrame(COLUMNS)[:0],
    "polars without types": lambda: pl.DataFrame({name: [] for name in COLUMNS}),
    "DuckDB": lambda: duckdb.sql("select 'a' as value, 'k' as key where 1 = 0"),
}


@pytest.mark.parametrize("table", EMPTY.values(), ids=EMPTY)
def test_a_table_without_rows_sends_nothing(table: Callable[[], Any]) -> None:
    assert rows(table()) == []


SERIES: dict[str, Callable[[], Any]] = {
    "array": lambda: pa.array(VALUES),
    "chunked array": lambda: pa.chunked_array([VALUES[:1], VALUES[1:]]),
    "dictionary": lambda: pa.array(VALUES).dictionary_encode(),
    "polars": lambda: pl.Series(VALUES),
    "polars categorical": lambda: pl.Series(VALUES, dtype=pl.Categorical),
}


@pytest.mark.parametrize("series", SERIES.values(), ids=SERIES)
def test_an_array_holds_bodies(series: Callable[[], Any]) -> None:
    assert rows(series()) == [(value, "", "") for value in VALUES]


TEXTS: dict[str, Callable[[], Any]] = {
    "pandas": lambda: pd.Series(KEYS),
    "pandas strings": lambda: pd.Series(KEYS, dtype="string"),
    "numpy": lambda: np.array(KEYS),
    "numpy objects": lambda: np.array(KEYS, dtype=object),
    "polars": lambda: pl.Series(KEYS),
}


@pytest.mark.parametrize("keys", TEXTS.values(), ids=TEXTS)
def test_keys_beside_bodies_are_any_sequence_of_texts(keys: Callable[[], Any]) -> None:
    (chunk,) = chunks([each.encode() for each in VALUES], "T", keys(), None)
    assert chunk.keys == [key.encode() for key in KEYS]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "numbers": (lambda: pa.table({"value": [1]}), "column value holds int64.* cast it to string"),
    "numbers as keys": (lambda: pa.table({"value": ["x"], "key": [1]}), "column key holds int64"),
    "no rows of numbers": (
        lambda: pa.table({"value": pa.array([], pa.int64())}),
        "column value holds int64",
    ),
    "times": (
        lambda: frame(key=pd.date_range("2026-01-01", periods=3)),
        "column key holds timestamp.*",
    ),
    "categories of numbers": (
        lambda: frame(key=pd.Categorical([1, 2, 3])),
        "column key holds dictionary<values=int64",
    ),
    "lists": (lambda: pl.DataFrame({"value": [["x"]]}), "column value holds .*list"),
    "structs": (lambda: pl.DataFrame({"value": [{"a": 1}]}), "column value holds struct"),
    "an extension of bytes": (
        lambda: pa.table({"value": ["x"], "key": pa.array([bytes(16)], pa.uuid())}),
        "column key holds extension<arrow.uuid>.*cast it",
    ),
    "objects of pandas": (
        lambda: frame(value=["x", 5, b"y"]),
        "DataFrame cannot become an Arrow table: .*column value",
    ),
    "two columns of a name": (
        lambda: pd.concat([frame(), frame()], axis=1),
        "DataFrame cannot become an Arrow table: .*[Dd]uplicate",
    ),
    "other columns": (lambda: pl.DataFrame({**COLUMNS, "n": 1}), "columns value, key, tag, n"),
    "a named index of another name": (
        lambda: frame().set_index(pd.Index(["a", "b", "c"], name="day")),
        "columns value, key, tag, day.*select or rename",
    ),
    "a range with a name": (
        lambda: pd.DataFrame({"value": VALUES}, index=pd.RangeIndex(3, name="key")),
        "column key holds int64",
    ),
    "a null value": (lambda: pl.DataFrame({"value": ["x", None]}), "row 1: its value is null"),
    "a null in a dictionary": (
        lambda: pa.table({"value": pa.array(["x", None]).dictionary_encode()}),
        "row 1: its value is null",
    ),
    "a tag that cannot be selected": (
        lambda: pa.table({"value": ["x", "y"], "tag": ["a", "a||b"]}),
        r"row 1: tag='a\|\|b' could never be selected",
    ),
    "a lazy frame": (lambda: pl.DataFrame(COLUMNS).lazy(), r"LazyFrame: pass its collect\(\)"),
    "a number": (lambda: 5, "not int: give a list"),
}


@pytest.mark.parametrize(("table", "reason"), REFUSED.values(), ids=REFUSED)
def test_refused_tables_name_the_column_and_a_way_out(
    table: Callable[[], Any], reason: str
) -> None:
    with pytest.raises(InvalidMessage, match=reason):
        rows(table())


def test_rows_of_several_topics_keep_their_numbers() -> None:
    table = pa.table({"value": ["a", "b", "c", ""], "topic": ["T", "U", "T", "U"]})
    with pytest.raises(InvalidMessage, match="row 3: a body of 0 bytes for U"):
        rows(table, None)


def test_a_reader_is_read_while_it_is_sent() -> None:
    drawn: list[int] = []

    def batches() -> Any:
        for number in range(3):
            drawn.append(number)
            yield pa.record_batch({"value": ["x"]})

    schema = pa.schema([("value", pa.string())])
    found = chunks(pa.RecordBatchReader.from_batches(schema, batches()), "T", None, None)
    next(found)
    assert drawn == [0]


@pytest.mark.slow
async def test_a_frame_of_polars_is_stored() -> None:
    async with headrace.embedded() as mq, mq.producer() as producer:
        await producer.send_many(polars(pl.Categorical), topic="frames")
        async with mq.consumer("readers", "frames") as consumer:
            found = []
            async for message in consumer:
                found.append((message.body.decode(), message.key, message.tag))
                if len(found) == len(ROWS):
                    break
    assert sorted(found) == sorted(ROWS)
