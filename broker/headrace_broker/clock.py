"""The wall clock as an argument, so that tests can set the timestamps of records."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The wall clock, and one that nobody sets. Where trio's clock is at hand, it will do."""

    def now_ms(self) -> int:
        """Milliseconds since 1970, as stored in records."""

    def steady_ms(self) -> int:
        """Milliseconds since any moment, for durations: setting the wall clock leaves them."""


class SystemClock:
    """The machine's clocks."""

    def now_ms(self) -> int:
        """See Clock."""
        return time.time_ns() // 1_000_000

    def steady_ms(self) -> int:
        """See Clock."""
        return time.monotonic_ns() // 1_000_000
