"""What to remove of the log, and whether to take more: decided from plain facts, for the cleaner.

The peer's rules: docs/retention.md.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_broker.store.files.filesystem import DiskUsage
    from headrace_broker.store.settings import Retention

# A clock that is this far from where it should be has jumped; suspending a machine looks the same.
JUMP_MS = 3_600_000
# As long as this nothing is removed by age, so that somebody may look.
TRUST_S = 3600.0

Reason = Literal["age", "disk"]


class LogFile(NamedTuple):
    """newest_ms: when it was last written, or later."""

    start_offset: int
    end_offset: int
    newest_ms: int


class Facts(NamedTuple):
    """What a plan is made from.

    files: of the log, oldest first, all that may go at once and the one after them.
    hour: of local time. keep_from: physical offset that must stay, with all that follows.
    going_bytes: of removed files whose room is not free yet.
    is_out_of_room: a message could not be stored, whatever the file system says of itself.
    is_asked: an administrator wants old files gone now. is_clock_trusted: see ``ClockWatch``.
    was_refusing: whether the last plan said so.
    """

    files: Sequence[LogFile]
    now_ms: int
    hour: int
    disk: DiskUsage
    keep_from: int
    going_bytes: int = 0
    is_out_of_room: bool = False
    is_asked: bool = False
    is_clock_trusted: bool = True
    was_refusing: bool = False


class CleanPlan(NamedTuple):
    """reasons: one for each file to remove, oldest first.

    held_back: files that would go, but hold what must stay.
    """

    reasons: list[Reason]
    held_back: int
    refuses_writes: bool
    disk: DiskUsage


def plan_clean(facts: Facts, retention: Retention) -> CleanPlan:
    """What to remove now. The last file is never removed."""
    disk = facts.disk
    due = facts.is_asked or facts.hour in retention.delete_hours
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
    return CleanPlan(reasons[:count], kept, _refuses(facts, retention), disk)


def _excess_bytes(facts: Facts, retention: Retention) -> int:
    """How much must go whatever its age."""
    if not retention.removes_young:
        return 0
    excess_bytes = facts.disk.excess_bytes(retention.force_ratio)
    if facts.is_out_of_room:
        excess_bytes = max(excess_bytes, 1)
    return excess_bytes - facts.going_bytes


def _refuses(facts: Facts, retention: Retention) -> bool:
    if facts.disk.ratio > retention.refuse_ratio:
        return True
    return facts.was_refusing and facts.disk.ratio > retention.force_ratio


class ClockWatch:
    """Whether the wall clock can be trusted with removing by age.

    A clock that jumps by days would empty the store. It is believed once it has kept the new time
    for an hour.
    """

    def __init__(self) -> None:
        self._seen: tuple[int, float] | None = None
        self._trusted_at = -math.inf

    def look(self, wall_ms: int, steady_s: float) -> int:
        """How far the clock has jumped since the last look, in ms; 0 for what is not worth it."""
        seen, self._seen = self._seen, (wall_ms, steady_s)
        if seen is None:
            return 0
        jump_ms = round(wall_ms - seen[0] - (steady_s - seen[1]) * 1000)
        if abs(jump_ms) < JUMP_MS:
            return 0
        self._trusted_at = steady_s + TRUST_S
        return jump_ms

    def is_trusted(self, steady_s: float) -> bool:
        """Whether the last jump is long enough ago."""
        return steady_s >= self._trusted_at
