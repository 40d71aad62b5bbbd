"""Dispatcher: the taker that writes the ConsumeQueues."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import numpy as np

from headrace_broker.store.log.ring import (
    ROW,
    ROW_BYTES,
    Ring,
    Rows,
    batch_units_of,
    message_count,
    message_counts,
    select,
    units_of,
)
from headrace_broker.store.log.takers import Taker, TakerFlush
from headrace_broker.store.queues.batch_queue import BatchConsumeQueue
from headrace_broker.store.queues.consume_queue import UNIT, UNIT_BYTES, Units
from headrace_protocol.message import INNER_BATCH, TRANSACTION_PREPARED

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from headrace_broker.store.integrity.checkpoint import Checkpoint
    from headrace_broker.store.log.ring import Run
    from headrace_broker.store.queues.consume_queue import ConsumeQueue
    from headrace_broker.store.queues.deletions import Deletions
    from headrace_broker.store.store_queue import StoreQueue

# PREPARED and ROLLBACK records (they share this bit) have no unit, and rows of batch queues have
# one of another kind.
NOT_QUEUED: Final = TRANSACTION_PREPARED | INNER_BATCH
BLOCK_ROWS: Final = 96
# Bounds the sorting that is wasted when too many queues are new; larger blocks save nothing.
BLOCK_ROWS_MAX: Final = 2048


class Dispatcher(Taker):
    """Writes one unit per row to the queue of the row's ``queue_key``.

    touched: the queues that got units since ``take_touched``. dirty: the ConsumeQueues whose newest
    units may not be on disk.
    """

    name = "consumequeue"

    def __init__(self, ring: Ring, queues: list[StoreQueue], deletions: Deletions) -> None:
        """queues: indexed by queue_key; the store appends to it. deletions: saved by flushes."""
        self.join(ring)
        # From this many rows on numpy costs less than a plain loop.
        self.block_rows = BLOCK_ROWS
        self.deletions = deletions
        self.queues = queues
        # Dictionaries, since the order of sets differs from run to run.
        self.touched: dict[StoreQueue, None] = {}
        self.dirty: dict[ConsumeQueue, None] = {}
        # How many queues may get their first file in one drain; each takes half a millisecond.
        self.new_files_max = sys.maxsize
        # Whether the last drain stopped at that limit.
        self.is_interrupted = False
        self._new_files = 0
        self._newest_unit = -1
        self._durable_offset = 0
        # Physical offset and store timestamp of the last record dispatched by a start.
        self._newest_recovered: tuple[int, int] | None = None

    # --- the running store -----------------------------------------------------------------

    def drain(self, confirmed_offset: int | None) -> None:
        """Take waiting rows, as many as ``new_files_max`` allows.

        Raises OSError on a full disk. The next call retries all rows that were not taken and skips
        units that exist already.
        """
        ring, cursor = self.ring, self.cursor
        self._new_files = 0
        self.is_interrupted = False
        while ring.written > cursor.taken:
            rows_max = self._put_runs(confirmed_offset) if ring.runs else sys.maxsize
            waiting = ring.waiting(cursor, confirmed_offset)
            stop = min(waiting.stop, waiting.start + min(rows_max, BLOCK_ROWS_MAX))
            waiting = slice(waiting.start, stop)
            count = waiting.stop - waiting.start
            if not count:
                return
            if count >= self.block_rows and self._put_block(ring.rows[waiting]):
                ring.take(cursor, count)
                continue
            taken = self._put_each(waiting)
            ring.take(cursor, taken)
            if taken < count:
                self.is_interrupted = True
                return

    def drain_all(self, confirmed_offset: int | None) -> None:
        """As ``drain``, without a limit on new files."""
        new_files_max, self.new_files_max = self.new_files_max, sys.maxsize
        try:
            self.drain(confirmed_offset)
        finally:
            self.new_files_max = new_files_max

    def _put_runs(self, confirmed_offset: int | None) -> int:
        """Put the runs that begin at the cursor, each as one block of finished units.

        Returns how many rows from the cursor on to put individually: those before the next run, or
        those of a run that cannot be put as a whole. Raises OSError on a full disk.
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
                if not self._put_run(run):
                    runs.popleft()
                    return row_count
                self.ring.take(cursor, row_count)
            runs.popleft()
        return sys.maxsize

    def _put_run(self, run: Run) -> bool:
        """Returns False if the run is not next in its queue, or needs one new file too many."""
        queue = self.queues[run.queue_key]
        consume_queue = queue.consume_queue
        if run.queue_offset != consume_queue.max_offset or consume_queue.is_batch:
            return False
        if consume_queue.file is None:
            if self._new_files == self.new_files_max:
                return False
            self._new_files += 1
        _put_consecutive(consume_queue, run.units)
        self.touched[queue] = None
        return True

    def take_touched(self) -> Collection[StoreQueue]:
        """The queues that got units since the last call; marks them dirty."""
        touched, self.touched = self.touched, {}
        for queue in touched:
            self.dirty[queue.consume_queue] = None
        return touched

    def forget(self, queue: StoreQueue) -> None:
        """Drop a queue that is being deleted."""
        self.touched.pop(queue, None)
        self.dirty.pop(queue.consume_queue, None)

    # --- start -----------------------------------------------------------------------------

    def loaded(self, newest_unit: int, durable_offset: int) -> None:
        """Called once the queues are loaded.

        newest_unit: the largest physical offset in any queue, -1 without units.
        """
        self._newest_unit = newest_unit
        self._durable_offset = durable_offset

    def put(self, rows: Rows) -> None:
        """Write the units of rows that a start has rebuilt from the log."""
        self._put_block(rows)

    def cut(self, physical_offset: int) -> None:
        """Remove the units from there on; the queues continue at their new ends."""
        # Most starts need not search each queue.
        is_any = self._newest_unit >= physical_offset
        for queue in self.queues:
            consume_queue = queue.consume_queue
            if is_any:
                consume_queue.truncate_from_physical(physical_offset)
            if consume_queue.is_cut:
                self.dirty[consume_queue] = None
            queue.next_offset = consume_queue.max_offset

    def recovered(self, newest: tuple[int, int] | None) -> None:
        """Have the next flush record in the checkpoint what a start has rebuilt."""
        self._newest_recovered = newest
        self.take_touched()

    # --- flush -----------------------------------------------------------------------------

    def durable_offset(self) -> int:
        """See ``Taker``."""
        return self._durable_offset

    def start_flush(self, taken_offset: int) -> TakerFlush:
        """All queues with new units; the checkpoint names the newest record that has its unit."""
        queues, self.dirty = self._all_dirty(), {}
        newest = self.ring.last_of(self.cursor.taken) or self._newest_recovered

        def flushed(checkpoint: Checkpoint) -> Checkpoint:
            self._durable_offset = taken_offset
            if newest is None:
                return checkpoint
            physical_offset, store_ms = newest
            return checkpoint._replace(
                logics_msg_timestamp=store_ms, logics_physical_offset=physical_offset
            )

        syncs = [queue.start_flush() for queue in queues]
        return TakerFlush(syncs, flushed, self.deletions.save)

    def due_flushes(self, least_bytes: int) -> Iterator[TakerFlush]:
        """Queues with many new units; they stay dirty until the checkpoint covers them."""
        due = [queue for queue in self._all_dirty() if queue.dirty_bytes() >= least_bytes]
        if due:
            yield TakerFlush([queue.start_flush() for queue in due])

    def _all_dirty(self) -> dict[ConsumeQueue, None]:
        self.dirty.update({queue.consume_queue: None for queue in self.touched})
        return self.dirty

    # --- units -----------------------------------------------------------------------------

    def _put_each(self, waiting: slice) -> int:
        """Put rows up to the first that needs one new file too many; returns how many."""
        queues, touched = self.queues, self.touched
        pack_into = UNIT.pack_into
        # A copy, since Python before 3.12.7 can crash on cyclic garbage that has an iterator over a
        # memoryview, such as the traceback of a full disk (python/cpython#77894).
        data = self.ring.buffer[waiting.start * ROW_BYTES : waiting.stop * ROW_BYTES]
        rows = ROW.iter_unpack(data)
        for number, row in enumerate(rows):
            physical_offset, queue_offset, tags_code, _, size, queue_key, _, sys_flag = row
            if sys_flag & NOT_QUEUED:
                if sys_flag & INNER_BATCH and not self._put_batch(row):
                    return number
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
            touched[queue] = None
        return int(waiting.stop - waiting.start)

    def _put_batch(self, row: tuple[int, ...]) -> bool:
        """Put the row of a batch queue; returns False if it needs one new file too many."""
        physical_offset, queue_offset, tags_code, store_ms, size, queue_key, _, sys_flag = row
        queue, count = self.queues[queue_key], message_count(sys_flag)
        consume_queue = queue.consume_queue
        if not count or not isinstance(consume_queue, BatchConsumeQueue):
            return True
        if consume_queue.file is None:
            if self._new_files == self.new_files_max:
                return False
            self._new_files += 1
        consume_queue.put_unit(physical_offset, size, tags_code, store_ms, queue_offset, count)
        self.touched[queue] = None
        return True

    def _put_block(self, rows: Rows) -> bool:
        """Write the units of many rows, one block per queue.

        Returns False, and writes nothing, if too many queues need their first file.
        """
        if (rows["sys_flag"] & NOT_QUEUED).any():
            rows = select(rows, message_counts(rows["sys_flag"]) > 0)
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
        units = units_of(rows)
        is_unbroken = bool(((queue_offsets[1:] - queue_offsets[:-1] == 1) | changes).all())
        queues = [self.queues[key] for key in keys[starts].tolist()]
        new_files = sum(queue.consume_queue.file is None for queue in queues)
        if self._new_files + new_files > self.new_files_max:
            return False
        self._new_files += new_files
        for queue, start, end in zip(queues, starts, [*starts[1:], len(rows)], strict=True):
            first, consume_queue = int(queue_offsets[start]), queue.consume_queue
            if isinstance(consume_queue, BatchConsumeQueue):
                consume_queue.put_units(batch_units_of(rows[start:end]))
            elif is_unbroken and first == consume_queue.max_offset:
                _put_consecutive(consume_queue, units[start:end])
            else:
                _put_units(consume_queue, queue_offsets[start:end].tolist(), units[start:end])
            self.touched[queue] = None
        return True


def _put_consecutive(consume_queue: ConsumeQueue, units: Units) -> None:
    """Add units at ``max_offset``, across files if need be."""
    put_count = consume_queue.put_block(units)
    while put_count < len(units):
        put_count += consume_queue.put_block(units[put_count:])


def _put_units(consume_queue: ConsumeQueue, queue_offsets: list[int], units: Units) -> None:
    for queue_offset, unit in zip(queue_offsets, units.tolist(), strict=True):
        consume_queue.put(queue_offset, *unit)
