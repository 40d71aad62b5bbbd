"""From the ring to the IndexFiles: in blocks, some milliseconds behind the replies."""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace_broker.store.index_keys import Regions, key_hashes
from headrace_broker.store.ring import select
from headrace_protocol.message import TRANSACTION_MASK, TRANSACTION_ROLLBACK

if TYPE_CHECKING:
    from headrace_broker.store.commit_log import CommitLog
    from headrace_broker.store.index_file import IndexFiles
    from headrace_broker.store.ring import Ring, Rows
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_protocol.columns import Array

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


class Indexer:
    """Reads the keys of records out of their properties and files them.

    ``put`` may run in a thread; all else is for the loop.
    """

    def __init__(
        self, ring: Ring, commit_log: CommitLog, index_files: IndexFiles, queues: list[StoreQueue]
    ) -> None:
        """queues: by queue_key; the store adds to it."""
        self.ring = ring
        self.cursor = ring.cursors[1]
        self.commit_log = commit_log
        self.index_files = index_files
        self.queues = queues
        self._known_prefixes = np.empty((0, 2), np.uint32)
        self._rows_at_once = BLOCK_ROWS_MAX

    @property
    def waiting_count(self) -> int:
        """Rows not yet indexed."""
        return self.ring.written - self.cursor.taken

    def drain(self) -> None:
        """Index all waiting rows. Raises OSError on a full disk; call again later."""
        while self.waiting_count:
            self.drain_block()

    def drain_block(self) -> None:
        """Index some waiting rows, which takes half a millisecond. Raises as ``drain``."""
        began = perf_counter()
        with self.index_files.lock:
            block = self.next_block(self._rows_at_once, BLOCK_BYTES_MAX)
            self._put(block)
        self.ring.release()
        self._fit(block.row_count, perf_counter() - began)

    def _fit(self, row_count: int, seconds: float) -> None:
        """Adapt the number of rows to the time they took: some records have thousands of keys."""
        if seconds > _BLOCK_S:
            self._rows_at_once = max(int(row_count * _BLOCK_S / seconds), 1)
        else:
            self._rows_at_once = min(2 * self._rows_at_once, BLOCK_ROWS_MAX)

    def next_block(
        self, rows_max: int = THREAD_ROWS_MAX, bytes_max: int = THREAD_BYTES_MAX
    ) -> IndexBlock:
        """Rows to index next; their records must be in the file.

        bytes_max: of their properties, all of which may be keys.
        """
        waiting = self.ring.waiting(self.cursor)
        rows = self.ring.copy(slice(waiting.start, min(waiting.stop, waiting.start + rows_max)))
        ends = np.cumsum(rows["properties_size"], dtype=np.int64)
        rows = rows[: max(int(np.searchsorted(ends, bytes_max, "right")), 1)]
        last = int(rows["physical_offset"].max(initial=-1))
        return IndexBlock(self.cursor.taken, len(rows), last, self._stretches(rows))

    def put(self, block: IndexBlock) -> None:
        """Index a block, in any thread; ``Ring.release`` is left to the loop. Raises as ``drain``.

        Nothing happens when its rows were indexed since it was taken.
        """
        with self.index_files.lock:
            if block.first == self.cursor.taken:
                self._put(block)

    def _put(self, block: IndexBlock) -> None:
        self._put_stretches(block.stretches)
        self.index_files.last_seen = max(self.index_files.last_seen, block.last_physical_offset)
        self.cursor.taken += block.row_count

    def put_rows(self, rows: Rows) -> None:
        """Index records in log order that are not in the ring. Raises as ``drain``."""
        with self.index_files.lock:
            self._put_stretches(self._stretches(rows))

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
