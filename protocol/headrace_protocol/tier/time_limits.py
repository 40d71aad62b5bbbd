"""Time limits for the operations of a place, also for those that nothing can interrupt.

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
from functools import partial
from threading import Condition, Lock
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import trio

from headrace_broker.tiered.driver.interface import Failure, FailureKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import outcome

T = TypeVar("T")

_ABANDONED_MAX: Final = 8
# A read is shorter than the 10 s after which the peer's pull consumers give up. A listing walks
# through all files of a broker.
_LIMITS_S: Final = {"read": 5.0, "size": 5.0, "etag": 5.0, "list": 300.0}
_WRITE_LIMIT_S: Final = 30.0
_MIB: Final = 1 << 20


class Operation(NamedTuple):
    """What is asked of a place.

    path: of a listing, the folder. byte_count: bytes that it moves. changes: paths that it writes
    or deletes. Each MiB and each of these paths takes a second more.
    """

    name: str
    path: str
    byte_count: int = 0
    changes: tuple[str, ...] = ()

    @property
    def limit_s(self) -> float:
        """The time after which it is abandoned."""
        limit_s = _LIMITS_S.get(self.name, _WRITE_LIMIT_S)
        return limit_s + self.byte_count / _MIB + max(len(self.changes) - 1, 0)

    def __str__(self) -> str:
        return f"{self.name} of {self.path}"


class _Running:
    """An operation in its thread. changed: notified when there is a result, or less time."""

    __slots__ = ("begin_s", "changed", "operation", "result")

    def __init__(self, operation: Operation, lock: Lock, begin_s: float) -> None:
        self.operation = operation
        self.changed = Condition(lock)
        self.begin_s = begin_s
        self.result: outcome.Outcome[object] | None = None


class TimeLimits:
    """Runs the operations of one place, for all threads."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
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
        running = _Running(operation, self._lock, self._monotonic())
        with self._lock:
            reason = next(self._refusals(operation), "")
            if reason:
                return Failure(FailureKind.UNREACHABLE, operation.path, reason)
            self._running.add(running)
        trio.lowlevel.start_thread_soon(operate, partial(self._note_result, running))
        with self._lock:
            while running.result is None:
                end_s = min(running.begin_s + operation.limit_s, self._end_s)
                now_s = self._monotonic()
                if now_s >= end_s:
                    self._abandoned[running] = None
                    reason = f"no answer to {operation.name} in {now_s - running.begin_s:.0f} s"
                    return Failure(FailureKind.UNREACHABLE, operation.path, reason)
                running.changed.wait(end_s - now_s)
        return running.result.unwrap()  # type: ignore[return-value]

    def _note_result(self, running: _Running, result: outcome.Outcome[object]) -> None:
        with self._lock:
            running.result = result
            self._running.discard(running)
            self._abandoned.pop(running, None)
            running.changed.notify()

    def _refusals(self, operation: Operation) -> Iterator[str]:
        """Why an operation must not begin."""
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
        seconds = self._monotonic() - running.begin_s
        return f"{running.operation} has not returned for {seconds:.0f} s"
