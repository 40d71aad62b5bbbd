"""A filter that is ready to be used."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from headrace_protocol.filters import codes
from headrace_protocol.filters.blocks import matching
from headrace_protocol.filters.codes import TRUE
from headrace_protocol.filters.nodes import Joined, Leaf, count_of, evaluate, names_of
from headrace_protocol.filters.parser import parse
from headrace_protocol.filters.tokens import FilterError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace_protocol.columns import Array, RecordColumns
    from headrace_protocol.filters.nodes import Node

TEXT_BYTES_MAX: Final = 64 * 1024
_KEPT: Final = 1000
# A longer one is kept while it is in use, so that those that are kept take 100 MB at most.
_KEPT_CHARS_MAX: Final = 1024
_in_use: WeakValueDictionary[str, Expression] = WeakValueDictionary()


class Expression:
    """A condition on properties.

    text: as it was given. names: the properties it looks at. operand_count: how much it costs.
    """

    __slots__ = ("__weakref__", "_conditions", "_node", "names", "operand_count", "text")

    def __init__(self, text: str, node: Node) -> None:
        self.text = text
        self.names = names_of(node)
        self.operand_count = count_of(node)
        self._node = node
        self._conditions = conditions_of(node)

    def matches(self, properties: Mapping[str, str]) -> bool:
        """True if a message with these properties passes."""
        return evaluate(self._node, properties) == TRUE

    def mask(self, records: RecordColumns) -> Array:
        """A mask of the records that pass."""
        return matching(self._conditions, records)


def compiled(text: str) -> Expression:
    """The filter that a text states: the last thousand, or the one in use. Raises FilterError."""
    if len(text) > TEXT_BYTES_MAX or len(text.encode(errors="replace")) > TEXT_BYTES_MAX:
        reason = f"it has over {TEXT_BYTES_MAX} bytes: shorten it"
        raise FilterError(reason, "", 0)
    if len(text) <= _KEPT_CHARS_MAX:
        return _kept(text)
    expression = _in_use.get(text)
    if expression is None:
        expression = _in_use[text] = Expression(text, parse(text))
    return expression


def for_values(name: str, expressions: Mapping[str, Expression]) -> Expression:
    """A filter that applies one of several, by the value of a property; others pass."""
    parts: list[Node] = []
    for value, expression in expressions.items():
        node = expression._node
        is_other = Leaf(name, partial(_is_other, value))
        parts.append(Joined(codes.OR, (is_other, node), node.depth + 1, frozenset((codes.TRUE,))))
    text = "; ".join(f"{value}: {each.text}" for value, each in expressions.items())
    depth = max(part.depth for part in parts) + 1
    return Expression(text, Joined(codes.AND, tuple(parts), depth, frozenset()))


def _is_other(value: str, text: str | None) -> int:
    return codes.FALSE if text == value else codes.TRUE


def conditions_of(node: Node) -> tuple[Node, ...]:
    """Conditions that are all true where one is, cheap ones first."""
    if not (isinstance(node, Joined) and node.table == codes.AND):
        return (node,)
    # An error of one does not matter, since only what is true counts: so their order is free.
    return tuple(sorted(node.parts, key=lambda part: part.depth))


@lru_cache(_KEPT)
def _kept(text: str) -> Expression:
    return Expression(text, parse(text))
