"""The states of a queue whose messages are in the tier."""

from __future__ import annotations

import itertools

import pytest

from headrace_broker.tiered.access.standings import TRANSITIONS, Event, Standings, State

NAME = "T", 0
TO_REACH = {
    State.UNKNOWN: [],
    State.TRUSTED: [Event.SAME],
    State.GIVEN_UP: [Event.FAIL],
    State.FOREIGN: [Event.DIFFERENT],
}


def standings_in(state: State) -> Standings:
    standings = Standings(lambda: 7)
    for event in TO_REACH[state]:
        apply(standings, event, "first")
    assert standings.state(NAME) is state
    return standings


def apply(standings: Standings, event: Event, reason: str) -> None:
    standings.apply(NAME, event, reason, 12 if event is Event.DIFFERENT else None)


@pytest.mark.parametrize(("state", "event"), [*itertools.product(State, Event)])
def test_every_pair_is_in_the_table_or_a_bug(state: State, event: Event) -> None:
    standings = standings_in(state)
    after = TRANSITIONS.get((state, event))
    if after is None:
        with pytest.raises(RuntimeError, match=f"{state.name} cannot become {event.name}"):
            apply(standings, event, "second")
        after = state
    else:
        apply(standings, event, "second")
    assert standings.state(NAME) is after
    assert (NAME in standings.trusted) is (after is State.TRUSTED)
    assert standings.is_foreign(NAME) is (after is State.FOREIGN)
    assert standings.foreign_count() == (after is State.FOREIGN)
    given_up = standings.given_up.get(NAME)
    assert (given_up is not None) is (after in {State.GIVEN_UP, State.FOREIGN})
    if given_up is not None:
        # A later failure changes neither reason nor time.
        assert given_up.reason == ("first" if after is state else "second")
        assert given_up.since_ms == 7
