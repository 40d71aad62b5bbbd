"""Many records of one queue at once: a batch request's items, or records encoded by a producer.

What a record needs of its own (slices, CRC) is done one by one in C; the fields of the heads are
filled for all at once.
"""

from __future__ import annotations

import struct
import zlib
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from headrace_broker.store.ring import ROW_DTYPE, Rows
from headrace_protocol.message import (
    BORN_HOST_V6,
    CRC_MASK,
    MAGIC_V1,
    RECORD_BYTES_MIN,
    RECORD_HEADS,
    STORE_HOST_V6,
    TRANSACTION_MASK,
    CorruptRecord,
    iter_batch,
    tags_code_of,
)

if TYPE_CHECKING:
    from headrace_broker.store.store_queue import StoreQueue

Array = npt.NDArray[Any]


def _head_dtype(born_host_bytes: int, store_host_bytes: int) -> np.dtype[Any]:
    return np.dtype(
        [
            ("size", ">i4"),
            ("magic", ">i4"),
            ("body_crc", ">i4"),
            ("queue_id", ">i4"),
            ("flag", ">i4"),
            ("queue_offset", ">i8"),
            ("physical_offset", ">i8"),
            ("sys_flag", ">i4"),
            ("born_timestamp", ">i8"),
            ("born_host", f"V{born_host_bytes}"),
            ("store_timestamp", ">i8"),
            ("store_host", f"V{store_host_bytes}"),
            ("reconsume_times", ">i4"),
            ("prepared_transaction_offset", ">i8"),
            ("body_bytes", ">i4"),
        ]
    )


# As RECORD_HEADS: by the two IPv6 bits.
HEAD_DTYPES: Final = tuple(_head_dtype(*sizes) for sizes in ((8, 8), (20, 8), (8, 20), (20, 20)))
_SHORT = struct.Struct(">h")


def _new_rows(count: int, queue: StoreQueue) -> Rows:
    rows = np.zeros(count, ROW_DTYPE)
    rows["queue_key"] = queue.key
    return rows


def _place(rows: Rows, queue_offset: int, physical_offset: int, now_ms: int) -> None:
    """Consecutive offsets, from those of the first record on."""
    ends = np.cumsum(rows["size"], dtype=np.int64)
    rows["physical_offset"] = physical_offset + ends - rows["size"]
    rows["queue_offset"] = queue_offset + np.arange(len(rows))
    rows["store_timestamp"] = now_ms


class BatchRecords:
    """The items of a batch body, to be stored as records of one queue."""

    def __init__(self, batch_body: bytes, sys_flag: int, queue: StoreQueue) -> None:
        """Raises CorruptRecord for a malformed or empty batch."""
        self.queue = queue
        items = list(iter_batch(batch_body))
        if not items:
            raise CorruptRecord(0, "the batch has no items")
        self.flags, self.bodies, self.properties = zip(*items, strict=True)
        self.head_dtype = HEAD_DTYPES[sys_flag >> 4 & 3]
        self.rows = _new_rows(len(items), queue)
        self.rows["sys_flag"] = sys_flag
        count = len(items)
        self.rows["tags_code"] = np.fromiter(map(tags_code_of, self.properties), np.int64, count)
        self.rows["properties_size"] = np.fromiter(map(len, self.properties), np.int32, count)
        self.body_bytes = np.fromiter(map(len, self.bodies), np.int64, count)
        overhead = self.head_dtype.itemsize + len(queue.topic_field) + 2
        self.rows["size"] = self.rows["properties_size"] + self.body_bytes + overhead
        self.total_bytes = int(self.rows["size"].sum())

    def place(self, queue_offset: int, physical_offset: int, now_ms: int) -> None:
        """Assign offsets and time."""
        _place(self.rows, queue_offset, physical_offset, now_ms)

    def encode(
        self, born_timestamp: int, born_host: bytes, store_host: bytes, reconsume_times: int
    ) -> memoryview:
        """All records back to back."""
        heads = np.zeros(len(self.rows), self.head_dtype)
        for name in ("size", "queue_offset", "physical_offset", "sys_flag", "store_timestamp"):
            heads[name] = self.rows[name]
        heads["magic"] = self.queue.magic
        heads["queue_id"] = self.queue.queue_id
        checksums = np.fromiter(map(zlib.crc32, self.bodies), np.uint32, len(heads))
        heads["body_crc"] = checksums & CRC_MASK
        heads["flag"] = self.flags
        heads["born_timestamp"] = born_timestamp
        heads["born_host"] = np.void(born_host)
        heads["store_host"] = np.void(store_host)
        heads["reconsume_times"] = reconsume_times
        heads["body_bytes"] = self.body_bytes
        parts = zip(
            _slices(heads.tobytes(), self.head_dtype.itemsize),
            self.bodies,
            repeat(self.queue.topic_field),
            _slices(self.rows["properties_size"].astype(">i2").tobytes(), 2),
            self.properties,
            strict=False,
        )
        return memoryview(b"".join([part for record in parts for part in record]))


def _slices(data: bytes, width: int) -> list[bytes]:
    return [data[at : at + width] for at in range(0, len(data), width)]


_CHECKED = struct.Struct(">iii24xi44xi")  # size, magic, crc, sysFlag, body length


class EncodedRecords:
    """Whole V1 records with IPv4 hosts, encoded by a producer for one topic."""

    def __init__(self, block: memoryview, queue: StoreQueue, store_host: bytes) -> None:
        """Raises CorruptRecord for anything else."""
        if len(store_host) != 8:
            raise CorruptRecord(0, "encoded records have no room for this broker's IPv6 address")
        self.queue = queue
        self.store_host = store_host
        checked = _check_records(block, queue)
        self.rows = _new_rows(len(checked), queue)
        sizes, self.rows["sys_flag"], self.rows["properties_size"], self.rows["tags_code"] = zip(
            *checked, strict=True
        )
        self.rows["size"] = sizes
        self.block = np.frombuffer(bytes(block), np.uint8).copy()

    def place(self, queue_offset: int, physical_offset: int, now_ms: int) -> None:
        """Assign offsets and time."""
        _place(self.rows, queue_offset, physical_offset, now_ms)

    def encode(self) -> memoryview:
        """The records with everything filled in that only the broker knows."""
        dtype = HEAD_DTYPES[0]
        starts = self.rows["physical_offset"] - self.rows["physical_offset"][0]
        at = starts[:, None] + np.arange(dtype.itemsize)
        heads = self.block[at].view(dtype).ravel()
        heads["queue_id"] = self.queue.queue_id
        heads["store_host"] = np.void(self.store_host)
        for name in ("queue_offset", "physical_offset", "store_timestamp"):
            heads[name] = self.rows[name]
        self.block[at] = heads.view(np.uint8).reshape(at.shape)
        return self.block.data


def _check_records(block: memoryview, queue: StoreQueue) -> list[tuple[int, int, int, int]]:
    """Size, sysFlag, properties size and tags code of each record."""
    head_bytes = RECORD_HEADS[0].size
    data = bytes(block)
    topic_field = queue.topic_field
    found = []
    position = 0
    while position < len(data):
        if len(data) - position < RECORD_BYTES_MIN:
            raise CorruptRecord(position, f"only {len(data) - position} bytes are left")
        size, magic, crc, sys_flag, body_bytes = _CHECKED.unpack_from(data, position)
        end = position + size
        topic_at = position + head_bytes + body_bytes
        length_at = topic_at + len(topic_field)
        if magic != MAGIC_V1 or sys_flag & (BORN_HOST_V6 | STORE_HOST_V6 | TRANSACTION_MASK):
            raise CorruptRecord(position, "not a plain V1 record with IPv4 hosts")
        if body_bytes < 0 or end > len(data) or length_at + 2 > end:
            raise CorruptRecord(position, f"size {size}, body length {body_bytes}")
        if data[topic_at:length_at] != topic_field:
            raise CorruptRecord(position, f"not of topic {queue.topic}")
        (properties_bytes,) = _SHORT.unpack_from(data, length_at)
        if properties_bytes != end - length_at - 2:
            raise CorruptRecord(position, f"properties do not end with the record of {size} bytes")
        if zlib.crc32(data[position + head_bytes : topic_at]) & CRC_MASK != crc:
            raise CorruptRecord(position, "body CRC does not match")
        code = tags_code_of(data[length_at + 2 : end])
        found.append((size, sys_flag, properties_bytes, code))
        position = end
    if not found:
        raise CorruptRecord(0, "the block has no records")
    return found
