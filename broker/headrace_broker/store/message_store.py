"""The store as the rest of the broker sees it."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import trio

from headrace_broker.clock import SystemClock
from headrace_broker.store.checkpoint import INDEX_MARK_NAME, Checkpoint
from headrace_broker.store.cleaner import Cleaner
from headrace_broker.store.commit_log import CommitLog
from headrace_broker.store.consume_queue import ConsumeQueue
from headrace_broker.store.dispatch import Dispatcher
from headrace_broker.store.errors import StoreError, StoreFormatError, StoreNotWritable
from headrace_broker.store.files import Files, make_private
from headrace_broker.store.flush import Flusher
from headrace_broker.store.followers import Followers
from headrace_broker.store.index_file import HEADER_BYTES, IndexFiles
from headrace_broker.store.indexer import BLOCK_ROWS_MAX, Indexer
from headrace_broker.store.lock import StoreLock
from headrace_broker.store.log_rows import LogRows, scan_from
from headrace_broker.store.peer_queues import BATCH_FOLDER, PeerQueues
from headrace_broker.store.reader import Reader
from headrace_broker.store.record_checksum import SLOT_BYTES
from headrace_broker.store.recovery import (
    LoadStage,
    Recovery,
    RecoveryReport,
    first_records,
    plan_recovery,
    unclean_start,
)
from headrace_broker.store.ring import Ring
from headrace_broker.store.seal import FileSeal, Seals, Used
from headrace_broker.store.store_queue import StoreQueue
from headrace_broker.store.warmup import newest_files, warm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headrace_broker.clock import Clock
    from headrace_broker.store.cleaner import CleanerStatus
    from headrace_broker.store.encoded_records import EncodedRecords
    from headrace_broker.store.followers import FollowerStatus
    from headrace_broker.store.mapped_file import MappedFile
    from headrace_broker.store.reader import IndexType, KeyQuery
    from headrace_broker.store.recovery import OnProgress, RecoveryPlan
    from headrace_broker.store.ring import Cursor
    from headrace_broker.store.settings import StoreSettings

# What a store's directory holds; anything else alone is somebody's other folder.
STORE_NAMES = frozenset(("commitlog", "consumequeue", "config", "checkpoint", "lock", "index"))

# A start that reads for long brings what it made to disk so often, and those after it begin there.
KEEP_MS = 60_000

StartSoon = Callable[[trio.Nursery, Callable[[], Awaitable[None]]], None]

LOCK_CHECK_S = 1.0

# Some ten milliseconds of files for queues that get their first message.
NEW_FILES_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """A snapshot for the monitor; offsets are physical."""

    min_offset: int
    max_offset: int
    flushed_offset: int
    dispatched_offset: int
    dispatch_behind_rows: int
    index_behind_rows: int
    ring_fill: float
    slow_stage: str | None
    longest_flush_ms: float
    disk_ratio: float
    refusal: str | None
    queue_count: int
    cleaner: CleanerStatus
    followers: tuple[FollowerStatus, ...]


class MessageStore:
    """A store directory: load() first, then run() in a nursery, close() last, or abandon().

    The loop's thread is the only one to call in; nothing here awaits but run().
    """

    def __init__(
        self, settings: StoreSettings, clock: Clock | None = None, files: Files | None = None
    ) -> None:
        """Touches nothing on disk."""
        self.settings = settings
        self.root = settings.root
        self.clock = clock or SystemClock()
        self.seam = files or Files()
        self.queues: list[StoreQueue] = []
        self._names: dict[tuple[str, int], StoreQueue] = {}
        self._topics: dict[str, dict[int, StoreQueue]] = {}
        # Keys of queues that are gone, and how many rows the ring had been given by then.
        self._gone_keys: deque[tuple[int, int]] = deque()
        self._batch_topics: frozenset[str] = frozenset()
        self.ring = Ring(settings.ring_rows, ("consumequeue", "index"))
        self.commit_log = CommitLog(settings, self.seam, self.ring, self.clock)
        self.index_files = IndexFiles(settings, self.seam)
        self.dispatcher = Dispatcher(self.ring, self.queues)
        self.indexer = Indexer(self.ring, self.commit_log, self.index_files, self.queues)
        self.reader = Reader(self.commit_log, self.index_files)
        self.flusher = Flusher(settings, self.seam, self.ring, self.commit_log, self.index_files)
        self.followers = Followers(
            settings.root, self.commit_log, self._topics, self._dispatched_offset
        )
        self.cleaner = Cleaner(
            settings,
            self.commit_log,
            self.index_files,
            self._topics,
            self._settled_from,
            self.flusher.flush_thoroughly,
            self.followers.slowest,
        )
        self.flusher.on_flushed = self._dispatch_unasked
        self.seals = Seals(settings.root, self.seam)
        self.lock = StoreLock(settings.root)
        self._dispatch_asked = trio.Event()
        self._index_asked = trio.Event()
        self._ahead_asked = trio.Event()
        self.commit_log.on_half_full = self._ask_ahead
        self._full_asked = trio.Event()
        self._full_files: deque[MappedFile] = deque()
        # While it runs threads index and flush what was asked for.
        self.works_aside = False
        self._index_threads = trio.CapacityLimiter(1)
        # Starts a loop; each of them can restart after an error.
        self.start_soon: StartSoon = trio.Nursery.start_soon
        # Called in the thread that loads; what it raises ends the start.
        self.on_progress: OnProgress = lambda _stage, _done, _most: None
        # Called with the queues that get units outside the caller's own dispatch().
        self.on_touched: Callable[[set[StoreQueue]], None] = lambda _: None
        # The hot path, without a call in between.
        self.append = self.commit_log.append
        self.append_each = self.commit_log.append_each
        self.append_batch = self.commit_log.append_batch
        self.write_out = self.commit_log.write_out
        self.record_at = self.commit_log.record_at
        self.get = self.reader.get
        self.get_bulk = self.reader.get_bulk
        self.offset_by_time = self.reader.offset_by_time
        self.store_time_at = self.reader.store_time_at
        self.min_offset = self.reader.min_offset
        self.unit = self.reader.unit
        self.when_flushed = self.flusher.when_flushed

    # --- start and stop --------------------------------------------------------------------

    def load(self) -> RecoveryReport:
        """Lock the directory, read what is there and bring it in order.

        Raises StoreLocked, StoreFormatError, or StoreError when the disk says no; nothing was
        changed in the first two cases.
        """
        self._check_directory()
        try:
            make_private(self.root)
            self.lock.acquire()
            self.seam.check_owner = self.lock.check
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
                "name an empty directory or that of a store",
            )

    def _load_locked(self) -> RecoveryReport:
        abort = self.root / "abort"
        is_clean = not abort.exists()
        self.flusher.checkpoint = Checkpoint.load(self.flusher.checkpoint_path)
        self.commit_log.files.load(is_clean=is_clean)
        if not is_clean:
            self._check_peer_queues()
        self._load_queues(is_clean=is_clean)
        self.index_files.load(is_clean=is_clean)
        self._check_seals(is_clean=is_clean)
        self._write_abort(abort)
        report = self._recover(is_clean=is_clean)
        self.cleaner.trimmer.load()
        for queue in self.queues:
            queue.consume_queue.loaded()
        self.begin_batch()
        self.commit_log.accept()
        return report

    def _check_peer_queues(self) -> None:
        """Refuse what only Apache's broker can recover; few stores have any of it.

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
            done, most = block.end_offset - scanned_from, log_files[-1].end_offset - scanned_from
            self.on_progress(LoadStage.LOG, done, most)
        peer_queues.check_end(scan.end_offset)
        peer_queues.sync(self.seam)

    def _check_seals(self, *, is_clean: bool) -> None:
        """Compare what a clean start goes by; the rest is compared when it is first read.

        Raises StoreDamaged.
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
        # On disk before anything else changes: without it a power cut would look like a clean stop.
        descriptor = self.seam.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            self.seam.write(descriptor, str(os.getpid()).encode(), 0)
            self.seam.fsync(descriptor)
        finally:
            self.seam.close(descriptor)
        self.seam.fsync_directory(self.root)

    def _load_queues(self, *, is_clean: bool) -> None:
        self._batch_topics = frozenset(path.name for path in (self.root / BATCH_FOLDER).glob("*"))
        folders = _queue_folders(self.root / "consumequeue")
        for number, (topic, name) in enumerate(folders, 1):
            if not name.isdigit():
                raise StoreFormatError(
                    self.root / "consumequeue" / topic / name,
                    "is no queue id",
                    "move it out of the store's directory",
                )
            queue = self.queue(topic, int(name))
            queue.consume_queue.load(is_clean, self.flusher.checkpoint.logics_physical_offset)
            queue.next_offset = queue.consume_queue.max_offset
            self.on_progress(LoadStage.QUEUES, number, len(folders))

    def _recover(self, *, is_clean: bool) -> RecoveryReport:
        recovery = Recovery(
            self.commit_log,
            self.dispatcher,
            self.indexer,
            LogRows(self.queue, self._batch_topics, self.settings.delay_levels_ms),
        )
        checkpoint = self.flusher.checkpoint
        if not is_clean:
            self.index_files.recover(checkpoint.index_msg_timestamp, self.root / INDEX_MARK_NAME)
        newest_unit = max(
            (queue.consume_queue.last_physical_offset for queue in self.queues), default=-1
        )
        plan = plan_recovery(
            is_clean=is_clean,
            files=first_records(self.commit_log.files.files),
            newest_unit=newest_unit,
            index_end=self.index_files.end_physical_offset,
            checkpoint=checkpoint,
        )
        if newest_unit < 0:
            self.flusher.forget_queues()
        kept_ms = self.clock.now_ms()

        def keep_and_tell(stage: LoadStage, done: int, most: int) -> None:
            nonlocal kept_ms
            if self.clock.now_ms() - kept_ms >= KEEP_MS:
                self._keep_recovered(recovery, plan)
                kept_ms = self.clock.now_ms()
            self.on_progress(stage, done, most)

        report = recovery.run(plan, newest_unit, is_clean=is_clean, on_progress=keep_and_tell)
        self._take_over(recovery)
        if not is_clean:
            # A killed process leaves in memory what no flush has brought to disk.
            self.commit_log.flushed_offset = report.scanned_from
            self._doubt_names()
            self.flusher.flush_now()
        return report

    def _take_over(self, recovery: Recovery) -> None:
        """Have the next flush bring to disk what was made, and say so in the checkpoint."""
        self.flusher.newest_recovered = recovery.newest
        self._mark_dirty({queue for queue in self.queues if queue.consume_queue.is_cut})
        self._mark_dirty(recovery.touched)
        recovery.touched.clear()

    def _keep_recovered(self, recovery: Recovery, plan: RecoveryPlan) -> None:
        """Bring to disk what a start has made so far, so that it is not for nothing if cut off."""
        assert recovery.newest is not None
        newest_offset, _ = recovery.newest
        # Of the log, too: a killed process leaves in memory what no flush has brought to disk.
        for file in self.commit_log.files.files:
            if plan.scan_from < file.end_offset and file.start_offset <= newest_offset:
                file.sync()
        self.index_files.last_seen = max(self.index_files.last_seen, newest_offset)
        self._take_over(recovery)
        self._doubt_names()
        self.flusher.flush_now()

    def _doubt_names(self) -> None:
        """Of files that may be new since the checkpoint, which is behind all that it speaks of."""
        queue_folders = {queue.files.directory for queue in self.flusher.dirty_queues}
        for folder in (
            self.root,
            self.commit_log.files.directory,
            self.index_files.directory,
            self.root / "consumequeue",
            *queue_folders,
            *(folder.parent for folder in queue_folders),
        ):
            self.seam.doubt_names(folder)

    def _mark_dirty(self, queues: set[StoreQueue]) -> None:
        self.flusher.dirty_queues.update([queue.consume_queue for queue in queues])

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Flush, index, clean and make files ahead until cancelled."""
        self.cleaner.works_aside = self.works_aside
        async with trio.open_nursery() as nursery:
            if self.works_aside:
                self.commit_log.on_full = self._file_full
                self.start_soon(nursery, self._run_seal)
                self.start_soon(nursery, self._warm)
                self.start_soon(nursery, self.flusher.run_asked)
            self.start_soon(nursery, self._run_dispatch)
            self.start_soon(nursery, self.flusher.run_group_commit)
            self.start_soon(nursery, self.flusher.run_log_flush)
            self.start_soon(nursery, self.flusher.run_queue_flush)
            await self.cleaner.begin()
            self.start_soon(nursery, self.cleaner.run)
            self.start_soon(nursery, self._run_index)
            self.start_soon(nursery, self._run_ahead)
            self.start_soon(nursery, self._run_heal)
            self.start_soon(nursery, self._run_lock_check)
            for following in self.followers.all:
                self.start_soon(nursery, following.run)
            task_status.started()

    def close(self) -> None:
        """Finish dispatch and bring all to disk if it is loaded, then ``abandon`` it.

        The abort file stays when something could not be brought to disk. Raises OSError.
        """
        try:
            if self.commit_log.is_refusal_final:
                return
            self.lock.check()
            self._finish_dispatch()
            self.commit_log.files.drop_prepared()
            self.flusher.flush_now()
            self.followers.finish()
            if self.commit_log.refusal is None:
                self._seal()
                if not self.index_files.lost_from:
                    (self.root / "abort").unlink()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Let go of the directory as the end of the process would: nothing is written.

        Descriptors, maps and the lock are given back; the map of a file that somebody has a view
        of goes with the view.
        """
        self.commit_log.refuse("closed", self.root, is_final=True)
        self.commit_log.stop_writing()
        for queue in self.queues:
            queue.consume_queue.unmap()
        index = [index_file.file for index_file in self.index_files.files]
        for file in (*self.commit_log.files.files, *index, *self.cleaner.going):
            file.unmap()
        self.lock.release()

    def _seal(self) -> None:
        sizes = [*self.commit_log.used, *self.index_files.used]
        for queue in self.queues:
            sizes += queue.consume_queue.used
        used = [Used(file, used_bytes, file.seal) for file, used_bytes in sizes]
        # Without a seal damage goes unnoticed; that is no reason to call the stop unclean.
        with suppress(OSError):
            self.seals.save(self.flusher.checkpoint, used)

    # --- queues ----------------------------------------------------------------------------

    def queue(self, topic: str, queue_id: int) -> StoreQueue:
        """The queue, made in memory when it is new; its folder comes with its first message.

        Raises ValueError for a topic that cannot be a folder's name.
        """
        queue = self._names.get((topic, queue_id))
        return queue if queue is not None else self._add_queue(topic, queue_id)

    def find_queue(self, topic: str, queue_id: int) -> StoreQueue | None:
        """The queue if it exists."""
        return self._names.get((topic, queue_id))

    def queues_of(self, topic: str) -> list[StoreQueue]:
        """All queues of a topic that exist, by queue id."""
        return [queue for _, queue in sorted(self._topics.get(topic, {}).items())]

    def _add_queue(self, topic: str, queue_id: int) -> StoreQueue:
        if topic in {"", ".", ".."} or "/" in topic or "\0" in topic or queue_id < 0:
            raise ValueError(f"no queue can be named {topic!r}/{queue_id}")
        directory = self.root / f"consumequeue/{topic}/{queue_id}"
        consume_queue = ConsumeQueue(directory, self.settings.consume_queue_file_bytes, self.seam)
        checksum_bytes = SLOT_BYTES if self.settings.appends_checksums else 0
        key = self._free_key()
        queue = StoreQueue(topic, queue_id, key, consume_queue, checksum_bytes)
        self.queues[key : key + 1] = [queue]
        self.indexer.note(queue)
        self._names[topic, queue_id] = queue
        self._topics.setdefault(topic, {})[queue_id] = queue
        return queue

    def _free_key(self) -> int:
        """That of a queue that is gone, once nobody waits for its rows, or else a new one."""
        if self._gone_keys and self._gone_keys[0][1] <= self.ring.taken:
            return self._gone_keys.popleft()[0]
        return len(self.queues)

    def delete_topic(self, topic: str) -> None:
        """``delete_queues`` at once, and on disk. Raises OSError."""
        for _ in self.delete_queues(topic):
            pass
        self.flusher.flush_now()

    def delete_queues(self, topic: str) -> Iterator[None]:
        """Remove the topic's ConsumeQueues; its records stay in the log without a way to them.

        Yields after each. The queues' objects must not be used afterwards. Until all is flushed a
        start after a crash may read back to where the topic still was. Raises OSError.
        """
        self._finish_dispatch()
        for queue in self.queues_of(topic):
            self._forget_queue(queue)
            queue.consume_queue.delete()
            yield
        with suppress(OSError):  # it may have new queues by now, or never had any
            (self.root / "consumequeue" / topic).rmdir()

    def _forget_queue(self, queue: StoreQueue) -> None:
        del self._names[queue.topic, queue.queue_id]
        queues = self._topics[queue.topic]
        del queues[queue.queue_id]
        if not queues:
            del self._topics[queue.topic]
        self.followers.forget(queue)
        self.flusher.dirty_queues.discard(queue.consume_queue)
        self.seam.map_budget.forget(queue.consume_queue)
        self._gone_keys.append((queue.key, self.ring.written))

    def when_all_flushed(self, callback: Callable[[], None]) -> None:
        """Call back once everything up to now is on disk. Raises OSError when that is at once."""
        if self.works_aside:
            self.flusher.when_all_flushed(callback)
        else:
            self.flusher.flush_now()
            callback()

    def max_offset(self, queue: StoreQueue) -> int:
        """Just after the newest queue offset that can be read."""
        return queue.consume_queue.max_offset

    def earliest_store_time(self, queue: StoreQueue) -> int | None:
        """Store time of the oldest record; None when the queue is empty. Raises NotReady."""
        return self.reader.store_time_at(queue, self.min_offset(queue))

    # --- the batch of requests -------------------------------------------------------------

    @property
    def store_host(self) -> bytes:
        """The host that records get; offset message ids begin with it."""
        return self.settings.store_host

    @property
    def max_physical_offset(self) -> int:
        """Just after the last record."""
        return self.commit_log.max_offset

    @property
    def now_ms(self) -> int:
        """The store timestamp that records get."""
        return self.commit_log.now_ms

    def begin_batch(self) -> None:
        """Read the clock for the records of the batch that begins."""
        self.commit_log.now_ms = self.clock.now_ms()

    def append_records(self, records: EncodedRecords) -> tuple[int, int]:
        """As ``CommitLog.append_records``; a block may need much of the ring."""
        self._make_ring_room(len(records.rows))
        return self.commit_log.append_records(records)

    def _make_ring_room(self, row_count: int) -> None:
        ring = self.ring
        if ring.written + row_count > ring.limit:
            self._dispatch_unasked()
        while ring.written + row_count > ring.limit and self.indexer.waiting_count:
            self._index(self.indexer.drain_block)
            if self.commit_log.refusal is not None:
                return

    def dispatch(self) -> set[StoreQueue]:
        """Write the units of what was appended; returns the queues that got some.

        While the store runs, the units of very many new queues at once are written a moment later.
        A full disk refuses further appends; what is left over is written by a later call.
        Raises StoreNotWritable when the records themselves can't be written.
        """
        self.commit_log.write_out()
        touched: set[StoreQueue] = set()
        try:
            if not self.dispatcher.drain(self._confirmed_offset(), touched):
                self._dispatch_asked.set()
        except OSError as error:
            self._refuse(error, self.root / "consumequeue")
        self._mark_dirty(touched)
        self.followers.notify(touched)
        if self.indexer.waiting_count > self.ring.row_count // 2:
            self._index(self.indexer.drain_block)
        if self.indexer.waiting_count:
            self._index_asked.set()
        return touched

    def _confirmed_offset(self) -> int | None:
        """Up to where consumers may read, None for all: with sync flush, what is on disk."""
        if self.settings.flush == "async":
            return None
        if self.commit_log.flushed_offset < self.commit_log.max_offset:
            self.flusher.ask()
        return self.commit_log.flushed_offset

    def _dispatch_unasked(self) -> None:
        touched = self.dispatch()
        if touched:
            self.on_touched(touched)

    def index_tick(self) -> None:
        """Index all that was appended."""
        self._index(self.indexer.drain)

    def _index(self, drain: Callable[[], None]) -> None:
        self.commit_log.write_out()
        try:
            drain()
        except OSError as error:
            self._refuse(error, self.index_files.directory)

    def _finish_dispatch(self) -> None:
        if self.settings.flush == "sync":
            self.flusher.flush_log_now()
        new_files_max, self.dispatcher.new_files_max = self.dispatcher.new_files_max, sys.maxsize
        self.dispatch()
        self.dispatcher.new_files_max = new_files_max
        self.index_tick()

    def _refuse(self, error: OSError, path: Path) -> None:
        self.commit_log.refuse(error.strerror or str(error), path, error_number=error.errno)

    def message_at(self, physical_offset: int) -> memoryview | None:
        """The record of the message that begins at an offset; None if none does. Raises NotReady.

        A body may contain a forged record, so the message's unit, or the row of the ring that will
        become it, must point there. Records without a unit (of deleted topics, or
        cleaned from their queue) are not served.
        """
        record = self.record_at(physical_offset)
        if record is None:
            return None
        is_message = self.reader.has_unit(self._names, physical_offset)
        return record if is_message or self.ring.holds(physical_offset) else None

    def query_index(
        self,
        topic: str,
        key: str,
        max_count: int,
        begin_ms: int,
        end_ms: int,
        index_type: IndexType | None = None,
    ) -> KeyQuery:
        """As ``Reader.query_index``, with everything appended so far indexed first."""
        prepare = partial(self._index_up_to, self.ring.written)
        return self.reader.query_index(topic, key, max_count, begin_ms, end_ms, index_type, prepare)

    def _index_up_to(self, row_count: int) -> bool:
        """Index a block of the rows before ``row_count``; returns whether that made progress."""
        taken = self.indexer.cursor.taken
        if taken < row_count:
            self._index(self.indexer.drain_block)
        return taken < self.indexer.cursor.taken

    # --- loops -----------------------------------------------------------------------------

    async def _run_dispatch(self) -> None:
        """Give new queues their files by and by: a thousand at once would stop the loop."""
        self.dispatcher.new_files_max = NEW_FILES_AT_ONCE
        try:
            while True:
                self._dispatch_unasked()
                await self._dispatch_asked.wait()
                self._dispatch_asked = trio.Event()
                await trio.lowlevel.checkpoint()
        finally:
            self.dispatcher.new_files_max = sys.maxsize

    async def _run_index(self) -> None:
        self._index_asked.set()
        while True:
            await self._index_asked.wait()
            await trio.sleep(self.settings.index_tick_ms / 1000)
            self._index_asked = trio.Event()
            # What comes meanwhile waits for the next time: small blocks cost the most.
            end = self.ring.written
            while self.indexer.cursor.taken < end:
                is_much = self.indexer.waiting_count > BLOCK_ROWS_MAX or self.index_files.is_sealed
                if self.works_aside and is_much:
                    await self._index_aside()
                else:
                    self._index(self.indexer.drain_block)
                if self.commit_log.refusal is not None:
                    break  # a full disk: the healing loop goes on with it
                await trio.lowlevel.checkpoint()

    async def _index_aside(self) -> None:
        """Index a large block in a thread, where it keeps nobody waiting."""
        self.commit_log.write_out()
        block = self.indexer.next_block()
        try:
            await trio.to_thread.run_sync(self.indexer.put, block, limiter=self._index_threads)
        except OSError as error:
            self._refuse(error, self.index_files.directory)
        self.ring.release()

    def _ask_ahead(self) -> None:
        self._ahead_asked.set()

    async def _run_ahead(self) -> None:
        self._ahead_asked.set()
        while True:
            await self._ahead_asked.wait()
            self._ahead_asked = trio.Event()
            # The append that needs a file which could not be made tries again and says why.
            with suppress(OSError):
                await trio.to_thread.run_sync(self.commit_log.make_ahead)

    async def _warm(self) -> None:
        """Have the last files of the log and of each queue read; who asks earlier does not wait."""
        queues = [queue.consume_queue.used for queue in self.queues]
        files = newest_files(self.commit_log.used, queues)
        await trio.to_thread.run_sync(warm, files, self.seam, trio.from_thread.check_cancelled)

    def _file_full(self, file: MappedFile) -> None:
        self._full_files.append(file)
        self._full_asked.set()

    async def _run_seal(self) -> None:
        """Seal the log's files as they fill up: all of them at once would make a stop long."""
        while True:
            while self._full_files:
                file = self._full_files.popleft()
                with suppress(OSError):  # what is gone by now needs no seal
                    file.seal = await trio.to_thread.run_sync(
                        FileSeal.of_full, file.path, file.file_bytes, file.seal
                    )
            await self._full_asked.wait()
            self._full_asked = trio.Event()

    async def _run_heal(self) -> None:
        while True:
            await trio.sleep(1)
            if self.commit_log.refusal is not None:
                with suppress(StoreNotWritable):  # still refused
                    self._dispatch_unasked()
                    self.index_tick()

    async def _run_lock_check(self) -> None:
        """Stop writing when another broker may write here too."""
        try:
            while True:
                await trio.sleep(LOCK_CHECK_S)
                self.lock.check()
        except OSError as error:
            self.flusher.stop_writing(error.strerror or str(error))

    # --- monitor ---------------------------------------------------------------------------

    def pressure(self) -> str | None:
        """The slow stage once the ring is 80 % full, else None."""
        return self.ring.pressure()

    def failure(self) -> str | None:
        """Why messages are refused until the next start; None while they are not."""
        commit_log = self.commit_log
        return str(commit_log.refusal) if commit_log.is_refusal_final else None

    def statistics(self) -> StoreStatistics:
        """Where the store stands."""
        refusal = self.commit_log.refusal
        return StoreStatistics(
            min_offset=self.commit_log.min_offset,
            max_offset=self.commit_log.max_offset,
            flushed_offset=self.commit_log.flushed_offset,
            dispatched_offset=self._dispatched_offset(),
            dispatch_behind_rows=self.ring.written - self.dispatcher.cursor.taken,
            index_behind_rows=self.indexer.waiting_count,
            ring_fill=self.ring.fill,
            slow_stage=self.ring.pressure(),
            longest_flush_ms=self.flusher.longest_flush_ms,
            disk_ratio=self._disk_ratio(),
            refusal=str(refusal) if refusal else None,
            queue_count=len(self._names),
            cleaner=self.cleaner.status(),
            followers=self.followers.statistics(),
        )

    def _disk_ratio(self) -> float:
        """A disk that can't be queried, as after the store's removal, counts as full."""
        try:
            return self.cleaner.disk_usage().ratio
        except OSError:
            return 1.0

    def _dispatched_offset(self) -> int:
        """Up to where queues know of the log."""
        return self._taken_offset(self.dispatcher.cursor)

    def _settled_from(self) -> int:
        """Up to where the log is flushed, dispatched, indexed and followed."""
        taken_offset = min(self._taken_offset(cursor) for cursor in self.ring.cursors)
        needed_from = self.followers.needed_from()
        return min(taken_offset, self.commit_log.flushed_offset, needed_from)

    def _taken_offset(self, cursor: Cursor) -> int:
        if cursor.taken == self.ring.written:
            return self.commit_log.max_offset
        return int(self.ring.rows["physical_offset"][cursor.taken & self.ring.mask])


def _queue_folders(directory: Path) -> list[tuple[str, str]]:
    """Topic and name of all that the topics' folders hold, in order."""
    if not directory.exists():
        return []
    topics = [path for path in directory.iterdir() if path.is_dir()]
    return sorted((topic.name, path.name) for topic in topics for path in topic.iterdir())
