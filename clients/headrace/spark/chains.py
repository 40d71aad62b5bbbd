"""The physical queues behind the queues of static topics, and the messages in each.

The chains come from the queues' leaders. Their bounds are asked by physical queue, because while a
leader's offsets are undecided, Apache RocketMQ's brokers answer for the wrong queue. The items of a
broker that is away have bounds as far as their chains tell; ``require_up`` decides about them.
Source: docs/static-topics.md "Offsets"; tests/spark/test_static_topics.py.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from headrace.errors import NoQueue
from headrace.missing import MissingPart
from headrace.whole import require_whole
from headrace_protocol.admin_headers import GetTopicConfigHeader
from headrace_protocol.bodies import MessageQueue, TopicConfigAndQueueMapping
from headrace_protocol.codes import RequestCode
from headrace_protocol.headers import (
    GetMaxOffsetHeader,
    GetMinOffsetHeader,
    SearchOffsetHeader,
)
from headrace_protocol.statictopic import offsets
from headrace_protocol.statictopic.mapping import logic_broker_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from headrace.spark.connections import Connections
    from headrace_protocol.headers import QueueHeader
    from headrace_protocol.statictopic.mapping import Chain, MappingItem, TopicMapping

_log = logging.getLogger("headrace.spark")


class Item(NamedTuple):
    """Messages of a queue that lie together in one physical queue.

    physical: the queue there, whose offsets are less by ``delta``. address: of its broker; "" while
    that one is away.
    start, end: offsets of the first message, and behind the last one.
    """

    physical: MessageQueue
    address: str
    delta: int
    start: int
    end: int

    def part(self, start: int, end: int) -> Item:
        """The messages with offsets from ``start`` up to ``end``; perhaps none."""
        start = max(start, self.start)
        return self._replace(start=start, end=max(start, min(end, self.end)))

    @property
    def message_count(self) -> int:
        """The number of messages; the offsets in between have no gaps."""
        return self.end - self.start


# Readable queue -> address of its broker.
Queues = dict[MessageQueue, str]
Items = dict[MessageQueue, list[Item]]


def is_static(queue: MessageQueue) -> bool:
    """True for a queue of a static topic."""
    return queue.broker_name == logic_broker_name()


class Chains:
    """Reads chains and their bounds. Not thread-safe."""

    def __init__(self, connections: Connections, masters: Callable[[], Mapping[str, str]]) -> None:
        self._connections = connections
        self._masters = masters
        # Of closed items, which never change.
        self._ends: dict[MessageQueue, int] = {}

    def items(self, queues: Queues) -> Items:
        """All messages of each queue of static topics, in order; at least one item each.

        Raises NoQueue while the chain of a queue is about to change.
        """
        chains = self._chains(queues)
        masters = self._masters()
        addresses = {
            _physical(queue, item): masters[item.bname]
            for queue, chain in chains.items()
            for item in chain
            if item.bname in masters
        }
        firsts = {_physical(queue, chain[0]) for queue, chain in chains.items()} & addresses.keys()
        mins = self._offsets(firsts, addresses, RequestCode.GET_MIN_OFFSET, GetMinOffsetHeader)
        ends = self._physical_ends(chains, addresses)
        return {
            queue: _items(queue, chain, addresses, mins.get(_physical(queue, chain[0]), 0), ends)
            for queue, chain in chains.items()
        }

    def offsets_at(
        self, queues: Queues, timestamp_ms: int, *, allow_partial: bool
    ) -> dict[MessageQueue, int]:
        """See ``Cluster.offsets_at``."""
        items = require_up(self.items(queues), allow_partial=allow_partial)
        addresses = {item.physical: item.address for some in items.values() for item in some}
        header = partial(SearchOffsetHeader, timestamp=timestamp_ms)
        code = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
        found = self._offsets(addresses, addresses, code, header)
        return {
            queue: next(
                (at for item in some if (at := found[item.physical] + item.delta) < item.end),
                some[-1].end,
            )
            for queue, some in items.items()
        }

    def _chains(self, queues: Queues) -> dict[MessageQueue, Chain]:
        """The decided items of each queue, from its leader."""
        asked = {(queue.topic, address) for queue, address in queues.items()}
        answers = self._connections.ask_each(
            {
                where: (
                    RequestCode.GET_TOPIC_CONFIG,
                    GetTopicConfigHeader(topic=where[0], logical=True),
                    b"",
                )
                for where in asked
            },
            {where: where[1] for where in asked},
        )
        mappings = {
            where: answer.expect().decode(TopicConfigAndQueueMapping).mapping_detail
            for where, answer in answers.items()
        }
        return {
            queue: _led(queue, mappings[queue.topic, address]) for queue, address in queues.items()
        }

    def _physical_ends(
        self, chains: Mapping[MessageQueue, Chain], addresses: Queues
    ) -> dict[MessageQueue, int]:
        """The physical end of each item; those of brokers that are away only if asked before."""
        unknown = addresses.keys() - self._ends.keys()
        asked = self._offsets(unknown, addresses, RequestCode.GET_MAX_OFFSET, GetMaxOffsetHeader)
        for queue, chain in chains.items():
            for item in chain[:-1]:
                if (physical := _physical(queue, item)) in asked:
                    self._ends.setdefault(physical, asked[physical])
        return self._ends | asked

    def _offsets(
        self,
        asked: Iterable[MessageQueue],
        addresses: Queues,
        code: int,
        header: Callable[..., QueueHeader],
    ) -> dict[MessageQueue, int]:
        """As ``Connections.offsets``, of physical queues."""
        queues = {physical: addresses[physical] for physical in asked}
        return self._connections.offsets(queues, code, partial(header, logical=False))


def require_up(items: Items, *, allow_partial: bool) -> Items:
    """The items whose brokers are up. Raises NoQueue if there are others.

    allow_partial: log the others instead.
    """
    away: dict[tuple[str, str], list[int]] = defaultdict(list)
    for queue, some in items.items():
        for item in some:
            if not item.address:
                away[queue.topic, item.physical.broker_name].append(queue.queue_id)
    for (topic, broker), queue_ids in sorted(away.items()):
        if not allow_partial:
            raise _away(topic, broker, queue_ids[0])
        part = MissingPart(broker, sorted(set(queue_ids)), "has some of their messages and is away")
        require_whole(topic, [part], allow_partial=True, warn=_log.warning)
    return {queue: [item for item in some if item.address] for queue, some in items.items()}


def _away(topic: str, broker: str, queue_id: int) -> NoQueue:
    reason = f"it has messages of queue {queue_id} and is not up"
    return NoQueue(topic, f"read on broker {broker}", reason)


def _led(queue: MessageQueue, mapping: TopicMapping | None) -> Chain:
    """The decided items of a queue at its leader. Raises NoQueue."""
    chain = mapping.hosted.get(queue.queue_id, ()) if mapping else ()
    if not mapping or not chain or chain[-1].bname != mapping.bname:
        reason = "its leader has just moved; the next route names the new one"
        raise NoQueue(queue.topic, f"read at queue {queue.queue_id}", reason)
    if items := tuple(offsets.decided(chain)):
        return items
    reason = "its offsets are undecided until a change of the topic ends"
    raise NoQueue(queue.topic, f"read at queue {queue.queue_id}", reason)


def _items(
    queue: MessageQueue,
    chain: Chain,
    addresses: Queues,
    first_physical: int,
    ends: Mapping[MessageQueue, int],
) -> list[Item]:
    """first_physical: physical offset of the first item's oldest message."""
    items = []
    for index, item in enumerate(chain):
        physical = _physical(queue, item)
        end = ends.get(physical, offsets.end_of(chain, index))
        if end is None:
            raise _away(queue.topic, item.bname, queue.queue_id)
        extent = offsets.extent_of(chain, index, first_physical if index == 0 else 0, end)
        items.append(
            Item(physical, addresses.get(physical, ""), offsets.offset_delta(item), *extent)
        )
    return items


def _physical(queue: MessageQueue, item: MappingItem) -> MessageQueue:
    return MessageQueue(queue.topic, item.bname, item.queue_id)
