"""The life of a store: every state with every event."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from headrace_broker.store.errors import StoreNotWritable
from headrace_broker.store.life import TRANSITIONS, Event, State, StoreLife
from tests.support.stores import SetClock

# What leads to a state.
WAYS = {
    State.LOADING: [],
    State.OPEN: [Event.LOADED],
    State.REFUSING: [Event.LOADED, Event.REFUSE],
    State.FAILED: [Event.LOADED, Event.FAIL],
    State.CLOSED: [Event.LOADED, Event.CLOSE],
}


def reason(text: str) -> StoreNotWritable:
    return StoreNotWritable(text, Path("store"))


def led_to(state: State) -> StoreLife:
    life = StoreLife(Path("store"), SetClock())
    for event in WAYS[state]:
        life.apply(event, reason(f"at {event.name}"), 1000)
    assert life.state is state
    return life


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_every_pair_is_in_the_table_or_raises(state: State, event: Event) -> None:
    life = led_to(state)
    if (state, event) not in TRANSITIONS:
        with pytest.raises(RuntimeError, match=f"{state.name} cannot {event.name}"):
            life.apply(event, reason("new"))
        assert life.state is state
        return
    life.apply(event, reason("new"))
    assert life.state is TRANSITIONS[state, event]
    assert (life.refusal is None) == (life.state is State.OPEN)
    assert life.is_writable == (life.state in {State.OPEN, State.REFUSING})
    if state in {State.FAILED, State.CLOSED} and life.refusal:
        assert f"at {WAYS[state][-1].name}" in str(life.refusal)  # the first reason stays


def test_only_a_load_opens_what_a_failure_or_a_stop_has_ended() -> None:
    ways_out = {pair: after for pair, after in TRANSITIONS.items() if after is State.OPEN}
    assert {pair for pair in ways_out if pair[0] in {State.FAILED, State.CLOSED}} == {
        (State.CLOSED, Event.LOADED)
    }


def test_a_refusal_is_tried_again_after_its_time_or_when_the_clock_goes_back() -> None:
    clock = SetClock()
    life = StoreLife(Path("store"), clock)
    life.apply(Event.LOADED)
    life.apply(Event.REFUSE, reason("full"), 1000)
    clock.ms += 999
    assert not life.may_retry
    clock.ms += 1
    assert life.may_retry
    clock.ms -= 2000
    assert life.may_retry
    life.apply(Event.FAIL, reason("broken"))
    assert not life.may_retry


def test_a_refusal_that_is_renewed_began_when_it_was_first_told() -> None:
    clock = SetClock()
    life = StoreLife(Path("store"), clock)
    life.apply(Event.LOADED)
    began_ms = clock.ms
    for event in (Event.REFUSE, Event.REFUSE, Event.FAIL):
        life.apply(event, reason("full"))
        clock.ms += 1000
    assert life.since_ms == began_ms
    assert life.refused_ms == began_ms + 2000


def test_a_refusal_after_an_end_is_a_new_one() -> None:
    clock = SetClock()
    life = StoreLife(Path("store"), clock)
    life.apply(Event.LOADED)
    for event in (Event.REFUSE, Event.RESUME, Event.REFUSE):
        clock.ms += 1000
        life.apply(event, reason("full"))
    assert life.since_ms == clock.ms
