"""The handle that recalls a timer: ``v1 topic broker time UNIQ_KEY`` in URL-safe base64."""

from __future__ import annotations

import base64
import binascii
from typing import Final, NamedTuple

_VERSION: Final = "v1"


class RecallHandle(NamedTuple):
    """A handle. time_ms: the TIMER_OUT_MS of the message and 1."""

    topic: str
    broker_name: str
    time_ms: int
    uniq_key: str

    def encode(self) -> str:
        """The handle as a send is answered with it."""
        text = " ".join((_VERSION, self.topic, self.broker_name, str(self.time_ms), self.uniq_key))
        return base64.urlsafe_b64encode(text.encode()).decode()


def decode_recall_handle(handle: str) -> RecallHandle | None:
    """The parts of a handle; None for what is none."""
    try:
        padded = handle + "=" * (-len(handle) % 4)
        text = base64.b64decode(padded, altchars=b"-_", validate=True).decode()
    except (ValueError, binascii.Error):
        return None
    version, *parts = text.split(" ")
    if version != _VERSION or len(parts) < len(RecallHandle._fields):
        return None
    topic, broker_name, time_ms, uniq_key = parts[:4]
    if not (time_ms.isascii() and time_ms.isdigit() and len(time_ms) <= 18 and uniq_key):
        return None
    return RecallHandle(topic, broker_name, int(time_ms), uniq_key)
