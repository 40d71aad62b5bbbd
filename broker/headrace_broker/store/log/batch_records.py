"""Conversion of a batch's items to records of one queue, column by column."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from headrace_broker.store.errors import BatchTooLong
from headrace_broker.store.log.record_checksum import (
    CHECKSUM_NAME,
    SEPARATOR,
    put_checksums,
    require_room,
)
from headrace_broker.store.log.ring import ROW, ROW_DTYPE, WHOLE_ROW
from headrace_protocol.batch_items import BatchItems, TooManyItems
from headrace_protocol.columns import HEAD_DTYPES, checksums
from headrace_protocol.errors import CorruptRecord
from headrace_protocol.java_hash import tags_code_of
from headrace_protocol.message import (
    BATCH_ITEM_HEAD,
    BATCH_ITEMS_MAX,
    CRC32,
    RECORD_HEADS,
)

if TYPE_CHECKING:
    from headrace_broker.store.log.ring import Rows
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_protocol.columns import Array, Buffer

_HEAD_BYTES: Final = BATCH_ITEM_HEAD.size
_SHORT = np.dtype(">i2")
_TAGS = b"TAGS\x01"


class Origin(NamedTuple):
    """The origin of a batch, for all of its records."""

    born_timestamp: int
    born_host: bytes
    reconsume_times: int = 0


class Stamp(NamedTuple):
    """The values that all records of a batch get; both offsets are those of the first record."""

    queue_offset: int
    physical_offset: int
    now_ms: int
    store_host: bytes
    origin: Origin

    def head(
        self, queue: StoreQueue, sys_flag: int, size: int = 0, flag: int = 0, body_bytes: int = 0
    ) -> bytes:
        """A record's head, with zeros for the fields that differ from record to record."""
        *born, reconsume_times = self.origin
        fields = size, queue.magic, 0, queue.queue_id, flag, 0, 0, sys_flag, *born
        more = self.now_ms, self.store_host, reconsume_times, 0, body_bytes
        return RECORD_HEADS[sys_flag >> 4 & 3].pack(*fields, *more)


class BatchRecords:
    """The records of any batch, without offsets yet; its items may have different layouts."""

    def __init__(self, batch_body: Buffer, sys_flag: int, queue: StoreQueue) -> None:
        """Raises CorruptRecord for a malformed or empty batch, BatchTooLong for a long one."""
        data = batch_body if isinstance(batch_body, bytes) else bytes(batch_body)
        self._queue = queue
        checksum_bytes = queue.checksum_bytes
        try:
            items = BatchItems(data)
        except TooManyItems:
            raise BatchTooLong(BATCH_ITEMS_MAX) from None
        if not _is_terminated(items) and checksum_bytes:
            require_room(items.properties_bytes + checksum_bytes)
            items = items.terminated()
        self._items = items
        self._sys_flag = sys_flag
        head_bytes = RECORD_HEADS[sys_flag >> 4 & 3].size
        self._overhead = head_bytes + len(queue.topic_field) - _HEAD_BYTES + checksum_bytes
        row = ROW.pack(0, 0, 0, 0, 0, queue.key, 0, sys_flag | queue.row_flag)
        self.rows = _repeated(row, items.count, ROW_DTYPE)
        self.rows["size"] = items.sizes + self._overhead
        self.rows["properties_size"] = items.properties_bytes + checksum_bytes
        self.rows["tags_code"] = _tags_codes(items)
        if checksum_bytes:
            require_room(self.rows["properties_size"])
        self.count = items.count
        self.total_bytes = items.total_bytes + self._overhead * items.count

    @cached_property
    def ends(self) -> bytes:
        """Properties of all items back to back, each with its length before it."""
        return self._items.all_properties()

    @property
    def properties_starts(self) -> Array:
        """The starts of the items' properties in ``ends``."""
        sizes = self._items.properties_bytes
        return np.cumsum(sizes + _SHORT.itemsize) - sizes

    @property
    def record_bytes_max(self) -> int:
        """Size of the largest record."""
        return int(self.rows["size"].max())

    def properties(self) -> list[bytes]:
        """Properties of each item."""
        return self._items.texts()

    def encode(self, stamp: Stamp) -> Buffer:
        """All records back to back."""
        queue = self._queue
        starts = self._assign(stamp.queue_offset, stamp.physical_offset, stamp.now_ms)
        head = stamp.head(queue, self._sys_flag)
        dtype = HEAD_DTYPES[self._sys_flag >> 4 & 3]
        heads = _repeated(head, self.count, dtype)
        bodies = self._items.bodies()
        self._fill_heads(heads, bodies)
        parts = [queue.topic_field] * (4 * self.count)
        parts[0::4] = heads.view(f"V{len(head)}").tolist()
        parts[1::4] = bodies
        parts[3::4] = self._items.ends(queue.checksum_bytes)
        block = bytearray().join(parts)
        if queue.checksum_bytes:
            put_checksums(block, starts, self.rows["size"].astype(np.int64))
        return block

    def _assign(self, queue_offset: int, physical_offset: int, now_ms: int) -> Array:
        """Assign the records' offsets and times; returns where each begins in the block."""
        ordinals = np.arange(self.count)
        starts: Array = self._items.starts + ordinals * self._overhead
        self.rows["physical_offset"] = starts + physical_offset
        self.rows["queue_offset"] = ordinals + queue_offset
        self.rows["store_timestamp"] = now_ms
        return starts

    def _fill_heads(self, heads: Array, bodies: list[bytes]) -> None:
        """Fill in the fields that differ from record to record."""
        items, rows = self._items, self.rows
        heads["size"] = rows["size"]
        heads["queue_offset"] = rows["queue_offset"]
        heads["physical_offset"] = rows["physical_offset"]
        heads["body_crc"] = checksums(bodies)
        heads["flag"] = items.flags
        heads["body_bytes"] = items.body_bytes

    @property
    def physical_offsets(self) -> Array:
        """Physical offset of each record, once encoded."""
        offsets: Array = self.rows["physical_offset"]
        return offsets

    def fill(self, rows: Rows) -> None:
        """Write the rows of the records, once encoded."""
        # Copied as whole rows, because numpy would copy a structured dtype field by field.
        rows.view(WHOLE_ROW)[:] = self.rows.view(WHOLE_ROW)


def _repeated(row: bytes, count: int, dtype: np.dtype[Any]) -> Array:
    """A table of ``count`` copies of a row."""
    return np.frombuffer(bytearray(row * count), dtype)


def _is_terminated(items: BatchItems) -> bool:
    """True if all properties end with a separator.

    Raises CorruptRecord if any end with a zero byte, which recovery takes for a torn record.
    """
    last_bytes = items.last_bytes()
    if last_bytes.count(SEPARATOR) == items.count:
        return True
    last = np.frombuffer(last_bytes, np.uint8)
    has_some = np.not_equal(items.properties_bytes, 0)
    if (has_some & (last == 0)).any():
        raise CorruptRecord(0, "the properties of an item end with a zero byte")
    return not (has_some & (last != SEPARATOR[0])).any()


def _tags_codes(items: BatchItems) -> list[int] | int:
    """The tags code of each item, or one code for all: most batches have the same TAGS in each.

    Raises CorruptRecord for a property that only the store may write.
    """
    text = items.all_properties()
    if CHECKSUM_NAME in text:
        raise CorruptRecord(0, f"an item has the property {CRC32}, reserved for the store")
    if _TAGS not in text:
        return 0
    first = items.first_properties()
    # The last TAGS property counts, so equal ends mean equal codes.
    end = first[first.rfind(b"\x02" + _TAGS) :]
    if len(end) > len(_TAGS) and items.end_with(end):
        return tags_code_of(end)
    return [tags_code_of(item[_SHORT.itemsize :]) for item in items.properties()]
