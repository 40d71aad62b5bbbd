"""Blocks of checked log records: a few numpy calls find and check thousands of records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace_broker.store.log.record_checksum import has_checksum, is_checksum_right
from headrace_protocol.columns import SIZE_DTYPE, RecordColumns
from headrace_protocol.errors import CorruptRecord
from headrace_protocol.message import BLANK_RECORD, MAGIC_V1, MAGIC_V2, RECORD_BYTES_MIN

if TYPE_CHECKING:
    from headrace_protocol.columns import Array

RECORD_MAGICS: Final = frozenset((MAGIC_V1, MAGIC_V2))
# Fewer records of one size than this are found as quickly one by one.
_UNIFORM_MIN: Final = 8


class LogBlock(NamedTuple):
    """Whole records, back to back, with every length and CRC checked.

    base: physical offset of the block, from which ``columns.start`` counts.
    """

    columns: RecordColumns
    base: int

    def since(self, offset: int) -> RecordColumns:
        """The records from a physical offset on."""
        first = int(np.searchsorted(self.columns.physical_offset, offset))
        return self.columns.select(slice(first, None)) if first else self.columns

    @property
    def end_offset(self) -> int:
        """Physical offset one past the last record."""
        return self.base + int(self.columns.start[-1] + self.columns.size[-1])


def stated_head(data: bytes) -> tuple[int, int]:
    """Size and magic number at the start of ``data``; zeros if it is too short."""
    size, magic = BLANK_RECORD.unpack_from(data) if len(data) >= BLANK_RECORD.size else (0, 0)
    return int(size), int(magic)


def walk(data: bytes) -> tuple[Array, int]:
    """Starts of the records that appear whole in ``data``, and the end of the last one."""
    size, magic = stated_head(data)
    count = 0
    if magic in RECORD_MAGICS and RECORD_BYTES_MIN <= size <= len(data):
        sizes = np.ndarray((len(data) // size,), SIZE_DTYPE, data, 0, (size,))
        magics = np.ndarray((len(data) // size,), SIZE_DTYPE, data, 4, (size,))
        is_same = (sizes == size) & (magics == magic)
        count = len(is_same) if is_same.all() else int(is_same.argmin())
    if count >= _UNIFORM_MIN:
        return np.arange(0, count * size, size), count * size
    return _walk_each(data)


def _walk_each(data: bytes) -> tuple[Array, int]:
    starts = []
    position, length = 0, len(data)
    last = length - BLANK_RECORD.size
    unpack = BLANK_RECORD.unpack_from
    while position <= last:
        size, magic = unpack(data, position)
        if magic not in RECORD_MAGICS or size < RECORD_BYTES_MIN or position + size > length:
            break
        starts.append(position)
        position += size
    return np.array(starts, np.int64), position


def checked(
    data: bytes, starts: Array, end: int, base: int
) -> tuple[LogBlock | None, int, str | None]:
    """The records before the first bad one, where that one begins, and what is wrong with it.

    starts, end: from ``walk``. base: physical offset of ``data``.
    """
    sizes = np.diff(starts, append=end)
    reason = None
    while len(starts):
        try:
            columns = RecordColumns(data, starts, sizes)
            _check(columns, base)
        except CorruptRecord as error:
            reason, end = error.reason, error.position
            kept = int(np.searchsorted(starts, end))
            starts, sizes = starts[:kept], sizes[:kept]
        else:
            return LogBlock(columns, base), end, reason
    return None, end, reason


def _check(columns: RecordColumns, base: int) -> None:
    columns.check_bodies()
    is_there = columns.physical_offset == columns.start + base
    columns.require(is_there, "its physical offset differs from its position")
    columns.require(columns.queue_id >= 0, "its queue id is negative")
    columns.require(columns.queue_offset >= 0, "its queue offset is negative")
    # No CRC covers the properties, but whole ones never end with a zero byte, and torn ones do.
    last = np.frombuffer(columns.data, np.uint8)[columns.start + columns.size - 1]
    is_terminated = (last != 0) | (columns.properties_bytes == 0)
    columns.require(is_terminated, "its properties end with a zero byte")
    if (is_marked := has_checksum(columns)).any():
        is_good = ~is_marked | is_checksum_right(columns)
        columns.require(is_good, "the record's own checksum does not match")
