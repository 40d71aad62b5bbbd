"""Conditions from operands: what each operator means, by the types of its operands.

A property is a text. Compared with a number it is read as one of the number's type. What Apache's
broker refuses when it compiles an expression raises ``Refused``; what it fails at later is ERROR.
Source: tests/protocol/filters/answers.json, which its classes have answered.
"""

from __future__ import annotations

import enum
import operator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headrace_protocol.filters import codes, java_numbers
from headrace_protocol.filters.codes import ERROR, FALSE, TRUE, UNKNOWN
from headrace_protocol.filters.nodes import Constant, Leaf, Node, Pair, joined, mapped

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_protocol.filters.nodes import Judge1, Value

    Number = int | java_numbers.DoubleKey
    Test = Callable[[Any, Any], bool]


class Refused(ValueError):
    """An operator can't be applied to its operands."""


class Kind(enum.Enum):
    """The type of a literal. NULL has no value."""

    INTEGER = enum.auto()
    LONG = enum.auto()
    DOUBLE = enum.auto()
    TEXT = enum.auto()
    BOOLEAN = enum.auto()
    NULL = enum.auto()


class Property(NamedTuple):
    """The value of a message's property."""

    name: str


class Literal(NamedTuple):
    """A value in an expression. is_negated: behind a minus sign, and checked less by Apache."""

    kind: Kind
    value: int | float | str | bool | None
    is_negated: bool = False


Operand = Property | Literal | Node

_READERS: Final[dict[Kind, Callable[[str], Number | None]]] = {
    Kind.INTEGER: java_numbers.integer,
    Kind.LONG: java_numbers.long,
    Kind.DOUBLE: java_numbers.double,
}
_NUMBERS: Final = frozenset(_READERS)
_TESTS: Final[dict[str, Test]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "=": operator.eq,
}
_MIRRORED: Final = {">": "<", ">=": "<=", "<": ">", "<=": ">=", "=": "="}
_TEXT_TESTS: Final[dict[str, Callable[[str, str], bool]]] = {
    "CONTAINS": lambda text, part: part in text,
    "STARTSWITH": str.startswith,
    "ENDSWITH": str.endswith,
}


def as_condition(operand: Operand) -> Node:
    """An operand of AND, OR and NOT, or a whole expression. A property alone is never true."""
    match operand:
        case Property(name):
            return Leaf(name, lambda text: UNKNOWN if text is None else FALSE)
        case Literal(Kind.BOOLEAN, value):
            return Constant(TRUE if value else FALSE)
        case Literal(Kind.NULL, is_negated=False):
            return Constant(UNKNOWN)
        case Literal():
            raise Refused(f"{shown(operand)} is a value, not a condition: compare it")
        case _:
            return operand


def negate(operand: Operand) -> Literal:
    """A number with the other sign; for anything else but a condition a missing value."""
    match operand:
        case Literal(kind, int() | float() as value) if kind in _NUMBERS:
            return Literal(kind, -value, is_negated=True)
        case Literal() | Property():
            return Literal(Kind.NULL, None, is_negated=True)
        case _:
            raise Refused("the minus sign is for numbers, not for conditions")


def is_null(operand: Operand) -> Node:
    """``operand IS NULL``."""
    match operand:
        case Property(name):
            return Leaf(name, lambda text: TRUE if text is None else FALSE)
        case Literal(kind):
            return Constant(TRUE if kind is Kind.NULL else FALSE)
        case _:
            return mapped(codes.IS_NULL, operand)


def is_in(operand: Operand, texts: frozenset[str]) -> Node:
    """``operand IN (texts)``."""
    if not isinstance(operand, Property):
        raise Refused(f"IN is for properties, not for {shown(operand)}")
    return Leaf(
        operand.name,
        lambda text: UNKNOWN if text is None else TRUE if text in texts else FALSE,
    )


def text_test(symbol: str, operand: Operand, part: str, *, is_not: bool) -> Node:
    """CONTAINS, STARTSWITH and ENDSWITH; also with NOT they are false for a missing property."""
    if not part:
        return Constant(FALSE)
    test = _TEXT_TESTS[symbol]

    def judge(text: Value) -> int:
        return FALSE if text is None or test(text, part) is is_not else TRUE

    match operand:
        case Property(name):
            return Leaf(name, judge)
        case Literal(Kind.TEXT, str() as text):
            return Constant(judge(text))
        case Literal():
            return Constant(FALSE)
        case _:
            return mapped(codes.NEVER, operand)


def between(operand: Operand, low: Operand, high: Operand) -> Node:
    """``operand BETWEEN low AND high``, both included."""
    node = joined(codes.AND, ordered(">=", operand, low), ordered("<=", operand, high))
    match low, high:
        case (Literal(is_negated=False), Literal(is_negated=False)):
            if operator.gt(*_as_alike(low, high)):
                reason = f"BETWEEN {shown(low)} AND {shown(high)}: the first must not be greater"
                raise Refused(reason)
    return node


def ordered(symbol: str, left: Operand, right: Operand) -> Node:
    """One of ``>``, ``>=``, ``<``, ``<=``: numbers, and properties read as numbers."""
    for operand in (left, right):
        is_value = isinstance(operand, Literal) and not operand.is_negated
        if not isinstance(operand, Property | Literal) or (is_value and not _is_number(operand)):
            raise Refused(f"{symbol} compares numbers, not {shown(operand)}")
    match left, right:
        case Property(name), Literal():
            return Leaf(name, _number_judge(symbol, right, missing=UNKNOWN))
        case Literal(), Property(name):
            return Leaf(name, _number_judge(_MIRRORED[symbol], left, missing=UNKNOWN))
        case Property(one), Property(other):
            return Pair(one, other, _double_judge(symbol))
        case Literal(), Literal():
            if Kind.NULL in (left.kind, right.kind):
                return Constant(UNKNOWN)
            return Constant(_code(_TESTS[symbol](*_as_alike(left, right))))
    raise AssertionError(left, right)


def equal(left: Operand, right: Operand) -> Node:
    """``left = right``."""
    for operand in (left, right):
        if operand == Literal(Kind.NULL, None):
            raise Refused("NULL equals nothing: use IS NULL or IS NOT NULL")
    if isinstance(left, Property) and isinstance(right, Property):
        return Pair(left.name, right.name, _equal_texts)
    if _is_condition(left):
        return _condition_equals(left, right)
    if _is_condition(right):
        return _equals_condition(left, as_condition(right))
    if isinstance(left, Property) and isinstance(right, Literal):
        return Leaf(left.name, _equal_judge(right, missing=UNKNOWN))
    if isinstance(left, Literal) and isinstance(right, Property):
        return Leaf(right.name, _equal_judge(left, missing=FALSE, is_mirrored=True))
    assert isinstance(left, Literal)
    assert isinstance(right, Literal)
    return Constant(_equal_literals(left, right))


def _is_condition(operand: Operand) -> bool:
    if isinstance(operand, Literal):
        return operand.kind is Kind.BOOLEAN
    return not isinstance(operand, Property)


def _condition_equals(left: Operand, right: Operand) -> Node:
    condition = as_condition(left)
    if isinstance(right, Property):
        is_there = Leaf(right.name, lambda text: UNKNOWN if text is None else TRUE)
        return joined(codes.EQUAL_TO_PROPERTY, condition, is_there)
    if not isinstance(right, Literal) or right.kind is Kind.BOOLEAN:
        return joined(codes.EQUAL, condition, as_condition(right))
    if isinstance(left, Literal) and not right.is_negated:
        raise Refused(f"{shown(left)} can't be compared with {shown(right)}")
    if right.kind is Kind.NULL:
        return mapped(codes.IS_NULL, condition)
    table = codes.EQUALS_TEXT if right.kind is Kind.TEXT else codes.EQUALS_NUMBER
    return mapped(table, condition)


def _equals_condition(left: Operand, condition: Node) -> Node:
    match left:
        case Property(name):
            return joined(codes.EQUAL, Leaf(name, _java_boolean), condition)
        case Literal(Kind.TEXT, str() as text):
            return joined(codes.EQUAL, Constant(_java_boolean(text)), condition)
        case Literal(Kind.NULL):
            return mapped(codes.NULL_EQUALS, condition)
    return mapped(codes.NEVER, condition)


def _java_boolean(text: Value) -> int:
    return UNKNOWN if text is None else _code(text.lower() == "true")


def _equal_texts(left: Value, right: Value) -> int:
    if left is None:
        return TRUE if right is None else UNKNOWN
    return _code(left == right)


def _equal_judge(literal: Literal, *, missing: int, is_mirrored: bool = False) -> Judge1:
    if literal.kind is Kind.NULL:
        there = UNKNOWN if is_mirrored else FALSE
        return lambda text: TRUE if text is None else there
    if literal.kind is Kind.TEXT:
        wanted = literal.value
        return lambda text: missing if text is None else TRUE if text == wanted else FALSE
    return _number_judge("=", literal, missing)


def _number_judge(symbol: str, literal: Literal, missing: int) -> Judge1:
    """Judges a property compared with a number, which is on the right."""
    if literal.kind is Kind.NULL:
        return lambda _text: UNKNOWN
    read, test, wanted = _READERS[literal.kind], _TESTS[symbol], _key(literal)

    def judge(text: Value) -> int:
        if text is None:
            return missing
        number = read(text)
        return ERROR if number is None else TRUE if test(number, wanted) else FALSE

    return judge


def _double_judge(symbol: str) -> Callable[[Value, Value], int]:
    test = _TESTS[symbol]

    def judge(left: Value, right: Value) -> int:
        if left is None or right is None:
            return UNKNOWN
        one, other = java_numbers.double(left), java_numbers.double(right)
        return ERROR if one is None or other is None else _code(test(one, other))

    return judge


def _equal_literals(left: Literal, right: Literal) -> int:
    if left.kind is Kind.NULL:
        return TRUE if right.kind is Kind.NULL else UNKNOWN
    if right.kind is Kind.NULL:
        return FALSE
    if left.kind is Kind.TEXT and right.kind is Kind.TEXT:
        return _code(left.value == right.value)
    text, number = (left, right) if left.kind is Kind.TEXT else (right, left)
    if text.kind is Kind.TEXT:
        return _number_judge("=", number, FALSE)(str(text.value))
    return _code(operator.eq(*_as_alike(left, right)))


def _is_number(operand: Operand) -> bool:
    return isinstance(operand, Literal) and operand.kind in _NUMBERS


def _key(number: Literal) -> Number:
    value = number.value
    assert isinstance(value, int | float)
    return java_numbers.double_key(value) if number.kind is Kind.DOUBLE else int(value)


def _as_alike(left: Literal, right: Literal) -> tuple[Number, Number]:
    if Kind.DOUBLE in (left.kind, right.kind):
        left, right = (each._replace(kind=Kind.DOUBLE) for each in (left, right))
    return _key(left), _key(right)


def _code(is_true: bool) -> int:
    return TRUE if is_true else FALSE


def shown(operand: Operand) -> str:
    """An operand in a message."""
    match operand:
        case Property(name):
            return f"property {name}"
        case Literal(Kind.NULL):
            return "NULL"
        case Literal(Kind.TEXT, str() as value):
            return f"the text {value[:40]!r}"
        case Literal(Kind.BOOLEAN, value):
            return str(value).upper()
        case Literal(_, value):
            return str(value)
        case _:
            return "a condition"
