"""Finds properties in the texts of many records at once, whatever their layout."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace_protocol.columns import split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_protocol.columns import Array, Buffer, RecordColumns

_WORD: Final = 8
# A separator before the first byte of each row, and room for a whole word before each mark.
_MARGIN_BYTES: Final = 1 + _WORD
# Texts of more different sizes than this are joined, instead of copied in rows of one width.
_ROW_FILL_MIN: Final = 0.25
_ONES: Final = np.uint64(0x0101010101010101)
_HIGH_BITS: Final = np.uint64(0x8080808080808080)
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
        text = np.frombuffer(b"\x02".join([padding, *texts, padding]), np.uint8)
        sizes = np.fromiter(map(len, texts), np.int64, len(texts))
        self._look_at(text, len(padding) + np.cumsum(sizes + 1))

    @classmethod
    def of_records(cls, records: RecordColumns) -> PropertyColumns:
        """The properties of records, without an object for each."""
        sizes = np.broadcast_to(records.properties_bytes, records.start.shape)
        width = int(sizes.max(initial=0)) + _MARGIN_BYTES
        firsts = records.start + records.size - width
        is_even = len(sizes) and sizes.mean() >= width * _ROW_FILL_MIN
        if not is_even or sizes.min() < 0 or firsts.min() < 0:
            return cls(records.properties())
        columns = cls.__new__(cls)
        rows = _rows(records.data, firsts, width, width - sizes)
        columns._look_at(rows.ravel(), np.arange(1, len(rows)) * width)
        return columns

    def _look_at(self, text: Array, ends: Array) -> None:
        """ends: where the properties of each record end in the text."""
        self.text = text
        self._ends = ends
        self._words = np.ndarray(len(text) - _WORD + 1, "<u8", text, strides=(1,))
        self._marks = np.flatnonzero(text == 1)
        self._tails = self._words[self._marks - _WORD]

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
        ends = starts + self._sizes(starts)
        found = Found(np.searchsorted(self._ends, marks, "right"), starts, ends)
        is_there = ends > starts
        if not is_there.all():
            found = found.take(is_there)
        is_last = found.records[1:] != found.records[:-1]
        return found if is_last.all() else found.take(np.append(is_last, True))

    def _sizes(self, starts: Array) -> Array:
        """The bytes from each position to the next separator."""
        # The lowest bit of the first byte that is a separator; none in a value of a whole word.
        words = self._words[starts] ^ 2 * _ONES
        flags = (words - _ONES) & ~words & _HIGH_BITS
        sizes = np.bitwise_count((flags & -flags) - np.uint64(1)).astype(np.int64) >> 3
        is_long = flags == 0
        if is_long.any():
            far = starts[is_long]
            sizes[is_long] = self._separators[np.searchsorted(self._separators, far)] - far
        return sizes

    @cached_property
    def _separators(self) -> Array:
        return np.flatnonzero(self.text == 2)

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
        words = self.words(found)
        if words is None:
            numbers: dict[bytes, int] = {}
            values = split(self.text.data, found.starts, found.ends - found.starts)
            each = [numbers.setdefault(value, len(numbers)) for value in values]
            return [*numbers], np.array(each, np.intp)
        distinct, number = np.unique(words, return_inverse=True)
        return [*map(value_of, distinct.tolist())], number

    def words(self, found: Found) -> Array | None:
        """Each value as one number that ``value_of`` reads; None if any has over 7 bytes.

        The number has the bytes of the value, and their count in its last byte: it is never 0.
        """
        sizes = found.ends - found.starts
        if int(sizes.max(initial=0)) >= _WORD:
            return None
        shifts = (8 * (_WORD - sizes)).astype(np.uint64)
        words = self._words[found.starts] << shifts >> shifts
        words |= sizes.astype(np.uint64) << np.uint64(8 * (_WORD - 1))
        return words

    def cells(self, found: Found, width: int) -> Array:
        """The first ``width`` bytes of values, one row each."""
        cells: Array = self.text[found.starts[:, None] + np.arange(width)]
        return cells


def value_of(word: int) -> bytes:
    """The value of a number of ``PropertyColumns.words``."""
    text = word.to_bytes(_WORD, "little")
    return text[: text[-1]]


def _rows(data: Buffer, firsts: Array, width: int, text_at: Array) -> Array:
    """A row of ``width`` bytes for each record, with separators before ``text_at``, and one more.

    The last row only ends the one before it, and has room for a word behind the last value.
    """
    everywhere = np.ndarray(len(data) - width + 1, f"V{width}", data, strides=(1,))
    rows: Array = everywhere[np.append(firsts, firsts[-1])].view(np.uint8).reshape(-1, width)
    first, end = int(text_at.min()), int(text_at.max())
    rows[:, :first] = 2
    rows[:-1, first:end][np.arange(first, end) < text_at[:, None]] = 2
    rows[-1] = 2
    return rows


def _word(text: bytes) -> int:
    return int.from_bytes(text[:_WORD], "little")
