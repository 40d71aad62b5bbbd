"""Indexer: the taker that fills the IndexFiles, in blocks, some milliseconds after the replies."""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import structlog
import trio

from headrace_broker.store.index.index_keys import Regions, key_hashes, with_messages
from headrace_broker.store.log.ring import select
from headrace_broker.store.log.takers import Taker, TakerFlush
from headrace_protocol.message import NEED_UNWRAP, TRANSACTION_MASK, TRANSACTION_ROLLBACK

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headrace_broker.store.index.index_file import IndexFiles
    from headrace_broker.store.integrity.checkpoint import Checkpoint
    from headrace_broker.store.log.commit_log import CommitLog
    from headrace_broker.store.log.ring import Ring, Rows
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_protocol.columns import Array

log = structlog.get_logger("headrace.broker")

# On the loop: takes half a millisecond, which a request may have to wait.
BLOCK_ROWS_MAX: Final = 1024
# In a thread: larger blocks save nothing.
THREAD_ROWS_MAX: Final = 8192
# Bytes of properties in a block; plain rows have fewer. If they are all one-letter keys, a block
# takes 50 ms on the loop, and 200 ms in a thread, which holds the lock meanwhile.
BLOCK_BYTES_MAX: Final = 160 << 10
THREAD_BYTES_MAX: Final = 512 << 10
# Target duration of a block on the loop.
_BLOCK_S: Final = 0.005


class Stretch(NamedTuple):
    """Rows with properties to index, and the log file that has their records."""

    rows: Rows
    log_start: int  # the file's first physical offset
    log: Array  # uint8


class IndexBlock(NamedTuple):
    """Rows of the ring; those to index are copied. first: number of the first since the start."""

    first: int
    row_count: int
    last_physical_offset: int
    stretches: list[Stretch]


class Indexer(Taker):
    """Indexes the keys in the properties of records.

    ``put_copied`` may run in a thread, everything else runs on the loop. No reply depends on the
    index and small blocks are expensive, so ``drain`` leaves rows to the task that waits for
    ``asked``.
    """

    name = "index"

    def __init__(
        self, ring: Ring, commit_log: CommitLog, index_files: IndexFiles, queues: list[StoreQueue]
    ) -> None:
        """queues: indexed by queue_key; the store appends to it."""
        self.join(ring)
        # Set while rows wait to be indexed.
        self.asked = trio.Event()
        self.commit_log = commit_log
        self.index_files = index_files
        self.queues = queues
        self._known_prefixes = np.empty((0, 2), np.uint32)
        self._rows_at_once = BLOCK_ROWS_MAX
        self._durable_offset = 0

    @property
    def waiting_count(self) -> int:
        """Rows not yet indexed."""
        return self.ring.written - self.cursor.taken

    def drain(self, confirmed_offset: int | None) -> None:
        """Set ``asked`` if rows wait; index a block of them once the ring is half full."""
        ring = self.ring
        waiting_count = ring.written - self.cursor.taken
        if waiting_count > ring.row_count // 2:
            waiting_count -= self.drain_block(confirmed_offset)
        if waiting_count:
            self.asked.set()

    def drain_all(self, confirmed_offset: int | None) -> None:
        """Index all rows of confirmed records. Raises OSError on a full disk; retry later."""
        while self.drain_block(confirmed_offset):
            pass

    def make_room(self, row_count: int, confirmed_offset: int | None) -> None:
        """See ``Taker``."""
        ring = self.ring
        while ring.written + row_count > ring.limit and self.drain_block(confirmed_offset):
            pass

    def drain_block(self, confirmed_offset: int | None) -> int:
        """Index one block of waiting rows in about half a millisecond; returns how many.

        Raises as ``drain_all``.
        """
        if not self.waiting_count:
            return 0
        began = perf_counter()
        with self.index_files.lock:
            block = self.next_block(confirmed_offset, self._rows_at_once, BLOCK_BYTES_MAX)
            self._put(block)
        self.ring.release()
        if block.row_count:
            self._adapt_rows(block.row_count, perf_counter() - began)
        return block.row_count

    def _adapt_rows(self, row_count: int, seconds: float) -> None:
        """Adapt the block size to the time taken, since some records have thousands of keys."""
        if seconds > _BLOCK_S:
            self._rows_at_once = max(int(row_count * _BLOCK_S / seconds), 1)
        else:
            self._rows_at_once = min(2 * self._rows_at_once, BLOCK_ROWS_MAX)

    def next_block(
        self,
        confirmed_offset: int | None,
        rows_max: int = THREAD_ROWS_MAX,
        bytes_max: int = THREAD_BYTES_MAX,
    ) -> IndexBlock:
        """The rows to index next; their records must be written to the file.

        confirmed_offset: see ``Ring.waiting``.
        bytes_max: limit for their properties, which may consist of keys only.
        """
        waiting = self.ring.waiting(self.cursor, confirmed_offset)
        rows = self.ring.copy(slice(waiting.start, min(waiting.stop, waiting.start + rows_max)))
        ends = np.cumsum(rows["properties_size"], dtype=np.int64)
        rows = rows[: max(int(np.searchsorted(ends, bytes_max, "right")), 1)]
        last = int(rows["physical_offset"].max(initial=-1))
        return IndexBlock(self.cursor.taken, len(rows), last, self._stretches(rows))

    def put_copied(self, block: IndexBlock) -> None:
        """Index a block, in any thread; the loop calls ``Ring.release`` afterwards.

        Does nothing if its rows have been indexed meanwhile. Raises as ``drain_all``.
        """
        with self.index_files.lock:
            if block.first == self.cursor.taken:
                self._put(block)

    def _put(self, block: IndexBlock) -> None:
        self._put_stretches(block.stretches)
        self.index_files.last_seen = max(self.index_files.last_seen, block.last_physical_offset)
        self.cursor.taken += block.row_count

    # --- start -----------------------------------------------------------------------------

    def loaded(self, durable_offset: int) -> None:
        """Called once the index files are loaded and recovered."""
        self._durable_offset = durable_offset

    def put(self, rows: Rows) -> None:
        """Index records outside the ring. Raises as ``drain_all``."""
        with self.index_files.lock:
            self._put_stretches(self._stretches(rows))

    def cut(self, physical_offset: int) -> None:
        """Reset ``last_seen`` if it is past the log's end; recovery has removed such entries."""
        if self.index_files.last_seen > physical_offset:
            self.index_files.last_seen = -1

    def recovered(self, newest: tuple[int, int] | None) -> None:
        """Note that all keys up to the newest record are indexed."""
        if newest is not None:
            self.index_files.last_seen = max(self.index_files.last_seen, newest[0])

    # --- flush -----------------------------------------------------------------------------

    def durable_offset(self) -> int:
        """See ``Taker``."""
        return self._durable_offset

    def start_flush(self, taken_offset: int) -> TakerFlush:
        """Flush the files that became full and the last one, and save the mark of its end."""
        full, last, mark = self.index_files.start_flush()

        def flushed(checkpoint: Checkpoint) -> Checkpoint:
            self._durable_offset = taken_offset
            return checkpoint._replace(index_msg_timestamp=full[-1][1]) if full else checkpoint

        syncs = [index_file.file.sync for index_file, _ in full]
        return TakerFlush(
            [*syncs, *([last.file.sync] if last else [])],
            flushed,
            # Before the checkpoint: one without a mark counts as the peer's.
            partial(self.index_files.mark_file.save, mark),
        )

    def due_flushes(self, least_bytes: int) -> Iterator[TakerFlush]:  # noqa: ARG002 - whole files
        """The files that became full."""
        for index_file, end_timestamp in self.index_files.start_flush().full:
            yield TakerFlush(
                [index_file.file.sync], partial(_with_index_time, timestamp=end_timestamp)
            )

    # --- keys ------------------------------------------------------------------------------

    def _stretches(self, rows: Rows) -> list[Stretch]:
        """Rows with something to index, grouped by the log files of their records."""
        is_indexed = rows["sys_flag"] & TRANSACTION_MASK != TRANSACTION_ROLLBACK
        rows = select(rows, is_indexed & (rows["properties_size"] > 0))
        stretches = []
        while len(rows):
            file = self.commit_log.files.find(int(rows["physical_offset"][0]))
            assert file is not None
            upto = int(np.searchsorted(rows["physical_offset"], file.end_offset))
            log = np.frombuffer(file.view, np.uint8)
            stretches.append(Stretch(rows[:upto], file.start_offset, log))
            rows = rows[upto:]
        return stretches

    def _put_stretches(self, stretches: list[Stretch]) -> None:
        prefixes = self._prefixes()
        for rows, log_start, log in stretches:
            sizes = rows["properties_size"].astype(np.int64)
            starts = rows["physical_offset"] + rows["size"] - sizes - log_start
            is_batch, regions = rows["sys_flag"] & NEED_UNWRAP != 0, Regions(log, starts, sizes)
            if not is_batch.any():
                self._put_regions(rows, regions, prefixes)
                continue
            for numbers, part in with_messages(regions, rows["size"], is_batch):
                self._put_regions(rows[numbers], part, prefixes)

    def _put_regions(self, rows: Rows, regions: Regions, prefixes: Array) -> None:
        queue_keys = rows["queue_key"]
        numbers, hashes = key_hashes(
            regions, prefixes.take(queue_keys, axis=0), partial(self._topic, queue_keys)
        )
        self.index_files.put(
            hashes,
            rows["physical_offset"][numbers],
            rows["store_timestamp"][numbers],
            self.commit_log.clock.now_ms(),
        )

    def _topic(self, queue_keys: Array, number: int) -> str:
        queue: StoreQueue = self.queues[queue_keys[number]]
        return queue.topic

    def note(self, queue: StoreQueue) -> None:
        """Refresh the prefixes of a queue that reuses the key of a deleted one."""
        if queue.key < len(self._known_prefixes):
            self._known_prefixes[queue.key] = queue.index_prefixes

    def _prefixes(self) -> Array:
        """The ``index_prefixes`` of all queues, by queue_key."""
        known = len(self._known_prefixes)
        if known < len(self.queues):
            more = [queue.index_prefixes for queue in self.queues[known:]]
            self._known_prefixes = np.concatenate([self._known_prefixes, np.array(more, np.uint32)])
        return self._known_prefixes


def _with_index_time(checkpoint: Checkpoint, timestamp: int) -> Checkpoint:
    return checkpoint._replace(index_msg_timestamp=timestamp)


def log_vanished(paths: list[Path]) -> None:
    """Report that another process has removed index files."""
    log.error(
        "index files were removed while the broker runs: messages are accepted, but queries by key"
        " miss earlier ones; the next start rebuilds the index from the log",
        paths=[str(path) for path in paths],
    )
