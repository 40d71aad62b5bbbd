"""Waiting for the disk: flush loops, group commit and the checkpoint."""

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
from headrace_broker.store.log.takers import taken_offset

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from contextlib import AbstractContextManager

    from headrace_broker.store.files.filesystem import Files
    from headrace_broker.store.log.commit_log import CommitLog
    from headrace_broker.store.log.ring import Ring
    from headrace_broker.store.log.takers import Taker, TakerFlush
    from headrace_broker.store.settings import StoreSettings


log = structlog.get_logger("headrace.broker")

# A crash start reads what the checkpoint does not speak of: some tenths of a second for so much.
UNCHECKED_BYTES_MAX: Final = 256 << 20
_DESCRIPTOR_S: Final = 1.0
_RAISE_LIMIT: Final = "raise the limit of open files (LimitNOFILE, ulimit -n) and restart"


class Flusher:
    """Owns what is known to be on disk: ``flushed_offset`` of the log, and the checkpoint.

    A failed flush is not tried again (its pages may be gone): appends stop for good.
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
        """on_flushed: called after each group commit, once those that waited were called back."""
        self.settings = settings
        self.fs = fs
        self.ring = ring
        self.commit_log = commit_log
        self.takers = takers
        self.checkpoint_path = settings.root / "checkpoint"
        self.checkpoint = Checkpoint()
        self.longest_flush_ms = 0.0
        # Told how long each flush of the log took, in seconds.
        self.on_log_flush: Callable[[float], None] = lambda _seconds: None
        self._on_flushed = on_flushed
        # Around the answers of one flush.
        self.answering: Callable[[], AbstractContextManager[None]] = nullcontext
        # Waits for what must be on disk, beside the log, before a flush is told.
        self.others_saved: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
        self._waiters: deque[tuple[int, Callable[[bool], None]]] = deque()
        self._asked = trio.Event()
        self._all_waiters: deque[Callable[[], None]] = deque()
        self._all_asked = trio.Event()
        self._turn = trio.Lock()
        self._thorough_turn = trio.Lock()
        self._threads = trio.CapacityLimiter(2)
        # Syncs that were begun, or cancelled: a stop must not leave them out.
        self._owed: dict[Callable[[], None], None] = {}

    # --- the log ---------------------------------------------------------------------------

    def when_flushed(self, end_offset: int, callback: Callable[[bool], None]) -> None:
        """Call back with True once the log is on disk up to ``end_offset``, False if it fails.

        At once when it is known already, else from the group commit.
        """
        if not self.commit_log.life.is_writable:
            callback(False)
        elif end_offset <= self.commit_log.flushed_offset:
            callback(True)
        else:
            self._waiters.append((end_offset, callback))
            self.ask()

    def ask(self) -> None:
        """Have the log flushed as soon as the disk is free."""
        self._asked.set()

    async def run_group_commit(self) -> None:
        """Flush when asked: one flush answers all that came before it began."""
        if self._waiters:  # left by a run that failed
            self.ask()
        while True:
            await self._asked.wait()
            self._asked = trio.Event()
            await self.flush_log()
            await self.others_saved()
            self._answer()
            if self.commit_log.life.is_writable:  # dispatch would ask again, and again
                self._on_flushed()

    def _answer(self) -> None:
        # What was appended while the flush ran has asked anew.
        is_failed = not self.commit_log.life.is_writable
        flushed_offset = self.commit_log.flushed_offset
        with self.answering():
            while self._waiters and (is_failed or self._waiters[0][0] <= flushed_offset):
                self._waiters.popleft()[1](not is_failed)

    async def run_log_flush(self) -> None:
        """Flush at intervals what is worth it, and everything now and then."""
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
        """Bring the log to disk in a thread."""
        async with self._turn:
            if not self.commit_log.life.is_writable:
                return
            end_offset, flush = self.commit_log.start_flush()
            newest = self.ring.last_of(self.ring.written)
            began = perf_counter()
            if await self._in_thread(flush):
                self.on_log_flush(perf_counter() - began)
                self._log_flushed(end_offset, newest)

    def _log_flushed(self, end_offset: int, newest: tuple[int, int] | None) -> None:
        self.commit_log.flushed_offset = max(self.commit_log.flushed_offset, end_offset)
        if newest is not None:
            self.checkpoint = self.checkpoint._replace(physic_msg_timestamp=newest[1])

    async def _in_thread(self, flush: Callable[[], None]) -> bool:
        """Flush, and return whether that succeeded.

        Without a free descriptor nothing is lost yet, so it is retried until there is one.
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
        self.stop_writing(f"a flush failed, so messages may be lost: {error.strerror or error}")

    def stop_writing(self, reason: str) -> None:
        """Reject messages until the next start, and answer those that wait for the disk."""
        log.error("messages are refused until the next start", reason=reason)
        self.commit_log.refuse(reason, self.settings.root, is_final=True)
        self.ask()

    # --- ConsumeQueues, index, checkpoint --------------------------------------------------

    async def run_queue_flush(self) -> None:
        """Flush queues with enough new units at intervals, everything now and then.

        Everything also when a start after a crash would have much to read.
        """
        settings = self.settings
        thorough_at = trio.current_time() + settings.queue_flush_thorough_interval_ms / 1000
        while True:
            await trio.sleep(settings.queue_flush_interval_ms / 1000)
            if trio.current_time() >= thorough_at or self._unchecked_bytes() >= UNCHECKED_BYTES_MAX:
                thorough_at = trio.current_time() + settings.queue_flush_thorough_interval_ms / 1000
                await self.flush_thoroughly()
            elif self.commit_log.life.is_writable:
                await self._flush_due(settings.queue_flush_least_bytes)

    def _unchecked_bytes(self) -> int:
        return self.commit_log.max_offset - self.checkpoint.logics_physical_offset

    def when_all_flushed(self, callback: Callable[[], None]) -> None:
        """Call back once everything up to now is on disk, or can't be brought there."""
        self._all_waiters.append(callback)
        self._all_asked.set()

    async def run_asked(self) -> None:
        """Flush everything when asked."""
        if self._all_waiters:  # left by a run that failed
            self._all_asked.set()
        while True:
            await self._all_asked.wait()
            self._all_asked = trio.Event()
            count = len(self._all_waiters)
            await self.flush_thoroughly()
            for _ in range(count):
                self._all_waiters.popleft()()

    async def flush_thoroughly(self) -> None:
        """Bring everything to disk, then say so in the checkpoint."""
        # The queues that one flush has taken are not on disk while another would say so.
        async with self._thorough_turn:
            if not self.commit_log.life.is_writable:
                return
            work = self._start_thorough_flush()
            await self.flush_log()
            # Units of records that are gone must not count as on disk.
            is_writable = self.commit_log.life.is_writable
            if is_writable and await self._sync_in_thread(work.syncs):
                self.checkpoint = work.update(self.checkpoint)
                # The old checkpoint stays true: all it costs is a longer recovery.
                with suppress(OSError):
                    await trio.to_thread.run_sync(self._save, work, limiter=self._threads)

    def flush_now(self) -> None:
        """The same without threads, for start and stop. Raises OSError."""
        self.flush_log_now()
        work = self._start_thorough_flush()
        try:
            _call_all(work.syncs)
        except OSError as error:
            self._fail(error)
            raise
        self._owed.clear()
        self.checkpoint = work.update(self.checkpoint)
        self._save(work)

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
        """Bring the log to disk without a thread. Raises OSError."""
        end_offset, flush = self.commit_log.start_flush()
        try:
            flush()
        except OSError as error:
            self._fail(error)
            raise
        self._log_flushed(end_offset, self.ring.last_of(self.ring.written))

    def _start_thorough_flush(self) -> _ThoroughFlush:
        log_end = self.commit_log.max_offset
        flushes = [taker.start_flush(taken_offset(taker, log_end)) for taker in self.takers]
        syncs = [
            *self._owed,
            *(sync for flush in flushes for sync in flush.syncs),
            self.fs.sync_names,
        ]
        self._owed = dict.fromkeys(syncs)
        return _ThoroughFlush(syncs, flushes)

    async def _sync_in_thread(self, syncs: Sequence[Callable[[], None]]) -> bool:
        self._owed.update(dict.fromkeys(syncs))
        if not await self._in_thread(partial(_call_all, syncs)):
            return False
        for sync in syncs:
            self._owed.pop(sync, None)
        return True

    async def _flush_due(self, least_bytes: int) -> None:
        for taker in self.takers:
            for flush in taker.due_flushes(least_bytes):
                if await self._sync_in_thread(flush.syncs):
                    self.checkpoint = flush.flushed(self.checkpoint)


@dataclass(frozen=True, slots=True)
class _ThoroughFlush:
    """What was there when it began."""

    syncs: list[Callable[[], None]]
    flushes: list[TakerFlush]

    def update(self, checkpoint: Checkpoint) -> Checkpoint:
        """What the checkpoint may say after it."""
        for flush in self.flushes:
            checkpoint = flush.flushed(checkpoint)
        return checkpoint


def _lacks_descriptor(flush: Callable[[], None]) -> bool:
    """Flush, in a thread; returns whether it lacked a free descriptor to open a file."""
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
