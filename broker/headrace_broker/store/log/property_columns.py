"""Finds properties in the texts of many records at once, whatever their layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_protocol.columns import Array

_WORD: Final = 8
_DIGITS_MAX: Final = 18
_POWERS: Final = 10 ** np.arange(_DIGITS_MAX - 1, -1, -1)


class Found(NamedTuple):
    """The values of one property: record number, start and end of each."""

    records: Array
    starts: Array
    ends: Array

    def take(self, where: Array) -> Found:
        """Some of them."""
        return Found(self.records[where], self.starts[where], self.ends[where])


_NOTHING: Final = Found(*np.zeros((3, 0), np.int64))


class PropertyColumns:
    """The properties of records, joined to one text in which names are looked up by columns."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        # Behind the padding, each name stands behind a separator, and each value before one.
        padding = b"\x02" * 32
        self.text = np.frombuffer(b"\x02".join([padding, *texts, b""]), np.uint8)
        self._words = np.ndarray(len(self.text) - _WORD + 1, "<u8", self.text, strides=(1,))
        self._marks = np.flatnonzero(self.text == 1)
        self._tails = self._words[self._marks - _WORD]
        self._separators = np.flatnonzero(self.text == 2)
        sizes = np.fromiter(map(len, texts), np.int64, len(texts))
        self._ends = len(padding) + np.cumsum(sizes + 1)

    def find(self, name: bytes) -> Found:
        """The values of a name; of equal names the last wins."""
        needle = b"\x02" + name
        missing = np.uint64(8 * max(_WORD - len(needle), 0))
        marks = self._marks[self._tails >> missing == _word(needle[-_WORD:])]
        if not len(marks):
            return _NOTHING
        for start in range(0, len(needle) - _WORD, _WORD):
            is_equal = self._words[marks - (len(needle) - start)] == _word(needle[start:])
            marks = marks[is_equal]
        starts = marks + 1
        ends = self._separators[np.searchsorted(self._separators, starts)]
        found = Found(np.searchsorted(self._ends, marks, "right"), starts, ends)
        found = found.take(ends > starts)
        return found.take(np.diff(found.records, append=-1) != 0)

    def integers(self, found: Found, missing: int) -> Array:
        """Numbers of one to 18 digits; ``missing`` for other texts."""
        sizes = found.ends - found.starts
        width = min(int(sizes.max(initial=1)), _DIGITS_MAX)
        distances = np.arange(-width, 0)
        digits = self.text[found.ends[:, None] + distances] - ord("0")  # wraps around below "0"
        if (sizes < width).any():
            digits[distances < -sizes[:, None]] = 0
        is_number = (digits <= 9).all(1) & (sizes <= width)
        return np.where(is_number, digits @ _POWERS[_DIGITS_MAX - width :], missing)

    def cells(self, found: Found, width: int) -> Array:
        """The first ``width`` bytes of values, one row each."""
        cells: Array = self.text[found.starts[:, None] + np.arange(width)]
        return cells


def _word(text: bytes) -> int:
    return int.from_bytes(text[:_WORD], "little")
