"""Avro schemas for message bodies. The bodies are JSON or MessagePack, not Avro itself."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
from pyspark.sql import types as t

from headrace.spark.body.kinds import UTC_MS, UTC_US, Field, Kind, array, leaf, mapping, struct
from headrace.spark.errors import SchemaError

_PRIMITIVES: dict[str, t.DataType] = {
    "boolean": t.BooleanType(),
    "int": t.IntegerType(),
    "long": t.LongType(),
    "float": t.FloatType(),
    "double": t.DoubleType(),
    "string": t.StringType(),
    "bytes": t.BinaryType(),
}
_NULL = "null"


def avro_fields(schema: str) -> tuple[Field, ...]:
    """The fields of a record schema. Raises SchemaError."""
    try:
        record = json.loads(schema)
    except ValueError as error:
        raise SchemaError(f"the schema looks like Avro JSON but does not parse: {error}") from None
    if not isinstance(record, dict) or record.get("type") != "record":
        raise SchemaError("an Avro schema of bodies must be a record: its type is not 'record'")
    return _Names()._fields(record)


class _Names:
    """Parses schemas and remembers named types for later references."""

    def __init__(self) -> None:
        self._kinds: dict[str, Kind] = {}
        self._namespace = ""

    def _fields(self, record: dict[str, Any]) -> tuple[Field, ...]:
        fields = record.get("fields")
        if not isinstance(fields, list) or not fields:
            raise SchemaError(f"the Avro record {record.get('name', '')!r} has no fields")
        around, self._namespace = self._namespace, self._defined(record).rpartition(".")[0]
        found = tuple(
            (_name(field), *self._nullable(field.get("type"), _name(field))) for field in fields
        )
        self._namespace = around
        return found

    def _defined(self, schema: dict[str, Any]) -> str:
        """The full name of the type that ``schema`` defines."""
        return _full_name(str(schema.get("name", "")), schema.get("namespace", self._namespace))

    def _nullable(self, schema: Any, path: str) -> tuple[Kind, bool]:
        if not isinstance(schema, list):
            return self._kind(schema, path), False
        others = [branch for branch in schema if branch != _NULL]
        if len(others) != 1:
            raise SchemaError(
                f"the Avro field {path} is a union of {len(others)} types: a column has "
                "exactly one, optionally with null"
            )
        return self._kind(others[0], path), len(others) < len(schema)

    def _kind(self, schema: Any, path: str) -> Kind:
        if isinstance(schema, str):
            return self._named(schema, path)
        if not isinstance(schema, dict):
            raise SchemaError(f"the Avro field {path} has no type")
        if "logicalType" in schema and (logical := _logical(schema)):
            return logical
        kind = self._complex(schema, path)
        if "name" in schema:
            self._kinds[self._defined(schema)] = kind
        return kind

    def _complex(self, schema: dict[str, Any], path: str) -> Kind:
        match schema.get("type"):
            case "record":
                return struct(self._fields(schema))
            case "array":
                item, has_nulls = self._nullable(schema.get("items"), f"{path}[]")
                return array(item, has_nulls=has_nulls)
            case "map":
                value, has_nulls = self._nullable(schema.get("values"), f"{path}{{}}")
                return mapping(value, has_nulls=has_nulls)
            case "enum":
                return leaf(t.StringType())
            case "fixed":
                return leaf(t.BinaryType(), read=pa.binary(_size(schema, path)))
            case other:
                return self._kind(other, path)

    def _named(self, name: str, path: str) -> Kind:
        if name in _PRIMITIVES:
            return leaf(_PRIMITIVES[name])
        if (known := self._kinds.get(_full_name(name, self._namespace))) is not None:
            return known
        raise SchemaError(f"the Avro field {path} has the unknown type {name!r}")


def _full_name(name: str, namespace: str) -> str:
    return name if "." in name or not namespace else f"{namespace}.{name}"


def _name(field: Any) -> str:
    name = field.get("name") if isinstance(field, dict) else None
    if not isinstance(name, str) or not name:
        raise SchemaError(f"an Avro field has no name: {field!r}")
    return name


def _size(fixed: dict[str, Any], path: str) -> int:
    size = fixed.get("size")
    if type(size) is not int or not 0 < size < 2**31:
        raise SchemaError(
            f"the Avro field {path} is fixed with size {size!r}: give a size in bytes"
        )
    return size


def _logical(schema: dict[str, Any]) -> Kind | None:
    """Times and decimals; None for other logical types, which Avro treats as the plain type."""
    match schema.get("type"), schema["logicalType"]:
        case "int", "date":
            return leaf(t.DateType(), read=pa.int32())
        case "long", "timestamp-millis":
            return leaf(t.TimestampType(), read=pa.int64(), via=UTC_MS)
        case "long", "timestamp-micros":
            return leaf(t.TimestampType(), read=pa.int64(), via=UTC_US)
        case "long", "local-timestamp-millis":
            return leaf(t.TimestampNTZType(), read=pa.int64(), via=pa.timestamp("ms"))
        case "long", "local-timestamp-micros":
            return leaf(t.TimestampNTZType(), read=pa.int64(), via=pa.timestamp("us"))
        case "bytes" | "fixed", "decimal":
            return leaf(t.DecimalType(schema.get("precision", 10), schema.get("scale", 0)))
    return None
