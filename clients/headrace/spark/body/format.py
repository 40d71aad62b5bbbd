"""Convert message bodies to columns by a schema from the read options.

A validating decoder handles each body on its own; the decoded objects of a block then become
columns together. A body that does not match the schema is reported with the reason, without
affecting other bodies.
"""

from __future__ import annotations

import re
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pydantic
from pyspark.sql import types as t

from headrace.spark.body.avro import avro_fields
from headrace.spark.body.columns import UNFIT, Column, nothing
from headrace.spark.body.ddl import parse_ddl
from headrace.spark.body.kinds import Field, kind_of, python_type, struct
from headrace.spark.body.models import (
    Model,
    check_allowed,
    is_pickled,
    is_pydantic,
    load_model,
    model_fields,
)
from headrace.spark.errors import OptionError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Callable

_ENCODINGS = ("json", "msgpack")
# ``str`` of a model class and of a Spark schema.
_OBJECT = re.compile(r"<class '(?:.*\.)?(\w+)'>|StructType\(")
_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def body_format(schema_option: str, encoding: str) -> BodyFormat:
    """The body format for the options ``schema`` and ``encoding``.

    schema_option: Spark's DDL (``a int, b array<string>``), an Avro record as JSON,
        ``package.module:Model`` for a model, or the result of ``model_schema``.
    encoding: json or msgpack.

    Raises OptionError, and SchemaError, also for a model that the environment does not allow.

    Tasks receive the format instead of the option, and load its model without another check.
    """
    if encoding not in _ENCODINGS:
        raise OptionError("encoding", encoding, f"expected {' or '.join(_ENCODINGS)}")
    reference = _model_reference(schema_option)
    if reference:
        check_allowed(reference)
    return BodyFormat(schema_option, encoding)


class BodyFormat:
    """Converts bodies to columns; see ``body_format``.

    fields: the Spark fields of the columns, all nullable because bodies may be corrupt.
    model: that validates bodies; None without one. encoding: json or msgpack.
    """

    def __init__(self, schema_option: str, encoding: str) -> None:
        self._arguments = schema_option, encoding
        self.encoding = encoding
        self.model, parts = _parsed(schema_option)
        self._kind = struct(parts)
        self.fields = [t.StructField(name, kind.spark) for name, kind, _ in parts]

    def __reduce__(self) -> tuple[Any, ...]:
        return BodyFormat, self._arguments

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return [field.name for field in self.fields]

    def decode(self, values: Any) -> tuple[list[Any], Any]:
        """Decode ``values``, a BinaryArray of n bodies.

        Returns one Arrow array of length n per field, null for corrupt bodies, and a StringArray
        of length n with the reason for each corrupt body, null elsewhere.
        """
        rows, reasons = self._rows(values.to_pylist())
        try:
            columns = self._columns(rows)
        except UNFIT:
            self._null_inconvertible(rows, reasons, 0, len(rows))
            columns = self._columns(rows)
        if not reasons:
            return columns, pa.nulls(len(rows), pa.string())
        return columns, pa.array(map(reasons.get, range(len(rows))), pa.string(), size=len(rows))

    # --- bodies -> objects --------------------------------------------------------------------

    def _rows(self, bodies: list[bytes]) -> tuple[list[Any], dict[int, str]]:
        """One object per body with its fields as attributes, and the reasons for corrupt ones."""
        try:
            return list(map(self._decode_one, bodies)), {}
        except UNFIT:
            reasons: dict[int, str] = {}
            return [self._row(number, body, reasons) for number, body in enumerate(bodies)], reasons

    def _row(self, number: int, body: bytes, reasons: dict[int, str]) -> Any:
        try:
            return self._decode_one(body)
        except UNFIT as error:
            reasons[number] = reason_of(error)
            return self._nothing

    @cached_property
    def _decode_one(self) -> Callable[[bytes], Any]:
        codec = msgspec.json if self.encoding == "json" else msgspec.msgpack
        if self.model is None:
            decode: Callable[[bytes], Any] = codec.Decoder(python_type(self._kind.read)).decode
            return decode
        model = self.model
        if not is_pydantic(model):
            return partial(_validated, codec.Decoder(model).decode)
        if self.encoding == "json":
            return partial(_validated, model.model_validate_json)
        return lambda body: _validated(model.model_validate, codec.decode(body))

    @cached_property
    def _nothing(self) -> Any:
        return nothing(self._kind)

    # --- objects -> columns -------------------------------------------------------------------

    @cached_property
    def _makers(self) -> list[Column]:
        is_model = self.model is not None
        return [Column(name, kind, is_model=is_model) for name, kind, _ in self._kind.fields]

    def _columns(self, rows: list[Any]) -> list[Any]:
        return [maker.array(rows) for maker in self._makers]

    def _null_inconvertible(
        self, rows: list[Any], reasons: dict[int, str], start: int, end: int
    ) -> None:
        """Find rows with a value that does not fit, by bisection, and replace them by nulls."""
        try:
            self._columns(rows[start:end])
        except UNFIT as error:
            if end - start == 1:
                rows[start], reasons[start] = self._nothing, reason_of(error)
                return
            middle = (start + end) // 2
            self._null_inconvertible(rows, reasons, start, middle)
            self._null_inconvertible(rows, reasons, middle, end)


def _validated(validate: Callable[[Any], Any], body: Any) -> Any:
    """An instance of a model. Raises one of UNFIT, whatever the model's own code raises."""
    try:
        return validate(body)
    except UNFIT:
        raise
    except Exception as error:
        raise ValueError(f"the model raised {type(error).__name__}: {error}") from error


def _parsed(schema: str) -> tuple[Model | None, tuple[Field, ...]]:
    if schema.lstrip().startswith("{"):
        return None, avro_fields(schema)
    if reference := _model_reference(schema):
        model = load_model(reference)
        return model, model_fields(model)
    if found := _OBJECT.match(schema):
        raise SchemaError(
            f"option schema takes text, but {schema[:60]!r} is a Python object's repr: pass "
            f"headrace.spark.model_schema({found[1] or 'Model'}), or simpleString() of a Spark "
            "schema"
        )
    return None, _ddl_fields(schema)


def _model_reference(schema: str) -> str | None:
    """The argument for ``load_model``; None if the schema is not a model."""
    if is_pickled(schema):
        return schema
    path = schema.strip()
    # `a:int` looks like an import path too, but is DDL.
    return path if _IMPORT_PATH.fullmatch(path) and not _is_ddl(path) else None


def _is_ddl(schema: str) -> bool:
    try:
        _ddl_fields(schema)
    except SchemaError:
        return False
    return True


def _ddl_fields(schema: str) -> tuple[Field, ...]:
    return kind_of(parse_ddl(schema)).fields


def reason_of(error: Exception) -> str:
    """The error of a body as a reason, in one line."""
    if isinstance(error, pydantic.ValidationError):
        found = (
            (".".join(map(str, each["loc"])) or "body", each["msg"]) for each in error.errors()
        )
        return "; ".join(f"{path}: {message}" for path, message in found)
    return str(error)
