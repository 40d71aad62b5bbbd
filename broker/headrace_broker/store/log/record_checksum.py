"""The checksum of a whole record, an optional property that the peer puts last.

Source: docs/store-format.md "The record's own checksum".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from zlib_ng.zlib_ng import crc32

from headrace_protocol.columns import checksums, split
from headrace_protocol.errors import CorruptRecord
from headrace_protocol.message import CRC32, CRC_MASK, PROPERTIES_BYTES_MAX

if TYPE_CHECKING:
    from headrace_protocol.columns import Array, Buffer, RecordColumns

CHECKSUM_NAME: Final = f"{CRC32}\x01".encode()
_DIGITS: Final = 10
SLOT_BYTES: Final = len(CHECKSUM_NAME) + _DIGITS + 1
SEPARATOR: Final = b"\x02"
_POWERS: Final = 10 ** np.arange(_DIGITS)
_EMPTY_SLOT: Final = np.frombuffer(CHECKSUM_NAME + bytes(_DIGITS) + SEPARATOR, np.uint8)


def checksum_slot(record: Buffer) -> bytes:
    """The slot that ends a record with these other bytes: ten digits, least significant first."""
    return b"%s%s\x02" % (CHECKSUM_NAME, (b"%010d" % (crc32(record) & CRC_MASK))[::-1])


def without_checksum(properties: bytes) -> bytes:
    """Properties of a stored record as they were before the checksum was added, if any was."""
    slot = properties[-SLOT_BYTES:]
    return properties[:-SLOT_BYTES] if slot.startswith(CHECKSUM_NAME) else properties


def require_room(properties_bytes: Array | int) -> None:
    """Raise CorruptRecord if properties are too long together with their slot."""
    if (most := np.max(properties_bytes)) > PROPERTIES_BYTES_MAX:
        limit = PROPERTIES_BYTES_MAX - SLOT_BYTES
        raise CorruptRecord(0, f"properties of {most - SLOT_BYTES} bytes: {limit} is the most")


def put_checksums(block: Buffer, starts: Array, sizes: Array) -> None:
    """Fill in the slots at the end of records that are otherwise complete.

    block: writable. starts, sizes: of the records in it, slots included; shape (n,), int64.
    """
    ends = starts + sizes - SLOT_BYTES
    slots = np.ndarray(len(block) - SLOT_BYTES + 1, f"V{SLOT_BYTES}", block, strides=(1,))
    slots[ends] = _slots(block, starts, sizes)


def has_checksum(columns: RecordColumns) -> Array:
    """A mask of the records that end with a slot."""
    at = columns.size - SLOT_BYTES
    words, index = columns.locate(columns.data, f"V{len(CHECKSUM_NAME)}", at)
    is_marked: Array = words[index] == np.void(CHECKSUM_NAME)
    # A slot must not be the end of a body, of a longer name, or of a value.
    before, index = columns.locate(columns.data, np.uint8, at - 1)
    follows_another = (columns.properties_bytes > SLOT_BYTES) & (before[index] == SEPARATOR[0])
    is_marked &= follows_another | (columns.properties_bytes == SLOT_BYTES)
    return is_marked


def is_checksum_right(columns: RecordColumns) -> Array:
    """A mask of the records whose slot matches their other bytes."""
    slots, index = columns.locate(columns.data, f"V{SLOT_BYTES}", columns.size - SLOT_BYTES)
    is_right: Array = slots[index] == _slots(columns.data, columns.start, columns.size)
    return is_right


def _slots(data: Buffer, starts: Array, sizes: Array) -> Array:
    """The correct slot of each record, one item of SLOT_BYTES each."""
    values = checksums(split(data, starts, sizes - SLOT_BYTES))
    slots = np.tile(_EMPTY_SLOT, (len(values), 1))
    slots[:, len(CHECKSUM_NAME) : -1] = values[:, None] // _POWERS % 10 + ord("0")
    return slots.view(f"V{SLOT_BYTES}").ravel()
