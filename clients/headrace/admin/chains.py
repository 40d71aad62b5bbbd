"""Static topics as their brokers have them: mappings, and the messages of each physical queue.

Source: docs/static-topics.md "Offsets"; tests/clients/test_admin_chains.py.
"""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from headrace.admin.requests import BrokerProblem, BrokerRequests
from headrace.errors import RouteNotFound
from headrace_protocol.admin_headers import GetTopicConfigHeader, GetTopicStatsHeader
from headrace_protocol.bodies import (
    MessageQueue,
    TopicConfigAndQueueMapping,
    TopicOffset,
    TopicStatsTable,
)
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.statictopic.checks import chains_of
from headrace_protocol.statictopic.mapping import MappingItem, logic_broker_name
from headrace_protocol.statictopic.offsets import (
    decided,
    extent_of,
    index_of,
    item_of,
    static_offset,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from headrace.received import ReceivedMessage
    from headrace_protocol.statictopic.mapping import Chain


class Extent(NamedTuple):
    """Static offsets that a physical queue holds.

    messages: their number. last_timestamp_ms: store time of the last message; 0 without one.
    """

    min_offset: int
    max_offset: int
    messages: int
    last_timestamp_ms: int


class QueuePart(NamedTuple):
    """An item of a logic queue's chain.

    extent: None if the item's broker doesn't answer, or its offsets are undecided.
    """

    queue: int
    item: MappingItem
    is_leader: bool
    extent: Extent | None


class LogicQueue(NamedTuple):
    """A queue of a static topic.

    offsets: over all items of the chain. messages: less than the offsets where these jump, or
    where a broker doesn't answer. gaps: ranges of offsets without messages.
    """

    queue: MessageQueue
    chain: Chain
    offsets: TopicOffset
    messages: int
    gaps: tuple[tuple[int, int], ...]

    @property
    def leader(self) -> str:
        """Name of the broker that takes new messages."""
        return self.chain[-1].bname

    def physical(self, offset: int) -> MessageQueue:
        """The physical queue that holds an offset."""
        item = item_of(self.chain, offset)
        return MessageQueue(self.queue.topic, item.bname, item.queue_id)

    def physical_from(self, offset: int) -> list[MessageQueue]:
        """The physical queues that hold an offset and those after it, as far as they have some."""
        return [
            MessageQueue(self.queue.topic, item.bname, item.queue_id)
            for item in decided(self.chain)[index_of(self.chain, offset) :]
        ]

    def missing(self, start: int) -> int:
        """Number of offsets from ``start`` on that have no message because offsets jump."""
        return sum(max(0, end - max(start, begin)) for begin, end in self.gaps)


class ChainAdmin(BrokerRequests):
    """The methods of Admin that read topics, also static ones."""

    async def is_static(self, topic: str) -> bool:
        """True if a topic is static; False if no broker has it."""
        try:
            return (await self._instance.route(topic)).is_static
        except RouteNotFound:
            return False

    async def topic(
        self, topic: str, *, problems: list[BrokerProblem] | None = None
    ) -> dict[str, TopicConfigAndQueueMapping]:
        """A topic's settings, by broker name. Raises RouteNotFound."""
        header = GetTopicConfigHeader(topic=topic)
        ask = self._asking(RequestCode.GET_TOPIC_CONFIG, TopicConfigAndQueueMapping, header)
        return await self._ask_topic(topic, ask, problems)

    async def queue_parts(
        self, topic: str, *, problems: list[BrokerProblem] | None = None
    ) -> list[QueuePart]:
        """All items of all logic queues of a static topic that have a leader, in order."""
        masters = await self._masters()
        configs = await self._configs(topic, masters, problems)
        there = {name: masters[name] for name in configs}
        ranges = await self._ranges(topic, there, problems)
        mappings = [each.mapping_detail for each in configs.values() if each.mapping_detail]
        return [
            QueuePart(
                queue,
                item,
                item is chain[-1],
                _extent(chain, index, ranges.get(MessageQueue(topic, item.bname, item.queue_id))),
            )
            for queue, chain in chains_of(mappings).items()
            for index, item in enumerate(chain)
        ]

    async def logic_queues(
        self, topic: str, *, problems: list[BrokerProblem] | None = None
    ) -> list[LogicQueue]:
        """The queues of a static topic that have a leader, in order."""
        parts = await self.queue_parts(topic, problems=problems)
        return [
            _logic_queue(topic, queue, [*found])
            for queue, found in groupby(parts, key=lambda part: part.queue)
        ]

    async def _logic_messages(
        self, messages: Sequence[ReceivedMessage], *, problems: list[BrokerProblem] | None = None
    ) -> list[ReceivedMessage]:
        """Messages with the queues and offsets that consumers see.

        messages: as brokers store them; the offset is -1 while a queue's offsets are undecided.
        """
        parts: dict[MessageQueue, QueuePart] = {}
        for topic in {message.queue.topic for message in messages}:
            if await self.is_static(topic):
                found = await self.queue_parts(topic, problems=problems)
                parts |= {
                    MessageQueue(topic, part.item.bname, part.item.queue_id): part for part in found
                }
        return [_logic(message, parts.get(message.queue)) for message in messages]

    async def _configs(
        self,
        topic: str,
        masters: Mapping[str, str],
        problems: list[BrokerProblem] | None = None,
    ) -> dict[str, TopicConfigAndQueueMapping]:
        """Settings of a topic, with its mapping, on the brokers that have it."""
        ask = self._asking(
            RequestCode.GET_TOPIC_CONFIG,
            TopicConfigAndQueueMapping,
            GetTopicConfigHeader(topic=topic, logical=True),
            absent=ResponseCode.TOPIC_NOT_EXIST,
        )
        return await self._gather(masters, ask, problems)

    async def _ranges(
        self, topic: str, masters: Mapping[str, str], problems: list[BrokerProblem] | None = None
    ) -> dict[MessageQueue, TopicOffset]:
        """Physical offsets of a topic's queues on brokers that have it."""
        return ranges_in(await self._gather(masters, self._asking_stats(topic), problems))

    def _asking_stats(
        self, topic: str, *, with_bytes: bool | None = None, absent: int | None = None
    ) -> Callable[[str], Awaitable[TopicStatsTable | None]]:
        header = GetTopicStatsHeader(topic=topic, with_bytes=with_bytes)
        code = RequestCode.GET_TOPIC_STATS_INFO
        return self._asking(code, TopicStatsTable, header, absent=absent)


def ranges_in(tables: Mapping[str, TopicStatsTable]) -> dict[MessageQueue, TopicOffset]:
    """The offsets of all queues in the answers of brokers."""
    return {queue: at for table in tables.values() for queue, at in table.offset_table.items()}


def _logic(message: ReceivedMessage, part: QueuePart | None) -> ReceivedMessage:
    """A message with the queue and offset that consumers see; as it is outside of logic queues."""
    if part is None:
        return message
    item = part.item
    return msgspec.structs.replace(
        message,
        queue=MessageQueue(message.queue.topic, logic_broker_name(), part.queue),
        queue_offset=-1 if item.logic_offset < 0 else static_offset(item, message.queue_offset),
    )


def _extent(chain: Chain, index: int, physical: TopicOffset | None) -> Extent | None:
    if physical is None or chain[index].logic_offset < 0:
        return None
    start, end = extent_of(chain, index, physical.min_offset, physical.max_offset)
    messages = max(end - start - (physical.missing_count or 0), 0)
    return Extent(start, end, messages, physical.last_update_timestamp)


def _logic_queue(topic: str, queue: int, parts: Sequence[QueuePart]) -> LogicQueue:
    extents = [part.extent for part in parts if part.extent]
    offsets = TopicOffset(
        # Expired items have no message left; the first one that has some begins the queue.
        min_offset=_first_offset(extents),
        max_offset=max((extent.max_offset for extent in extents), default=0),
        last_update_timestamp=max((extent.last_timestamp_ms for extent in extents), default=0),
    )
    return LogicQueue(
        MessageQueue(topic, logic_broker_name(), queue),
        tuple(part.item for part in parts),
        offsets,
        sum(extent.messages for extent in extents),
        tuple(_gaps(parts)),
    )


def _first_offset(extents: Sequence[Extent]) -> int:
    for extent in extents:
        if extent.messages:
            return extent.min_offset
    return extents[-1].max_offset if extents else 0


def _gaps(parts: Sequence[QueuePart]) -> Iterable[tuple[int, int]]:
    for part, following in pairwise(parts):
        if part.extent and part.extent.max_offset < following.item.logic_offset:
            yield part.extent.max_offset, following.item.logic_offset
