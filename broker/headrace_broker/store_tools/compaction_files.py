"""The compaction logs of a store directory that no broker has open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace_broker.compaction.segments import (
    COMPACTION_FOLDER,
    LOG_FOLDER,
    UNITS_FOLDER,
    Folders,
    Segment,
)
from headrace_broker.compaction.units import FileSizes
from headrace_broker.store_tools.directory import is_numbered, usual_length
from headrace_protocol.columns import RecordColumns
from headrace_protocol.errors import CorruptRecord

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headrace_broker.store_tools.directory import StoreDirectory
    from headrace_protocol.columns import Array

_BLOCK_BYTES: Final = 4 << 20


class CompactionQueue(NamedTuple):
    """A queue with a compaction log, and the sizes of all files of compaction logs."""

    topic: str
    queue_id: int
    folders: Folders
    sizes: FileSizes

    def segments(self, directory: StoreDirectory) -> list[Segment]:
        """Those with both files of the right length, by name. Raises OSError."""
        logs, units = (
            {path.name for path in folder.glob("*") if _is_whole(path, file_bytes)}
            for folder, file_bytes in zip(self.folders, self.sizes, strict=True)
        )
        return [
            Segment.open(self.folders, int(name), self.sizes, directory.fs)
            for name in sorted(logs & units)
        ]


def _is_whole(path: Path, file_bytes: int) -> bool:
    return is_numbered(path) and path.stat().st_size == file_bytes


def compaction_queues(directory: StoreDirectory) -> list[CompactionQueue]:
    """All queues with files of a compaction log, whose sizes are derived from the files."""
    base = directory.root / COMPACTION_FOLDER
    trees = base / LOG_FOLDER, base / UNITS_FOLDER
    names = {
        (folder.parent.name, int(folder.name))
        for tree in trees
        for folder in tree.glob("*/*")
        if folder.is_dir() and folder.name.isdigit()
    }
    lengths = [usual_length(filter(is_numbered, tree.glob("*/*/*")), 0) for tree in trees]
    sizes = FileSizes(*lengths)
    return [
        CompactionQueue(topic, queue_id, Folders.of(directory.root, topic, queue_id), sizes)
        for topic, queue_id in sorted(names)
    ]


def record_blocks(segment: Segment) -> Iterator[tuple[Array, RecordColumns]]:
    """The units of a segment with their records, whose body CRCs are checked, some MiB at a time.

    Raises OSError; CorruptRecord where there is no whole record, at its position in the file.
    """
    units = segment.read_units()
    sizes = units["size"].astype(np.int64)
    starts = units["physical_offset"].astype(np.int64) - segment.base
    ends = np.cumsum(sizes)
    first = 0
    while first < len(units):
        limit = int(ends[first] - sizes[first]) + _BLOCK_BYTES
        end = max(int(np.searchsorted(ends, limit, "right")), first + 1)
        part = slice(first, end)
        begin = int(starts[first])
        data = segment.read_records(begin, int((starts[part] + sizes[part]).max()))
        try:
            records = RecordColumns(data, starts[part] - begin, sizes[part])
            records.check_bodies()
        except CorruptRecord as error:
            raise CorruptRecord(begin + error.position, error.reason) from error
        yield units[part], records
        first = end
