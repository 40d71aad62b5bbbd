"""A place on another broker."""

from __future__ import annotations

from headrace_broker.queue_directory import Elsewhere, Lookup, QueueDirectory

OTHER_BROKER = Elsewhere("broker-b", "10.0.0.2:10911")


class MovedTopic:
    """All queues of a topic are elsewhere."""

    def __init__(self, topic: str) -> None:
        self._topic = topic

    def place(self, _directory: QueueDirectory, lookup: Lookup) -> Elsewhere | None:
        return OTHER_BROKER if lookup.topic.topic_name == self._topic else None
