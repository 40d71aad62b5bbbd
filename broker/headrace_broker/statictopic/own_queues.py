"""Answers about this broker's physical queues, for services that know no logic ones.

Source: docs/static-topics.md "Compacted topics", "Offsets";
tests/broker/statictopic/test_static_compaction.py,
tests/broker/statictopic/test_static_staging.py, tests/broker/consumer/test_unconsumed.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace_broker.store.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Container

    from headrace_broker.statictopic.table import MappingTable
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_protocol.statictopic.mapping import TopicMapping


_ALL: Final = range(1 << 31)


class QueueMoved(StoreError):
    """The records of a staged block belong to a queue that this broker does not lead."""

    def __init__(self, topic: str, queue_id: int) -> None:
        super().__init__(
            f"this broker does not lead queue {queue_id} of the static topic {topic}: run "
            f"`headrace topic repair {topic}`"
        )


class OwnQueues:
    """See ``LogicQueues`` of compaction, ``Queues`` of staging, and ``UnconsumedOffsets``."""

    def __init__(self, mappings: MappingTable, store: MessageStore) -> None:
        self._mappings = mappings
        self._store = store
        # By topic: a keyed message of a compacted topic asks for its queue, and each due message.
        self._logic_queues: dict[str, dict[int, int]] = {}
        mappings.subscribe(self._logic_queues.clear)

    def is_static(self, topic: str) -> bool:
        """True for a static topic, also one whose mapping is lost."""
        return self._mappings.is_static(topic)

    def of_keys(self, topic: str, queue_id: int, queue_count: int) -> tuple[int, int]:
        """The number of a queue among those that producers choose from, and the number of these."""
        mapping = self._mappings.get(topic)
        if mapping is None:
            return queue_id, queue_count
        queue = self.logic_queue(mapping, queue_id)
        return (-1 if queue is None else queue), mapping.total_queues

    def logic_queue(self, mapping: TopicMapping, physical: int) -> int | None:
        """The logic queue of one of this broker's physical queues; None if it has none."""
        queues = self._logic_queues.get(mapping.topic)
        if queues is None:
            queues = self._logic_queues[mapping.topic] = mapping.logic_queues()
        return queues.get(physical)

    def has_older(self, topic: str, queue_id: int) -> bool:
        """True if older items of the chain may have messages, or while that is not known."""
        mapping = self._mappings.get(topic)
        if mapping is None:
            return self._mappings.is_static(topic)
        queue = self.logic_queue(mapping, queue_id)
        chain = None if queue is None else mapping.chain(queue)
        if chain is None:
            return True
        return (chain[0].bname, chain[0].queue_id) != (mapping.bname, queue_id)

    def later(self, topic: str) -> Container[int]:
        """The queues that continue others; all of them while that is not known.

        They stay later ones when clean-up has dropped the items before them: the leader may still
        have to move groups on from there.
        """
        mapping = self._mappings.get(topic)
        if mapping is None:
            return _ALL if self._mappings.is_static(topic) else ()
        return mapping.later_queues()

    def can_move(self) -> bool:
        """True if there is any static topic."""
        return bool(self._mappings)

    def has_moved(self, topic: str, queue_id: int) -> bool:
        """True for a queue that another broker leads."""
        is_static = self._mappings.is_static(topic)
        return is_static and self._mappings.leads(topic, queue_id) is None

    def queue(self, topic: str, queue_id: int) -> StoreQueue:
        """The queue that a block for a queue goes to. Raises QueueMoved."""
        if not self._mappings.is_static(topic):
            return self._store.queue(topic, queue_id)
        physical = self._mappings.leads(topic, queue_id)
        if physical is None:
            raise QueueMoved(topic, queue_id)
        return self._store.queue(topic, physical)
