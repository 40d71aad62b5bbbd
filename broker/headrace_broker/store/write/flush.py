"""Durability: flush loops, group commit and the checkpoint."""

from __future__ import annotations

import errno
import math
from collections import deque
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Final

import structlog
import trio

from headrace_broker.store.integrity.checkpoint import Checkpoint
from headrace_broker.store.life import State
from headrace_broker.store.log.takers import taken_offset
from headrace_broker.store.write.confirmation import wait_for
from headrace_protocol.errors import reason_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from contextlib import AbstractContextManager

    from headrace_broker.store.files.filesystem import Files
    from headrace_broker.store.log.commit_log import CommitLog
    from headrace_broker.store.log.ring import Ring
    from headrace_broker.store.log.takers import Taker, TakerFlush
    from headrace_broker.store.settings import StoreSettings


log = structlog.get_logger("headrace.broker")

_DESCRIPTOR_S: Final = 1.0
_RAISE_LIMIT: Final = "raise the limit of open files (LimitNOFILE, ulimit -n) and restart"


class Flusher:
    """Tracks what is on disk: the log's ``flushed_offset`` and the checkpoint.

    A failed flush is never retried, because its pages may be gone: appends stop until a restart.
    """

    def __init__(
        self,
        settings: StoreSettings,
        fs: Files,
        ring: Ring,
        commit_log: CommitLog,
        takers: Sequence[Taker],
        on_flushed: Callable[[], None],
    ) -> None:
        """on_flushed: called after each group commit, when its waiters have been called back."""
        self.settings = settings
        self.fs = fs
        self.ring = ring
        self.commit_log = commit_log
        self.takers = takers
        self.checkpoint_path = settings.root / "checkpoint"
        self.checkpoint = Checkpoint()
        # A start after a crash reads the log past the checkpoint, at a GiB or so per second.
        self.unchecked_bytes_max = 256 << 20
        self.longest_flush_ms = 0.0
        # Called with the duration of each flush of the log, in seconds.
        self.on_log_flush: Callable[[float], None] = lambda _seconds: None
        self._on_flushed = on_flushed
        # Entered around the callbacks of one group commit, so that their replies leave together.
        self.answering: Callable[[], AbstractContextManager[None]] = nullcontext
        # Waits until the tables that acknowledged messages depend on are on disk too.
        self.wait_tables_saved: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
        self._waiters: deque[tuple[int, Callable[[bool], None]]] = deque()
        self._requested = trio.Event()
        self._thorough_waiters: deque[Callable[[], None]] = deque()
        self._thorough_requested = trio.Event()
        self._log_lock = trio.Lock()
        self._thorough_lock = trio.Lock()
        self._threads = trio.CapacityLimiter(2)
        # Syncs that are unfinished or were cancelled; the next thorough flush repeats them.
        self._unfinished_syncs: dict[Callable[[], None], None] = {}

    # --- the log ---------------------------------------------------------------------------

    def when_flushed(self, end_offset: int, callback: Callable[[bool], None]) -> None:
        """Call back with True once the log is on disk up to ``end_offset``, False if that fails.

        The call comes immediately if the outcome is known, else from the group commit.
        """
        if not self.commit_log.life.is_writable:
            callback(False)
        elif end_offset <= self.commit_log.flushed_offset:
            callback(True)
        else:
            self._waiters.append((end_offset, callback))
            self.request_flush()

    async def wait_flushed(self) -> None:
        """Wait until all records so far are on disk, whatever the gates of the store are.

        Raises StoreNotWritable.
        """
        await wait_for(self.when_flushed, self.commit_log.max_offset, self.settings.root)

    def request_flush(self) -> None:
        """Request a flush of the log, to start as soon as no other one is running."""
        self._requested.set()

    async def run_group_commit(self) -> None:
        """Flush on request: one flush serves every waiter that came before it began."""
        if self._waiters:  # left by a run that failed
            self.request_flush()
        while True:
            await self._requested.wait()
            self._requested = trio.Event()
            await self.flush_log()
            await self.wait_tables_saved()
            self._call_waiters()
            # After a failure, publishing would only request another flush, endlessly.
            if self.commit_log.life.is_writable:
                self._on_flushed()

    def _call_waiters(self) -> None:
        # Waiters for records appended during the flush have requested another one.
        is_failed = not self.commit_log.life.is_writable
        flushed_offset = self.commit_log.flushed_offset
        with self.answering():
            while self._waiters and (is_failed or self._waiters[0][0] <= flushed_offset):
                self._waiters.popleft()[1](not is_failed)

    async def run_log_flush(self) -> None:
        """Flush at each interval if enough is dirty, and in any case at each thorough interval."""
        settings = self.settings
        thorough_at = -math.inf
        while True:
            await trio.sleep(settings.flush_interval_ms / 1000)
            dirty_bytes = self.commit_log.max_offset - self.commit_log.flushed_offset
            is_thorough = trio.current_time() >= thorough_at
            if is_thorough:
                thorough_at = trio.current_time() + settings.flush_thorough_interval_ms / 1000
            if dirty_bytes >= (1 if is_thorough else settings.flush_least_bytes):
                await self.flush_log()

    async def flush_log(self) -> None:
        """Bring the log to disk, in a thread."""
        async with self._log_lock:
            if not self.commit_log.life.is_writable:
                return
            end_offset, flush = self.commit_log.start_flush()
            newest = self.ring.last_of(self.ring.written)
            began = perf_counter()
            if await self._in_thread(flush):
                self.on_log_flush(perf_counter() - began)
                self._note_log_flushed(end_offset, newest)

    def _note_log_flushed(self, end_offset: int, newest: tuple[int, int] | None) -> None:
        self.commit_log.flushed_offset = max(self.commit_log.flushed_offset, end_offset)
        if newest is not None:
            self.checkpoint = self.checkpoint._replace(physic_msg_timestamp=newest[1])

    async def _in_thread(self, flush: Callable[[], None]) -> bool:
        """Run a flush in a thread; returns whether it succeeded.

        A flush that lacks a file descriptor has lost nothing yet, so it is retried.
        """
        started_at = trio.current_time()
        try:
            while await trio.to_thread.run_sync(_lacks_descriptor, flush, limiter=self._threads):
                log.error("a flush waits for a file descriptor", remedy=_RAISE_LIMIT)
                await trio.sleep(_DESCRIPTOR_S)
        except OSError as error:
            self._fail(error)
            return False
        self.longest_flush_ms = max(
            self.longest_flush_ms, (trio.current_time() - started_at) * 1000
        )
        return True

    def _fail(self, error: OSError) -> None:
        self.stop_writing(f"a flush failed, so messages may be lost: {reason_of(error)}")

    def stop_writing(self, reason: str) -> None:
        """Refuse messages until the next start, and fail those that wait for a flush."""
        log.error("messages are refused until the next start", reason=reason)
        self.commit_log.refuse(reason, self.settings.root, is_final=True)
        self.request_flush()

    # --- ConsumeQueues, index, checkpoint --------------------------------------------------

    async def run_queue_flush(self) -> None:
        """Flush queues with enough new units at each interval, and at times everything.

        Everything is flushed at each thorough interval, and earlier when a start after a crash
        would have much of the log to read.
        """
        settings = self.settings
        thorough_at = trio.current_time() + settings.queue_flush_thorough_interval_ms / 1000
        while True:
            await trio.sleep(settings.queue_flush_interval_ms / 1000)
            unchecked = self.commit_log.max_offset - self.checkpoint.logics_physical_offset
            if unchecked >= self.unchecked_bytes_max or trio.current_time() >= thorough_at:
                thorough_at = trio.current_time() + settings.queue_flush_thorough_interval_ms / 1000
                await self.flush_thoroughly()
            elif self.commit_log.life.is_writable:
                await self._flush_due(settings.queue_flush_least_bytes)

    def when_all_flushed(self, callback: Callable[[], None]) -> None:
        """Call back once everything written so far is on disk, or its flush has failed."""
        self._thorough_waiters.append(callback)
        self._thorough_requested.set()

    async def run_thorough_flushes(self) -> None:
        """Flush everything on request."""
        if self._thorough_waiters:  # left by a run that failed
            self._thorough_requested.set()
        while True:
            await self._thorough_requested.wait()
            self._thorough_requested = trio.Event()
            count = len(self._thorough_waiters)
            await self.flush_thoroughly()
            for _ in range(count):
                self._thorough_waiters.popleft()()

    async def flush_thoroughly(self) -> None:
        """Bring everything to disk, then save the checkpoint."""
        # A concurrent flush would find no dirty queues and record them as flushed too early.
        async with self._thorough_lock:
            if not self.commit_log.life.is_writable:
                return
            work = self._start_thorough_flush()
            await self.flush_log()
            # Units of records that a failed flush lost must not count as on disk.
            is_writable = self.commit_log.life.is_writable
            if is_writable and await self._sync_in_thread(work.syncs):
                self.checkpoint = work.update(self.checkpoint)
                # The old checkpoint remains valid: recovery only takes longer.
                with suppress(OSError):
                    await trio.to_thread.run_sync(self._save, work, limiter=self._threads)

    def flush_now(self) -> None:
        """As ``flush_thoroughly`` but in this thread, for start and stop.

        Raises OSError, StoreNotWritable after a failed flush.
        """
        self._save(self._sync_now())

    def flush_recovered(self) -> None:
        """As ``flush_now``, for a start, which must not depend on room for a new checkpoint."""
        work = self._sync_now()
        # The old checkpoint remains valid.
        with suppress(OSError):
            self._save(work)

    def _sync_now(self) -> _ThoroughFlush:
        self.flush_log_now()
        work = self._start_thorough_flush()
        try:
            _call_all(work.syncs)
        except OSError as error:
            self._fail(error)
            raise
        self._unfinished_syncs.clear()
        self.checkpoint = work.update(self.checkpoint)
        return work

    def reset_queue_checkpoint(self) -> None:
        """Clear the ConsumeQueue position before a full rebuild. Raises OSError.

        Otherwise a crash halfway would look complete.
        """
        reset = self.checkpoint._replace(logics_msg_timestamp=0, logics_physical_offset=0)
        if reset != self.checkpoint:
            self.checkpoint = reset
            reset.save(self.checkpoint_path, self.fs)

    def _save(self, work: _ThoroughFlush) -> None:
        for flush in work.flushes:
            flush.save()
        self.checkpoint.save(self.checkpoint_path, self.fs)

    def flush_log_now(self) -> None:
        """Bring the log to disk in this thread.

        Raises OSError, StoreNotWritable after a failed flush.
        """
        life = self.commit_log.life
        if life.state is State.FAILED and (refusal := life.refusal):
            # Another flush would succeed and count the lost pages as on disk.
            raise refusal
        end_offset, flush = self.commit_log.start_flush()
        try:
            flush()
        except OSError as error:
            self._fail(error)
            raise
        self._note_log_flushed(end_offset, self.ring.last_of(self.ring.written))

    def _start_thorough_flush(self) -> _ThoroughFlush:
        log_end = self.commit_log.max_offset
        flushes = [taker.start_flush(taken_offset(taker, log_end)) for taker in self.takers]
        syncs = [
            *self._unfinished_syncs,
            *(sync for flush in flushes for sync in flush.syncs),
            self.fs.sync_names,
        ]
        self._unfinished_syncs = dict.fromkeys(syncs)
        return _ThoroughFlush(syncs, flushes)

    async def _sync_in_thread(self, syncs: Sequence[Callable[[], None]]) -> bool:
        self._unfinished_syncs.update(dict.fromkeys(syncs))
        if not await self._in_thread(partial(_call_all, syncs)):
            return False
        for sync in syncs:
            self._unfinished_syncs.pop(sync, None)
        return True

    async def _flush_due(self, least_bytes: int) -> None:
        for taker in self.takers:
            for flush in taker.due_flushes(least_bytes):
                if await self._sync_in_thread(flush.syncs):
                    self.checkpoint = flush.flushed(self.checkpoint)


@dataclass(frozen=True, slots=True)
class _ThoroughFlush:
    """Everything that was dirty when the flush began."""

    syncs: list[Callable[[], None]]
    flushes: list[TakerFlush]

    def update(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint after the flush has succeeded."""
        for flush in self.flushes:
            checkpoint = flush.flushed(checkpoint)
        return checkpoint


def _lacks_descriptor(flush: Callable[[], None]) -> bool:
    """Flush, in a thread; returns True if no file descriptor was free to open a file."""
    try:
        flush()
    except OSError as error:
        if error.errno not in {errno.EMFILE, errno.ENFILE}:
            raise
        return True
    return False


def _call_all(syncs: Sequence[Callable[[], None]]) -> None:
    for sync in syncs:
        sync()
