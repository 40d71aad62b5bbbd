"""How received messages are printed."""

from __future__ import annotations

import base64
import sys
from typing import TYPE_CHECKING, Any

from headrace.admin.output import print_json_line, time_text

if TYPE_CHECKING:
    from headrace.messages import ReceivedMessage


def message_record(message: ReceivedMessage) -> dict[str, Any]:
    """All about a message; the body is ``body`` when it is text, else ``body_base64``."""
    record = {
        "topic": message.topic,
        "broker": message.queue.broker_name,
        "queue": message.queue.queue_id,
        "queue_offset": message.queue_offset,
        "key": message.key or None,
        "tag": message.tag or None,
        "message_id": message.message_id,
        "offset_message_id": message.offset_message_id,
        "born_time": time_text(message.born_timestamp_ms),
        "store_time": time_text(message.store_timestamp_ms),
        "reconsume_times": message.reconsume_times,
        "properties": message.properties,
    }
    try:
        return {**record, "body": message.body.decode()}
    except UnicodeDecodeError:
        return {**record, "body_base64": base64.b64encode(message.body).decode()}


def print_message(message: ReceivedMessage, *, as_json: bool) -> None:
    """Print a message of a stream: its body and a line end, or all of it as one JSON line."""
    if as_json:
        print_json_line(message_record(message))
    elif sys.stdout.isatty():
        sys.stdout.write(printable(message.body) + "\n")
    else:
        sys.stdout.buffer.write(message.body + b"\n")


def printable(body: bytes) -> str:
    """Text that cannot steer a terminal."""
    text = body.decode(errors="backslashreplace")
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
