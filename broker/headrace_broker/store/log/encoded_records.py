"""Whole records encoded by a producer; the broker checks them and fills in its own fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from headrace_broker.store.log.record_checksum import (
    CHECKSUM_NAME,
    SEPARATOR,
    put_checksums,
    require_room,
)
from headrace_broker.store.log.ring import ROW_DTYPE
from headrace_protocol.columns import HEAD_PLACES, SHORT_DTYPE, SIZE_DTYPE, RecordColumns, split
from headrace_protocol.compression import COMPRESSED, COMPRESSION_MASK
from headrace_protocol.errors import CorruptRecord
from headrace_protocol.java_hash import tags_code_of
from headrace_protocol.message import CRC32, MAGIC_V1

if TYPE_CHECKING:
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_protocol.columns import Array, Buffer

# Bits of sysFlag that a producer may set.
_PRODUCERS_FLAGS = COMPRESSED | COMPRESSION_MASK


class EncodedRecords:
    """V1 records with IPv4 hosts for one queue; the constructor checks them all.

    rows: their rows for the ring. distinct_properties: each properties text once.
    total_bytes, body_bytes, body_bytes_max: size of all records, of all bodies, of the largest
    body.
    """

    def __init__(
        self, queue: StoreQueue, record_count: int, body: Buffer, sys_flag: int = 0
    ) -> None:
        """Check the records of a BULK_SEND; they are kept in place if ``body`` is writable.

        body: ``record_count`` sizes, as big-endian int32, then the records back to back.
        sys_flag: bits that the topic adds to each record.

        Raises CorruptRecord unless there are one or more whole records of the queue's topic; its
        position counts from the first record.
        """
        self.queue = queue
        self._columns = _columns(record_count, body)
        self._check()
        self.total_bytes = len(self._columns.data) + record_count * queue.checksum_bytes
        self.body_bytes = int(self._columns.body_bytes.sum(dtype=np.int64))
        self.body_bytes_max = int(self._columns.body_bytes.max())
        self.distinct_properties, tags_codes = self._tags_codes()
        self.rows = self._new_rows(tags_codes, sys_flag)
        if queue.checksum_bytes:
            require_room(self.rows["properties_size"])
        data = memoryview(self._columns.data)
        self._block = bytearray(data) if data.readonly else data

    @property
    def record_bytes_max(self) -> int:
        """Size of the largest record."""
        return int(self.rows["size"].max())

    def complete(self, physical_offset: int, now_ms: int, store_host: bytes) -> Buffer:
        """The records completed for the log, to be stored at ``physical_offset`` now.

        store_host: 8 bytes, an IPv4 address with its port.
        """
        if self.queue.checksum_bytes:
            self._widen()
        rows, start = self.rows, self._columns.start
        rows["physical_offset"] = start + physical_offset
        rows["queue_offset"] = np.arange(len(rows)) + self.queue.next_offset
        rows["store_timestamp"] = now_ms
        self._fill("queue_id", self.queue.queue_id)
        self._fill("store_host", np.void(store_host))
        for name in ("queue_offset", "physical_offset", "store_timestamp", "sys_flag"):
            self._fill(name, rows[name])
        rows["sys_flag"] |= self.queue.row_flag
        if self.queue.checksum_bytes:
            put_checksums(self._block, start, self._columns.size)
        return self._block

    def _widen(self) -> None:
        """Make room for a checksum at the end of each record."""
        columns, rows = self._columns, self.rows
        parts = [bytes(self.queue.checksum_bytes)] * (2 * len(columns))
        parts[0::2] = split(self._block, columns.start, columns.size)
        self._block = block = bytearray().join(parts)
        size = rows["size"].astype(np.int64)
        start = np.cumsum(size) - size
        _put(block, SIZE_DTYPE, start, size)
        properties_at = start + columns.size - columns.properties_bytes
        _put(block, SHORT_DTYPE, properties_at - SHORT_DTYPE.itemsize, rows["properties_size"])
        self._columns = RecordColumns(block, start, size)

    def _check(self) -> None:
        columns = self._columns
        columns.require(columns.magic == MAGIC_V1, "not a V1 record")
        columns.require(
            columns.sys_flag & ~_PRODUCERS_FLAGS == 0,
            "its sysFlag has bits other than those for compression",
        )
        if not columns.has_topic(self.queue.topic):
            raise CorruptRecord(0, f"not all records are of topic {self.queue.topic}")
        columns.check_bodies()
        last = np.frombuffer(columns.data, np.uint8)[columns.start + columns.size - 1]
        is_terminated = (last == SEPARATOR[0]) | (columns.properties_bytes == 0)
        columns.require(is_terminated, "its properties do not end with a separator")

    def _tags_codes(self) -> tuple[set[bytes], Array | int]:
        """Each properties text once, and the tags code of each record."""
        if not self._columns.properties_bytes.any():
            return {b""}, 0
        properties = self._columns.properties()
        distinct = set(properties)
        if any(CHECKSUM_NAME in raw for raw in distinct):
            raise CorruptRecord(0, f"a record has the property {CRC32}, reserved for the store")
        codes = {raw: tags_code_of(raw) for raw in distinct}
        count = len(properties)
        return set(codes), np.fromiter(map(codes.__getitem__, properties), np.int64, count)

    def _new_rows(self, tags_codes: Array | int, sys_flag: int) -> Array:
        columns = self._columns
        rows = np.zeros(len(columns), ROW_DTYPE)
        rows["queue_key"] = self.queue.key
        rows["size"] = columns.size + self.queue.checksum_bytes
        rows["properties_size"] = columns.properties_bytes + self.queue.checksum_bytes
        rows["sys_flag"] = columns.sys_flag | sys_flag
        rows["tags_code"] = tags_codes
        return rows

    def _fill(self, name: str, values: Array | np.void | int) -> None:
        dtype, at = HEAD_PLACES[name]
        column, index = self._columns.locate(self._block, dtype, at)
        column[index] = values


def _put(block: bytearray, dtype: np.dtype[Any], positions: Array, values: Array) -> None:
    """Write integers to ``positions``, which need not be aligned."""
    np.ndarray(len(block) - dtype.itemsize + 1, dtype, block, strides=(1,))[positions] = values


def _columns(record_count: int, body: Buffer) -> RecordColumns:
    records_at = record_count * SIZE_DTYPE.itemsize
    if not 0 < records_at < len(body):
        raise CorruptRecord(0, f"{len(body)} bytes are not {record_count} sizes and records")
    size = np.frombuffer(body, SIZE_DTYPE, record_count).astype(np.int64)
    data = memoryview(body)[records_at:]
    if size.sum() != len(data):
        raise CorruptRecord(0, f"sizes of {size.sum()} bytes in all, but {len(data)} bytes follow")
    return RecordColumns(data, np.cumsum(size) - size, size)
