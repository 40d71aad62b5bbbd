"""Late answers: a count, and one log line per request code and half minute."""

from __future__ import annotations

import math
from collections import Counter
from time import monotonic
from typing import TYPE_CHECKING

import structlog

from headrace_protocol.codes import code_name
from headrace_protocol.outages import REPEAT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headrace_protocol.serving import Request

log = structlog.get_logger("headrace.server")


class LateRequests:
    """The requests of a daemon that took over a second; see ``Registry``.

    counts: their number since the start, by the name of their code.
    """

    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        self.counts: Counter[str] = Counter()
        self._now = now
        # Time of a code's last line, and the count then.
        self._logged: dict[str, tuple[float, int]] = {}

    def note(self, request: Request, waited_s: Mapping[str, float]) -> None:
        """Count a request, and log it unless its code had a line within the last half minute."""
        name, now = code_name(request.command.code), self._now()
        self.counts[name] += 1
        logged_at, logged_count = self._logged.get(name, (-math.inf, 0))
        if now - logged_at < REPEAT_S:
            return
        count = self.counts[name]
        self._logged[name] = now, count
        longest_first = sorted(waited_s.items(), key=lambda each: -each[1])
        log.warning(
            "late answer",
            request=name,
            client=request.channel.address,
            seconds=round(sum(waited_s.values()), 1),
            waited_for=", ".join(f"{what} {seconds:.1f} s" for what, seconds in longest_first),
            late_since_last_line=count - logged_count,
        )
