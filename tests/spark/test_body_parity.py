"""Every type of a schema gives what Spark's own readers give, or the body is corrupt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from headrace import blocking
from headrace.embedded import Embedded
from tests.spark.body_fuzz import AVRO_LEAVES, LEAVES, NUMBERS, SHAPES, TEXTS

pytestmark = pytest.mark.slow

# One with gaps and overlaps, in which local times are missing or ambiguous.
ZONE = "America/New_York"
COLUMNS = {
    f"c{number}": (shape, leaf)
    for number, (shape, leaf) in enumerate((shape, leaf) for shape in SHAPES for leaf in LEAVES)
}
SCHEMA = ", ".join(f"{name} {shape.format(leaf)}" for name, (shape, leaf) in COLUMNS.items())
# Values that must be read, not only read alike.
READABLE = {
    "boolean": "true", "tinyint": "127", "smallint": "-129", "int": "32768",
    "bigint": "9223372036854775807", "float": "0.1", "double": "1e308", "string": '"x"',
    "binary": '"eHg="', "date": '"0001-01-01"', "timestamp": '"2026-03-08T02:30:00"',
    "timestamp_ntz": '"2026-01-31T12:00:00"', "decimal(4,2)": "99.99", "decimal(10,2)": '"99.99"',
    "decimal(38,18)": "1.005", "decimal(38,0)": "1" * 38, "decimal(2,2)": "0.1",
}  # fmt: skip
# Spark computes with all digits that an exponent stands for.
DIGITS_MAX = 1000
# Java's offsets end at 18 hours, those of RFC 3339 at 24.
LONG_OFFSET = "23:59"


@pytest.mark.parametrize("seed", [1, 2])
def test_no_body_ends_the_process_or_is_changed(seed: int) -> None:
    command = [sys.executable, "-m", "tests.spark.body_fuzz", str(seed)]
    ended = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"TZ": "UTC"}, check=False
    )
    assert ended.returncode == 0, f"seed {seed}: {ended.stdout[-3000:]}{ended.stderr[-3000:]}"


def bodies() -> list[str]:
    """Each with one of the columns."""
    numbers = [each for each in NUMBERS if "E" not in each and len(each) < DIGITS_MAX]
    found = (*numbers, *(each for each in TEXTS if not each.endswith(LONG_OFFSET)))
    values = [*numbers, *map(json.dumps, found), "null", "true", "[]", "{}"]
    return [
        SHAPES[shape][0].format(value).replace('"a"', f'"{name}"', 1)
        for name, (shape, _) in COLUMNS.items()
        for value in values
    ]


@pytest.fixture
def zone(spark: SparkSession) -> Iterator[str]:
    before = spark.conf.get("spark.sql.session.timeZone") or "UTC"
    spark.conf.set("spark.sql.session.timeZone", ZONE)
    yield ZONE
    spark.conf.set("spark.sql.session.timeZone", before)


def sent(mq: Embedded, admin: blocking.Admin, topic: str, values: list[bytes]) -> str:
    from headrace import blocking

    admin.create_topic(topic, queues=1)
    with blocking.Producer(nameserver=mq.nameserver) as producer:
        producer.send_many(values, topic=topic)
    return topic


def read(spark: SparkSession, mq: Embedded, topic: str, **options: str) -> DataFrame:
    given = {"nameserver": mq.nameserver, "topic": topic} | options
    return spark.read.format("headrace").options(**given).load()


def texts(names: Any, prefix: str = "") -> Any:
    """Columns as one array of texts, which keep microseconds and can be compared."""
    return f.array(*(f.col(prefix + name).cast("string") for name in names))


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_by_ddl_as_from_json(
    encoding: str, spark: SparkSession, mq: Embedded, admin: blocking.Admin, zone: str
) -> None:
    sources = bodies()
    values = [source.encode() for source in sources]
    if encoding == "msgpack":
        kept = [(source, packed(source)) for source in sources]
        sources = [source for source, value in kept if value is not None]
        values = [value for _, value in kept if value is not None]
    topic = sent(mq, admin, f"parity-{encoding}", values)
    ours = read(spark, mq, topic, schema=SCHEMA, encoding=encoding).select(
        "queue_offset", "_corrupt", texts(COLUMNS).alias("ours")
    )
    rows = [row[1:] for row in sorted(ours.collect())]
    assert zone == ZONE
    theirs = from_json(spark, sources)
    assert different(sources, rows, theirs) == []
    if encoding == "json":
        assert unread(sources, rows) == set()


def packed(source: str) -> bytes | None:
    """A body of JSON as MSGPACK, None if it has no such form."""
    try:
        return msgspec.msgpack.encode(json.loads(source))
    except OverflowError:
        return None


def from_json(spark: SparkSession, sources: list[str]) -> list[Any]:
    frame = spark.createDataFrame(list(enumerate(sources)), "n int, body string").coalesce(1)
    parsed = frame.select("n", f.from_json("body", SCHEMA).alias("p"))
    return [row[1] for row in sorted(parsed.select("n", texts(COLUMNS, "p.")).collect())]


def different(sources: list[str], ours: list[Any], theirs: list[Any]) -> list[Any]:
    """Bodies that are not corrupt and read otherwise."""
    return [
        (source, [x for x in mine if x], [x for x in other if x])
        for source, (corrupt, mine), other in zip(sources, ours, theirs, strict=True)
        if corrupt is None and mine != other
    ]


def unread(sources: list[str], rows: list[Any]) -> set[Any]:
    """Types whose readable value was corrupt."""
    good = {source for source, (corrupt, _) in zip(sources, rows, strict=True) if corrupt is None}
    return {
        (shape, leaf)
        for name, (shape, leaf) in COLUMNS.items()
        if SHAPES[shape][0].format(READABLE[leaf]).replace('"a"', f'"{name}"', 1) not in good
    }


def test_by_ddl_as_the_json_data_source(
    spark: SparkSession, tmp_path: Path, mq: Embedded, admin: blocking.Admin, zone: str
) -> None:
    sources = bodies()
    topic = sent(mq, admin, "parity-source", [source.encode() for source in sources])
    (tmp_path / "bodies.json").write_text("\n".join(sources))
    theirs = spark.read.schema(SCHEMA).json(str(tmp_path / "bodies.json")).select(texts(COLUMNS))
    ours = read(spark, mq, topic, schema=SCHEMA).select(
        "queue_offset", "_corrupt", texts(COLUMNS).alias("ours")
    )
    rows = [row[1:] for row in sorted(ours.collect())]
    assert zone == ZONE
    assert different(sources, rows, [row[0] for row in theirs.collect()]) == []


# --- Avro -----------------------------------------------------------------------------------------

AVRO_COLUMNS = {f"c{number}": leaf for number, leaf in enumerate(AVRO_LEAVES)}
RAW_TYPES = {
    "boolean": "boolean", "int": "int", "long": "bigint", "float": "float", "double": "double",
    "string": "string", "bytes": "binary", "fixed": "binary",
}  # fmt: skip


def plain_avro(leaf: Any) -> tuple[Any, str]:
    """The type with the same bytes that is no time, and Spark's type for it."""
    if isinstance(leaf, str):
        return leaf, RAW_TYPES[leaf]
    if leaf.get("logicalType") == "decimal":
        return leaf, f"decimal({leaf['precision']},{leaf['scale']})"
    return {k: v for k, v in leaf.items() if k != "logicalType"}, RAW_TYPES[leaf["type"]]


def avro_sources() -> list[str]:
    values = ["true", "0", "-1", "0.5", "99.99", "20000", "2147483647", "1769860800123", '"eHkz"']
    values += ["253402300799999", "-62135596800000", "1e308", '"x"', '"99.99"', '"2026-01-31"']
    return [f'{{"{name}":{value}}}' for name in AVRO_COLUMNS for value in values]


# By its class: from_avro and the name "avro" need a package that PySpark comes without. Both read
# with the same AvroDeserializer.
AVRO_FILES = "org.apache.spark.sql.avro.AvroFileFormat"


def record(types: dict[str, Any]) -> str:
    fields = [{"name": name, "type": ["null", kind]} for name, kind in types.items()]
    return json.dumps({"type": "record", "name": "R", "fields": fields})


def by_avro(frame: DataFrame, folder: str) -> DataFrame:
    """The columns as Spark's Avro reader has them, from files that hold the plain types."""
    plain = {name: plain_avro(leaf) for name, leaf in AVRO_COLUMNS.items()}
    raw = ", ".join(f"{name} {kind}" for name, (_, kind) in plain.items())
    parsed = frame.select("n", f.from_json("body", raw).alias("p")).select("n", "p.*")
    written = record({"n": "int"} | {name: kind for name, (kind, _) in plain.items()})
    parsed.write.format(AVRO_FILES).option("avroSchema", written).save(folder)
    wanted = record({"n": "int"} | AVRO_COLUMNS)
    return frame.sparkSession.read.format(AVRO_FILES).option("avroSchema", wanted).load(folder)


def test_by_avros_schema_as_sparks_avro(
    spark: SparkSession, tmp_path: Path, mq: Embedded, admin: blocking.Admin, zone: str
) -> None:
    sources = avro_sources()
    topic = sent(mq, admin, "parity-avro", [source.encode() for source in sources])
    frame = read(spark, mq, topic, schema=record(AVRO_COLUMNS))
    numbered = spark.createDataFrame(list(enumerate(sources)), "n int, body string")
    avro = by_avro(numbered, str(tmp_path / "avro"))
    assert zone == ZONE
    assert {name: frame.schema[name].dataType for name in AVRO_COLUMNS} == {
        name: avro.schema[name].dataType for name in AVRO_COLUMNS
    }
    ours = frame.select("queue_offset", "_corrupt", texts(AVRO_COLUMNS).alias("ours"))
    rows = [row[1:] for row in sorted(ours.collect())]
    theirs = [row[1] for row in sorted(avro.select("n", texts(AVRO_COLUMNS)).collect())]
    assert different(sources, rows, theirs) == []
    read_types = {
        source.partition(":")[0] for source, (bad, _) in zip(sources, rows, strict=True) if not bad
    }
    assert len(read_types) == len(AVRO_COLUMNS)
