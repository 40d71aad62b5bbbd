"""Convert records to the columns of a Spark read, without a Python object per message.

The driver makes the schema; in the task, ``RecordBlock`` makes the columns.
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.spark.arrow_types import to_arrow
from headrace.spark.errors import SchemaError
from headrace.spark.read.gather import gather, text
from headrace.spark.read.properties import PropertyEntries
from headrace.spark.read.schema import source_schema
from headrace_protocol.message import (
    DELETE,
    KEYS,
    TAGS,
    UNIQ_KEY,
    decode_properties,
    property_value,
)
from headrace_protocol.message_ids import host_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql.types import StructType

    from headrace.spark.body.format import BodyFormat
    from headrace_protocol.columns import Array, RecordColumns

_STRING = pa.string()

# --- on the driver ----------------------------------------------------------------------------


def arrow_schema(
    schema: StructType, body: BodyFormat | None = None, *, table: bool = False
) -> pa.Schema:
    """The Arrow form of ``schema``, which is all or some of the columns of ``source_schema``.

    Raises SchemaError for an unknown column, or for one with another type.
    """
    available = {field.name: field.dataType for field in source_schema(body, table=table).fields}
    for field in schema.fields:
        if field.name not in available:
            near = get_close_matches(field.name, available, 1)
            raise SchemaError(
                f"there is no column {field.name}: the columns are {', '.join(available)}"
                + (f"; did you mean {near[0]}?" if near else "")
            )
        if field.dataType != available[field.name]:
            raise SchemaError(
                f"column {field.name} is {available[field.name].simpleString()}, not "
                f"{field.dataType.simpleString()}: read it with its own type, then cast it"
            )
    return to_arrow(schema)


# --- in the task ------------------------------------------------------------------------------


class RecordBlock:
    """Records of one queue, with columns computed on first use.

    values: pyarrow.BinaryArray of the bodies as they were sent.
    """

    def __init__(
        self,
        topic: str,
        broker: str,
        queue_id: int,
        columns: RecordColumns,
        values: Any = None,
    ) -> None:
        """values: defaults to the stored bodies, none of which may then be compressed."""
        self.topic = topic
        self.broker = broker
        self.queue_id = queue_id
        self.columns = columns
        if values is not None:
            self.values = values

    def __len__(self) -> int:
        return len(self.columns)

    def select(self, where: slice | Array, values: Any = None) -> RecordBlock:
        """A subset of the records. values: their bodies, if already known."""
        columns = self.columns.select(where)
        return RecordBlock(self.topic, self.broker, self.queue_id, columns, values)

    def column(self, name: str, kind: Any) -> Any:
        """A metadata column as an Arrow array of this type."""
        return _MAKERS[name](self, kind)

    @cached_property
    def values(self) -> Any:
        """The bodies as they were sent."""
        columns = self.columns
        return gather(columns.data, columns.body_start, columns.body_bytes)

    @cached_property
    def is_deleted(self) -> Array:
        """True where a record deletes its key; bool of shape (n,)."""
        is_empty: Array = self.columns.body_bytes == 0
        marks = pc.fill_null(pc.equal(self._property(DELETE), b"true"), False)
        is_marked: Array = marks.to_numpy(zero_copy_only=False)
        return is_empty | is_marked

    def value_or_null(self) -> Any:
        """The bodies as they were sent, null for delete markers."""
        if not self.is_deleted.any():
            return self.values
        return pc.if_else(pa.array(self.is_deleted), pa.scalar(None, pa.binary()), self.values)

    @cached_property
    def keys(self) -> Any:
        """The keys of each record as text, null where there are none."""
        return text(self.raw_keys)

    @cached_property
    def raw_keys(self) -> Any:
        """The keys of each record as they were sent, null where there are none."""
        return self._property(KEYS)

    @cached_property
    def tags(self) -> Any:
        """The tags of each record as text, null where there are none."""
        return text(self._property(TAGS))

    def _property(self, name: str) -> Any:
        """A property of each record as it was sent, null where there is none."""
        raw = self._shared_raw
        if raw is None:
            return self._entries.value_of(name.encode())
        return self.repeat(property_value(raw, name.encode()) or None, pa.binary())

    def repeat(self, value: Any, kind: Any = _STRING) -> Any:
        """An array with the same value for every record."""
        return pa.repeat(pa.scalar(value, kind), len(self))

    @cached_property
    def _shared_raw(self) -> bytes | None:
        """The properties of the records if all are equal, else None."""
        return self.columns.shared_properties()

    @cached_property
    def _entries(self) -> PropertyEntries:
        columns = self.columns
        raw = gather(columns.data, columns.properties_start, columns.properties_bytes)
        return PropertyEntries(raw)

    def properties(self, kind: Any) -> Any:
        """The properties of each record, as a MapArray."""
        if self._shared_raw is None:
            return self._entries.maps(kind)
        one = pa.array([list(decode_properties(self._shared_raw).items())], kind)
        return one.take(pa.array(np.zeros(len(self), np.int32)))

    def message_ids(self) -> Any:
        """The producer's id of each record, or the broker's id where the producer gave none."""
        given = text(self._property(UNIQ_KEY))
        if not given.null_count:
            return given
        own = self._offset_message_ids()
        return own if given.null_count == len(given) else pc.coalesce(given, own)

    def _offset_message_ids(self) -> Any:
        columns = self.columns
        host = columns.shared_store_host()
        if host is not None:
            return _hex_ids(np.frombuffer(host, np.uint8)[None], columns.physical_offset)
        hosts, which = _distinct(columns, columns.store_host_start, columns.store_host_bytes)
        ids = pa.nulls(len(self), _STRING)
        for number, host in enumerate(hosts):
            has_it = which == number
            its_ids = _hex_ids(np.frombuffer(host, np.uint8)[None], columns.physical_offset[has_it])
            ids = pc.replace_with_mask(ids, pa.array(has_it), its_ids)
        return ids

    def born_hosts(self) -> Any:
        """The producer's address and port of each record."""
        columns = self.columns
        host = columns.shared_born_host()
        if host is not None:
            return self.repeat(host_text(host))
        hosts, which = _distinct(columns, columns.born_host_start, columns.born_host_bytes)
        return pa.array([host_text(host) for host in hosts]).take(pa.array(which))


def _distinct(columns: RecordColumns, start: Array, size: Array) -> tuple[list[bytes], Array]:
    """The distinct byte strings, and each record's index into them."""
    encoded = gather(columns.data, start, size).dictionary_encode()
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy()


_HEX_PAIRS = np.frombuffer(b"".join(b"%02X" % byte for byte in range(256)), np.uint16)


def _hex_ids(host: Array, physical_offset: Array) -> Any:
    """The ids of records of one host, 32 or 56 characters each: see ``message``."""
    count, host_bytes = len(physical_offset), host.shape[1]
    pairs = np.empty((count, host_bytes + 8), np.uint16)
    pairs[:, :host_bytes] = _HEX_PAIRS[host]
    offsets = physical_offset.astype(">i8").view(np.uint8).reshape(count, 8)
    pairs[:, host_bytes:] = _HEX_PAIRS[offsets]
    ends = np.arange(count + 1, dtype=np.int32) * (pairs.shape[1] * 2)
    return pa.Array.from_buffers(_STRING, count, [None, pa.py_buffer(ends), pa.py_buffer(pairs)])


def _numbers(values: Array, kind: Any) -> Any:
    """Numbers as an Arrow array, without a copy unless the width differs."""
    values = np.ascontiguousarray(values, kind.to_pandas_dtype())
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _times(milliseconds: Array, kind: Any) -> Any:
    buffer = pa.py_buffer(milliseconds * 1000)
    return pa.Array.from_buffers(kind, len(milliseconds), [None, buffer])


_MAKERS: dict[str, Callable[[RecordBlock, Any], Any]] = {
    "topic": lambda block, kind: block.repeat(block.topic, kind),
    "broker": lambda block, kind: block.repeat(block.broker, kind),
    "queue": lambda block, kind: block.repeat(block.queue_id, kind),
    "queue_offset": lambda block, kind: _numbers(block.columns.queue_offset, kind),
    "physical_offset": lambda block, kind: _numbers(block.columns.physical_offset, kind),
    "message_id": lambda block, _: block.message_ids(),
    "keys": lambda block, _: block.keys,
    "tags": lambda block, _: block.tags,
    "properties": lambda block, kind: block.properties(kind),
    "born_timestamp": lambda block, kind: _times(block.columns.born_timestamp, kind),
    "store_timestamp": lambda block, kind: _times(block.columns.store_timestamp, kind),
    "born_host": lambda block, _: block.born_hosts(),
    "reconsume_times": lambda block, kind: _numbers(block.columns.reconsume_times, kind),
    "value": lambda block, _: block.values,
    "value_or_null": lambda block, _: block.value_or_null(),
    "deleted": lambda block, _: pa.array(block.is_deleted),
}
