"""Rules of features for topics and for queues that move: several at once, one by one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from headrace_broker.topics.rules import QueueMoves, Then, TopicRules
from headrace_protocol.waiting import at_once
from tests.broker.statictopic.test_static_changes import EPOCH, change, item, led_here, moved
from tests.support.broker import BrokerUnderTest
from tests.support.features import add_parts


class Noting:
    """Notes what it is told; ``problem``: with what it calls back."""

    def __init__(self, name: str, notes: list[str], problem: Exception | None = None) -> None:
        self._name = name
        self._notes = notes
        self._problem = problem
        self.then: list[Then] = []

    def check_plain_change(self, topic: str, new: object) -> None:
        self._notes.append(f"{self._name} checks {topic} for {new}")

    async def before_delete(self, topic: str) -> None:
        self._notes.append(f"{self._name} before {topic}")

    def after_delete(self, topic: str, then: Then) -> None:
        self._notes.append(f"{self._name} after {topic}")
        self.then.append(then)

    def settle(self, topic: str, queue_ids: Iterable[int], then: Then) -> None:
        self._notes.append(f"{self._name} settles {topic} {sorted(queue_ids)}")
        then(self._problem)

    def moved(self, topic: str, queue_ids: Iterable[int]) -> None:
        self._notes.append(f"{self._name} has settled {topic} {sorted(queue_ids)}")


@pytest.fixture
def notes() -> list[str]:
    return []


def test_each_rule_ends_before_the_next_begins(notes: list[str]) -> None:
    first, last = Noting("first", notes), Noting("last", notes)
    rules, ended = TopicRules(lambda: (first, last)), list[Exception | None]()
    at_once(rules.before_delete("T"))
    rules.after_delete("T", ended.append)
    assert notes == ["first before T", "last before T", "first after T"]
    first.then[0](None)
    assert (notes[-1], ended) == ("last after T", [])
    last.then[0](None)
    assert ended == [None]


def test_the_first_problem_is_the_answer(notes: list[str]) -> None:
    problem, ended = OSError("full"), list[Exception | None]()
    moves = QueueMoves(lambda: (Noting("first", notes, problem), Noting("last", notes)))
    moves.settle("T", (1, 0), ended.append)
    assert (notes, ended) == (["first settles T [0, 1]"], [problem])


def test_without_features_nothing_waits() -> None:
    ended: list[Exception | None] = []
    QueueMoves(tuple).settle("T", (0,), ended.append)
    TopicRules(tuple).after_delete("T", ended.append)
    assert ended == [None, None]


def test_a_feature_hears_of_a_queue_that_moves(
    tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_parts(monkeypatch, moves=(Noting("feature", notes),))
    broker = BrokerUnderTest(tmp_path)
    broker.clock.ms = EPOCH
    change(broker, led_here())
    assert not notes
    change(broker, moved(0, item(1, 5, -1, bname="broker-b"), led_here()))
    assert notes == ["feature settles T [0]", "feature has settled T [0]"]
