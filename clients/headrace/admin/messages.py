"""Output of received messages."""

from __future__ import annotations

import base64
import re
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headrace.admin.output import print_json_line, queue_columns, queue_text, time_text
from headrace.admin.terminal import clean_lines
from headrace.errors import ConfigurationError
from headrace_daemon.command import clean, warn
from headrace_protocol.compression import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace.received import ReceivedMessage

_PREVIEW_BYTES = 60


def message_record(message: ReceivedMessage) -> dict[str, Any]:
    """All fields of a message; the body is in ``body`` if it is UTF-8, else in ``body_base64``.

    Unreadable parts are left out, and ``problem`` gives the reason.
    """
    record = {**queue_columns(message.queue), "queue_offset": message.queue_offset}
    try:
        record |= _properties(message)
        body = message.body
    except UNREADABLE as error:
        return {**record, "problem": str(error)}
    try:
        return {**record, "body": body.decode()}
    except UnicodeDecodeError:
        return {**record, "body_base64": base64.b64encode(body).decode()}


def _properties(message: ReceivedMessage) -> dict[str, Any]:
    return {
        "topic": message.topic,
        "key": message.key or None,
        "tag": message.tag or None,
        "message_id": message.message_id,
        "offset_message_id": message.offset_message_id,
        "born_time": time_text(message.born_timestamp_ms),
        "store_time": time_text(message.store_timestamp_ms),
        "reconsume_times": message.reconsume_times,
        "properties": message.properties,
        "system_properties": message.system_properties,
    }


def preview(message: ReceivedMessage) -> str:
    """The beginning of a message's body, or why it cannot be read."""
    try:
        return message.body[:_PREVIEW_BYTES].decode(errors="backslashreplace")
    except UNREADABLE as error:
        return f"({error})"


def print_message(message: ReceivedMessage, *, as_json: bool) -> None:
    """Print one message of a stream: its body and a newline, or all fields as one JSON line.

    A message with an unreadable body is left out with a warning.
    """
    if as_json:
        print_json_line(message_record(message))
        return
    with _skipped_if_unreadable(message):
        body = message.body
        if sys.stdout.isatty():
            sys.stdout.write(clean_lines(body.decode(errors="backslashreplace")) + "\n")
        else:
            sys.stdout.buffer.write(body + b"\n")


@contextmanager
def _skipped_if_unreadable(message: ReceivedMessage) -> Iterator[None]:
    try:
        yield
    except UNREADABLE as error:
        warn(f"skipped {queue_text(message.queue)}@{message.queue_offset}: {error}")


# What follows % in a format.
_FIELDS: dict[str, Callable[[ReceivedMessage], str | bytes]] = {
    "t": lambda message: message.topic,
    "b": lambda message: message.queue.broker_name,
    "q": lambda message: str(message.queue.queue_id),
    "o": lambda message: str(message.queue_offset),
    "k": lambda message: message.key,
    "g": lambda message: message.tag,
    "T": lambda message: time_text(message.store_timestamp_ms) or "-",
    "s": lambda message: message.body,
    "%": lambda _message: "%",
}
FORMAT_HELP = (
    "%t topic, %b broker, %q queue, %o offset, %k key, %g tag, %T store time, %s body, %% percent; "
    "\\n, \\t, \\\\"
)
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\"}
_PART = re.compile(r"%(?P<field>.?)|\\(?P<escape>.?)|(?P<text>[^%\\]+)", re.DOTALL)


class Format:
    r"""A line for each message, by a template such as ``%q %o %k %s\n``.

    Values are escaped: a tab, line end or backslash in a body is ``\t``, ``\n`` or ``\\``, so lines
    and columns stay apart. Raises ConfigurationError.
    """

    def __init__(self, template: str) -> None:
        self._parts = [_part(match, template) for match in _PART.finditer(template)]

    def print(self, message: ReceivedMessage) -> None:
        """Print a message; one with an unreadable body is left out with a warning."""
        with _skipped_if_unreadable(message):
            sys.stdout.write("".join(part(message) for part in self._parts))


def _part(match: re.Match[str], template: str) -> Callable[[ReceivedMessage], str]:
    if match["text"] is not None:
        return lambda _message: match["text"]
    if match["escape"] is not None and match["escape"] in _ESCAPES:
        return lambda _message: _ESCAPES[match["escape"]]
    if match["field"] is not None and match["field"] in _FIELDS:
        field = _FIELDS[match["field"]]
        return lambda message: _escaped(field(message))
    raise ConfigurationError(f"format {template!r} has {match[0]!r}; known are {FORMAT_HELP}")


def _escaped(value: str | bytes) -> str:
    """Printable text without tabs and line ends, from which the value can be restored."""
    data = value if isinstance(value, bytes) else value.encode(errors="surrogateescape")
    return clean(data.replace(b"\\", b"\\\\").decode(errors="backslashreplace"))
