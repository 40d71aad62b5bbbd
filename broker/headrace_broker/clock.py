"""The wall clock as an argument, so that tests can set the timestamps of records."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The wall clock. Durations are measured by trio's clock instead."""

    def now_ms(self) -> int:
        """Milliseconds since 1970, as stored in records."""


class SystemClock:
    """The machine's clock."""

    def now_ms(self) -> int:
        """See Clock."""
        return time.time_ns() // 1_000_000
