"""Conversion of Arrow tables to chunks; imported when the first table is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import ConfigurationError, InvalidMessage
from headrace.producer.chunks import (
    CHUNK_BYTES,
    CHUNK_COUNT,
    Chunk,
    chunk_of_columns,
)
from headrace_protocol.columns import split
from headrace_protocol.message import property_text

try:
    import pyarrow as pa
except ImportError as error:
    raise ConfigurationError("Arrow tables need pyarrow: pip install pyarrow") from error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.producer.chunks import ArrowTable

_VALUE, _KEY, _TAG, _TOPIC = "value", "key", "tag", "topic"
_KNOWN = {_VALUE, _KEY, _TAG, _TOPIC}
_BINARY = pa.large_binary()


def chunks_of_table(source: ArrowTable, topic: str | None) -> Iterator[Chunk]:
    """Chunks of a table's rows; its columns are value and, optionally, key, tag and topic.

    topic: topic of all rows, instead of the column. Raises InvalidMessage.
    """
    table = _table(source)
    _check_columns(table.schema, topic)
    first_row = 0
    for batch in table.to_batches(max_chunksize=CHUNK_COUNT):
        for start, end in _cuts(_column(batch, _VALUE)):
            part = batch.slice(start, end - start)
            yield from _chunks(part, topic, first_row + start)
        first_row += len(batch)


def _table(source: Any) -> Any:
    if isinstance(source, pa.Array | pa.ChunkedArray):
        return pa.table({_VALUE: source})
    return pa.table(source)


def _check_columns(schema: Any, topic: str | None) -> None:
    names = schema.names
    if _VALUE not in names or not set(names) <= _KNOWN or len(set(names)) < len(names):
        raise InvalidMessage(
            f"the table has the columns {', '.join(names)}: it needs {_VALUE}, may have {_KEY}, "
            f"{_TAG} and {_TOPIC}, and nothing else: select or rename them"
        )
    if (topic is None) != (_TOPIC in names):
        raise InvalidMessage(f"where to? Give topic= or a column named {_TOPIC}, not both")
    for field in schema:
        if not _is_binary(field.type):
            raise InvalidMessage(
                f"the column {field.name} holds {field.type}, not bytes or text: encode it"
            )


def _is_binary(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_binary(kind.value_type)
    return any(is_it(kind) for is_it in _BINARY_KINDS)


_BINARY_KINDS = (
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_fixed_size_binary,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
)


def _column(batch: Any, name: str) -> Any:
    column = batch.column(name)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(_BINARY)


def _offsets(column: Any) -> Any:
    """Start of each value in the column's data, followed by the end of the last value."""
    everything = np.frombuffer(column.buffers()[1], np.int64)
    return everything[column.offset : column.offset + len(column) + 1]


def _cuts(values: Any) -> Iterator[tuple[int, int]]:
    """Start and end of parts of about CHUNK_BYTES, or of one larger value."""
    offsets = _offsets(values)
    start = 0
    while start < len(values):
        end = int(np.searchsorted(offsets, offsets[start] + CHUNK_BYTES, "right")) - 1
        end = min(max(end, start + 1), len(values))
        yield start, end
        start = end


def _values(column: Any) -> list[bytes]:
    if len(column) == 0:
        return []
    offsets = _offsets(column)
    data = memoryview(column.buffers()[2] or b"")[offsets[0] : offsets[-1]]
    return split(data, offsets[:-1] - offsets[0], np.diff(offsets))


def _chunks(batch: Any, topic: str | None, first_row: int) -> Iterator[Chunk]:
    """The chunk of these rows, or one chunk for each of their topics."""
    if topic is None:
        yield from _chunks_of_topics(batch, first_row)
        return
    value = _column(batch, _VALUE)
    if value.null_count:
        row = value.is_null().index(True).as_py()
        raise InvalidMessage(f"row {first_row + row}: its value is null: drop such rows first")
    keys, tags = _texts(batch, _KEY), _texts(batch, _TAG)
    yield chunk_of_columns(topic, _values(value), keys, tags, first_row=first_row)


def _texts(batch: Any, name: str) -> list[bytes] | None:
    if name not in batch.schema.names:
        return None
    return _values(_column(batch, name).fill_null(b""))


def _chunks_of_topics(batch: Any, first_row: int) -> Iterator[Chunk]:
    topics = [property_text(raw) for raw in _texts(batch, _TOPIC) or []]
    batch = batch.drop_columns([_TOPIC])
    rows: dict[str, list[int]] = {}
    for row, topic in enumerate(topics):
        rows.setdefault(topic, []).append(row)
    for topic, its_rows in rows.items():
        part = batch if len(rows) == 1 else batch.take(pa.array(its_rows))
        yield from _chunks(part, topic, first_row)
