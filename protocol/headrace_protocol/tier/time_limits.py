"""Time limits for the operations of a driver, also for those that nothing can interrupt.

A call into a mounted file system may never return, and no thread that is in it can be stopped. So
each operation runs in a thread of its own, which is abandoned when the time is over. It may still
take effect later. What always holds:

1. Until an abandoned operation returns, no other one changes the same path, and no folder with this
   path is listed. So a late write never meets a later one, and nobody decides by what it may add.
2. Whoever writes next finds out what the abandoned one has left: files are cut to the known end,
   objects have names that are never used again, and a manifest is replaced by its etag.
3. Once ``_ABANDONED_MAX`` operations have not returned, others fail at once until one does.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import Future
from functools import partial
from threading import Condition, Lock, Thread
from typing import TYPE_CHECKING, Any, Final, TypeVar

from headrace_protocol.tier.driver import Failure, FailureKind
from headrace_protocol.tier.operations import Wrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace_protocol.tier.operations import Operation

T = TypeVar("T")

_ABANDONED_MAX: Final = 8


class _Running:
    """An operation in its thread. changed: notified when there is a result, or less time."""

    __slots__ = ("begin_s", "changed", "future", "operation")

    def __init__(self, operation: Operation, lock: Lock, begin_s: float) -> None:
        self.operation = operation
        self.changed = Condition(lock)
        self.begin_s = begin_s
        self.future: Future[Any] = Future()


def _start_thread(work: Callable[[], None]) -> None:
    Thread(target=work, daemon=True).start()


class TimeLimits:
    """Runs the operations of one folder or bucket, for all threads."""

    def __init__(
        self,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        start: Callable[[Callable[[], None]], None] = _start_thread,
        patience: float = 1.0,
    ) -> None:
        """monotonic: a clock, in seconds. start: runs something in a thread.

        patience: multiplies all limits.
        """
        self.monotonic = monotonic
        self._start = start
        self._patience = patience
        self._lock = Lock()
        self._running: set[_Running] = set()
        # The oldest is first.
        self._abandoned: dict[_Running, None] = {}
        self._end_s = math.inf

    @property
    def abandoned_count(self) -> int:
        """Number of operations that took too long and have not returned."""
        return len(self._abandoned)

    def end_by(self, end_s: float) -> None:
        """Abandon all operations at a time of the monotonic clock, also those that come later."""
        with self._lock:
            self._end_s = end_s
            for running in self._running:
                running.changed.notify()

    def run(self, operation: Operation, operate: Callable[[], T]) -> T | Failure:
        """The result of an operation; UNREACHABLE if it takes too long or is refused."""
        running = _Running(operation, self._lock, self.monotonic())
        with self._lock:
            reason = next(self._refusals(operation), "")
            if reason:
                return Failure(FailureKind.UNREACHABLE, operation.path, reason)
            self._running.add(running)
        self._start(lambda: self._operate(running, operate))
        with self._lock:
            while not running.future.done():
                limit_s = operation.limit_s * self._patience
                end_s = min(running.begin_s + limit_s, self._end_s)
                now_s = self.monotonic()
                if now_s >= end_s:
                    self._abandoned[running] = None
                    reason = f"no answer to {operation.name} in {now_s - running.begin_s:.0f} s"
                    return Failure(FailureKind.UNREACHABLE, operation.path, reason)
                running.changed.wait(end_s - now_s)
        return running.future.result()  # type: ignore[no-any-return]

    def _operate(self, running: _Running, operate: Callable[[], object]) -> None:
        try:
            settle = partial(running.future.set_result, operate())
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            settle = partial(running.future.set_exception, error)
        with self._lock:
            settle()
            self._running.discard(running)
            self._abandoned.pop(running, None)
            running.changed.notify()

    def _refusals(self, operation: Operation) -> Iterator[str]:
        """Reasons why an operation must not begin."""
        for other in self._abandoned:
            changed = other.operation.changes
            is_below = operation.name == "list" and any(
                path.startswith(f"{operation.path}/") for path in changed
            )
            if is_below or not set(changed).isdisjoint(operation.changes):
                yield f"the {self._waiting(other)}, and may still take effect"
        if len(self._abandoned) >= _ABANDONED_MAX:
            first = next(iter(self._abandoned))
            count = len(self._abandoned)
            yield f"{count} operations have not returned; the {self._waiting(first)}"

    def _waiting(self, running: _Running) -> str:
        seconds = self.monotonic() - running.begin_s
        return f"{running.operation} has not returned for {seconds:.0f} s"


class Limited(Wrapped):
    """A driver within limits of time."""

    def __init__(self, driver: Any, limits: TimeLimits) -> None:
        super().__init__(driver)
        self._limits = limits

    def _run(self, operation: Operation, operate: Callable[[], T]) -> T | Failure:
        return self._limits.run(operation, operate)
