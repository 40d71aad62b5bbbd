"""Delivers delayed messages to their topics when they are due, once each across every crash.

What always holds:

1. The log is the truth. ``delayOffset.json`` may lag behind what was delivered, never run ahead of
   what is on disk; a start reads the deliveries behind it from the log and leaves those out.
2. A level is delivered in the order of its queue, and no message stops it: what can't go to its
   topic goes to the topic of undelivered ones, what can't be read is logged and counted.
3. Nothing is delivered early. After a clock went back, what is there waits its level once more at
   most.

Source: docs/protocol.md "Delayed messages"; tests/broker/schedule/test_schedule.py.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import structlog
import trio

from headrace_broker.inner.delivered import Delivered, stored_since
from headrace_broker.inner.delivery import Routes
from headrace_broker.inner.saving import save_at_intervals
from headrace_broker.inner.waiting import RECORDS_AT_ONCE, Unreadable, Waiting, WaitingQueue
from headrace_broker.inner.writer import RETRY_S
from headrace_broker.schedule.levels import DelayDemand
from headrace_broker.store.recovery import NOTHING, Scan, read_log
from headrace_protocol.outages import Outages
from headrace_protocol.system_topics import HALF_TOPIC, SCHEDULE_TOPIC

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.inner.delivery import Delivery
    from headrace_broker.inner.writer import InnerMessage, InnerWriter
    from headrace_broker.schedule.offsets import DelayOffsets
    from headrace_broker.store.message_store import MessageStore
    from headrace_protocol.columns import Array
    from headrace_protocol.message import StoredMessage

log = structlog.get_logger("headrace.broker")

# The wall clock may jump; a sleep does not notice.
_CLOCK_LOOK_S: Final = 1.0
# Apache's broker stores a delivery after it is due by its own clock.
_CLOCK_MARGIN_MS: Final = 60_000
_UNCOUNTED_BYTES_MAX: Final = 64 << 20


class _Level:
    """One level: its queue, and the units from ``offset`` on as far as they were read.

    offset: queue offset of the next message. known_end: where the queue ended at the start, until
    ``offset`` is past it. clock_end, clock_due_ms: since the clock went back,
    messages before ``clock_end`` are due at ``clock_due_ms`` at the latest.
    """

    def __init__(self, queue: WaitingQueue, delay_ms: int) -> None:
        self.queue = queue
        self.delay_ms = delay_ms
        self.offset = self.known_end = 0
        self.clock_end = self.clock_due_ms = 0
        self._first = 0
        self._dues_ms: Array | None = None

    async def load(self) -> int:
        """Read the units of the next messages unless they are there. Raises OSError.

        Returns how many messages are gone because the log no longer has them; they are skipped.
        """
        if self._dues_ms is not None and self.offset < self._first + len(self._dues_ms):
            return 0
        offset = self.offset
        units = await self.queue.units(offset)
        self.offset += self.queue.gone_count(units)
        if not len(units):
            self.offset = max(offset, await trio.to_thread.run_sync(self.queue.min_offset))
        self._first = offset
        self._dues_ms = units["tags_code"].astype("i8")
        return self.offset - offset

    @property
    def is_idle(self) -> bool:
        """True if nothing waits."""
        return self.offset >= self.queue.end

    def due_ms(self, now_ms: int) -> int:
        """Due time of the next message, which was loaded."""
        assert self._dues_ms is not None
        due_ms = int(self._dues_ms[self.offset - self._first])
        if self.offset < self.clock_end:
            return min(due_ms, self.clock_due_ms)
        if due_ms > now_ms + self.delay_ms:
            self.clock_end, self.clock_due_ms = self.queue.end, now_ms + self.delay_ms
            return self.clock_due_ms
        return due_ms

    def due_end(self, now_ms: int) -> int:
        """Queue offset before which the loaded messages are due."""
        assert self._dues_ms is not None
        dues_ms = self._dues_ms[self.offset - self._first :]
        is_due = dues_ms <= now_ms
        if self.clock_due_ms <= now_ms:
            is_due[: max(self.clock_end - self.offset, 0)] = True
        return self.offset + (len(is_due) if is_due.all() else int(is_due.argmin()))


class Schedule:
    """All levels.

    dropped: messages for the half topic, which no producer could have delayed.
    unreadable: messages whose record was damaged or gone when they were due.
    uncounted_bytes_max: a start after a crash reads the log from the last save on.
    """

    def __init__(
        self,
        store: MessageStore,
        writer: InnerWriter,
        delivery: Delivery,
        offsets: DelayOffsets,
        save_s: Callable[[], float],
    ) -> None:
        """Reads nothing yet. save_s: between two saves of the offsets."""
        self._store = store
        self._writer = writer
        self._delivery = delivery
        self._routes = Routes()
        self._offsets = offsets
        self._save_s = save_s
        self._asked = trio.Event()
        delays_ms = store.settings.delay_levels_ms
        self.demand = DelayDemand(delays_ms, lambda: store.commit_log.now_ms, self._wake)
        self._levels = {
            level: _Level(WaitingQueue(store, SCHEDULE_TOPIC, level - 1), delay_ms)
            for level, delay_ms in enumerate(delays_ms, 1)
        }
        self._delivered = Delivered(SCHEDULE_TOPIC, b"DELAY")
        self.scan = Scan(self.scan_from, self._delivered.take)
        self._scanned_from = 0
        self._threads = trio.CapacityLimiter(1)
        self.dropped = self.unreadable = 0
        self.uncounted_bytes_max = _UNCOUNTED_BYTES_MAX

    def _wake(self) -> None:
        self._asked.set()

    # -- start and stop ----------------------------------------------------------------------------

    def scan_from(self) -> int:
        """Physical offset from which the log may hold deliveries that the offsets do not count."""
        log_offset = self._offsets.log_offset
        self._scanned_from = NOTHING if log_offset is None else log_offset
        return self._scanned_from

    def load(self) -> None:
        """Take up each level where it was, and find what was delivered since. Raises OSError."""
        for number, level in self._levels.items():
            saved = self._offsets.saved.get(number, 0)
            level.offset = min(max(saved, level.queue.min_offset()), level.queue.end)
        if self._offsets.log_offset is None:
            self._scanned_from = self._first_uncounted()
            read_log(self._delivered.take, self._store.commit_log, self._scanned_from)
        for number, level in self._levels.items():
            level.known_end = level.queue.end
            for unit in level.queue.units_now(level.offset, 1):
                self._delivered.forget_before(number, int(unit["physical_offset"]))
            self._forget_passed(number, level)
        if len(self._delivered):
            log.info("delayed messages found delivered", count=len(self._delivered))

    def _first_uncounted(self) -> int:
        """Physical offset from which the log may hold deliveries of another broker."""
        if self._store.was_clean:  # another broker stopped in order: its offsets are exact
            return self._store.commit_log.max_offset
        return self._first_delivery()

    def _forget_passed(self, number: int, level: _Level) -> None:
        """Forget what the start found of a level once all that it found waiting was looked at."""
        if level.known_end and level.offset >= level.known_end:
            level.known_end = 0
            self._delivered.forget(number)

    def _first_delivery(self) -> int:
        """Physical offset from which the log may hold deliveries of messages that seem to wait."""
        dues_ms = []
        for level in self._levels.values():
            if not level.is_idle:
                units = level.queue.units_now(level.offset, 1)
                dues_ms += units["tags_code"].tolist()
        if not dues_ms:
            return self._store.commit_log.max_offset
        return stored_since(self._store, min(dues_ms) - _CLOCK_MARGIN_MS)

    async def run(self) -> None:
        """Deliver what is due until cancelled."""
        outages, name = Outages(log.error, ended=log.warning), "the queues of delayed messages"
        while True:
            self._asked = trio.Event()
            try:
                wait_s = await self.deliver_due()
                outages.worked(name)
            except OSError as error:
                outages.failed(name, error)
                wait_s = RETRY_S
            with trio.move_on_after(wait_s):
                await self._asked.wait()

    async def run_saving(self) -> None:
        """Save the offsets at intervals until cancelled."""
        await save_at_intervals("delayed messages", self.save, self._save_s)

    async def save(self) -> None:
        """Bring the offsets to disk, behind the deliveries that they count.

        Raises OSError, StoreNotWritable.
        """
        offsets, counted_to = self._progress(), self._counted_to()
        saved_to = self._offsets.log_offset
        is_near = saved_to is None or counted_to - saved_to < self.uncounted_bytes_max
        if self._offsets.saved == offsets and is_near:
            return
        await self._store.flusher.wait_flushed()
        await trio.to_thread.run_sync(
            self._offsets.save, offsets, counted_to, limiter=self._threads
        )

    def finish(self) -> None:
        """Save the offsets when no task runs any more. Raises OSError."""
        store, offsets, counted_to = self._store, self._progress(), self._counted_to()
        is_saved = (self._offsets.saved, self._offsets.log_offset) == (offsets, counted_to)
        if not is_saved and store.commit_log.life.is_writable:
            store.flusher.flush_log_now()
            self._offsets.save(offsets, counted_to)

    def _counted_to(self) -> int:
        """All that was delivered before this physical offset is counted in the offsets.

        What the start found delivered is not, until the level gets there.
        """
        return self._scanned_from if len(self._delivered) else self._store.commit_log.max_offset

    def _progress(self) -> dict[int, int]:
        return {number: level.offset for number, level in self._levels.items() if level.offset}

    # -- delivery ----------------------------------------------------------------------------------

    async def deliver_due(self) -> float:
        """Deliver a block of each level that is due. Raises OSError.

        Returns how many seconds to wait for more, unless a message arrives: 0 if more is due.
        """
        await self._writer.published(*(level.queue for level in self._levels.values()))
        now_ms = self._store.clock.now_ms()
        next_ms: list[int] = []
        for number, level in self._levels.items():
            if level.is_idle:
                continue
            gone = await level.load()
            # What came while this waited is not from a time to come.
            now_ms = self._store.clock.now_ms()
            if gone:
                self._note_gone(number, gone)
            elif (due_ms := level.due_ms(now_ms)) <= now_ms:
                await self._deliver(number, level, level.due_end(now_ms))
            else:
                next_ms.append(due_ms)
                continue
            next_ms.append(now_ms)
        if not next_ms:
            return math.inf
        wait_s = (min(next_ms) - self._store.clock.now_ms()) / 1000
        return min(max(wait_s, 0.0), _CLOCK_LOOK_S)

    def _note_gone(self, number: int, count: int) -> None:
        self.unreadable += count
        log.error("delayed messages lost with their log files", level=number, count=count)

    async def _deliver(self, number: int, level: _Level, end: int) -> None:
        """Deliver the messages before ``end``, or the first of them if there are many."""
        end = min(end, level.offset + RECORDS_AT_ONCE)
        items = await level.queue.read(level.offset, end)
        waiting = [item for item in items if isinstance(item, Waiting)]
        delivered = self._delivered.among(number, waiting)
        fresh = [item for item in waiting if item.queue_offset not in delivered]
        pairs = [(item, self._message(item)) for item in fresh]
        ends = [item.queue_offset + 1 for item, message in pairs if message is not None]

        def note(index: int, _physical_offset: int) -> None:
            level.offset = ends[index]

        # A delivery that is cancelled or fails begins again behind what it has noted.
        try:
            await self._writer.append([message for _, message in pairs if message], note)
            level.offset = end
        finally:
            passed = [item for item in waiting if item.queue_offset < level.offset]
            self._delivered.forget_each(
                number, [item for item in passed if item.queue_offset in delivered]
            )
        self._note_unreadable(number, [item for item in items if isinstance(item, Unreadable)])
        self._forget_passed(number, level)

    def _note_unreadable(self, number: int, items: list[Unreadable]) -> None:
        if items:
            self.unreadable += len(items)
            log.error(
                "delayed messages can't be read",
                level=number,
                count=len(items),
                first=items[0].reason,
            )

    def _message(self, waiting: Waiting) -> InnerMessage | None:
        """The message as its topic gets it; None for one that nobody may deliver."""
        route, properties = self._routes.read(waiting.properties)
        if route.topic == HALF_TOPIC:
            self.dropped += 1
            log.warning("delayed message for the half topic dropped", offset=waiting.queue_offset)
            return None
        return self._delivery.message(waiting, route, properties)

    # -- for others --------------------------------------------------------------------------------

    def offsets_body(self) -> bytes:
        """The offsets as GET_ALL_DELAY_OFFSET answers them."""
        return self._offsets.body(self._progress())

    def runtime_info(self) -> dict[str, str]:
        """The position of each level, and the counts, for GET_BROKER_RUNTIME_INFO."""
        offsets = {
            f"scheduleMessageOffset_{number}": f"{level.offset},{level.queue.end}"
            for number, level in self._levels.items()
        }
        return {
            **offsets,
            "delayedDropped": str(self.dropped),
            "delayedUnreadable": str(self.unreadable),
        }

    def due_ms(self, message: StoredMessage) -> int | None:
        """Delivery time of a record in a level's queue; None if it no longer waits."""
        level = self._levels.get(message.queue_id + 1)
        if level is None or message.queue_offset < level.offset:
            return None
        return message.store_timestamp + level.delay_ms

    def next_offset(self, queue_id: int) -> int | None:
        """Queue offset of the next message of a level's queue; None if there is no such level."""
        level = self._levels.get(queue_id + 1)
        return level.offset if level else None
