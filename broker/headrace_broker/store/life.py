"""The life of a store, which accepts messages or refuses them: a state machine.

A full disk refuses messages until there is room again. A failed flush or a lost lock is final,
because pages may be lost or another broker may own the files; only a restart recovers.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from headrace_broker.store.errors import StoreNotWritable

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_broker.clock import Clock


class State(Enum):
    """The states of a store."""

    LOADING = auto()
    OPEN = auto()
    REFUSING = auto()  # until there is room again
    FAILED = auto()  # until the next start
    CLOSED = auto()


class Event(Enum):
    """The events that change the state."""

    LOADED = auto()
    REFUSE = auto()
    RESUME = auto()
    FAIL = auto()
    CLOSE = auto()


TRANSITIONS: Final = {
    (State.LOADING, Event.LOADED): State.OPEN,
    (State.LOADING, Event.FAIL): State.FAILED,
    (State.LOADING, Event.CLOSE): State.CLOSED,
    (State.OPEN, Event.REFUSE): State.REFUSING,
    (State.OPEN, Event.RESUME): State.OPEN,
    (State.OPEN, Event.FAIL): State.FAILED,
    (State.OPEN, Event.CLOSE): State.CLOSED,
    (State.REFUSING, Event.REFUSE): State.REFUSING,
    (State.REFUSING, Event.RESUME): State.OPEN,
    (State.REFUSING, Event.FAIL): State.FAILED,
    (State.REFUSING, Event.CLOSE): State.CLOSED,
    # What is under way may find out late; the first reason stays.
    (State.FAILED, Event.REFUSE): State.FAILED,
    (State.FAILED, Event.RESUME): State.FAILED,
    (State.FAILED, Event.FAIL): State.FAILED,
    (State.FAILED, Event.CLOSE): State.CLOSED,
    (State.CLOSED, Event.LOADED): State.OPEN,  # a store that was given back is loaded again
    (State.CLOSED, Event.REFUSE): State.CLOSED,
    (State.CLOSED, Event.RESUME): State.CLOSED,
    (State.CLOSED, Event.FAIL): State.CLOSED,
    (State.CLOSED, Event.CLOSE): State.CLOSED,
}
_LIVING: Final = frozenset((State.OPEN, State.REFUSING))
_REFUSED: Final = frozenset((State.REFUSING, State.FAILED))
_OVER: Final = frozenset((State.FAILED, State.CLOSED))
_REFUSALS: Final = frozenset((Event.REFUSE, Event.FAIL, Event.CLOSE))


class StoreLife:
    """A store's state, and the reason while it refuses messages.

    refused_ms: time from which on the next attempt waits. since_ms: time from which on messages are
    refused. refusal_count: number of refusals so far.
    """

    def __init__(self, root: Path, clock: Clock) -> None:
        self.state = State.LOADING
        self.refused_ms = self.since_ms = self.refusal_count = 0
        self._clock = clock
        self._retry_ms = 0
        self._reason = StoreNotWritable("not loaded", root)

    @property
    def refusal(self) -> StoreNotWritable | None:
        """The reason while messages are refused, else None.

        A new exception for each append: a kept one would keep every frame it was raised through.
        """
        if self.state is State.OPEN:
            return None
        reason = self._reason
        return StoreNotWritable(reason.reason, reason.path, reason.error_number)

    @property
    def is_writable(self) -> bool:
        """True if messages are accepted, or will be once the disk has room."""
        return self.state in _LIVING

    @property
    def may_retry(self) -> bool:
        """True if a temporary refusal is old enough for an append to try again."""
        # A clock that was set back must not prolong the refusal.
        is_early = 0 <= self._clock.now_ms() - self.refused_ms < self._retry_ms
        return self.state is State.REFUSING and not is_early

    def apply(
        self,
        event: Event,
        reason: StoreNotWritable | None = None,
        retry_ms: int = 0,
        retry_ms_max: int = 0,
    ) -> None:
        """Change the state. A pair that is not in the table is a bug.

        reason: for a refusal. retry_ms: how soon an append may try again; each attempt that fails
        doubles the pause, up to ``retry_ms_max``.
        """
        state = TRANSITIONS.get((self.state, event))
        if state is None:
            raise RuntimeError(f"a store that is {self.state.name} cannot {event.name}")
        if event in _REFUSALS and self.state not in _OVER:
            assert reason is not None
            self._reason = reason
            self.refusal_count += 1
            self._schedule(retry_ms, max(retry_ms, retry_ms_max))
            if self.state not in _REFUSED:
                self.since_ms = self.refused_ms
        self.state = state

    def _schedule(self, retry_ms: int, retry_ms_max: int) -> None:
        """Set the time of the next attempt, unless one is to come already."""
        if self.state is State.REFUSING:
            if not self.may_retry:
                self._retry_ms = min(self._retry_ms, retry_ms_max)
                return
            retry_ms = max(retry_ms, 2 * self._retry_ms)
        self.refused_ms, self._retry_ms = self._clock.now_ms(), min(retry_ms, retry_ms_max)
