"""A driver that limits the time of another one's operations, and counts them."""

from __future__ import annotations

from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TypeVar

from headrace_daemon.metrics.histogram import Histogram
from headrace_protocol.tier.driver import Failure
from headrace_protocol.tier.time_limits import Limited

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_protocol.tier.operations import Operation
    from headrace_protocol.tier.time_limits import TimeLimits

T = TypeVar("T")

# The peer's buckets: milliseconds of an operation, and bytes that it moves.
_LATENCY_MS: Final = (3, 5, 7, 10, 100, 200, 400, 600, 800, 1000, 1500, 3000)
_BYTES: Final = (1 << 10, 10 << 10, 100 << 10, 1 << 20, 10 << 20, 32 << 20, 50 << 20, 100 << 20)


class Operations:
    """Counts of what drivers were asked, for all threads.

    latencies_ms: by operation and whether it succeeded. uploaded, downloaded: bytes of each
    successful write and read.
    """

    def __init__(self) -> None:
        self.latencies_ms: dict[tuple[str, bool], Histogram] = {}
        self.uploaded = Histogram(_BYTES)
        self.downloaded = Histogram(_BYTES)
        self._lock = Lock()

    def add(self, operation: Operation, *, is_success: bool, seconds: float) -> None:
        """Count an operation."""
        moved = {"read": self.downloaded, "write": self.uploaded}.get(operation.name)
        key = operation.name, is_success
        with self._lock:
            self.latencies_ms.setdefault(key, Histogram(_LATENCY_MS)).add(seconds * 1000)
            if is_success and moved is not None:
                moved.add(operation.byte_count)


class Metered(Limited):
    """A driver whose operations are limited and counted."""

    def __init__(self, driver: Any, operations: Operations, limits: TimeLimits) -> None:
        super().__init__(driver, limits)
        self._operations = operations

    def _run(self, operation: Operation, operate: Callable[[], T]) -> T | Failure:
        begin_s = monotonic()
        result = super()._run(operation, operate)
        is_success = not isinstance(result, Failure)
        self._operations.add(operation, is_success=is_success, seconds=monotonic() - begin_s)
        return result
