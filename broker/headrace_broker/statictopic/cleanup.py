"""Removal of items whose data has expired, and of chains that this broker no longer needs.

The leader of a queue and the one before it keep its chain. Both drop the earliest items once their
data has expired; the others drop the chain. Nothing is dropped while its data exists, while its
broker does not answer, or while messages wait here that name its physical queue.

Source: docs/static-topics.md "Clean-up"; tests/broker/statictopic/test_static_cleanup.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import structlog
import trio

from headrace_broker.inner.waiting import when_ready
from headrace_broker.peers.callers import CLEANUP
from headrace_broker.peers.peers import Ask
from headrace_daemon.slices import Breaks
from headrace_protocol.bodies import TopicConfigAndQueueMapping, TopicStatsTable
from headrace_protocol.codes import RequestCode
from headrace_protocol.drivers.errors import HeadraceError
from headrace_protocol.errors import NotReady, RequestError
from headrace_protocol.statictopic.checks import BadMapping, check_detail
from headrace_protocol.statictopic.offsets import decided

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from headrace_broker.consumer.unconsumed import InnerConsumer
    from headrace_broker.peers.peers import Peers
    from headrace_broker.queue_directory import Source
    from headrace_broker.statictopic.left_groups import LeftGroups
    from headrace_broker.statictopic.table import MappingTable
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_protocol.drivers.response import Response
    from headrace_protocol.statictopic.mapping import Chain, MappingItem, TopicMapping

log = structlog.get_logger("headrace.broker")

_PERIOD_S: Final = 300.0
# A leader and the one before it.
_KEEPERS: Final = 2
# Moves of a queue that a broker may have missed.
_HOPS_MAX: Final = 8

# Raises RequestError, NotReady.
FindSource = Callable[[str, int], "Source | None"]

# The offset of the oldest message of a physical queue, and the end.
Extent = tuple[int, int]


class MappingCleanup:
    """Drops what is expired from the mappings, every five minutes."""

    def __init__(
        self,
        table: MappingTable,
        store: MessageStore,
        peers: Peers,
        is_changing: Callable[[str], bool],
        waiting: Callable[[], Iterable[InnerConsumer]],
        left_groups: LeftGroups,
        find_source: FindSource,
    ) -> None:
        """is_changing: whether a change of a topic's mapping is under way.

        waiting: returns the services that messages in system topics wait for.
        find_source: what reads a physical queue of this broker, in all its tiers.
        """
        self._find_source = find_source
        self._left_groups = left_groups
        self._waiting = waiting
        self._table = table
        self._store = store
        self._peers = peers
        self._is_changing = is_changing

    async def run(self) -> None:
        """Clean up at intervals until cancelled."""
        while True:
            await trio.sleep(_PERIOD_S)
            await self.clean()

    async def clean(self) -> None:
        """Look at all mappings once."""
        for mapping in self._table.all():
            await self._clean_topic(mapping)
            await trio.lowlevel.checkpoint()

    async def _clean_topic(self, mapping: TopicMapping) -> None:
        others = _Others(self._peers, mapping.topic)
        look = _Look(mapping, others, self._oldest_waiting())
        kept: dict[int, Chain] = {}
        dropped, breaks = 0, Breaks()
        for queue in sorted(mapping.hosted):
            chain = tuple(mapping.chain(queue) or ())
            needed = await self._rest(look, queue, chain)
            dropped += len(chain) - len(needed)
            if needed:
                kept[queue] = needed
            await breaks.take()
        if not dropped:
            return
        rest = await trio.to_thread.run_sync(_with_chains, mapping, kept)
        # Another change may have come meanwhile; the next round looks at its outcome.
        is_current = self._table.get(mapping.topic) is mapping
        if is_current and not self._is_changing(mapping.topic):
            self._table.put(rest)
            log.info("items of a static topic dropped", topic=mapping.topic, items=dropped)

    async def _rest(self, look: _Look, queue: int, chain: Chain) -> Chain:
        """The part of a chain that is still needed here."""
        mapping = look.mapping
        if not await self._is_keeper(mapping.bname, queue, chain, look.others):
            for item in chain:
                if item.bname == mapping.bname and not await self._is_over(look, item):
                    return chain
            return ()
        at = 0
        # A queue whose leader is undecided has no other item to begin with.
        last = len(decided(chain)) - 1
        while at < last and await self._is_over(look, chain[at]):
            # The leader knows all items in which a group may have an offset.
            if chain[-1].bname == mapping.bname and not await self._left_groups.move(
                mapping.topic, chain[at : last + 1]
            ):
                break
            at += 1
        return chain[at:]

    async def _is_keeper(self, ours: str, queue: int, chain: Chain, others: _Others) -> bool:
        """True if this broker is one of the last two leaders, as far as it can find out.

        Later moves do not reach a broker that has no part in them, so the leaders are followed.
        """
        for _ in range(_HOPS_MAX):
            leader = chain[-1].bname
            if ours not in {item.bname for item in chain[-_KEEPERS:]}:
                return False
            if leader == ours:
                return True
            known = await others.chain(leader, queue)
            if known is None or known[-1].gen <= chain[-1].gen:
                return True
            chain = known
        return True

    async def _is_over(self, look: _Look, item: MappingItem) -> bool:
        """True if an item has no data, and nothing that waits here names its physical queue."""
        if item.bname != look.mapping.bname:
            extent = await look.others.extent(item)
        elif look.is_settled(item):
            extent = await self._extent_here(look.mapping.topic, item.queue_id)
        else:
            return False
        # A shorter queue is that of a broker that has lost its store.
        return extent is not None and extent[0] >= extent[1] >= item.end_offset

    async def _extent_here(self, topic: str, queue_id: int) -> Extent | None:
        """The extent of a physical queue here; None while its messages can't be looked for."""
        queue = self._store.find_queue(topic, queue_id)
        if queue is None:
            return 0, 0

        def extent() -> Extent | None:
            source = self._find_source(topic, queue_id)
            return (source.min_offset(), queue.next_offset) if source else None

        try:
            return await when_ready(extent)
        except (OSError, RequestError):
            return None

    def _oldest_waiting(self) -> int | None:
        """Store time of the oldest message that waits for the broker; 0 if it is not known."""
        times: list[int] = []
        for consumer in self._waiting():
            for queue in self._store.queues_of(consumer.topic):
                offset = consumer.next_offset(queue.queue_id)
                if offset is not None and offset < queue.next_offset:
                    times.append(self._store_time(queue, offset))
        return min(times, default=None)

    def _store_time(self, queue: StoreQueue, offset: int) -> int:
        try:
            return self._store.source(queue).store_time_at(offset) or 0
        except NotReady:
            return 0


def _with_chains(mapping: TopicMapping, hosted: dict[int, Chain]) -> TopicMapping:
    return msgspec.structs.replace(mapping, hosted=hosted)


class _Look(NamedTuple):
    """One look at a topic.

    oldest_waiting: see ``MappingCleanup``; later messages can't name an item that has ended.
    """

    mapping: TopicMapping
    others: _Others
    oldest_waiting: int | None

    def is_settled(self, item: MappingItem) -> bool:
        """True if no message waits here that may name the item's physical queue."""
        oldest = self.oldest_waiting
        return oldest is None or 0 <= item.time_of_end < oldest


class _Others:
    """The topic on other brokers; asks each once, and takes no answer for nothing."""

    def __init__(self, peers: Peers, topic: str) -> None:
        self._peers = peers
        self._topic = topic
        self._extents: dict[str, dict[int, Extent]] = {}
        self._mappings: dict[str, TopicMapping | None] = {}

    async def extent(self, item: MappingItem) -> Extent | None:
        """The extent of an item's physical queue; None if it is not known."""
        if item.bname not in self._extents:
            self._extents[item.bname] = await self._ask_extents(item.bname)
        return self._extents[item.bname].get(item.queue_id)

    async def chain(self, broker: str, queue: int) -> Chain | None:
        """The chain of a logic queue that a broker has; None if it is not known."""
        if broker not in self._mappings:
            self._mappings[broker] = await self._ask_mapping(broker)
        mapping = self._mappings[broker]
        return mapping.hosted.get(queue) or None if mapping is not None else None

    async def _ask_extents(self, broker: str) -> dict[int, Extent]:
        try:
            response = await self._ask(broker, RequestCode.GET_TOPIC_STATS_INFO, {"lo": "false"})
            return await trio.to_thread.run_sync(_extents, response)
        except HeadraceError:
            return {}

    async def _ask_mapping(self, broker: str) -> TopicMapping | None:
        try:
            response = await self._ask(broker, RequestCode.GET_TOPIC_CONFIG, {"lo": "true"})
            return await trio.to_thread.run_sync(_mapping, response, broker)
        except (HeadraceError, BadMapping):
            return None

    async def _ask(self, broker: str, code: RequestCode, fields: Mapping[str, str]) -> Response:
        """A successful answer. Raises HeadraceError."""
        ask = Ask(broker, code, {"topic": self._topic, **fields})
        return (await self._peers.ask(CLEANUP, ask)).expect()


# In threads: answers about thousands of queues take long to decode.


def _extents(response: Response) -> dict[int, Extent]:
    rows = response.decode(TopicStatsTable).offset_table
    return {queue.queue_id: (row.min_offset, row.max_offset) for queue, row in rows.items()}


def _mapping(response: Response, broker: str) -> TopicMapping | None:
    mapping = response.decode(TopicConfigAndQueueMapping).mapping_detail
    if mapping is not None:
        check_detail(mapping, broker)
    return mapping
