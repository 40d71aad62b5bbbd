"""Hashes of the keys of many records at once; no Python object per record.

The hash of a key is two sums of its 16-bit words times random 64-bit factors, modulo 2**64, so two
different keys have the same hash with a probability of at most 2**-98, whatever their texts. A
producer does not know the factors, so it cannot choose two keys that collide, which is possible
with MD5. The factors are new in each run and never on disk.
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
from headrace_protocol.record_keys import find_keys, rows_of

if TYPE_CHECKING:
    from headrace_protocol.columns import Array, Buffer, RecordColumns

LANES: Final = 2
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
        for numbers, rows in rows_of(data, starts, sizes):
            lengths = sizes[numbers]
            if lengths.min() < rows.shape[1]:
                np.multiply(rows, np.arange(rows.shape[1]) < lengths[:, np.newaxis], out=rows)
            used = -(-int(lengths.max()) // 2)
            words = rows.view("<u2")[:, :used].astype(np.uint64)
            for lane in range(LANES):
                hashes[lane, numbers] += words @ self._factors[lane, :used]
        return hashes
