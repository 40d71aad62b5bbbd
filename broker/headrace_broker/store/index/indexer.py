"""From the ring to the IndexFiles: in blocks, some milliseconds behind the replies."""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import structlog
import trio

from headrace_broker.store.index.index_keys import Regions, key_hashes
from headrace_broker.store.integrity.checkpoint import INDEX_MARK_NAME
from headrace_broker.store.log.ring import select
from headrace_broker.store.log.takers import Taker, TakerFlush
from headrace_protocol.message import TRANSACTION_MASK, TRANSACTION_ROLLBACK

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

# On the loop: half a millisecond, which is how long a request may have to wait for it.
BLOCK_ROWS_MAX: Final = 1024
# In a thread: larger ones save nothing more.
THREAD_ROWS_MAX: Final = 8192
# Bytes of properties in a block; plain rows have fewer. If all are one-letter keys a block takes 50
# ms, and in a thread, which holds the lock meanwhile, 200 ms.
BLOCK_BYTES_MAX: Final = 160 << 10
THREAD_BYTES_MAX: Final = 512 << 10
# Target for a block on the loop.
_BLOCK_S: Final = 0.005


class Stretch(NamedTuple):
    """Rows with something to index, and the log file that holds their records."""

    rows: Rows
    log_start: int  # the file's first physical offset
    log: Array  # uint8


class IndexBlock(NamedTuple):
    """Rows of the ring, by their number since the start; what is to be indexed is copied."""

    first: int
    row_count: int
    last_physical_offset: int
    stretches: list[Stretch]


class Indexer(Taker):
    """Reads the keys of records out of their properties and files them.

    ``put_copied`` may run in a thread; all else is for the loop. Nobody waits for the index, and
    small blocks cost the most, so ``drain`` leaves the rows to whoever waits for ``asked``.
    """

    name = "index"

    def __init__(
        self, ring: Ring, commit_log: CommitLog, index_files: IndexFiles, queues: list[StoreQueue]
    ) -> None:
        """queues: by queue_key; the store adds to it."""
        self.join(ring)
        # Set when rows wait that nobody has indexed yet.
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
        """Ask for what waits to be indexed; index a block of it when the ring is half full."""
        ring = self.ring
        waiting_count = ring.written - self.cursor.taken
        if waiting_count > ring.row_count // 2:
            waiting_count -= self.drain_block(confirmed_offset)
        if waiting_count:
            self.asked.set()

    def drain_all(self, confirmed_offset: int | None) -> None:
        """Index all rows of confirmed records. Raises OSError on a full disk; call again later."""
        while self.drain_block(confirmed_offset):
            pass

    def make_room(self, row_count: int, confirmed_offset: int | None) -> None:
        """See ``Taker``."""
        ring = self.ring
        while ring.written + row_count > ring.limit and self.drain_block(confirmed_offset):
            pass

    def drain_block(self, confirmed_offset: int | None) -> int:
        """Index some waiting rows, which takes half a millisecond; returns how many.

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
            self._fit(block.row_count, perf_counter() - began)
        return block.row_count

    def _fit(self, row_count: int, seconds: float) -> None:
        """Adapt the number of rows to the time they took: some records have thousands of keys."""
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
        """Rows to index next; their records must be in the file.

        confirmed_offset: see ``Ring.waiting``.
        bytes_max: of their properties, all of which may be keys.
        """
        waiting = self.ring.waiting(self.cursor, confirmed_offset)
        rows = self.ring.copy(slice(waiting.start, min(waiting.stop, waiting.start + rows_max)))
        ends = np.cumsum(rows["properties_size"], dtype=np.int64)
        rows = rows[: max(int(np.searchsorted(ends, bytes_max, "right")), 1)]
        last = int(rows["physical_offset"].max(initial=-1))
        return IndexBlock(self.cursor.taken, len(rows), last, self._stretches(rows))

    def put_copied(self, block: IndexBlock) -> None:
        """Index a block, in any thread; ``Ring.release`` is left to the loop.

        Nothing happens when its rows were indexed since it was taken. Raises as ``drain_all``.
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
        """The index files are there, without what a crash may have damaged."""
        self._durable_offset = durable_offset

    def put(self, rows: Rows) -> None:
        """Index records that are not in the ring. Raises as ``drain_all``."""
        with self.index_files.lock:
            self._put_stretches(self._stretches(rows))

    def cut(self, physical_offset: int) -> None:
        """What is past the log's end was not seen; entries for it went when the files were read."""
        if self.index_files.last_seen > physical_offset:
            self.index_files.last_seen = -1

    def recovered(self, newest: tuple[int, int] | None) -> None:
        """All keys up to the newest record are in the index."""
        if newest is not None:
            self.index_files.last_seen = max(self.index_files.last_seen, newest[0])

    # --- flush -----------------------------------------------------------------------------

    def durable_offset(self) -> int:
        """See ``Taker``."""
        return self._durable_offset

    def start_flush(self, taken_offset: int) -> TakerFlush:
        """Files that have become full, and the last one; the mark says how far it goes."""
        full, last, mark = self.index_files.start_flush()

        def flushed(checkpoint: Checkpoint) -> Checkpoint:
            self._durable_offset = taken_offset
            return checkpoint._replace(index_msg_timestamp=full[-1][1]) if full else checkpoint

        syncs = [index_file.file.sync for index_file, _ in full]
        mark_path = self.index_files.directory.parent / INDEX_MARK_NAME
        return TakerFlush(
            [*syncs, *([last.file.sync] if last else [])],
            flushed,
            # A checkpoint of ours without a mark is taken for the peer's.
            partial(mark.save, mark_path, self.index_files.fs),
        )

    def due_flushes(self, least_bytes: int) -> Iterator[TakerFlush]:  # noqa: ARG002 - whole files
        """Files that have become full."""
        for index_file, end_timestamp in self.index_files.start_flush().full:
            yield TakerFlush(
                [index_file.file.sync], partial(_with_index_time, timestamp=end_timestamp)
            )

    # --- keys ------------------------------------------------------------------------------

    def _stretches(self, rows: Rows) -> list[Stretch]:
        """The rows by the files of their records, without those that have nothing to index."""
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
            queue_keys = rows["queue_key"]
            numbers, hashes = key_hashes(
                Regions(log, starts, sizes),
                prefixes.take(queue_keys, axis=0),
                partial(self._topic, queue_keys),
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
        """A queue has the key of one that is gone, or a new one."""
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
    """Warn that files were removed behind the store's back."""
    log.error(
        "index files were removed under the running broker: messages are taken, but queries by key"
        " miss those before; the next start makes the index anew from the log",
        paths=[str(path) for path in paths],
    )
