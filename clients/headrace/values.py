"""Text, bytes and numbers as callers may pass them, and the plain values that are made of them.

Subclasses count as their value, whatever they do when formatted, hashed or compared: a member of
``class State(str, Enum)`` is its text, an ``IntEnum`` its number. Everything that can change later
is copied. Source: docs/clients.md "What a message may hold".
"""

from __future__ import annotations

import operator
import re
import time
from numbers import Integral, Real

from headrace.errors import ConfigurationError, InvalidMessage

Refusal = type[InvalidMessage] | type[ConfigurationError]

_SHOWN_CHARS = 60
# RocketMQ trims the tags of a subscription as Java does: all characters up to the space.
TRIMMED = "".join(map(chr, range(33)))
ALL_TAGS = "*"
OR = "||"
# No tag looks like this. Without an error, the consumer would wait forever for such a tag.
_SQL = re.compile(
    r"\s([<>=]|!=|<>|<=|>=)\s|\s(in\s*\(|between\s|is\s+null|is\s+not\s+null)", re.IGNORECASE
)


def now_ms() -> int:
    """The wall clock, in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def shown(value: object) -> str:
    """A value as errors show it: short, and printable everywhere."""
    text = ascii(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def kind_of(value: object) -> str:
    """The name of a value's type, as errors show it."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def plain_text(value: object, name: str, error: Refusal = InvalidMessage) -> str:
    """The text of a str or of a subclass of it. Raises ``error`` for other types."""
    if type(value) is str:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    raise error(f"{name}={shown(value)} is {kind_of(value)}: it must be str")


def optional_text(value: object, name: str) -> str:
    """``plain_text``; empty for None. Raises InvalidMessage for other types."""
    if value is None:
        return ""
    if isinstance(value, str):
        return plain_text(value, name)
    raise InvalidMessage(f"{name}={shown(value)} is {kind_of(value)}: it must be str, or None")


def encoded_text(text: str, name: str, error: Refusal = InvalidMessage) -> bytes:
    """A text in UTF-8. Raises ``error`` for a lone surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError as problem:
        raise error(
            f"{name}={shown(text)} has a lone surrogate at character {problem.start + 1}, which "
            'UTF-8 cannot hold: replace it, e.g. with text.encode(errors="replace").decode()'
        ) from None


def plain_body(value: object, name: str = "body") -> bytes:
    """A copy of bytes, a bytearray or a memoryview. Raises InvalidMessage for other types."""
    if type(value) is bytes:
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return memoryview(value).tobytes()
    if isinstance(value, str):
        raise InvalidMessage(f"{name}={shown(value)} is {kind_of(value)}, not bytes; encode it")
    way_out = "pass its tobytes()" if hasattr(value, "tobytes") else "encode it"
    raise InvalidMessage(f"{name}={shown(value)} is {kind_of(value)}, not bytes; {way_out}")


def is_int(value: object) -> bool:
    """True for an int, a subclass of it, or an integer of numpy."""
    return not isinstance(value, bool) and isinstance(value, Integral)


def plain_int(value: object, name: str, error: Refusal = InvalidMessage) -> int:
    """The number of an int, a subclass of it, or an integer of numpy; else raises ``error``."""
    if is_int(value):
        return int.__int__(operator.index(value))  # type: ignore[arg-type]
    raise error(f"{name}={shown(value)} is {kind_of(value)}: it must be an int")


def plain_flag(value: object, name: str, error: Refusal = ConfigurationError) -> bool:
    """True or False, also of numpy. Raises ``error`` for other types."""
    if isinstance(value, bool):
        return value
    if type(value).__module__ == "numpy" and type(value).__name__ in {"bool", "bool_"}:
        return bool(value)
    raise error(f"{name}={shown(value)} is {kind_of(value)}: it must be True or False")


def plain_number(value: object, name: str, error: Refusal = InvalidMessage) -> float:
    """The number of an int, a float, or a number of numpy; else raises ``error``."""
    if not isinstance(value, bool) and isinstance(value, Real):
        try:
            return float(value)
        except OverflowError:
            return float("inf")
    raise error(f"{name}={shown(value)} is {kind_of(value)}: it must be a number")


def check_tag(tag: str, name: str = "tag") -> None:
    """Raise InvalidMessage for a tag that no subscription can select."""
    if tag.isalnum():
        return
    if OR in tag:
        reason = f"{OR} separates tags in a subscription"
    elif tag == ALL_TAGS:
        reason = f"a subscription to {ALL_TAGS!r} selects all tags"
    elif tag != tag.strip(TRIMMED):
        reason = "subscriptions are trimmed of white space and control characters"
    elif looks_like_sql(tag):
        reason = "a subscription to it is an SQL92 filter"
    else:
        return
    raise InvalidMessage(f"{name}={shown(tag)} could never be selected: {reason}; choose another")


def looks_like_sql(expression: str) -> bool:
    """True if a tag or a tag expression is rather an SQL92 filter."""
    return _SQL.search(expression) is not None
