"""The compaction logs of a store, one per queue of a compacted topic.

A topic that is deleted and created again has a new, empty log, also if the broker was killed in
between: ``compaction/headrace/TOPIC/QUEUE/created.json`` says where the CommitLog ended when the
topic was created whose messages the log has.

A log that the follower has filled, and of which neither a segment nor the note is there, is lost:
its disk is not mounted, or was replaced. Nothing is written in its place, and the CommitLog is kept
for it. Until it is back or a rebuild has ended, reads of what the CommitLog lacks fail by name: a
part must not pass for the topic.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import structlog

from headrace_broker.compaction.key_hash import SEED_BYTES, KeyHash
from headrace_broker.compaction.key_index import KeyIndex
from headrace_broker.compaction.key_index_build import enter_all
from headrace_broker.compaction.log_reader import LogReader
from headrace_broker.compaction.peer_swap import end_peer_swap
from headrace_broker.compaction.queue_log import QueueLog
from headrace_broker.compaction.replica import Replica
from headrace_broker.compaction.run_state import OWN_FOLDER, StateFile, own_folder
from headrace_broker.compaction.segments import COMPACTION_FOLDER, Folders
from headrace_broker.compaction.swap import Swap
from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.positions import PositionFile
from headrace_broker.store.queues.cold_queue import ColdQueue
from headrace_broker.topics.attributes import is_compacted
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from headrace_broker.compaction.checkpoint import PositionCheckpoint
    from headrace_broker.compaction.units import FileSizes
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_broker.topics.table import TopicTable

log = structlog.get_logger("headrace.broker")

_CREATED_FILE: Final = "created.json"
_GIVEN_UP_FILE: Final = "given-up"
_SEED_FILE: Final = "seed.json"
_KEYS_FOLDER: Final = "keys"
Name = tuple[str, int]


class _Created(msgspec.Struct, frozen=True, rename="camel"):
    created_at: int


class _Seed(msgspec.Struct, frozen=True):
    """seed: hexadecimal digits."""

    seed: str


class CompactedQueue(NamedTuple):
    """An open log with what reads and compacts it.

    replica: what a rebuild has pulled. created_at: of its topic, see ``Incarnations``.
    lost: names a lost log and the remedies; "" if the log is there.
    """

    log: QueueLog
    reader: LogReader
    swap: Swap
    state_file: StateFile
    key_index: KeyIndex
    replica: Replica
    created_at: int
    lost: str = ""

    def require_whole(self) -> None:
        """Raise RequestError if the log is lost."""
        if self.lost:
            raise RequestError(ResponseCode.SYSTEM_ERROR, self.lost)


class CompactedQueues:
    """Opens, finds and deletes compaction logs.

    lock: held by the thread that changes a log: the follower's, or that of a run.
    """

    def __init__(
        self,
        store: MessageStore,
        topics: TopicTable,
        sizes: FileSizes,
        positions: PositionCheckpoint,
    ) -> None:
        self._positions = positions
        self.lock = threading.RLock()
        self._store = store
        self._topics = topics
        self._sizes = sizes
        # How far the follower has brought a queue to disk; None if it has not begun.
        self.synced_offset: Callable[[Name], int | None] = lambda _name: None
        self._queues: dict[Name, CompactedQueue] = {}
        self._hash: KeyHash | None = None

    def wants(self, topic: str) -> bool:
        """True if a topic is compacted."""
        config = self._topics.get(topic)
        return config is not None and is_compacted(config)

    def load(self) -> None:
        """Open the logs of all compacted queues. Raises OSError, StoreError."""
        for topic in [*filter(is_compacted, self._topics.all())]:
            for queue in self._store.queues_of(topic.topic_name):
                self.open(queue.topic, queue.queue_id)

    def open(self, topic: str, queue_id: int) -> CompactedQueue:
        """A queue's log, read from disk or created. Raises OSError, StoreError."""
        created_at = self._created_at(topic)
        queue = self._queues.get((topic, queue_id))
        if queue is None or queue.created_at != created_at:
            lost = self._lost(topic, queue_id)
            if lost:
                log.error("compaction log is lost", reason=lost)
            else:
                self._adopt(topic, queue_id, created_at)
            queue = self._load(topic, queue_id, created_at)._replace(lost=lost)
            self._queues[topic, queue_id] = queue
        return queue

    def _lost(self, topic: str, queue_id: int) -> str:
        """Name a lost log and the remedies; "" if the log is there."""
        root, (_, oldest) = self._store.root, self._synced(topic, queue_id)
        own, folder = own_folder(root, topic, queue_id), Folders.of(root, topic, queue_id).log
        has_note = any((own / name).exists() for name in (_CREATED_FILE, _GIVEN_UP_FILE))
        was_followed = self.synced_offset((topic, queue_id))
        if not oldest or not was_followed or has_note or any(folder.glob("[0-9]*")):
            return ""
        return (
            f"the compaction log of queue {queue_id} of topic {topic} is lost, and the messages "
            f"before queue offset {oldest} are only there: mount or restore "
            f"{root / COMPACTION_FOLDER} and restart the broker, or pull them from another broker "
            f"with `headrace topic rebuild {topic} --from HOST:PORT`; to give them up, create the "
            f"file {own / _GIVEN_UP_FILE} and restart the broker"
        )

    def rebuilt(self, name: Name) -> None:
        """Accept the log of a queue as whole after a rebuild. Raises OSError."""
        queue = self._queues.get(name)
        if queue is not None and queue.lost:
            self._adopt(*name, queue.created_at)
            self._queues[name] = queue._replace(lost="")

    def lost(self) -> list[str]:
        """Each lost log with the remedies."""
        return [queue.lost for _, queue in sorted(self.all().items()) if queue.lost]

    def _created_at(self, topic: str) -> int:
        """The end of the CommitLog when a topic was created; see ``Incarnations``.

        A crash in the middle of another deletion may have taken its id.
        """
        deleted_end = self._store.dispatcher.deletions.ends.get(topic, 0)
        return max(self._topics.incarnations.created_at(topic), deleted_end)

    def _load(self, topic: str, queue_id: int, created_at: int) -> CompactedQueue:
        store, fs = self._store, self._store.fs
        folders = Folders.of(store.root, topic, queue_id)
        own = own_folder(store.root, topic, queue_id)
        swap, state_file = Swap(folders, own, fs), StateFile(own, fs)
        if not swap.is_begun:
            end_peer_swap(folders, fs)
        swap.recover()
        log = QueueLog(folders, self._sizes, fs)
        log.load(store.seals.find, is_clean=store.was_clean)
        found_end, (synced_offset, oldest) = log.whole_end, self._synced(topic, queue_id)
        log.resume(synced_offset, oldest)
        log.dropped_end = state_file.load().dropped_end(found_end, synced_offset)
        self._forget_runs(topic, queue_id, state_file, log.next_offset)
        reader, index = LogReader(log, store.commit_log.page_cache), self._new_index(own)
        replica = Replica(folders, own, self._sizes, fs)
        return CompactedQueue(log, reader, swap, state_file, index, replica, created_at)

    def cut(self, topic: str, queue_id: int, queue_offset: int) -> None:
        """Drop the messages of a log from an offset on; they are appended again. Raises OSError."""
        queue = self.open(topic, queue_id)
        queue.log.cut(queue_offset)
        queue.log.dropped_end = queue_offset
        queue.key_index.resume(queue_offset)
        self._forget_runs(topic, queue_id, queue.state_file, queue_offset)

    def _forget_runs(self, topic: str, queue_id: int, state_file: StateFile, end: int) -> None:
        """Messages that are appended again have not been part of a run, nor what a run dropped.

        Else a delete marker would go while the value that it hides is back.
        """
        state = state_file.load()
        if (cut := state.cut(end)) is not state:
            state_file.save(cut)
        if self._positions.get(topic, queue_id, sys.maxsize) >= end:
            self._positions.save(topic, queue_id, end - 1)

    def _new_index(self, own: Path) -> KeyIndex:
        store = self._store
        return KeyIndex(
            own / _KEYS_FOLDER,
            store.fs,
            self._key_hash(),
            store.commit_log.page_cache,
            trusts_count=store.was_clean,
        )

    def renew_index(self, topic: str, queue_id: int) -> None:
        """Have the key index made anew when a key is looked up: older messages are to come.

        Raises OSError.
        """
        queue = self._queues[topic, queue_id]
        queue.key_index.delete_files()
        # Lookups keep the old index until they are done.
        own = own_folder(self._store.root, topic, queue_id)
        self._queues[topic, queue_id] = queue._replace(key_index=self._new_index(own))

    def oldest_offset(self, topic: str, queue_id: int) -> int:
        """The first queue offset of a log, or the one with which it will begin."""
        segments = self.open(topic, queue_id).log.segments
        if segments:
            return segments[0].first_queue_offset
        return self._synced(topic, queue_id)[1]

    def _key_hash(self) -> KeyHash:
        """The hash of all key indexes; its seed is made once for a store."""
        if self._hash is None:
            folder = self._store.root / COMPACTION_FOLDER / OWN_FOLDER
            file = PositionFile(folder / _SEED_FILE, _Seed, self._store.fs)
            try:
                saved = file.load()
            except StoreFormatError as error:
                log.warning("key indexes are made anew", reason=str(error))
                saved = None
            if saved is None:
                saved = _Seed(os.urandom(SEED_BYTES).hex())
                file.save(saved)
            self._hash = KeyHash(bytes.fromhex(saved.seed))
        return self._hash

    def build_index(self, topic: str, queue_id: int) -> None:
        """Open the key index of a queue and enter what it lacks. Raises OSError, StoreError."""
        with self.lock:
            queue = self.open(topic, queue_id)
            if queue.key_index.is_open:
                return
            queue.swap.resume(queue.log)
            end = queue.log.end_offset
            enter_all(queue.key_index, queue.log.segments, end, _without_pause)
            queue.key_index.open(end)
            queue.key_index.sync()

    def sync_indexes(self) -> None:
        """Bring the key indexes to disk, so that a start need not enter keys again; in a thread.

        Raises OSError.
        """
        with self.lock:
            for queue in self._queues.values():
                if queue.key_index.is_open:
                    queue.key_index.sync()

    def _synced(self, topic: str, queue_id: int) -> tuple[int, int]:
        """The end of the log's synced part, and the oldest offset that the CommitLog has."""
        queue = self._store.find_queue(topic, queue_id)
        if queue is None:
            return 0, 0
        consume_queue = queue.consume_queue
        end, oldest = (
            consume_queue.max_offset,
            ColdQueue(consume_queue).first_at(self._store.commit_log.min_offset),
        )
        if self._store.was_clean:
            return end, oldest
        return min(self.synced_offset((topic, queue_id)) or 0, end), oldest

    def _adopt(self, topic: str, queue_id: int, created_at: int) -> None:
        """Note whose messages the log has, after deleting those of an earlier topic.

        A log without the note is Apache's, or of the time before the broker kept such notes.
        """
        path = own_folder(self._store.root, topic, queue_id) / _CREATED_FILE
        file = PositionFile(path, _Created, self._store.fs)
        known = file.load()
        if known is not None and known.created_at < created_at:
            self._delete_files(topic, queue_id)
            known = None
        if known is None:
            file.save(_Created(created_at))

    def find(self, queue: StoreQueue) -> CompactedQueue | None:
        """The log of a queue that exists; None until the follower has opened it."""
        found = self._queues.get((queue.topic, queue.queue_id))
        if found is None:
            return None
        created_at = self._created_at(queue.topic)
        return found if found.created_at == created_at else None

    def all(self) -> dict[Name, CompactedQueue]:
        """All open logs."""
        return self._queues.copy()

    def delete(self, topic: str, queue_id: int) -> None:
        """Delete the log of a queue that is gone. Raises OSError."""
        self._queues.pop((topic, queue_id), None)
        self._delete_files(topic, queue_id)

    def close(self) -> None:
        """Release the maps of all logs."""
        for queue in self.all().values():
            queue.key_index.close()
            for segment in queue.log.segments:
                segment.unmap()

    def _delete_files(self, topic: str, queue_id: int) -> None:
        self._positions.drop(topic, queue_id)
        # The note goes last: without it a start would take the rest for the new topic's.
        folders = (
            *Folders.of(self._store.root, topic, queue_id),
            own_folder(self._store.root, topic, queue_id),
        )
        for folder in folders:
            if folder.exists():
                self._delete_folder(folder)

    def _delete_folder(self, folder: Path) -> None:
        for path in sorted(folder.iterdir()):
            if path.is_dir():
                self._delete_folder(path)
            else:
                self._store.fs.unlink(path)
        folder.rmdir()


def _without_pause(_byte_count: int) -> None:
    pass
