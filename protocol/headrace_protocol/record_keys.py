"""The keys of many records at once; no Python object per record.

A record's key is the whole text of its KEYS property.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace_protocol.columns import Array, Buffer, RecordColumns

_KEYS_NAME: Final = int.from_bytes(b"KEYS\x01", "big")
_NAME_BYTES: Final = 5
_SEPARATOR: Final = 2
# Slices are copied as rows of a power of two of bytes, so that few widths occur.
_WIDTH_MIN: Final = 16


def find_keys(records: RecordColumns) -> tuple[Array, Array]:
    """The starts and sizes of the keys in ``records.data``, shape (n,), int64.

    The size is 0 for a record without a key. As in ``message.decode_properties``, an empty KEYS
    does not count, and the last of several wins.
    """
    starts = np.zeros(len(records), np.int64)
    sizes = np.zeros(len(records), np.int64)
    properties_bytes = records.properties_bytes.astype(np.int64)
    for numbers, rows in rows_of(records.data, records.properties_start, properties_bytes):
        row, start, end = _find_in_rows(rows, properties_bytes[numbers])
        found = numbers[row]
        starts[found] = records.properties_start[found] + start
        sizes[found] = end - start
    return starts, sizes


def _find_in_rows(rows: Array, lengths: Array) -> tuple[Array, Array, Array]:
    """The rows that have a key, and where it begins and ends in its row.

    rows: shape (n, width), each with properties in its first ``lengths`` bytes.
    """
    count, width = rows.shape
    text = np.append(rows.ravel(), np.zeros(8, np.uint8))
    separators = np.flatnonzero(text == _SEPARATOR)
    # The eight bytes at every position, as integers.
    words = np.ndarray((count * width + 1,), ">u8", text, strides=(1,))
    begins = np.concatenate([np.arange(0, count * width, width), separators + 1])
    is_keys = words[begins] >> np.uint64(24) == _KEYS_NAME
    starts = np.sort(begins[is_keys]) + _NAME_BYTES
    row = (starts - _NAME_BYTES) // width
    row_ends = row * width + lengths[row]
    following = np.append(separators, len(text))
    ends = np.minimum(following[np.searchsorted(separators, starts)], row_ends)
    is_key = ends > starts
    row, starts, ends = row[is_key], starts[is_key], ends[is_key]
    is_last = np.append(row[1:] != row[:-1], True)[: len(row)]
    row, starts, ends = row[is_last], starts[is_last], ends[is_last]
    return row, starts - row * width, ends - row * width


def _by_width(sizes: Array) -> Iterator[tuple[int, Array]]:
    """Widths of rows, and the numbers of the slices that need each."""
    if not len(sizes):
        return
    least, most = (_width(int(size)) for size in (sizes.min(), sizes.max()))
    if least == most:  # as a rule, and then nothing is computed per slice
        yield most, np.arange(len(sizes))
        return
    below, width = 0, least
    while width <= most:
        numbers = np.flatnonzero((sizes > below) & (sizes <= width) if below else sizes <= width)
        if len(numbers):
            yield width, numbers
        below, width = width, 2 * width


def _width(size: int) -> int:
    return 1 << (max(size, _WIDTH_MIN) - 1).bit_length()


def rows_of(data: Buffer, starts: Array, sizes: Array) -> Iterator[tuple[Array, Array]]:
    """Copies of slices, grouped by width.

    Yields the numbers of the slices and a table of shape (n, width), uint8: each row begins with
    one slice, and other bytes follow.
    """
    for width, numbers in _by_width(sizes):
        mine = starts[numbers]
        if len(data) - int(mine.max()) < width:
            data = bytes(data) + bytes(width)
        pieces = np.ndarray((len(data) - width + 1,), f"V{width}", data, strides=(1,))
        yield numbers, pieces[mine].view(np.uint8).reshape(len(numbers), width)
