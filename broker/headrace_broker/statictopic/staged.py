"""The queues of staged blocks, whose ids are those of logic queues in static topics.

Source: docs/static-topics.md; tests/broker/test_static_staging.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.store.errors import StoreError

if TYPE_CHECKING:
    from headrace_broker.statictopic.table import MappingTable
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.store.store_queue import StoreQueue


class QueueMoved(StoreError):
    """The records of a staged block belong to a queue that this broker does not lead."""

    def __init__(self, topic: str, queue_id: int) -> None:
        super().__init__(
            f"this broker does not lead queue {queue_id} of the static topic {topic}: run "
            f"`headrace topic repair {topic}`"
        )


class StagedQueues:
    """Finds the queue of a staged block; see ``staging.queues.Queues``."""

    def __init__(self, mappings: MappingTable, store: MessageStore) -> None:
        self._mappings = mappings
        self._store = store

    def can_move(self) -> bool:
        """Whether there is any static topic."""
        return bool(self._mappings)

    def has_moved(self, topic: str, queue_id: int) -> bool:
        """Whether a queue is led by another broker."""
        is_static = self._mappings.is_static(topic)
        return is_static and self._mappings.leads(topic, queue_id) is None

    def queue(self, topic: str, queue_id: int) -> StoreQueue:
        """The queue to append to. Raises QueueMoved."""
        if not self._mappings.is_static(topic):
            return self._store.queue(topic, queue_id)
        physical = self._mappings.leads(topic, queue_id)
        if physical is None:
            raise QueueMoved(topic, queue_id)
        return self._store.queue(topic, physical)
