"""Tokens of a filter, and errors with their place."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace_protocol.errors import PortableError

if TYPE_CHECKING:
    from collections.abc import Iterator

_TOKEN = re.compile(
    r"""
    (?P<skipped>[ \t\n\r\f]+ | --[^\n\r]* | /\*.*?\*/)
  | (?P<double>\d+\.\d*(?:[eE][+-]?\d+)? | \.\d+(?:[eE][+-]?\d+)? | \d+[eE][+-]?\d+)
  | (?P<integer>0|[1-9]\d*[lL]?)
  | (?P<text>'(?:''|[^'])*')
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
_SHOWN_CHARS = 40


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
    position = 0
    while position < len(text):
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


def _no_token(text: str, position: int) -> str:
    if text[position] == "'":
        return "a text in quotes that has no end: add a ', and write '' for a ' in it"
    if text.startswith("/*", position):
        return "a comment that has no end: add */"
    return f"unexpected character {text[position]!r}"
