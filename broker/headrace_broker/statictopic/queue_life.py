"""The states of logic queues that a mapping gives to this broker: a state machine.

A change of the mapping holds a queue while it asks where groups continue, and until the mapping is
on disk. A broker that was away is fenced: another one leads the queue by a newer mapping.
Source: docs/static-topics.md "Failures"; tests/broker/statictopic/test_static_table.py.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final, NamedTuple


class State(Enum):
    """The states of a queue. All but SERVING take no messages."""

    SERVING = auto()
    BEGINNING = auto()
    OPENING = auto()
    FENCED = auto()


class Event(Enum):
    """The events that change the state."""

    BEGIN = auto()  # a change asks where groups continue
    OPEN = auto()  # a change gives the queue to this broker
    SAVED = auto()  # the change is on disk
    ABANDON = auto()  # the change has ended, one way or the other
    CLAIM = auto()  # another broker leads the queue
    RENEW = auto()  # this broker's mapping is newer than the claim
    LOSE = auto()  # the mapping gives the queue to another broker, or is gone


TRANSITIONS: Final = {
    (State.SERVING, Event.BEGIN): State.BEGINNING,
    (State.SERVING, Event.OPEN): State.OPENING,
    (State.SERVING, Event.SAVED): State.SERVING,
    (State.SERVING, Event.ABANDON): State.SERVING,
    (State.SERVING, Event.CLAIM): State.FENCED,
    (State.SERVING, Event.RENEW): State.SERVING,
    (State.SERVING, Event.LOSE): State.SERVING,
    (State.BEGINNING, Event.BEGIN): State.BEGINNING,
    (State.BEGINNING, Event.OPEN): State.OPENING,
    (State.BEGINNING, Event.SAVED): State.SERVING,
    (State.BEGINNING, Event.ABANDON): State.SERVING,
    # The next look at the routes finds the claim again.
    (State.BEGINNING, Event.CLAIM): State.BEGINNING,
    (State.BEGINNING, Event.RENEW): State.BEGINNING,
    (State.BEGINNING, Event.LOSE): State.SERVING,
    (State.OPENING, Event.BEGIN): State.OPENING,
    (State.OPENING, Event.OPEN): State.OPENING,
    (State.OPENING, Event.SAVED): State.SERVING,
    # The mapping is saved later, or not at all.
    (State.OPENING, Event.ABANDON): State.OPENING,
    (State.OPENING, Event.CLAIM): State.OPENING,
    (State.OPENING, Event.RENEW): State.OPENING,
    (State.OPENING, Event.LOSE): State.SERVING,
    (State.FENCED, Event.BEGIN): State.FENCED,
    (State.FENCED, Event.OPEN): State.OPENING,
    (State.FENCED, Event.SAVED): State.FENCED,
    (State.FENCED, Event.ABANDON): State.FENCED,
    (State.FENCED, Event.CLAIM): State.FENCED,
    (State.FENCED, Event.RENEW): State.SERVING,
    (State.FENCED, Event.LOSE): State.SERVING,
}


class Claim(NamedTuple):
    """The broker that leads a queue by a newer mapping, of this epoch."""

    epoch: int
    broker: str


class Stop(NamedTuple):
    """The state of a queue that takes no messages. claim: of one that is fenced."""

    state: State
    claim: Claim

    @property
    def reason(self) -> str:
        """The reason, for clients and logs."""
        return _REASONS[self.state].format(**self.claim._asdict())


NO_CLAIM: Final = Claim(0, "")
_REASONS: Final = {
    State.BEGINNING: "it asks where groups continue",
    State.OPENING: "its mapping is not on disk yet",
    State.FENCED: "broker {broker} leads it since epoch {epoch}; if it should not, repair the "
    "topic",
}
