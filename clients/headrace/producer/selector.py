"""Selection of the queue for a message."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from zlib_ng.zlib_ng import crc32

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from headrace_protocol.bodies import MessageQueue


def queue_index(key: str, queue_count: int) -> int:
    """The queue of a key: CRC-32 of its UTF-8 bytes, modulo the number of queues.

    Stable across processes, machines and versions: all producers that write to a topic by this
    rule keep the messages of a key in order. Source: docs/clients.md "Keys and queues".
    """
    return crc32(key.encode()) % queue_count


def queue_indices(keys: Iterable[bytes], queue_count: int) -> list[int]:
    """``queue_index`` of many keys, given in UTF-8."""
    return [crc32(key) % queue_count for key in keys]


class QueueSelector:
    """The writable queues of a topic, in order of broker name and queue id; not empty."""

    def __init__(self, queues: Sequence[MessageQueue]) -> None:
        assert queues
        self.queues = queues
        self._next = count()

    def for_key(self, key: str) -> MessageQueue:
        """The queue for all messages with ``key``, as long as the set of queues does not change."""
        return self.queues[queue_index(key, len(self.queues))]

    def next(self, avoid: Container[str] = ()) -> MessageQueue:
        """The next queue in round-robin order, skipping brokers in ``avoid`` if possible."""
        queues = self.queues
        start = next(self._next)
        if avoid:
            for step in range(len(queues)):
                queue = queues[(start + step) % len(queues)]
                if queue.broker_name not in avoid:
                    return queue
        return queues[start % len(queues)]
