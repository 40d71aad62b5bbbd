"""The store: the interface that the rest of the broker uses."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import trio

from headrace_broker.clock import SystemClock
from headrace_broker.store.errors import StoreError, StoreFormatError
from headrace_broker.store.files.filesystem import Files, make_private
from headrace_broker.store.opening import Opening
from headrace_broker.store.parts import StoreParts
from headrace_broker.store.statistics import StoreStatistics
from headrace_broker.store.upkeep import StartSoon, Upkeep
from headrace_protocol.errors import reason_of
from headrace_protocol.waiting import at_once, take_break

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from headrace_broker.clock import Clock
    from headrace_broker.store.files.mapped_file import MappedFile
    from headrace_broker.store.reader import KeyQuery, WantedMessages
    from headrace_broker.store.recovery import OnProgress, RecoveryReport, Scan
    from headrace_broker.store.retention.disk_forecast import LowestUnconsumed
    from headrace_broker.store.retention.topic_floors import TopicLimit
    from headrace_broker.store.settings import StoreSettings
    from headrace_protocol.message import StoredMessage

# A directory with files but none of these is not a store.
STORE_NAMES = frozenset(("commitlog", "consumequeue", "config", "checkpoint", "lock", "index"))


class MessageStore(StoreParts):
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
    ) -> None:
        """Nothing on disk is touched.

        use_threads: while the store runs, index large blocks and flush on request in threads.
        start_soon: see ``Upkeep``.
        on_progress: called in the loading thread; an exception that it raises ends the start.
        """
        clock, files = clock or SystemClock(), files or Files()
        super().__init__(settings, clock, files, use_threads=use_threads)
        self.upkeep = Upkeep(self, start_soon)
        self.on_progress = on_progress

    # --- start and stop --------------------------------------------------------------------

    def load(self) -> RecoveryReport:
        """``open`` and ``recover``, for a store without features."""
        self.open()
        return self.recover()

    def open(self) -> None:
        """Lock the directory and load its files.

        Raises StoreLocked or StoreFormatError, after which nothing has changed, or StoreError for
        an error of the file system.
        """
        self._check_directory()
        with self._abandoned_on_error():
            make_private(self.root)
            self.lock.acquire()
            self.fs.check_owner = self.lock.check
            self._opening = Opening(self, self.on_progress)
            self._opening.load()

    def recover(self, scans: Sequence[Scan] = ()) -> RecoveryReport:
        """Read the end of the log, recover what a crash has left, and accept messages.

        scans: get the records that are read. Raises StoreError.
        """
        with self._abandoned_on_error():
            return self._opening.recover(scans)

    @contextmanager
    def _abandoned_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.abandon()
            raise StoreError(f"store {self.root} cannot be opened: {reason_of(error)}") from error
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
        await self.upkeep.run(task_status)

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
        # Without a seal damage goes unnoticed, but the stop is clean all the same.
        with suppress(OSError):
            self.seals.save(self.flusher.checkpoint, used)

    def delete_topic(self, topic: str) -> None:
        """As ``delete_queues`` in one step, then flush. Raises OSError."""
        at_once(self.delete_queues(topic))
        self.flusher.flush_now()

    async def delete_queues(self, topic: str) -> None:
        """Remove the topic's ConsumeQueues; its records stay in the log but become unreachable.

        Others may run in between. A crash leaves the topic
        whole or empty. The StoreQueue objects must not be used afterwards. Raises OSError.
        """
        self._finish_dispatch()
        log_end = self.commit_log.max_offset
        await self.dispatcher.deletions.note(topic, log_end, use_threads=self.use_threads)
        self.batch_topics.discard(topic)
        folders = set()
        for queue in self.queues_of(topic):
            self.forget_queue(queue)
            queue.consume_queue.delete()
            folders.add(folder := queue.consume_queue.files.directory.parent)
            self.fs.mark_names_unsynced(folder)
            await take_break()
        for folder in folders:
            with suppress(OSError):  # the topic may have new queues by now
                folder.rmdir()
                self.fs.mark_names_unsynced(folder.parent)

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
        if self.reader.has_unit(self.table.by_name, physical_offset):
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

    def query_index(self, wanted: WantedMessages) -> KeyQuery:
        """As ``Reader.query_index``, but everything confirmed so far is indexed first."""
        return self.reader.query_index(wanted, partial(self._index_up_to, self.ring.written))

    def _index_up_to(self, row_count: int) -> bool:
        """Index a block of the first ``row_count`` rows; returns whether that made progress."""
        taken = self.indexer.cursor.taken
        if taken < row_count:
            self.write_path.drain_taker(self.indexer, self.indexer.drain_block)
        return taken < self.indexer.cursor.taken

    # --- monitor ---------------------------------------------------------------------------

    def failure(self) -> str | None:
        """The reason of a refusal until the next start; None while the store can still write."""
        life = self.commit_log.life
        return None if life.is_writable else str(life.refusal)

    def statistics(self) -> StoreStatistics:
        """A snapshot for the monitor."""
        refusal, disk = self.commit_log.life.refusal, self.disk_usage()
        return StoreStatistics(
            min_offset=self.commit_log.min_offset,
            max_offset=self.commit_log.max_offset,
            flushed_offset=self.commit_log.flushed_offset,
            dispatched_offset=self.dispatched_offset(),
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
            queue_count=len(self.table.by_name),
            cleaner=self.cleaner.status(),
            followers=self.followers.statistics(),
        )
