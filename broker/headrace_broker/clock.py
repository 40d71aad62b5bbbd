"""Time as an argument: whoever stamps a record takes a clock, so that tests can set it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the wall clock's time; durations are trio's business."""

    def now_ms(self) -> int:
        """Milliseconds since 1970, as stored in records."""


class SystemClock:
    """The machine's clock."""

    def now_ms(self) -> int:
        """See Clock."""
        return time.time_ns() // 1_000_000
