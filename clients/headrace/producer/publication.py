"""A producer's view of one topic: its queues and the frame templates of each queue."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from headrace.errors import NoQueue
from headrace.producer.encoding import Target
from headrace.producer.selector import queue_index

if TYPE_CHECKING:
    from collections.abc import Container

    from headrace.route import TopicRoute
    from headrace_protocol.bodies import MessageQueue


class Publication:
    """The targets of one topic, according to one route. Raises NoQueue if no queue is writable.

    targets: in the queue order on which the choice by key is based.
    """

    def __init__(self, group: str, route: TopicRoute) -> None:
        if not route.write_queues:
            raise NoQueue(route.topic, "write to")
        self.route = route
        self.targets = [Target(group, route, queue) for queue in route.write_queues]
        self._usable = usable(self.targets)
        self._by_queue = {target.queue: target for target in self.targets}
        self._next = count()

    def target(self, key: bytes, avoid: Container[str]) -> Target:
        """The target for ``key``; without a key the next one, not on a broker in ``avoid``.

        If all brokers are in ``avoid``, the next one all the same.
        """
        if key:
            return self.targets[queue_index(key, len(self.targets))]
        targets = self._usable
        start = next(self._next) % len(targets)
        if not avoid:
            return targets[start]
        return usable(targets[start:] + targets[:start], avoid)[0]

    def target_of(self, queue: MessageQueue) -> Target:
        """The target of the given queue. Raises NoQueue."""
        target = self._by_queue.get(queue)
        if target is None:
            raise NoQueue(self.route.topic, f"write to at {queue.broker_name}/{queue.queue_id}")
        return target

    def has_broker_besides(self, avoid: Container[str]) -> bool:
        """True if any queue is on a broker not in ``avoid``."""
        return any(target.broker_name not in avoid for target in self._usable)


def usable(targets: list[Target], avoid: Container[str] = ()) -> list[Target]:
    """The targets without an error, if possible not on brokers in ``avoid``; else all."""
    without_error = [target for target in targets if not target.error] or targets
    return [target for target in without_error if target.broker_name not in avoid] or without_error
