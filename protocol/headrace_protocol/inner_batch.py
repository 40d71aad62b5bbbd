"""Unwraps inner batches: records that hold a whole batch each, for readers of messages.

A record of a batch queue (``queue.type=BatchCQ``) whose sysFlag has INNER_BATCH has a batch as its
body. Source: docs/store-format.md "Inner batch".
"""

from __future__ import annotations

import struct
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
    SYS_FLAG_AT,
    decode_record,
    property_number,
    topic_field,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace_protocol.columns import Array, Buffer
    from headrace_protocol.message import StoredMessage

# The count of a batch is a short.
_ITEMS_MAX: Final = 0x7FFF
_NUM: Final = INNER_NUM.encode()
_NO_END: Final = 1 << 63
_INT: Final = struct.Struct(">i")
_NOTHING: Final = np.zeros(0, np.int64)


def unwrap(
    columns: RecordColumns, first: int = 0, end: int = _NO_END, *, keeps_damaged: bool = False
) -> RecordColumns:
    """Records with one message each: a batch becomes a record per message.

    first, end: where there are batches, the queue offsets of wanted messages, without ``end``. A
    message that comes again, because two reads met in the middle of its batch, is left out.
    keeps_damaged: a batch that can't be unwrapped stays as it is.

    The columns that were given to ``columns`` stay, except for the tags codes. Raises CorruptRecord
    for a batch that is torn, or that has another number of messages than it states; CodecMissing
    and BodyTooLarge as ``decompress``.
    """
    is_inner = columns.sys_flag & INNER_BATCH != 0
    if not is_inner.any():
        return columns
    parts: list[Buffer] = []
    counts = np.ones(len(columns), np.int64)
    for number, is_whole in enumerate(is_inner.tolist()):
        record = columns.record(number)
        if not is_whole:
            parts.append(record)
            continue
        try:
            records = unwrap_record(record) if keeps_damaged else _records(decode_record(record))
        except CorruptRecord as error:
            raise CorruptRecord(int(columns.start[number]), error.reason) from None
        parts += records
        counts[number] = len(records)
    found = RecordColumns.from_records(b"".join(parts))
    ordinals = np.arange(len(found)) - np.repeat(np.cumsum(counts) - counts, counts)
    found.queue_offset = np.repeat(columns.queue_offset, counts) + ordinals
    found.physical_offset = np.repeat(columns.physical_offset, counts)
    before = np.maximum.accumulate(np.append(first - 1, found.queue_offset[:-1]))
    is_wanted = (found.queue_offset > before) & (found.queue_offset < end)
    is_wanted |= found.sys_flag & INNER_BATCH != 0
    return found if is_wanted.all() else found.select(np.flatnonzero(is_wanted))


def unwrap_record(record: Buffer) -> list[bytes]:
    """The records of a batch's messages; the record itself for others.

    Also for a batch that is damaged, too large, or compressed with a codec that is not installed.
    """
    try:
        return _records(decode_record(record)) if is_batch(record) else [bytes(record)]
    except ValueError:
        return [bytes(record)]


def is_batch(record: Buffer) -> bool:
    """True if a record holds a batch; looks at its flags only."""
    (sys_flag,) = _INT.unpack_from(record, SYS_FLAG_AT)
    return bool(sys_flag & INNER_BATCH)


def unwrap_messages(messages: Iterable[StoredMessage]) -> list[StoredMessage]:
    """Messages with those of batches in place of these.

    Raises CorruptRecord, CodecMissing and BodyTooLarge as ``unwrap``.
    """
    found: list[StoredMessage] = []
    for message in messages:
        is_inner = message.sys_flag & INNER_BATCH
        found += map(decode_record, _records(message)) if is_inner else [message]
    return found


def raw_properties_of(batch: StoredMessage) -> list[bytes]:
    """The properties of each message of a batch.

    Raises CorruptRecord, CodecMissing and BodyTooLarge as ``unwrap``.
    """
    return _items(batch).texts()


def properties_in(record: Buffer) -> tuple[Array, Array]:
    """Start in a batch's record, and size, of the properties of each message that has some.

    Nothing for a batch that is compressed or damaged.
    """
    (sys_flag,) = _INT.unpack_from(record, SYS_FLAG_AT)
    body_at = HEAD_DTYPES[sys_flag >> 4 & 3].itemsize
    (body_bytes,) = _INT.unpack_from(record, body_at - _INT.size)
    if sys_flag & COMPRESSED:
        return _NOTHING, _NOTHING
    try:
        items = BatchItems(bytes(record[body_at : body_at + body_bytes]), _ITEMS_MAX)
    except CorruptRecord:
        return _NOTHING, _NOTHING
    has_some = np.flatnonzero(items.properties_bytes)
    return items.properties_starts[has_some] + body_at, items.properties_bytes[has_some]


def _items(batch: StoredMessage) -> BatchItems:
    items = BatchItems(batch.body, _ITEMS_MAX)
    stated = property_number(batch.raw_properties, _NUM, 0)
    if stated != items.count:
        raise CorruptRecord(0, f"a batch states {stated} messages and has {items.count}")
    return items


def _records(batch: StoredMessage) -> list[bytes]:
    """The record of each message."""
    items = _items(batch)
    _, field = topic_field(batch.topic)
    bodies = items.bodies()
    heads = _heads(batch, items, bodies, len(field))
    parts = zip(heads.view(f"V{heads.itemsize}").tolist(), bodies, items.properties(), strict=True)
    return [b"".join((head, body, field, properties)) for head, body, properties in parts]


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
