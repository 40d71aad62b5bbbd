"""The decision that a driver follows: by answers of brokers, and at several real brokers."""

from __future__ import annotations

import itertools

import pytest

from headrace.spark.errors import BrokerMissing
from headrace.spark.write.commits import BrokerState, choose
from headrace_protocol.staging import Decision, StagedAttempt

NOTHING = BrokerState(-1, None)


def decision(name: str, *brokers: str, batch: int = 5) -> Decision:
    attempt = (StagedAttempt(name, 1, 1),)
    return Decision(name, batch, dict.fromkeys(brokers, attempt))


MINE = decision("mine", "a", "b")
OLD = decision("old", "a", "b", batch=4)
FIRST = decision("first", "a", "b")
OTHER = decision("other", "b")


def test_who_comes_first_decides() -> None:
    assert choose({"a": NOTHING, "b": NOTHING}, MINE) is MINE
    assert choose({"a": BrokerState(4, OLD), "b": BrokerState(4, OLD)}, MINE) is MINE


def test_what_all_of_its_brokers_hold_is_followed() -> None:
    states = {"a": BrokerState(4, FIRST), "b": BrokerState(-1, FIRST), "c": NOTHING}
    assert choose(states, MINE) is FIRST


def test_what_one_of_its_brokers_does_not_hold_is_not() -> None:
    assert choose({"a": BrokerState(4, FIRST), "b": BrokerState(4, OLD)}, MINE) is MINE
    assert choose({"a": BrokerState(4, FIRST), "b": BrokerState(4, OTHER)}, MINE) is OTHER


def test_what_is_in_a_log_is_followed_whoever_holds_something_else() -> None:
    assert choose({"a": BrokerState(5, FIRST), "b": BrokerState(4, OTHER)}, MINE) is FIRST
    assert choose({"a": BrokerState(5, FIRST), "b": NOTHING}, MINE) is FIRST


@pytest.mark.parametrize("applied", [4, 5])
def test_a_broker_that_is_needed_is_waited_for(applied: int) -> None:
    with pytest.raises(BrokerMissing, match="broker b has a part in batch 5"):
        choose({"a": BrokerState(applied, FIRST)}, MINE)
    # Somebody without a part in it remembers as well.
    with pytest.raises(BrokerMissing, match="broker a"):
        choose({"c": BrokerState(-1, FIRST)}, MINE)


def test_a_batch_before_the_last_one_is_done() -> None:
    later = decision("later", "a", batch=6)
    assert choose({"a": BrokerState(5, later), "b": BrokerState(5, FIRST)}, MINE) is None


def test_the_order_of_brokers_does_not_matter() -> None:
    first, second = decision("1", "a"), decision("2", "b")
    states = {"a": BrokerState(4, first), "b": BrokerState(4, second)}
    for order in itertools.permutations(states.items()):
        assert choose(dict(order), MINE) is first
