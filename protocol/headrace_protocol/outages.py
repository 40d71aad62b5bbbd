"""Log lines about outages: one when an outage begins, one each half minute, one when it is over.

Every loop that retries reports to an ``Outages``. So a thing that is away costs a log a few lines,
however many loops wait for it and however often they try.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

REPEAT_S = 30.0


@dataclass(slots=True)
class _Outage:
    """parts: what fails of the thing. logged_at: time of its last line, or of the last outage's."""

    began_at: float
    logged_at: float
    failure_count: int = 0
    is_logged: bool = False
    parts: set[Hashable] = field(default_factory=set)


class Outages:
    """The things that are away from one client or daemon.

    Names are bounded by the caller: brokers, nameservers, locations; never a message or a client.
    A thing that comes and goes is logged once per half minute, too. Several threads may report.
    """

    def __init__(
        self,
        warn: Callable[[str], object],
        now: Callable[[], float] = time.monotonic,
        ended: Callable[[str], object] | None = None,
    ) -> None:
        """warn: writes one line. now: seconds of a clock that never goes back.

        ended: writes the line about an end, if that is of another level.
        """
        self._warn = warn
        self._ended = ended or warn
        self._now = now
        self._outages: dict[str, _Outage] = {}
        # When the log got its last line about the beginning of an outage.
        self._begun_at: dict[str, float] = {}

    @property
    def names(self) -> frozenset[str]:
        """The things that are away."""
        return frozenset(self._outages)

    def __bool__(self) -> bool:
        """True while anything is away."""
        return bool(self._outages)

    def seconds(self, name: str) -> float:
        """Seconds for which ``name`` has been away; 0 if it is not."""
        outage = self._outages.get(name)
        return self._now() - outage.began_at if outage else 0.0

    def failed(self, name: str, reason: object, part: Hashable = None) -> None:
        """An attempt to use ``name`` failed. Logs the first failure, then one each half minute.

        part: what failed of several things under one name; the outage ends when all of them work.
        """
        now = self._now()
        outage = self._outages.get(name)
        if outage is None:
            logged_at = self._begun_at.get(name, -math.inf)
            outage = self._outages[name] = _Outage(now, logged_at)
        outage.failure_count += 1
        outage.parts.add(part)
        if now - outage.logged_at < REPEAT_S:
            return
        outage.logged_at = now
        if not outage.is_logged:
            outage.is_logged = True
            self._note_beginning(name, now)
        if outage.failure_count == 1:
            self._warn(f"{name} is unavailable, retrying: {reason}")
        else:
            self._warn(
                f"{name} has been unavailable for {now - outage.began_at:.0f} s "
                f"({outage.failure_count} attempts): {reason}"
            )

    def _note_beginning(self, name: str, now: float) -> None:
        begun = list(self._begun_at.items())
        recent = {each: at for each, at in begun if now - at < REPEAT_S}
        self._begun_at = recent | {name: now}

    def worked(self, name: str, part: Hashable = None) -> None:
        """An attempt to use ``name`` succeeded. Logs the end of its outage, if it had one."""
        outage = self._outages.get(name)
        if outage is None:
            return
        outage.parts.discard(part)
        if outage.parts:
            return
        self._outages.pop(name, None)
        if outage.is_logged:
            self._ended(f"{name} is available again after {self._now() - outage.began_at:.0f} s")

    def forget(self, name: str, part: Hashable = None) -> None:
        """Nobody needs ``name`` any more, so nothing will tell whether it is back."""
        outage = self._outages.get(name)
        if outage is None:
            return
        outage.parts.discard(part)
        if not outage.parts:
            self._outages.pop(name, None)
            self._begun_at.pop(name, None)
