"""The keys of many records at once, and their hashes; no Python object per record.

A record's key is the whole text of its KEYS property. The hash of a key is two sums of its 16-bit
words times random 64-bit factors, modulo 2**64, so two different keys have the same hash with a
probability of at most 2**-98, whatever their texts. A producer does not know the factors, so it
cannot choose two keys that collide, which is possible with MD5. The factors are new in each run and
never on disk.
Source: D. Lemire, O. Kaser, "Strongly universal string hashing is fast" (multilinear hashing).
"""

from __future__ import annotations

import os
import struct
from hashlib import shake_256
from operator import mul
from typing import TYPE_CHECKING, Final

import numpy as np

from headrace_protocol.message import PROPERTIES_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace_protocol.columns import Array, Buffer, RecordColumns

LANES: Final = 2
_KEYS_NAME: Final = int.from_bytes(b"KEYS\x01", "big")
_NAME_BYTES: Final = 5
_SEPARATOR: Final = 2
# Slices are copied as rows of a power of two of bytes, so that few widths occur.
_WIDTH_MIN: Final = 16
SEED_BYTES: Final = 32
_FEW_WORDS: Final = 64
_MASK: Final = (1 << 64) - 1
_WORDS_MAX: Final = (PROPERTIES_BYTES_MAX + 1) // 2


class KeyHash:
    """A hash function with random factors."""

    def __init__(self, seed: bytes | None = None) -> None:
        """seed: where the factors come from; None for new ones."""
        self.seed = seed or os.urandom(SEED_BYTES)
        random = shake_256(self.seed).digest(LANES * (_WORDS_MAX + 1) * 8)
        self._factors = np.frombuffer(random, np.uint64).reshape(LANES, -1)
        # As integers, for single keys.
        self._few_factors = [(lane[:_FEW_WORDS].tolist(), int(lane[-1])) for lane in self._factors]

    def of_records(self, records: RecordColumns) -> tuple[Array, Array]:
        """The hash of each record's key, as ``of_slices``, and a mask of records with a key."""
        starts, sizes = find_keys(records)
        return self.of_slices(records.data, starts, sizes), sizes > 0

    def of_key(self, key: bytes) -> tuple[int, int]:
        """The hash of one key, the same as that of ``of_slices``."""
        if len(key) > 2 * _FEW_WORDS:
            column = self.of_slices(key, np.zeros(1, np.int64), np.array([len(key)], np.int64))
            return int(column[0, 0]), int(column[1, 0])
        words = struct.unpack(f"<{-(-len(key) // 2)}H", key + bytes(len(key) % 2))
        first, second = (
            (sum(map(mul, words, factors)) + len(key) * last) & _MASK
            for factors, last in self._few_factors
        )
        return first, second

    def of_slices(self, data: Buffer, starts: Array, sizes: Array) -> Array:
        """The hash of each slice of ``data``: shape (LANES, n), uint64."""
        hashes = sizes.astype(np.uint64) * self._factors[:, -1:]
        for numbers, rows in _rows(data, starts, sizes):
            lengths = sizes[numbers]
            if lengths.min() < rows.shape[1]:
                np.multiply(rows, np.arange(rows.shape[1]) < lengths[:, np.newaxis], out=rows)
            used = -(-int(lengths.max()) // 2)
            words = rows.view("<u2")[:, :used].astype(np.uint64)
            for lane in range(LANES):
                hashes[lane, numbers] += words @ self._factors[lane, :used]
        return hashes


def find_keys(records: RecordColumns) -> tuple[Array, Array]:
    """Where the key of each record is in ``records.data``: starts and sizes, shape (n,), int64.

    The size is 0 for a record without a key. As in ``message.decode_properties``, an empty KEYS
    does not count, and the last of several wins.
    """
    starts = np.zeros(len(records), np.int64)
    sizes = np.zeros(len(records), np.int64)
    properties_bytes = records.properties_bytes.astype(np.int64)
    for numbers, rows in _rows(records.data, records.properties_start, properties_bytes):
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


def _rows(data: Buffer, starts: Array, sizes: Array) -> Iterator[tuple[Array, Array]]:
    """Copies of slices, grouped by width.

    Yields the numbers of the slices and a table of shape (n, width), uint8: each row begins with
    one slice, and other bytes follow.
    """
    exponents = np.ceil(np.log2(np.maximum(sizes, _WIDTH_MIN))).astype(np.int64)
    for exponent in np.unique(exponents).tolist():
        numbers = np.flatnonzero(exponents == exponent)
        width = 1 << exponent
        mine = starts[numbers]
        if len(data) - int(mine.max()) < width:
            data = bytes(data) + bytes(width)
        pieces = np.ndarray((len(data) - width + 1,), f"V{width}", data, strides=(1,))
        yield numbers, pieces[mine].view(np.uint8).reshape(len(numbers), width)
