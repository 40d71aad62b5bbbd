"""Evaluation of a condition for a block of records, whose properties are columns.

A column has the distinct values of a property, and for each record the number of its value. A leaf
judges each distinct value once, and remembers short ones for the next blocks; all else is numpy on
arrays of codes. Bodies are never touched.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace_protocol.filters.codes import TRUE
from headrace_protocol.filters.nodes import Constant, Joined, Leaf, Mapped, Pair, evaluate
from headrace_protocol.message import decode_properties, property_text
from headrace_protocol.property_columns import PropertyColumns, value_of

if TYPE_CHECKING:
    from headrace_protocol.columns import Array, RecordColumns
    from headrace_protocol.filters.nodes import Judge1, Node

# Values that a leaf remembers, and leaves that do: 2.3 MB in all.
_JUDGED_MAX: Final = 512
_LEAVES_MAX: Final = 512
# Above all numbers of values.
_NO_WORD: Final = np.iinfo(np.uint64).max
# From here on a block costs less than its records one by one.
_BLOCK_RECORDS_MIN: Final = 48
# If no more records have passed the first conditions, the others look at these only.
_SHARE_OF_NEW_BLOCK: Final = 0.5


class Column(NamedTuple):
    """A property of records: distinct values, None where it is missing; the number for each."""

    values: list[str | None]
    number: Array


class _Block:
    """Properties of a block of records, each gathered on first use."""

    def __init__(self, records: RecordColumns) -> None:
        self.count = len(records)
        self._properties = PropertyColumns.of_records(records)
        self.column = cache(self._column)
        self.words = cache(self._words)
        self._found = cache(lambda name: self._properties.find(name.encode()))

    def _column(self, name: str) -> Column:
        found = self._found(name)
        values, number = self._properties.distinct(found)
        column = np.zeros(self.count, np.intp)
        column[found.records] = number + 1
        return Column([None, *map(property_text, values)], column)

    def _words(self, name: str) -> Array | None:
        """As ``PropertyColumns.words``; 0 where the property is missing."""
        found = self._found(name)
        words = self._properties.words(found)
        if words is None or len(words) == self.count:
            return words
        everywhere = np.zeros(self.count, np.uint64)
        everywhere[found.records] = words
        return everywhere


class _Judged:
    """Values that a leaf has judged: numbers of ``_Block.words`` in ascending order, with codes."""

    def __init__(self, judge: Judge1) -> None:
        self._judge = judge
        self._words = np.array([_NO_WORD], np.uint64)
        self._codes = np.zeros(1, np.uint8)

    def codes(self, words: Array) -> Array:
        """The code of each value."""
        at = np.searchsorted(self._words, words)
        is_new = self._words[at] != words
        if not is_new.any():
            return self._codes[at]
        fresh = np.unique(words[is_new])
        values = (property_text(value_of(word)) if word else None for word in fresh.tolist())
        codes_ = np.fromiter(map(self._judge, values), np.uint8, len(fresh))
        found = self._codes[at]
        found[is_new] = codes_[np.searchsorted(fresh, words[is_new])]
        self._keep(fresh, codes_)
        return found

    def _keep(self, words: Array, codes_: Array) -> None:
        """Remember values in place of the earlier ones, if these would be too many together."""
        if len(words) >= _JUDGED_MAX:
            return
        if len(words) + len(self._words) > _JUDGED_MAX:
            self._words, self._codes = self._words[-1:], self._codes[-1:]
        at = np.searchsorted(self._words, words)
        self._words = np.insert(self._words, at, words)
        self._codes = np.insert(self._codes, at, codes_)


_judged = lru_cache(_LEAVES_MAX)(_Judged)


def matching(conditions: tuple[Node, ...], records: RecordColumns) -> Array:
    """A mask of the records for which all conditions are true, cheap ones first."""
    if len(records) < _BLOCK_RECORDS_MIN:
        properties = map(decode_properties, records.properties())
        passes = (all(evaluate(one, each) == TRUE for one in conditions) for each in properties)
        return np.fromiter(passes, bool, len(records))
    block = _Block(records)
    is_true = np.ones(len(records), bool)
    for number, condition in enumerate(conditions, 1):
        is_true &= _evaluate(condition, block) == TRUE
        where, others = np.flatnonzero(is_true), conditions[number:]
        if others and len(where) <= len(records) * _SHARE_OF_NEW_BLOCK:
            is_true[where] = matching(others, records.select(where))
            break
    return is_true


def _evaluate(node: Node, block: _Block) -> Array:
    match node:
        case Leaf(name, judge):
            if (words := block.words(name)) is not None:
                return _judged(judge).codes(words)
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
