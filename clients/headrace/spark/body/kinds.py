"""The types of a body's values: as decoded, in Arrow, and in Spark."""

from __future__ import annotations

import decimal
import keyword
from dataclasses import dataclass
from datetime import date, datetime
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, TypedDict

import msgspec
import pyarrow as pa
from pyspark.sql import types as t

from headrace.spark.arrow_types import to_arrow
from headrace.spark.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Kind:
    """A value's type at each stage from body to column.

    spark: the column's type in Spark.
    read: the Arrow type of the decoded value, such as integers for times.
    cast: the Arrow types to cast through; the last one is the column's.
    fields: the fields of a struct.
    """

    spark: t.DataType
    read: pa.DataType
    cast: tuple[pa.DataType, pa.DataType]
    fields: tuple[Field, ...] = ()


Field = tuple[str, Kind, bool]  # name, kind, whether null is allowed

_DIGITS_MAX = 38
UTC_MS = pa.timestamp("ms", tz="UTC")
UTC_US = pa.timestamp("us", tz="UTC")


def leaf(spark: t.DataType, read: pa.DataType | None = None, via: Any = None) -> Kind:
    """A scalar kind, decoded as ``read`` if given, and cast through ``via`` if given.

    Raises SchemaError for a decimal that no column can hold.
    """
    if isinstance(spark, t.DecimalType) and not (
        0 < spark.precision <= _DIGITS_MAX and 0 <= spark.scale <= spark.precision
    ):
        raise SchemaError(
            f"{spark.simpleString()}: a decimal has at most {_DIGITS_MAX} digits, and its scale is "
            "at most its precision"
        )
    final = to_arrow(t.StructType([t.StructField("x", spark)])).field("x").type
    read = final if read is None else read
    return Kind(spark, read, (via or final, final))


def array(item: Kind, *, has_nulls: bool) -> Kind:
    """The kind of a list with items of one kind."""

    def of(kind: pa.DataType) -> pa.DataType:
        return pa.list_(pa.field("element", kind, has_nulls))

    first, last = item.cast
    return Kind(t.ArrayType(item.spark, has_nulls), of(item.read), (of(first), of(last)))


def mapping(value: Kind, *, has_nulls: bool) -> Kind:
    """The kind of a map from strings to values of one kind."""

    def of(kind: pa.DataType) -> pa.DataType:
        key = pa.field("key", pa.string(), nullable=False)
        return pa.map_(key, pa.field("value", kind, has_nulls))

    first, last = value.cast
    spark = t.MapType(t.StringType(), value.spark, has_nulls)
    return Kind(spark, of(value.read), (of(first), of(last)))


def struct(fields: Sequence[Field]) -> Kind:
    """The kind of a struct."""

    def of(kinds: list[pa.DataType]) -> pa.DataType:
        return pa.struct(
            [
                pa.field(name, kind, nullable)
                for (name, _, nullable), kind in zip(fields, kinds, strict=True)
            ]
        )

    spark = t.StructType([t.StructField(name, kind.spark, null) for name, kind, null in fields])
    read = of([kind.read for _, kind, _ in fields])
    first, last = (of([kind.cast[step] for _, kind, _ in fields]) for step in (0, 1))
    return Kind(spark, read, (first, last), tuple(fields))


def kind_of(spark: t.DataType) -> Kind:
    """The kind for a Spark type, with values in their JSON form.

    Raises SchemaError for types that bodies cannot contain.
    """
    match spark:
        case t.StructType():
            return struct([(f.name, kind_of(f.dataType), f.nullable) for f in spark.fields])
        case t.ArrayType():
            return array(kind_of(spark.elementType), has_nulls=spark.containsNull)
        case t.MapType():
            if not isinstance(spark.keyType, t.StringType):
                raise SchemaError(f"{spark.simpleString()}: map keys in a body must be strings")
            return mapping(kind_of(spark.valueType), has_nulls=spark.valueContainsNull)
    kind = leaf(spark)
    python_type(kind.read)
    return kind


# --- Python types, for msgspec ----------------------------------------------------------------

_PYTHON_TYPES: dict[pa.DataType, Any] = {
    pa.bool_(): bool,
    pa.float32(): float,
    pa.float64(): float,
    pa.string(): str,
    pa.binary(): bytes,
    pa.date32(): date,
}


def python_type(kind: pa.DataType, *, as_dict: bool = False) -> Any:
    """The Python type by which a msgspec decoder validates values of an Arrow type.

    as_dict: decode structs as dicts instead of objects, for use within lists and maps, where Arrow
        takes them apart.

    Raises SchemaError for unsupported types.
    """
    if kind in _PYTHON_TYPES:
        return _PYTHON_TYPES[kind]
    if pa.types.is_integer(kind):
        limit = 1 << kind.bit_width - 1
        return Annotated[int, msgspec.Meta(ge=-limit, le=limit - 1)]
    if pa.types.is_fixed_size_binary(kind):
        size = kind.byte_width
        return Annotated[bytes, msgspec.Meta(min_length=size, max_length=size)]
    if pa.types.is_timestamp(kind):
        # Without a zone, a time with one is not of the column's type; with one, see ``fit``.
        return datetime if kind.tz else Annotated[datetime, msgspec.Meta(tz=False)]
    if pa.types.is_decimal(kind):
        return decimal.Decimal
    if pa.types.is_list(kind):
        return list[_nullable(kind.value_field)]  # type: ignore[misc]
    if pa.types.is_map(kind):
        return dict[str, _nullable(kind.item_field)]  # type: ignore[misc]
    if not pa.types.is_struct(kind):
        raise SchemaError(f"bodies cannot contain values of type {kind}")
    fields = [kind.field(number) for number in range(kind.num_fields)]
    return _dict_type(fields) if as_dict else _object_type(fields)


def _dict_type(fields: list[Any]) -> Any:
    parts = {field.name: _nullable(field) for field in fields}
    optional = {
        name: NotRequired[kind]
        for (name, kind), field in zip(parts.items(), fields, strict=True)
        if field.nullable
    }
    return TypedDict("Part", parts | optional)  # type: ignore[operator]


def _object_type(fields: list[Any]) -> Any:
    names = {attribute(field.name): field.name for field in fields}
    parts = [
        (name, _nullable(field, as_dict=False), *((None,) if field.nullable else ()))
        for name, field in zip(names, fields, strict=True)
    ]
    return msgspec.defstruct("Body", parts, rename=names, kw_only=True, gc=False)


def attribute(name: str) -> str:
    """The attribute name for a field, whose own name need not be a Python identifier."""
    is_plain = name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("__")
    return name if is_plain else f"field_{name.encode().hex()}"


def _nullable(field: Any, *, as_dict: bool = True) -> Any:
    kind = python_type(field.type, as_dict=as_dict)
    return kind | None if field.nullable else kind
