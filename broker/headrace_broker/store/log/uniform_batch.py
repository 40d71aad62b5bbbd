"""Conversion of a batch whose items all have one layout to records of one queue.

Most batches are uniform: items and records are rows of two tables, and numpy copies each part of
all items as one column. ``BatchRecords`` converts every other batch and reports what is wrong with
a bad one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from headrace_broker.store.log.record_checksum import CHECKSUM_NAME, SEPARATOR, put_checksums
from headrace_broker.store.log.ring import ROW, WHOLE_ROW
from headrace_protocol.columns import HEAD_DTYPES, checksums
from headrace_protocol.java_hash import tags_code_of
from headrace_protocol.message import (
    BATCH_ITEM_HEAD,
    BATCH_ITEMS_MAX,
    PROPERTIES_BYTES_MAX,
)

if TYPE_CHECKING:
    from headrace_broker.store.log.batch_records import Stamp
    from headrace_broker.store.log.ring import Rows
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_protocol.columns import Array, Buffer

_HEAD_BYTES: Final = BATCH_ITEM_HEAD.size
_LENGTH_BYTES: Final = 2  # of the properties
_TAGS: Final = b"TAGS\x01"


class _Shape(NamedTuple):
    """Dtypes of whole items and whole records; an ``end`` is the properties after their length.

    They are cached, because building them costs more than converting a batch.
    """

    items: np.dtype[Any]
    records: np.dtype[Any]


@lru_cache(256)
def _shape(
    item_bytes: int, body_bytes: int, host_bits: int, topic_bytes: int, checksum_bytes: int
) -> _Shape:
    """host_bits: which of the two hosts are IPv6, as an index of ``HEAD_DTYPES``."""
    body_end = _HEAD_BYTES + body_bytes
    end_bytes = item_bytes - body_end
    items = {"head": (_void(_HEAD_BYTES), 0), "body": (_void(body_bytes), _HEAD_BYTES)}
    items["end"] = (_void(end_bytes), body_end)
    head = HEAD_DTYPES[host_bits]
    topic_at = head.itemsize + body_bytes
    end_at = topic_at + topic_bytes
    records = {name: head.fields[name][:2] for name in _OWN_FIELDS} if head.fields else {}
    records["head"] = (_void(head.itemsize), 0)
    records["body"] = (_void(body_bytes), head.itemsize)
    records["topic"] = (_void(topic_bytes), topic_at)
    records["end"] = (_void(end_bytes), end_at)
    records["properties_bytes"] = (np.dtype(">i2"), end_at)
    return _Shape(_dtype(items, item_bytes), _dtype(records, end_at + end_bytes + checksum_bytes))


# The fields of a head that differ from record to record.
_OWN_FIELDS: Final = ("body_crc", "queue_offset", "physical_offset")


def _void(size: int) -> np.dtype[Any]:
    return np.dtype(f"V{size}")


def _dtype(fields: dict[str, tuple[np.dtype[Any], int]], size: int) -> np.dtype[Any]:
    formats, offsets = zip(*fields.values(), strict=True)
    return np.dtype(
        {"names": list(fields), "formats": formats, "offsets": offsets, "itemsize": size}
    )


class UniformBatch:
    """The records of a uniform batch, without offsets yet; used as ``BatchRecords``."""

    def __init__(
        self, items: Array, ends: bytes, shape: _Shape, sys_flag: int, queue: StoreQueue
    ) -> None:
        """ends: properties of all items back to back, each with its length before it."""
        self.ends = ends
        self.count = len(items)
        self.total_bytes = self.count * shape.records.itemsize
        self._items = items
        self._shape = shape
        self._sys_flag = sys_flag
        self._queue = queue
        self._tags_codes = _tags_codes(ends, self.count)

    @classmethod
    def of(cls, data: Buffer, sys_flag: int, queue: StoreQueue) -> UniformBatch | None:
        """The batch's records, or None unless all items are valid and share layout and flag."""
        if len(data) < _HEAD_BYTES:
            return None
        item_bytes, _, body_bytes = BATCH_ITEM_HEAD.unpack_from(data)
        properties_bytes = item_bytes - body_bytes - _HEAD_BYTES - _LENGTH_BYTES
        if (
            body_bytes <= 0
            or not 0 <= properties_bytes <= PROPERTIES_BYTES_MAX - queue.checksum_bytes
            or len(data) % item_bytes
            or len(data) > BATCH_ITEMS_MAX * item_bytes
        ):
            return None
        shape = _shape(
            item_bytes, body_bytes, sys_flag >> 4 & 3, len(queue.topic_field), queue.checksum_bytes
        )
        items = np.frombuffer(data, shape.items)
        if items["head"].tobytes() != bytes(data[:_HEAD_BYTES]) * len(items):
            return None
        ends = items["end"].tobytes()
        if not _are_valid(ends, properties_bytes, len(items)):
            return None
        return cls(items, ends, shape, sys_flag, queue)

    @property
    def record_bytes_max(self) -> int:
        """Size of the largest record."""
        return self._shape.records.itemsize

    def properties(self) -> list[bytes]:
        """Properties of each item."""
        stride = len(self.ends) // self.count
        return [
            self.ends[start + _LENGTH_BYTES : start + stride]
            for start in range(0, len(self.ends), stride)
        ]

    def encode(self, stamp: Stamp) -> Buffer:
        """As ``BatchRecords.encode``; each column is copied once, directly into the block."""
        items, queue, shape = self._items, self._queue, self._shape
        size, queue_offset, physical_offset = shape.records.itemsize, *stamp[:2]
        _, flag, body_bytes = BATCH_ITEM_HEAD.unpack(items["head"][0].tobytes())
        head = stamp.head(queue, self._sys_flag, size, flag, body_bytes)
        self._first_queue_offset, self._now_ms = queue_offset, stamp.now_ms
        end_offset = physical_offset + self.total_bytes
        self.physical_offsets = np.arange(physical_offset, end_offset, size)
        block = np.empty(self.total_bytes, np.uint8)
        records = np.ndarray(self.count, shape.records, block)
        records["head"] = np.void(head)
        records["body_crc"] = checksums(items["body"].tolist())
        records["queue_offset"] = np.arange(queue_offset, queue_offset + self.count)
        records["physical_offset"] = self.physical_offsets
        records["body"] = items["body"]
        records["topic"] = np.void(queue.topic_field)
        records["end"] = items["end"]
        if queue.checksum_bytes:
            records["properties_bytes"] = self._properties_bytes
            starts = self.physical_offsets - physical_offset
            put_checksums(block.data, starts, np.full(self.count, size))
        return block.data

    @property
    def _properties_bytes(self) -> int:
        given_bytes = self._items["end"].itemsize - _LENGTH_BYTES
        return int(given_bytes + self._queue.checksum_bytes)

    def fill(self, rows: Rows) -> None:
        """Write the rows of the records, once encoded."""
        codes = self._tags_codes
        row = ROW.pack(
            0,
            0,
            codes if isinstance(codes, int) else 0,
            self._now_ms,
            self._shape.records.itemsize,
            self._queue.key,
            self._properties_bytes,
            self._sys_flag | self._queue.row_flag,
        )
        rows.view(WHOLE_ROW)[:] = np.void(row)
        rows["physical_offset"] = self.physical_offsets
        first = self._first_queue_offset
        rows["queue_offset"] = np.arange(first, first + self.count)
        if not isinstance(codes, int):
            rows["tags_code"] = codes


def _are_valid(ends: bytes, properties_bytes: int, count: int) -> bool:
    """True if the ends state their length, end with a separator, and have no checksum property.

    Finding a single byte costs a tenth of finding a text, so a rare byte is tried first.
    """
    high, low = divmod(properties_bytes, 256)
    stride = properties_bytes + _LENGTH_BYTES
    return (
        ends[::stride].count(high) == count
        and ends[1::stride].count(low) == count
        and (not properties_bytes or ends[stride - 1 :: stride].count(SEPARATOR) == count)
        and not (b"#" in ends and CHECKSUM_NAME in ends)
    )


def _tags_codes(ends: bytes, count: int) -> list[int] | int:
    """The tags code of each item, or one code for all: most batches have the same TAGS in each."""
    if b"G" not in ends or _TAGS not in ends:  # as in _are_valid
        return 0
    stride = len(ends) // count
    first = ends[:stride]
    # The last TAGS property counts, so equal ends mean equal codes.
    end = first[first.rfind(b"\x02" + _TAGS) :]
    if len(end) > len(_TAGS):
        column = np.ndarray(count, f"V{len(end)}", ends, stride - len(end), (stride,))
        if column.tobytes() == end * count:
            return tags_code_of(end)
    return [
        tags_code_of(ends[start + _LENGTH_BYTES : start + stride])
        for start in range(0, len(ends), stride)
    ]
