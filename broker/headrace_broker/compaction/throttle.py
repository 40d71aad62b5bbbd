"""The pace of runs: bytes per second, waits under pressure, and the stop."""

from __future__ import annotations

import threading
from time import monotonic
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_YIELD_S: Final = 0.1


class RunStopped(Exception):
    """The broker stops; the run's unfinished files are discarded."""


class Throttle:
    """Shared by all runs; ``pace`` waits in their threads.

    bytes_per_second: read and written by all runs; 0 for no limit.
    is_pressed: whether producers wait for the broker; runs wait too then.
    """

    def __init__(self, bytes_per_second: Callable[[], int], is_pressed: Callable[[], bool]) -> None:
        self._bytes_per_second = bytes_per_second
        self._is_pressed = is_pressed
        self._lock = threading.Lock()
        self._free_s = 0.0
        self._stop = threading.Event()

    def stop(self) -> None:
        """End all runs at their next block."""
        self._stop.set()

    def restart(self) -> None:
        """Allow runs again."""
        self._stop.clear()

    def pace(self, byte_count: int) -> None:
        """Wait until a run may read or write. Raises RunStopped."""
        self._wait(self._delay_s(byte_count))
        while self._is_pressed():
            self._wait(_YIELD_S)

    def _delay_s(self, byte_count: int) -> float:
        rate = self._bytes_per_second()
        if not rate:
            return 0.0
        with self._lock:
            now_s = monotonic()
            start_s = max(self._free_s, now_s)
            self._free_s = start_s + byte_count / rate
        return start_s - now_s

    def _wait(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise RunStopped
