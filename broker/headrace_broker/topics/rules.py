"""Rules of features for changes of topics, and for queues that move to other brokers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from headrace_protocol.bodies import TopicConfig

Then = Callable[[Exception | None], None]


class TopicRule(Protocol):
    """A feature's part in changes of topics."""

    def check_plain_change(self, topic: str, new: TopicConfig | None, /) -> None:
        """Raise RequestError if a topic may not be created or get these settings.

        new: None for the settings that a first message gives it.
        """

    async def before_delete(self, topic: str, /) -> None:
        """Run before a topic is deleted. Raises RequestError."""

    def after_delete(self, topic: str, then: Then, /) -> None:
        """Run when the deletion is on disk; call back at its end, or with its error."""


class QueueMove(Protocol):
    """A feature that writes to queues later than its requests come."""

    def settle(self, topic: str, queue_ids: Iterable[int], then: Then, /) -> None:
        """Call back once what is decided for queues is in the log; nothing more is decided."""

    def moved(self, topic: str, queue_ids: Iterable[int], /) -> None:
        """End what ``settle`` began."""


class TopicRules:
    """The rules of all features; ``rules`` returns them."""

    def __init__(self, rules: Callable[[], Iterable[TopicRule]]) -> None:
        self._rules = rules

    async def before_delete(self, topic: str) -> None:
        """See ``TopicRule``."""
        for rule in self._rules():
            await rule.before_delete(topic)

    def after_delete(self, topic: str, then: Then) -> None:
        """See ``TopicRule``."""
        _one_by_one((partial(rule.after_delete, topic) for rule in self._rules()), then)


class QueueMoves:
    """All features that write later; ``moves`` returns them."""

    def __init__(self, moves: Callable[[], Iterable[QueueMove]]) -> None:
        self._moves = moves

    def settle(self, topic: str, queue_ids: Iterable[int], then: Then) -> None:
        """See ``QueueMove``."""
        _one_by_one((partial(move.settle, topic, queue_ids) for move in self._moves()), then)

    def moved(self, topic: str, queue_ids: Iterable[int]) -> None:
        """See ``QueueMove``."""
        for move in self._moves():
            move.moved(topic, queue_ids)


def _one_by_one(steps: Iterator[Callable[[Then], None]], then: Then) -> None:
    """Begin each step when the one before it has called back; stop at an error."""

    def go_on(error: Exception | None) -> None:
        step = next(steps, None) if error is None else None
        if step is None:
            then(error)
        else:
            step(go_on)

    go_on(None)
