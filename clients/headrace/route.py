"""A topic's route: its queues and the brokers that serve them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from headrace.errors import NoQueue
from headrace.missing import MissingPart, departed_part
from headrace_protocol.bodies import (
    MASTER_ID,
    PERM_READ,
    PERM_WRITE,
    MessageQueue,
    QueueData,
    TopicRouteData,
)
from headrace_protocol.bounds import QUEUE_NUMS_MAX
from headrace_protocol.statictopic.mapping import (
    MAPPING_SCOPE,
    NO_LEADER_BROKER,
    logic_broker_name,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from headrace_protocol.drivers.response import Response
    from headrace_protocol.statictopic.mapping import MappingInfo

_SHOWN_MAX = 8
_LEARNING_S = 0.2


class TopicRoute:
    """A nameserver's answer about a topic.

    brokers: by broker name, the address of each broker id (0 is the master).
    is_static: whether the topic has logic queues, which stay the same while their leaders change.
    write_queues: queues on brokers that have a master, and those of a compacted topic on brokers
        that are away: its keys keep their queues. read_queues: queues on any broker. Both are in
        RocketMQ's order. Of a static topic both are all queues, in order of their ids.
    fetched_at: time of the last confirmation, in seconds on the event loop's clock.
    missing: parts of the topic that no registered broker serves.
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
        self._perms = {part.broker_name: part.perm for part in data.queue_datas}
        self.is_static = bool(data.topic_queue_mapping_by_broker)
        self._departed = {each.broker_name: each for each in data.departed_brokers or ()}
        self._leaders: dict[MessageQueue, str] = {}
        if self.is_static:
            self._leaders = _leaders(topic, (data.topic_queue_mapping_by_broker or {}).values())
            self.write_queues = self.read_queues = tuple(self._leaders)
        else:
            self._set_plain_queues()
        self.missing = tuple(self._parts_by_broker())

    def _parts_by_broker(self) -> Iterator[MissingPart]:
        if not self.is_static:
            for each in self._departed.values():
                if each.read_queue_nums > 0 and each.perm & PERM_READ:
                    yield departed_part(each, range(each.read_queue_nums))
            return
        led: dict[str, list[int]] = {
            name: [] for name, each in self._departed.items() if each.read_queue_nums > 0
        }
        for queue in self.read_queues:
            if self.address_of(queue) is None:
                led.setdefault(self.broker_of(queue), []).append(queue.queue_id)
        for name, queue_ids in led.items():
            if name in self._departed:
                yield departed_part(self._departed[name], tuple(queue_ids))
            elif name == NO_LEADER_BROKER:
                yield MissingPart("", tuple(queue_ids), "leads them and is not registered")
            else:
                yield MissingPart(name, tuple(queue_ids), "is not registered")

    def masters(self) -> list[str]:
        """The addresses of its brokers' masters."""
        found = (self.master(name) for name in self.brokers)
        return [address for address in found if address]

    def silent_part(self, broker: str, error: Exception) -> MissingPart:
        """The part on a broker that is registered but does not answer."""
        queues = (each for each in self.read_queues if self.broker_of(each) == broker)
        return MissingPart(
            broker, tuple(each.queue_id for each in queues), f"does not answer: {error}"
        )

    def _set_plain_queues(self) -> None:
        topic = self.topic
        writable = {
            part.broker_name: part.write_queue_nums
            for part in self._parts(PERM_WRITE)
            if MASTER_ID in self.brokers[part.broker_name]
        } | {
            each.broker_name: each.write_queue_nums
            for each in self._departed.values()
            if each.compacted and each.perm & PERM_WRITE
        }
        self.write_queues = tuple(
            queue for name in sorted(writable) for queue in _queues(topic, name, writable[name])
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
        mappings = (data.topic_queue_mapping_by_broker or {}).values()
        compacted = [
            each.write_queue_nums for each in data.departed_brokers or () if each.compacted
        ]
        for what, counts in (
            ("read", [part.read_queue_nums for part in parts]),
            ("write", [part.write_queue_nums for part in parts] + compacted),
            ("static", [max((info.total_queues for info in mappings), default=0)]),
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

    def broker_of(self, queue: MessageQueue) -> str:
        """Name of the broker that serves a queue; the leader of a static topic's queue.

        NO_LEADER_BROKER if no broker claims the queue.
        """
        if self.is_static:
            return self._leaders.get(queue, NO_LEADER_BROKER)
        return queue.broker_name

    def address_of(self, queue: MessageQueue, broker_id: int = MASTER_ID) -> str | None:
        """Address of the broker that serves a queue; see ``address``."""
        return self.address(self.broker_of(queue), broker_id)

    def broker_at(self, address: str) -> str:
        """Name of the broker with an address; "" if the route has none."""
        return next((name for name, at in self.brokers.items() if address in at.values()), "")

    def note_leader(self, queue: MessageQueue, leader: str, now: float) -> None:
        """React to an answer that a queue's former leader passed on from ``leader``.

        now: on the clock of ``fetched_at``. A nameserver may learn of it a little later.
        """
        if self.broker_of(queue) != leader and now >= self.fetched_at + _LEARNING_S:
            self.is_current = False

    def why_not_writable(self, queue: MessageQueue) -> NoQueue | None:
        """The error of sending to a queue now; None if it is possible.

        Queues that are not writable are among ``write_queues`` only if they are a static or a
        compacted topic's.
        """
        leader = self.broker_of(queue)
        away = ""
        if leader == NO_LEADER_BROKER:
            reason = "no broker leads it"
        elif self.master(leader) is None:
            away, reason = leader, f"no master of its leader {leader} is up"
            if absence := self._absence(leader):
                reason = f"{reason}: {absence}"
        elif not self._perms.get(leader, 0) & PERM_WRITE:
            reason = f"the topic or its leader {leader} forbids writes"
        else:
            return None
        return NoQueue(self.topic, f"write to at {_queue_text(queue)}", reason, away)

    def unserved(self, queue: MessageQueue) -> NoQueue:
        """The error of a request about a queue whose broker has no address."""
        broker = self.broker_of(queue)
        if broker == NO_LEADER_BROKER:
            return NoQueue(self.topic, f"use at {_queue_text(queue)}", "no broker leads it")
        reason = self._absence(broker)
        wanted = f"use on broker {broker}"
        if reason is None:
            return NoQueue(self.topic, wanted, broker_name=broker)
        return NoQueue(self.topic, wanted, reason, broker)

    def _absence(self, broker: str) -> str | None:
        """The reason why a broker is away; None if nobody knows."""
        for part in self.missing:
            if part.broker == broker and part.since_ms is not None:
                return f"broker {broker} {part.why}"
        return None

    def master(self, broker_name: str) -> str | None:
        """Address of the broker's master; None if it has none now."""
        return self.brokers.get(broker_name, {}).get(MASTER_ID)

    def address(self, broker_name: str, broker_id: int = MASTER_ID) -> str | None:
        """Address of one replica, or of another one if that replica is gone."""
        replicas = self.brokers.get(broker_name)
        if not replicas:
            return None
        return replicas.get(broker_id) or replicas[min(replicas)]


def _queue_text(queue: MessageQueue) -> str:
    return f"{queue.broker_name}/{queue.queue_id}"


def _leaders(topic: str, infos: Iterable[MappingInfo]) -> dict[MessageQueue, str]:
    """The leader of each queue of a static topic, in order of the queues' ids.

    Of two brokers that claim a queue, the one with the higher epoch leads it.
    """
    claims = [info for info in infos if info.scope == MAPPING_SCOPE]
    leaders: dict[int, str] = {}
    for info in sorted(claims, key=lambda info: info.epoch):
        leaders |= dict.fromkeys(info.curr_id_map, info.bname)
    name = logic_broker_name()
    return {
        MessageQueue(topic, name, queue_id): leaders.get(queue_id, NO_LEADER_BROKER)
        for queue_id in range(max((info.total_queues for info in claims), default=0))
    }


def _queues(topic: str, broker_name: str, count: int) -> list[MessageQueue]:
    return [
        MessageQueue(topic=topic, broker_name=broker_name, queue_id=queue_id)
        for queue_id in range(count)
    ]
