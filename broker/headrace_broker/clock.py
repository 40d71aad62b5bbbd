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


class RisingTime:
    """Times of the wall clock that never fall, for durations in places without trio's clock.

    Whatever the clock is set back is added from then on.
    """

    def __init__(self) -> None:
        self._latest_ms = self._added_ms = 0

    def of(self, now_ms: int) -> int:
        """The rising time of a wall-clock time, which must be the current one."""
        self._added_ms += max(self._latest_ms - now_ms, 0)
        self._latest_ms = now_ms
        return now_ms + self._added_ms
