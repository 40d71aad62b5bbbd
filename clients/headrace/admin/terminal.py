"""Escapes untrusted text, so that it can neither control a terminal nor imitate other rows.

Control characters (C0, C1), line ends and bidirectional controls become Python escapes.
"""

from __future__ import annotations

import logging
import re

from headrace_daemon.command import clean, escaped


def clean_lines(text: str) -> str:
    """Escape a text of several lines; line ends and tabs stay."""
    return "".join(c if c in "\n\t" else escaped(c) for c in text)


# JSON itself escapes only C0; of the rest, terminals obey C1.
_CONTROLS = re.compile("[\\x7f-\\x9f\\u061c\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u2069\\ufeff]")


def clean_json(text: bytes) -> bytes:
    """Escape terminal controls in JSON text, keeping its value."""
    if text.isascii() and b"\x7f" not in text:
        return text
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text.decode()).encode()


class _PlainFormatter(logging.Formatter):
    """Escapes control characters: clients log text from brokers."""

    def format(self, record: logging.LogRecord) -> str:
        return clean(super().format(record))


def show_logs_plainly() -> None:
    """Escape the log lines that nothing else handles."""
    # The handler used until logging is configured, and client commands do not configure it.
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_PlainFormatter())
