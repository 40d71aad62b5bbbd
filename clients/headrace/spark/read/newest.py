"""The newest message of every key of a queue, in flat arrays of 24 bytes per key."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_protocol.columns import Array

# Sorting fewer keys at a time costs more than it saves memory.
_WAITING_MIN = 1 << 20


class Hashes(NamedTuple):
    """128 bits for each key, as two int64 columns of shape (n,).

    The second half is keyed, so that no writer can make keys with equal hashes.
    """

    first: Array
    second: Array

    def select(self, where: Array) -> Hashes:
        """A subset of the keys."""
        return Hashes(self.first[where], self.second[where])

    @classmethod
    def joined(cls, parts: Sequence[Hashes]) -> Hashes:
        """The keys of all parts, in order; at least one part."""
        return cls(
            np.concatenate([each.first for each in parts]),
            np.concatenate([each.second for each in parts]),
        )


class HashSet:
    """A set of keys."""

    def __init__(self, hashes: Hashes) -> None:
        order = np.lexsort((hashes.second, hashes.first))
        self._first, self._second = hashes.select(order)

    def holds(self, hashes: Hashes) -> Array:
        """True where a key is in the set; bool of shape (n,)."""
        starts = np.searchsorted(self._first, hashes.first, "left")
        counts = np.searchsorted(self._first, hashes.first, "right") - starts
        is_held: Array = counts > 0
        slots = starts[is_held]
        is_held[is_held] = self._second[slots] == hashes.second[is_held]
        for index in np.flatnonzero(counts > 1).tolist():
            start = starts[index]
            some = self._second[start : start + counts[index]]
            is_held[index] = bool((some == hashes.second[index]).any())
        return is_held


class Hasher:
    """Hashes keys with a random key of its own."""

    def __init__(self) -> None:
        self._salt = os.urandom(16)

    def hashes(self, keys: Sequence[bytes]) -> Hashes:
        """The hashes of keys; the same for equal keys."""
        count, salt = len(keys), self._salt
        first = np.fromiter(map(hash, keys), np.int64, count)
        second = np.fromiter((hash(salt + key) for key in keys), np.int64, count)
        return Hashes(first, second)


class Newest:
    """The newest queue offset of each key, of messages that are added in order.

    Deleted keys count as well.
    """

    def __init__(self, waiting_min: int = _WAITING_MIN) -> None:
        empty = np.empty(0, np.int64)
        self._waiting = [(Hashes(empty, empty), empty)]
        self._waiting_count = self._known_count = 0
        self._waiting_min = waiting_min

    def add(self, hashes: Hashes, offsets: Array) -> None:
        """Add messages, ascending by offset."""
        self._waiting.append((hashes, offsets))
        self._waiting_count += len(offsets)
        if self._waiting_count > max(self._waiting_min, 2 * self._known_count):
            self._merge()

    def result(self) -> tuple[Hashes, Array]:
        """The hashes of all keys and the newest offset of each, ascending by offset."""
        hashes, offsets = self._merge()
        order = np.argsort(offsets)
        return hashes.select(order), offsets[order]

    def _merge(self) -> tuple[Hashes, Array]:
        first, second = Hashes.joined([hashes for hashes, _ in self._waiting])
        offsets = np.concatenate([column for _, column in self._waiting])
        # Stable: among equal keys, later messages stay behind earlier ones.
        order = np.lexsort((second, first))
        first, second, offsets = first[order], second[order], offsets[order]
        is_last = np.ones(len(order), bool)
        is_last[:-1] = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
        merged = Hashes(first[is_last], second[is_last]), offsets[is_last]
        self._waiting = [merged]
        self._waiting_count = self._known_count = len(merged[1])
        return merged
