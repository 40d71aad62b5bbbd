"""States of queues in the tier: whether they have the messages of the log.

A queue is UNKNOWN until its newest messages in the tier are compared with those of the log. Given
up and foreign queues are not uploaded until somebody decides, or the broker restarts; foreign ones
are not read from the tier either.
Source: docs/tiering.md; tests/broker/tiered/test_tiered_standings.py.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable

log = structlog.get_logger("headrace.broker")

Name = tuple[str, int]


class State(Enum):
    """The states of a queue."""

    UNKNOWN = auto()
    TRUSTED = auto()  # the tier has the log's messages
    GIVEN_UP = auto()
    FOREIGN = auto()  # given up, because the tier has other messages than the log


class Event(Enum):
    """The events that change the state."""

    SAME = auto()
    DIFFERENT = auto()
    FAIL = auto()  # in a way that no retry helps
    RESET = auto()  # a decision, or the end of the queue


TRANSITIONS: Final = {
    (State.UNKNOWN, Event.SAME): State.TRUSTED,
    (State.UNKNOWN, Event.DIFFERENT): State.FOREIGN,
    (State.UNKNOWN, Event.FAIL): State.GIVEN_UP,
    (State.UNKNOWN, Event.RESET): State.UNKNOWN,
    (State.TRUSTED, Event.FAIL): State.GIVEN_UP,
    (State.TRUSTED, Event.RESET): State.UNKNOWN,
    # The first reason stays.
    (State.GIVEN_UP, Event.FAIL): State.GIVEN_UP,
    (State.GIVEN_UP, Event.RESET): State.UNKNOWN,
    (State.FOREIGN, Event.FAIL): State.FOREIGN,
    (State.FOREIGN, Event.RESET): State.UNKNOWN,
}


class GivenUp(NamedTuple):
    """The reason why a queue is no longer uploaded, and the time of that.

    foreign_from: where the tier begins to have other messages than the log; None if it has not.
    """

    reason: str
    since_ms: int
    foreign_from: int | None = None

    @property
    def is_foreign(self) -> bool:
        """True if the tier has other messages than the log."""
        return self.foreign_from is not None


class Standings:
    """The states of all queues. The uploading thread changes them; any thread may read them.

    trusted: the queues in that state. given_up: those given up, with the foreign ones.
    """

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self.trusted: set[Name] = set()
        self.given_up: dict[Name, GivenUp] = {}
        self._now_ms = now_ms

    def state(self, name: Name) -> State:
        """The state of a queue."""
        if name in self.trusted:
            return State.TRUSTED
        if (given_up := self.given_up.get(name)) is None:
            return State.UNKNOWN
        return State.FOREIGN if given_up.is_foreign else State.GIVEN_UP

    def apply(
        self, name: Name, event: Event, reason: str = "", foreign_from: int | None = None
    ) -> None:
        """Change a queue's state. A pair that is not in the table is a bug.

        reason: for FAIL and DIFFERENT. foreign_from: for DIFFERENT, see ``GivenUp``.
        """
        before = self.state(name)
        state = TRANSITIONS.get((before, event))
        if state is None:
            raise RuntimeError(f"a queue that is {before.name} cannot become {event.name}: {name}")
        if state is before:
            return
        self.trusted.discard(name)
        self.given_up.pop(name, None)
        if state is State.TRUSTED:
            self.trusted.add(name)
        elif state is not State.UNKNOWN:
            self.given_up[name] = GivenUp(reason, self._now_ms(), foreign_from)
            log.error("queue is not uploaded", queue=f"{name[0]}/{name[1]}", reason=reason)

    def is_foreign(self, name: Name) -> bool:
        """True if the tier has other messages than the log."""
        return self.state(name) is State.FOREIGN

    def foreign_count(self) -> int:
        """Number of foreign queues."""
        return sum(given_up.is_foreign for given_up in list(self.given_up.values()))
