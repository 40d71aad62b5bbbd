"""What a producer holds for one topic: its queues and the frame templates of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import NoQueue
from headrace.producer.encoding import SendTemplate
from headrace.producer.selector import QueueSelector
from headrace_protocol.bodies import MASTER_ID, MessageQueue

if TYPE_CHECKING:
    from headrace.producer.faults import BrokerFaults
    from headrace.route import TopicRoute


class Target:
    """A queue with the address of its broker's master and its frame templates."""

    __slots__ = ("address", "batch", "queue", "single")

    def __init__(self, group: str, queue: MessageQueue, address: str) -> None:
        self.queue = queue
        self.address = address
        name = (group, queue.topic, queue.broker_name, queue.queue_id)
        self.single = SendTemplate(*name)
        self.batch = SendTemplate(*name, batch=True)


class Publication:
    """The targets of one topic, as of one route. Raises NoQueue if nothing can be written."""

    def __init__(self, group: str, route: TopicRoute) -> None:
        if not route.write_queues:
            raise NoQueue(route.topic, "write to")
        self.route = route
        self._selector = QueueSelector(route.write_queues)
        self._targets = {
            queue: Target(group, queue, route.brokers[queue.broker_name][MASTER_ID])
            for queue in route.write_queues
        }

    def target(self, key: str, faults: BrokerFaults) -> Target:
        """Where a message with ``key`` goes; without a key, the next queue of a sound broker."""
        if key:
            return self._targets[self._selector.for_key(key)]
        return self._targets[self._selector.next(faults.current())]

    def target_of(self, queue: MessageQueue) -> Target:
        """The target of a queue that the caller has chosen. Raises NoQueue."""
        target = self._targets.get(queue)
        if target is None:
            raise NoQueue(self.route.topic, f"write to at {queue.broker_name}/{queue.queue_id}")
        return target
