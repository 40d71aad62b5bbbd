"""Queues as requests name them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.serving import Reply

if TYPE_CHECKING:
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_broker.topics import TopicTable


def checked_queue(
    store: MessageStore, topics: TopicTable, topic: str, queue_id: int
) -> StoreQueue | None:
    """A queue of a topic; None when nothing was ever written to it.

    Queues that a topic has no more but that still hold messages are found.
    Raises RequestError when there is no such topic or queue.
    """
    config = topics.expect_served(topic)
    queue = store.find_queue(topic, queue_id)
    count = max(config.read_queue_nums, config.write_queue_nums)
    if queue is None and not 0 <= queue_id < count:
        raise RequestError(
            ResponseCode.INVALID_PARAMETER,
            f"queue {queue_id} of topic {topic}: there are {count}, ask for the route again",
        )
    return queue


def complete_queue(
    store: MessageStore, topics: TopicTable, topic: str, queue_id: int
) -> StoreQueue | None:
    """A checked queue that is asked for its beginning or a time.

    Raises RequestError too when the log has no more all that a compacted topic keeps, NotReady
    when the disk must be waited for.
    """
    queue = checked_queue(store, topics, topic, queue_id)
    if queue is not None and topics.is_compacted(topic):
        topics.check_complete(topic, store.min_offset(queue))
    return queue


def store_time(store: MessageStore, queue: StoreQueue | None, queue_offset: int) -> int:
    """When a message was stored, in ms; 0 when it is not there. Raises NotReady."""
    timestamp = store.store_time_at(queue, queue_offset) if queue else None
    return timestamp or 0


def not_saved(error: Exception) -> Reply:
    """The answer to a change of a table that could not be brought to disk."""
    remedy = "; make room on the disk" if isinstance(error, OSError) else ""
    return Reply(
        code=ResponseCode.SYSTEM_ERROR,
        remark=f"the change holds until this broker stops, but can't be saved: {error}; "
        f"the broker retries{remedy}",
    )
