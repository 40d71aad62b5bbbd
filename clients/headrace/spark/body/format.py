"""Bodies as columns, by a schema that the reader gives.

Each body is decoded by itself, by a decoder that checks it on the way; what comes out becomes
columns a batch at a time. A body that does not fit is told with the reason and disturbs no other.
"""

from __future__ import annotations

import re
from functools import cached_property
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pydantic
from pyspark.sql import types as t

from headrace.spark.body.avro import avro_fields
from headrace.spark.body.ddl import parse_ddl
from headrace.spark.body.kinds import Field, Kind, attribute, kind_of, python_type, struct
from headrace.spark.body.models import (
    Model,
    check_allowed,
    is_pickled,
    load_model,
    model_fields,
    plain,
)
from headrace.spark.errors import OptionError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Callable

_ENCODINGS = ("json", "msgpack")
# What ``str`` makes of a model, and of a schema of Spark's.
_OBJECT = re.compile(r"<class '(?:.*\.)?(\w+)'>|StructType\(")
_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
# A body that is not of the schema: how decoders say it, and Arrow of what they let through.
_UNDECODABLE = (msgspec.MsgspecError, pydantic.ValidationError, UnicodeDecodeError, RecursionError)
_UNFIT = (pa.ArrowException, OverflowError)


def body_format(schema_option: str, encoding: str) -> BodyFormat:
    """How bodies become columns.

    schema_option: Spark's DDL (``a int, b array<string>``), an Avro record as JSON,
        ``package.module:Model`` for a model of pydantic, or what ``model_schema`` returns.
    encoding: of the bodies: json or msgpack.

    Raises SchemaError, also for a model that the environment does not allow; OptionError.

    Tasks get the format, not the option, and load a model without checking again.
    """
    if encoding not in _ENCODINGS:
        raise OptionError("encoding", encoding, f"bodies are {' or '.join(_ENCODINGS)}")
    reference = _model_reference(schema_option)
    if reference:
        check_allowed(reference)
    return BodyFormat(schema_option, encoding)


class BodyFormat:
    """Turns bodies into rows; see ``body_format``.

    fields: of Spark, one for each column; all may be null, since bodies may be corrupt.
    """

    def __init__(self, schema_option: str, encoding: str) -> None:
        self._arguments = schema_option, encoding
        self._encoding = encoding
        self._model, parts = _parsed(schema_option)
        self._kind = struct(parts)
        self.fields = [t.StructField(name, kind.spark) for name, kind, _ in parts]

    def __reduce__(self) -> tuple[Any, ...]:
        return BodyFormat, self._arguments

    @property
    def names(self) -> list[str]:
        """Of the columns."""
        return [field.name for field in self.fields]

    def decode(self, values: Any) -> tuple[list[Any], Any]:
        """The columns in ``values``, a BinaryArray of n bodies.

        Returns an Arrow array of n for each field, null where a body is corrupt, and a StringArray
        of n that says there why it is, and is null elsewhere.
        """
        rows, reasons = self._rows(values.to_pylist())
        try:
            columns = self._columns(rows)
        except _UNFIT:
            self._drop_unfit(rows, reasons, 0, len(rows))
            columns = self._columns(rows)
        if not reasons:
            return columns, pa.nulls(len(rows), pa.string())
        return columns, pa.array(map(reasons.get, range(len(rows))), pa.string(), size=len(rows))

    # --- bodies -> objects --------------------------------------------------------------------

    def _rows(self, bodies: list[bytes]) -> tuple[list[Any], dict[int, str]]:
        """An object with the fields as attributes for each body, and why some have none."""
        try:
            return list(map(self._decode_one, bodies)), {}
        except _UNDECODABLE:
            reasons: dict[int, str] = {}
            return [self._row(number, body, reasons) for number, body in enumerate(bodies)], reasons

    def _row(self, number: int, body: bytes, reasons: dict[int, str]) -> Any:
        try:
            return self._decode_one(body)
        except _UNDECODABLE as error:
            reasons[number] = _reason(error)
            return self._nothing

    @cached_property
    def _decode_one(self) -> Callable[[bytes], Any]:
        codec = msgspec.json if self._encoding == "json" else msgspec.msgpack
        if self._model is None:
            decode: Callable[[bytes], Any] = codec.Decoder(python_type(self._kind.read)).decode
            return decode
        model = self._model
        if self._encoding == "json":
            return model.model_validate_json
        return lambda body: model.model_validate(codec.decode(body))

    @cached_property
    def _nothing(self) -> Any:
        return _nothing(self._kind)

    # --- objects -> columns -------------------------------------------------------------------

    def _columns(self, rows: list[Any]) -> list[Any]:
        prepare = None if self._model is None else plain
        return [_column(_part(rows, name), kind, prepare) for name, kind, _ in self._kind.fields]

    def _drop_unfit(self, rows: list[Any], reasons: dict[int, str], start: int, end: int) -> None:
        """Find the rows with a value that Arrow refuses, by halves, and put nothing there."""
        try:
            self._columns(rows[start:end])
        except _UNFIT as error:
            if end - start == 1:
                rows[start], reasons[start] = self._nothing, _reason(error)
                return
            middle = (start + end) // 2
            self._drop_unfit(rows, reasons, start, middle)
            self._drop_unfit(rows, reasons, middle, end)


def _part(rows: list[Any], name: str) -> list[Any]:
    return list(map(attrgetter(attribute(name)), rows))


def _column(values: list[Any], kind: Kind, prepare: Callable[[Any], Any] | None) -> Any:
    """Values as an Arrow array; prepare: what to make of each that Arrow may not know."""
    if kind.fields:
        return _struct(values, kind, prepare)
    column = pa.array(map(prepare, values) if prepare else values, kind.read, size=len(values))
    for step in kind.cast:
        column = column if column.type == step else column.cast(step)
    return column


def _struct(values: list[Any], kind: Kind, prepare: Callable[[Any], Any] | None) -> Any:
    is_null = [value is None for value in values]
    if any(is_null):
        nothing = _nothing(kind)
        values = [nothing if value is None else value for value in values]
    parts = [_column(_part(values, name), part, prepare) for name, part, _ in kind.fields]
    final = kind.cast[-1]
    fields = [final.field(number) for number in range(final.num_fields)]
    return pa.StructArray.from_arrays(parts, fields=fields, mask=pa.array(is_null))


def _nothing(kind: Kind) -> Any:
    """An object whose attributes are all None."""
    return SimpleNamespace(**{attribute(name): None for name, *_ in kind.fields})


def _parsed(schema: str) -> tuple[Model | None, tuple[Field, ...]]:
    if schema.lstrip().startswith("{"):
        return None, avro_fields(schema)
    if reference := _model_reference(schema):
        model = load_model(reference)
        return model, model_fields(model)
    if found := _OBJECT.match(schema):
        raise SchemaError(
            f"option schema is text, and {schema[:60]!r} is what Python prints: give "
            f"headrace.spark.model_schema({found[1] or 'Model'}), or simpleString() of a schema of "
            "Spark's"
        )
    return None, _ddl_fields(schema)


def _model_reference(schema: str) -> str | None:
    """What to pass to ``load_model``; None if the schema is not a model."""
    if is_pickled(schema):
        return schema
    path = schema.strip()
    # `a:int` is DDL, and no module is called that by accident.
    return path if _IMPORT_PATH.fullmatch(path) and not _is_ddl(path) else None


def _is_ddl(schema: str) -> bool:
    try:
        _ddl_fields(schema)
    except SchemaError:
        return False
    return True


def _ddl_fields(schema: str) -> tuple[Field, ...]:
    return kind_of(parse_ddl(schema)).fields


def _reason(error: Exception) -> str:
    if isinstance(error, pydantic.ValidationError):
        places = (
            (".".join(map(str, each["loc"])) or "body", each["msg"]) for each in error.errors()
        )
        return "; ".join(f"{place}: {message}" for place, message in places)
    return str(error)
