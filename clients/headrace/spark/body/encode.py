"""Make message bodies of rows whose columns are the fields of a model.

Source: docs/spark.md "Bodies"; tests/spark/test_written_bodies.py.
"""

from __future__ import annotations

from functools import cached_property, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from pyspark.sql import types as t

from headrace.errors import InvalidMessage
from headrace.spark.body.format import reason_of
from headrace.spark.body.models import is_pydantic
from headrace.spark.errors import SchemaError
from headrace.table.codec import codec
from headrace.values import shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.spark.body.format import BodyFormat


class RowBodies:
    """Makes bodies of the columns that the fields of a model name; the model validates them.

    fields: the columns' types in Spark, by name.
    """

    def __init__(self, body: BodyFormat) -> None:
        """Raises SchemaError if the format is that of no model."""
        if body.model is None:
            raise SchemaError(
                "option schema of a write names a model, as package.module:Model; without one, "
                "make the bodies by to_json(struct(...)) AS value"
            )
        self._body_format = body
        self._model = body.model
        self.fields = {field.name: field.dataType for field in body.fields}

    def __reduce__(self) -> tuple[Any, ...]:
        return RowBodies, (self._body_format,)

    def add(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows with a column ``value`` in place of the model's. Raises InvalidMessage."""
        rows = batch.select([name for name in batch.schema.names if name in self.fields])
        others = [name for name in batch.schema.names if name not in self.fields]
        values = pa.array(map(self._body, rows.to_pylist()), pa.binary(), size=len(batch))
        columns = [*map(batch.column, others), values]
        return pa.RecordBatch.from_arrays(columns, names=[*others, "value"])

    def _body(self, row: dict[str, Any]) -> bytes:
        make, kinds = self._make, self.fields
        try:
            fields = {name: _value(kinds[name], value, make) for name, value in row.items()}
            body: bytes = self._to_body(self._validate(make(**fields)))
        except Exception as error:  # whatever the model's own code raises
            name = self._model.__name__
            raise InvalidMessage(f"row {shown(row)} is no {name}: {reason_of(error)}") from error
        return body

    @cached_property
    def _to_body(self) -> Callable[[Any], bytes]:
        return codec("", self._model, self._body_format.encoding).to_body

    # The columns have the names of attributes, not of aliases.

    @cached_property
    def _make(self) -> Callable[..., Any]:
        return dict if is_pydantic(self._model) else SimpleNamespace

    @cached_property
    def _validate(self) -> Callable[[Any], Any]:
        if is_pydantic(self._model):
            return partial(self._model.model_validate, by_name=True, by_alias=False)
        return partial(msgspec.convert, type=self._model, from_attributes=True)


def _value(kind: t.DataType, value: Any, make: Callable[..., Any]) -> Any:
    """A value of Arrow's as a model takes it. make: a struct of its fields."""
    if value is None:
        return None
    match kind:
        case t.StructType():
            parts = [(each.name, each.dataType) for each in kind.fields]
            return make(**{name: _value(part, value[name], make) for name, part in parts})
        case t.ArrayType():
            return [_value(kind.elementType, each, make) for each in value]
        case t.MapType():
            return {key: _value(kind.valueType, each, make) for key, each in value}
    return value
