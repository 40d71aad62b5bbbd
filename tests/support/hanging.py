"""A location whose operations hang until they are released, and may take effect only then."""

from __future__ import annotations

import enum
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Semaphore
from typing import Any

from headrace_broker.tiered.driver.metered import Metered, Operations
from headrace_protocol.tier.time_limits import TimeLimits

_LONG_S = 1000.0
_WAIT_S = 30.0
_LOOK_S = 0.0005


class When(enum.Enum):
    """The moment at which a hanging operation takes effect: at its release, or before."""

    LATE = enum.auto()
    AT_ONCE = enum.auto()


class Hanging:
    """A driver some of whose operations hang.

    hangs: decides by the operation's name whether it hangs, and when it takes effect.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.hangs: Callable[[str], When | None] = lambda _name: None
        self.held: list[Event] = []
        self._entered = Semaphore(0)
        self._left = Semaphore(0)

    def __getattr__(self, name: str) -> Any:
        operate = getattr(self.driver, name)

        def run(*args: Any) -> Any:
            when = self.hangs(name)
            if when is None:
                return operate(*args)
            released = Event()
            self.held.append(released)
            done = operate(*args) if when is When.AT_ONCE else None
            self._entered.release()
            released.wait(_WAIT_S)
            if when is When.LATE:
                done = operate(*args)
            self._left.release()
            return done

        return run

    def hang(self, *names: str, when: When = When.LATE) -> None:
        """Have operations of these names hang from now on."""
        self.hangs = lambda name: when if name in names else None

    def is_hung(self, wait_s: float = _WAIT_S) -> bool:
        """True if one more operation hangs, after waiting for that."""
        return self._entered.acquire(timeout=wait_s)

    def release(self, number: int = 0) -> None:
        """Have one that hangs take effect and return."""
        self.held.pop(number).set()
        assert self._left.acquire(timeout=_WAIT_S)

    def release_all(self) -> None:
        """Have nothing hang any more, and all that hangs return."""
        self.hangs = lambda _name: None
        while self.held:
            self.release()


class Patience:
    """Limits of time by a clock that only ``give_up`` moves."""

    def __init__(self, limits: TimeLimits | None = None) -> None:
        self.now_s = 0.0
        self.limits = limits or TimeLimits()
        self.limits.monotonic = lambda: self.now_s

    def limited(self, driver: Any) -> Metered:
        """A driver within these limits."""
        return Metered(driver, Operations(), self.limits)

    def give_up(self) -> None:
        """Let the time of all operations pass."""
        self.now_s += _LONG_S
        self.limits.end_by(float("inf"))

    def abandon(self, location: Hanging, work: Callable[[], Any]) -> Any:
        """Do work whose operations are abandoned when they hang; returns what work returns."""
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(work)
            while not done.done():
                if location.is_hung(_LOOK_S):
                    self.give_up()
            return done.result()

    def settle(self) -> None:
        """Wait until all that was released is known to have returned."""
        end = Event()
        for _ in range(1000):
            if not self.limits.abandoned_count:
                return
            end.wait(0.001)
        raise AssertionError("operations have not returned")
