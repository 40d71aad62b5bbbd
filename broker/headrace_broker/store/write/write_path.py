"""The way of every message: appended, committed, answered, published to readers.

What holds at every moment, whoever writes:

1. One writer. All calls come from one thread, so assigning offsets and encoding a record is one
   step that nothing interrupts, and queue offsets have no gaps.
2. Written, then answered. Records are kept in memory until ``commit``; no answer that speaks of a
   record leaves before the commit that covers it has succeeded.
3. Confirmed, then answered. Where there is a gate (the disk, with synchronous flush), the answer
   also waits until ``Confirmation`` lets the end of the record through.
4. Written and confirmed, then visible. No taker gets the row of a record that is not in the file,
   or begins at or past the confirmed offset: neither queue nor index leads to it, and a query by
   its id does not find it. So what a consumer has seen survives whatever the gates promise.
5. Answered, then published. ``publish`` runs between two batches, when the answers of the first
   have been handed to the kernel and no request of the second has been served: an acknowledged
   message is readable for every request that comes after its answer. The exception is a large
   block that needs room in the ring: what came before it is published then, written all the same.
6. Published, then woken. Subscribers hear of queues whose units are there. They append nothing:
   what they answer leaves before the next commit. A task does that, with ``append_block``.
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

# Some ten milliseconds of files for queues that get their first message.
NEW_FILES_AT_ONCE = 16
_ROOM_LOOK_S = 0.01


class WritePath:
    """Appends, commits and publishes; see the head of this file."""

    def __init__(
        self,
        root: Path,
        clock: Clock,
        commit_log: CommitLog,
        dispatcher: Dispatcher,
        takers: Sequence[Taker],
        confirmation: Confirmation,
    ) -> None:
        """takers: all of them; ``dispatcher`` is the one whose queues are published."""
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
        # The hot path, without a call in between.
        self.append = commit_log.append
        self.append_each = commit_log.append_each
        self.append_batch = commit_log.append_batch
        self.commit = commit_log.write_out
        self.pressure = self._ring.pressure

    def on_published(self, callback: OnPublished) -> None:
        """Call back with the queues that got units, each time that some did."""
        self._subscribers.append(callback)

    # --- one batch -------------------------------------------------------------------------

    def begin(self) -> None:
        """Read the clock for the records of the batch that begins."""
        self._commit_log.now_ms = self._clock.now_ms()

    def append_records(self, records: EncodedRecords) -> tuple[int, int]:
        """As ``CommitLog.append_records``; a block may need much of the ring."""
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
        """Have the takers take what was appended and is confirmed; tell the subscribers.

        While the store runs, the units of very many new queues at once are written a moment later.
        A full disk refuses further appends; what is left over is taken by a later call.
        Raises StoreNotWritable when the records themselves can't be written.
        """
        self.commit()
        confirmation = self.confirmation
        confirmed_offset = None if confirmation.is_immediate else self._ask_and_look()
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

    def _ask_and_look(self) -> int | None:
        """The confirmed offset; the gates are asked to move on to the end of the log."""
        log_end = self._commit_log.max_offset
        self.confirmation.ask(log_end)
        confirmed_offset = self.confirmation.offset
        assert confirmed_offset is None or confirmed_offset <= log_end
        assert confirmed_offset is None or self._is_visible_at_most(confirmed_offset)
        return confirmed_offset

    def _is_visible_at_most(self, confirmed_offset: int) -> bool:
        lasts = [self._ring.last_of(taker.cursor.taken) for taker in self._takers]
        return all(last is None or last[0] < confirmed_offset for last in lasts)

    def drain_all(self) -> None:
        """Have the takers take all that is confirmed, however long it takes.

        Subscribers hear of it with the next ``publish``.
        """
        for taker in self._takers:
            self.let_drain(taker, taker.drain_all)

    def let_drain(self, taker: Taker, drain: Callable[[int | None], object]) -> None:
        """Have a taker take what was appended and is confirmed, in its own way."""
        assert self._writer in {None, get_ident()}
        self.commit()
        try:
            drain(self.confirmation.offset)
        except OSError as error:
            self.refuse(error, taker)

    def refuse(self, error: OSError, taker: Taker) -> None:
        """Refuse appends, since a taker's disk failed."""
        path = taker.directory(self._root)
        self._commit_log.refuse(error.strerror or str(error), path, error_number=error.errno)

    # --- writers inside the broker ---------------------------------------------------------

    async def append_block(
        self,
        make_records: Callable[[], EncodedRecords],
        note: Callable[[int, int], None] = lambda _queue_offset, _physical_offset: None,
    ) -> None:
        """Append a block as soon as there is room for it, and publish it as far as confirmed.

        make_records: called before each try; while it waited, a queue may have been deleted.
        note: called with the queue offset and physical offset of the first record as soon as they
        are given. From then on a later commit writes the block even if this one fails, so a writer
        that repeats itself must not append it again.

        Between ``note`` and the return no other task runs. A writer that depends on the block
        waits for ``confirmed`` next. Raises StoreNotWritable, RecordTooLarge.
        """
        if self.pressure():
            await self.relieve()
        while True:
            records = make_records()
            assert len(records.rows) <= self._ring.row_count
            self.begin()
            try:
                place = self.append_records(records)
            except StoreBusy:
                if self._commit_log.life.state is not State.OPEN:
                    raise self._commit_log.refused() from None
                await self.relieve()
            else:
                note(*place)
                self.publish()
                return

    async def relieve(self) -> None:
        """Wait for what keeps rows in the ring: the gates, or a taker. Raises StoreNotWritable."""
        await self.confirmed()
        self.publish()
        if self.pressure():
            await trio.sleep(_ROOM_LOOK_S)

    async def confirmed(self) -> None:
        """Wait until what was appended so far may be acknowledged. Raises StoreNotWritable."""
        await wait_for(self.confirmation.when_confirmed, self._commit_log.max_offset, self._root)

    # --- the running store -----------------------------------------------------------------

    async def run(self) -> None:
        """Give new queues their files by and by: a thousand at once would stop the loop."""
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
