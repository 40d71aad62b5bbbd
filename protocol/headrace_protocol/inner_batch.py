"""Unwraps inner batches: records that hold a whole batch each, for readers of messages.

A record of a batch queue (``queue.type=BatchCQ``) whose sysFlag has INNER_BATCH has a batch as its
body. Source: docs/store-format.md "Inner batch".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from headrace_protocol.batch_items import BatchItems
from headrace_protocol.columns import HEAD_DTYPES, RecordColumns, checksums
from headrace_protocol.compression import COMPRESSED
from headrace_protocol.errors import CorruptRecord
from headrace_protocol.message import (
    INNER_BATCH,
    INNER_NUM,
    NEED_UNWRAP,
    decode_record,
    property_number,
    topic_field,
)

if TYPE_CHECKING:
    from headrace_protocol.columns import Array, Buffer
    from headrace_protocol.message import StoredMessage

# The count of a batch is a short.
_ITEMS_MAX: Final = 0x7FFF
_NUM: Final = INNER_NUM.encode()


def unwrap(columns: RecordColumns, first_offset: int = 0) -> RecordColumns:
    """Records with one message each: a batch becomes a record per message.

    first_offset: messages of batches below this queue offset are left out. The columns that were
    given to ``columns`` stay, except for the tags codes.

    Raises CorruptRecord for a batch that is torn, or that has another number of messages than it
    states.
    """
    is_inner = columns.sys_flag & INNER_BATCH != 0
    if not is_inner.any():
        return columns
    columns.check_bodies()
    parts: list[Buffer] = []
    queue_offsets: list[Array] = []
    counts = np.ones(len(columns), np.int64)
    for number, is_batch in enumerate(is_inner.tolist()):
        queue_offset = columns.queue_offset[number : number + 1]
        if not is_batch:
            parts.append(columns.record(number))
            queue_offsets.append(queue_offset)
            continue
        try:
            records, count = _records(decode_record(columns.record(number)))
        except CorruptRecord as error:
            raise CorruptRecord(int(columns.start[number]), error.reason) from None
        parts += records
        counts[number] = count
        queue_offsets.append(queue_offset + np.arange(count))
    found = RecordColumns.from_records(b"".join(parts))
    found.queue_offset = np.concatenate(queue_offsets)
    found.physical_offset = np.repeat(columns.physical_offset, counts)
    if first_offset and found.queue_offset[0] < first_offset:
        return found.select(np.flatnonzero(found.queue_offset >= first_offset))
    return found


def unwrap_record(record: Buffer) -> list[bytes]:
    """The records of a record's messages: itself, or one per message of a batch.

    Raises CorruptRecord as ``unwrap``.
    """
    message = decode_record(record)
    if not message.sys_flag & INNER_BATCH:
        return [bytes(record)]
    parts, count = _records(message)
    return [b"".join(parts[4 * number : 4 * number + 4]) for number in range(count)]


def _records(batch: StoredMessage) -> tuple[list[bytes], int]:
    """Four parts of each message's record, and the number of messages."""
    items = BatchItems(batch.body, _ITEMS_MAX)
    stated = property_number(batch.raw_properties, _NUM, 0)
    if stated != items.count:
        raise CorruptRecord(0, f"a batch states {stated} messages and has {items.count}")
    _, field = topic_field(batch.topic)
    bodies = items.bodies()
    heads = _heads(batch, items, bodies, len(field))
    parts = [field] * (4 * items.count)
    parts[0::4] = heads.view(f"V{heads.itemsize}").tolist()
    parts[1::4] = bodies
    parts[3::4] = items.properties()
    return parts, items.count


def _heads(batch: StoredMessage, items: BatchItems, bodies: list[bytes], topic_bytes: int) -> Array:
    """The heads of the messages' records: that of the batch, but for what is their own."""
    sys_flag = batch.sys_flag & ~(INNER_BATCH | NEED_UNWRAP | COMPRESSED)
    dtype = HEAD_DTYPES[sys_flag >> 4 & 3]
    heads = np.frombuffer(bytearray(batch.encode()[: dtype.itemsize] * items.count), dtype)
    heads["size"] = items.sizes + (dtype.itemsize + topic_bytes - items.head_bytes)
    heads["body_crc"] = checksums(bodies)
    heads["flag"] = items.flags
    heads["queue_offset"] += np.arange(items.count)
    heads["sys_flag"] = sys_flag
    heads["body_bytes"] = items.body_bytes
    return heads
