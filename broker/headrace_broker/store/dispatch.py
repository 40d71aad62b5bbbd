"""From the ring to the ConsumeQueues."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import numpy as np

from headrace_broker.store.consume_queue import UNIT, UNIT_BYTES, Units
from headrace_broker.store.ring import ROW, ROW_BYTES, Ring, Rows, select
from headrace_protocol.columns import UNIT_DTYPE
from headrace_protocol.message import INNER_BATCH, TRANSACTION_PREPARED

if TYPE_CHECKING:
    from headrace_broker.store.consume_queue import ConsumeQueue
    from headrace_broker.store.ring import Run
    from headrace_broker.store.store_queue import StoreQueue

# PREPARED and ROLLBACK records (they share this bit) and inner batches have no unit of their own.
NOT_QUEUED: Final = TRANSACTION_PREPARED | INNER_BATCH
# From here on the set-up of the numpy calls costs less than the loop (tests/bench/store_micro.py).
BLOCK_ROWS: Final = 96
# What is sorted in vain when too many of its queues are new; larger blocks save nothing.
BLOCK_ROWS_MAX: Final = 2048


class Dispatcher:
    """Writes one unit per row to the queue that the row's key names."""

    def __init__(self, ring: Ring, queues: list[StoreQueue]) -> None:
        """queues: by queue_key; the store adds to it."""
        self.ring = ring
        self.queues = queues
        self.cursor = ring.cursors[0]
        # How many queues may get their first file in one drain, each in half a millisecond.
        self.new_files_max = sys.maxsize
        self._new_files = 0

    def drain(self, confirmed_offset: int | None, touched: set[StoreQueue]) -> bool:
        """Take waiting rows, all or those of records that end by ``confirmed_offset``.

        Queues that got units are added to ``touched``. Returns False when it stopped because of
        ``new_files_max``.

        Raises OSError on a full disk. What was not taken is put again by the next call; units
        that are there already are left alone.
        """
        self._new_files = 0
        while self.ring.written > self.cursor.taken:
            rows_max = self._put_runs(confirmed_offset, touched) if self.ring.runs else sys.maxsize
            waiting = self.ring.waiting(self.cursor)
            stop = min(waiting.stop, waiting.start + min(rows_max, BLOCK_ROWS_MAX))
            waiting = slice(waiting.start, stop)
            if confirmed_offset is not None:
                waiting = self._confirmed(waiting, confirmed_offset)
            count = waiting.stop - waiting.start
            if not count:
                return True
            if count >= BLOCK_ROWS and self.put_block(self.ring.rows[waiting], touched):
                self.ring.take(self.cursor, count)
                continue
            taken = self._put_each(waiting, touched)
            self.ring.take(self.cursor, taken)
            if taken < count:
                return False
        return True

    def _put_runs(self, confirmed_offset: int | None, touched: set[StoreQueue]) -> int:
        """Put the runs that begin at the cursor, one block of finished units each.

        Returns how many rows from the cursor on are to be put by themselves: up to the next run,
        or those of one that cannot be put as a whole. Raises OSError on a full disk.
        """
        cursor, runs = self.cursor, self.ring.runs
        while runs:
            run = runs[0]
            if run.first > cursor.taken:
                return run.first - cursor.taken
            row_count = len(run.units)
            if run.first == cursor.taken:
                if confirmed_offset is not None and run.last_physical_offset >= confirmed_offset:
                    return row_count
                if not self._put_run(run, touched):
                    runs.popleft()
                    return row_count
                self.ring.take(cursor, row_count)
            runs.popleft()
        return sys.maxsize

    def _put_run(self, run: Run, touched: set[StoreQueue]) -> bool:
        """Returns False when the queue does not go on with it, or needs a file too many."""
        queue = self.queues[run.queue_key]
        consume_queue = queue.consume_queue
        if run.queue_offset != consume_queue.max_offset:
            return False
        if consume_queue.file is None:
            if self._new_files == self.new_files_max:
                return False
            self._new_files += 1
        _put_consecutive(consume_queue, run.units)
        touched.add(queue)
        return True

    def _confirmed(self, waiting: slice, confirmed_offset: int) -> slice:
        physical_offsets = self.ring.rows["physical_offset"]
        if physical_offsets[waiting.stop - 1] < confirmed_offset:
            return waiting
        count = int(np.searchsorted(physical_offsets[waiting], confirmed_offset))
        return slice(waiting.start, waiting.start + count)

    def _put_each(self, waiting: slice, touched: set[StoreQueue]) -> int:
        """Returns how many rows were put, up to the first that needs a file too many."""
        queues = self.queues
        pack_into = UNIT.pack_into
        # A copy, since Python before 3.12.7 can crash when garbage, such as what the traceback of a
        # full disk holds, has an iterator over a memoryview in a loop (python/cpython#77894).
        data = self.ring.buffer[waiting.start * ROW_BYTES : waiting.stop * ROW_BYTES]
        rows = ROW.iter_unpack(data)
        for number, row in enumerate(rows):
            physical_offset, queue_offset, tags_code, _, size, queue_key, _, sys_flag = row
            if sys_flag & NOT_QUEUED:
                continue
            queue = queues[queue_key]
            consume_queue = queue.consume_queue
            position = consume_queue.position
            if queue_offset == consume_queue.max_offset and position < consume_queue.room_end:
                pack_into(consume_queue.map, position, physical_offset, size, tags_code)
                consume_queue.position = position + UNIT_BYTES
                consume_queue.max_offset = queue_offset + 1
            else:
                if consume_queue.file is None:
                    if self._new_files == self.new_files_max:
                        return number
                    self._new_files += 1
                consume_queue.put(queue_offset, physical_offset, size, tags_code)
            touched.add(queue)
        return int(waiting.stop - waiting.start)

    def put_block(self, rows: Rows, touched: set[StoreQueue]) -> bool:
        """Write the units of many rows: sorted by queue, one block for each.

        Returns False, and writes none, when too many of them need files first.
        """
        rows = select(rows, rows["sys_flag"] & NOT_QUEUED == 0)
        if not len(rows):
            return True
        keys = rows["queue_key"]
        changes = keys[1:] != keys[:-1]
        starts = [0]
        if changes.any():
            rows = rows.take(np.argsort(keys, kind="stable"))
            keys = rows["queue_key"]
            changes = keys[1:] != keys[:-1]
            starts += (np.flatnonzero(changes) + 1).tolist()
        queue_offsets = rows["queue_offset"]
        units = np.empty(len(rows), UNIT_DTYPE)
        for name in UNIT_DTYPE.names or ():
            units[name] = rows[name]
        is_unbroken = bool(((queue_offsets[1:] - queue_offsets[:-1] == 1) | changes).all())
        queues = [self.queues[key] for key in keys[starts].tolist()]
        new_files = sum(queue.consume_queue.file is None for queue in queues)
        if self._new_files + new_files > self.new_files_max:
            return False
        self._new_files += new_files
        for queue, start, end in zip(queues, starts, [*starts[1:], len(rows)], strict=True):
            first = int(queue_offsets[start])
            if is_unbroken and first == queue.consume_queue.max_offset:
                _put_consecutive(queue.consume_queue, units[start:end])
            else:
                _put_units(queue.consume_queue, queue_offsets[start:end].tolist(), units[start:end])
            touched.add(queue)
        return True


def _put_consecutive(consume_queue: ConsumeQueue, units: Units) -> None:
    """Add units at ``max_offset``, in as many files as they take."""
    put_count = consume_queue.put_block(units)
    while put_count < len(units):
        put_count += consume_queue.put_block(units[put_count:])


def _put_units(consume_queue: ConsumeQueue, queue_offsets: list[int], units: Units) -> None:
    for queue_offset, unit in zip(queue_offsets, units.tolist(), strict=True):
        consume_queue.put(queue_offset, *unit)
