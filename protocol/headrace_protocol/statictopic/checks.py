"""Checks of mappings, made by brokers before they store one and by tools before they change one.

Source: docs/static-topics.md "What a broker accepts"; tests/protocol/test_statictopic_checks.py.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from headrace_protocol.bounds import QUEUE_NUMS_MAX, OutOfBounds, check_name
from headrace_protocol.errors import PortableError
from headrace_protocol.statictopic.mapping import UNDECIDED, MappingItem
from headrace_protocol.statictopic.offsets import max_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from headrace_protocol.statictopic.mapping import Chain, TopicMapping

# Far above any offset, and sums of two still fit 64 bits.
OFFSET_MAX = 2**61
# How far ahead of a broker's clock an epoch may be. Each change adds a second at least.
EPOCH_AHEAD_MS = 24 * 3_600_000
# Fields of an item that never change, and those that may be decided once.
_FIXED = ("bname", "queue_id", "start_offset")
_DECIDED_ONCE = ("logic_offset", "end_offset", "time_of_start", "time_of_end")


class BadMapping(PortableError, ValueError):
    """A mapping that is refused.

    topic, queue, gen: the place; queue and gen are None if the whole mapping is wrong.
    field: the wire name of the wrong field, e.g. "logicOffset".
    """

    def __init__(
        self, topic: str, field: str, reason: str, queue: int | None = None, gen: int | None = None
    ) -> None:
        place = f"static topic {topic}"
        if queue is not None:
            place += f", queue {queue}"
        if gen is not None:
            place += f", gen {gen}"
        super().__init__(f"{place}: {field} {reason}")
        self.topic = topic
        self.queue = queue
        self.gen = gen
        self.field = field


# -- one mapping -----------------------------------------------------------------------------------


def check_detail(mapping: TopicMapping, broker: str | None = None) -> None:
    """Check a mapping in itself. Raises BadMapping.

    broker: the broker that is to store it.
    """
    topic = mapping.topic
    _check_names(mapping)
    if broker is not None and mapping.bname != broker:
        raise BadMapping(
            topic,
            "bname",
            f"{mapping.bname} is not this broker, {broker}: the mapping belongs to another broker "
            "(a copied file, or a changed brokerName)",
        )
    if not 1 <= mapping.total_queues <= QUEUE_NUMS_MAX:
        raise BadMapping(
            topic, "totalQueues", f"{mapping.total_queues}, expected 1 to {QUEUE_NUMS_MAX}"
        )
    if mapping.epoch < 0:
        raise BadMapping(topic, "epoch", f"{mapping.epoch} is negative")
    for queue, chain in mapping.hosted.items():
        if not 0 <= queue < mapping.total_queues:
            raise BadMapping(
                topic,
                "hostedQueues",
                f"has a queue beyond totalQueues {mapping.total_queues}",
                queue,
            )
        check_chain(topic, queue, chain)
    check_reuse(topic, mapping.hosted)


def _check_names(mapping: TopicMapping) -> None:
    names = {"topic": mapping.topic, "bname": mapping.bname, "scope": mapping.scope}
    for field, name in names.items():
        try:
            check_name(field, name)
        except OutOfBounds as error:
            raise BadMapping(mapping.topic[:255], field, str(error)) from error


def check_chain(topic: str, queue: int, chain: Chain) -> None:
    """Check the items of a logic queue. Raises BadMapping."""
    if not chain:
        raise BadMapping(topic, "hostedQueues", "has no item", queue)
    for item in chain:
        _check_item(topic, queue, item)
    for before, item in pairwise(chain):
        _check_order(topic, queue, before, item)


def _check_item(topic: str, queue: int, item: MappingItem) -> None:
    def bad(field: str, reason: str) -> BadMapping:
        return BadMapping(topic, field, reason, queue, item.gen)

    if item.gen < 0:
        raise bad("gen", "is negative")
    if not item.bname:
        raise bad("bname", "is empty")
    if not 0 <= item.queue_id < QUEUE_NUMS_MAX:
        raise bad("queueId", f"{item.queue_id}, expected 0 to {QUEUE_NUMS_MAX - 1}")
    if not 0 <= item.start_offset <= OFFSET_MAX:
        raise bad("startOffset", f"{item.start_offset}, expected 0 to {OFFSET_MAX}")
    if not UNDECIDED <= item.logic_offset <= OFFSET_MAX:
        raise bad("logicOffset", f"{item.logic_offset}, expected -1 to {OFFSET_MAX}")
    if item.end_offset != UNDECIDED and not item.start_offset <= item.end_offset <= OFFSET_MAX:
        raise bad("endOffset", f"{item.end_offset}, expected -1 or startOffset to {OFFSET_MAX}")
    for field, time in (("timeOfStart", item.time_of_start), ("timeOfEnd", item.time_of_end)):
        if time < UNDECIDED:
            raise bad(field, f"{time} is negative")


def _check_order(topic: str, queue: int, before: MappingItem, item: MappingItem) -> None:
    if item.gen <= before.gen:
        raise BadMapping(topic, "gen", f"does not ascend: it follows {before.gen}", queue, item.gen)
    if before.logic_offset < 0:
        raise BadMapping(
            topic, "logicOffset", "is undecided, but the item is not the last", queue, before.gen
        )
    if item.logic_offset == UNDECIDED:
        return
    if item.logic_offset <= before.logic_offset:
        reason = f"{item.logic_offset} does not ascend: it follows {before.logic_offset}"
        raise BadMapping(topic, "logicOffset", reason, queue, item.gen)
    # Apache's brokers and tools reject an item that ends exactly where the next one starts.
    if max_of(before) >= item.logic_offset:
        reason = (
            f"{before.end_offset} reaches the next item, which starts at static offset "
            f"{item.logic_offset}; endOffset is only written before a jump"
        )
        raise BadMapping(topic, "endOffset", reason, queue, before.gen)


def check_reuse(topic: str, chains: Mapping[int, Chain]) -> None:
    """No physical queue occurs twice. Raises BadMapping."""
    used: dict[tuple[str, int], int] = {}
    for queue, chain in chains.items():
        for item in chain:
            place = item.bname, item.queue_id
            if place in used:
                reason = (
                    f"{item.queue_id} on {item.bname} is used twice, first by queue {used[place]}"
                )
                raise BadMapping(topic, "queueId", reason, queue, item.gen)
            used[place] = queue


def check_epoch(mapping: TopicMapping, old_epoch: int, now_ms: int) -> None:
    """The epoch is not from the far future, where no later one could replace it."""
    latest = max(old_epoch, now_ms) + EPOCH_AHEAD_MS
    if mapping.epoch > latest:
        raise BadMapping(
            mapping.topic,
            "epoch",
            f"{mapping.epoch} is more than a day ahead of this broker's clock, {now_ms}: "
            "check the clocks of the tool and of the broker",
        )


# -- a change --------------------------------------------------------------------------------------


def check_change(old: TopicMapping | None, new: TopicMapping, *, force: bool) -> TopicMapping:
    """Check the replacement of a broker's mapping; returns the mapping to store.

    Queues missing in ``new`` are kept, and so are those whose chain is older there, and decided
    fields that it leaves undecided.
    force: replace whatever the broker has; what is missing is kept all the same.

    Raises BadMapping. A dropped item may still have messages: see ``dropped``.
    """
    if old is None:
        return new
    if new.scope != old.scope:
        raise BadMapping(new.topic, "scope", f"{new.scope} differs from {old.scope}")
    if not force:
        _check_versions(old, new)
    hosted = dict(old.hosted)
    for queue, chain in new.hosted.items():
        known = old.hosted.get(queue)
        if known and not force:
            if new.epoch == old.epoch:
                _check_same_leader(new.topic, queue, known, chain)
            # Apache's tools send a former leader the chain as it was when it led.
            is_older = chain[-1].gen < known[-1].gen
            hosted[queue] = known if is_older else _merged(new.topic, queue, known, chain)
        else:
            hosted[queue] = chain
    stored = msgspec.structs.replace(new, hosted=hosted)
    check_detail(stored)
    return stored


def _check_versions(old: TopicMapping, new: TopicMapping) -> None:
    if new.total_queues < old.total_queues:
        reason = f"{new.total_queues} is less than {old.total_queues}: queues are only added"
        raise BadMapping(new.topic, "totalQueues", reason)
    if new.epoch < old.epoch:
        raise BadMapping(
            new.topic,
            "epoch",
            f"{new.epoch} is older than {old.epoch}: another tool has changed the topic; "
            "read its mapping again",
        )
    if new.epoch == old.epoch and (missing := sorted(old.hosted.keys() - new.hosted.keys())):
        raise BadMapping(
            new.topic, "hostedQueues", "lacks the queue, and the epoch is unchanged", missing[0]
        )


def _merged(topic: str, queue: int, old: Chain, new: Chain) -> Chain:
    """The new chain, with decided fields from the old one. Raises BadMapping if they changed."""
    known = {item.gen: item for item in old}
    merged = []
    for item in new:
        before = known.pop(item.gen, None)
        merged.append(item if before is None else _merged_item(topic, queue, before, item))
    for gen, item in known.items():
        if gen > new[0].gen and item.logic_offset != UNDECIDED:
            _check_covered(topic, queue, item, new)
    return tuple(merged)


def _merged_item(topic: str, queue: int, old: MappingItem, new: MappingItem) -> MappingItem:
    kept = {}
    for field in _FIXED + _DECIDED_ONCE:
        before, after = getattr(old, field), getattr(new, field)
        if before == after or (field in _DECIDED_ONCE and before == UNDECIDED):
            continue
        if field in _FIXED or after != UNDECIDED:
            name = _WIRE_NAMES[field]
            raise BadMapping(topic, name, f"changes from {before} to {after}", queue, new.gen)
        kept[field] = before
    return msgspec.structs.replace(new, **kept) if kept else new


def _check_covered(topic: str, queue: int, item: MappingItem, new: Chain) -> None:
    """An item that is dropped from the middle or the end had no room for messages."""
    following = next((other for other in new if other.gen > item.gen), None)
    if following is None or following.logic_offset != item.logic_offset:
        raise BadMapping(topic, "gen", "is missing, and it holds static offsets", queue, item.gen)


_WIRE_NAMES = dict(
    zip(MappingItem.__struct_fields__, MappingItem.__struct_encode_fields__, strict=True)
)


def _check_same_leader(topic: str, queue: int, old: Chain, new: Chain) -> None:
    if new[-1].gen != old[-1].gen:
        reason = f"is the new leader, after gen {old[-1].gen}, and the epoch is unchanged"
        raise BadMapping(topic, "gen", reason, queue, new[-1].gen)


def dropped(old: TopicMapping, stored: TopicMapping) -> list[tuple[int, MappingItem]]:
    """Logic queue and item of all items that a change drops."""
    return [
        (queue, item)
        for queue, chain in old.hosted.items()
        for item in chain
        if all(item.gen != kept.gen for kept in stored.hosted[queue])
    ]


# -- a cluster -------------------------------------------------------------------------------------


def chains_of(mappings: Iterable[TopicMapping]) -> dict[int, Chain]:
    """The chain of each logic queue, from its leader. Raises BadMapping if two brokers lead one."""
    chains: dict[int, Chain] = {}
    for mapping in mappings:
        for queue in mapping.led():
            if queue in chains:
                names = f"{chains[queue][-1].bname} and {mapping.bname}"
                raise BadMapping(mapping.topic, "hostedQueues", f"is led by {names}", queue)
            chains[queue] = mapping.hosted[queue]
    return dict(sorted(chains.items()))


def check_cluster(mappings: Iterable[TopicMapping]) -> dict[int, Chain]:
    """Check that the mappings of all masters form a whole topic; returns its chains.

    mappings: of all masters that have one: a broker that joined later has none, and leads nothing.
    Raises BadMapping.
    """
    known = [*mappings]
    for mapping in known:
        check_detail(mapping)
        if mapping.dirty:
            raise _half_done(mapping.topic, "dirty", f"is set on {mapping.bname}:")
        for field, name in _CLUSTER_NAMES.items():
            ours, theirs = getattr(mapping, field), getattr(known[0], field)
            if ours != theirs:
                reason = f"is {ours} on {mapping.bname} and {theirs} on {known[0].bname}:"
                raise _half_done(known[0].topic, name, reason)
    chains = chains_of(known)
    for queue in range(known[0].total_queues if known else 0):
        if queue not in chains:
            reason = "has no leader on the brokers that are there: one is away, or"
            raise _half_done(known[0].topic, "hostedQueues", reason, queue)
        if chains[queue][-1].logic_offset < 0:
            last = chains[queue][-1]
            raise _half_done(known[0].topic, "logicOffset", "is undecided:", queue, last.gen)
    if known:
        check_reuse(known[0].topic, chains)
    return chains


_CLUSTER_NAMES = {
    "topic": "topic",
    "scope": "scope",
    "epoch": "epoch",
    "total_queues": "totalQueues",
}


def _half_done(
    topic: str, field: str, reason: str, queue: int | None = None, gen: int | None = None
) -> BadMapping:
    remedy = f" a change was left half done; run headrace topic repair {topic}"
    return BadMapping(topic, field, reason + remedy, queue, gen)
