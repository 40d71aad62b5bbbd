"""Pauses between fruitless attempts, so that no peer keeps a client busy with empty answers."""

from __future__ import annotations

import anyio

FIRST_PAUSE_S = 0.01
LONGEST_PAUSE_S = 1.0


class Pacer:
    """Spaces out the attempts of one loop: the pause doubles with each that makes no progress.

    A pause counts from the start of its attempt, so a pull that its broker held costs none.
    """

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._began = 0.0

    def begin(self) -> None:
        """An attempt begins."""
        self._began = anyio.current_time()

    def delay_s(self, *, progress: bool) -> float:
        """How long to wait after the attempt; 0 after progress, or if it took long by itself."""
        elapsed_s = anyio.current_time() - self._began
        if progress or elapsed_s >= LONGEST_PAUSE_S:
            self._pause_s = 0.0
            return 0.0
        self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        return max(0.0, self._pause_s - elapsed_s)
