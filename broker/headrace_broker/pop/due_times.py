"""Checkpoints by the time at which their messages become visible again."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.pop.pop_queue import Checkpoint


class DueTimes:
    """Adding and removing cost the same however many there are; a removed one leaves nothing.

    tick_ms: checkpoints that are due within one tick are handled together, at its end.
    on_earlier: called when one is due before all others.
    """

    def __init__(self, tick_ms: int) -> None:
        self._tick_ms = tick_ms
        self._ticks: dict[int, dict[Checkpoint, None]] = {}
        self._order: list[int] = []
        self.on_earlier: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return sum(map(len, self._ticks.values()))

    def add(self, checkpoint: Checkpoint, due_ms: int) -> None:
        """Note a checkpoint for a time, in place of the one before."""
        self.remove(checkpoint)
        tick = checkpoint.tick = -(-due_ms // self._tick_ms)
        found = self._ticks.get(tick)
        if found is None:
            found = self._ticks[tick] = {}
            heappush(self._order, tick)
            if self._order[0] == tick:
                self.on_earlier()
        found[checkpoint] = None

    def remove(self, checkpoint: Checkpoint) -> None:
        """Forget a checkpoint."""
        if (found := self._ticks.get(checkpoint.tick)) is not None:
            found.pop(checkpoint, None)

    @property
    def next_ms(self) -> int | None:
        """The time to look again; None if there is nothing to wait for."""
        while self._order and not self._ticks[self._order[0]]:
            del self._ticks[heappop(self._order)]
        return self._order[0] * self._tick_ms if self._order else None

    def take(self, now_ms: int) -> list[Checkpoint]:
        """Remove and return those that are due, the oldest first to within a tick."""
        found: list[Checkpoint] = []
        while self._order and self._order[0] * self._tick_ms <= now_ms:
            found += self._ticks.pop(heappop(self._order))
        return found
