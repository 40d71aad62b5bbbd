"""A queue as the broker holds it: one interned object per (topic, queue id)."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from headrace_broker.store.index.index_keys import index_prefixes
from headrace_protocol.message import topic_field

if TYPE_CHECKING:
    from headrace_broker.store.queues.consume_queue import ConsumeQueue


class StoreQueue:
    """``next_offset`` is the next queue offset to assign; ``waiting`` belongs to the broker."""

    __slots__ = (
        "checksum_bytes",
        "consume_queue",
        "index_prefixes",
        "key",
        "magic",
        "next_offset",
        "queue_id",
        "topic",
        "topic_field",
        "waiting",
    )

    def __init__(
        self,
        topic: str,
        queue_id: int,
        key: int,
        consume_queue: ConsumeQueue,
        checksum_bytes: int = 0,
    ) -> None:
        """key: the queue's number in the rows of the ring.

        checksum_bytes: what the store appends to the properties of each record.
        """
        self.topic = topic
        self.queue_id = queue_id
        self.key = key
        self.consume_queue = consume_queue
        self.checksum_bytes = checksum_bytes
        self.magic, self.topic_field, self.index_prefixes = _of_topic(topic)
        self.next_offset = 0
        self.waiting: dict[Any, None] | None = None

    def __repr__(self) -> str:
        return f"<StoreQueue {self.topic}/{self.queue_id} next_offset={self.next_offset}>"


@lru_cache
def _of_topic(topic: str) -> tuple[int, bytes, tuple[int, int]]:
    """What all queues of a topic have; a start makes them one after the other."""
    return *topic_field(topic), index_prefixes(topic)
