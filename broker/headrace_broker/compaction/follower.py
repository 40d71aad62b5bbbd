"""The follower that copies the messages of compacted topics, queue by queue."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Final

import numpy as np

from headrace_broker.store.queues.queue_blocks import QueueNotFollowed

if TYPE_CHECKING:
    from headrace_broker.compaction.queues import CompactedQueues, Name
    from headrace_broker.store.files.mapped_file import MappedFile
    from headrace_broker.store.followers.follower_work import LocalQueue
    from headrace_broker.store.queues.queue_blocks import QueueBlock

NAME: Final = "compaction"
# Any key may change any page of its index, and after a crash a minute's messages are soon entered.
INDEX_SYNC_S: Final = 60.0


class CompactionFollower:
    """Appends to compaction logs; see ``Follower``."""

    name = NAME
    # Apache's broker enters nothing after a clean stop.
    is_part_of_stop = True

    def __init__(self, queues: CompactedQueues) -> None:
        self._queues = queues
        self._resumed: set[Name] = set()
        self._index_synced_s = monotonic()

    def wants(self, topic: str) -> bool:
        """See ``Follower``."""
        return self._queues.wants(topic)

    def resume(self, queue: LocalQueue, queue_offset: int) -> int:
        """See ``Follower``."""
        name = queue.name
        with self._queues.lock:
            if self._queues.open(*name).lost:
                return 0  # so that the CommitLog is kept from its oldest message on
            if name in self._resumed:
                # After an error the end of the log may not be as it was written.
                self._queues.cut(*name, queue_offset)
            self._resumed.add(name)
            return min(self._queues.open(*name).log.next_offset, queue_offset)

    def follow(self, block: QueueBlock) -> None:
        """See ``Follower``; what the log has already is left out."""
        with self._queues.lock:
            queue = self._queues.open(block.topic, block.queue_id)
            if queue.lost:
                raise QueueNotFollowed(f"the log of {block.topic}/{block.queue_id} is lost")
            log = queue.log
            new = np.flatnonzero(block.records.queue_offset >= log.end_offset)
            if len(new) < len(block.units):
                records = block.records.select(new)
                block = block._replace(units=block.units[new], records=records)
            if len(new):
                log.append(block)
                if queue.key_index.is_open:
                    queue.key_index.put(block.records, log.end_offset)

    def sync(self) -> None:
        """See ``Follower``."""
        syncs_indexes = monotonic() - self._index_synced_s > INDEX_SYNC_S
        with self._queues.lock:
            for queue in self._queues.all().values():
                queue.log.sync()
                if syncs_indexes and queue.key_index.is_open:
                    queue.key_index.sync()
        if syncs_indexes:
            self._index_synced_s = monotonic()

    def gone(self, topic: str, queue_id: int) -> None:
        """See ``Follower``."""
        with self._queues.lock:
            self._resumed.discard((topic, queue_id))
            self._queues.delete(topic, queue_id)

    def used(self) -> list[tuple[MappedFile, int]]:
        """See ``Follower``."""
        return [used for queue in self._queues.all().values() for used in queue.log.used]

    def close(self) -> None:
        """See ``Follower``."""
        self._queues.close()
