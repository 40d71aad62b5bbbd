"""From the ring to the IndexFiles: in blocks, some milliseconds behind the replies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from headrace_broker.store.index_keys import key_hashes
from headrace_broker.store.ring import select
from headrace_protocol.message import TRANSACTION_MASK, TRANSACTION_ROLLBACK

if TYPE_CHECKING:
    from headrace_broker.store.commit_log import CommitLog
    from headrace_broker.store.index_file import IndexFile, IndexFiles
    from headrace_broker.store.ring import Ring, Rows
    from headrace_broker.store.store_queue import StoreQueue

# About a millisecond, which is how long a request may have to wait for it.
BLOCK_ROWS_MAX: Final = 1024


class Indexer:
    """Reads the keys of records out of their properties and files them."""

    def __init__(
        self, ring: Ring, commit_log: CommitLog, index_files: IndexFiles, queues: list[StoreQueue]
    ) -> None:
        """queues: by queue_key; the store adds to it."""
        self.ring = ring
        self.cursor = ring.cursors[1]
        self.commit_log = commit_log
        self.index_files = index_files
        self.queues = queues
        # Files to bring to disk, each with the store time of its last entry.
        self.full_files: list[tuple[IndexFile, int]] = []

    @property
    def waiting_count(self) -> int:
        """Rows not yet indexed."""
        return self.ring.written - self.cursor.taken

    def drain(self) -> None:
        """Index all waiting rows. Raises OSError on a full disk; call again later."""
        while self.waiting_count:
            self.drain_block()

    def drain_block(self) -> None:
        """Index some waiting rows, which takes some milliseconds. Raises as ``drain``."""
        rows = self.ring.rows[self.ring.waiting(self.cursor)][:BLOCK_ROWS_MAX]
        self.put_block(rows)
        self.ring.take(self.cursor, len(rows))

    def put_block(self, rows: Rows) -> None:
        """Index a block of rows in log order."""
        is_indexed = rows["sys_flag"] & TRANSACTION_MASK != TRANSACTION_ROLLBACK
        rows = select(rows, is_indexed & (rows["properties_size"] > 0))
        if not len(rows):
            return
        queues = self.queues
        keys, which = np.unique(rows["queue_key"], return_inverse=True)
        prefixes = np.array([queues[key].index_prefixes for key in keys.tolist()], np.uint32)
        numbers, hashes = key_hashes(
            self._regions(rows),
            prefixes[which],
            lambda number: queues[rows["queue_key"][number]].topic,
        )
        self.full_files += self.index_files.put(
            hashes,
            rows["physical_offset"][numbers],
            rows["store_timestamp"][numbers],
            self.commit_log.clock.now_ms(),
        )

    def _regions(self, rows: Rows) -> list[bytes]:
        """The properties of each record, which stand at its end."""
        regions: list[bytes] = []
        ends = (rows["physical_offset"] + rows["size"]).tolist()
        sizes = rows["properties_size"].tolist()
        while len(regions) < len(rows):
            file = self.commit_log.files.find(ends[len(regions)] - 1)
            assert file is not None
            upto = int(np.searchsorted(rows["physical_offset"], file.end_offset))
            base, log = file.start_offset, file.map
            regions += [
                log[end - size - base : end - base]
                for end, size in zip(
                    ends[len(regions) : upto], sizes[len(regions) : upto], strict=True
                )
            ]
        return regions
