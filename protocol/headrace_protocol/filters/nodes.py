"""Conditions as trees, and their evaluation for one record.

Leaves judge one or two properties; all else is a table. So both evaluators, of a record and of a
block, know three operations, and can't differ in the meaning of any operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

Value = str | None
Judge1 = Callable[[Value], int]
Judge2 = Callable[[Value, Value], int]

DEPTH_MAX: Final = 100


class Constant(NamedTuple):
    """A condition that is the same for all records."""

    code: int
    depth: int = 1


class Leaf(NamedTuple):
    """A condition on one property."""

    name: str
    judge: Judge1
    depth: int = 1


class Pair(NamedTuple):
    """A condition on two properties."""

    left: str
    right: str
    judge: Judge2
    depth: int = 1


class Mapped(NamedTuple):
    """A table of 4, applied to a condition."""

    table: bytes
    part: Node
    depth: int


class Joined(NamedTuple):
    """A table of 16, applied to conditions from left to right.

    ends: values that no other changes.
    """

    table: bytes
    parts: tuple[Node, ...]
    depth: int
    ends: frozenset[int]


Node = Constant | Leaf | Pair | Mapped | Joined


class TooDeep(ValueError):
    """A condition is nested too deep."""


def mapped(table: bytes, part: Node) -> Mapped:
    """Raises TooDeep."""
    return Mapped(table, part, _above(part.depth))


def joined(table: bytes, *parts: Node) -> Joined:
    """Raises TooDeep."""
    ends = frozenset(code for code in range(4) if set(table[4 * code : 4 * code + 4]) == {code})
    return Joined(table, parts, _above(max(part.depth for part in parts)), ends)


def _above(depth: int) -> int:
    if depth >= DEPTH_MAX:
        raise TooDeep
    return depth + 1


def evaluate(node: Node, properties: Mapping[str, str]) -> int:
    """The value of a condition for a record's properties."""
    match node:
        case Leaf(name, judge):
            return judge(properties.get(name))
        case Joined(table, parts, _, ends):
            code = evaluate(parts[0], properties)
            for part in parts[1:]:
                if code in ends:
                    break
                code = table[4 * code + evaluate(part, properties)]
            return code
        case Mapped(table, part):
            return table[evaluate(part, properties)]
        case Pair(left, right, pair_judge):
            return pair_judge(properties.get(left), properties.get(right))
        case Constant(code):
            return code


def count_of(node: Node) -> int:
    """The number of comparisons in a condition."""
    match node:
        case Joined(_, parts):
            return sum(map(count_of, parts))
        case Mapped(_, part):
            return count_of(part)
        case _:
            return 1


def names_of(node: Node) -> frozenset[str]:
    """The properties that a condition looks at."""
    match node:
        case Leaf(name):
            return frozenset((name,))
        case Pair(left, right):
            return frozenset((left, right))
        case Joined(_, parts):
            return frozenset().union(*map(names_of, parts))
        case Mapped(_, part):
            return names_of(part)
        case Constant():
            return frozenset()
