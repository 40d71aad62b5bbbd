"""Rows with the columns of a model as bodies."""

from __future__ import annotations

import dataclasses
import datetime as dt
import pickle
import sys
import types
import uuid
from decimal import Decimal
from itertools import islice
from typing import Any, Literal

import msgspec
import pyarrow as pa
import pydantic
import pytest
from pyspark.sql import types as t

from headrace import Topic
from headrace.blocking import Admin, Consumer
from headrace.embedded import Embedded
from headrace.errors import InvalidMessage
from headrace.spark import typed
from headrace.spark.body.ddl import parse_ddl
from headrace.spark.body.encode import RowBodies
from headrace.spark.body.format import body_format
from headrace.spark.body.models import MODULES_VARIABLE
from headrace.spark.errors import OptionError, SchemaError
from headrace.spark.source import HeadraceSource
from headrace.spark.write.row_encoding import arrow_schema, check_schema
from headrace.spark.write.sink import BatchWriter, WriteOptions, batch_writer, write_options

NOON = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)


@dataclasses.dataclass
class Place:
    lat: float
    lon: float | None = None


class Parcel(msgspec.Struct, rename="camel"):
    parcel_id: int
    price: Decimal
    places: list[Place]
    sent_at: dt.datetime | None = None
    home: Place | None = None
    counts: dict[str, int] = {}
    sender: uuid.UUID | None = None
    note: str = "none"


class Letter(pydantic.BaseModel):
    letter_id: int = pydantic.Field(alias="letterId", gt=0)
    places: list[Place] = []
    sent_at: dt.datetime = pydantic.Field(alias="sentAt")
    home: Place | None = None


PARCEL = Parcel(7, Decimal("1.25"), [Place(1), Place(2, 3)], NOON, Place(5), {"a": 1})
LETTER = Letter(letterId=7, places=[Place(1, 2)], sentAt=NOON)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """This module, as workers import one."""
    monkeypatch.setenv(MODULES_VARIABLE, __name__)
    module = types.ModuleType(__name__)
    vars(module).update(globals())
    monkeypatch.setitem(sys.modules, __name__, module)


def row_bodies(topic: Topic[Any]) -> RowBodies:
    """As tasks get it."""
    options = typed(topic)
    made = RowBodies(body_format(options["schema"], options["encoding"]))
    restored: RowBodies = pickle.loads(pickle.dumps(made))
    return restored


def batch_of(bodies: RowBodies, rows: list[dict[str, Any]]) -> pa.RecordBatch:
    """Rows with a key, with those columns of the model that the first one has."""
    fields = [t.StructField(name, bodies.fields[name]) for name in rows[0]]
    schema = t.StructType([t.StructField("key", t.StringType()), *fields])
    check_schema(schema, "parcels", bodies.fields)
    rows = [{"key": f"k{number}", **row} for number, row in enumerate(rows)]
    return pa.RecordBatch.from_pylist(rows, arrow_schema(schema, bodies.fields))


@pytest.mark.parametrize("form", ["json", "msgpack"])
def test_rows_become_values_of_a_struct(form: Literal["json", "msgpack"]) -> None:
    topic = Topic("parcels", Parcel, form=form)
    bodies = row_bodies(topic)
    row = {
        "parcel_id": 7,
        "price": Decimal("1.25"),
        "places": [{"lat": 1.0, "lon": None}, {"lat": 2.0, "lon": 3.0}],
        "sent_at": NOON,
        "home": {"lat": 5.0, "lon": None},
        "counts": [("a", 1)],
    }
    made = bodies.add(batch_of(bodies, [row, row | {"home": None, "counts": []}]))
    assert made.schema.names == ["key", "value"]
    values = made.column("value").to_pylist()
    codec: Any = msgspec.json if form == "json" else msgspec.msgpack
    found = [codec.decode(value, type=Parcel) for value in values]
    assert found[0] == PARCEL
    assert (found[1].home, found[1].counts, found[1].note) == (None, {}, "none")


@pytest.mark.parametrize("form", ["json", "msgpack"])
def test_rows_become_values_of_a_model_with_aliases(form: Literal["json", "msgpack"]) -> None:
    topic = Topic("letters", Letter, form=form)
    bodies = row_bodies(topic)
    row = {"letter_id": 7, "places": [{"lat": 1.0, "lon": 2.0}], "sent_at": NOON}
    (value,) = bodies.add(batch_of(bodies, [row])).column("value").to_pylist()
    codec: Any = msgspec.json if form == "json" else msgspec.msgpack
    assert Letter.model_validate(codec.decode(value)) == LETTER


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"letter_id": 0, "sent_at": NOON}, "letter_id: Input should be greater than 0"),
        ({"letter_id": 1, "sent_at": None}, "sent_at: Input should be a valid datetime"),
        ({"letter_id": 1}, "sent_at: Field required"),
    ],
)
def test_a_bad_row_is_named(row: dict[str, Any], reason: str) -> None:
    bodies = row_bodies(Topic("letters", Letter))
    with pytest.raises(InvalidMessage, match=r"row .*letter_id.* is no Letter: " + reason):
        bodies.add(batch_of(bodies, [row]))


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ("letter_id int", "column letter_id is int: the model has bigint"),
        ("letter_id bigint, value string", "drop the column value"),
        ("key string", "no column of the model's: letter_id, places, sent_at, home"),
        ("letter_id bigint, colour string", "column colour: unknown"),
    ],
)
def test_columns_that_do_not_fit_are_refused(columns: str, reason: str) -> None:
    bodies = row_bodies(Topic("letters", Letter))
    with pytest.raises(SchemaError, match=reason):
        check_schema(parse_ddl(columns), "letters", bodies.fields)


def test_written_rows_are_read_by_typed_consumers_and_by_spark(mq: Embedded) -> None:
    topic = Topic("letters", Letter, form="msgpack")
    with Admin(nameserver=mq.nameserver) as admin:
        admin.create_topic(topic, queues=1)
    given = {"nameserver": mq.nameserver, "exactlyOnce": "false", **typed(topic)}
    options: WriteOptions = pickle.loads(pickle.dumps(write_options(given)))
    assert options.bodies is not None
    row = {"letter_id": 7, "places": [{"lat": 1.0, "lon": 2.0}], "sent_at": NOON}
    rows = batch_of(options.bodies, [row, row | {"letter_id": 8}])
    schema = t.StructType([t.StructField(n, k) for n, k in options.bodies.fields.items()])
    writer = batch_writer(given, schema, overwrite=False)
    assert isinstance(writer, BatchWriter)
    writer.write(iter([rows]))
    with Consumer("g", topic, nameserver=mq.nameserver, start="earliest") as consumer:
        found = {message.key: value for value, message in islice(consumer.values(), 2)}
    assert found == {"k0": LETTER, "k1": LETTER.model_copy(update={"letter_id": 8})}
    source = HeadraceSource({"nameserver": mq.nameserver, **typed(topic)})
    reader = source.reader(source.schema())
    batches = [batch for task in reader.partitions() for batch in reader.read(task)]
    (read,) = [batch for batch in batches if len(batch)]
    assert isinstance(read, pa.RecordBatch)
    # A null place, although a place has a field that is never null.
    assert read.select(["letter_id", "home", "_corrupt", "keys"]).to_pylist() == [
        {"letter_id": 7 + number, "home": None, "_corrupt": None, "keys": f"k{number}"}
        for number in range(2)
    ]


class Keyed(msgspec.Struct):
    key: str


def test_options_that_make_no_bodies_are_refused() -> None:
    given = {"nameserver": "127.0.0.1:1", "topic": "T"}
    with pytest.raises(SchemaError, match="names a model"):
        write_options({**given, "schema": "a int"})
    with pytest.raises(OptionError, match="only takes effect together with option schema"):
        write_options({**given, "encoding": "json"})
    keyed = row_bodies(Topic("T", Keyed))
    with pytest.raises(SchemaError, match="key has the name of a column of the sink"):
        check_schema(t.StructType([t.StructField("key", t.StringType())]), "T", keyed.fields)
