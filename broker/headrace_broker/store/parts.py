"""The parts of a store, and its queues."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.store.batch_source import source_of
from headrace_broker.store.files.filesystem import DiskUsage, Files
from headrace_broker.store.followers.followers import Followers
from headrace_broker.store.index.index_file import IndexFiles
from headrace_broker.store.index.indexer import Indexer, log_vanished
from headrace_broker.store.integrity.lock import StoreLock
from headrace_broker.store.integrity.seal import Seals
from headrace_broker.store.log.commit_log import CommitLog
from headrace_broker.store.log.record_checksum import SLOT_BYTES
from headrace_broker.store.log.ring import Ring
from headrace_broker.store.log.takers import taken_offset
from headrace_broker.store.queues.batch_queue import QUEUE_KINDS, queue_at
from headrace_broker.store.queues.deletions import Deletions
from headrace_broker.store.queues.dispatch import Dispatcher
from headrace_broker.store.queues.queue_table import QueueTable
from headrace_broker.store.reader import Reader
from headrace_broker.store.retention.cleaner import Cleaner, Rest
from headrace_broker.store.retention.healer import Healer
from headrace_broker.store.store_queue import StoreQueue
from headrace_broker.store.write.confirmation import Confirmation, Gate
from headrace_broker.store.write.flush import Flusher
from headrace_broker.store.write.write_path import WritePath

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.clock import Clock
    from headrace_broker.store.log.takers import Taker
    from headrace_broker.store.settings import StoreSettings
    from headrace_broker.store.store_source import StoreSource


class StoreParts:
    """The parts of a store, connected; see ``MessageStore``."""

    def __init__(
        self,
        settings: StoreSettings,
        clock: Clock,
        files: Files,
        *,
        use_threads: bool,
    ) -> None:
        self.settings = settings
        self.root = settings.root
        self.clock = clock
        self.fs = files
        # Whether the queues of a topic are batch queues: those on disk tell, and its attributes,
        # which the store does not know.
        self.batch_topics: set[str] = set()
        self.is_batch_topic: Callable[[str], bool] = lambda _topic: False
        # Whether the last process stopped in order; known once this is loaded.
        self.was_clean = False
        self.ring = Ring(settings.ring_rows)
        self.table = QueueTable(self.ring)
        self.queues = self.table.by_key
        self.commit_log = CommitLog(settings, self.fs, self.ring, self.clock)
        self.index_files = IndexFiles(settings, self.fs, log_vanished)
        self.dispatcher = Dispatcher(self.ring, self.queues, Deletions(self.root, self.fs))
        self.indexer = Indexer(self.ring, self.commit_log, self.index_files, self.queues)
        self.takers: tuple[Taker, ...] = (self.dispatcher, self.indexer)
        self.reader = Reader(self.commit_log, self.index_files)
        confirmation = Confirmation()
        self.flusher = Flusher(
            settings, self.fs, self.ring, self.commit_log, self.takers, confirmation.moved
        )
        if settings.flush == "sync":
            confirmation.add(
                Gate(
                    lambda: self.commit_log.flushed_offset,
                    self.flusher.request_flush,
                    self.flusher.when_flushed,
                )
            )
        self.write_path = WritePath(
            self.root, self.clock, self.commit_log, self.dispatcher, self.takers, confirmation
        )
        self.followers = Followers(
            settings.root, self.commit_log, self.table.by_topic, self.dispatched_offset
        )
        self.write_path.on_published(self.followers.notify)
        self.cleaner = self._new_cleaner()
        self.seals = Seals(settings.root, self.fs)
        self.lock = StoreLock(settings.root)
        self.use_threads = use_threads
        self.healer = Healer(
            self.commit_log, self._drain_refused, self.cleaner.ask, use_threads=use_threads
        )

    def _new_cleaner(self) -> Cleaner:
        rest = Rest(
            self.settled_offset,
            self.flusher.flush_thoroughly,
            self.durable_offset,
            self.followers.oldest,
            self._hurry,
        )
        return Cleaner(self.settings, self.commit_log, self.index_files, self.table.by_topic, rest)

    def _hurry(self) -> None:
        """Hurry the flush and the followers, which keep log files, on a disk short of room."""
        self.flusher.request_flush()
        self.followers.hurry()

    def _drain_refused(self) -> None:
        self.write_path.publish()
        self.index_tick()

    def index_tick(self) -> None:
        """Index all confirmed records."""
        self.write_path.drain_taker(self.indexer, self.indexer.drain_all)

    # --- queues ----------------------------------------------------------------------------

    def queue(self, topic: str, queue_id: int) -> StoreQueue:
        """The queue, created in memory if new; its folder is created with its first message.

        Raises ValueError for a topic that cannot be a folder name.
        """
        queue = self.table.by_name.get((topic, queue_id))
        if queue is not None:
            return queue
        return self.add_queue(topic, queue_id, is_batch=self.has_batches(topic))

    def has_batches(self, topic: str) -> bool:
        """True if the queues of a topic are batch queues."""
        return topic in self.batch_topics or self.is_batch_topic(topic)

    def find_queue(self, topic: str, queue_id: int) -> StoreQueue | None:
        """The queue, or None if it does not exist."""
        return self.table.by_name.get((topic, queue_id))

    def source(self, queue: StoreQueue) -> StoreSource:
        """The source that reads a queue of this store."""
        return source_of(queue, self.commit_log)

    def topics(self) -> set[str]:
        """The topics that have queues."""
        return {*self.table.by_topic}

    def queues_of(self, topic: str) -> list[StoreQueue]:
        """All queues of a topic that exist, by queue id."""
        return self.table.of_topic(topic)

    def add_queue(self, topic: str, queue_id: int, *, is_batch: bool) -> StoreQueue:
        """Add a queue that does not exist. Raises as ``queue``."""
        if topic in {"", ".", ".."} or "/" in topic or "\0" in topic or queue_id < 0:
            raise ValueError(f"{topic!r}/{queue_id} cannot be the name of a queue")
        folder = self.root / QUEUE_KINDS[is_batch].folder / topic / str(queue_id)
        consume_queue = queue_at(folder, self.settings, self.fs)
        checksum_bytes = SLOT_BYTES if self.settings.appends_checksums else 0
        key = self.table.free_key()
        queue = StoreQueue(topic, queue_id, key, consume_queue, checksum_bytes)
        self.table.add(queue)
        self.indexer.note(queue)
        return queue

    def forget_queue(self, queue: StoreQueue) -> None:
        """Remove a queue from memory."""
        self.table.remove(queue)
        self.followers.forget(queue)
        self.dispatcher.forget(queue)
        self.fs.map_budget.forget(queue.consume_queue)

    # --- offsets and disk ------------------------------------------------------------------

    def disk_usage(self) -> DiskUsage:
        """Disk usage; a disk that can't be queried (store removed) counts as full."""
        try:
            return self.commit_log.room.usage()
        except OSError:
            return DiskUsage(used_bytes=1, usable_bytes=0)

    def dispatched_offset(self) -> int:
        """End of the log's records that are in the ConsumeQueues."""
        return taken_offset(self.dispatcher, self.commit_log.max_offset)

    def settled_offset(self) -> int:
        """End of the log's records that are flushed, taken by every taker, and followed."""
        log_end = self.commit_log.max_offset
        taken_offsets = (taken_offset(taker, log_end) for taker in self.takers)
        needed_from = self.followers.needed_from()
        return min(*taken_offsets, self.commit_log.flushed_offset, needed_from)

    def durable_offset(self) -> int:
        """End of the log's records for which every taker has its results on disk."""
        return min(taker.durable_offset() for taker in self.takers)
