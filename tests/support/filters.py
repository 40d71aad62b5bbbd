"""Random filters and properties of messages."""

from __future__ import annotations

import random

NAMES = ("a", "b", "price", "region", "x", "_id$1")
TEXTS = ("EU", "US", "", "it''s", "5", "true", "TRUE", "NaN", "a very long text of a region")
NUMBERS = (
    *("0", "1", "5", "5L", "2147483647", "2147483648", "9223372036854775807"),
    *("5.5", "5.", ".5", "1e3", "5E-1", "0.1", "100.0", "1e308"),
)
VALUES = (
    *("5", "05", "+5", "-5", "5.5", "5.0", "0", "-0", "-0.0", "0.0", "1000", "1e3", "5d", "0x1p3"),
    *("2147483647", "2147483648", "-2147483649", "9223372036854775808", "99999999999999999999"),
    *("NaN", "-NaN", "Infinity", "-Infinity", " 5 ", "5\t", "", "true", "TRUE", "false", "yes"),
    *("EU", "EUROPE", "US", "it's", "é", "٥", "５", "𝟓", "_5", "1_000", "x\x01y", "long" * 20),
    *("0" * 50 + "5", "9" * 5000),
)
# So that a record can have them.
PROPERTIES_CHARS_MAX = 20_000
COMPARISONS = (">", ">=", "<", "<=", "=", "<>")
TEXT_TESTS = ("CONTAINS", "STARTSWITH", "ENDSWITH")


def properties_text(seeded: random.Random) -> str:
    """Properties of a record as it has them; some twice, some without a value."""
    entries = [
        f"{name}\x01{seeded.choice(VALUES)}\x02"
        for name in seeded.choices((*NAMES, "TAGS"), k=seeded.randrange(8))
    ]
    text = "".join(entries) + seeded.choice(("", "a", "\x01", "\x02", "b\x01"))
    return text[:PROPERTIES_CHARS_MAX]


def expression(seeded: random.Random, depth: int = 3) -> str:
    """A filter; most are well-formed, some of those make no sense."""
    kind = seeded.randrange(9) if depth else 8
    if kind < 3:
        operator = seeded.choice(("AND", "OR", "and"))
        parts = [expression(seeded, depth - 1) for _ in range(seeded.randrange(2, 4))]
        return f" {operator} ".join(parts)
    if kind == 3:
        return f"NOT ({expression(seeded, depth - 1)})"
    if kind == 4:
        return f"({expression(seeded, depth - 1)})"
    if kind == 5:
        operator = seeded.choice((*COMPARISONS, "="))
        return f"{_operand(seeded, depth)} {operator} {_operand(seeded, depth)}"
    return _comparison(seeded)


def _comparison(seeded: random.Random) -> str:
    operand = seeded.choice(NAMES)
    maybe_not = seeded.choice(("", "NOT "))
    match seeded.randrange(7):
        case 0:
            return f"{operand} {maybe_not}{seeded.choice(TEXT_TESTS)} {_text(seeded)}"
        case 1:
            low, high = _number(seeded), _number(seeded)
            return f"{operand} {maybe_not}BETWEEN {low} AND {high}"
        case 2:
            texts = ", ".join(_text(seeded) for _ in range(seeded.randrange(1, 7)))
            return f"{operand} {maybe_not}IN ({texts})"
        case 3:
            return f"{operand} IS {maybe_not}NULL"
        case 4:
            return f"{operand} {seeded.choice(('=', '<>'))} {_text(seeded)}"
        case _:
            return f"{operand} {seeded.choice(COMPARISONS)} {_number(seeded)}"


def _operand(seeded: random.Random, depth: int) -> str:
    choices = (
        *(lambda: seeded.choice(NAMES),) * 4,
        *(lambda: _number(seeded),) * 3,
        lambda: _text(seeded),
        lambda: seeded.choice(("TRUE", "FALSE", "NULL")),
        lambda: f"({expression(seeded, depth - 1)})",
        lambda: f"-{seeded.choice(NAMES)}",
    )
    return seeded.choice(choices)()


def _number(seeded: random.Random) -> str:
    return seeded.choice(("", "", "", "-", "+", "- -")) + seeded.choice(NUMBERS)


def _text(seeded: random.Random) -> str:
    return f"'{seeded.choice(TEXTS)}'"
