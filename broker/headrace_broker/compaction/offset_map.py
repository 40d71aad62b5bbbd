"""The map of a round: hash of a key -> number of its newest record, in flat arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from headrace_broker.compaction.key_hash import LANES

if TYPE_CHECKING:
    from headrace_protocol.columns import Array

SLOT_BYTES: Final = 8 * (LANES + 1)
# Share of the slots in use at most: 32 bytes a key, and about nine slots read to enter a new one.
_FILL_MAX: Final = 0.75
_FREE, _TAKEN = -2, -1
_HALF_BITS: Final = np.uint64(32)


class OffsetMap:
    """Hash table with open addressing; the calls take columns.

    Records are numbered in the order of their queue offsets, so a greater number is a newer
    record. ``key_count`` keys are in the map, ``keys_max`` fit.
    """

    def __init__(self, bytes_max: int, record_count: int) -> None:
        """bytes_max: size limit. record_count: maximum number of records to be entered."""
        slots = min(bytes_max // SLOT_BYTES, int(record_count / _FILL_MAX) + 2)
        slots = max(slots, 2)
        self._hashes = np.zeros((LANES, slots), np.uint64)
        self._numbers = np.full(slots, _FREE, np.int64)
        self.keys_max = max(int(slots * _FILL_MAX), 1)
        self.key_count = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of the arrays."""
        return self._hashes.nbytes + self._numbers.nbytes

    def clear(self) -> None:
        """Remove all keys."""
        self._numbers[:] = _FREE
        self.key_count = 0

    def put(self, hashes: Array, numbers: Array) -> tuple[int, Array]:
        """Enter records, newer than all before, until the map is full.

        hashes: shape (LANES, n). numbers: shape (n,), ascending.

        Returns the number of records entered, and the numbers of all records, entered now or
        before, that a newer one of the same key has replaced; some appear several times.
        """
        count = self._fitting_count(hashes)
        hashes, entered = hashes[:, :count], numbers[:count]
        slots = self._take_slots(hashes)
        before = self._numbers[slots]
        # Of equal indices the last value stays, which is the newest.
        self._numbers[slots] = entered
        older = entered[self._numbers[slots] > entered]
        return count, np.concatenate([before[before >= 0], older])

    def newest(self, hashes: Array) -> Array:
        """The number of the newest record of each key, -1 for keys that are not in the map."""
        found = np.full(hashes.shape[1], -1, np.int64)
        pending, slots = np.arange(hashes.shape[1]), self._first_slots(hashes)
        while len(pending):
            numbers = self._numbers[slots]
            is_taken = numbers != _FREE
            is_same = is_taken & self._is_same(slots, hashes[:, pending])
            found[pending[is_same]] = numbers[is_same]
            is_pending = is_taken & ~is_same
            pending, slots = pending[is_pending], self._next(slots[is_pending])
        return found

    def _fitting_count(self, hashes: Array) -> int:
        """The number of records that can be entered before there are too many keys."""
        count, room = len(hashes[0]), self.keys_max - self.key_count
        if count <= room:
            return count
        new = np.flatnonzero(self.newest(hashes) < 0)
        _, firsts = np.unique(hashes[:, new], axis=1, return_index=True)
        if len(firsts) <= room:
            return count
        return int(np.sort(new[firsts])[room])

    def _take_slots(self, hashes: Array) -> Array:
        """The slot of each key; a new key takes a free one, whose number is then ``_TAKEN``."""
        taken = np.empty(hashes.shape[1], np.int64)
        pending, slots = np.arange(hashes.shape[1]), self._first_slots(hashes)
        while len(pending):
            mine = hashes[:, pending]
            is_free = self._numbers[slots] == _FREE
            free = slots[is_free]
            # If several keys want a slot, the last one gets it, in each of the arrays.
            for lane in range(LANES):
                self._hashes[lane, free] = mine[lane, is_free]
            # For each slot one of the keys that want it reads back its own number.
            own = np.arange(len(free))
            self._numbers[free] = own
            self.key_count += int(np.count_nonzero(self._numbers[free] == own))
            self._numbers[free] = _TAKEN
            is_same = self._is_same(slots, mine)
            taken[pending[is_same]] = slots[is_same]
            pending, slots = pending[~is_same], self._next(slots[~is_same])
        return taken

    def _is_same(self, slots: Array, hashes: Array) -> Array:
        is_same: Array = self._hashes[0, slots] == hashes[0]
        for lane in range(1, LANES):
            is_same &= self._hashes[lane, slots] == hashes[lane]
        return is_same

    def _first_slots(self, hashes: Array) -> Array:
        """The slots where searches for keys begin: the upper bits of a hash are the mixed ones."""
        slots: Array = (hashes[0] >> _HALF_BITS) * np.uint64(len(self._numbers)) >> _HALF_BITS
        return slots.astype(np.int64)

    def _next(self, slots: Array) -> Array:
        following: Array = slots + 1
        following[following == len(self._numbers)] = 0
        return following
