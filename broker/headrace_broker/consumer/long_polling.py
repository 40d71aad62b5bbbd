"""Pulls that found nothing and wait for a message or their deadline."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

import trio

from headrace_protocol.serving import run_at_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from headrace_broker.store.store_queue import StoreQueue
    from headrace_protocol.serving import Channel, RunLong

Key = TypeVar("Key")

_TICK_S = 0.5
# More of them than this are answered in slices.
_AT_ONCE = 64


class HeldPull:
    """A pull at the end of its queue.

    answer: called with True to try again, with False when the deadline has come and something
    must be answered; returns whether it was answered.
    channel: of the client that waits. held_bytes: what is kept for it, which the client is charged.
    """

    __slots__ = ("answer", "channel", "held_bytes", "is_over", "queue", "tick")

    def __init__(self, answer: Callable[[bool], bool], channel: Channel, held_bytes: int) -> None:
        self.answer = answer
        self.channel = channel
        self.held_bytes = held_bytes
        self.is_over = False
        self.queue: StoreQueue
        self.tick: int


class LongPolling:
    """Holds pulls at their queues.

    Deadlines are kept by tick, so that an answered pull leaves nothing behind and a tick touches
    only what is due; queues where nothing arrives cost nothing.

    run_long: runs work in slices.
    """

    def __init__(self, run_long: RunLong = run_at_once) -> None:
        self.held_count = 0
        self.run_long = run_long
        self._due: dict[int, dict[HeldPull, None]] = {}
        self._of_channels: dict[Channel, dict[HeldPull, None]] = {}
        self._next_tick = 0

    def hold(self, queue: StoreQueue, pull: HeldPull, timeout_s: float) -> None:
        """Wait for the next message in ``queue``, about ``timeout_s`` at most."""
        if not pull.channel.is_open:
            return  # closed while what it had sent was served
        pull.queue = queue
        pull.tick = max(self._next_tick, _tick(trio.current_time() + timeout_s))
        self.held_count += 1
        _wait(queue, pull)
        self._due.setdefault(pull.tick, {})[pull] = None
        self._of_channels.setdefault(pull.channel, {})[pull] = None
        pull.channel.charge(pull.held_bytes)

    def arrived(self, queues: Iterable[StoreQueue]) -> None:
        """Messages were put into ``queues``: try their pulls again."""
        for queue in queues:
            if queue.waiting:
                waiting, queue.waiting = queue.waiting, None
                if len(waiting) <= _AT_ONCE:
                    for pull in waiting:
                        self._try(pull)
                else:
                    self.run_long(self._try_each(waiting))

    async def run(self) -> None:
        """Answer pulls whose deadline has come, until cancelled."""
        self._next_tick = self._next_tick or _tick(trio.current_time())
        while True:
            await trio.sleep(_TICK_S)
            for tick in range(self._next_tick, _tick(trio.current_time())):
                self._next_tick = tick + 1
                if due := self._due.pop(tick, None):
                    self.run_long(self._end_each(due))

    def queue_gone(self, queue: StoreQueue) -> Iterator[None]:
        """A queue will be deleted: nobody shall wait for it. Yields after each pull."""
        yield from self._end_each(list(queue.waiting or ()))

    def channel_closed(self, channel: Channel) -> None:
        """Nobody waits any more for an answer on ``channel``."""
        self.run_long(self._forget_each(list(self._of_channels.get(channel, ()))))

    def answer_all(self) -> None:
        """The broker stops: nobody shall wait for it."""
        for due in list(self._due.values()):
            for pull in list(due):
                self._end(pull)

    def _try_each(self, pulls: Iterable[HeldPull]) -> Iterator[None]:
        for pull in pulls:
            self._try(pull)
            yield

    def _try(self, pull: HeldPull) -> None:
        if pull.is_over:
            return
        if pull.answer(True):
            self._forget(pull)
        else:
            _wait(pull.queue, pull)

    def _forget_each(self, pulls: Iterable[HeldPull]) -> Iterator[None]:
        for pull in pulls:
            self._forget(pull)
            yield

    def _end_each(self, pulls: Iterable[HeldPull]) -> Iterator[None]:
        for pull in pulls:
            self._end(pull)
            yield

    def _end(self, pull: HeldPull) -> None:
        if not pull.is_over:
            self._forget(pull)
            pull.answer(False)

    def _forget(self, pull: HeldPull) -> None:
        if pull.is_over:
            return
        pull.is_over = True
        self.held_count -= 1
        if pull.queue.waiting:
            pull.queue.waiting.pop(pull, None)
        _discard(self._due, pull.tick, pull)
        _discard(self._of_channels, pull.channel, pull)
        pull.channel.charge(-pull.held_bytes)


def _wait(queue: StoreQueue, pull: HeldPull) -> None:
    if queue.waiting is None:
        queue.waiting = {}
    queue.waiting[pull] = None


def _discard(table: dict[Key, dict[HeldPull, None]], key: Key, pull: HeldPull) -> None:
    pulls = table.get(key)
    if pulls is not None:
        pulls.pop(pull, None)
        if not pulls:
            del table[key]


def _tick(time_s: float) -> int:
    return math.ceil(time_s / _TICK_S)
