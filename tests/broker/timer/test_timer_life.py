"""The life of a timer: what each event does in each state, and that it is delivered once at most.

A timer has no field with its state: its row is in the queue only, among those that wait, among
those under way, or nowhere.
"""

from __future__ import annotations

from enum import Enum, auto
from pathlib import Path
from typing import Final, NamedTuple

import pytest
import trio.testing

from headrace_broker.inner.writer import DeliverLater, InnerMessage
from headrace_protocol.codes import ResponseCode
from tests.broker.timer.test_timers import NOW_MS, Clockwork, recall, send_for_handle
from tests.support.stores import crash

_DUE_MS: Final = NOW_MS + 2000


class State(Enum):
    STORED = auto()  # in the queue, not read yet
    WAITING = auto()
    UNDER_WAY = auto()  # due, and its topic takes no message now
    DELIVERED = auto()
    RECALLED = auto()


class Event(Enum):
    RECALL = auto()
    KILL = auto()
    STOP = auto()
    CARRY = auto()  # its record is to be stored again
    CLOCK_BACK = auto()


class End(NamedTuple):
    """is_delivered: once, in the end. answer: to a recall."""

    is_delivered: bool
    answer: int | None = None


REFUSED: Final = ResponseCode.ILLEGAL_OPERATION
TABLE: Final = {
    **{(state, event): End(state is not State.RECALLED) for state in State for event in Event},
    (State.STORED, Event.RECALL): End(False, ResponseCode.SUCCESS),
    (State.WAITING, Event.RECALL): End(False, ResponseCode.SUCCESS),
    (State.UNDER_WAY, Event.RECALL): End(True, REFUSED),
    (State.DELIVERED, Event.RECALL): End(True, REFUSED),
    (State.RECALLED, Event.RECALL): End(False, REFUSED),
}


class Life:
    """A broker with one timer; its switches hold the timer in a state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clockwork = Clockwork(folder)
        self.clockwork.broker.create_topic("T")
        self.handle = ""

    async def bring_to(self, state: State) -> None:
        clockwork = self.clockwork
        config, timers = clockwork.broker.config, clockwork.timers
        config.timer_stop_enqueue = state is State.STORED
        config.timer_stop_dequeue = state in {State.WAITING, State.RECALLED}
        self.handle = send_for_handle(clockwork, b"late", "A1", TIMER_DELIVER_MS=_DUE_MS)
        if state is State.STORED:
            return
        await clockwork.until(lambda: timers.is_caught_up)
        if state is State.UNDER_WAY:
            await self._let_it_wait_for_its_topic()
        elif state is State.DELIVERED:
            await clockwork.until_ms(_DUE_MS)
        elif state is State.RECALLED:
            assert recall(clockwork, self.handle)[0] == ResponseCode.SUCCESS
            await clockwork.until(lambda: timers.is_caught_up)

    async def _let_it_wait_for_its_topic(self) -> None:
        begun = trio.Event()

        async def deliver(_message: InnerMessage) -> str:
            begun.set()
            raise DeliverLater

        self.clockwork.broker.writer.find_target = lambda _topic, _queue_id: deliver
        self.clockwork.clock.ms = _DUE_MS
        await begun.wait()

    async def apply(self, event: Event) -> int | None:
        """Let an event happen while the services run; returns the answer to a recall."""
        clockwork = self.clockwork
        if event is Event.RECALL:
            return recall(clockwork, self.handle)[0]
        if event is Event.CARRY:
            await clockwork.timers.carry_over(clockwork.broker.store.commit_log.max_offset)
        elif event is Event.CLOCK_BACK:
            clockwork.clock.ms -= 60_000
        return None

    def end(self, event: Event) -> None:
        """End the broker, and start another one if it was killed or stopped."""
        if event is Event.KILL:
            crash(self.clockwork.broker.store)
        else:
            self.clockwork.timers.finish()
            self.clockwork.broker.close()
        self.clockwork = Clockwork(self.folder, self.clockwork.clock.ms)


@pytest.mark.parametrize(("state", "event"), TABLE, ids=lambda each: each.name.lower())
async def test_every_event_in_every_state(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, state: State, event: Event
) -> None:
    life, expected = Life(tmp_path), TABLE[state, event]
    async with life.clockwork.running():
        await life.bring_to(state)
        assert await life.apply(event) == expected.answer
    life.end(event)
    async with life.clockwork.running():
        await life.clockwork.until_ms(_DUE_MS + 60_000)
    assert life.clockwork.bodies() == [b"late"] * expected.is_delivered
