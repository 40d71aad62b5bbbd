"""A snapshot of a store for the monitor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace_broker.store.followers.following import FollowerStatus
    from headrace_broker.store.retention.cleaner import CleanerStatus


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """A snapshot of the store; offsets are physical."""

    min_offset: int
    max_offset: int
    flushed_offset: int
    dispatched_offset: int
    behind_rows: dict[str, int]  # by taker
    ring_fill: float
    slow_taker: str | None
    longest_flush_ms: float
    disk_ratio: float
    disk_used_bytes: int
    refusal: str | None
    refused_since_ms: int  # while there is a refusal
    queue_count: int
    cleaner: CleanerStatus
    followers: tuple[FollowerStatus, ...]
