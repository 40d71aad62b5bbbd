"""The store: the interface that the rest of the broker uses."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import trio

from headrace_broker.clock import SystemClock
from headrace_broker.store.errors import StoreError, StoreFormatError
from headrace_broker.store.files.file_seal import FileSeal
from headrace_broker.store.files.filesystem import (
    RESERVE_BYTES_MAX,
    DiskUsage,
    Files,
    make_private,
)
from headrace_broker.store.files.warmup import newest_files, warm
from headrace_broker.store.followers.follower_work import POSITIONS_FOLDER
from headrace_broker.store.followers.followers import Followers
from headrace_broker.store.index.index_file import HEADER_BYTES, IndexFiles
from headrace_broker.store.index.indexer import BLOCK_ROWS_MAX, Indexer, log_vanished
from headrace_broker.store.integrity.checkpoint import INDEX_MARK_NAME, Checkpoint
from headrace_broker.store.integrity.lock import StoreLock
from headrace_broker.store.integrity.seal import Seals, Used
from headrace_broker.store.life import State
from headrace_broker.store.log.commit_log import CommitLog
from headrace_broker.store.log.log_rows import LogRows, scan_from
from headrace_broker.store.log.record_checksum import SLOT_BYTES
from headrace_broker.store.log.ring import Ring
from headrace_broker.store.log.takers import taken_offset
from headrace_broker.store.queues.consume_queue import ConsumeQueue
from headrace_broker.store.queues.deletions import Deletions
from headrace_broker.store.queues.dispatch import Dispatcher
from headrace_broker.store.queues.peer_queues import BATCH_FOLDER, PeerQueues
from headrace_broker.store.queues.queue_table import QueueTable, queue_folders
from headrace_broker.store.reader import Reader
from headrace_broker.store.recovery import (
    LoadStage,
    Recovery,
    RecoveryReport,
    first_records,
    index_durable_offset,
    log_durable_offset,
    plan_recovery,
    queues_durable_offset,
    unclean_start,
)
from headrace_broker.store.retention.cleaner import Cleaner
from headrace_broker.store.retention.healer import Healer
from headrace_broker.store.statistics import StoreStatistics
from headrace_broker.store.store_queue import StoreQueue
from headrace_broker.store.store_source import StoreSource
from headrace_broker.store.write.confirmation import Confirmation, Gate
from headrace_broker.store.write.flush import Flusher
from headrace_broker.store.write.write_path import WritePath

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from headrace_broker.clock import Clock
    from headrace_broker.store.files.mapped_file import MappedFile
    from headrace_broker.store.log.takers import Taker
    from headrace_broker.store.reader import IndexType, KeyQuery
    from headrace_broker.store.recovery import OnProgress, RecoveryPlan
    from headrace_broker.store.retention.disk_forecast import LowestUnconsumed
    from headrace_broker.store.retention.topic_floors import TopicLimit
    from headrace_broker.store.settings import StoreSettings
    from headrace_protocol.errors import NotReady
    from headrace_protocol.message import StoredMessage

# A directory with files but none of these is not a store.
STORE_NAMES = frozenset(("commitlog", "consumequeue", "config", "checkpoint", "lock", "index"))

# How often a long recovery brings its results to disk, so that an interrupted one can resume.
SAVE_PROGRESS_MS = 60_000

StartSoon = Callable[[trio.Nursery, Callable[[], Awaitable[None]]], None]

LOCK_CHECK_S = 1.0


class MessageStore:
    """A store directory: load() first, then run() in a nursery, finally close() or abandon().

    Only the loop's thread may call it; only run() awaits.
    """

    def __init__(
        self,
        settings: StoreSettings,
        clock: Clock | None = None,
        files: Files | None = None,
        *,
        use_threads: bool = False,
        start_soon: StartSoon = trio.Nursery.start_soon,
        on_progress: OnProgress = lambda _stage, _done, _bound: None,
        more_takers: Sequence[Taker] = (),
    ) -> None:
        """Nothing on disk is touched.

        use_threads: while the store runs, index large blocks and flush on request in threads.
        start_soon: starts a loop in a nursery; every loop can restart after an error.
        on_progress: called in the loading thread; an exception that it raises ends the start.
        more_takers: takers besides the ConsumeQueues and the index.
        """
        self.settings = settings
        self.root = settings.root
        self.clock = clock or SystemClock()
        self.fs = files or Files()
        # Whether the last process stopped in order; known once this is loaded.
        self.was_clean = False
        self._batch_topics: frozenset[str] = frozenset()
        self.ring = Ring(settings.ring_rows)
        self._table = QueueTable(self.ring)
        self.queues = self._table.by_key
        self.commit_log = CommitLog(
            settings, self.fs, self.ring, self.clock, self._request_next_file, self._on_file_full
        )
        self.index_files = IndexFiles(settings, self.fs, log_vanished)
        self.dispatcher = Dispatcher(self.ring, self.queues, Deletions(self.root, self.fs))
        self.indexer = Indexer(self.ring, self.commit_log, self.index_files, self.queues)
        for taker in more_takers:
            taker.join(self.ring)
        self.takers: tuple[Taker, ...] = (self.dispatcher, self.indexer, *more_takers)
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
            settings.root, self.commit_log, self._table.by_topic, self._dispatched_offset
        )
        self.write_path.on_published(self.followers.notify)
        self.cleaner = self._new_cleaner()
        self.seals = Seals(settings.root, self.fs)
        self.lock = StoreLock(settings.root)
        self._next_file_requested = trio.Event()
        self._file_filled = trio.Event()
        self._full_files: deque[MappedFile] = deque()
        self.use_threads = use_threads
        self.healer = Healer(
            self.commit_log, self._drain_refused, self.cleaner.ask, use_threads=use_threads
        )
        self._index_threads = trio.CapacityLimiter(1)
        self._start_soon = start_soon
        self.on_progress = on_progress

    def _new_cleaner(self) -> Cleaner:
        return Cleaner(
            self.settings,
            self.commit_log,
            self.index_files,
            self._table.by_topic,
            self._settled_offset,
            self.flusher.flush_thoroughly,
            self._durable_offset,
            self.followers.oldest,
            self._hurry,
        )

    def _hurry(self) -> None:
        """Hurry the flush and the followers, which keep log files, on a disk short of room."""
        self.flusher.request_flush()
        self.followers.hurry()

    # --- start and stop --------------------------------------------------------------------

    def load(self) -> RecoveryReport:
        """Lock the directory, load its files and recover them.

        Raises StoreLocked or StoreFormatError, after which nothing has changed, or StoreError for
        an error of the file system.
        """
        self._check_directory()
        try:
            make_private(self.root)
            self.lock.acquire()
            self.fs.check_owner = self.lock.check
            return self._load_locked()
        except OSError as error:
            self.abandon()
            reason = error.strerror or str(error)
            raise StoreError(f"store {self.root} cannot be opened: {reason}") from error
        except BaseException:
            self.abandon()
            raise

    def _check_directory(self) -> None:
        if not self.root.exists():
            return
        if not self.root.is_dir():
            raise StoreFormatError(self.root, "is a file", "name a directory")
        names = {path.name for path in self.root.iterdir()} - {"lost+found"}
        if names and not names & STORE_NAMES:
            raise StoreFormatError(
                self.root,
                f"is no store: it holds {', '.join(sorted(names)[:3])}",
                "name an empty directory or a store's directory",
            )

    def _load_locked(self) -> RecoveryReport:
        abort = self.root / "abort"
        is_clean = not abort.exists()
        self.flusher.checkpoint = Checkpoint.load(self.flusher.checkpoint_path)
        self.dispatcher.deletions.load()
        self.commit_log.files.load(is_clean=is_clean)
        if not is_clean:
            self._check_peer_queues()
        self._load_queues(is_clean=is_clean)
        self.index_files.load(is_clean=is_clean)
        self._check_seals(is_clean=is_clean)
        self.fs.reserve.open(self.root)
        self.fs.reserve.save(lambda: self._write_abort(abort))
        self.was_clean = is_clean
        if self._disk_usage().usable_bytes < RESERVE_BYTES_MAX:
            self.fs.reserve.release()  # what recovery writes again may need it
        report = self._recover(is_clean=is_clean)
        self.fs.reserve.fill()
        self.cleaner.trimmer.load()
        for queue in self.queues:
            queue.consume_queue.loaded()
        self.write_path.begin()
        self.commit_log.accept()
        return report

    def _check_peer_queues(self) -> None:
        """Reject queues that only Apache's broker can recover; few stores have any.

        Raises StoreFormatError.
        """
        peer_queues = PeerQueues(self.root)
        log_files = self.commit_log.files.files
        if not peer_queues or not log_files:
            return
        start = unclean_start(first_records(log_files), self.flusher.checkpoint)
        scan = scan_from(self.commit_log.files, start)
        scanned_from = scan.end_offset
        for block in scan:
            peer_queues.check(block)
            done, bound = block.end_offset - scanned_from, log_files[-1].end_offset - scanned_from
            self.on_progress(LoadStage.LOG, done, bound)
        peer_queues.check_end(scan.end_offset)
        peer_queues.sync(self.fs)

    def _check_seals(self, *, is_clean: bool) -> None:
        """Attach the seals, and verify what a clean start relies on.

        The rest is verified when it is first read. Raises StoreDamaged.
        """
        self.seals.load()
        log_files = self.commit_log.files.files
        for file in log_files:
            file.seal = self.seals.find(file.path)
        if not is_clean or not self.seals.is_of(self.flusher.checkpoint):
            return
        newest_unit = -1
        for queue in self.queues:
            newest_unit = max(newest_unit, queue.consume_queue.attach_seals(self.seals))
        for index_file in self.index_files.files:
            index_file.file.seal = self.seals.find(index_file.file.path)
            index_file.file.require(0, HEADER_BYTES)
        for file in log_files:
            if file.end_offset > newest_unit:
                file.require(max(newest_unit - file.start_offset, 0), file.file_bytes)

    def _write_abort(self, path: Path) -> None:
        # On disk before anything else changes, else a power cut would look like a clean stop.
        descriptor = self.fs.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            self.fs.write(descriptor, str(os.getpid()).encode(), 0)
            self.fs.fsync(descriptor)
        finally:
            self.fs.close(descriptor)
        self.fs.fsync_directory(self.root)

    def _load_queues(self, *, is_clean: bool) -> None:
        self._batch_topics = frozenset(path.name for path in (self.root / BATCH_FOLDER).glob("*"))
        folders = queue_folders(self.root / "consumequeue")
        ends = self.dispatcher.deletions.ends
        for number, (topic, name) in enumerate(folders, 1):
            if not name.isdigit():
                raise StoreFormatError(
                    self.root / "consumequeue" / topic / name,
                    "is not named like a queue id",
                    "move it out of the store's directory",
                )
            queue = self.queue(topic, int(name))
            queue.consume_queue.load(is_clean, self.flusher.checkpoint.logics_physical_offset)
            if 0 <= queue.consume_queue.last_physical_offset < ends.get(topic, 0):
                # Of a deleted topic: a power cut has undone its removal.
                self._forget_queue(queue)
                queue.consume_queue.delete()
            queue.next_offset = queue.consume_queue.max_offset
            self.on_progress(LoadStage.QUEUES, number, len(folders))

    def _recover(self, *, is_clean: bool) -> RecoveryReport:
        recovery = Recovery(
            self.commit_log,
            self.takers,
            LogRows(
                self.queue,
                self._batch_topics,
                self.settings.delay_levels_ms,
                self.dispatcher.deletions.ends,
            ),
        )
        plan = self._plan_recovery(is_clean=is_clean)
        saved_ms = self.clock.now_ms()

        def save_and_report(stage: LoadStage, done: int, bound: int) -> None:
            nonlocal saved_ms
            if self.clock.now_ms() - saved_ms >= SAVE_PROGRESS_MS:
                self._save_progress(recovery, plan)
                saved_ms = self.clock.now_ms()
            self.on_progress(stage, done, bound)

        report = recovery.run(plan, is_clean=is_clean, on_progress=save_and_report)
        self._note_recovered(recovery)
        self.dispatcher.deletions.settle(self.commit_log.min_offset, report.log_end)
        if not is_clean:
            # The bytes that a killed process wrote may still be only in the page cache.
            self.commit_log.flushed_offset = report.scanned_from
            self._mark_names_unsynced()
            self.flusher.flush_now()
        return report

    def _plan_recovery(self, *, is_clean: bool) -> RecoveryPlan:
        checkpoint = self.flusher.checkpoint
        if not is_clean:
            self.index_files.recover(checkpoint.index_msg_timestamp, self.root / INDEX_MARK_NAME)
        newest_units = [queue.consume_queue.last_physical_offset for queue in self.queues]
        newest_unit = max(newest_units, default=-1)
        files = first_records(self.commit_log.files.files)
        queues_durable = queues_durable_offset(
            is_clean=is_clean, files=files, newest_unit=newest_unit, checkpoint=checkpoint
        )
        index_durable = index_durable_offset(
            is_clean=is_clean,
            index_end=self.index_files.end_physical_offset,
            queues_durable=queues_durable,
        )
        rewrite_from = log_durable_offset(is_clean=is_clean, files=files, checkpoint=checkpoint)
        self.dispatcher.loaded(newest_unit, queues_durable)
        self.indexer.loaded(index_durable)
        if newest_unit < 0:
            self.flusher.reset_queue_checkpoint()
        durable_offsets = {taker.name: taker.durable_offset() for taker in self.takers}
        return plan_recovery(files, newest_unit, durable_offsets, rewrite_from)

    def _note_recovered(self, recovery: Recovery) -> None:
        """Hand the recovered data to the takers' next flush, which moves the checkpoint."""
        for taker in self.takers:
            taker.recovered(recovery.newest)

    def _save_progress(self, recovery: Recovery, plan: RecoveryPlan) -> None:
        """Bring the results of recovery so far to disk, where an interrupted start resumes."""
        assert recovery.newest is not None
        newest_offset, _ = recovery.newest
        # The log too: the bytes that a killed process wrote may still be only in the page cache.
        for file in self.commit_log.files.files:
            if plan.scan_from < file.end_offset and file.start_offset <= newest_offset:
                file.sync()
        self._note_recovered(recovery)
        self._mark_names_unsynced()
        self.flusher.flush_now()

    def _mark_names_unsynced(self) -> None:
        """Have the next flush sync all folders that may have new files since the checkpoint.

        Tables and positions too: what they say is acted on, so a power cut must not bring back
        those that a killed process was about to replace.
        """
        queue_folders = {queue.files.directory for queue in self.dispatcher.dirty}
        for folder in (
            self.root,
            self.root / "config",
            self.root / POSITIONS_FOLDER,
            self.commit_log.files.directory,
            self.index_files.directory,
            self.root / "consumequeue",
            *queue_folders,
            *(folder.parent for folder in queue_folders),
        ):
            self.fs.mark_names_unsynced(folder)

    def connect(
        self,
        *,
        unconsumed: Callable[[], LowestUnconsumed],
        carriers: Mapping[str, Callable[[int], Awaitable[None]]],
        topic_limits: Callable[[], Mapping[str, TopicLimit]],
        wait_tables_saved: Callable[[], Awaitable[None]],
        answering: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Set the callbacks of clean-up and flush; see ``Cleaner`` and ``Flusher``.

        They are not constructor arguments, because they read tables in this directory, which
        are loaded only after it is locked.
        """
        self.cleaner.unconsumed = unconsumed
        self.cleaner.carriers = carriers
        self.cleaner.topic_limits = topic_limits
        self.flusher.wait_tables_saved = wait_tables_saved
        self.flusher.answering = answering

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Flush, index, clean up and prepare files until cancelled."""
        self.cleaner.use_threads = self.use_threads
        async with trio.open_nursery() as nursery:
            if self.use_threads:
                self._start_soon(nursery, self._run_seal_full_files)
                self._start_soon(nursery, self._warm_up)
                self._start_soon(nursery, self.flusher.run_thorough_flushes)
            self._start_soon(nursery, self.write_path.run)
            self._start_soon(nursery, self.flusher.run_group_commit)
            self._start_soon(nursery, self.flusher.run_log_flush)
            self._start_soon(nursery, self.flusher.run_queue_flush)
            await self.cleaner.begin()
            self._start_soon(nursery, self.cleaner.run)
            self._start_soon(nursery, self._run_index)
            self._start_soon(nursery, self._run_prepare_files)
            self._start_soon(nursery, self.healer.run)
            self._start_soon(nursery, self._run_lock_check)
            for following in self.followers.all:
                following.on_saved = self._clean_if_tight
                self._start_soon(nursery, following.run)
            task_status.started()

    def close(self) -> None:
        """Finish dispatch and bring everything to disk if loaded, then ``abandon`` the directory.

        The abort file stays if anything could not be brought to disk. Raises OSError.
        """
        try:
            if not self.commit_log.life.is_writable:
                return
            self.lock.check()
            self._finish_dispatch()
            self.commit_log.files.drop_prepared()
            self.flusher.flush_now()
            is_followed = self.followers.finish()
            # On a full disk too, if it had room for all that is derived from the log.
            if self.commit_log.life.is_writable and self._dispatched_all:
                used = self._used()
                for file, used_bytes in used:
                    file.give_back(used_bytes)
                self._seal([*used, *self.followers.used()])
                if is_followed and not self.index_files.lost_from:
                    (self.root / "abort").unlink()
        finally:
            self.abandon()

    @property
    def _dispatched_all(self) -> bool:
        return all(taker.cursor.taken == self.ring.written for taker in self.takers)

    def abandon(self) -> None:
        """Release the directory as the end of the process would, writing nothing.

        Descriptors, maps and the lock are released; a map in use goes with the last view of it.
        """
        self.commit_log.close()
        self.followers.close()
        for queue in self.queues:
            queue.consume_queue.unmap()
        index = [index_file.file for index_file in self.index_files.files]
        for file in (*self.commit_log.files.files, *index, *self.cleaner.detached):
            file.unmap()
        self.lock.release()

    def _used(self) -> list[tuple[MappedFile, int]]:
        """Each file of log, index and queues, and the bytes of it in use."""
        used = [*self.commit_log.used, *self.index_files.used]
        for queue in self.queues:
            used += queue.consume_queue.used
        return used

    def _seal(self, used: list[tuple[MappedFile, int]]) -> None:
        files = [Used(file, used_bytes, file.seal) for file, used_bytes in used]
        # Without a seal damage goes unnoticed, but the stop is clean all the same.
        with suppress(OSError):
            self.seals.save(self.flusher.checkpoint, files)

    # --- queues ----------------------------------------------------------------------------

    def queue(self, topic: str, queue_id: int) -> StoreQueue:
        """The queue, created in memory if new; its folder is created with its first message.

        Raises ValueError for a topic that cannot be a folder name.
        """
        queue = self._table.by_name.get((topic, queue_id))
        return queue if queue is not None else self._add_queue(topic, queue_id)

    def find_queue(self, topic: str, queue_id: int) -> StoreQueue | None:
        """The queue, or None if it does not exist."""
        return self._table.by_name.get((topic, queue_id))

    def source(self, queue: StoreQueue) -> StoreSource:
        """The source that reads a queue of this store."""
        return StoreSource(queue, self.commit_log)

    def topics(self) -> set[str]:
        """The topics that have queues."""
        return {*self._table.by_topic}

    def queues_of(self, topic: str) -> list[StoreQueue]:
        """All queues of a topic that exist, by queue id."""
        return self._table.of_topic(topic)

    def _add_queue(self, topic: str, queue_id: int) -> StoreQueue:
        if topic in {"", ".", ".."} or "/" in topic or "\0" in topic or queue_id < 0:
            raise ValueError(f"{topic!r}/{queue_id} cannot be the name of a queue")
        directory = self.root / f"consumequeue/{topic}/{queue_id}"
        consume_queue = ConsumeQueue(directory, self.settings.consume_queue_file_bytes, self.fs)
        checksum_bytes = SLOT_BYTES if self.settings.appends_checksums else 0
        key = self._table.free_key()
        queue = StoreQueue(topic, queue_id, key, consume_queue, checksum_bytes)
        self._table.add(queue)
        self.indexer.note(queue)
        return queue

    def delete_topic(self, topic: str) -> None:
        """As ``delete_queues`` in one step, then flush. Raises OSError."""
        for wait in filter(None, self.delete_queues(topic)):
            wait.fetch()
        self.flusher.flush_now()

    def delete_queues(self, topic: str) -> Iterator[NotReady | None]:
        """Remove the topic's ConsumeQueues; its records stay in the log but become unreachable.

        Yields a wait if the store uses threads, and None after each queue. A crash leaves the topic
        whole or empty. The StoreQueue objects must not be used afterwards. Raises OSError.
        """
        self._finish_dispatch()
        log_end = self.commit_log.max_offset
        yield from self.dispatcher.deletions.note(topic, log_end, use_threads=self.use_threads)
        folder = self.root / "consumequeue"
        for queue in self.queues_of(topic):
            self._forget_queue(queue)
            queue.consume_queue.delete()
            self.fs.mark_names_unsynced(folder / topic)
            yield None
        with suppress(OSError):  # the topic may have new queues by now, or never had any
            (folder / topic).rmdir()
            self.fs.mark_names_unsynced(folder)

    def _forget_queue(self, queue: StoreQueue) -> None:
        self._table.remove(queue)
        self.followers.forget(queue)
        self.dispatcher.forget(queue)
        self.fs.map_budget.forget(queue.consume_queue)

    def when_log_flushed(self, callback: Callable[[bool], None]) -> None:
        """Call back with True once the log so far is on disk, False if that fails.

        Without ``use_threads`` the flush runs immediately. Raises OSError if that flush fails.
        """
        if self.use_threads:
            self.write_path.commit()
            self.flusher.when_flushed(self.commit_log.max_offset, callback)
        else:
            if self.commit_log.life.is_writable:
                self.flusher.flush_now()
            callback(self.commit_log.life.is_writable)

    def when_all_flushed(self, callback: Callable[[], None]) -> None:
        """Call back once everything written so far is on disk, or its flush has failed.

        Without ``use_threads`` the flush runs immediately. Raises OSError if that flush fails.
        """
        if self.use_threads:
            self.flusher.when_all_flushed(callback)
        else:
            if self.commit_log.life.is_writable:
                self.flusher.flush_now()
            callback()

    # --- requests --------------------------------------------------------------------------

    def index_tick(self) -> None:
        """Index all confirmed records."""
        self.write_path.drain_taker(self.indexer, self.indexer.drain_all)

    def _finish_dispatch(self) -> None:
        # After a failed flush another one would succeed although pages are lost.
        is_writable = self.commit_log.life.is_writable
        if is_writable and not self.write_path.confirmation.is_immediate:
            self.flusher.flush_log_now()
        self.write_path.drain_all()

    def message_at(self, physical_offset: int) -> memoryview | None:
        """The record of the message that begins at an offset, or None. Raises NotReady.

        A body may contain a forged record, so the message's unit, or the row of the ring that will
        become it, must point to the offset. Records without a unit (of deleted topics, or removed
        from their queue by the clean-up) and unconfirmed records are not served.
        """
        record = self.commit_log.record_at(physical_offset)
        if record is None:
            return None
        if self.reader.has_unit(self._table.by_name, physical_offset):
            return record
        confirmed_offset = self.write_path.confirmation.offset
        is_confirmed = confirmed_offset is None or physical_offset < confirmed_offset
        is_waiting = is_confirmed and self.ring.holds(self.dispatcher.cursor, physical_offset)
        return record if is_waiting else None

    def message_in(
        self, topic: str, queue_id: int, queue_offset: int, physical_offset: int
    ) -> StoredMessage | None:
        """The message of a queue that is at both offsets; None if there is none.

        Cheaper than ``message_at`` for a caller that knows both. Raises NotReady.
        """
        queue = self.find_queue(topic, queue_id)
        if queue is None:
            return None
        return self.reader.message_in(queue, queue_offset, physical_offset)

    def query_index(
        self,
        topic: str,
        key: str,
        max_count: int,
        begin_ms: int,
        end_ms: int,
        index_type: IndexType | None = None,
        before_offset: int | None = None,
    ) -> KeyQuery:
        """As ``Reader.query_index``, but everything confirmed so far is indexed first."""
        prepare = partial(self._index_up_to, self.ring.written)
        return self.reader.query_index(
            topic, key, max_count, begin_ms, end_ms, index_type, prepare, before_offset
        )

    def _index_up_to(self, row_count: int) -> bool:
        """Index a block of the first ``row_count`` rows; returns whether that made progress."""
        taken = self.indexer.cursor.taken
        if taken < row_count:
            self.write_path.drain_taker(self.indexer, self.indexer.drain_block)
        return taken < self.indexer.cursor.taken

    # --- loops -----------------------------------------------------------------------------

    async def _run_index(self) -> None:
        self.indexer.asked.set()
        while True:
            await self.indexer.asked.wait()
            await trio.sleep(self.settings.index_tick_ms / 1000)
            self.indexer.asked = trio.Event()
            # Later rows wait for the next tick, because small blocks cost most per row.
            end, taken = self.ring.written, -1
            # Stops at the confirmed offset; the next publish sets the event again.
            while taken < self.indexer.cursor.taken < end:
                taken = self.indexer.cursor.taken
                is_much = self.indexer.waiting_count > BLOCK_ROWS_MAX or self.index_files.is_sealed
                if self.use_threads and is_much:
                    await self._index_in_thread()
                else:
                    self.write_path.drain_taker(self.indexer, self.indexer.drain_block)
                if self.commit_log.life.state is not State.OPEN:
                    break  # a full disk: the healer retries
                await trio.lowlevel.checkpoint()

    async def _index_in_thread(self) -> None:
        """Index a large block in a thread, so that it does not block the loop."""
        self.write_path.commit()
        block = self.indexer.next_block(self.write_path.confirmation.offset)
        if not block.row_count:
            return
        try:
            await trio.to_thread.run_sync(
                self.indexer.put_copied, block, limiter=self._index_threads
            )
        except OSError as error:
            self.write_path.refuse(error, self.indexer)
        self.ring.release()

    def _request_next_file(self) -> None:
        self._next_file_requested.set()

    async def _run_prepare_files(self) -> None:
        self._next_file_requested.set()
        while True:
            await self._next_file_requested.wait()
            self._next_file_requested = trio.Event()
            # If this fails, the append that needs the file retries and reports the error.
            with suppress(OSError):
                await trio.to_thread.run_sync(self.commit_log.prepare_next_file)
            self._clean_if_tight()

    def _clean_if_tight(self) -> None:
        if self.commit_log.room.is_tight:
            self.cleaner.ask()

    async def _warm_up(self) -> None:
        """Read ahead the newest files of the log and of each queue; requests do not wait for it."""
        queues = [queue.consume_queue.used for queue in self.queues]
        files = newest_files(self.commit_log.used, queues)
        await trio.to_thread.run_sync(warm, files, self.fs, trio.from_thread.check_cancelled)

    def _on_file_full(self, file: MappedFile) -> None:
        if self.use_threads:
            self._full_files.append(file)
            self._file_filled.set()

    async def _run_seal_full_files(self) -> None:
        """Seal each log file when it is full; sealing all at the stop would take long."""
        while True:
            while self._full_files:
                file = self._full_files.popleft()
                with suppress(OSError):  # a deleted file needs no seal
                    file.seal = await trio.to_thread.run_sync(
                        FileSeal.of_written, file.path, file.file_bytes, file.seal
                    )
            await self._file_filled.wait()
            self._file_filled = trio.Event()

    def _drain_refused(self) -> None:
        self.write_path.publish()
        self.index_tick()

    async def _run_lock_check(self) -> None:
        """Stop writing once the lock is lost, because another broker may write here too."""
        try:
            while True:
                await trio.sleep(LOCK_CHECK_S)
                self.lock.check()
        except OSError as error:
            self.flusher.stop_writing(error.strerror or str(error))

    # --- monitor ---------------------------------------------------------------------------

    def failure(self) -> str | None:
        """Why messages are refused until the next start; None while the store can still write."""
        life = self.commit_log.life
        return None if life.is_writable else str(life.refusal)

    def statistics(self) -> StoreStatistics:
        """A snapshot for the monitor."""
        refusal, disk = self.commit_log.life.refusal, self._disk_usage()
        return StoreStatistics(
            min_offset=self.commit_log.min_offset,
            max_offset=self.commit_log.max_offset,
            flushed_offset=self.commit_log.flushed_offset,
            dispatched_offset=self._dispatched_offset(),
            behind_rows={
                taker.name: self.ring.written - taker.cursor.taken for taker in self.takers
            },
            ring_fill=self.ring.fill,
            slow_taker=self.ring.pressure(),
            longest_flush_ms=self.flusher.longest_flush_ms,
            disk_ratio=disk.ratio,
            disk_used_bytes=disk.used_bytes,
            refusal=str(refusal) if refusal else None,
            refused_since_ms=self.commit_log.life.since_ms,
            queue_count=len(self._table.by_name),
            cleaner=self.cleaner.status(),
            followers=self.followers.statistics(),
        )

    def _disk_usage(self) -> DiskUsage:
        """Disk usage; a disk that can't be queried (store removed) counts as full."""
        try:
            return self.commit_log.room.usage()
        except OSError:
            return DiskUsage(used_bytes=1, usable_bytes=0)

    def _dispatched_offset(self) -> int:
        """End of the log's records that are in the ConsumeQueues."""
        return taken_offset(self.dispatcher, self.commit_log.max_offset)

    def _settled_offset(self) -> int:
        """End of the log's records that are flushed, taken by every taker, and followed."""
        log_end = self.commit_log.max_offset
        taken_offsets = (taken_offset(taker, log_end) for taker in self.takers)
        needed_from = self.followers.needed_from()
        return min(*taken_offsets, self.commit_log.flushed_offset, needed_from)

    def _durable_offset(self) -> int:
        """End of the log's records for which every taker has its results on disk."""
        return min(taker.durable_offset() for taker in self.takers)
