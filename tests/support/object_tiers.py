"""Tiers of objects, and a driver whose calls fail, are lost or end the broker."""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

from headrace_broker.tiered.container.stored_tier import Group, Name
from headrace_broker.tiered.driver.memory import MemoryDriver
from headrace_broker.tiered.driver.posix import PosixDriver
from headrace_broker.tiered.objects.object_tier import ObjectTier
from headrace_broker.tiered.objects.sizes import SIZES, ObjectSizes
from headrace_protocol.tier.driver import Failure, FailureKind
from headrace_protocol.tier.paths import Home
from tests.support.tiers import BEGIN_MS, TOPIC, block

HOME = Home("cluster", "broker")


class Killed(BaseException):
    """The broker ended in the middle of a call."""


class Fault(enum.Enum):
    """The fate of a call.

    RAISES: an unexpected error. REPEATED: the answer of a put is lost, and the client of the store
    repeats it.
    """

    NONE = enum.auto()
    FAILS = enum.auto()
    RAISES = enum.auto()
    ANSWER_LOST = enum.auto()
    REPEATED = enum.auto()
    KILLED_BEFORE = enum.auto()
    KILLED_AFTER = enum.auto()


class FaultyDriver:
    """A driver in front of another one. fault: decides about each call by its name.

    calls: counts them. paths: of each call, by name.
    """

    def __init__(self, driver: Any = None) -> None:
        self.driver = driver or MemoryDriver()
        self.fault: Callable[[str], Fault] = lambda _call: Fault.NONE
        self.calls: Counter[str] = Counter()
        self.paths: defaultdict[str, list[str]] = defaultdict(list)

    def fail(self, *calls: str, fault: Fault = Fault.FAILS) -> None:
        """Have calls of these names fail, and no others."""
        self.fault = lambda call: fault if call in calls else Fault.NONE

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, name, getattr(self.driver, name))

    def _call(self, name: str, operate: Callable[..., Any], *arguments: Any) -> Any:
        self.calls[name] += 1
        path = str(arguments[0])
        self.paths[name].append(path)
        fault = self.fault(name)
        if fault is Fault.KILLED_BEFORE:
            raise Killed
        if fault is Fault.RAISES:
            raise ZeroDivisionError
        if fault is Fault.FAILS:
            return Failure(FailureKind.UNREACHABLE, path, "is away")
        result = operate(*arguments)
        if fault is Fault.KILLED_AFTER:
            raise Killed
        if fault is Fault.ANSWER_LOST:
            return Failure(FailureKind.UNREACHABLE, path, "no answer")
        return operate(*arguments) if fault is Fault.REPEATED else result


def open_objects_tier(
    driver: Any, now_ms: int = BEGIN_MS, sizes: ObjectSizes = SIZES
) -> ObjectTier:
    """The tier of a broker, opened; failures that may pass are retried."""
    if isinstance(driver, PosixDriver):
        driver._root.mkdir(parents=True, exist_ok=True)
    tier = ObjectTier(driver, HOME, sizes)
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
