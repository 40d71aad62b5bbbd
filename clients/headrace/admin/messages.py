"""Output of received messages."""

from __future__ import annotations

import base64
import sys
from typing import TYPE_CHECKING, Any

from headrace.admin.output import print_json_line, time_text
from headrace.admin.terminal import clean_lines
from headrace_daemon.command import warn
from headrace_protocol.message import BodyTooLarge, CodecMissing, CorruptRecord

if TYPE_CHECKING:
    from headrace.messages import ReceivedMessage

# Errors raised by reading a damaged or malicious message.
UNREADABLE = (BodyTooLarge, CodecMissing, CorruptRecord)


def message_record(message: ReceivedMessage) -> dict[str, Any]:
    """All fields of a message; the body is in ``body`` if it is UTF-8, else in ``body_base64``.

    Unreadable parts are left out, and ``problem`` gives the reason.
    """
    record = {
        "topic": message.queue.topic,
        "broker": message.queue.broker_name,
        "queue": message.queue.queue_id,
        "queue_offset": message.queue_offset,
    }
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
        "properties": message.stored.properties,
    }


def print_message(message: ReceivedMessage, *, as_json: bool) -> None:
    """Print one message of a stream: its body and a newline, or all fields as one JSON line.

    A message with an unreadable body is left out with a warning.
    """
    if as_json:
        print_json_line(message_record(message))
        return
    try:
        body = message.body
    except UNREADABLE as error:
        queue = message.queue
        place = f"{queue.topic}/{queue.broker_name}/{queue.queue_id}@{message.queue_offset}"
        warn(f"skipped {place}: {error}")
        return
    if sys.stdout.isatty():
        sys.stdout.write(clean_lines(body.decode(errors="backslashreplace")) + "\n")
    else:
        sys.stdout.buffer.write(body + b"\n")
