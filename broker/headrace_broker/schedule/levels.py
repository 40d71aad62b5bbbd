"""The delay levels of messageDelayLevel, and what DELAY asks for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.message import (
    DELAY,
    REAL_QID,
    REAL_TOPIC,
    TIMER_DELAY_MS,
    TIMER_DELAY_SEC,
    TIMER_DELIVER_MS,
    TIMER_OUT_MS,
)
from headrace_protocol.system_topics import HALF_TOPIC, SCHEDULE_TOPIC

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.message_demands import SentMessage

_INTEGER = re.compile(r"[+-]?[0-9]{1,10}", re.ASCII)
# A delay level wins over a delivery time.
_TIMER_PROPERTIES: Final = frozenset(
    {
        TIMER_DELIVER_MS,
        TIMER_DELAY_SEC,
        TIMER_DELAY_MS,
        TIMER_OUT_MS,
    }
)


class DelayDemand:
    """Has a message with DELAY wait in the queue of its level.

    now_ms: the store time of the message, at which its delay begins. on_delayed: called when a
    message is about to be stored there.
    """

    def __init__(
        self,
        delays_ms: tuple[int, ...],
        now_ms: Callable[[], int],
        on_delayed: Callable[[], None],
    ) -> None:
        self._delays_ms = delays_ms
        self._now_ms = now_ms
        self._on_delayed = on_delayed

    def serve(self, message: SentMessage) -> None:
        """Redirect the message; one with a level of 0 or less stays. Raises RequestError."""
        level = min(_level_of(message), len(self._delays_ms))
        if level <= 0 or message.topic == HALF_TOPIC:
            return
        names = {DELAY: str(level), REAL_TOPIC: message.topic, REAL_QID: str(message.queue_id)}
        message.put(names, dropped=_TIMER_PROPERTIES)
        message.topic, message.queue_id = SCHEDULE_TOPIC, level - 1
        message.tags_code = self._now_ms() + self._delays_ms[level - 1]
        self._on_delayed()


def _level_of(message: SentMessage) -> int:
    value = message.values()[DELAY]
    if not _INTEGER.fullmatch(value):
        raise RequestError(
            ResponseCode.MESSAGE_ILLEGAL,
            f"DELAY={value[:60]} of a message to {message.topic}: expected a number, 1 to 18 by "
            "default; nothing was stored",
        )
    return int(value)
