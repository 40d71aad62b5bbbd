"""Delivers timers to their topics at the millisecond asked for, once each across every crash.

What always holds:

1. The log is the truth. A start reads the timers from their queue, and the deliveries since the
   last save from the log. The checkpoint is never ahead of the log on disk.
2. Timers due at the same time are delivered in the order of arrival, and none stops another: an
   undeliverable message goes to the topic of undelivered ones, an unreadable one is logged and
   counted.
3. No timer is delivered before its time by the current clock, or twice after the clock went back.
4. A timer that is recalled before its delivery begins is not delivered.

A timer has no field with its state; its row is in one of these:

| state | its row is |
|---|---|
| stored | in the queue, at ``_offset`` or later |
| waiting | in ``waiting``; also in ``to_carry`` if it is to be stored again |
| under way | in ``_under_way``, until it is appended or the delivery fails, which returns it |
| delivered, recalled or replaced by a copy | nowhere |

Source: docs/protocol.md "Timers"; tests/broker/timer/test_timers.py, test_timer_life.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable  # noqa: TC003 - a NamedTuple reads it
from typing import TYPE_CHECKING, Final

import numpy as np
import structlog
import trio

from headrace_broker import statistics
from headrace_broker.inner.delivered import Delivered, stored_since
from headrace_broker.inner.saving import save_at_intervals
from headrace_broker.inner.waiting import RECORDS_AT_ONCE, Unreadable, Waiting, WaitingQueue
from headrace_broker.inner.writer import RETRY_S
from headrace_broker.store.queues.queue_blocks import BLOCK_UNITS, QueueDamaged
from headrace_broker.store.recovery import NOTHING, Scan, read_log
from headrace_broker.timer.arrivals import TIMER, arrivals, joined, key_hash
from headrace_broker.timer.checkpoint import TimerCheck, TimerPosition
from headrace_broker.timer.demand import SLOT_MS
from headrace_protocol.columns import UNIT_DTYPE
from headrace_protocol.message import REAL_TOPIC, TIMER_OUT_MS, UNIQ_KEY, property_number
from headrace_protocol.outages import Outages
from headrace_protocol.system_topics import TIMER_TOPIC

if TYPE_CHECKING:
    from headrace_broker.config import BrokerConfig
    from headrace_broker.inner.writer import InnerMessage, InnerWriter
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.timer.arrivals import Arrivals
    from headrace_broker.timer.files import TimerFiles
    from headrace_broker.timer.messages import TimerMessages
    from headrace_broker.timer.waiting_timers import WaitingTimers
    from headrace_protocol.columns import Array
    from headrace_protocol.message import StoredMessage

log = structlog.get_logger("headrace.broker")

# The wall clock may jump; a sleep does not notice.
_CLOCK_LOOK_S: Final = 1.0
# Apache's broker stores a delivery when it is due by its own clock, which may be behind this one.
_CLOCK_MARGIN_MS: Final = 60_000
# Interval of saves while only other messages are stored; a start after a crash reads the log from
# the last save on.
_IDLE_SAVE_S: Final = 10.0
_ADDED_AT_ONCE: Final = 1 << 18
_CARRIED_BYTES: Final = 32 << 20
# Newest messages to read in the loop, which takes less than a millisecond.
_FRESH_MAX: Final = 1024
_TOPICS_LOGGED: Final = 10
# Recalls to remember until they are read; beyond, a second one counts as another.
_RECALLED_MAX: Final = 10_000
_OUT_MS: Final = TIMER_OUT_MS.encode()


class Timers:
    """All timers of the broker.

    waiting: the timers that wait, in memory. files: the means to save them.
    unreadable: number of messages whose record was damaged or gone.
    enqueued, delivered: number of timers that arrived and were delivered since the start.
    to_carry: timers and recalls to store again before their log file goes.
    carried_bytes: bytes of records that one round of clean-up may have stored again.
    """

    def __init__(
        self,
        store: MessageStore,
        writer: InnerWriter,
        messages: TimerMessages,
        waiting: WaitingTimers,
        files: TimerFiles,
        config: BrokerConfig,
    ) -> None:
        """Reads nothing yet."""
        self._store = store
        self._writer = writer
        self._messages = messages
        self.waiting = waiting
        self.files = files
        self._config = config
        self._asked = trio.Event()
        self._queue = WaitingQueue(store, TIMER_TOPIC, 0)
        self._offset = 0  # of the queue: all before it is in `waiting`
        self._delivered = Delivered(TIMER_TOPIC, _OUT_MS)
        self.scan = Scan(self.scan_from, self._delivered.take)
        self._position = TimerPosition()
        # No delivered timer was due later, or comes after this offset of the queue.
        self._clock_ms = self._clock_offset = 0
        self._threads = trio.CapacityLimiter(1)
        self._under_way = np.empty(0, TIMER)  # taken out of `waiting` to be delivered
        self.to_carry = np.empty(0, TIMER)
        self._recalled: set[tuple[int, bytes, int]] = set()  # recalls not read from the queue yet
        self._saved_counts = (0, 0)
        self._saved_s = -math.inf
        self.unreadable = 0
        self.carried_bytes = _CARRIED_BYTES
        self.enqueued, self.delivered = statistics.Counter(), statistics.Counter()

    def wake(self) -> None:
        """Look at the queue soon: a timer is about to be stored."""
        self._asked.set()

    @property
    def is_caught_up(self) -> bool:
        """True if all stored timers are in ``waiting``."""
        return self._offset >= self._queue.appended_end

    @property
    def settled_ms(self) -> int:
        """All timers due at this time are delivered."""
        return self._position.due_ms

    # -- start and stop ----------------------------------------------------------------------------

    def scan_from(self) -> int:
        """Physical offset from which the log may hold deliveries that the file does not count."""
        saved = self.files.check.position
        return saved.log_offset if saved else NOTHING

    def load(self) -> None:
        """Read all timers that wait, without those already delivered. Raises OSError."""
        file, store = self.files.check, self._store
        check = file.saved or TimerCheck()
        self._position = file.position or TimerPosition(
            self._bounded(check.read_ms), check.queue_offset, store.commit_log.max_offset
        )
        self._offset = max(self._position.oldest, self._queue.min_offset())
        self._read_all()
        # The file of another broker is exact after a clean stop.
        if file.position is None and not (file.saved and store.was_clean) and self.waiting.count:
            since = stored_since(store, self.waiting.first_ms() - _CLOCK_MARGIN_MS)
            self._position = self._position._replace(log_offset=since)
        self._find_delivered()
        self.files.fill(self._offset)

    def _read_all(self) -> None:
        """Read the queue to its end, and add many timers at once, so that most share a table."""
        found: list[Arrivals] = []
        while (read := self._read_now(self._offset)) is not None:
            arrived, self._offset = read
            self.files.note_last(arrived)
            found.append(self._unsettled(arrived))
            if sum(len(each.rows) for each in found) >= _ADDED_AT_ONCE:
                self.waiting.add(joined(found))
                found = []
        if found:
            self.waiting.add(joined(found))

    def _bounded(self, read_ms: int) -> int:
        """The time, or that of the newest record if it is earlier: nothing was delivered since."""
        if not read_ms:
            return 0
        newest = Delivered(TIMER_TOPIC, _OUT_MS)
        since = stored_since(self._store, read_ms)
        read_log(newest.take, self._store.commit_log, since)
        return min(read_ms, newest.newest_ms)

    def _unsettled(self, arrived: Arrivals) -> Arrivals:
        rows, position = arrived.rows, self._position
        is_settled = rows["queue_offset"] < position.queue_offset
        is_settled &= rows["due_ms"] <= position.due_ms
        return arrived.take(~is_settled)

    def _find_delivered(self) -> None:
        if self.files.check.position is None:
            read_log(self._delivered.take, self._store.commit_log, self._position.log_offset)
        found = self.waiting.drop_sources(self._delivered.take_sources())
        self._clock_offset = self._offset
        latest_ms = int(found["due_ms"].max(initial=0))
        self._clock_ms = max(self._position.due_ms, self._delivered.newest_ms, latest_ms)
        if len(found):
            log.info("timers found delivered", count=len(found))

    async def run(self) -> None:
        """Deliver what is due until cancelled."""
        outages, name = Outages(log.error, ended=log.warning), "the queue of timers"
        while True:
            try:
                await self._turn()
                outages.worked(name)
            except OSError as error:
                outages.failed(name, error)
                await trio.sleep(RETRY_S)

    async def run_saving(self) -> None:
        """Save at intervals until cancelled."""
        config = self._config
        await save_at_intervals(
            "timers", self._sample_and_save, lambda: config.timer_flush_interval_ms / 1000
        )

    async def _sample_and_save(self) -> None:
        for each in (self.enqueued, self.delivered):
            each.sample(trio.current_time())
        await self.save()

    async def save(self) -> None:
        """Save the checkpoint once the deliveries that it counts are on disk.

        Raises OSError, StoreNotWritable.
        """
        counts, now_s = (self.enqueued.count, self.delivered.count), trio.current_time()
        is_idle = counts == self._saved_counts and now_s < self._saved_s + _IDLE_SAVE_S
        files, position = self.files, self._position_now()
        has_timers = self._offset > 0  # or has had some
        if not (has_timers and files.is_unsaved(position)):
            return
        if is_idle and not files.has_passed(position):
            return
        self._saved_counts, self._saved_s = counts, now_s
        saving = files.snapshot(position, self._offset)
        await self._store.flusher.wait_flushed()
        await trio.to_thread.run_sync(files.write, saving, limiter=self._threads)
        files.written(saving)

    def finish(self) -> None:
        """As ``save``, after all tasks have ended. Raises OSError."""
        if self._offset and self._store.commit_log.life.is_writable:
            self._store.flusher.flush_log_now()
            self.files.close_slots(self._position, self._offset)
            saving = self.files.snapshot(self._position_now(), self._offset)
            self.files.write(saving)
            self.files.written(saving)

    def _position_now(self) -> TimerPosition:
        return self._position._replace(oldest=self.oldest)

    @property
    def oldest(self) -> int:
        """Queue offset before which nothing waits, nor is being delivered."""
        lowest = self.waiting.lowest_queue_offset()
        waiting = self._offset if lowest is None else min(lowest, self._offset)
        return int(self._under_way["queue_offset"].min(initial=waiting))

    # -- arrivals ----------------------------------------------------------------------------------

    async def _turn(self) -> None:
        """Adopt new timers, then deliver those that are due or wait for the next.

        Raises OSError.
        """
        self._asked = trio.Event()
        await self._writer.published(self._queue)
        if not self._config.timer_stop_enqueue:
            await self._adopt_all()
        # No other task runs from here until rows are taken out, so all recalls are known.
        now_ms = self._store.clock.now_ms()
        if not self._config.timer_stop_dequeue:
            if len(rolled := self.waiting.take_rolled(now_ms, RECORDS_AT_ONCE)):
                self.files.begin_deliveries(now_ms)
                await self._roll(rolled)
                return
            if len(due := self.waiting.take_due(now_ms, RECORDS_AT_ONCE)):
                self.files.begin_deliveries(now_ms)
                self._clock_ms = max(self._clock_ms, now_ms)
                self._clock_offset = self._offset
                await self._deliver(due)
            else:
                self._settle(now_ms)
            if await self._carry_some() or len(due):
                return
        await self._sleep(now_ms)

    async def _sleep(self, now_ms: int) -> None:
        """Wait for an arrival, the next timer, or the next look at the clock and the switches."""
        wait_s = (self.waiting.due_ms() - now_ms) / 1000
        if self._config.timer_stop_enqueue or self._config.timer_stop_dequeue:
            wait_s = _CLOCK_LOOK_S
        if wait_s < math.inf or self.files.has_open_slots(self._position):
            wait_s = min(max(wait_s, 0), _CLOCK_LOOK_S)
        with trio.move_on_after(wait_s):
            await self._asked.wait()

    async def _adopt_all(self) -> None:
        """Read the queue to its end. Raises OSError.

        The last messages are read in the loop, as they were just written: while a thread reads,
        others arrive, and under load there would be no end.
        """
        while (behind := self._queue.end - self._offset) > 0:
            if behind <= _FRESH_MAX:
                read = self._read_now(self._offset)
            else:
                read = await trio.to_thread.run_sync(self._read_now, self._offset)
            if read is None:
                return
            self._adopt(*read)

    def _read_now(self, first: int) -> tuple[Arrivals, int] | None:
        """Some timers of the queue from ``first`` on, and the offset after them.

        None at the end of the queue. For a thread if there are many. Raises OSError.
        """
        if first >= self._queue.end:
            return None
        count = BLOCK_UNITS
        while True:
            try:
                block = self._queue.block_now(first, count)
            except QueueDamaged as error:
                if count > 1:  # to leave out only the damaged record
                    count //= 2
                    continue
                self.unreadable += 1
                log.error("timer can't be read", reason=str(error))
                first += 1
                continue
            if block is not None:
                return arrivals(block, self.waiting.topics), block.end
            oldest = self._queue.min_offset()
            if oldest <= first:
                return None
            self.unreadable += oldest - first
            log.error("timers lost with their log files", count=oldest - first)
            first = oldest

    def _adopt(self, arrived: Arrivals, end: int) -> None:
        slots = self.waiting.add(arrived)
        self.files.add(arrived, slots)
        self.enqueued.count += len(arrived.rows)
        self._offset = end
        if self.is_caught_up:
            self._recalled.clear()

    def _settle(self, now_ms: int) -> None:
        """Note that all timers due by now are delivered.

        After the clock went back, some timers due later are delivered too. The time alone does not
        tell them from timers that wait, so nothing is noted until the clock has caught up, or no
        timer from before waits any more.
        """
        if now_ms < self._clock_ms and self.oldest < self._clock_offset:
            return
        self._clock_ms = now_ms
        self._delivered = Delivered(TIMER_TOPIC, _OUT_MS)  # all looked at
        log_end = self._store.commit_log.max_offset
        self._position = TimerPosition(now_ms, self._offset, log_end)

    # -- delivery ----------------------------------------------------------------------------------

    async def _deliver(self, rows: Array) -> None:
        """Deliver timers; if this fails, those that were not appended wait again."""
        rows = rows[rows["topic"] >= 0]  # recalls have done their work
        is_done = np.zeros(len(rows), bool)
        self._under_way = rows
        try:
            await self._append(rows, is_done, self._message)
        finally:
            self._under_way = rows[:0]
            self.waiting.put_back(rows[~is_done])
            self.delivered.count += int(is_done.sum())

    async def _roll(self, rows: Array) -> None:
        """Store timers again that are due much later; their copies arrive through the queue."""
        is_done = np.zeros(len(rows), bool)
        full: list[int] = []  # those without room for more properties stay where they are

        def copy(waiting: Waiting, due_ms: int) -> InnerMessage | None:
            copy = self._messages.copy(waiting, due_ms)
            if copy is None:
                full.append(waiting.queue_offset)
            return copy

        try:
            await self._append(rows, is_done, copy)
        finally:
            self.waiting.forget(rows[is_done & ~np.isin(rows["queue_offset"], full)])
            self.waiting.roll_again(rows[~is_done], self._store.clock.now_ms())

    async def carry_over(self, physical_offset: int) -> None:
        """Have records before a physical offset stored again soon, some at each call.

        Recalls too: each has to follow the copies of its timer.
        """
        if len(self.to_carry):
            return
        found, byte_count = [self.to_carry], 0
        for rows in self.waiting.stored_before(physical_offset):
            found.append(rows)
            byte_count += int(rows["size"].sum())
            if byte_count >= self.carried_bytes:
                break
            await trio.lowlevel.checkpoint()
        self.to_carry = np.concatenate(found)
        self.wake()

    async def _carry_some(self) -> bool:
        """Store some records again; returns whether there were any. Raises OSError."""
        some = self.to_carry[:RECORDS_AT_ONCE]
        if len(rows := self.waiting.still_waiting(some)):
            self.files.is_stale = True
            await self._roll(rows)
        self.to_carry = self.to_carry[len(some) :]
        return len(some) > 0

    async def _append(
        self,
        rows: Array,
        is_done: Array,
        make: Callable[[Waiting, int], InnerMessage | None],
    ) -> None:
        """Append the messages made of the records of rows, in order. Raises OSError.

        is_done: set for each row as soon as nothing is left to do.
        """
        records = await self._records(rows)
        messages: list[InnerMessage] = []
        numbers: list[int] = []
        lost: list[tuple[bytes, str]] = []
        for number, record in enumerate(records):
            if isinstance(record, Unreadable):
                lost.append((self.waiting.topics.names[rows["topic"][number]], record.reason))
                is_done[number] = True
            elif (message := make(record, int(rows["due_ms"][number]))) is None:
                is_done[number] = True
            else:
                messages.append(message)
                numbers.append(number)
        self._note_lost(lost)

        def note(index: int, _physical_offset: int) -> None:
            is_done[numbers[index]] = True

        await self._writer.append(messages, note)

    def _note_lost(self, lost: list[tuple[bytes, str]]) -> None:
        """Count and log timers that can't be read: the topic of each, and why."""
        if lost:
            self.unreadable += len(lost)
            counts = Counter(topic.decode(errors="replace") for topic, _ in lost)
            topics = dict(counts.most_common(_TOPICS_LOGGED))
            log.error("timers can't be read", count=len(lost), topics=topics, first=lost[0][1])

    async def _records(self, rows: Array) -> list[Waiting | Unreadable]:
        """The records of rows, in their order. Raises OSError."""
        if not len(rows):
            return []
        order = np.argsort(rows["physical_offset"])
        units = np.zeros(len(rows), UNIT_DTYPE)
        units["physical_offset"] = rows["physical_offset"][order]
        units["size"] = rows["size"][order]
        offsets = rows["queue_offset"][order]
        by_offset = {
            record.queue_offset: record for record in await self._queue.read_each(units, offsets)
        }
        return [by_offset[offset] for offset in rows["queue_offset"].tolist()]

    def _message(self, waiting: Waiting, due_ms: int) -> InnerMessage | None:
        """The message for its topic; None if an Apache broker has delivered it."""
        if not self._delivered.is_empty:
            out_ms = property_number(waiting.properties, _OUT_MS, -1)
            if self._delivered.among(out_ms, [waiting]):
                self._delivered.forget_each(out_ms, [waiting])
                return None
        return self._messages.delivered(waiting, due_ms)

    # -- for others --------------------------------------------------------------------------------

    def has(self, slot: int, topic: bytes, key: int) -> bool:
        """True if a timer is known to wait."""
        return self.waiting.due_of(slot, topic, key) is not None

    def due_ms(self, message: StoredMessage) -> int | None:
        """Delivery time of a record in the queue of timers; None if it no longer waits."""
        out_ms = property_number(message.raw_properties, b"TIMER_OUT_MS", -1)
        topic, uniq_key = (message.properties.get(name, "") for name in (REAL_TOPIC, UNIQ_KEY))
        timer = out_ms // SLOT_MS, topic.encode(), key_hash(uniq_key.encode())
        if message.queue_offset >= self._offset:  # not read yet
            return None if self.is_recalled(*timer) else out_ms + 1
        return self.waiting.due_of(*timer)

    def recall(self, slot: int, topic: bytes, key: int) -> None:
        """Drop a timer whose recall was just appended.

        The recall itself drops it if it has not been read from the queue yet.
        """
        self.waiting.recall(slot, topic, key)
        if len(self._recalled) < _RECALLED_MAX:
            self._recalled.add((slot, topic, key))

    def is_recalled(self, slot: int, topic: bytes, key: int) -> bool:
        """True if a recall of a timer is in the queue and has not been read yet."""
        return (slot, topic, key) in self._recalled

    def checkpoint(self) -> TimerCheck:
        """The contents of timercheck if it were saved now."""
        return self.files.check_of(self._position, self._offset)

    def runtime_info(self) -> dict[str, str]:
        """Figures for GET_BROKER_RUNTIME_INFO."""
        behind_ms = max(self._store.clock.now_ms() - self._position.due_ms, 0)
        return {
            "timerReadBehind": str(behind_ms // 1000),
            "timerOffsetBehind": str(self._queue.end - self._offset),
            "timerCongestNum": str(self.waiting.count),
            "timerEnqueueTps": f"{self.enqueued.rate:.2f}",
            "timerDequeueTps": f"{self.delivered.rate:.2f}",
            "timersUnreadable": str(self.unreadable),
        }

    def next_offset(self, queue_id: int) -> int | None:
        """Queue offset of the oldest timer that waits; None for a queue without timers."""
        return self.oldest if queue_id == 0 else None
