"""The plan that makes a static topic whole again: after a tool died, or a broker is gone for good.

Source: docs/static-topics.md "Repair"; tests/protocol/test_statictopic_repair.py.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from headrace_protocol.statictopic.checks import BadMapping, check_chain, check_cluster
from headrace_protocol.statictopic.mapping import UNDECIDED
from headrace_protocol.statictopic.offsets import end_of, round_up, static_offset
from headrace_protocol.statictopic.plans import Builder, Gone, InvalidChange, Mode, NoChange

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from headrace_protocol.statictopic.mapping import Chain, MappingItem, TopicMapping
    from headrace_protocol.statictopic.plans import Brokers, Plan

# A lost leader takes the end of its queue with it. No queue gets that many messages, so offsets
# behind this jump are new to every reader.
LOST_OFFSETS = 2**40


def plan_repair(
    topic: str,
    brokers: Brokers,
    now_ms: int,
    *,
    known: Collection[str] = (),
    forget: Collection[str] = (),
) -> Plan:
    """Finish a change that was left half done, and restore mappings from other brokers' copies.

    brokers: all masters. known: brokers that nameservers remember for this topic.
    forget: brokers whose messages are given up, because they won't come back.

    Raises BadMapping for a broker that must be there, NoChange for a whole topic, InvalidChange.
    """
    mappings = [each.mapping for name, each in brokers.items() if each.mapping]
    if not mappings:
        raise InvalidChange(f"no master has a mapping of topic {topic}: it is not a static topic")
    if not forget and _is_whole(brokers, mappings):
        raise NoChange(f"static topic {topic} is whole")
    total = max(mapping.total_queues for mapping in mappings)
    for broker in forget:
        if broker in brokers and brokers[broker].mapping:
            raise InvalidChange(
                f"broker {broker} is there with its mapping: move its queues with `headrace topic "
                f"remap {topic} --to ...`"
            )
    _check_away(topic, {*known} - brokers.keys() - {*forget})
    copies = _merged_copies(topic, mappings)
    repair = _Repair(topic, brokers, forget)
    for queue in range(total):
        if queue not in copies:
            repair.add_missing(queue, mappings)
        else:
            repair.settle(queue, copies[queue])
    return repair.plan(total, copies, now_ms)


def _is_whole(brokers: Brokers, mappings: list[TopicMapping]) -> bool:
    if len(mappings) < len(brokers):
        return False
    try:
        check_cluster(mappings)
    except BadMapping:
        return False
    return True


def _check_away(topic: str, away: Iterable[str]) -> None:
    for broker in sorted(away):
        reason = (
            f"{broker} is away: start it, or give up its messages with `headrace topic repair "
            f"{topic} --forget-broker {broker}`"
        )
        raise BadMapping(topic, "bname", reason)


# -- copies ----------------------------------------------------------------------------------------


def _merged_copies(topic: str, mappings: Iterable[TopicMapping]) -> dict[int, Chain]:
    """The newest chain of each queue: its last item alone may be undecided."""
    copies: dict[int, list[tuple[int, Chain]]] = {}
    for mapping in mappings:
        for queue, chain in mapping.hosted.items():
            if chain:
                copies.setdefault(queue, []).append((mapping.epoch, chain))
    return {queue: _newest(topic, queue, found) for queue, found in copies.items()}


def _newest(topic: str, queue: int, copies: list[tuple[int, Chain]]) -> Chain:
    """The chain with the highest gen, preferably decided."""
    _, chain = max(copies, key=_version)
    check_chain(topic, queue, chain)
    return chain


def _version(copy: tuple[int, Chain]) -> tuple[int, bool, int]:
    """Grows with each change of a chain. A claim raises the epoch alone."""
    epoch, chain = copy
    return chain[-1].gen, chain[-1].logic_offset != UNDECIDED, epoch


# -- queues ----------------------------------------------------------------------------------------


class _Repair:
    """Chains without the items that are given up, each with a leader that is there."""

    def __init__(self, topic: str, brokers: Brokers, forget: Collection[str]) -> None:
        self.topic = topic
        self.brokers = brokers
        self.forget = forget
        self.chains: dict[int, Chain] = {}
        # Queue -> gen and offset of a new leader; UNDECIDED: where the item before it ends.
        self.leaderless: dict[int, tuple[int, int]] = {}
        self.jumping: set[int] = set()
        self.gone: list[Gone] = []

    def settle(self, queue: int, chain: Chain) -> None:
        """Take a queue's chain, less the items of forgotten brokers."""
        _check_away(
            self.topic, {item.bname for item in chain} - self.brokers.keys() - {*self.forget}
        )
        remaining = self._without_forgotten(queue, chain)
        last = chain[-1]
        behind_all = round_up(max(item.logic_offset for item in chain) + LOST_OFFSETS)
        is_end_known = len(chain) > 1 and chain[-2] in remaining[-2:]
        if last.bname not in self.forget:
            self._check_leader(queue, last)
            if last.logic_offset == UNDECIDED and not is_end_known:
                leader = msgspec.structs.replace(last, logic_offset=behind_all)
                remaining = (*remaining[:-1], leader)
        elif last.logic_offset == UNDECIDED and is_end_known:
            self.leaderless[queue] = last.gen + 1, UNDECIDED
        else:
            self.leaderless[queue] = last.gen + 1, behind_all
        self.chains[queue] = remaining

    def _check_leader(self, queue: int, leader: MappingItem) -> None:
        there = self.brokers[leader.bname]
        if leader.logic_offset == UNDECIDED:
            if there.is_lost:  # it may have been decided; only a jump keeps offsets from falling
                self.jumping.add(queue)
        elif leader.queue_id >= there.write_queues and not there.is_lost:
            reason = (
                f"{leader.queue_id} is gone on {leader.bname} (a half-done delete, or an empty "
                f"disk): finish with `headrace topic delete {self.topic}`, or give up its messages "
                f"with `headrace topic repair {self.topic} --forget-broker {leader.bname}`"
            )
            raise BadMapping(self.topic, "queueId", reason, queue, leader.gen)

    def _without_forgotten(self, queue: int, chain: Chain) -> Chain:
        """The items that stay; those before a new hole say where they end."""
        for index, item in enumerate(chain):
            if item.bname in self.forget and item.logic_offset != UNDECIDED:
                end = end_of(chain, index)
                known_end = None if end is None else static_offset(item, end)
                self.gone.append(
                    Gone(queue=queue, broker=item.bname, start=item.logic_offset, end=known_end)
                )
        ended = [
            _ended(chain, index) if following.bname in self.forget else item
            for index, (item, following) in enumerate(pairwise(chain))
        ]
        return tuple(item for item in (*ended, chain[-1]) if item.bname not in self.forget)

    def add_missing(self, queue: int, mappings: Collection[TopicMapping]) -> None:
        """A queue of which no broker has the chain gets its first item."""
        if self.forget:
            self.gone.append(Gone(queue=queue, broker=None, start=0, end=None))
            self.leaderless[queue] = 0, round_up(LOST_OFFSETS)
            return
        lost = [name for name, each in self.brokers.items() if each.is_lost]
        if lost:
            reason = (
                f"is lost with the mapping of {lost[0]}: restore config/topicQueueMapping.json "
                f"there from a copy, or give up its messages with `headrace topic repair "
                f"{self.topic} --forget-broker {lost[0]}`"
            )
            raise BadMapping(self.topic, "hostedQueues", reason, queue)
        if not any(mapping.dirty or mapping.total_queues <= queue for mapping in mappings):
            reason = (
                "has no leader on the brokers that are there: start the broker that led it, finish "
                f"a half-done delete with `headrace topic delete {self.topic}`, or name the broker "
                f"in `headrace topic repair {self.topic} --forget-broker BROKER`"
            )
            raise BadMapping(self.topic, "hostedQueues", reason, queue)
        self.leaderless[queue] = 0, 0

    def plan(self, total_queues: int, copies: dict[int, Chain], now_ms: int) -> Plan:
        builder = Builder(
            {queue: chain for queue, chain in self.chains.items() if chain}, self.brokers, copies
        )
        # Nothing keeps two tools from restoring a lost mapping at once, each with other new items.
        there = {name for name, each in self.brokers.items() if not each.is_lost}
        targets = there - {*self.forget}
        for queue, (gen, logic_offset) in self.leaderless.items():
            builder.add(queue, builder.least(targets), logic_offset, gen)
        return builder.plan(
            self.topic,
            Mode.STRICT,
            total_queues,
            now_ms,
            jumping=self.jumping,
            gone=self.gone,
        )


def _ended(chain: Chain, index: int) -> MappingItem:
    """An item that says where it ends, because offsets jump behind it."""
    end = end_of(chain, index)
    item = chain[index]
    if end is None or end <= item.start_offset:
        return item
    return msgspec.structs.replace(item, end_offset=end)
