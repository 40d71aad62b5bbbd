"""Text of strangers, so that it can't steer a terminal or look like other rows.

Control characters (C0, C1), line ends and what turns the direction of writing are shown as Python
escapes them.
"""

from __future__ import annotations

import re


def clean(text: str) -> str:
    """A line of text: whatever is not printable is escaped, line ends and tabs too."""
    return text if text.isprintable() else "".join(map(_escaped, text))


def clean_lines(text: str) -> str:
    """The same for a text of many lines: line ends and tabs stay."""
    return "".join(c if c in "\n\t" else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]


# JSON escapes C0 itself. The others, of which terminals obey C1, it leaves as they are.
_STEERING = re.compile("[\\x7f-\\x9f\\u061c\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u2069\\ufeff]")


def clean_json(text: bytes) -> bytes:
    """The same JSON value without a character that steers a terminal."""
    if text.isascii() and b"\x7f" not in text:
        return text
    return _STEERING.sub(lambda match: f"\\u{ord(match[0]):04x}", text.decode()).encode()
