"""The demand of TIMER_DELAY_SEC, TIMER_DELAY_MS and TIMER_DELIVER_MS."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.message import (
    REAL_QID,
    REAL_TOPIC,
    TIMER_DELAY_MS,
    TIMER_DELAY_SEC,
    TIMER_DELIVER_MS,
    TIMER_OUT_MS,
    TIMER_ROLL_TIMES,
)
from headrace_protocol.system_topics import HALF_TOPIC, TIMER_TOPIC

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.config import BrokerConfig
    from headrace_broker.message_demands import SentMessage

# The first of a message counts.
TIMES: Final = (TIMER_DELAY_SEC, TIMER_DELAY_MS, TIMER_DELIVER_MS)
SLOT_MS: Final = 1000
# Eighteen digits fit a signed long of Java, and so do their sums with a time of today.
_INTEGER: Final = re.compile(r"\+?[0-9]{1,18}", re.ASCII)
# Names the timer that a recall drops.
RECALLS: Final = "TIMER_DEL_UNIQKEY"


class TimerDemand:
    """Redirects a message with a delivery time to the queue of timers.

    on_timer: called when a message is about to be stored there.
    """

    def __init__(
        self,
        config: BrokerConfig,
        now_ms: Callable[[], int],
        on_timer: Callable[[], None],
    ) -> None:
        """now_ms: the store time of the message, at which its delay begins."""
        self._config = config
        self._now_ms = now_ms
        self._on_timer = on_timer

    def serve(self, message: SentMessage) -> None:
        """Redirect the message, unless its time is past. Raises RequestError."""
        values = message.values()
        # A message that was delivered once and is sent again does not wait again.
        if message.topic in {HALF_TOPIC, TIMER_TOPIC} or values.get(TIMER_OUT_MS):
            return
        if not self._config.timer_wheel_enable:
            raise _illegal(message, "timers are switched off (timerWheelEnable=false)")
        now_ms = self._now_ms()
        deliver_ms = self._deliver_ms(message, values, now_ms)
        if deliver_ms <= now_ms:
            if values.get(RECALLS):
                raise _illegal(message, "the timer to recall is due already")
            return
        out_ms = out_ms_of(deliver_ms)
        message.put(
            {
                TIMER_OUT_MS: str(out_ms),
                REAL_TOPIC: message.topic,
                REAL_QID: str(message.queue_id),
            },
            dropped=[TIMER_ROLL_TIMES],
        )
        message.topic, message.queue_id = TIMER_TOPIC, 0
        message.recall_ms = 0 if values.get(RECALLS) else out_ms + 1
        self._on_timer()

    def _deliver_ms(self, message: SentMessage, values: dict[str, str], now_ms: int) -> int:
        name = next(name for name in TIMES if values.get(name))
        value = values[name]
        if not _INTEGER.fullmatch(value):
            raise _illegal(message, f"{name}={value[:60]}: expected a number that is not negative")
        deliver_ms = int(value)
        if name != TIMER_DELIVER_MS:
            deliver_ms = now_ms + deliver_ms * (1000 if name == TIMER_DELAY_SEC else 1)
        delay_max_ms = self._config.timer_max_delay_sec * 1000
        if deliver_ms - now_ms > delay_max_ms:
            raise _illegal(
                message,
                "timer message illegal, the delay time should not be bigger than the max delay "
                f"{delay_max_ms}ms",
            )
        return deliver_ms


def out_ms_of(deliver_ms: int) -> int:
    """TIMER_OUT_MS for a delivery time: the start of its slot, which ends at that time or later."""
    return (deliver_ms - 1) // SLOT_MS * SLOT_MS


def _illegal(message: SentMessage, reason: str) -> RequestError:
    return RequestError(
        ResponseCode.MESSAGE_ILLEGAL,
        f"{reason}; of a message to {message.topic}, nothing was stored",
    )
