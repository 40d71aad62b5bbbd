"""Held requests: those, such as pulls at the end of a queue, that wait for messages."""

from __future__ import annotations

import math
from enum import IntEnum, auto
from itertools import chain
from typing import TYPE_CHECKING, Final, TypeVar

import trio

from headrace_protocol.at_once import run_at_once

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping

    from headrace_broker.store.store_queue import StoreQueue
    from headrace_protocol.channel import Channel
    from headrace_protocol.rights.access import Access
    from headrace_protocol.serving import Registry, Request, RunLong

Key = TypeVar("Key")

_TICK_S = 0.5
# More requests than this are answered in slices.
_AT_ONCE = 64


class State(IntEnum):
    """State of a held request. There is none for an attempt to answer, which is one step."""

    WAITING = auto()
    ANSWERED = auto()
    ABANDONED = auto()


class Event(IntEnum):
    """A transition of a held request."""

    ANSWER = auto()
    CLIENT_GONE = auto()


# A missing pair is a bug. The keys are plain numbers because their hash costs nothing.
NEXT_STATE: Final[Mapping[tuple[State, Event], State]] = {
    (State.WAITING, Event.ANSWER): State.ANSWERED,
    (State.WAITING, Event.CLIENT_GONE): State.ABANDONED,
    # Writing the answer may close the client.
    (State.ABANDONED, Event.ANSWER): State.ABANDONED,
}


class HeldRequest:
    """A request that waits for messages in one or more queues, or for its deadline.

    position: queue offset at which the next attempt to answer starts; a request that waits at
    several queues may use it as it likes. held_bytes: memory charged to the client.
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

    @property
    def taking_group(self) -> str:
        """The group for which it takes messages out; "" if it takes none."""
        return ""

    def try_answer(self, *, may_wait: bool) -> bool:
        """Answer the request if there is something for it; return whether it did. Never raises.

        may_wait: False at the deadline, when the request must be answered in any case.
        """
        raise NotImplementedError

    def released(self) -> None:
        """Called when it stops waiting, before the answer at its deadline."""

    def apply(self, event: Event) -> State:
        """Enter the next state. Raises KeyError if ``event`` can't happen in this one."""
        self.state = state = NEXT_STATE[self.state, event]
        return state


class JudgedRequest(HeldRequest):
    """A held request that is judged again when rights have changed; an error is its answer."""

    __slots__ = ("_access", "_judged_version", "_registry")

    def __init__(
        self,
        registry: Registry,
        access: Access,
        request: Request,
        position: int,
        held_bytes: int,
    ) -> None:
        super().__init__(request, position, held_bytes)
        self._registry = registry
        self._access = access
        self._judged_version = access.version

    def try_answer(self, *, may_wait: bool) -> bool:
        """See HeldRequest."""
        if not self.request.channel.is_open:
            return True
        try:
            self._judge_again()
            return self.attempt(may_wait=may_wait)
        except Exception as error:  # noqa: BLE001 - answered like the error of any request
            self._registry.fail(self.request, error)
            return True

    def attempt(self, *, may_wait: bool) -> bool:
        """As ``try_answer``, for a client that is there and has the rights; may raise."""
        raise NotImplementedError

    def _judge_again(self) -> None:
        """Raise RequestError if rights have changed, and the client has none any more."""
        if self._judged_version != self._access.version:
            self._access.check(self.request)
            self._judged_version = self._access.version


class LongPolling:
    """Holds requests at queues; one request may wait at several.

    Requests are indexed by the tick of their deadline, so a tick touches only those due, an
    answered one leaves nothing behind, and idle queues cost nothing.

    run_long: runs work in slices.
    check: called before a request of a channel is held; raises RequestError to reject it. None
    while nobody has a quota of held requests.
    rights_version: grows when rights change; then each held request is tried within half a second,
    which judges it.
    """

    def __init__(self, run_long: RunLong = run_at_once) -> None:
        self.held_count = 0
        self.run_long = run_long
        self.check: Callable[[Channel], None] | None = None
        self.rights_version: Callable[[], int] = lambda: 0
        self._judged_version = 0
        self._due: dict[int, dict[HeldRequest, None]] = {}
        self._of_channels: dict[Channel, dict[HeldRequest, None]] = {}
        self._next_tick = 0

    def hold(self, held: HeldRequest, queues: tuple[StoreQueue, ...], timeout_s: float) -> None:
        """Hold a request until a message arrives in one of ``queues``, or about ``timeout_s``.

        Raises RequestError if its client holds too many.
        """
        channel = held.request.channel
        if not channel.is_open:
            return  # closed while its requests were served
        if self.check is not None:
            self.check(channel)
        held.queues = queues
        held.tick = max(self._next_tick, _tick(trio.current_time() + timeout_s))
        self.held_count += 1
        for queue in queues:
            _wait(queue, held)
        self._due.setdefault(held.tick, {})[held] = None
        self._of_channels.setdefault(channel, {})[held] = None
        channel.charge(held.held_bytes)

    def wait_at(self, held: HeldRequest, queues: tuple[StoreQueue, ...]) -> None:
        """Have a held request wait at other queues from now on, as far as it waits."""
        for queue in held.queues:
            if queue.waiting:
                queue.waiting.pop(held, None)
        held.queues = queues
        for queue in queues:
            _wait(queue, held)

    def held_by(self, channel: Channel) -> int:
        """The number of a channel's requests that are held."""
        return len(self._of_channels.get(channel, ()))

    def arrived(self, queues: Iterable[StoreQueue]) -> None:
        """Try to answer the requests at ``queues``, which have new messages."""
        for queue in queues:
            if queue.waiting:
                waiting, queue.waiting = queue.waiting, None
                if len(waiting) <= _AT_ONCE:
                    for held in waiting:
                        self._try(queue, held)
                else:
                    self.run_long(self._try_each(queue, waiting))

    async def run(self) -> None:
        """Answer requests at their deadline or when rights have changed, until cancelled."""
        self._next_tick = self._next_tick or _tick(trio.current_time())
        self._judged_version = self.rights_version()
        while True:
            await trio.sleep(_TICK_S)
            if self._judged_version != (version := self.rights_version()):
                self._judged_version = version
                self.run_long(self._try_held([*chain.from_iterable(self._due.values())]))
            for tick in range(self._next_tick, _tick(trio.current_time())):
                self._next_tick = tick + 1
                if due := self._due.pop(tick, None):
                    self.run_long(self._answer_each(due))

    def queue_gone(self, queue: StoreQueue) -> Generator[None, None, None]:
        """Answer all requests at a queue that will be deleted; yields after each."""
        yield from self._answer_each(list(queue.waiting or ()))

    def channel_closed(self, channel: Channel) -> None:
        """Abandon the requests of a closed client."""
        self.run_long(self._abandon_each(list(self._of_channels.get(channel, ()))))

    def withdraw(self, channel: Channel, group: str) -> None:
        """Answer the requests by which a client that leaves a group would take messages out."""
        for held in list(self._of_channels.get(channel, ())):
            if held.taking_group == group:
                self._answer_now(held)

    def answer_all(self) -> None:
        """Answer all requests, because the broker stops."""
        for due in list(self._due.values()):
            for held in list(due):
                self._answer_now(held)

    def _try_each(self, queue: StoreQueue, waiting: Iterable[HeldRequest]) -> Iterator[None]:
        for held in waiting:
            self._try(queue, held)
            yield

    def _try_held(self, requests: Iterable[HeldRequest]) -> Iterator[None]:
        """Try requests where they wait."""
        for held in requests:
            is_answered = held.state is State.WAITING and held.try_answer(may_wait=True)
            if is_answered and held.apply(Event.ANSWER) is State.ANSWERED:
                self._release(held)
            yield

    def _try(self, queue: StoreQueue, held: HeldRequest) -> None:
        # Meanwhile it may have been answered in another slice, or at another queue.
        if held.state is not State.WAITING:
            return
        if held.try_answer(may_wait=True):
            if held.apply(Event.ANSWER) is State.ANSWERED:
                self._release(held)
        # It may wait elsewhere now; see ``wait_at``.
        elif held.state is State.WAITING and queue in held.queues:
            _wait(queue, held)

    def _abandon_each(self, requests: Iterable[HeldRequest]) -> Iterator[None]:
        for held in requests:
            if held.state is State.WAITING:
                held.apply(Event.CLIENT_GONE)
                self._release(held)
            yield

    def _answer_each(self, requests: Iterable[HeldRequest]) -> Generator[None, None, None]:
        for held in requests:
            self._answer_now(held)
            yield

    def _answer_now(self, held: HeldRequest) -> None:
        if held.state is State.WAITING:
            self._release(held)
            held.try_answer(may_wait=False)
            held.apply(Event.ANSWER)

    def _release(self, held: HeldRequest) -> None:
        """Remove a request from all tables, and its charge from the client."""
        channel = held.request.channel
        self.held_count -= 1
        for queue in held.queues:
            if queue.waiting:
                queue.waiting.pop(held, None)
        _discard(self._due, held.tick, held)
        _discard(self._of_channels, channel, held)
        channel.charge(-held.held_bytes)
        held.released()


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
