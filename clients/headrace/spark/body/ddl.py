"""A parser for Spark's DDL schemas, for processes without a JVM such as source planners."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import types as t

from headrace.spark.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Iterator

_TOKEN = re.compile(r"\s*(?:`((?:[^`]|``)+)`|([A-Za-z_]\w*|\d+|[<>(),:])|('[^']*'|\"[^\"]*\"))")
_END = ""
_DECIMAL_DEFAULTS = (10, 0)
_SIMPLE: dict[str, t.DataType] = {
    "boolean": t.BooleanType(),
    "tinyint": t.ByteType(),
    "byte": t.ByteType(),
    "smallint": t.ShortType(),
    "short": t.ShortType(),
    "int": t.IntegerType(),
    "integer": t.IntegerType(),
    "bigint": t.LongType(),
    "long": t.LongType(),
    "float": t.FloatType(),
    "real": t.FloatType(),
    "double": t.DoubleType(),
    "string": t.StringType(),
    "binary": t.BinaryType(),
    "date": t.DateType(),
    "timestamp": t.TimestampType(),
    "timestamp_ltz": t.TimestampType(),
    "timestamp_ntz": t.TimestampNTZType(),
}
_DECIMALS = ("decimal", "dec", "numeric")
_NESTED = ("array", "map", "struct")


class _Token(NamedTuple):
    text: str
    at: int
    is_quoted: bool


def parse_ddl(ddl: str) -> t.StructType:
    """Parse ``a int, b array<string> not null``, optionally within ``struct<...>``.

    Raises SchemaError with the position of the error.
    """
    return _Parser(ddl).schema()


class _Parser:
    def __init__(self, ddl: str) -> None:
        self._ddl = ddl
        self._tokens = list(self._cut())
        self._next = 0

    def _cut(self) -> Iterator[_Token]:
        ddl, at = self._ddl.rstrip(), 0
        while at < len(ddl):
            match = _TOKEN.match(ddl, at)
            if match is None:
                rest = ddl[at:].lstrip()
                raise self._error(len(ddl) - len(rest), f"{rest.split()[0]!r} is invalid")
            quoted, plain, comment = match.groups()
            text = quoted.replace("``", "`") if quoted else plain or comment
            yield _Token(text, match.end() - len(match[0].lstrip()), not plain)
            at = match.end()
        yield _Token(_END, len(ddl), False)

    def schema(self) -> t.StructType:
        is_struct = self._peek(1).text == "<" and self._takes("struct")
        if is_struct:
            self._expect("<")
        fields = self._fields()
        if is_struct:
            self._expect(">")
        self._expect(_END)
        return fields

    def _fields(self) -> t.StructType:
        fields = [self._field()]
        while self._takes(","):
            fields.append(self._field())
        return t.StructType(fields)

    def _field(self) -> t.StructField:
        name = self._take()
        if not name.is_quoted and not name.text.isidentifier():
            raise self._error(name.at, f"expected a column name, not {_quoted(name.text)}")
        self._takes(":")
        kind = self._type()
        is_required = self._takes("not")
        if is_required:
            self._expect("null")
        if self._takes("comment"):
            self._take()
        return t.StructField(name.text, kind, not is_required)

    def _type(self) -> t.DataType:
        token = self._take()
        name = token.text.lower()
        if name in _SIMPLE:
            return _SIMPLE[name]
        if name in _DECIMALS:
            return self._decimal()
        if name in {"char", "varchar"}:
            self._numbers()
            return t.StringType()
        if name in _NESTED:
            return self._nested(name)
        known = [*_SIMPLE, *_DECIMALS, *_NESTED]
        near = get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]}?" if near else f": valid types are {', '.join(known)}"
        raise self._error(token.at, f"{_quoted(token.text)} is not a type{hint}")

    def _nested(self, name: str) -> t.DataType:
        self._expect("<")
        kind: t.DataType
        if name == "array":
            kind = t.ArrayType(self._type())
        elif name == "struct":
            kind = self._fields()
        else:
            key = self._type()
            self._expect(",")
            kind = t.MapType(key, self._type())
        self._expect(">")
        return kind

    def _decimal(self) -> t.DataType:
        numbers = self._numbers()
        precision, scale, *_ = [*numbers, *_DECIMAL_DEFAULTS[len(numbers) :]]
        return t.DecimalType(precision, scale)

    def _numbers(self) -> list[int]:
        numbers: list[int] = []
        if self._takes("("):
            numbers.append(self._number())
            while self._takes(","):
                numbers.append(self._number())
            self._expect(")")
        return numbers

    def _number(self) -> int:
        token = self._take()
        if not token.text.isdigit():
            raise self._error(token.at, f"expected a number, not {_quoted(token.text)}")
        return int(token.text)

    def _peek(self, ahead: int = 0) -> _Token:
        return self._tokens[min(self._next + ahead, len(self._tokens) - 1)]

    def _take(self) -> _Token:
        token = self._peek()
        self._next += 1
        return token

    def _takes(self, text: str) -> bool:
        token = self._peek()
        is_it = token.text.lower() == text and not token.is_quoted
        self._next += is_it
        return is_it

    def _expect(self, text: str) -> None:
        token = self._peek()
        if not self._takes(text):
            raise self._error(token.at, f"expected {_quoted(text)}, not {_quoted(token.text)}")

    def _error(self, at: int, reason: str) -> SchemaError:
        return SchemaError(f"schema {self._ddl!r}: at character {at + 1}: {reason}")


def _quoted(text: str) -> str:
    return repr(text) if text else "the end"
