"""Saves timers: their checkpoint, and the files that an Apache broker reads.

An Apache broker that starts on this store delivers the slots from ``timercheck`` on, as its wheel
and log have them. So slots with deliveries are closed at a stop, and timercheck is saved again once
their second is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from headrace_broker.timer.checkpoint import TimerCheck, TimerPosition
from headrace_broker.timer.demand import SLOT_MS
from headrace_broker.timer.wheel import WheelChanges  # noqa: TC001 - a NamedTuple reads it

if TYPE_CHECKING:
    import numpy as np

    from headrace_broker.clock import Clock
    from headrace_broker.inner.topic_counts import TopicCounts
    from headrace_broker.timer.arrivals import Arrivals
    from headrace_broker.timer.checkpoint import TimerCheckFile
    from headrace_broker.timer.waiting_timers import WaitingTimers
    from headrace_broker.timer.wheel import TimerWheel
    from headrace_protocol.columns import Array


class Saving(NamedTuple):
    """The contents of one save."""

    position: TimerPosition
    check: TimerCheck
    changes: WheelChanges
    metrics: bytes


class TimerFiles:
    """All files of the timers that wait.

    check: the checkpoint, and timercheck. wheel: the wheel and the log. last: the row of the newest
    message of the queue. is_stale: whether the wheel leads to records that were carried over.
    """

    def __init__(
        self,
        clock: Clock,
        waiting: WaitingTimers,
        check: TimerCheckFile,
        wheel: TimerWheel,
        metrics: TopicCounts,
    ) -> None:
        self._clock = clock
        self._waiting = waiting
        self.check = check
        self.wheel = wheel
        self._metrics = metrics
        self.last: np.void | None = None
        self.is_stale = False
        # Of the latest delivery: this slot and those before it may lead to delivered timers.
        self._done_slot = -1

    def fill(self, queue_offset: int) -> None:
        """Put all timers that wait into the wheel. queue_offset: after the newest message."""
        rows, slots = self._waiting.all_with_slots()
        now_slot = self._clock.now_ms() // SLOT_MS
        self.wheel.add(rows, slots, now_slot * SLOT_MS)
        is_ended = len(rows) and rows["queue_offset"][-1] == queue_offset - 1
        if self.last is not None and not is_ended:
            self.wheel.end_with(self.last, now_slot)

    def add(self, arrived: Arrivals, slots: Array) -> None:
        """Put new timers into the wheel. slots: the next slot of each."""
        self.wheel.add(arrived.rows, slots, arrived.write_ms)
        self.note_last(arrived)

    def note_last(self, arrived: Arrivals) -> None:
        """Remember the newest message of the queue."""
        self.last = arrived.rows[-1] if len(arrived.rows) else self.last

    def begin_deliveries(self, now_ms: int) -> None:
        """Note that timers that are due are about to leave their slots."""
        self._done_slot = max(self._done_slot, now_ms // SLOT_MS)

    def has_open_slots(self, position: TimerPosition) -> bool:
        """True if the second of the latest delivery is not over."""
        return position.due_ms // SLOT_MS <= self._done_slot

    # -- saves -------------------------------------------------------------------------------------

    def is_unsaved(self, position: TimerPosition) -> bool:
        """True if anything but the time has changed since the last save."""
        saved = self.check.position or TimerPosition(-1)
        is_same = position._replace(due_ms=saved.due_ms) == saved
        return self.wheel.is_changed or not is_same or self.has_passed(position)

    def has_passed(self, position: TimerPosition) -> bool:
        """True if the slots with deliveries are over, but not by the checkpoint.

        An Apache broker that starts with that checkpoint delivers them again.
        """
        saved_ms = self.check.position.due_ms if self.check.position else -1
        return saved_ms // SLOT_MS <= self._done_slot and not self.has_open_slots(position)

    def close_slots(self, position: TimerPosition, queue_offset: int) -> None:
        """Keep only waiting timers in slots with deliveries that an Apache broker reads again."""
        if self.is_stale:
            self.wheel.begin_anew()
            self.fill(queue_offset)
        if self.last is None:
            return
        for slot in self.wheel.used_slots(self._read_slot(position), self._done_slot):
            self.wheel.replace_slot(slot, self._waiting.of_slot(slot))
            self.wheel.end_with(self.last, slot)

    def snapshot(self, position: TimerPosition, queue_offset: int) -> Saving:
        """The contents of a save now. queue_offset: of the first message that was not read."""
        changes = self.wheel.changes()
        check = self.check_of(position, queue_offset)._replace(log_position=changes.log_position)
        return Saving(position, check, changes, self.metrics_body())

    def write(self, saving: Saving) -> None:
        """Write the files, timercheck last, since it says how far they go. For a thread."""
        # An Apache broker that finds the new files incomplete must read all timers from the queue.
        if saving.changes.is_anew:
            begun = saving.check._replace(
                log_position=0,
                queue_offset=saving.position.oldest,
                master_queue_offset=saving.position.oldest,
            )
            self.check.save(begun, saving.position)
        self.wheel.write(saving.changes)
        self._metrics.save(saving.metrics)
        self.check.save(saving.check, saving.position)

    def written(self, saving: Saving) -> None:
        """Forget the changes of a save that is on disk."""
        self.wheel.written(saving.changes, saving.check.read_ms // SLOT_MS)

    def check_of(self, position: TimerPosition, queue_offset: int) -> TimerCheck:
        """The contents of timercheck for a position."""
        before = self.check.saved or TimerCheck()
        return before._replace(
            read_ms=self._read_slot(position) * SLOT_MS,
            queue_offset=queue_offset,
            master_queue_offset=queue_offset,
            timestamp=self._clock.now_ms(),
            counter=before.counter + 1,
        )

    def _read_slot(self, position: TimerPosition) -> int:
        """The slot at which an Apache broker shall begin."""
        return int(min(position.due_ms // SLOT_MS, (self._waiting.due_ms() - 1) // SLOT_MS))

    def metrics_body(self) -> bytes:
        """Number of timers that wait, by topic, as config/timermetrics holds it."""
        counts = self._waiting.counts()
        return self._metrics.body(
            {topic.decode(errors="replace"): counts[topic] for topic in counts}
        )
