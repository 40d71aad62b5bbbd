"""Pulls that found nothing and wait for a message or their deadline."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headrace_broker.store.store_queue import StoreQueue

_TICK_S = 0.5


class HeldPull:
    """A pull at the end of its queue.

    answer: called with True to try again, with False when the deadline has come and something
    must be answered; returns whether it was answered.
    """

    __slots__ = ("answer", "queue", "tick")

    def __init__(self, answer: Callable[[bool], bool]) -> None:
        self.answer = answer
        self.queue: StoreQueue
        self.tick: int


class LongPolling:
    """Holds pulls at their queues.

    Deadlines are kept by tick, so that an answered pull leaves nothing behind and a tick touches
    only what is due; queues where nothing arrives cost nothing.
    """

    def __init__(self) -> None:
        self._due: dict[int, set[HeldPull]] = {}
        self._next_tick = 0

    @property
    def held_count(self) -> int:
        """Pulls that wait now."""
        return sum(map(len, self._due.values()))

    def hold(self, queue: StoreQueue, pull: HeldPull, timeout_s: float) -> None:
        """Wait for the next message in ``queue``, about ``timeout_s`` at most."""
        pull.queue = queue
        pull.tick = max(self._next_tick, _tick(trio.current_time() + timeout_s))
        queue.waiting.append(pull)
        self._due.setdefault(pull.tick, set()).add(pull)

    def arrived(self, queues: Iterable[StoreQueue]) -> None:
        """Messages were put into ``queues``: try their pulls again."""
        for queue in queues:
            if queue.waiting:
                waiting, queue.waiting = queue.waiting, []
                for pull in waiting:
                    if pull.answer(True):
                        self._forget(pull)
                    else:
                        queue.waiting.append(pull)

    async def run(self) -> None:
        """Answer pulls whose deadline has come, until cancelled."""
        self._next_tick = _tick(trio.current_time())
        while True:
            await trio.sleep(_TICK_S)
            now = _tick(trio.current_time())
            for tick in range(self._next_tick, now):
                self._expire(tick)
            self._next_tick = now

    def queue_gone(self, queue: StoreQueue) -> None:
        """A queue will be deleted: nobody shall wait for it."""
        waiting, queue.waiting = queue.waiting, []
        for pull in waiting:
            self._forget(pull)
            pull.answer(False)

    def answer_all(self) -> None:
        """The broker stops: nobody shall wait for it."""
        for tick in list(self._due):
            self._expire(tick)

    def _expire(self, tick: int) -> None:
        for pull in self._due.pop(tick, ()):
            pull.queue.waiting.remove(pull)
            pull.answer(False)

    def _forget(self, pull: HeldPull) -> None:
        due = self._due[pull.tick]
        due.discard(pull)
        if not due:
            del self._due[pull.tick]


def _tick(time_s: float) -> int:
    return math.ceil(time_s / _TICK_S)
