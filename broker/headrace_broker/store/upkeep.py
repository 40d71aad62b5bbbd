"""The loops of a running store."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from headrace_broker.store.files.file_seal import FileSeal
from headrace_broker.store.files.warmup import newest_files, warm
from headrace_broker.store.index.indexer import BLOCK_ROWS_MAX
from headrace_broker.store.life import State
from headrace_protocol.errors import reason_of

if TYPE_CHECKING:
    from headrace_broker.store.files.mapped_file import MappedFile
    from headrace_broker.store.parts import StoreParts

StartSoon = Callable[[trio.Nursery, Callable[[], Awaitable[None]]], None]

LOCK_CHECK_S = 1.0


class Upkeep:
    """Flushes, indexes, cleans up and prepares files while a store runs."""

    def __init__(self, store: StoreParts, start_soon: StartSoon) -> None:
        """start_soon: starts a loop in a nursery; every loop can restart after an error."""
        # With more rows waiting a thread indexes them.
        self.index_rows_max = BLOCK_ROWS_MAX
        self._store = store
        self._start_soon = start_soon
        self._next_file_requested = trio.Event()
        self._file_filled = trio.Event()
        self._full_files: deque[MappedFile] = deque()
        self._index_threads = trio.CapacityLimiter(1)
        store.commit_log.on_half_full = self._request_next_file
        store.commit_log.on_full = self._on_file_full

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Flush, index, clean up and prepare files until cancelled."""
        store = self._store
        store.cleaner.use_threads = store.use_threads
        async with trio.open_nursery() as nursery:
            if store.use_threads:
                self._start_soon(nursery, self._seal_full_files)
                self._start_soon(nursery, self._warm_up)
                self._start_soon(nursery, store.flusher.run_thorough_flushes)
            self._start_soon(nursery, store.write_path.run)
            self._start_soon(nursery, store.flusher.run_group_commit)
            self._start_soon(nursery, store.flusher.run_log_flush)
            self._start_soon(nursery, store.flusher.run_queue_flush)
            await store.cleaner.begin()
            self._start_soon(nursery, store.cleaner.run)
            self._start_soon(nursery, self.run_index)
            self._start_soon(nursery, self.prepare_files)
            self._start_soon(nursery, store.healer.run)
            self._start_soon(nursery, self._check_lock)
            for following in store.followers.all:
                following.on_saved = self._clean_if_tight
                self._start_soon(nursery, following.run)
            task_status.started()

    async def run_index(self) -> None:
        """Index what was stored, at intervals."""
        store = self._store
        store.indexer.asked.set()
        while True:
            await store.indexer.asked.wait()
            await trio.sleep(store.settings.index_tick_ms / 1000)
            store.indexer.asked = trio.Event()
            # Later rows wait for the next tick, because small blocks cost most per row.
            end, taken = store.ring.written, -1
            # Stops at the confirmed offset; the next publish sets the event again.
            while taken < store.indexer.cursor.taken < end:
                taken = store.indexer.cursor.taken
                is_much = (
                    store.indexer.waiting_count > self.index_rows_max or store.index_files.is_sealed
                )
                if store.use_threads and is_much:
                    await self._index_in_thread()
                else:
                    store.write_path.drain_taker(store.indexer, store.indexer.drain_block)
                if store.commit_log.life.state is not State.OPEN:
                    break  # a full disk: the healer retries
                await trio.lowlevel.checkpoint()

    async def _index_in_thread(self) -> None:
        """Index a large block in a thread, so that it does not block the loop."""
        store = self._store
        store.write_path.commit()
        block = store.indexer.next_block(store.write_path.confirmation.offset)
        if not block.row_count:
            return
        try:
            await trio.to_thread.run_sync(
                store.indexer.put_copied, block, limiter=self._index_threads
            )
        except OSError as error:
            store.write_path.refuse(error, store.indexer)
        store.ring.release()

    def _request_next_file(self) -> None:
        self._next_file_requested.set()

    async def prepare_files(self) -> None:
        """Create each next file of the log ahead of its first record."""
        self._next_file_requested.set()
        while True:
            await self._next_file_requested.wait()
            self._next_file_requested = trio.Event()
            # If this fails, the append that needs the file retries and reports the error.
            with suppress(OSError):
                await trio.to_thread.run_sync(self._store.commit_log.prepare_next_file)
            self._clean_if_tight()

    def _clean_if_tight(self) -> None:
        store = self._store
        if store.commit_log.room.is_tight:
            store.cleaner.ask()

    async def _warm_up(self) -> None:
        """Read ahead the newest files of the log and of each queue; requests do not wait for it."""
        store = self._store
        queues = [queue.consume_queue.used for queue in store.queues]
        files = newest_files(store.commit_log.used, queues)
        await trio.to_thread.run_sync(warm, files, store.fs, trio.from_thread.check_cancelled)

    def _on_file_full(self, file: MappedFile) -> None:
        if self._store.use_threads:
            self._full_files.append(file)
            self._file_filled.set()

    async def _seal_full_files(self) -> None:
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

    async def _check_lock(self) -> None:
        """Stop writing once the lock is lost, because another broker may write here too."""
        store = self._store
        try:
            while True:
                await trio.sleep(LOCK_CHECK_S)
                store.lock.check()
        except OSError as error:
            store.flusher.stop_writing(reason_of(error))
