"""Tokens of a filter, and errors with their place."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace_protocol.errors import PortableError

if TYPE_CHECKING:
    from collections.abc import Iterator

_SPACE = r"[ \t\n\r\f]*"
_TEXT = "'[^']*(?:''[^']*)*'"
_TOKEN = re.compile(
    rf"""
    (?P<skipped>[ \t\n\r\f]+ | --[^\n\r]* | /\*.*?\*/)
  | (?P<double>\d+\.\d*(?:[eE][+-]?\d+)? | \.\d+(?:[eE][+-]?\d+)? | \d+[eE][+-]?\d+)
  | (?P<integer>0|[1-9]\d*[lL]?)
  | (?P<text>{_TEXT})
  | (?P<texts>\((?:{_SPACE}{_TEXT}{_SPACE},)+{_SPACE}{_TEXT}{_SPACE}\))
  | (?P<name>[A-Za-z_$][A-Za-z0-9_$]*)
  | (?P<symbol><>|>=|<=|[=<>(),+-])
    """,
    re.VERBOSE | re.DOTALL | re.ASCII,
)
KEYWORDS: Final = frozenset(
    (
        *("NOT", "AND", "OR", "BETWEEN", "IN", "TRUE", "FALSE", "NULL", "IS"),
        *("CONTAINS", "STARTSWITH", "ENDSWITH"),
    )
)
END: Final = "the end"
_TEXTS = re.compile(_TEXT)
_SHOWN_CHARS = 40
# With spaces and comments between them. A list of texts in parentheses is one token.
TOKENS_MAX: Final = 10_000


class FilterError(PortableError):
    """A filter that can't be used. line, column: from 1 on; of the cause."""

    def __init__(self, reason: str, text: str, position: int) -> None:
        self.line = text.count("\n", 0, position) + 1
        self.column = position - text.rfind("\n", 0, position)
        self.reason = reason
        super().__init__(f"filter, line {self.line}, column {self.column}: {reason}")


class Token(NamedTuple):
    """A token. kind: of ``_TOKEN``, a keyword, a symbol or END."""

    kind: str
    text: str
    position: int

    @property
    def shown(self) -> str:
        """The token in a message."""
        return END if self.kind == END else f"{self.text[:_SHOWN_CHARS]!r}"


def tokens(text: str) -> Iterator[Token]:
    """The tokens of a text, with END at the end. Raises FilterError."""
    position = count = 0
    while position < len(text):
        if (count := count + 1) > TOKENS_MAX:
            raise FilterError(f"more than {TOKENS_MAX} words and signs: shorten it", text, position)
        found = _TOKEN.match(text, position)
        if found is None:
            raise FilterError(_no_token(text, position), text, position)
        kind, token = str(found.lastgroup), found[0]
        if kind == "symbol":
            kind = token
        elif kind == "name" and token.upper() in KEYWORDS:
            kind = token.upper()
        if kind != "skipped":
            yield Token(kind, token, position)
        position = found.end()
    yield Token(END, "", position)


def unquoted(token: str) -> str:
    """The value of a text token."""
    return token[1:-1].replace("''", "'")


def listed(token: str) -> list[str]:
    """The values of a token of several texts."""
    return [*map(unquoted, _TEXTS.findall(token))]


def _no_token(text: str, position: int) -> str:
    if text[position] == "'":
        return "a text in quotes that has no end: add a ', and write '' for a ' in it"
    if text.startswith("/*", position):
        return "a comment that has no end: add */"
    return f"unexpected character {text[position]!r}"
