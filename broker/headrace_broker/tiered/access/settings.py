"""Settings of the tier; ``BrokerConfig.tier_settings`` has the defaults."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_broker.cold.reader import ReadAhead
    from headrace_broker.tiered.container.flat_queue import SegmentLimits
    from headrace_broker.tiered.container.index_file import IndexSize
    from headrace_protocol.tier.location import Location
    from headrace_protocol.tier.paths import Home


class StorageLevel(enum.Enum):
    """Messages that are read from the tier, of those that it has.

    NOT_IN_DISK: those that have left the local log. NOT_IN_MEM: also those that would have to be
    read from the local disk. FORCE: all.
    """

    DISABLE = enum.auto()
    NOT_IN_DISK = enum.auto()
    NOT_IN_MEM = enum.auto()
    FORCE = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """Settings of one tier.

    root: the store's directory, for metadata and open index files. folder, bucket: with the
    messages; without one, they are in memory. keeps_objects: True for immutable objects of many
    queues.
    commit_ms, commit_count, commit_bytes: messages of a queue are uploaded once they have waited so
    long, or once so many of them or so many bytes wait.
    reserved_ms: age at which messages expire. deletes: True if they do. clean_ms: time between
    clean-ups.
    """

    root: Path
    folder: Path | None
    bucket: Location | None
    keeps_objects: bool
    home: Home
    level: StorageLevel
    limits: SegmentLimits
    index_size: IndexSize
    commit_ms: int
    commit_count: int
    commit_bytes: int
    reserved_ms: int
    deletes: bool
    clean_ms: int
    read_ahead: ReadAhead

    @property
    def is_lasting(self) -> bool:
        """True if the messages outlive the broker."""
        return self.folder is not None or self.bucket is not None
