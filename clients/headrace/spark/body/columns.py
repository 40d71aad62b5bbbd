"""Decoded bodies as Arrow columns."""

from __future__ import annotations

from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from headrace.spark.body.fit import fitting
from headrace.spark.body.kinds import attribute
from headrace.spark.body.models import plain

if TYPE_CHECKING:
    from headrace.spark.body.fit import Fit
    from headrace.spark.body.kinds import Kind

# Errors for a body that does not match: from decoders, and for values that they accept.
UNFIT = (msgspec.MsgspecError, ValueError, TypeError, ArithmeticError, RecursionError)


class Column:
    """Makes an Arrow array from one field of objects with an attribute for each field.

    path: of the field, for errors. is_model: whether values come from a pydantic model.
    """

    def __init__(self, name: str, kind: Kind, *, is_model: bool, parent: str = "$") -> None:
        self.path = f"{parent}.{name}"
        self._kind = kind
        self._get = attrgetter(attribute(name))
        self._fit = _fit(kind.read, is_model=is_model) if not kind.fields else None
        self._nothing = nothing(kind)
        self._parts = [
            Column(part, each, is_model=is_model, parent=self.path) for part, each, _ in kind.fields
        ]

    def array(self, rows: list[Any]) -> Any:
        """The field of each row. Raises one of UNFIT, with the path."""
        values = list(map(self._get, rows))
        return self._structs(values) if self._parts else self._leaves(values)

    def _leaves(self, values: list[Any]) -> Any:
        fit, kind = self._fit, self._kind
        try:
            column = pa.array(map(fit, values) if fit else values, kind.read, size=len(values))
            for step in kind.cast:
                column = column if column.type == step else column.cast(step)
        except UNFIT as error:
            raise ValueError(f"{error} - at `{self.path}`") from error
        return column

    def _structs(self, values: list[Any]) -> Any:
        is_null = [value is None for value in values]
        if any(is_null):
            values = [self._nothing if value is None else value for value in values]
        parts = [part.array(values) for part in self._parts]
        final = self._kind.cast[-1]
        fields = [final.field(number) for number in range(final.num_fields)]
        return pa.StructArray.from_arrays(parts, fields=fields, mask=pa.array(is_null))


def nothing(kind: Kind) -> Any:
    """An object with None for every field."""
    return SimpleNamespace(**{attribute(name): None for name, *_ in kind.fields})


def _fit(kind: pa.DataType, *, is_model: bool) -> Fit | None:
    fit = fitting(kind)
    if not is_model:
        return fit
    return plain if fit is None else lambda value: fit(plain(value))
