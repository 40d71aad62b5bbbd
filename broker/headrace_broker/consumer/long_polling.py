"""Requests that found nothing, as pulls at the end of their queue, and wait for a message."""

from __future__ import annotations

import math
from enum import IntEnum, auto
from typing import TYPE_CHECKING, Final, TypeVar

import trio

from headrace_protocol.serving import run_at_once

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from headrace_broker.store.store_queue import StoreQueue
    from headrace_protocol.serving import Channel, Request, RunLong

Key = TypeVar("Key")

_TICK_S = 0.5
# More of them than this are answered in slices.
_AT_ONCE = 64


class State(IntEnum):
    """Where a held request stands. A look is no state: nothing else runs during it."""

    WAITING = auto()
    ANSWERED = auto()
    ABANDONED = auto()


class Event(IntEnum):
    """What happens to a held request."""

    ANSWER = auto()
    CLIENT_GONE = auto()


# A pair that is missing is a fault of ours. Plain numbers, since their hash costs nothing.
NEXT_STATE: Final[Mapping[tuple[State, Event], State]] = {
    (State.WAITING, Event.ANSWER): State.ANSWERED,
    (State.WAITING, Event.CLIENT_GONE): State.ABANDONED,
    # What is written to a client may be what closes it.
    (State.ABANDONED, Event.ANSWER): State.ABANDONED,
}


class HeldRequest:
    """A request that waits at queues until there is something for it, or its deadline comes.

    request: what is asked. position: where in its queue the next look begins, in units; of one
    that waits at several queues, for its own use. held_bytes: memory that its client is charged.
    queues: where it waits. tick: its deadline. state: see ``NEXT_STATE``.
    """

    __slots__ = ("held_bytes", "position", "queues", "request", "state", "tick")

    def __init__(self, request: Request, position: int, held_bytes: int) -> None:
        self.request = request
        self.position = position
        self.held_bytes = held_bytes
        self.queues: tuple[StoreQueue, ...] = ()
        self.tick = 0
        self.state = State.WAITING

    def look(self, *, may_wait: bool) -> bool:
        """Whether it is answered now. Never raises.

        may_wait: False when the deadline has come, so that something must be answered.
        """
        raise NotImplementedError

    def apply(self, event: Event) -> State:
        """Enter the state that ``event`` leads to; KeyError if it can't happen in this one."""
        self.state = state = NEXT_STATE[self.state, event]
        return state


class LongPolling:
    """Holds requests at queues, one of them at as many as it likes.

    Deadlines are kept by tick, so that an answered request leaves nothing behind and a tick touches
    only what is due; queues where nothing arrives cost nothing.

    run_long: runs work in slices.
    """

    def __init__(self, run_long: RunLong = run_at_once) -> None:
        self.held_count = 0
        self.run_long = run_long
        self._due: dict[int, dict[HeldRequest, None]] = {}
        self._of_channels: dict[Channel, dict[HeldRequest, None]] = {}
        self._next_tick = 0

    def hold(self, held: HeldRequest, queues: tuple[StoreQueue, ...], timeout_s: float) -> None:
        """Wait for the next message in any of ``queues``, about ``timeout_s`` at most."""
        channel = held.request.channel
        if not channel.is_open:
            return  # closed while what it had sent was served
        held.queues = queues
        held.tick = max(self._next_tick, _tick(trio.current_time() + timeout_s))
        self.held_count += 1
        for queue in queues:
            _wait(queue, held)
        self._due.setdefault(held.tick, {})[held] = None
        self._of_channels.setdefault(channel, {})[held] = None
        channel.charge(held.held_bytes)

    def arrived(self, queues: Iterable[StoreQueue]) -> None:
        """Messages were put into ``queues``: try again what waits there."""
        for queue in queues:
            if queue.waiting:
                waiting, queue.waiting = queue.waiting, None
                if len(waiting) <= _AT_ONCE:
                    for held in waiting:
                        self._try(queue, held)
                else:
                    self.run_long(self._try_each(queue, waiting))

    async def run(self) -> None:
        """Answer requests whose deadline has come, until cancelled."""
        self._next_tick = self._next_tick or _tick(trio.current_time())
        while True:
            await trio.sleep(_TICK_S)
            for tick in range(self._next_tick, _tick(trio.current_time())):
                self._next_tick = tick + 1
                if due := self._due.pop(tick, None):
                    self.run_long(self._end_each(due))

    def queue_gone(self, queue: StoreQueue) -> Iterator[None]:
        """A queue will be deleted: nobody shall wait for it. Yields after each request."""
        yield from self._end_each(list(queue.waiting or ()))

    def channel_closed(self, channel: Channel) -> None:
        """Nobody waits any more for an answer on ``channel``."""
        self.run_long(self._forget_each(list(self._of_channels.get(channel, ()))))

    def answer_all(self) -> None:
        """The broker stops: nobody shall wait for it."""
        for due in list(self._due.values()):
            for held in list(due):
                self._end(held)

    def _try_each(self, queue: StoreQueue, waiting: Iterable[HeldRequest]) -> Iterator[None]:
        for held in waiting:
            self._try(queue, held)
            yield

    def _try(self, queue: StoreQueue, held: HeldRequest) -> None:
        # What waited in a slice, or at another queue too, may have been answered.
        if held.state is not State.WAITING:
            return
        if held.look(may_wait=True):
            if held.apply(Event.ANSWER) is State.ANSWERED:
                self._let_go(held)
        elif held.state is State.WAITING:
            _wait(queue, held)

    def _forget_each(self, requests: Iterable[HeldRequest]) -> Iterator[None]:
        for held in requests:
            if held.state is State.WAITING:
                held.apply(Event.CLIENT_GONE)
                self._let_go(held)
            yield

    def _end_each(self, requests: Iterable[HeldRequest]) -> Iterator[None]:
        for held in requests:
            self._end(held)
            yield

    def _end(self, held: HeldRequest) -> None:
        if held.state is State.WAITING:
            self._let_go(held)
            held.look(may_wait=False)
            held.apply(Event.ANSWER)

    def _let_go(self, held: HeldRequest) -> None:
        """Remove a request from all places."""
        channel = held.request.channel
        self.held_count -= 1
        for queue in held.queues:
            if queue.waiting:
                queue.waiting.pop(held, None)
        _discard(self._due, held.tick, held)
        _discard(self._of_channels, channel, held)
        channel.charge(-held.held_bytes)


def _wait(queue: StoreQueue, held: HeldRequest) -> None:
    if queue.waiting is None:
        queue.waiting = {}
    queue.waiting[held] = None


def _discard(table: dict[Key, dict[HeldRequest, None]], key: Key, held: HeldRequest) -> None:
    requests = table.get(key)
    if requests is not None:
        requests.pop(held, None)
        if not requests:
            del table[key]


def _tick(time_s: float) -> int:
    return math.ceil(time_s / _TICK_S)
