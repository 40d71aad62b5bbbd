"""The queues of a store, by key, by name and by topic."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_broker.store.log.ring import Ring
    from headrace_broker.store.store_queue import StoreQueue


class QueueTable:
    """All attributes are for reading.

    by_key: indexed by queue key; a deleted queue stays until its key is used again.
    """

    def __init__(self, ring: Ring) -> None:
        self.by_key: list[StoreQueue] = []
        self.by_name: dict[tuple[str, int], StoreQueue] = {}
        self.by_topic: dict[str, dict[int, StoreQueue]] = {}
        self._ring = ring
        # Keys of deleted queues, and how many rows had been written to the ring by then.
        self._gone_keys: deque[tuple[int, int]] = deque()

    def free_key(self) -> int:
        """The key of a deleted queue whose rows every taker has taken, else a new one."""
        if self._gone_keys and self._gone_keys[0][1] <= self._ring.taken:
            return self._gone_keys.popleft()[0]
        return len(self.by_key)

    def add(self, queue: StoreQueue) -> None:
        """Add a queue whose key was free."""
        self.by_key[queue.key : queue.key + 1] = [queue]
        self.by_name[queue.topic, queue.queue_id] = queue
        self.by_topic.setdefault(queue.topic, {})[queue.queue_id] = queue

    def remove(self, queue: StoreQueue) -> None:
        """Remove a queue; its key is free once its rows are taken."""
        del self.by_name[queue.topic, queue.queue_id]
        queues = self.by_topic[queue.topic]
        del queues[queue.queue_id]
        if not queues:
            del self.by_topic[queue.topic]
        self._gone_keys.append((queue.key, self._ring.written))

    def of_topic(self, topic: str) -> list[StoreQueue]:
        """All queues of a topic, by queue id."""
        return [queue for _, queue in sorted(self.by_topic.get(topic, {}).items())]


def queue_folders(directory: Path) -> list[tuple[str, str]]:
    """Topic and name of every entry in the topics' folders, sorted."""
    if not directory.exists():
        return []
    topics = [path for path in directory.iterdir() if path.is_dir()]
    return sorted((topic.name, path.name) for topic in topics for path in topic.iterdir())
