"""The parser of SQL92 filters.

By precedence: OR, AND, then ``=``, ``<>`` and IS, then the other comparisons, NOT and signs. It
takes what the parser of Apache's broker takes, but not words behind a whole expression, which that
one ignores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

from headrace_protocol.filters import codes, comparisons, nodes
from headrace_protocol.filters.comparisons import Kind, Literal, Property, Refused
from headrace_protocol.filters.tokens import END, FilterError, listed, tokens, unquoted

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_protocol.filters.comparisons import Operand
    from headrace_protocol.filters.nodes import Node

# Operands in one expression: a record costs 0.3 ms then.
OPERANDS_MAX: Final = 1000

_OR, _AND, _EQUALITY, _COMPARISON = 1, 2, 3, 4
_LEVELS: Final = {
    "OR": _OR,
    "AND": _AND,
    **dict.fromkeys(("=", "<>", "IS"), _EQUALITY),
    **dict.fromkeys((">", ">=", "<", "<="), _COMPARISON),
    **dict.fromkeys(("CONTAINS", "STARTSWITH", "ENDSWITH"), _COMPARISON),
    **dict.fromkeys(("BETWEEN", "IN", "NOT"), _COMPARISON),
}
_TABLES: Final = {_OR: codes.OR, _AND: codes.AND}
_LONG_LIMIT: Final = 1 << 63
_INTEGER_LIMIT: Final = 1 << 31


def parse(text: str) -> Node:
    """The condition that a text states. Raises FilterError."""
    return _Parser(text).parse()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = tokens(text)
        self._token = next(self._tokens)
        self._depth = self._operands = 0

    def parse(self) -> Node:
        if self._token.kind == END:
            self._fail("it is empty: state a condition such as price > 5 AND region = 'EU'")
        operand = self._operand(_OR)
        if self._token.kind != END:
            self._expected("AND, OR, a comparison or the end")
        return self._made(lambda: comparisons.as_condition(operand), 0)

    # -- tokens ------------------------------------------------------------------------------------

    def _fail(self, reason: str, position: int | None = None) -> NoReturn:
        at = self._token.position if position is None else position
        raise FilterError(reason, self._text, at)

    def _expected(self, wanted: str) -> NoReturn:
        self._fail(f"expected {wanted}, found {self._token.shown}")

    def _advance(self) -> str:
        text = self._token.text
        self._token = next(self._tokens)
        return text

    def _skip(self, kind: str) -> bool:
        """Skip a token of this kind; return whether there was one."""
        is_there = self._token.kind == kind
        if is_there:
            self._advance()
        return is_there

    def _require(self, kind: str) -> None:
        if not self._skip(kind):
            self._expected(kind)

    def _made(self, make: Callable[[], Node], position: int) -> Node:
        """A new condition; a refusal is that of the operator at ``position``."""
        try:
            return make()
        except Refused as error:
            self._fail(str(error), position)
        except nodes.TooDeep:
            self._fail(f"nested deeper than {nodes.DEPTH_MAX} levels: simplify it", position)

    # -- grammar -----------------------------------------------------------------------------------

    def _operand(self, lowest: int) -> Operand:
        """An operand of an operator below ``lowest``: all that binds as tightly as that."""
        operand = self._signed()
        while (level := _LEVELS.get(self._token.kind, 0)) >= lowest:
            if level <= _AND:
                operand = self._chain(operand, level)
            elif level == _EQUALITY:
                operand = self._equality(operand)
            else:
                operand = self._comparison(operand)
        return operand

    def _chain(self, first: Operand, level: int) -> Node:
        kind, position = self._token.kind, self._token.position
        operands = [first]
        while self._skip(kind):
            operands.append(self._operand(level + 1))
        return self._made(
            lambda: nodes.joined(_TABLES[level], *map(comparisons.as_condition, operands)), position
        )

    def _equality(self, left: Operand) -> Node:
        position, kind = self._token.position, self._token.kind
        self._advance()
        if kind == "IS":
            is_not = self._skip("NOT")
            self._require("NULL")
            return self._negated(is_not, lambda: comparisons.is_null(left), position)
        right = self._operand(_COMPARISON)
        return self._negated(kind == "<>", lambda: comparisons.equal(left, right), position)

    def _negated(self, is_not: bool, make: Callable[[], Node], position: int) -> Node:
        node = self._made(make, position)
        return self._made(lambda: nodes.mapped(codes.NOT, node), position) if is_not else node

    def _comparison(self, left: Operand) -> Node:
        position = self._token.position
        is_not = self._skip("NOT")
        kind = self._token.kind
        match kind:
            case "CONTAINS" | "STARTSWITH" | "ENDSWITH":
                self._advance()
                part = self._string()
                return self._made(
                    lambda: comparisons.text_test(kind, left, part, is_not=is_not), position
                )
            case "BETWEEN":
                self._advance()
                return self._between(left, position, is_not=is_not)
            case "IN":
                self._advance()
                texts = self._strings()
                return self._negated(is_not, lambda: comparisons.is_in(left, texts), position)
            case _ if is_not:
                self._expected("BETWEEN, IN, CONTAINS, STARTSWITH or ENDSWITH behind NOT")
        self._advance()
        right = self._signed()
        return self._made(lambda: comparisons.ordered(kind, left, right), position)

    def _between(self, operand: Operand, position: int, *, is_not: bool) -> Node:
        low = self._signed()
        self._require("AND")
        high = self._signed()
        if not is_not:
            return self._made(lambda: comparisons.between(operand, low, high), position)
        return self._made(
            lambda: nodes.joined(
                codes.OR,
                comparisons.ordered("<", operand, low),
                comparisons.ordered(">", operand, high),
            ),
            position,
        )

    def _strings(self) -> frozenset[str]:
        if self._token.kind == "texts":
            return frozenset(listed(self._advance()))
        self._require("(")
        texts = [self._string()]
        while self._skip(","):
            texts.append(self._string())
        self._require(")")
        return frozenset(texts)

    def _string(self) -> str:
        if self._token.kind != "text":
            self._expected("a text in single quotes")
        return unquoted(self._advance())

    def _signed(self) -> Operand:
        """An operand with its signs, NOT, and parentheses."""
        token = self._token
        if token.kind not in ("+", "-", "NOT", "("):
            return self._primary()
        self._depth += 1
        if self._depth > nodes.DEPTH_MAX:
            self._fail(f"nested deeper than {nodes.DEPTH_MAX} levels: simplify it")
        self._advance()
        operand = self._operand(_OR) if token.kind == "(" else self._signed()
        self._depth -= 1
        if token.kind == "(":
            self._require(")")
        elif token.kind == "NOT":
            return self._negated(True, lambda: comparisons.as_condition(operand), token.position)
        elif token.kind == "-":
            try:
                return comparisons.negate(operand)
            except Refused as error:
                self._fail(str(error), token.position)
        return operand

    def _primary(self) -> Operand:
        self._operands += 1
        if self._operands > OPERANDS_MAX:
            self._fail(f"more than {OPERANDS_MAX} operands: use IN for lists, or fewer conditions")
        kind = self._token.kind
        if kind == "integer":
            return self._integer()
        if kind == "double":
            return self._double()
        if kind == "text":
            return Literal(Kind.TEXT, self._string())
        if kind not in ("name", "TRUE", "FALSE", "NULL"):
            self._expected("a property, a value, NOT or (")
        name = self._advance()
        if kind == "name":
            return Property(name)
        return Literal(Kind.NULL, None) if kind == "NULL" else Literal(Kind.BOOLEAN, kind == "TRUE")

    def _integer(self) -> Literal:
        position, digits = self._token.position, self._advance().rstrip("lL")
        # Beyond 20 digits int() need not be asked.
        value = int(digits) if len(digits) < 20 else _LONG_LIMIT
        if value >= _LONG_LIMIT:
            self._fail(f"{digits[:40]} is greater than {_LONG_LIMIT - 1}", position)
        return Literal(Kind.INTEGER if value < _INTEGER_LIMIT else Kind.LONG, value)

    def _double(self) -> Literal:
        position, text = self._token.position, self._advance()
        value = float(text)
        if value == float("inf"):
            self._fail(f"{text[:40]} is too large for a double of 64 bits", position)
        if value == 0:
            self._fail(f"{text[:40]}: a double can't be 0 here, write 0", position)
        return Literal(Kind.DOUBLE, value)
