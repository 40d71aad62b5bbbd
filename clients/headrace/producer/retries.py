"""Retries of a send: which errors, for how long, and the pauses between attempts."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, TypeVar

import anyio

from headrace.errors import BrokerError, HeadraceError
from headrace_protocol.codes import RequestCode, ResponseCode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from headrace.instance import ClientInstance

Result = TypeVar("Result")

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
# A first failure is often over with the next attempt, on another broker.
_QUIET_ATTEMPTS = 2
# Another broker may accept what one forbids; when several forbid it, time does not help.
_DENIALS_MAX = 3


def is_retryable(error: HeadraceError) -> bool:
    """True if another attempt may succeed after ``Sender.note_failure``."""
    return error.retryable or refuses_blocks(error)


def refuses_blocks(error: HeadraceError) -> bool:
    """True if a headrace broker accepts messages, but not as complete records."""
    return (
        isinstance(error, BrokerError)
        and error.request_code == RequestCode.BULK_SEND
        and error.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
    )


class Retries:
    """The retries of one request: exponential back-off with jitter, up to a deadline."""

    def __init__(self, instance: ClientInstance, topic: str, remaining_s: float) -> None:
        """remaining_s: no attempt begins after so many seconds from now."""
        self._instance = instance
        self._topic = topic
        self._deadline = anyio.current_time() + remaining_s
        self._pause_s = FIRST_PAUSE_S
        self._failures = self._denials = 0

    async def run(self, attempt: Callable[[], Awaitable[Result]]) -> Result:
        """Make attempts until one succeeds. Raises the error of the last one."""
        while True:
            try:
                return await attempt()
            except HeadraceError as failure:
                error = failure
            await self.pause_after(error)

    async def pause_after(self, error: HeadraceError) -> None:
        """Pause before the next attempt. Raises ``error`` if there must be none."""
        # Clients that lost the same broker at the same time come back at different ones.
        pause_s = max(
            self._pause_s * random.uniform(0.5, 1),
            error.retry_after_ms / 1000 * random.uniform(1, 1.1),
        )
        remaining_s = self._deadline - anyio.current_time()
        self._denials += isinstance(error, BrokerError) and error.code == ResponseCode.NO_PERMISSION
        is_denied = self._denials >= _DENIALS_MAX
        if not is_retryable(error) or is_denied or pause_s > remaining_s:
            raise error
        self._failures += 1
        if self._failures > _QUIET_ATTEMPTS:
            self._instance.outages.report(error, self._topic)
        if error.refresh_route:
            self._instance.invalidate_route(self._topic)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        await anyio.sleep(pause_s)
