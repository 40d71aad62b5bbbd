"""A source that has no messages, whatever the log holds."""

from __future__ import annotations

from headrace_broker.queue_directory import Lookup
from headrace_broker.store.store_queue import StoreQueue
from headrace_broker.store.store_source import EmptySource


class HiddenTopic:
    """The messages of a topic are stored, but not read."""

    def __init__(self, topic: str) -> None:
        self._topic = topic

    def source(self, lookup: Lookup, _queue: StoreQueue) -> EmptySource | None:
        return EmptySource() if lookup.topic.topic_name == self._topic else None
