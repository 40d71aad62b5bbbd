"""Decodes hostile bodies by every type of schema: run as a process, because Arrow may crash.

    python -m tests.spark.body_fuzz SEED

Prints each body that was read wrongly, and exits with 1 if there is one.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import os
import random
import sys
import uuid
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pydantic

from headrace.spark import model_schema
from headrace.spark.body.format import body_format
from headrace.spark.body.models import PICKLED_VARIABLE

LEAVES = (
    "boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "string", "binary",
    "date", "timestamp", "timestamp_ntz", "decimal(4,2)", "decimal(10,2)", "decimal(38,18)",
    "decimal(38,0)", "decimal(2,2)",
)  # fmt: skip
# Each with the path from the column to the value.
SHAPES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "{}": ('{{"a":{}}}', ()),
    "array<{}>": ('{{"a":[{}]}}', (0,)),
    "map<string,{}>": ('{{"a":{{"k":{}}}}}', (0, 1)),
    "struct<x:{}>": ('{{"a":{{"x":{}}}}}', ("x",)),
    "array<struct<x:{}>>": ('{{"a":[{{"x":{}}}]}}', (0, "x")),
}
AVRO_LEAVES: tuple[Any, ...] = (
    "boolean", "int", "long", "float", "double", "string", "bytes",
    {"type": "int", "logicalType": "date"},
    *({"type": "long", "logicalType": f"{zone}timestamp-{unit}"}
      for zone in ("", "local-") for unit in ("millis", "micros")),
    {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2},
    {"type": "fixed", "name": "F", "size": 3},
)  # fmt: skip
NUMBERS = (
    "0", "-0", "1", "-1", "1.0", "1.005", "0.1", "99.99", "1e2", "127", "128", "-129", "32768",
    "2147483648", "9223372036854775807", "9223372036854775808", "-9223372036854775809",
    "18446744073709551616", "1" * 38, "1" * 39, "1" * 400, "1" * 5000, "0." + "1" * 5000,
    "1e38", "3.5e38", "1e39", "1e308", "1e309", "1e400", "1e-46", "1e-400", "1E-500000",
    "1E-10000000", "0E-10000000", "1E10000000", "1E999999999999999999999", "253402300800000",
    "-62135596800001",
)  # fmt: skip
TEXTS = (
    "", "x", "eHg=", "eHh=", "eHh", "NaN", "sNaN", "Infinity", "-Infinity", "2026-01-31",
    "0001-01-01", "9999-12-31", "2026-02-30", "2026-01-31T12:00:00", "2026-01-31T12:00:00Z",
    "2026-01-31T12:00:00.123456+02:00", "2026-01-31T23:59:60Z", "2026-01-31T12:00:00+23:59",
    "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00",
    "9999-12-31T23:59:59.999999", "2026-03-08T02:30:00", "2026-11-01T01:30:00",
    "-292275055-05-16T16:47:04Z", "+10000-01-01T00:00:00Z",
)  # fmt: skip
OTHERS = (
    "null", "true", "[]", "{}", "[" * 2000, '{"x":' * 2000, "[[[[1]]]]", '"\\ud800"', '"\\u0000"',
    '"\\udc00\\ud800"', "NaN", "-Infinity", "1_0", "01", '"\xff"', '"' + "y" * 100_000 + '"',
)  # fmt: skip


MODEL_TYPES: tuple[Any, ...] = (
    bool, int, float, str, bytes, dt.datetime, dt.date, Decimal, uuid.UUID, list[Decimal],
    dict[str, dt.datetime],
)  # fmt: skip


def values() -> list[str]:
    """Values of a JSON body, some of them invalid."""
    return [*NUMBERS, *(json.dumps(text) for text in (*NUMBERS, *TEXTS)), *OTHERS]


def decoded(schema: str, encoding: str, bodies: list[bytes]) -> tuple[Any, list[str | None]]:
    columns, corrupt = body_format(schema, encoding).decode(pa.array(bodies, pa.binary()))
    columns[0].validate(full=True)
    return columns[0], corrupt.to_pylist()


def check_ddl(leaf: str, shape: str, wrong: list[str]) -> None:
    """Compare what is read with the body's own value."""
    template, path = SHAPES[shape]
    sources = values()
    bodies = [template.format(value).encode("latin-1") for value in sources]
    column, corrupt = decoded(f"a {shape.format(leaf)}", "json", bodies)
    for index, (value, reason) in enumerate(zip(sources, corrupt, strict=True)):
        cell = column[index]
        if reason is not None:
            is_right = not cell.is_valid
        else:
            is_right = is_same(leaf, value, reached(cell, path))
        if not is_right:
            wrong.append(f"{shape.format(leaf)} of {value[:60]} is {cell} ({reason})")


def reached(cell: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        if not cell.is_valid or (type(step) is int and not len(cell.values)):
            return None
        if len(path) == 2 and path == (0, 1):
            return cell.values.field(1)[0]
        cell = cell[step]
    return cell


def is_same(leaf: str, value: str, cell: Any) -> bool:
    """True if a cell has exactly a JSON value; a float, its nearest one."""
    if cell is None or not cell.is_valid:
        return value == "null" or value in {"[]", "{}"}
    given = json.loads(value, parse_float=str, parse_int=str)
    if leaf.startswith("decimal"):
        return Decimal(cell.as_py()) == Decimal(given)
    if leaf in {"float", "double"}:
        near = np.float32(float(given)) if leaf == "float" else float(given)
        return np.isfinite(near) and cell.as_py() == near
    if leaf in {"timestamp", "timestamp_ntz"}:
        time = dt.datetime.fromisoformat(given)
        utc = time.replace(tzinfo=time.tzinfo or dt.UTC)
        passed = utc - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
        return cell.value == passed // dt.timedelta(microseconds=1)
    if leaf == "binary":
        return cell.as_py() == base64.b64decode(given)
    if leaf == "date":
        return cell.as_py().isoformat() == given
    if leaf in {"string", "boolean"}:
        return cell.as_py() == given
    return cell.as_py() == int(given)


def avro(leaf: Any) -> str:
    item = {"type": "array", "items": leaf}
    fields = [{"name": "a", "type": ["null", leaf]}, {"name": "b", "type": ["null", item]}]
    return json.dumps({"type": "record", "name": "R", "fields": fields})


def schemas() -> list[str]:
    """Every type, alone and within others."""
    own = [f"a {shape.format(leaf)}, b {leaf}" for shape in SHAPES for leaf in LEAVES]
    models = [
        model_schema(pydantic.create_model("Model", a=(kind, ...), b=(kind | None, None)))
        for kind in MODEL_TYPES
    ]
    return [*own, *map(avro, AVRO_LEAVES), *models]


def odd_bodies(encoding: str, chance: random.Random) -> list[bytes]:
    """Bodies of any value in any place, with bits flipped in some."""
    bodies = []
    for value in values():
        for template, _ in SHAPES.values():
            body = template.format(value).encode("latin-1")
            if encoding == "msgpack":
                try:
                    body = msgspec.msgpack.encode(json.loads(body))
                except (ValueError, OverflowError, RecursionError):
                    continue
            if chance.random() < 0.3:
                at = chance.randrange(len(body))
                body = body[:at] + bytes([chance.randrange(256)]) + body[at + 1 :]
            bodies.append(body)
    stamp = b"\x81\xa1a\xc7\x0c\xff"
    extremes = (0, 2**63 - 1, -(2**63), 253402300799, -62135596801)
    nanoseconds = (999_999_999).to_bytes(4, "big")
    seconds = (each.to_bytes(8, "big", signed=True) for each in extremes)
    return [*bodies, *(stamp + nanoseconds + each for each in seconds)]


def main(seed: int) -> int:
    """Run everything; the number of the exit code."""
    os.environ[PICKLED_VARIABLE] = "1"
    wrong: list[str] = []
    for shape in SHAPES:
        for leaf in LEAVES:
            check_ddl(leaf, shape, wrong)
    chance = random.Random(seed)
    for encoding in ("json", "msgpack"):
        bodies = odd_bodies(encoding, chance)
        for schema in schemas():
            decoded(schema, encoding, bodies)
    sys.stdout.write("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
