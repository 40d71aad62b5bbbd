"""Evaluation of a condition for a block of records, whose properties are columns.

A column has the distinct values of a property, and for each record the number of its value. A leaf
judges each distinct value once; all else is numpy on arrays of codes. Bodies are never touched.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace_protocol.filters import codes
from headrace_protocol.filters.codes import TRUE
from headrace_protocol.filters.nodes import Constant, Joined, Leaf, Mapped, Pair
from headrace_protocol.message import property_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_protocol.columns import Array, RecordColumns
    from headrace_protocol.filters.nodes import Node

# Behind the last byte, for words that begin near the end.
_PADDING: Final = bytes(8)
_WORD_BYTES: Final = 8


class Column(NamedTuple):
    """A property of records: distinct values, None where it is missing; the number for each."""

    values: list[str | None]
    number: Array

    def take(self, where: Array) -> Column:
        """The column of some of the records."""
        return Column(self.values, self.number[where])


class Properties:
    """The properties of a block of records."""

    def __init__(self, records: RecordColumns) -> None:
        self.count = len(records)
        self._text = b"\x02" + b"\x02".join(records.properties()) + b"\x02" + _PADDING
        self._bytes = np.frombuffer(self._text, np.uint8)
        separators = np.flatnonzero(self._bytes[: -len(_PADDING)] == 2)
        self._starts, self._ends = separators[:-1] + 1, separators[1:]
        # Where the text of each record ends; entries that begin later are of the next one.
        self._record_ends = np.cumsum(records.properties_bytes + 1) + 1

    def column(self, name: str) -> Column:
        """A property of all records; see ``message.decode_properties`` for what counts."""
        starts, ends = self._values(name.encode() + b"\x01")
        records = np.searchsorted(self._record_ends, starts, "right")
        values, number = self._distinct(starts, ends)
        column = np.zeros(self.count, np.intp)
        # Of equal names in a record the last counts.
        column[records] = number + 1
        return Column([None, *map(property_text, values)], column)

    def _values(self, prefix: bytes) -> tuple[Array, Array]:
        """Starts and ends of the values of a property."""
        starts, ends = self._starts, self._ends
        is_long = ends - starts > len(prefix)
        starts, ends = starts[is_long], ends[is_long]
        for at, byte in enumerate(prefix):
            is_same = self._bytes[starts + at] == byte
            starts, ends = starts[is_same], ends[is_same]
        return starts + len(prefix), ends

    def _distinct(self, starts: Array, ends: Array) -> tuple[list[bytes], Array]:
        """The distinct slices, and the number of each among them."""
        sizes = ends - starts
        if not len(starts):
            return [], sizes
        if int(sizes.max()) >= _WORD_BYTES:
            slices = [
                self._text[start:end]
                for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
            ]
            numbers: dict[bytes, int] = {}
            number = [numbers.setdefault(each, len(numbers)) for each in slices]
            return [*numbers], np.array(number, np.intp)
        # The bytes of a value, and its size in the last byte of the word.
        words = np.ndarray((len(self._text) - 7,), ">u8", self._text, strides=(1,))[starts]
        shifts = (8 * (_WORD_BYTES - sizes)).astype(np.uint64)
        words = (words >> shifts << shifts) | sizes.astype(np.uint64)
        distinct, number = np.unique(words, return_inverse=True)
        texts = [word.to_bytes(_WORD_BYTES, "big") for word in distinct.tolist()]
        return [text[: text[-1]] for text in texts], number


class _Block:
    """Columns of a block, each gathered on first use."""

    def __init__(self, count: int, column: Callable[[str], Column]) -> None:
        self.count = count
        self.column = column

    def take(self, where: Array) -> _Block:
        """Some of the records."""
        return _Block(len(where), cache(lambda name: self.column(name).take(where)))


def matching(node: Node, records: RecordColumns) -> Array:
    """A mask of the records for which a condition is true."""
    found = Properties(records)
    block = _Block(found.count, cache(found.column))
    if not (isinstance(node, Joined) and node.table == codes.AND):
        is_true: Array = _evaluate(node, block) == TRUE
        return is_true
    # Only the records for which all is true count, so the order of the conditions is free.
    where: Array = np.arange(found.count)
    for part in sorted(node.parts, key=lambda part: part.depth):
        where = where[_evaluate(part, block.take(where)) == TRUE]
    mask = np.zeros(found.count, bool)
    mask[where] = True
    return mask


def _evaluate(node: Node, block: _Block) -> Array:
    match node:
        case Leaf(name, judge):
            values, number = block.column(name)
            return np.fromiter(map(judge, values), np.uint8, len(values))[number]
        case Pair():
            return _evaluate_pair(node, block)
        case Joined(table, parts):
            code = _evaluate(parts[0], block)
            for part in parts[1:]:
                code = _table(table)[4 * code + _evaluate(part, block)]
            return code
        case Mapped(table, part):
            return _table(table)[_evaluate(part, block)]
        case Constant(one):
            return np.full(block.count, one, np.uint8)


def _evaluate_pair(pair: Pair, block: _Block) -> Array:
    left, right = block.column(pair.left), block.column(pair.right)
    both = left.number * len(right.values) + right.number
    distinct, number = np.unique(both, return_inverse=True)
    pairs = (divmod(each, len(right.values)) for each in distinct.tolist())
    judged = [pair.judge(left.values[one], right.values[other]) for one, other in pairs]
    return np.array(judged, np.uint8)[number]


@cache
def _table(table: bytes) -> Array:
    return np.frombuffer(table, np.uint8)
