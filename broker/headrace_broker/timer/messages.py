"""Makes messages of the records of timers: for their topics, or copies for their queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace_broker.inner.delivery import INNER_PROPERTIES_MAX, Routes, stored_again
from headrace_broker.timer.demand import SLOT_MS
from headrace_protocol.java_hash import tags_code_of
from headrace_protocol.message import property_number, with_properties
from headrace_protocol.system_topics import TIMER_TOPIC

if TYPE_CHECKING:
    from headrace_broker.clock import Clock
    from headrace_broker.inner.delivery import Delivery
    from headrace_broker.inner.waiting import Waiting
    from headrace_broker.inner.writer import InnerMessage

# As in Apache's broker, for a timer that was due when it arrived.
_NEVER_QUEUED_MS: Final = 2**63 - 1
_ENQUEUE_MS, _DEQUEUE_MS = _TIMES = (b"TIMER_ENQUEUE_MS", b"TIMER_DEQUEUE_MS")


class TimerMessages:
    """Messages with the times at which their timers came and left."""

    def __init__(self, delivery: Delivery, clock: Clock) -> None:
        self._delivery = delivery
        self._clock = clock
        self._routes = Routes(dropped=_TIMES)

    def delivered(self, waiting: Waiting, due_ms: int) -> InnerMessage:
        """The message for the timer's topic."""
        route, kept = self._routes.read(waiting.properties)
        properties = kept + self._times(waiting, due_ms)
        has_room = len(properties) <= INNER_PROPERTIES_MAX
        return self._delivery.message(
            waiting, route, properties if has_room else waiting.properties
        )

    def copy(self, waiting: Waiting, due_ms: int) -> InnerMessage | None:
        """A copy for the queue of timers; None without room for its properties."""
        times = property_number(waiting.properties, b"TIMER_ROLL_TIMES", 0)
        properties = with_properties(
            waiting.properties,
            {
                b"TIMER_ROLL_TIMES": b"%d" % (times + 1),
                # Its delay counts from its first arrival, which the copy no longer knows.
                b"TIMER_DELIVER_MS": b"%d" % due_ms,
            },
            dropped=_TIMES,
        )
        properties += self._times(waiting, due_ms)
        if len(properties) > INNER_PROPERTIES_MAX:
            return None
        return stored_again(waiting, TIMER_TOPIC, 0, properties, tags_code_of(properties))

    def _times(self, waiting: Waiting, due_ms: int) -> bytes:
        queued_ms = waiting.store_timestamp // SLOT_MS * SLOT_MS
        if (due_ms - 1) // SLOT_MS * SLOT_MS < queued_ms:
            queued_ms = _NEVER_QUEUED_MS
        values = (_ENQUEUE_MS, queued_ms, _DEQUEUE_MS, self._clock.now_ms())
        return b"%s\x01%d\x02%s\x01%d\x02" % values
