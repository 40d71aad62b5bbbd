"""Progress in the revive topic of Apache's brokers, and what nobody has read there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_protocol.system_topics import REVIVE_GROUP, revive_log_topic

if TYPE_CHECKING:
    from headrace_broker.consumer.offsets import ConsumerOffsets
    from headrace_broker.store.message_store import MessageStore


def saved_behind(group: str) -> int:
    """Distance of a group's saved offset from the next message that it reads.

    Apache's brokers save the last message that they have read in the revive topic, and all other
    groups the next.
    """
    return 1 if group == REVIVE_GROUP else 0


def next_unread(offsets: ConsumerOffsets, topic: str, queue_id: int) -> int:
    """The first message of a queue of the topic that nobody has read, by the saved offset."""
    saved = offsets.query(REVIVE_GROUP, topic, queue_id)
    return 0 if saved is None else saved + saved_behind(REVIVE_GROUP)


def unread(store: MessageStore, offsets: ConsumerOffsets, cluster: str) -> list[int]:
    """Queues of the topic with messages that nobody has read."""
    topic = revive_log_topic(cluster)
    return [
        queue.queue_id
        for queue in store.queues_of(topic)
        if queue.consume_queue.max_offset > next_unread(offsets, topic, queue.queue_id)
    ]
