"""The held requests of queues that open or close, and what a close waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.store.errors import StoreNotWritable

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.consumer.long_polling import LongPolling
    from headrace_broker.store.message_store import MessageStore


def answer_held(store: MessageStore, long_polling: LongPolling, topic: str, physical: int) -> None:
    """Answer the requests that wait for messages in a physical queue: none will come."""
    queue = store.find_queue(topic, physical)
    if queue is not None:
        long_polling.run_long(long_polling.queue_gone(queue))


def wake_held(store: MessageStore, long_polling: LongPolling, topic: str, physical: int) -> None:
    """Serve the requests again that wait for messages in a physical queue."""
    queue = store.find_queue(topic, physical)
    if queue is not None:
        long_polling.arrived((queue,))


def when_on_disk(store: MessageStore, then: Callable[[Exception | None], None]) -> None:
    """Call back once all messages so far are on disk and in their queues, or with the error."""

    def on_flushed(is_flushed: bool) -> None:
        if is_flushed:
            store.write_path.drain_all()
            then(None)
        else:
            then(StoreNotWritable("a flush failed", store.root))

    store.when_log_flushed(on_flushed)
