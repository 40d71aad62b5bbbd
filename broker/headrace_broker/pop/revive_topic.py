"""Unread queues of the revive topic of Apache's broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_protocol.system_topics import REVIVE_GROUP, revive_log_topic

if TYPE_CHECKING:
    from headrace_broker.consumer.offsets import ConsumerOffsets
    from headrace_broker.store.message_store import MessageStore


def unread(store: MessageStore, offsets: ConsumerOffsets, cluster: str) -> list[int]:
    """Queues of the topic with messages that nobody has read."""
    topic = revive_log_topic(cluster)
    found = []
    for queue in store.queues_of(topic):
        read_to = offsets.query(REVIVE_GROUP, topic, queue.queue_id) or 0
        if queue.consume_queue.max_offset > read_to:
            found.append(queue.queue_id)
    return found
