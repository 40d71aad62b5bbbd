"""A driver that limits the time of another one's operations, and counts them."""

from __future__ import annotations

from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Final, TypeVar

from headrace_daemon.metrics.histogram import Histogram
from headrace_protocol.tier.driver import REWRITTEN_BYTES_MAX, Failure
from headrace_protocol.tier.time_limits import Limited, Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace_protocol.tier.driver import (
        AppendDriver,
        Buffer,
        Driver,
        PutDriver,
    )
    from headrace_protocol.tier.time_limits import TimeLimits

T = TypeVar("T")

# The peer's buckets: milliseconds of an operation, and bytes that it moves.
_LATENCY_MS: Final = (3, 5, 7, 10, 100, 200, 400, 600, 800, 1000, 1500, 3000)
_BYTES: Final = (1 << 10, 10 << 10, 100 << 10, 1 << 20, 10 << 20, 32 << 20, 50 << 20, 100 << 20)


class Operations:
    """What was asked of a place, for all threads.

    latencies_ms: by operation and whether it succeeded. uploaded, downloaded: bytes of each
    successful write and read.
    """

    def __init__(self) -> None:
        self.latencies_ms: dict[tuple[str, bool], Histogram] = {}
        self.uploaded = Histogram(_BYTES)
        self.downloaded = Histogram(_BYTES)
        self._lock = Lock()

    def add(self, operation: str, *, is_success: bool, seconds: float) -> None:
        """Count an operation."""
        with self._lock:
            latencies = self.latencies_ms.setdefault(
                (operation, is_success), Histogram(_LATENCY_MS)
            )
            latencies.add(seconds * 1000)

    def add_bytes(self, moved: Histogram, byte_count: int) -> None:
        """Count the bytes of a write or a read."""
        with self._lock:
            moved.add(byte_count)


class _Metered(Limited):
    """What all drivers do; see ``Driver``."""

    def __init__(self, driver: Driver, operations: Operations, limits: TimeLimits) -> None:
        super().__init__(driver, limits)
        self._deletes = driver
        self._operations = operations

    def _run(self, operation: Operation, operate: Callable[[], T]) -> T | Failure:
        begin_s = monotonic()
        result = super()._run(operation, operate)
        is_success = not isinstance(result, Failure)
        self._operations.add(operation.name, is_success=is_success, seconds=monotonic() - begin_s)
        if is_success and operation.name == "read":
            self._operations.add_bytes(self._operations.downloaded, operation.byte_count)
        return result

    def delete(self, paths: Sequence[str]) -> Failure | None:
        """As ``Driver.delete``."""
        if not paths:
            return None
        operation = Operation("delete", paths[0], changes=tuple(paths))
        return self._run(operation, lambda: self._deletes.delete(paths))


class MeteredAppends(_Metered):
    """See ``AppendDriver``."""

    def __init__(self, driver: AppendDriver, operations: Operations, limits: TimeLimits) -> None:
        super().__init__(driver, operations, limits)
        self._appends = driver

    def append(self, path: str, position: int, data: Buffer) -> Failure | None:
        """As ``AppendDriver.append``."""
        operation = Operation("write", path, len(data), (path,))
        failure = self._run(operation, lambda: self._appends.append(path, position, data))
        if failure is None:
            self._operations.add_bytes(self._operations.uploaded, len(data))
        return failure

    def cut(self, path: str, size: int) -> Failure | None:
        """As ``AppendDriver.cut``."""
        operation = Operation("cut", path, changes=(path,))
        return self._run(operation, lambda: self._appends.cut(path, size))

    def rewrite(self, path: str, start: int) -> Failure | None:
        """As ``AppendDriver.rewrite``."""
        operation = Operation("write", path, REWRITTEN_BYTES_MAX, (path,))
        return self._run(operation, lambda: self._appends.rewrite(path, start))


class MeteredPuts(_Metered):
    """See ``PutDriver``."""

    def __init__(self, driver: PutDriver, operations: Operations, limits: TimeLimits) -> None:
        super().__init__(driver, operations, limits)
        self._puts = driver

    def put(self, path: str, data: Buffer, replaces: str = "") -> str | Failure:
        """As ``PutDriver.put``."""
        operation = Operation("write", path, len(data), (path,))
        etag = self._run(operation, lambda: self._puts.put(path, data, replaces))
        if not isinstance(etag, Failure):
            self._operations.add_bytes(self._operations.uploaded, len(data))
        return etag

    def etag(self, path: str) -> str | Failure:
        """As ``PutDriver.etag``."""
        return self._run(Operation("etag", path), lambda: self._puts.etag(path))
