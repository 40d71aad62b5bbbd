"""Checks of new mappings, and what this broker adds to them. No state is changed here.

Source: docs/static-topics.md "What a broker accepts";
tests/broker/statictopic/test_static_changes.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from headrace_broker.topics.attributes import is_compacted
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.statictopic.checks import (
    BadMapping,
    check_change,
    check_detail,
    check_epoch,
    dropped,
)
from headrace_protocol.statictopic.mapping import UNDECIDED, decode_detail, decode_emptied
from headrace_protocol.statictopic.offsets import static_offset

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_protocol.admin_headers import CreateStaticTopicHeader
    from headrace_protocol.bodies import TopicConfig
    from headrace_protocol.fastjson import Buffer
    from headrace_protocol.statictopic.mapping import Chain, MappingItem, TopicMapping


class Accepted(NamedTuple):
    """A mapping to store.

    closed: logic queues that this broker leads and will no longer lead, with the physical queue.
    opened: logic queues that it will lead from now on. begun: these, and those that it leads
    already without a start. new: physical queues of which this broker has had none. emptied: begun
    queue -> empty item that left the chain.
    """

    mapping: TopicMapping
    closed: dict[int, int]
    opened: tuple[int, ...]
    begun: frozenset[int]
    new: tuple[int, ...]
    emptied: dict[int, MappingItem]


class Situation(NamedTuple):
    """The state of a topic at this broker before a change.

    old: None for a topic without a usable mapping. config: None if the topic does not exist.
    range_of: the offset of the oldest message of one of its physical queues, and of the end.
    """

    broker_name: str
    old: TopicMapping | None
    config: TopicConfig | None
    range_of: Callable[[int], tuple[int, int]]
    now_ms: int


def accept(header: CreateStaticTopicHeader, body: Buffer, found: Situation) -> Accepted:
    """Check the request 513. Raises RequestError, MalformedJson."""
    try:
        new = decode_detail(body)
        _check_topic(header, new)
        check_detail(new, found.broker_name)
        old = found.old
        check_epoch(new, old.epoch if old else 0, found.now_ms)
        stored = check_change(old, new, force=bool(header.force))
        _check_read_epoch(header, old)
        _check_keys(header, found.config, old, stored)
        _check_queues(header, found, old, stored)
        _check_dropped(found, old, stored)
    except BadMapping as error:
        raise RequestError(ResponseCode.INVALID_PARAMETER, str(error)) from error
    emptied = decode_emptied(body)
    return _accepted(old, _completed(old, stored, found), emptied, found)


def _check_topic(header: CreateStaticTopicHeader, new: TopicMapping) -> None:
    if new.topic != header.topic:
        raise BadMapping(new.topic, "topic", f"differs from the request's, {header.topic}")


def _check_read_epoch(header: CreateStaticTopicHeader, old: TopicMapping | None) -> None:
    """Raise BadMapping if another tool has changed the topic since this one read it.

    It may have sent the same mapping: of two tools with one plan, one must fail all the same.
    """
    epoch = old.epoch if old else 0
    if header.read_epoch not in {None, epoch}:
        reason = f"was {header.read_epoch} when the tool read it, and is {epoch} now"
        raise BadMapping(
            header.topic, "epoch", f"{reason}: another tool changes the topic; run it again"
        )


def _check_keys(
    header: CreateStaticTopicHeader,
    config: TopicConfig | None,
    old: TopicMapping | None,
    stored: TopicMapping,
) -> None:
    """Raise BadMapping if Apache's tool gives a compacted topic another number of queues.

    headrace's tool does that only if its user forces it; it names the epoch that it has read.
    """
    is_checked = header.read_epoch is not None
    is_same = old is None or old.total_queues == stored.total_queues
    if not (is_same or is_checked) and config is not None and is_compacted(config):
        reason = "of a compacted topic can't change, since keys would go to other queues while "
        reason += "their old values stay: create another topic, or run `headrace topic create "
        reason += f"{stored.topic} --static --queues {stored.total_queues} --force`"
        raise BadMapping(stored.topic, "totalQueues", reason)


def _check_queues(
    header: CreateStaticTopicHeader,
    found: Situation,
    old: TopicMapping | None,
    stored: TopicMapping,
) -> None:
    """Every physical queue exists after the change, and none is used again. Raises BadMapping."""
    config, topic, used = found.config, stored.topic, 0
    if config is not None:
        used = config.write_queue_nums
        for field, count, least in (
            ("readQueueNums", header.read_queue_nums, config.read_queue_nums),
            ("writeQueueNums", header.write_queue_nums, config.write_queue_nums),
        ):
            if count < least:
                raise BadMapping(
                    topic, field, f"{count} is less than the {least} that the topic has here"
                )
    known = {(queue, item.gen) for queue, item in _own_items(old)} if old else set()
    for queue, item in _own_items(stored):
        if item.queue_id >= min(header.write_queue_nums, header.read_queue_nums):
            reason = f"{item.queue_id} is beyond the topic's {header.write_queue_nums} write and "
            reason += f"{header.read_queue_nums} read queues"
            raise BadMapping(topic, "queueId", reason, queue, item.gen)
        # Clean-up may have dropped a closed item here that the other brokers still have.
        is_leader = item is stored.hosted[queue][-1]
        is_new = old is not None and (queue, item.gen) not in known
        if is_leader and is_new and item.queue_id < used:
            reason = f"{item.queue_id} was used before: the next one is {used}"
            raise BadMapping(topic, "queueId", reason, queue, item.gen)


def _check_dropped(found: Situation, old: TopicMapping | None, stored: TopicMapping) -> None:
    """Raise BadMapping if the change drops one of this broker's queues that has messages."""
    if old is None:
        return
    for queue, item in dropped(old, stored):
        begin, end = found.range_of(item.queue_id) if item.bname == found.broker_name else (0, 0)
        if begin < end:
            reason = f"is missing, and physical queue {item.queue_id} has {end - begin} messages"
            raise BadMapping(stored.topic, "gen", reason, queue, item.gen)


def _own_items(mapping: TopicMapping) -> list[tuple[int, MappingItem]]:
    return [
        (queue, item)
        for queue, chain in mapping.hosted.items()
        for item in chain
        if item.bname == mapping.bname
    ]


# -- what the broker adds --------------------------------------------------------------------------


def _accepted(
    old: TopicMapping | None,
    stored: TopicMapping,
    emptied: dict[int, MappingItem],
    found: Situation,
) -> Accepted:
    before = old.led() if old else {}
    after = stored.led()
    opened = {queue: at for queue, at in after.items() if before.get(queue) != at}
    undecided = {queue for queue in before if old and _is_undecided(old.hosted[queue])}
    begun = frozenset(opened.keys() | undecided & after.keys())
    known = found.config.write_queue_nums if found.config else 0
    return Accepted(
        stored,
        closed={queue: at for queue, at in before.items() if after.get(queue) != at},
        opened=tuple(opened),
        begun=begun,
        new=tuple(at for at in opened.values() if at >= known),
        emptied={queue: item for queue, item in emptied.items() if queue in begun},
    )


def _is_undecided(chain: Chain) -> bool:
    return chain[-1].logic_offset == UNDECIDED


def _completed(old: TopicMapping | None, stored: TopicMapping, found: Situation) -> TopicMapping:
    """The mapping with the times of its changes, and the ends of items before a jump."""
    before = old.led() if old else {}
    hosted = {
        queue: _completed_chain(chain, before.get(queue), found)
        for queue, chain in sorted(stored.hosted.items())
    }
    return msgspec.structs.replace(stored, hosted=hosted)


def _completed_chain(chain: Chain, led: int | None, found: Situation) -> Chain:
    """led: the physical queue here that was the leader before the change."""
    ours = found.broker_name
    completed = list(chain)
    for number, item in enumerate(chain):
        if item.bname != ours:
            continue
        if number < len(chain) - 1:
            completed[number] = _closed(item, chain[number + 1], led, found)
        elif item.time_of_start == UNDECIDED and item.queue_id != led:
            completed[number] = msgspec.structs.replace(item, time_of_start=found.now_ms)
    return tuple(completed)


def _closed(
    item: MappingItem, following: MappingItem, led: int | None, found: Situation
) -> MappingItem:
    if item.time_of_end == UNDECIDED and item.queue_id == led:
        item = msgspec.structs.replace(item, time_of_end=found.now_ms)
    is_open = item.queue_id == led or following.logic_offset == UNDECIDED
    if is_open or item.end_offset != UNDECIDED:
        return item
    _, end = found.range_of(item.queue_id)
    # Apache's brokers and tools reject an end that meets the next item.
    if item.start_offset < end and static_offset(item, end) < following.logic_offset:
        return msgspec.structs.replace(item, end_offset=end)
    return item
