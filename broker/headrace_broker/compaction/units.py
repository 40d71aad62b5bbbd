"""Units of a compaction log: where each record is, by queue offset.

Each file of the log has a file of units with the same name and a fixed number of slots. Queue
offsets ascend, with gaps where a run has dropped messages. Used slots come first; then comes an end
unit, or zeros.
Source: docs/store-format.md "Compaction log".
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from headrace_broker.store.log.batch_units import BATCH_UNIT, BATCH_UNIT_BYTES

# The last log record and the last unit of a file that was rolled.
END_RECORD: Final = struct.Struct(">iI")
END_MAGIC: Final = 0xCBD43194
END_UNIT: Final = struct.pack(">qiqqqhii", -1, 0, 0, 0, 0, 0, -1, 0)
_LOG_FILES_MIN: Final = 5


class FileSizes(NamedTuple):
    """Bytes of each log file and of each file of units."""

    log_bytes: int
    units_bytes: int

    @classmethod
    def of(cls, log_setting: int, units_setting: int) -> FileSizes:
        """The sizes for ``compactionMappedFileSize`` and ``compactionCqMappedFileSize``.

        Files of units hold whole units, and a log file is a multiple of them, five at least.
        """
        units_bytes = units_setting // BATCH_UNIT_BYTES * BATCH_UNIT_BYTES
        count, rest = divmod(log_setting, units_bytes)
        if count < _LOG_FILES_MIN:
            count = _LOG_FILES_MIN
        elif not 0 < rest < units_bytes / 2:
            count += 1
        return cls(count * units_bytes, units_bytes)

    @property
    def record_bytes_max(self) -> int:
        """Most bytes of a record: an end mark follows the last one."""
        return self.log_bytes - END_RECORD.size

    @property
    def units_max(self) -> int:
        """Most units of a file: its last slot is for the end unit."""
        return self.units_bytes // BATCH_UNIT_BYTES - 1


class CompactionUnit(NamedTuple):
    """One unit. position: of the record in the compaction log, names of files included."""

    position: int
    size: int
    tags_code: int
    store_timestamp: int
    queue_offset: int
    message_count: int

    @property
    def end(self) -> int:
        """The end of the record in the compaction log."""
        return self.position + self.size

    @property
    def is_used(self) -> bool:
        """True if it stands for a record; the same test as ``used_mask``."""
        is_used = self.position >= 0 and self.size > 0
        return is_used and self.queue_offset >= 0 and self.message_count > 0


def unpack_unit(data: bytes | memoryview, number: int) -> CompactionUnit:
    """The unit in slot ``number``."""
    return CompactionUnit(*BATCH_UNIT.unpack_from(data, number * BATCH_UNIT_BYTES))
