"""A topic's route: its queues and the brokers that serve them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from headrace_protocol.bodies import (
    MASTER_ID,
    PERM_READ,
    PERM_WRITE,
    MessageQueue,
    QueueData,
    TopicRouteData,
)
from headrace_protocol.bounds import QUEUE_NUMS_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace_protocol.drivers.response import Response

_SHOWN_MAX = 8


class TopicRoute:
    """A nameserver's answer about a topic.

    brokers: by broker name, the address of each broker id (0 is the master).
    write_queues: queues on brokers that have a master; read_queues: queues on any broker. Both
        are in RocketMQ's order.
    fetched_at: time of the last confirmation, in seconds on the event loop's clock.
    is_current: False once the route is invalidated or replaced; get it from the instance again.
    """

    def __init__(self, topic: str, data: TopicRouteData, fetched_at: float) -> None:
        self.topic = topic
        self.data = data
        self.fetched_at = fetched_at
        self.is_current = True
        self.brokers: Mapping[str, Mapping[int, str]] = {
            broker.broker_name: broker.broker_addrs for broker in data.broker_datas
        }
        self.write_queues = tuple(
            queue
            for part in self._parts(PERM_WRITE)
            if MASTER_ID in self.brokers[part.broker_name]
            for queue in _queues(topic, part.broker_name, part.write_queue_nums)
        )
        self.read_queues = tuple(
            queue
            for part in self._parts(PERM_READ)
            for queue in _queues(topic, part.broker_name, part.read_queue_nums)
        )

    @classmethod
    def of(cls, topic: str, response: Response, fetched_at: float) -> Self:
        """The route in a nameserver's response. Raises BrokerError, MalformedAnswer."""
        data = response.expect().decode(TopicRouteData)
        parts = data.queue_datas
        for what, counts in (
            ("read", [part.read_queue_nums for part in parts]),
            ("write", [part.write_queue_nums for part in parts]),
        ):
            # Each queue becomes an object here, so the bound applies to all brokers together.
            if min(counts, default=0) < 0 or sum(counts) > QUEUE_NUMS_MAX:
                raise response.malformed(
                    f"topic {topic} has {', '.join(map(str, counts[:_SHOWN_MAX]))} {what} queues; "
                    f"all brokers together may have 0 to {QUEUE_NUMS_MAX}. Look for a broker "
                    "that should not be there (`headrace cluster`)"
                )
        return cls(topic, data, fetched_at)

    def _parts(self, perm: int) -> list[QueueData]:
        parts = [
            part
            for part in self.data.queue_datas
            if part.perm & perm and self.brokers.get(part.broker_name)
        ]
        return sorted(parts, key=lambda part: part.broker_name)

    def master(self, broker_name: str) -> str | None:
        """Address of the broker's master; None if it has none now."""
        return self.brokers.get(broker_name, {}).get(MASTER_ID)

    def address(self, broker_name: str, broker_id: int = MASTER_ID) -> str | None:
        """Address of one replica, or of another one if that replica is gone."""
        replicas = self.brokers.get(broker_name)
        if not replicas:
            return None
        return replicas.get(broker_id) or replicas[min(replicas)]


def _queues(topic: str, broker_name: str, count: int) -> list[MessageQueue]:
    return [
        MessageQueue(topic=topic, broker_name=broker_name, queue_id=queue_id)
        for queue_id in range(count)
    ]
