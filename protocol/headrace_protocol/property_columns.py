"""Finds properties in the texts of many records at once, whatever their layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace_protocol.columns import split

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
        # Each name stands behind a separator, and each value before one; the padding at both ends
        # has room for whole words.
        padding = b"\x02" * 32
        self.text = np.frombuffer(b"\x02".join([padding, *texts, padding]), np.uint8)
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
        marks = marks[np.searchsorted(marks, len(needle)) :]
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

    def distinct(self, found: Found) -> tuple[list[bytes], Array]:
        """The distinct values, and the number of each value among them."""
        sizes = found.ends - found.starts
        if int(sizes.max(initial=0)) >= _WORD:
            numbers: dict[bytes, int] = {}
            values = split(self.text.data, found.starts, sizes)
            number = [numbers.setdefault(value, len(numbers)) for value in values]
            return [*numbers], np.array(number, np.intp)
        # The bytes of a value, and its size in the last byte of the word.
        shifts = (8 * (_WORD - sizes)).astype(np.uint64)
        words = self._words[found.starts] << shifts >> shifts
        words |= sizes.astype(np.uint64) << np.uint64(8 * (_WORD - 1))
        distinct, number = np.unique(words, return_inverse=True)
        texts = [word.to_bytes(_WORD, "little") for word in distinct.tolist()]
        return [text[: text[-1]] for text in texts], number

    def cells(self, found: Found, width: int) -> Array:
        """The first ``width`` bytes of values, one row each."""
        cells: Array = self.text[found.starts[:, None] + np.arange(width)]
        return cells


def _word(text: bytes) -> int:
    return int.from_bytes(text[:_WORD], "little")
