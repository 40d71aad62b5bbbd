"""Evaluation of a condition for a block of records, whose properties are columns.

A column has the distinct values of a property, and for each record the number of its value. A leaf
judges each distinct value once; all else is numpy on arrays of codes. Bodies are never touched.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headrace_protocol.filters import codes
from headrace_protocol.filters.codes import TRUE
from headrace_protocol.filters.nodes import Constant, Joined, Leaf, Mapped, Pair
from headrace_protocol.message import property_text
from headrace_protocol.property_columns import PropertyColumns

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_protocol.columns import Array, RecordColumns
    from headrace_protocol.filters.nodes import Node


class Column(NamedTuple):
    """A property of records: distinct values, None where it is missing; the number for each."""

    values: list[str | None]
    number: Array

    def take(self, where: Array) -> Column:
        """The column of some of the records."""
        return Column(self.values, self.number[where])


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
    properties = PropertyColumns(records.properties())
    count = len(records)
    block = _Block(count, cache(lambda name: _column(properties, count, name)))
    if not (isinstance(node, Joined) and node.table == codes.AND):
        is_true: Array = _evaluate(node, block) == TRUE
        return is_true
    # Only the records for which all is true count, so the order of the conditions is free.
    where: Array = np.arange(count)
    for part in sorted(node.parts, key=lambda part: part.depth):
        where = where[_evaluate(part, block.take(where)) == TRUE]
    mask = np.zeros(count, bool)
    mask[where] = True
    return mask


def _column(properties: PropertyColumns, count: int, name: str) -> Column:
    """A property of ``count`` records."""
    found = properties.find(name.encode())
    values, number = properties.distinct(found)
    column = np.zeros(count, np.intp)
    column[found.records] = number + 1
    return Column([None, *map(property_text, values)], column)


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
