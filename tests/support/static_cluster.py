"""Masters of a static topic as dictionaries, which check mappings as real brokers do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from headrace_protocol.statictopic import checks, offsets
from headrace_protocol.statictopic.checks import BadMapping
from headrace_protocol.statictopic.mapping import Chain, TopicMapping
from headrace_protocol.statictopic.plans import Brokers, BrokerTopic, Closed, Plan, Step


class Cluster:
    """The masters of one topic.

    ends: physical end of each (broker, physical queue). exact: brokers that are not Apache's.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._brokers: Brokers = {name: BrokerTopic() for name in names}
        self.ends: dict[tuple[str, int], int] = {}
        self.exact = set(self._brokers)

    def brokers(self) -> Brokers:
        return dict(self._brokers)

    def join(self, name: str) -> None:
        self._brokers[name] = BrokerTopic()
        self.exact.add(name)

    def lose_mapping(self, name: str) -> None:
        self._brokers[name] = msgspec.structs.replace(
            self._brokers[name], mapping=None, is_lost=True
        )

    def remove(self, name: str) -> BrokerTopic:
        return self._brokers.pop(name)

    def put(self, name: str, topic: BrokerTopic) -> None:
        self._brokers[name] = topic

    def take(self, step: Step, read_epoch: int) -> None:
        """Store a mapping if a broker would. Raises BadMapping.

        read_epoch: of the mapping that the tool has read; brokers of Apache's don't look at it.
        """
        old = self._brokers[step.broker]
        if step.broker in self.exact and read_epoch != _epoch(old):
            raise BadMapping(step.mapping.topic, "epoch", "has changed: another tool was faster")
        checks.check_detail(step.mapping, step.broker)
        stored = checks.check_change(old.mapping, step.mapping, force=step.force)
        for queue, item in checks.dropped(old.mapping, stored) if old.mapping else ():
            is_here = item.bname == step.broker and not step.force
            assert not (is_here and self.ends.get((item.bname, item.queue_id))), (queue, item)
        self._check_queues(old, step.write_queues, stored)
        assert step.read_queues >= old.read_queues
        assert step.write_queues >= old.write_queues
        self._brokers[step.broker] = BrokerTopic(
            mapping=stored, read_queues=step.read_queues, write_queues=step.write_queues
        )

    def _check_queues(self, old: BrokerTopic, write_queues: int, stored: TopicMapping) -> None:
        """A new item of the broker has a new physical queue, which exists after the change."""
        known = _own_queues(old.mapping) if old.mapping else set()
        for queue in _own_queues(stored) - known:
            assert old.write_queues <= queue or old.is_lost, stored
            assert queue < write_queues, stored

    def carry_out(self, plan: Plan, requests: int | None = None) -> int:
        """Send a plan's requests, at most ``requests``; returns the number sent."""
        sent = 0
        for _ in self.requests(plan) if requests != 0 else ():
            sent += 1
            if sent == requests:
                break
        return sent

    def requests(self, plan: Plan) -> Iterator[None]:
        """Send a plan's requests, with a break after each. Raises BadMapping."""
        epochs = {name: _epoch(each) for name, each in plan.before.items()}
        for steps in (self._claims, self._closing, self._final):
            for step in steps(plan):
                self.take(step, epochs[step.broker])
                epochs[step.broker] = step.mapping.epoch
                yield

    def _claims(self, plan: Plan) -> list[Step]:
        return [step for stage in plan.claims() for step in stage]

    def _closing(self, plan: Plan) -> list[Step]:
        return [step for stage in plan.closing() for step in stage]

    def _final(self, plan: Plan) -> list[Step]:
        closed = {
            queue: Closed(item, self.ends.get((item.bname, item.queue_id), 0))
            for queue, item in plan.closed_items().items()
        }
        return [step for stage in plan.final(closed, self.exact) for step in stage]

    def write(self, broker: str, queue: int, messages: int) -> None:
        """Append messages to a physical queue."""
        assert queue < self._brokers[broker].write_queues
        self.ends[broker, queue] = self.ends.get((broker, queue), 0) + messages

    def leaders(self) -> dict[int, list[tuple[str, int]]]:
        """Logic queue -> all physical queues that take its messages, by the brokers' mappings."""
        found: dict[int, list[tuple[str, int]]] = {}
        for name, topic in self._brokers.items():
            for queue, physical in topic.mapping.led().items() if topic.mapping else ():
                found.setdefault(queue, []).append((name, physical))
        return found

    def whole(self) -> dict[int, Chain]:
        """The chains of the topic, which must be whole."""
        assert not any(topic.is_lost for topic in self._brokers.values())
        return checks.check_cluster(
            [topic.mapping for topic in self._brokers.values() if topic.mapping]
        )

    def end(self, chain: Chain) -> int:
        leader = chain[-1]
        written = self.ends.get((leader.bname, leader.queue_id), 0)
        return offsets.static_offset(leader, max(written, leader.start_offset))

    def check_readable(self, gone: Iterable[str] = ()) -> None:
        """Each physical queue that has messages is an item, and its messages fit in there."""
        items = {}
        for chain in self.whole().values():
            for index, item in enumerate(chain):
                items[item.bname, item.queue_id] = chain, index
        for place, end in self.ends.items():
            if not end or place[0] in gone:
                continue
            chain, index = items[place]
            bound = offsets.end_of(chain, index)
            assert bound is None or end <= bound, (place, end, chain)


def _epoch(topic: BrokerTopic) -> int:
    return topic.mapping.epoch if topic.mapping else 0


def _own_queues(mapping: TopicMapping) -> set[int]:
    return {
        item.queue_id
        for chain in mapping.hosted.values()
        for item in chain
        if item.bname == mapping.bname
    }
