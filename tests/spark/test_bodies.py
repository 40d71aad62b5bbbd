"""Bodies of JSON and MSGPACK as columns, by DDL, Avro's schemas and models of pydantic."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
import pickle
import re
import sys
import types
import uuid
from decimal import Decimal
from typing import Annotated, Any, Literal

import msgspec
import pyarrow as pa
import pydantic
import pytest
from pydantic import Field
from pyspark.sql import types as t

from headrace import Topic
from headrace.spark import model_schema, typed
from headrace.spark.body.ddl import parse_ddl
from headrace.spark.body.format import body_format
from headrace.spark.body.models import MODULES_VARIABLE, PICKLED_VARIABLE
from headrace.spark.errors import OptionError, SchemaError
from headrace.spark.read.columns import arrow_schema
from headrace.spark.read.schema import source_schema
from headrace.spark.source import HeadraceSource
from tests.support.documents import blocks

NOON = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
DDL = (
    "id bigint not null, name string, at timestamp, day date, amount decimal(10,2), raw binary, "
    "tags array<string>, place struct<lat: double, lon: double>, counts map<string, int>"
)


def decoded(
    schema: str, bodies: list[bytes], encoding: str = "json"
) -> tuple[list[Any], list[Any]]:
    """The rows and why they are corrupt, from a format as tasks get it."""
    body = pickle.loads(pickle.dumps(body_format(schema, encoding)))
    columns, corrupt = body.decode(pa.array(bodies, pa.binary()))
    wanted = arrow_schema(t.StructType(body.fields), body)
    batch = pa.RecordBatch.from_arrays(columns, schema=wanted)
    batch.validate(full=True)
    assert corrupt.type == pa.string()
    return batch.to_pylist(), corrupt.to_pylist()


def test_json_by_ddl() -> None:
    body = {
        "id": 7,
        "name": "é",
        "at": "2026-01-01T13:00:00+01:00",
        "day": "2026-01-02",
        "amount": "1.25",
        "tags": ["a", None],
        "place": {"lat": 1, "lon": None, "more": [1]},
        "counts": {"a": 1},
        "raw": "eHg=",
        "not asked for": {},
    }
    rows, corrupt = decoded(DDL, [json.dumps(body).encode(), b' {\n"id": 8}'])
    assert rows[0] == {
        "id": 7,
        "name": "é",
        "at": NOON,
        "day": dt.date(2026, 1, 2),
        "amount": Decimal("1.25"),
        "tags": ["a", None],
        "place": {"lat": 1.0, "lon": None},
        "counts": [("a", 1)],
        "raw": b"xx",
    }
    assert rows[1] == dict.fromkeys(rows[0]) | {"id": 8}
    assert corrupt == [None, None]


def test_msgpack_by_ddl() -> None:
    body = {"id": 7, "at": NOON, "counts": {"a": 1}, "raw": b"\xff", "place": None}
    rows, corrupt = decoded(DDL, [msgspec.msgpack.encode(body)], "msgpack")
    assert rows[0]["at"] == NOON
    assert rows[0]["raw"] == b"\xff"
    assert rows[0]["place"] is None
    assert corrupt == [None]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"[]", "Expected `object`, got `array`"),
        (b"null", "Expected `object`, got `null`"),
        (b"{}", "missing required field `id`"),
        (b'{"id": null}', "Expected `int`, got `null`"),
        (b'{"id": 1}{"id": 2}', "trailing characters"),
        (b'{"id": 1.5}', "Expected `int`, got `float`"),
        (b'{"id": 9223372036854775808}', "Expected `int` <= 9223372036854775807"),
        (b'{"id": 1, "counts": {"a": 2147483648}}', r"Expected `int` <= 2147483647"),
        (b'{"id": 1, "name": 5}', r"Expected `str \| null`, got `int` - at `\$.name`"),
        (b'{"id": 1, "name": "\xff"}', "utf-8"),
        (b'{"id": 1, "place": {"lat": "x"}}', r"at `\$.place.lat`"),
        (b'{"id": 1, "day": "2026-02-30"}', "Invalid RFC3339 encoded date"),
        (b'{"id": 1, "amount": "1.255"}', r"does not fit decimal\(10,2\) - at `\$.amount`"),
        (b'{"id": 1, "amount": "123456789"}', r"does not fit decimal\(10,2\)"),
        (b'{"id": 1, "amount": 1E-500000}', r"does not fit decimal\(10,2\)"),
        (b'{"id": 1, "amount": 1E-10000000}', r"does not fit decimal\(10,2\)"),
        (b'{"id": 1, "amount": "NaN"}', r"NaN does not fit decimal\(10,2\)"),
        (b"[" * 100_000, "maximum recursion depth|Expected `object`"),
    ],
)
def test_a_bad_body_stands_alone(body: bytes, reason: str) -> None:
    good = [b'{"id": %d, "name": "n"}' % number for number in range(9)]
    rows, corrupt = decoded(DDL, [*good[:4], body, *good[4:]])
    assert [row["id"] for row in rows] == [0, 1, 2, 3, None, 4, 5, 6, 7, 8]
    assert set(rows[4].values()) == {None}
    assert re.search(reason, corrupt[4])
    assert [each for each in corrupt if each] == [corrupt[4]]


def test_nothing_but_bad_bodies() -> None:
    rows, corrupt = decoded("a int", [b"x"] * 100)
    assert {row["a"] for row in rows} == {None}
    assert len(corrupt) == 100
    assert all(corrupt)


def test_names_that_are_none_in_python() -> None:
    ddl = "`a b` int, `class` struct<`x.y`: int>, `__init__` int, l array<struct<`p q`: int>>"
    rows, _ = decoded(ddl, [b'{"a b": 1, "class": {"x.y": 2}, "__init__": 3, "l": [{"p q": 4}]}'])
    assert rows == [{"a b": 1, "class": {"x.y": 2}, "__init__": 3, "l": [{"p q": 4}]}]


# --- Avro ----------------------------------------------------------------------------------

AVRO = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "note", "type": ["null", "string"], "default": None},
        {"name": "size", "type": {"type": "enum", "name": "Size", "symbols": ["S", "L"]}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "lines", "type": {"type": "array", "items": {
            "type": "record", "name": "Line", "fields": [{"name": "sku", "type": "string"}]}}},
        {"name": "first", "type": ["null", "Line"]},
        {"name": "counts", "type": {"type": "map", "values": "int"}},
    ],
}  # fmt: skip


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_avro(encoding: str) -> None:
    body = {
        "id": 1,
        "size": "L",
        "at": int(NOON.timestamp() * 1000) + 5,
        "day": 20_000,
        "lines": [{"sku": "a"}],
        "first": {"sku": "b"},
        "counts": {"x": 1},
    }
    codec: Any = msgspec.json if encoding == "json" else msgspec.msgpack
    rows, corrupt = decoded(
        json.dumps(AVRO), [codec.encode(body), codec.encode({"id": 1})], encoding
    )
    assert rows[0] == {
        "id": 1,
        "note": None,
        "size": "L",
        "at": NOON + dt.timedelta(milliseconds=5),
        "day": dt.date(1970, 1, 1) + dt.timedelta(days=20_000),
        "lines": [{"sku": "a"}],
        "first": {"sku": "b"},
        "counts": [("x", 1)],
    }
    assert corrupt == [None, "Object missing required field `size`"]


def test_avro_names_have_namespaces() -> None:
    size = {"type": "enum", "name": "Size", "symbols": ["S", "L"]}
    line = {
        "type": "record",
        "name": "Line",
        "namespace": "org.stock",
        "fields": [{"name": "sku", "type": "string"}, {"name": "size", "type": "com.shop.Size"}],
    }
    fields = [
        {"name": "a", "type": size},
        {"name": "b", "type": "com.shop.Size"},
        {"name": "c", "type": line},
        {"name": "d", "type": ["null", "org.stock.Line"]},
        {"name": "e", "type": "Size"},
    ]
    schema = {"type": "record", "name": "com.shop.Order", "fields": fields}
    line_body = {"sku": "x", "size": "L"}
    body = {"a": "S", "b": "L", "c": line_body, "d": line_body, "e": "S"}
    assert decoded(json.dumps(schema), [json.dumps(body).encode()]) == ([body], [None])


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_avro_bytes_of_fixed_size(encoding: str) -> None:
    md5 = {"type": "fixed", "name": "MD5", "size": 4}
    fields = [
        {"name": "a", "type": md5},
        {"name": "b", "type": ["null", "MD5"]},
        {"name": "c", "type": ["null", {"type": "array", "items": "MD5"}]},
    ]
    schema = json.dumps({"type": "record", "name": "R", "fields": fields})
    codec: Any = msgspec.json if encoding == "json" else msgspec.msgpack
    sizes = [(4, 4), (3, 4), (4, 5)]
    bodies = [codec.encode({"a": b"\xff" * a, "b": b"x" * b, "c": [b"1234"]}) for a, b in sizes]
    rows, corrupt = decoded(schema, [*bodies, codec.encode({"a": b"abcd"})], encoding)
    assert rows[0] == {"a": b"\xff" * 4, "b": b"xxxx", "c": [b"1234"]}
    assert rows[3] == {"a": b"abcd", "b": None, "c": None}
    assert corrupt[0] is corrupt[3] is None
    assert re.search(r"length >= 4 - at `\$.a`", corrupt[1])
    assert re.search(r"length <= 4 - at `\$.b`", corrupt[2])


def test_a_time_beyond_the_column() -> None:
    field = {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}}
    schema = json.dumps({"type": "record", "name": "R", "fields": [field]})
    rows, corrupt = decoded(schema, [b'{"at": 0}', b'{"at": 9223372036854775807}'])
    assert [row["at"] for row in rows] == [dt.datetime(1970, 1, 1, tzinfo=dt.UTC), None]
    assert corrupt[0] is None
    assert "out of bounds" in corrupt[1]


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ('{"type": "record"', "looks like Avro JSON"),
        ('{"type": "array", "items": "int"}', "must be a record"),
        ('{"type": "record", "name": "R", "fields": []}', "record 'R' has no fields"),
        (
            '{"type": "record", "fields": [{"name": "a", "type": {"type": "fixed", "size": "4"}}]}',
            "field a is fixed with size '4'",
        ),
        (
            '{"type": "record", "fields": [{"name": "a", "type": ["int", "string"]}]}',
            "a is a union",
        ),
        ('{"type": "record", "fields": [{"name": "a", "type": "nt"}]}', "unknown type 'nt'"),
        ('{"type": "record", "fields": [{"name": "a"}]}', "field a has no type"),
        ('{"type": "record", "fields": [{"type": "int"}]}', "has no name"),
        (
            '{"type": "record", "fields": [{"name": "a", "type": {"logicalType": "date"}}]}',
            "field a has no type",
        ),
        (
            json.dumps(
                {
                    "type": "record",
                    "fields": [
                        {
                            "name": "a",
                            "type": {"type": "bytes", "logicalType": "decimal", "precision": 39},
                        }
                    ],
                }
            ),
            r"decimal\(39,0\): a decimal has at most 38 digits",
        ),
    ],
)
def test_a_bad_avro_schema(schema: str, said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        body_format(schema, "json")


# --- models --------------------------------------------------------------------------------


class Size(enum.StrEnum):
    SMALL = "S"
    LARGE = "L"


class Line(pydantic.BaseModel):
    sku: str
    price: Decimal = Decimal(1)


class Order(pydantic.BaseModel):
    id: Annotated[int, Field(gt=0)]
    key: uuid.UUID
    size: Size
    kind: Literal["new", "old"] = "new"
    at: dt.datetime = Field(alias="created_at")
    lines: list[Line]
    first: Line | None = None
    counts: dict[str, int] = {}
    note: str | None = None


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
@pytest.mark.parametrize("schema", [model_schema(Order), f"{__name__}:Order"], ids=["text", "path"])
def test_a_model_of_pydantic(schema: str, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PICKLED_VARIABLE, "1")
    monkeypatch.setenv(MODULES_VARIABLE, __name__)
    # By its path it is imported as anybody's module is; that of a test has no place in sys.path.
    module = types.ModuleType(__name__)
    vars(module)["Order"] = Order
    monkeypatch.setitem(sys.modules, __name__, module)
    key = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"
    good = {
        "id": 3,
        "key": key,
        "size": "L",
        "created_at": "2026-01-01T12:00:00Z",
        "lines": [{"sku": "a", "price": "2.5"}],
        "first": {"sku": "b"},
    }
    codec: Any = msgspec.json if encoding == "json" else msgspec.msgpack
    rows, corrupt = decoded(
        schema, [codec.encode(good), codec.encode(good | {"id": 0}), b"\xc1"], encoding
    )
    assert rows[0] == {
        "id": 3,
        "key": key,
        "size": "L",
        "kind": "new",
        "at": NOON,
        "lines": [{"sku": "a", "price": Decimal("2.5")}],
        "first": {"sku": "b", "price": Decimal(1)},
        "counts": [],
        "note": None,
    }
    assert corrupt[:2] == [None, "id: Input should be greater than 0"]
    assert corrupt[2]


@dataclasses.dataclass
class Place:
    lat: float
    lon: float | None = None


class Parcel(msgspec.Struct, rename="camel"):
    parcel_id: Annotated[int, msgspec.Meta(gt=0)]
    size: Size
    places: list[Place]
    sent_at: dt.datetime | None = None
    home: Place | None = None
    sender: uuid.UUID | None = None

    def __post_init__(self) -> None:
        if self.size is Size.LARGE and not self.places:
            raise KeyError("no places")


PARCELS = [
    Parcel(7, Size.SMALL, [Place(1, 2)], NOON, Place(3.5), uuid.UUID(int=1)),
    Parcel(8, Size.LARGE, [Place(1)]),
]


@pytest.mark.parametrize("form", ["json", "msgpack"])
def test_a_typed_topic_of_structs(
    form: Literal["json", "msgpack"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODULES_VARIABLE, __name__)
    module = types.ModuleType(__name__)
    vars(module).update(globals())
    monkeypatch.setitem(sys.modules, __name__, module)
    topic = Topic("parcels", Parcel, form=form)
    options = typed(topic)
    assert options == {"topic": "parcels", "schema": f"{__name__}:Parcel", "encoding": form}
    bodies = [topic.message(each).body for each in PARCELS]
    library: Any = msgspec.json if form == "json" else msgspec.msgpack
    bad = [{"parcelId": 0, "size": "S", "places": []}, {"parcelId": 1, "size": "L", "places": []}]
    rows, corrupt = decoded(options["schema"], [*bodies, *map(library.encode, bad)], form)
    assert rows[:2] == [
        {
            "parcel_id": 7,
            "size": "S",
            "places": [{"lat": 1.0, "lon": 2.0}],
            "sent_at": NOON,
            "home": {"lat": 3.5, "lon": None},
            "sender": str(uuid.UUID(int=1)),
        },
        {
            "parcel_id": 8,
            "size": "L",
            "places": [{"lat": 1.0, "lon": None}],
            "sent_at": None,
            "home": None,
            "sender": None,
        },
    ]
    assert corrupt == [
        None,
        None,
        "Expected `int` >= 1 - at `$.parcelId`",
        "the model raised KeyError: 'no places'",
    ]


class Spark:
    """Takes the options of a read, and returns its columns instead of a frame."""

    read = property(lambda self: self)

    def format(self, name: str) -> Spark:
        assert name == "headrace"
        return self

    def options(self, **options: str) -> Spark:
        self.given = options
        return self

    def load(self) -> list[str]:
        return list(HeadraceSource(self.given).schema().names)


def test_the_example_of_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODULES_VARIABLE, "shop")
    shop = types.ModuleType("shop.models")
    vars(shop)["Order"] = msgspec.defstruct("Order", [("id", int)], module="shop.models")
    monkeypatch.setitem(sys.modules, "shop", types.ModuleType("shop"))
    monkeypatch.setitem(sys.modules, "shop.models", shop)
    (example,) = [code for _, _, code in blocks("docs/spark.md") if "typed(" in code]
    names: dict[str, Any] = {"spark": Spark()}
    exec(example, names)
    assert names["orders"][:3] == ["id", "_corrupt", "topic"]


def test_models_that_workers_cannot_import_are_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    class Local(msgspec.Struct):
        a: int

    monkeypatch.setenv(PICKLED_VARIABLE, "1")
    options = typed(Topic("locals", Local))
    assert decoded(options["schema"], [b'{"a": 1}']) == ([{"a": 1}], [None])


class Strange(pydantic.BaseModel):
    either: int | str


class Node(pydantic.BaseModel):
    children: list[Node] = []


class Moody(pydantic.BaseModel):
    a: int

    @pydantic.field_validator("a")
    @classmethod
    def check(cls, value: int) -> int:
        return {1: 1}[value]


def test_a_model_that_raises_costs_one_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PICKLED_VARIABLE, "1")
    rows, corrupt = decoded(model_schema(Moody), [b'{"a": 1}', b'{"a": 2}', b'{"a": 1}'])
    assert [row["a"] for row in rows] == [1, None, 1]
    assert corrupt == [None, "the model raised KeyError: 2", None]


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (model_schema(Strange), r"Strange.either is .*no column can hold"),
        (model_schema(Node), "Node contains itself, which no column can hold"),
        ("no_such_module:Order", "does not name a model that Spark's Python workers can import"),
        ("json:dumps", "is not a pydantic model, msgspec struct or dataclass"),
    ],
)
def test_a_bad_model(schema: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PICKLED_VARIABLE, "1")
    monkeypatch.setenv(MODULES_VARIABLE, "no_such_module, json")
    with pytest.raises(SchemaError, match=said):
        body_format(schema, "json")


# --- DDL -----------------------------------------------------------------------------------


def test_ddl() -> None:
    found = parse_ddl(
        "a INT, b: array<struct<x: bigint, `y z` decimal(12,2)>> NOT NULL COMMENT 'the, rest', "
        "c map<string, timestamp_ntz>, d decimal(5), e varchar(10), `struct` struct<f: byte>"
    )
    part = t.StructType(
        [t.StructField("x", t.LongType()), t.StructField("y z", t.DecimalType(12, 2))]
    )
    assert found == t.StructType(
        [
            t.StructField("a", t.IntegerType()),
            t.StructField("b", t.ArrayType(part), nullable=False),
            t.StructField("c", t.MapType(t.StringType(), t.TimestampNTZType())),
            t.StructField("d", t.DecimalType(5, 0)),
            t.StructField("e", t.StringType()),
            t.StructField("struct", t.StructType([t.StructField("f", t.ByteType())])),
        ]
    )
    assert parse_ddl("struct<a: int>") == parse_ddl("a int")


@pytest.mark.slow
def test_ddl_is_read_as_spark_reads_it(spark: Any) -> None:
    assert parse_ddl(DDL) == t.StructType.fromDDL(DDL)
    assert (
        parse_ddl(source_schema().simpleString()).simpleString() == source_schema().simpleString()
    )


@pytest.mark.parametrize(
    ("ddl", "said"),
    [
        ("", "at character 1: expected a column name, not the end"),
        ("a in", "at character 3: 'in' is not a type; did you mean int"),
        ("a int,", "at character 7: expected a column name"),
        ("a int b int", "at character 7: expected the end, not 'b'"),
        ("a array<int", "at character 12: expected '>', not the end"),
        ("a decimal(x)", "at character 11: expected a number, not 'x'"),
        ("a $", "at character 3: '\\$' is invalid"),
        ("m map<int, string>", "map keys in a body must be strings"),
        (
            "a decimal(39,2)",
            r"decimal\(39,2\): a decimal has at most 38 digits, .* scale is at most its precision",
        ),
        ("a decimal(0)", r"decimal\(0,0\): a decimal has at most 38 digits"),
        ("a decimal(5,6)", r"decimal\(5,6\): .* scale is at most its precision"),
        (str(Order), r"takes text.*model_schema\(Order\)"),
        (str(t.StructType([])), r"takes text.*simpleString\(\)"),
    ],
)
def test_bad_ddl(ddl: str, said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        body_format(ddl, "json")


def test_an_encoding_that_there_is_not() -> None:
    with pytest.raises(OptionError, match="encoding='xml': expected json or msgpack"):
        body_format("a int", "xml")
