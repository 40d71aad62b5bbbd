"""Decides, from plain facts, which log files to remove.

The rules are the peer's: docs/retention.md.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_broker.store.files.filesystem import DiskUsage
    from headrace_broker.store.settings import Retention

# A clock that is off by this much has jumped; suspending the machine looks the same.
JUMP_MS = 3_600_000
# For this long after a jump nothing is removed by age, so an operator has time to react.
TRUST_S = 3600.0

Reason = Literal["age", "disk"]


class LogFile(NamedTuple):
    """A file of the log. newest_ms: when it was last written, or later."""

    start_offset: int
    end_offset: int
    newest_ms: int


class Facts(NamedTuple):
    """The input of ``plan_clean``.

    files: of the log, oldest first: all that may be removed at once, and the next one.
    hour: local. keep_from: all records from this physical offset on must be kept.
    pending_bytes: size of removed files whose space is not free yet.
    wanted_bytes: size of a file that found no room, whatever the file system reports.
    is_requested: an administrator requested the clean-up. is_clock_trusted: see ``ClockWatch``.
    """

    files: Sequence[LogFile]
    now_ms: int
    hour: int
    disk: DiskUsage
    keep_from: int
    pending_bytes: int = 0
    wanted_bytes: int = 0
    is_requested: bool = False
    is_clock_trusted: bool = True


class CleanPlan(NamedTuple):
    """The work of one clean-up.

    reasons: one for each file to remove, oldest first. held_back: number of files that are due, but
    hold records that must be kept.
    """

    reasons: list[Reason]
    held_back: int


def plan_clean(facts: Facts, retention: Retention) -> CleanPlan:
    """Decide what to remove now; never the last file."""
    disk = facts.disk
    due = facts.is_requested or facts.hour in retention.delete_hours
    due = (due or disk.ratio > retention.clean_ratio) and facts.is_clock_trusted
    excess_bytes = _excess_bytes(facts, retention)
    reasons: list[Reason] = []
    for file in facts.files[:-1][: retention.files_max]:
        if due and file.newest_ms + retention.reserved_ms <= facts.now_ms:
            reasons.append("age")
        elif excess_bytes > 0:
            reasons.append("disk")
        else:
            break
        excess_bytes -= file.end_offset - file.start_offset
    kept = sum(file.end_offset > facts.keep_from for file in facts.files[: len(reasons)])
    count = len(reasons) - kept
    return CleanPlan(reasons[:count], kept)


def _excess_bytes(facts: Facts, retention: Retention) -> int:
    """The number of bytes to remove whatever their age."""
    if not retention.removes_young:
        return 0
    excess_bytes = facts.disk.excess_bytes(retention.force_ratio)
    if facts.wanted_bytes:
        missing_bytes = facts.disk.excess_bytes(retention.refuse_ratio) + facts.wanted_bytes
        excess_bytes = max(excess_bytes, missing_bytes, 1)
    return excess_bytes - facts.pending_bytes


class ClockWatch:
    """Tells whether the wall clock can be trusted for removal by age.

    A jump by days would empty the store, so nothing is removed by age until the clock has kept the
    new time for an hour.
    """

    def __init__(self) -> None:
        self._seen: tuple[int, float] | None = None
        self._trusted_at = -math.inf

    def observe(self, wall_ms: int, steady_s: float) -> int:
        """The clock's jump since the last call, in ms; 0 below ``JUMP_MS``."""
        seen, self._seen = self._seen, (wall_ms, steady_s)
        if seen is None:
            return 0
        jump_ms = round(wall_ms - seen[0] - (steady_s - seen[1]) * 1000)
        if abs(jump_ms) < JUMP_MS:
            return 0
        self._trusted_at = steady_s + TRUST_S
        return jump_ms

    def is_trusted(self, steady_s: float) -> bool:
        """True if the last jump was at least ``TRUST_S`` ago."""
        return steady_s >= self._trusted_at
