"""A producer's view of one topic: its queues and the frame templates of each queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import NoQueue
from headrace.producer.encoding import Target
from headrace.producer.selector import QueueSelector
from headrace_protocol.bodies import MASTER_ID

if TYPE_CHECKING:
    from collections.abc import Container

    from headrace.producer.faults import BrokerFaults
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
        self.targets = [
            Target(group, queue, route.brokers[queue.broker_name][MASTER_ID])
            for queue in route.write_queues
        ]
        self._selector = QueueSelector(route.write_queues)
        self._by_queue = {target.queue: target for target in self.targets}

    def target(self, key: str, faults: BrokerFaults) -> Target:
        """The target for ``key``; without a key, the next queue of a healthy broker."""
        if key:
            return self._by_queue[self._selector.for_key(key)]
        return self._by_queue[self._selector.next(faults.current())]

    def target_of(self, queue: MessageQueue) -> Target:
        """The target of the given queue. Raises NoQueue."""
        target = self._by_queue.get(queue)
        if target is None:
            raise NoQueue(self.route.topic, f"write to at {queue.broker_name}/{queue.queue_id}")
        return target

    def has_broker_besides(self, avoid: Container[str]) -> bool:
        """Whether any queue is on a broker not in ``avoid``."""
        return any(target.queue.broker_name not in avoid for target in self.targets)
