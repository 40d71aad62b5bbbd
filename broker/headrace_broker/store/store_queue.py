"""The broker's object for a queue: one per (topic, queue id)."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from headrace_broker.store.index.index_keys import index_prefixes
from headrace_protocol.message import INNER_BATCH, topic_field

if TYPE_CHECKING:
    from headrace_broker.store.queues.consume_queue import ConsumeQueue


class StoreQueue:
    """A queue, its ConsumeQueue, and constants for encoding its records.

    next_offset: the next queue offset to assign. waiting: for the broker, unused by the store.
    row_flag: bits of the rows of its records, see ``ring``.
    """

    __slots__ = (
        "checksum_bytes",
        "consume_queue",
        "index_prefixes",
        "key",
        "magic",
        "next_offset",
        "queue_id",
        "row_flag",
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
        """key: number of the queue in the rows of the ring.

        checksum_bytes: size of the checksum that the store appends to each record's properties.
        """
        self.topic = topic
        self.queue_id = queue_id
        self.key = key
        self.consume_queue = consume_queue
        self.checksum_bytes = checksum_bytes
        self.magic, self.topic_field, self.index_prefixes = _topic_constants(topic)
        self.row_flag = INNER_BATCH if consume_queue.is_batch else 0
        self.next_offset = 0
        self.waiting: dict[Any, None] | None = None

    def __repr__(self) -> str:
        return f"<StoreQueue {self.topic}/{self.queue_id} next_offset={self.next_offset}>"


@lru_cache
def _topic_constants(topic: str) -> tuple[int, bytes, tuple[int, int]]:
    """Constants that all queues of a topic share; loading creates these one after the other."""
    return *topic_field(topic), index_prefixes(topic)
