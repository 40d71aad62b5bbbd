"""Progress of groups in a compacted topic: the newest message of a key holds an offset.

Source: docs/clients.md "Progress in a topic"; tests/clients/test_topic_offsets.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.consumer.offset_store import OffsetStore
from headrace.tasks import gather_or_raise

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.instance import ClientInstance
    from headrace_protocol.bodies import MessageQueue


class TopicOffsetStore(OffsetStore):
    """Keeps an offset under the key ``GROUP/TOPIC/BROKER/QUEUE_ID``, in decimal digits."""

    def __init__(
        self,
        instance: ClientInstance,
        offsets_topic: str,
    ) -> None:
        """Opens nothing yet. instance: its connections. Raises ConfigurationError."""
        from headrace.table.client import Table

        super().__init__(instance)
        self._table = Table(
            offsets_topic, model=int, nameserver=instance.nameservers, connect=instance.connect
        )

    async def open(self) -> None:
        """Begin to follow the topic. Raises RouteNotFound, and the errors of its brokers."""
        await self._table.__aenter__()

    async def close(self) -> None:
        """Stop following."""
        await self._table.__aexit__()

    async def committed(self, group: str, queue: MessageQueue) -> int | None:
        """The newest offset of any member; None if there is none. Raises InvalidValue."""
        await self._table.synced()
        return await self._table.get(_key(group, queue))

    async def commit(self, group: str, offsets: Mapping[MessageQueue, int]) -> None:
        """Send progress and wait until the brokers confirm. Raises as ``Producer.send``."""

        async def put(item: tuple[MessageQueue, int]) -> None:
            queue, offset = item
            await self._table.put(_key(group, queue), offset)

        await gather_or_raise(put, list(offsets.items()))

    async def commit_oneway(self, group: str, offsets: Mapping[MessageQueue, int]) -> None:
        """Send progress; the same as ``commit``."""
        await self.commit(group, offsets)


def offset_store(
    instance: ClientInstance,
    offsets_topic: str | None,
) -> OffsetStore:
    """Progress in ``offsets_topic``, in the brokers if None. Raises ConfigurationError."""
    if offsets_topic is None:
        return OffsetStore(instance)
    return TopicOffsetStore(instance, offsets_topic)


def _key(group: str, queue: MessageQueue) -> str:
    return f"{group}/{queue.topic}/{queue.broker_name}/{queue.queue_id}"
