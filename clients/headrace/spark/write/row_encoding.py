"""Check Arrow rows to write, group them by queue, and encode them as records.

All work per row is done in C. Source: docs/spark.md "Writing".
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import BinaryType, MapType, StringType, StructType

from headrace.errors import InvalidMessage
from headrace.messages import BODY_BYTES_MAX, PROPERTIES_BYTES_MAX
from headrace.producer.block import BLOCK_BYTES, RECORD_OVERHEAD_BYTES, Block
from headrace.producer.chunks import WORDS, check_batch_topic, is_utf8
from headrace.producer.selector import queue_indices
from headrace.spark.arrow_types import to_arrow
from headrace.spark.errors import SchemaError
from headrace.values import check_tag
from headrace_protocol.blocks import encode_records, encode_uniform
from headrace_protocol.columns import split
from headrace_protocol.message import DELAY, KEYS, SYSTEM_PROPERTIES, TAGS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from pyspark.sql.types import DataType, StructField

    from headrace_protocol.blocks import EncodedBlock
    from headrace_protocol.columns import Array

_TEXT = (StringType, BinaryType)
_COLUMNS = {
    "topic": (StringType,),
    "key": _TEXT,
    "keys": _TEXT,
    "tag": (StringType,),
    "tags": (StringType,),
    "properties": (MapType,),
    "deliver_at": (),
    "value": _TEXT,
}
# Two names of one column: as in the clients, and as in the frames that the source gives.
_KEY = ("key", "keys")
_TAG = ("tag", "tags")
# The source's columns that tell where a row came from; a copy gets its own.
_ORIGIN = frozenset(
    {
        "broker",
        "queue",
        "queue_offset",
        "physical_offset",
        "message_id",
        "born_timestamp",
        "store_timestamp",
        "born_host",
        "reconsume_times",
        "deleted",
    }
)
# Limit for buffered rows, which wait for others of their queue to fill a request.
_WAITING_BYTES_MAX = 32 * 1024 * 1024
_SHOWN_BYTES = 40
_BINARY = pa.binary()
_EMPTY = pa.scalar(b"", _BINARY)
_NAME_END = pa.scalar(b"\x01", _BINARY)
_VALUE_END = pa.scalar(b"\x02", _BINARY)
_SYSTEM_NAMES = pa.array([name.encode() for name in sorted(SYSTEM_PROPERTIES)], _BINARY)


# -- at plan time ----------------------------------------------------------------------------------


def check_schema(
    schema: StructType, topic: str | None, fields: Mapping[str, DataType] | None = None
) -> None:
    """Raise SchemaError unless rows of this schema can be written.

    topic: of all rows; if None, the rows need a column ``topic``.
    fields: the columns that bodies are made of; None if the rows have bodies.
    """
    made_of = fields or {}
    for column in schema.fields:
        if column.name in made_of:
            _check_field(column.name, column.dataType, made_of[column.name])
        elif column.name not in _ORIGIN:
            _check_column(column.name, column.dataType)
    for one, other in (_KEY, _TAG):
        if one in schema.names and other in schema.names:
            raise SchemaError(
                f"the rows have both columns {one} and {other}, which mean the same: drop one"
            )
    if fields is not None:
        _check_made(schema, fields)
    elif "value" not in schema.names:
        raise SchemaError(
            f"the rows have the columns {', '.join(schema.names)}, but no column value for the "
            "message body: use select(..., ... AS value)"
        )
    if topic is None and "topic" not in schema.names:
        raise SchemaError("no topic: set option topic or add a column named topic")


def _check_field(name: str, kind: DataType, expected: DataType) -> None:
    if kind.simpleString() != expected.simpleString():
        raise SchemaError(
            f"column {name} is {kind.simpleString()}: the model has {expected.simpleString()}; "
            "cast it"
        )


def _check_made(schema: StructType, fields: Mapping[str, DataType]) -> None:
    if taken := sorted(_COLUMNS.keys() & fields.keys()):
        raise SchemaError(
            f"the model's {', '.join(taken)} has the name of a column of the sink: make the bodies "
            "by to_json(struct(...)) AS value"
        )
    if "value" in schema.names:
        raise SchemaError("bodies are made by option schema: drop the column value, or the option")
    if not fields.keys() & set(schema.names):
        raise SchemaError(f"the rows have no column of the model's: {', '.join(fields)}")


def _check_column(name: str, kind: DataType) -> None:
    if name == "deliver_at":
        raise SchemaError(
            "column deliver_at: the sink writes no delayed messages: drop the column, or send "
            "these rows with a Producer in foreachPartition"
        )
    if name not in _COLUMNS:
        near = get_close_matches(name, _COLUMNS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        known = ", ".join(known for known in _COLUMNS if known != "deliver_at")
        raise SchemaError(f"column {name}: unknown; valid columns are {known}{hint}")
    is_right = isinstance(kind, _COLUMNS[name])
    if isinstance(kind, MapType):
        is_right &= isinstance(kind.keyType, StringType) and isinstance(kind.valueType, StringType)
    if not is_right:
        expected = {"properties": "map<string,string>"}
        expected |= dict.fromkeys(("topic", *_TAG), "string")
        raise SchemaError(
            f"column {name} is {kind.simpleString()}: expected "
            f"{expected.get(name, 'binary or string')}; cast it"
        )


def arrow_schema(schema: StructType, fields: Collection[str] = ()) -> pa.Schema:
    """The Arrow schema of rows with this schema, which must have passed ``check_schema``.

    fields: the columns that bodies are made of.

    Columns that are not written have the type null.
    """
    return pa.schema(
        [
            (
                column.name,
                _written_type(column, is_field=column.name in fields),
            )
            for column in schema.fields
        ]
    )


def _written_type(column: StructField, *, is_field: bool) -> pa.DataType:
    if is_field:
        return to_arrow(StructType([column])).field(0).type
    return pa.null() if column.name in _ORIGIN else _arrow_type(column.dataType)


def _arrow_type(kind: DataType) -> pa.DataType:
    if isinstance(kind, MapType):
        return pa.map_(pa.string(), pa.string())
    return _BINARY if isinstance(kind, BinaryType) else pa.string()


# -- rows of one topic -----------------------------------------------------------------------------


class Rows(NamedTuple):
    """Bodies and properties as binary arrays of equal length; None if no row has properties."""

    values: Any
    properties: Any | None

    def __len__(self) -> int:
        return len(self.values)

    @property
    def size_bytes(self) -> int:
        """Approximate size of the encoded records."""
        properties_bytes = 0 if self.properties is None else _data_bytes(self.properties)
        return _data_bytes(self.values) + properties_bytes + len(self) * RECORD_OVERHEAD_BYTES

    def take(self, indices: Array) -> Rows:
        """The rows at ``indices``."""
        chosen = pa.array(indices)
        return Rows(*[None if column is None else column.take(chosen) for column in self])

    def slice(self, start: int, end: int) -> Rows:
        """The rows from ``start`` up to, but not including, ``end``."""
        count = end - start
        return Rows(*[None if column is None else column.slice(start, count) for column in self])

    def parts(self) -> Iterator[Rows]:
        """The rows in parts for requests of about BLOCK_BYTES, or of one larger row."""
        if self.size_bytes <= BLOCK_BYTES:
            yield self
            return
        sizes = np.diff(_offsets(self.values)) + RECORD_OVERHEAD_BYTES
        if self.properties is not None:
            sizes += np.diff(_offsets(self.properties))
        ends = np.cumsum(sizes)
        start = done_bytes = 0
        while start < len(self):
            end = int(np.searchsorted(ends, done_bytes + BLOCK_BYTES, "right"))
            end = max(start + 1, end)
            yield self.slice(start, end)
            start, done_bytes = end, int(ends[end - 1])

    def for_headrace(self, topic: str, born_timestamp_ms: int, born_host: bytes) -> EncodedBlock:
        """Encode whole records. Raises ValueError if a part does not fit its field."""
        offsets = _offsets(self.values)
        body_bytes = offsets[1] - offsets[0]
        born: dict[str, Any] = {"born_timestamp": born_timestamp_ms, "born_host": born_host}
        if self.properties is None and (np.diff(offsets) == body_bytes).all():
            data = np.frombuffer(_data(self.values), np.uint8)
            table = data[offsets[0] : offsets[-1]].reshape(len(self), body_bytes)
            return encode_uniform(topic, table, b"", **born)
        return encode_records(topic, _split(self.values), self._all_properties(), **born)

    def for_any_broker(self, topic: str) -> Block:
        """A block for the clients' encoder of ordinary sends."""
        return Block(topic, _split(self.values), self._all_properties())

    def _all_properties(self) -> list[bytes] | bytes:
        return b"" if self.properties is None else _split(self.properties)


def _offsets(column: Any) -> Array:
    """Start of each value in the column's data, and the end of the last one."""
    everything = np.frombuffer(column.buffers()[1], np.int32)
    return everything[column.offset : column.offset + len(column) + 1].astype(np.int64)


def _data(column: Any) -> memoryview:
    return memoryview(column.buffers()[2] or b"")


def _data_bytes(column: Any) -> int:
    offsets = _offsets(column)
    return int(offsets[-1] - offsets[0])


def _split(column: Any) -> list[bytes]:
    offsets = _offsets(column)
    return split(_data(column), offsets[:-1], np.diff(offsets))


# -- from columns to slices ------------------------------------------------------------------------


class QueueRows(NamedTuple):
    """Rows for one queue.

    number: index of the queue among those of its topic; None for any queue.
    """

    topic: str
    number: int | None
    rows: Rows


class RowBuffer:
    """Buffers rows by queue until they fill a request.

    queue_count: returns the current number of queues of a topic.
    """

    def __init__(self, topic: str | None, queue_count: Callable[[str], int]) -> None:
        self._topic = topic
        self._queue_count = queue_count
        self._waiting: dict[tuple[str, int | None], list[Rows]] = {}
        self._waiting_bytes: dict[tuple[str, int | None], int] = {}

    def add(self, batch: pa.RecordBatch) -> Iterator[QueueRows]:
        """Add rows; yields those that fill a request. Raises InvalidMessage."""
        for topic, part in _by_topic(batch, self._topic):
            rows = message_rows(topic, part)
            for number, its_rows in self._by_queue(topic, part, rows):
                yield from self._gather((topic, number), its_rows)
        if sum(self._waiting_bytes.values()) > _WAITING_BYTES_MAX:
            yield from self.rest()

    def rest(self) -> Iterator[QueueRows]:
        """Yield all buffered rows."""
        for target in list(self._waiting):
            yield from self._release(target)

    def _by_queue(
        self, topic: str, batch: pa.RecordBatch, rows: Rows
    ) -> Iterator[tuple[int | None, Rows]]:
        keys = _column(batch, *_KEY)
        if keys is None:
            yield None, rows
            return
        raw = _split(keys)
        numbers = np.array(queue_indices(raw, self._queue_count(topic)))
        numbers[np.diff(_offsets(keys)) == 0] = -1
        order = np.argsort(numbers, kind="stable")
        rows, numbers = rows.take(order), numbers[order]
        starts = np.flatnonzero(np.diff(numbers, prepend=-2)).tolist()
        for start, end in zip(starts, [*starts[1:], len(numbers)], strict=True):
            number = int(numbers[start])
            yield None if number < 0 else number, rows.slice(start, end)

    def _gather(self, target: tuple[str, int | None], rows: Rows) -> Iterator[QueueRows]:
        self._waiting.setdefault(target, []).append(rows)
        waiting_bytes = self._waiting_bytes.get(target, 0) + rows.size_bytes
        self._waiting_bytes[target] = waiting_bytes
        if waiting_bytes >= BLOCK_BYTES:
            yield from self._release(target)

    def _release(self, target: tuple[str, int | None]) -> Iterator[QueueRows]:
        del self._waiting_bytes[target]
        for part in _joined(self._waiting.pop(target)).parts():
            yield QueueRows(*target, part)


def _joined(some: list[Rows]) -> Rows:
    if len(some) == 1:
        return some[0]
    values = pa.concat_arrays([rows.values for rows in some])
    if all(rows.properties is None for rows in some):
        return Rows(values, None)
    empties = [
        pa.repeat(_EMPTY, len(rows)) if rows.properties is None else rows.properties
        for rows in some
    ]
    return Rows(values, pa.concat_arrays(empties))


def _by_topic(batch: pa.RecordBatch, topic: str | None) -> Iterator[tuple[str, pa.RecordBatch]]:
    if not len(batch):
        return
    if topic is not None:
        yield topic, batch
        return
    topics = batch.column("topic").dictionary_encode()
    if topics.null_count:
        raise InvalidMessage("a row's topic is null: drop such rows, or give option topic")
    numbers = topics.indices.to_numpy()
    for number, name in enumerate(topics.dictionary.to_pylist()):
        check_batch_topic(name)
        its_rows = np.flatnonzero(numbers == number)
        yield name, batch if len(its_rows) == len(batch) else batch.take(pa.array(its_rows))


def message_rows(topic: str, batch: pa.RecordBatch) -> Rows:
    """Bodies and properties of rows for ``topic``. Raises InvalidMessage."""
    return Rows(_values(topic, batch), _properties(topic, batch))


def _values(topic: str, batch: pa.RecordBatch) -> Any:
    values = batch.column("value").cast(_BINARY)
    sizes = np.diff(_offsets(values))
    if values.null_count:
        _check_deletions(topic, batch)
        sizes = sizes[values.is_valid().to_numpy(zero_copy_only=False)]
        values = values.fill_null(b"")
    if not sizes.all() or sizes.max(initial=0) > BODY_BYTES_MAX:
        size = sizes.max() if sizes.all() else 0
        raise InvalidMessage(
            f"a value for {topic} has {size} bytes: brokers accept 1 to {BODY_BYTES_MAX} bytes; "
            "store larger data elsewhere and send its location"
        )
    return values


def _check_deletions(topic: str, batch: pa.RecordBatch) -> None:
    """Raise InvalidMessage for a row with a null value and no key to delete."""
    keys = _column(batch, *_KEY)
    is_null = batch.column("value").is_null()
    has_no_key = True if keys is None else pc.equal(pc.binary_length(keys), 0)
    count = pc.sum(pc.and_(is_null, has_no_key)).as_py()
    if count:
        raise InvalidMessage(
            f"{count} rows for {topic} have a null value and no key: a null value deletes its key; "
            "drop the others first"
        )


def _column(batch: pa.RecordBatch, *names: str) -> Any | None:
    """The column with one of these names, binary without nulls; None if it is missing or empty."""
    name = next((name for name in names if name in batch.schema.names), None)
    if name is None:
        return None
    column = batch.column(name)
    if column.null_count == len(column):
        return None
    column = column.cast(_BINARY).fill_null(b"")
    return column if _data_bytes(column) else None


def _properties(topic: str, batch: pa.RecordBatch) -> Any | None:
    """The properties of each row in the record format; None if no row has any."""
    texts = [
        text
        for text in (
            _named(topic, KEYS, _column(batch, *_KEY)),
            _named(topic, TAGS, _column(batch, *_TAG)),
            _mapped(topic, batch),
        )
        if text is not None
    ]
    if not texts:
        return None
    joined = texts[0] if len(texts) == 1 else pc.binary_join_element_wise(*texts, _EMPTY)
    longest = int(np.diff(_offsets(joined)).max())
    if longest > PROPERTIES_BYTES_MAX:
        raise InvalidMessage(
            f"key, tags and properties of a row for {topic} have {longest} bytes; the maximum is "
            f"{PROPERTIES_BYTES_MAX}: put large data into the value"
        )
    return joined


def _named(topic: str, name: str, values: Any | None) -> Any | None:
    """``name 01 value 02`` for each value; empty where the value is empty."""
    if values is None:
        return None
    _check_text(topic, WORDS[name], values)
    if name == TAGS:
        for tag in filter(None, pc.unique(values).to_pylist()):
            check_tag(tag.decode(), f"the tag of a row for {topic}")
    name_start = pa.scalar(name.encode() + b"\x01", _BINARY)
    texts = pc.binary_join_element_wise(name_start, values, _VALUE_END, _EMPTY)
    is_empty = pc.equal(pc.binary_length(values), 0)
    return pc.if_else(is_empty, _EMPTY, texts) if pc.any(is_empty).as_py() else texts


def _mapped(topic: str, batch: pa.RecordBatch) -> Any | None:
    """The column ``properties`` in the record format."""
    if "properties" not in batch.schema.names:
        return None
    column = batch.column("properties")
    names, values, offsets = column.keys, column.items, column.offsets
    first, last = offsets[0].as_py(), offsets[-1].as_py()
    if first == last:
        return None
    names = names.slice(first, last - first).cast(_BINARY)
    values = values.slice(first, last - first).cast(_BINARY).fill_null(b"")
    _check_map(topic, names, values)
    entries = pc.binary_join_element_wise(names, _NAME_END, values, _VALUE_END, _EMPTY)
    is_system = pc.is_in(names, _SYSTEM_NAMES)
    if pc.any(is_system).as_py():
        _check_system_names(topic, names, batch.schema.names)
    is_absent = pc.or_(is_system, pc.equal(pc.binary_length(values), 0))
    if pc.any(is_absent).as_py():
        entries = pc.if_else(is_absent, _EMPTY, entries)
    offsets = pc.subtract(offsets, pa.scalar(first, pa.int32()))
    return pc.binary_join(pa.ListArray.from_arrays(offsets, entries), _EMPTY)


def _check_map(topic: str, names: Any, values: Any) -> None:
    if not _shortest(names):
        raise InvalidMessage(f"a property of a row for {topic} has an empty name: leave it out")
    _check_text(topic, "property", names)
    _check_text(topic, "property", values)


def _check_system_names(topic: str, names: Any, columns: list[str]) -> None:
    """Raise InvalidMessage if leaving out a property would lose what the user means by it.

    Not lost are a key or tag that a column has, and the delay of a message that was delivered.
    """
    for name, carriers in ((KEYS, _KEY), (TAGS, _TAG), (DELAY, _ORIGIN)):
        is_lost = not set(carriers) & set(columns)
        if is_lost and pc.any(pc.equal(names, name.encode())).as_py():
            raise InvalidMessage(
                f"property {name} of a row for {topic} is reserved for the broker: use the columns "
                "key and tag"
            )


def _shortest(column: Any) -> int:
    return int(np.diff(_offsets(column)).min())


def _check_text(topic: str, what: str, values: Any) -> None:
    """Raise InvalidMessage for values that are not UTF-8, or have bytes that mean something."""
    try:
        values.cast(pa.string())
    except pa.ArrowInvalid:
        odd = next(each for each in values.to_pylist() if not is_utf8(each))
        raise InvalidMessage(
            f"a {what} of a row for {topic} is not UTF-8 but {odd[:_SHOWN_BYTES]!r}: encode it as "
            "text, such as hex(key)"
        ) from None
    for separator in (b"\x01", b"\x02"):
        if pc.any(pc.match_substring(values, separator)).as_py():
            raise InvalidMessage(
                f"a {what} of a row for {topic} contains byte 1 or 2, which separate properties: "
                "encode it"
            )
