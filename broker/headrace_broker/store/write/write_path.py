"""The write path of every message: append, commit, answer, publish to readers.

Invariants for every writer:

1. One writer. All calls come from one thread, so assigning offsets and encoding a record is one
   uninterrupted step, and queue offsets have no gaps.
2. Written, then answered. Records stay in memory until ``commit``; no answer that mentions a
   record leaves before the commit that covers it has succeeded.
3. Confirmed, then answered. Where there is a gate (the disk, with synchronous flush), the answer
   also waits until ``Confirmation`` lets the end of the record through.
4. Written and confirmed, then visible. No taker gets the row of a record that is not in the file,
   or that begins at or past the confirmed offset: neither queue nor index leads to it, and a query
   by its id does not find it. So a message that a consumer has read survives every failure that
   the gates protect against.
5. Answered, then published. ``publish`` runs between two turns, when the answers of the first
   have been handed to the kernel and no request of the second has been served: an acknowledged
   message is readable for every request that comes after its answer. The exception is a large
   block that needs room in the ring: the records before it are published first, written but not
   yet answered.
6. Published, then woken. Subscribers are notified of queues whose units are readable. They must
   not append, because their answers leave before the next commit; a task appends, with
   ``append_block``.
7. Nothing is dropped. A row stays in the ring until every taker has it; when the disk has no room
   for a taker, appends are refused and the rows wait.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from threading import get_ident
from typing import TYPE_CHECKING

import trio

from headrace_broker.store.errors import StoreBusy
from headrace_broker.store.life import State
from headrace_broker.store.write.confirmation import wait_for

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from headrace_broker.clock import Clock
    from headrace_broker.store.log.commit_log import CommitLog
    from headrace_broker.store.log.encoded_records import EncodedRecords
    from headrace_broker.store.log.takers import Taker
    from headrace_broker.store.queues.dispatch import Dispatcher
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_broker.store.write.confirmation import Confirmation

OnPublished = Callable[[Collection["StoreQueue"]], None]

# ConsumeQueue files created in one step, for queues with a first message: about ten milliseconds.
NEW_FILES_AT_ONCE = 16
_ROOM_POLL_S = 0.01


class WritePath:
    """Appends, commits and publishes; see the invariants in the module docstring."""

    def __init__(
        self,
        root: Path,
        clock: Clock,
        commit_log: CommitLog,
        dispatcher: Dispatcher,
        takers: Sequence[Taker],
        confirmation: Confirmation,
    ) -> None:
        """takers: all takers, among them ``dispatcher``, whose queues are published."""
        self.confirmation = confirmation
        self._root = root
        self._clock = clock
        self._commit_log = commit_log
        self._ring = commit_log.ring
        self._dispatcher = dispatcher
        self._takers = takers
        self._subscribers: list[OnPublished] = []
        self._writer: int | None = None
        self._unfinished = trio.Event()
        confirmation.on_moved(self.publish)
        # Aliases spare the hot path one call.
        self.append = commit_log.append
        self.append_each = commit_log.append_each
        self.append_batch = commit_log.append_batch
        self.append_inner_batch = commit_log.append_inner_batch
        self.commit = commit_log.write_out
        self.pressure = self._ring.pressure

    def on_published(self, callback: OnPublished) -> None:
        """Register a callback for the queues that got units, each time that any did."""
        self._subscribers.append(callback)

    # --- one turn --------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a turn: read the clock once for all its records."""
        self._commit_log.now_ms = self._clock.now_ms()

    def append_records(self, records: EncodedRecords) -> tuple[int, int]:
        """As ``CommitLog.append_records``, but first makes room in the ring for a large block."""
        row_count = len(records.rows)
        if self._ring.written + row_count > self._ring.limit:
            self._make_room(row_count)
        return self._commit_log.append_records(records)

    def _make_room(self, row_count: int) -> None:
        assert self._writer in {None, get_ident()}
        self.publish()
        confirmed_offset = self.confirmation.offset
        for taker in self._takers:
            try:
                taker.make_room(row_count, confirmed_offset)
            except OSError as error:
                self.refuse(error, taker)

    def publish(self) -> None:
        """Drain confirmed records into the takers and notify the subscribers.

        While the store runs, the units of many new queues are spread over several calls. A full
        disk refuses further appends, and a later call drains the remaining rows.
        Raises StoreNotWritable when the records themselves can't be written.
        """
        self.commit()
        confirmation = self.confirmation
        confirmed_offset = None if confirmation.is_immediate else self._advance_gates()
        for taker in self._takers:
            try:
                taker.drain(confirmed_offset)
            except OSError as error:
                self.refuse(error, taker)
        dispatcher = self._dispatcher
        if dispatcher.is_interrupted:
            self._unfinished.set()
        if dispatcher.touched:
            queues, written = dispatcher.take_touched(), self._ring.written
            for callback in self._subscribers:
                callback(queues)
            assert self._ring.written == written, "a subscriber has appended"

    def _advance_gates(self) -> int | None:
        """Ask the gates to move to the end of the log; returns the confirmed offset."""
        log_end = self._commit_log.max_offset
        self.confirmation.advance(log_end)
        confirmed_offset = self.confirmation.offset
        assert confirmed_offset is None or confirmed_offset <= log_end
        assert confirmed_offset is None or self._is_hidden_from(confirmed_offset)
        return confirmed_offset

    def _is_hidden_from(self, confirmed_offset: int) -> bool:
        """True if no taker has a record at or past the confirmed offset."""
        lasts = [self._ring.last_of(taker.cursor.taken) for taker in self._takers]
        return all(last is None or last[0] < confirmed_offset for last in lasts)

    def drain_all(self) -> None:
        """Drain all confirmed records into the takers, however long it takes.

        Subscribers are notified by the next ``publish``.
        """
        for taker in self._takers:
            self.drain_taker(taker, taker.drain_all)

    def drain_taker(self, taker: Taker, drain: Callable[[int | None], object]) -> None:
        """Commit, then call a taker's ``drain`` with the confirmed offset."""
        assert self._writer in {None, get_ident()}
        self.commit()
        try:
            drain(self.confirmation.offset)
        except OSError as error:
            self.refuse(error, taker)

    def refuse(self, error: OSError, taker: Taker) -> None:
        """Refuse appends because a taker could not write."""
        self._commit_log.refuse_for(error, taker.directory(self._root))

    # --- writers inside the broker ---------------------------------------------------------

    async def append_block(
        self,
        make_records: Callable[[], EncodedRecords],
        on_assigned: Callable[[int, int], None] = lambda _queue_offset, _physical_offset: None,
    ) -> None:
        """Append a block once there is room for it, and publish it as far as it is confirmed.

        make_records: called before each attempt, because a queue may be deleted in the meantime.
        on_assigned: called with the first record's queue offset and physical offset once they are
        assigned. From then on a later commit writes the block even if this one fails, so a writer
        that retries must not append it again.

        No other task runs between ``on_assigned`` and the return. A writer that depends on the
        block then awaits ``wait_confirmed``. Raises StoreNotWritable, RecordTooLarge.
        """
        if self.pressure():
            await self.wait_for_room()
        while True:
            records = make_records()
            assert len(records.rows) <= self._ring.row_count
            self.begin()
            try:
                offsets = self.append_records(records)
            except StoreBusy:
                if self._commit_log.life.state is not State.OPEN:
                    raise self._commit_log.refused() from None
                await self.wait_for_room()
            else:
                on_assigned(*offsets)
                self.publish()
                return

    async def wait_for_room(self) -> None:
        """Wait until the gates have passed all records; if the ring is still full, poll.

        Raises StoreNotWritable.
        """
        await self.wait_confirmed()
        self.publish()
        if self.pressure():
            await trio.sleep(_ROOM_POLL_S)

    async def wait_confirmed(self) -> None:
        """Wait until all records so far may be acknowledged. Raises StoreNotWritable."""
        await wait_for(self.confirmation.when_confirmed, self._commit_log.max_offset, self._root)

    # --- the running store -----------------------------------------------------------------

    async def run(self) -> None:
        """Create the files of new queues in steps: a thousand at once would stall the loop."""
        self._writer = get_ident()
        self._dispatcher.new_files_max = NEW_FILES_AT_ONCE
        try:
            while True:
                self.publish()
                await self._unfinished.wait()
                self._unfinished = trio.Event()
                await trio.lowlevel.checkpoint()
        finally:
            self._writer = None
            self._dispatcher.new_files_max = sys.maxsize
