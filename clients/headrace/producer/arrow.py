"""Conversion of Arrow tables to chunks; imported when the first table is sent."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import ConfigurationError, InvalidMessage
from headrace.producer.chunks import (
    CHUNK_BYTES,
    CHUNK_COUNT,
    Chunk,
    check_batch_topic,
    chunk_of_columns,
    row_named,
)
from headrace.values import kind_of
from headrace_protocol.columns import split
from headrace_protocol.message import property_text

try:
    import pyarrow as pa
    import pyarrow.compute as pc
except ImportError as error:
    raise ConfigurationError("Arrow tables need pyarrow: pip install pyarrow") from error

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.producer.chunks import ArrowTable

_VALUE, _KEY, _TAG, _TOPIC = "value", "key", "tag", "topic"
_KNOWN = {_VALUE, _KEY, _TAG, _TOPIC}
_BINARY = pa.large_binary()
# pyarrow's name of a column that holds an index of pandas without a name.
_INDEX_COLUMN = re.compile(r"__index_level_\d+__")


def chunks_of_table(source: ArrowTable, topic: str | None) -> Iterator[Chunk]:
    """Chunks of a table's rows; its columns are value and, optionally, key, tag and topic.

    topic: topic of all rows, instead of the column. Raises InvalidMessage.
    """
    reader = _reader(source)
    _check_columns(reader.schema, topic)
    first_row = 0
    for whole in reader:
        for start in range(0, len(whole), CHUNK_COUNT):
            batch = _plain(whole.slice(start, CHUNK_COUNT), first_row + start)
            for begin, end in _cuts(batch.column(_VALUE)):
                rows = range(first_row + start + begin, first_row + start + end)
                yield from _chunks(batch.slice(begin, end - begin), topic, rows)
        first_row += len(whole)


# -- what is taken ---------------------------------------------------------------------------------


def _reader(source: Any) -> Any:
    """The batches of a table, read while they are sent. Raises InvalidMessage."""
    pandas = sys.modules.get("pandas")
    try:
        if pandas and isinstance(source, pandas.DataFrame):
            return _table_of_pandas(source).to_reader()
        if isinstance(source, pa.Array | pa.ChunkedArray):
            return pa.table({_VALUE: source}).to_reader()
        if hasattr(source, "__arrow_c_stream__"):
            return _reader_of_stream(source)
        return pa.Table.from_batches([pa.record_batch(source)]).to_reader()
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InvalidMessage(f"{kind_of(source)} cannot become an Arrow table: {error}") from error


def _reader_of_stream(source: Any) -> Any:
    try:
        return pa.RecordBatchReader.from_stream(source)
    except pa.ArrowInvalid:
        # A stream of values, such as a Series of polars.
        return pa.table({_VALUE: pa.chunked_array(source)}).to_reader()


def _table_of_pandas(frame: Any) -> Any:
    """An index counts as a column if it has a name, whatever pandas has made of the frame."""
    is_named = any(name is not None for name in frame.index.names)
    return pa.Table.from_pandas(frame, preserve_index=is_named)


def _check_columns(schema: Any, topic: str | None) -> None:
    names = [name for name in schema.names if not _INDEX_COLUMN.fullmatch(name)]
    if _VALUE not in names or not set(names) <= _KNOWN or len(set(names)) < len(names):
        raise InvalidMessage(
            f"the table has the columns {', '.join(names)}: it needs {_VALUE}, may have {_KEY}, "
            f"{_TAG} and {_TOPIC}, and nothing else: select or rename them"
        )
    if (topic is None) != (_TOPIC in names):
        raise InvalidMessage(f"where to? Give topic= or a column named {_TOPIC}, not both")
    for name in names:
        kind = schema.field(name).type
        if not _is_binary(kind):
            raise InvalidMessage(
                f"the column {name} holds {kind}, not bytes or text: encode it, or cast it to "
                "string or binary"
            )


def _is_binary(kind: Any) -> bool:
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _is_binary(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        # JSON is text; what the bytes of others mean, such as a UUID's, only their type says.
        return any(is_it(kind.storage_type) for is_it in _TEXT_KINDS)
    return any(is_it(kind) for is_it in (*_TEXT_KINDS, *_BINARY_KINDS))


_TEXT_KINDS = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
)
_BINARY_KINDS = (
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_fixed_size_binary,
    pa.types.is_null,
)


# -- columns ---------------------------------------------------------------------------------------


def _plain(batch: Any, first_row: int) -> Any:
    """The known columns as large binary ones without nulls. Raises InvalidMessage."""
    columns = {
        name: _column(batch, name, first_row) for name in batch.schema.names if name in _KNOWN
    }
    return pa.record_batch(columns)


def _column(batch: Any, name: str, first_row: int) -> Any:
    column = _as_binary(batch.column(name))
    if name in (_VALUE, _TOPIC):
        if column.null_count:
            row = first_row + column.is_null().index(True).as_py()
            raise InvalidMessage(f"row {row}: its {name} is null: drop such rows first")
    else:
        column = column.fill_null(b"")
    return column


def _as_binary(column: Any) -> Any:
    kind = column.type
    if pa.types.is_dictionary(kind):
        # pyarrow can't decode dictionaries of views, which polars makes.
        return _as_binary(column.dictionary).take(column.indices)
    if pa.types.is_run_end_encoded(kind):
        return _as_binary(pc.run_end_decode(column))
    if isinstance(kind, pa.BaseExtensionType):
        return _as_binary(column.storage)
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


# -- chunks ----------------------------------------------------------------------------------------


def _chunks(batch: Any, topic: str | None, rows: Sequence[int]) -> Iterator[Chunk]:
    """The chunk of these rows, or one chunk for each of their topics."""
    if topic is None:
        yield from _chunks_of_topics(batch, rows)
        return
    yield chunk_of_columns(
        topic, _values(batch.column(_VALUE)), _texts(batch, _KEY), _texts(batch, _TAG), rows
    )


def _texts(batch: Any, name: str) -> list[bytes] | None:
    return _values(batch.column(name)) if name in batch.schema.names else None


def _chunks_of_topics(batch: Any, rows: Sequence[int]) -> Iterator[Chunk]:
    by_topic: dict[bytes, list[int]] = {}
    for index, topic in enumerate(_values(batch.column(_TOPIC))):
        by_topic.setdefault(topic, []).append(index)
    batch = batch.drop_columns([_TOPIC])
    for topic, indices in by_topic.items():
        with row_named(rows[indices[0]]):
            name = check_batch_topic(property_text(topic))
        part = batch if len(by_topic) == 1 else batch.take(pa.array(indices))
        yield from _chunks(part, name, [rows[index] for index in indices])
