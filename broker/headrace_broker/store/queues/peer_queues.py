"""Queues that only Apache RocketMQ writes: ``batchconsumequeue/``.

Its broker adds records there just after they are in the log, and makes up for missing ones after a
crash. Once this broker has stopped cleanly, the peer assumes that nothing is missing, so records
that its own crash left out would never be delivered. A start after a crash therefore checks these
queues before it changes anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace_broker.store.errors import StoreFormatError

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files
    from headrace_broker.store.log.log_blocks import LogBlock

BATCH_FOLDER: Final = "batchconsumequeue"
# Source: docs/store-format.md "Batch unit".
BATCH_UNIT_DTYPE: Final = np.dtype(
    [
        ("physical_offset", ">i8"),
        ("size", ">i4"),
        ("tags_code", ">i8"),
        ("store_timestamp", ">i8"),
        ("queue_offset", ">i8"),
        ("count", ">i2"),
        ("compacted_offset", ">i4"),
        ("reserved", ">i4"),
    ]
)


class _PeerQueue(NamedTuple):
    """A queue's folder and the physical offset in its newest unit, -1 without units."""

    folder: Path
    physical_offset: int


class PeerQueues:
    """The peer's queues of a store directory, for comparison with its log."""

    def __init__(self, root: Path) -> None:
        """Read the newest unit of each queue."""
        self._queues: dict[tuple[bytes, int], _PeerQueue] = {}
        for folder in (root / BATCH_FOLDER).glob("*/*"):
            if folder.name.isdigit() and folder.is_dir():
                key = folder.parent.name.encode(), int(folder.name)
                self._queues[key] = _PeerQueue(folder, _newest_offset(folder))

    def __bool__(self) -> bool:
        return bool(self._queues)

    def check(self, block: LogBlock) -> None:
        """Raise StoreFormatError if a record lacks its unit."""
        columns = block.columns
        names, topics = columns.topics
        for (topic, queue_id), queue in self._queues.items():
            if topic in names:
                is_here = (topics == names.index(topic)) & (columns.queue_id == queue_id)
                offset = columns.physical_offset[is_here].max(initial=-1)
                if offset > queue.physical_offset:
                    problem = f"lacks the message at physical offset {offset}"
                    raise _unfinished(queue.folder, problem)

    def check_end(self, log_end: int) -> None:
        """Raise StoreFormatError if a unit points past the log's end, where new records will be."""
        for queue in self._queues.values():
            if queue.physical_offset >= log_end:
                raise _unfinished(
                    queue.folder, f"points to {queue.physical_offset}, the log ends at {log_end}"
                )

    def sync(self, files: Files) -> None:
        """Bring the newest files to disk; a killed peer may not have. Raises OSError."""
        for queue in self._queues.values():
            for path in _files_of(queue.folder)[-2:]:
                files.sync(path)


def _files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def _newest_offset(folder: Path) -> int:
    for path in reversed(_files_of(folder)):
        count = path.stat().st_size // BATCH_UNIT_DTYPE.itemsize
        units = np.fromfile(path, BATCH_UNIT_DTYPE, count)
        used = np.flatnonzero(units["size"] > 0)
        if len(used):
            return int(units[used[-1]]["physical_offset"])
    return -1


def _unfinished(folder: Path, problem: str) -> StoreFormatError:
    return StoreFormatError(
        folder,
        f"Apache RocketMQ crashed before it had finished writing this queue: it {problem}",
        "nothing was changed: start Apache's broker on this store once and stop it cleanly, or "
        "remove the folder if the topic is no longer of this kind",
    )
