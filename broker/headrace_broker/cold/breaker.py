"""A pause in reading after repeated failures, so that no request waits for a store that is away."""

from __future__ import annotations

import random
import time
from threading import Lock
from typing import TYPE_CHECKING, Final

from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.tier.driver import Failure, FailureKind

if TYPE_CHECKING:
    from collections.abc import Callable

_FAILURES_MAX: Final = 3
_PAUSE_S_MIN: Final = 1.0
_PAUSE_S_MAX: Final = 60.0
# Time for the read that checks whether the store is back; after it another one tries.
_TRIAL_S: Final = 10.0


class Breaker:
    """Counts failures in a row, for all threads. After three, reads fail at once for a while.

    After the pause one read tries. Each try that fails doubles the pause, up to a minute, less up
    to a quarter at random.
    """

    def __init__(self, name: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        """name: a noun for messages, such as "the tier"."""
        self._name = name
        self._monotonic = monotonic
        self._lock = Lock()
        self._failure_count = 0
        self._next_try_s = 0.0
        self._is_trying = False
        self._since = ""
        self._reason = ""

    @property
    def problem(self) -> str:
        """The reason why reads fail; "" if the last one succeeded."""
        if not self._failure_count:
            return ""
        return f"unreachable since {self._since}: {self._reason}"

    @property
    def is_paused(self) -> bool:
        """True while reads fail at once."""
        return self._failure_count >= _FAILURES_MAX and self._next_try_s > self._monotonic()

    def check(self) -> None:
        """Raise RequestError during a pause; the first caller after it is the one to try."""
        with self._lock:
            if self._failure_count < _FAILURES_MAX:
                return
            now_s = self._monotonic()
            if self._next_try_s > now_s:
                raise self._rejection(self._next_try_s - now_s)
            self._is_trying, self._next_try_s = True, now_s + _TRIAL_S

    def succeeded(self) -> None:
        """Note an answer of the store."""
        with self._lock:
            self._failure_count, self._is_trying = 0, False

    def failed(self, failure: Failure) -> RequestError:
        """Note a failed read; returns the error for the request that needs it."""
        if failure.kind is FailureKind.UNREACHABLE:
            return self.unreachable(str(failure))
        self.succeeded()
        return RequestError(
            ResponseCode.SYSTEM_ERROR, f"{self._name} can't serve this read: {failure}; try again"
        )

    def unreachable(self, reason: str) -> RequestError:
        """Note that the store did not answer; returns the error for the request that needs it."""
        with self._lock:
            now_s = self._monotonic()
            if self.is_paused and not self._is_trying:
                # It began before the pause, like the reads that have opened it.
                return self._rejection(self._next_try_s - now_s)
            if not self._failure_count:
                self._since = time.strftime("%Y-%m-%d %H:%M:%S")
            self._failure_count += 1
            self._is_trying = False
            self._reason = reason
            doublings = self._failure_count - _FAILURES_MAX
            pause_s = 0.0
            if doublings >= 0:
                pause_s = min(_PAUSE_S_MIN * 2 ** min(doublings, 16), _PAUSE_S_MAX)
                pause_s *= random.uniform(0.75, 1.0)
            self._next_try_s = now_s + pause_s
            return self._rejection(pause_s)

    def _rejection(self, wait_s: float) -> RequestError:
        return RequestError(
            ResponseCode.SYSTEM_BUSY, f"{self._name} is {self.problem}; next try in {wait_s:.0f} s"
        )
