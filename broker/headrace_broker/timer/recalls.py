"""Recalls that wait: the keys that no timer of a second may have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace_broker.timer.arrivals import slots_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace_protocol.columns import Array

_Name = tuple[int, int]  # slot, number of the topic


class Recalls:
    """The keys of recalls by slot and topic, sorted; a key recalled twice is there twice.

    So an arrival is compared with the recalls of its second by a binary search.
    """

    def __init__(self) -> None:
        self._keys: dict[_Name, Array] = {}

    def add(self, rows: Array) -> None:
        """Add recalls: rows with the complement of a topic's number."""
        for name, keys in _sorted_keys(rows, ~rows["topic"]):
            known = self._keys.get(name, keys[:0])
            self._keys[name] = np.insert(known, np.searchsorted(known, keys), keys)

    def remove(self, rows: Array) -> None:
        """Remove recalls that were added."""
        for name, keys in _sorted_keys(rows, ~rows["topic"]):
            known = self._keys[name]
            # The first of equal keys, the second for the second, and so on.
            rank = np.arange(len(keys)) - np.searchsorted(keys, keys)
            rest = np.delete(known, np.searchsorted(known, keys) + rank)
            if len(rest):
                self._keys[name] = rest
            else:
                del self._keys[name]

    def among(self, rows: Array) -> Array:
        """A mask of the timers that a recall drops."""
        where = np.zeros(len(rows), bool)
        if self._keys:
            for name, numbers in _by_name(rows, rows["topic"]):
                if (known := self._keys.get(name)) is not None:
                    where[numbers] = is_among(rows["key"][numbers], known)
        return where


def is_among(keys: Array, known: Array) -> Array:
    """A mask of the keys that are among sorted ones."""
    at = np.searchsorted(known, keys)
    found: Array = known[np.minimum(at, len(known) - 1)] == keys
    return found


def _sorted_keys(rows: Array, topics: Array) -> Iterator[tuple[_Name, Array]]:
    for name, numbers in _by_name(rows, topics):
        yield name, np.sort(rows["key"][numbers])


def _by_name(rows: Array, topics: Array) -> Iterator[tuple[_Name, Array]]:
    """Each slot and topic with the numbers of its rows."""
    if not len(rows):
        return
    slots = slots_of(rows)
    order = np.lexsort((topics, slots))
    slots, topics = slots[order], topics[order]
    is_new = (slots[1:] != slots[:-1]) | (topics[1:] != topics[:-1])
    starts = np.flatnonzero(np.append(True, is_new))
    names = zip(slots[starts].tolist(), topics[starts].tolist(), strict=True)
    yield from zip(names, np.split(order, starts[1:]), strict=True)
