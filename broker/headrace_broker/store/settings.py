"""Settings of a store; the defaults are the peer's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from headrace_protocol.message_ids import encode_host

if TYPE_CHECKING:
    from pathlib import Path

# Of the units in queue files: the numpy types and structs of these have their layouts.
UNIT_BYTES = 20
BATCH_UNIT_BYTES = 46
_SECOND_MS = 1000
_MINUTE_MS = 60 * _SECOND_MS
_HOUR_MS = 60 * _MINUTE_MS

DELAY_LEVELS_MS = (
    *(seconds * _SECOND_MS for seconds in (1, 5, 10, 30)),
    *(minutes * _MINUTE_MS for minutes in (*range(1, 11), 20, 30)),
    *(hours * _HOUR_MS for hours in (1, 2)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The rules by which files may be removed; replaceable while the store runs.

    delete_hours: hours of local time in which expired files are removed.
    clean_ratio: above it expired files are removed at any hour.
    force_ratio: above it unexpired files are removed too.
    refuse_ratio: above it messages are refused until usage falls to force_ratio.
    Ratios are disk usage, 0 to 1.
    """

    reserved_ms: int = 72 * _HOUR_MS
    delete_hours: frozenset[int] = frozenset({4})
    files_max: int = 10
    clean_ratio: float = 0.75
    force_ratio: float = 0.85
    refuse_ratio: float = 0.90
    removes_young: bool = True
    removes_unconsumed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Settings of one store. File sizes must be those of its first start; load() checks them."""

    root: Path
    commit_log_file_bytes: int = 1 << 30
    consume_queue_file_bytes: int = 300_000 * UNIT_BYTES
    batch_queue_file_bytes: int = 300_000 * BATCH_UNIT_BYTES
    index_slot_count: int = 5_000_000
    index_entry_count: int = 20_000_000

    store_host: bytes = encode_host("127.0.0.1", 10911)
    body_bytes_max: int = 4 << 20
    delay_levels_ms: tuple[int, ...] = DELAY_LEVELS_MS
    appends_checksums: bool = False

    flush: Literal["async", "sync"] = "async"
    flush_interval_ms: int = 500
    flush_least_bytes: int = 4 * 4096
    flush_thorough_interval_ms: int = 10_000
    queue_flush_interval_ms: int = 1000
    queue_flush_least_bytes: int = 2 * 4096
    queue_flush_thorough_interval_ms: int = 60_000

    ring_rows: int = 1 << 17
    index_tick_ms: int = 100  # each block has a fixed cost of about 0.25 ms
    retention: Retention = Retention()
    clean_interval_ms: int = 10_000

    def __post_init__(self) -> None:
        if self.ring_rows & (self.ring_rows - 1):
            raise ValueError(f"ring_rows {self.ring_rows} is not a power of two")
        for name, unit_bytes in (
            ("consume_queue_file_bytes", UNIT_BYTES),
            ("batch_queue_file_bytes", BATCH_UNIT_BYTES),
        ):
            if (file_bytes := getattr(self, name)) % unit_bytes:
                raise ValueError(f"{name} {file_bytes} is not a multiple of {unit_bytes}")

    def queue_file_bytes(self, *, is_batch: bool) -> int:
        """Size of the files of a queue."""
        return self.batch_queue_file_bytes if is_batch else self.consume_queue_file_bytes
