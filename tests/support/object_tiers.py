"""Tiers of objects, and a store whose calls fail, are lost or end the broker."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from headrace_broker.tiered.container.stored_tier import Group, Name
from headrace_broker.tiered.container.tier import Home
from headrace_broker.tiered.driver.memory import MemoryDriver
from headrace_broker.tiered.driver.posix import PosixDriver
from headrace_broker.tiered.objects.object_tier import ObjectTier
from headrace_protocol.tier.driver import Buffer, Failure, FailureKind, Range
from tests.support.tiers import BEGIN_MS, TOPIC, block

HOME = Home("cluster", "broker")


class Killed(BaseException):
    """The broker ended in the middle of a call."""


class Fault(enum.Enum):
    """What happens to a call.

    REPEATED: the answer of a put is lost, and the client of the store repeats it.
    """

    NONE = enum.auto()
    FAILS = enum.auto()
    ANSWER_LOST = enum.auto()
    REPEATED = enum.auto()
    KILLED_BEFORE = enum.auto()
    KILLED_AFTER = enum.auto()


class FaultyStore:
    """A store in memory. fault: decides about each call by its name. calls: counts them."""

    def __init__(self, driver: Any = None) -> None:
        self.driver = driver or MemoryDriver()
        self.fault: Callable[[str], Fault] = lambda _call: Fault.NONE
        self.calls: Counter[str] = Counter()

    def _call(self, call: str, path: str, run: Callable[[], Any]) -> Any:
        self.calls[call] += 1
        fault = self.fault(call)
        if fault is Fault.KILLED_BEFORE:
            raise Killed
        if fault is Fault.FAILS:
            return Failure(FailureKind.UNREACHABLE, path, "is away")
        result = run()
        if fault is Fault.KILLED_AFTER:
            raise Killed
        if fault is Fault.ANSWER_LOST:
            return Failure(FailureKind.UNREACHABLE, path, "no answer")
        return run() if fault is Fault.REPEATED else result

    def read(self, path: str, ranges: Sequence[Range]) -> list[Buffer] | Failure:
        """As ``Driver.read``."""
        return self._call("read", path, lambda: self.driver.read(path, ranges))

    def size(self, path: str) -> int | Failure:
        """As ``Driver.size``."""
        return self._call("size", path, lambda: self.driver.size(path))

    def entries(self, folder: str) -> Any:
        """As ``Driver.entries``."""
        return self._call("entries", folder, lambda: self.driver.entries(folder))

    def delete(self, paths: Sequence[str]) -> Failure | None:
        """As ``Driver.delete``."""
        return self._call("delete", "", lambda: self.driver.delete(paths))

    def put(self, path: str, data: Buffer, replaces: str = "") -> str | Failure:
        """As ``PutDriver.put``."""
        return self._call("put", path, lambda: self.driver.put(path, data, replaces))

    def etag(self, path: str) -> str | Failure:
        """As ``PutDriver.etag``."""
        return self._call("etag", path, lambda: self.driver.etag(path))


def open_objects_tier(driver: Any, now_ms: int = BEGIN_MS) -> ObjectTier:
    """The tier of a broker, opened; failures that may pass are retried."""
    if isinstance(driver, PosixDriver):
        driver._root.mkdir(parents=True, exist_ok=True)
    tier = ObjectTier(driver, HOME)
    while (failure := tier.start(now_ms)) is not None:
        assert failure.kind is FailureKind.UNREACHABLE, failure
    return tier


def append_next(
    tier: ObjectTier, counts: dict[Name, int], now_ms: int = BEGIN_MS, gap: int = 0
) -> Failure | None:
    """Append the next records of queues, which are created if they are not there."""
    missing = [name for name in counts if name not in tier.queues]
    failure = tier.create(missing, now_ms) if missing else None
    if failure is not None:
        return failure
    groups = {}
    for (topic, queue_id), count in counts.items():
        first = tier.queues[topic, queue_id].commit_offset + gap
        groups[topic, queue_id] = Group(*block(first, count, queue_id, topic))
    return tier.append_all(groups, now_ms)


def one(count: int, queue_id: int = 0) -> dict[Name, int]:
    """Records of one queue."""
    return {(TOPIC, queue_id): count}
