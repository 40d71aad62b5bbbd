"""Log lines about outages: one when an outage begins, one each half minute, one when it is over.

Every loop that retries reports to an ``Outages``. So a thing that is away costs a log a few lines,
however many loops wait for it and however often they try.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

REPEAT_S = 30.0


@dataclass(slots=True)
class _Outage:
    began_at: float
    logged_at: float
    failure_count: int = 0


class Outages:
    """The things that are away from one client or daemon.

    Names are bounded by the caller: brokers, nameservers, places; never a message or a client.
    """

    def __init__(
        self, warn: Callable[[str], object], now: Callable[[], float] = time.monotonic
    ) -> None:
        """warn: writes one line. now: seconds of a clock that never goes back."""
        self._warn = warn
        self._now = now
        self._outages: dict[str, _Outage] = {}

    @property
    def names(self) -> frozenset[str]:
        """The things that are away."""
        return frozenset(self._outages)

    def seconds(self, name: str) -> float:
        """How long ``name`` has been away; 0 if it is not."""
        outage = self._outages.get(name)
        return self._now() - outage.began_at if outage else 0.0

    def failed(self, name: str, reason: object) -> None:
        """An attempt to use ``name`` failed. Logs the first failure, then one each half minute."""
        now = self._now()
        outage = self._outages.get(name)
        if outage is None:
            self._outages[name] = _Outage(now, now, 1)
            self._warn(f"{name} is unavailable, retrying: {reason}")
            return
        outage.failure_count += 1
        if now - outage.logged_at >= REPEAT_S:
            outage.logged_at = now
            self._warn(
                f"{name} has been unavailable for {now - outage.began_at:.0f} s "
                f"({outage.failure_count} attempts): {reason}"
            )

    def worked(self, name: str) -> None:
        """An attempt to use ``name`` succeeded. Logs the end of its outage, if it had one."""
        outage = self._outages.pop(name, None)
        if outage is not None:
            self._warn(f"{name} is available again after {self._now() - outage.began_at:.0f} s")

    def forget(self, name: str) -> None:
        """Nobody needs ``name`` any more, so nothing will tell whether it is back."""
        self._outages.pop(name, None)
