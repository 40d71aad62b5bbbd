"""Messages from lines, NDJSON and CSV: the input formats of ``headrace send``."""

from __future__ import annotations

import csv
import json
from enum import StrEnum
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from headrace.errors import HeadraceError, InvalidMessage
from headrace.values import encoded_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from headrace.messages import Message


# No broker accepts a message of this size, so neither a line nor a field of CSV is longer.
LINE_BYTES_MAX = 16 * 1024 * 1024

NESTED_TOO_DEEPLY = "the JSON is nested too deeply to be read"


class RowFormat(StrEnum):
    """Format of a file with one message per line."""

    LINES = "lines"
    NDJSON = "ndjson"
    CSV = "csv"


_FORMATS = {
    ".csv": RowFormat.CSV,
    ".ndjson": RowFormat.NDJSON,
    ".jsonl": RowFormat.NDJSON,
}


class BadRow(HeadraceError):
    """A row that cannot become a message.

    location: ``file:line`` or ``file:line:column``, counting from 1.
    """

    def __init__(self, location: str, reason: str) -> None:
        super().__init__(f"{location}: {reason}")
        self.location = location
        self.reason = reason


class Columns(NamedTuple):
    """Columns for key, tag and body; without ``body``, the body is the whole row as JSON."""

    key: str | None = None
    tag: str | None = None
    body: str | None = None

    def names(self) -> list[str]:
        """Names of the columns that every row must have."""
        return [name for name in self if name is not None]


def format_of(name: str) -> RowFormat:
    """The format that a file name's extension implies."""
    return _FORMATS.get(PurePath(name).suffix.lower(), RowFormat.LINES)


def read_messages(
    lines: Iterable[bytes], name: str, row_format: RowFormat, topic: str, columns: Columns
) -> Iterator[Message]:
    """One message per row of ``lines``; blank lines are skipped, because no broker accepts them.

    lines: with their line ends, which belong to the values of CSV if they are quoted. name: the
        file's name in errors.

    Raises BadRow at the first row that cannot become a message.
    """
    from headrace.messages import Message

    readers = {RowFormat.LINES: _lines, RowFormat.NDJSON: _ndjson, RowFormat.CSV: _csv}
    for location, body, key, tag in readers[row_format](lines, name, columns):
        try:
            message = Message(topic, body, key=key, tag=tag)
            message.check()
        except InvalidMessage as error:
            raise BadRow(location, str(error)) from error
        yield message


# Location, body, key, tag.
_Row = tuple[str, bytes, str, str]


def _decoded(lines: Iterable[bytes], name: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(lines, 1):
        try:
            yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            # The line is valid up to the bad byte: its length in characters gives the column.
            column = len(line[: error.start].decode()) + 1
            raise BadRow(
                f"{name}:{number}:{column}",
                f"byte 0x{line[error.start]:02x} is not valid UTF-8; convert the file "
                "(e.g. iconv -t UTF-8)",
            ) from error


def _lines(lines: Iterable[bytes], name: str, columns: Columns) -> Iterator[_Row]:
    assert not columns.names(), "lines have no columns"
    for number, line in enumerate(lines, 1):
        body = line.removesuffix(b"\n").removesuffix(b"\r")
        if body:
            yield f"{name}:{number}", body, "", ""


def _ndjson(lines: Iterable[bytes], name: str, columns: Columns) -> Iterator[_Row]:
    for number, line in _decoded(lines, name):
        text = line.strip()
        if not text:
            continue
        try:
            row = json.loads(text, parse_int=_Number, parse_float=_Number)
        except json.JSONDecodeError as error:
            column = error.colno + len(line) - len(line.lstrip())
            raise BadRow(f"{name}:{number}:{column}", f"invalid JSON: {error.msg}") from error
        except RecursionError as error:
            raise BadRow(f"{name}:{number}", NESTED_TOO_DEEPLY) from error
        yield _select(f"{name}:{number}", text.encode(), row, columns)


class _Number(str):
    """A number of JSON as it is written: no digit of it is lost, however many there are."""

    __slots__ = ()


def _select(location: str, whole: bytes, row: Any, columns: Columns) -> _Row:
    wanted = columns.names()
    if wanted and not isinstance(row, dict):
        raise BadRow(location, f"not a JSON object, so it has no field {wanted[0]!r}")
    for field in wanted:
        if field not in row:
            raise BadRow(location, f"no field {field!r}; it has {', '.join(row) or 'none'}")
    try:
        key, tag, body = (_field(row, column, whole) for column in columns)
        return location, encoded_text(body, "body") if columns.body else whole, key, tag
    except (InvalidMessage, msgspec.DecodeError) as error:
        raise BadRow(location, str(error)) from error


def _field(row: Mapping[str, Any], name: str | None, whole: bytes) -> str:
    """A field as text: null becomes empty, other values that are not text stay JSON."""
    value = row[name] if name is not None else None
    if value is None:
        return ""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, dict | list):
        assert name is not None
        return bytes(_raw_fields(whole)[name]).decode()
    return json.dumps(value)


_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def _csv(lines: Iterable[bytes], name: str, columns: Columns) -> Iterator[_Row]:
    csv.field_size_limit(LINE_BYTES_MAX)
    reader = csv.reader((line for _, line in _decoded(lines, name)), strict=True)
    header = _next_row(reader, name)
    if header is None:
        raise BadRow(f"{name}:1", "no header line; a CSV file must begin with the column names")
    _check_header(header, name, columns)
    first_line = reader.line_num + 1
    while (row := _next_row(reader, name)) is not None:
        location = f"{name}:{first_line}"
        first_line = reader.line_num + 1
        if not row:
            continue
        if len(row) != len(header):
            raise _uneven(location, header, row)
        fields = dict(zip(header, row, strict=True))
        yield _select(location, msgspec.json.encode(fields), fields, columns)


def _next_row(reader: Any, name: str) -> list[str] | None:
    try:
        return next(reader, None)
    except csv.Error as error:
        hint = "; is a quote missing?" if "field larger" in str(error) else ""
        raise BadRow(f"{name}:{reader.line_num}", f"invalid CSV: {error}{hint}") from error


def _check_header(header: list[str], name: str, columns: Columns) -> None:
    for wanted in columns.names():
        if wanted not in header:
            raise BadRow(f"{name}:1", f"no column {wanted!r}; the columns are {', '.join(header)}")
    duplicates = {column for column in header if header.count(column) > 1}
    if duplicates:
        raise BadRow(f"{name}:1", f"two columns are named {min(duplicates)!r}; rename one")


def _uneven(location: str, header: list[str], row: list[str]) -> BadRow:
    problem = f"{len(row)} fields, but the header names {len(header)}"
    if len(row) < len(header):
        return BadRow(
            f"{location}:{len(row) + 1}", f"{problem}: column {header[len(row)]!r} is missing"
        )
    return BadRow(
        f"{location}:{len(header) + 1}", f"{problem}: does an unquoted value contain a comma?"
    )
