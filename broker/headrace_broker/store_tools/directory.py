"""A store directory that no broker has open."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from headrace_broker.store.errors import StoreError, StoreFormatError
from headrace_broker.store.files.filesystem import Files
from headrace_broker.store.index.index_file import ENTRY_BYTES, HEADER_BYTES, SLOT_BYTES
from headrace_broker.store.integrity.lock import StoreLock
from headrace_broker.store.queues.batch_queue import QUEUE_KINDS, BatchConsumeQueue
from headrace_broker.store.queues.consume_queue import ConsumeQueue
from headrace_broker.store.settings import StoreSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

# Progress: called with the number of bytes processed since the last call.
Advance = Callable[[int], None]

_BLOCK_BYTES: Final = 512  # what st_blocks counts
_NAMES: Final = frozenset(("commitlog", "consumequeue", "config", "checkpoint", "index"))


class TopicNotFound(StoreError):
    """A topic has no queue in a store."""

    def __init__(self, root: Path, topic: str) -> None:
        super().__init__(
            f"{root} has no queue of topic {topic}: headrace store stat lists its topics"
        )
        self.topic = topic


@dataclass(frozen=True, slots=True)
class StoreDirectory:
    """A store's path and the file sizes it was created with."""

    settings: StoreSettings
    fs: Files

    @property
    def root(self) -> Path:
        """The path of the directory."""
        return self.settings.root

    @property
    def log_paths(self) -> list[Path]:
        """The files of the log, oldest first."""
        return numbered_files(self.root / "commitlog")

    @property
    def log_bytes(self) -> int:
        """Length of the log's files, holes included."""
        return sum(path.stat().st_size for path in self.log_paths)

    @property
    def queue_paths(self) -> list[Path]:
        """The folders of the queues: TOPIC/QUEUE_ID."""
        found = [path for kind in QUEUE_KINDS for path in (self.root / kind.folder).glob("*/*")]
        return sorted(path for path in found if path.is_dir() and path.name.isdigit())

    @property
    def batch_topics(self) -> frozenset[str]:
        """The topics that have batch queues."""
        folder = BatchConsumeQueue.folder
        paths = self.queue_paths
        return frozenset(path.parent.name for path in paths if path.parts[-3] == folder)

    def check_topics(self, topics: Iterable[str]) -> None:
        """Raise TopicNotFound for the first topic without a queue."""
        known = {folder.parent.name for folder in self.queue_paths}
        for topic in topics:
            if topic not in known:
                raise TopicNotFound(self.root, topic)

    @property
    def index_paths(self) -> list[Path]:
        """The index files, oldest first."""
        return sorted(path for path in (self.root / "index").glob("*") if path.is_file())

    @property
    def is_clean(self) -> bool:
        """True if the last broker stopped cleanly."""
        return not (self.root / "abort").exists()


@contextmanager
def open_directory(root: Path, sizes: StoreSettings | None = None) -> Iterator[StoreDirectory]:
    """Lock a store for the duration of the block.

    sizes: file sizes and delay levels as configured; by default derived from the existing files.

    Raises FileNotFoundError; StoreFormatError if it is no store; StoreLocked while a broker runs on
    it.
    """
    if not root.exists():
        raise FileNotFoundError(2, "no such directory", str(root))
    if not root.is_dir() or not _NAMES & {path.name for path in root.iterdir()}:
        raise StoreFormatError(root, "is no store", "name the directory of a store")
    lock = StoreLock(root)
    lock.acquire()
    try:
        settings = replace(sizes, root=root) if sizes else _sizes_found(root)
        yield StoreDirectory(settings, Files())
    finally:
        lock.release()


def numbered_files(folder: Path) -> list[Path]:
    """The non-empty files named by their first offset, in order."""
    return sorted(p for p in folder.glob("*") if is_numbered(p) and p.stat().st_size)


def is_numbered(path: Path) -> bool:
    """True if a file's name is 20 digits."""
    return path.is_file() and len(path.name) == 20 and path.name.isascii() and path.name.isdigit()


def disk_bytes(path: Path) -> int:
    """Bytes of the blocks that a file has on disk, used or allocated ahead."""
    return path.stat().st_blocks * _BLOCK_BYTES


def data_ranges(path: Path) -> list[tuple[int, int]]:
    """Ranges of a file outside holes; everything else is zero."""
    ranges = []
    with path.open("rb") as file:
        position, length = 0, path.stat().st_size
        while position < length:
            try:
                start = os.lseek(file.fileno(), position, os.SEEK_DATA)
            except OSError:  # ENXIO: only a hole is left
                break
            position = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            ranges.append((start, position))
    return ranges


def log_file_bytes(root: Path, default: int) -> int:
    """Length of a store's log files; ``default`` if there are none yet."""
    return usual_length(numbered_files(root / "commitlog"), default)


def _sizes_found(root: Path) -> StoreSettings:
    default = StoreSettings(root=root)
    log_bytes = log_file_bytes(root, default.commit_log_file_bytes)
    _check_index_size(default)
    return replace(
        default,
        commit_log_file_bytes=log_bytes,
        consume_queue_file_bytes=_queue_bytes(default, ConsumeQueue),
        batch_queue_file_bytes=_queue_bytes(default, BatchConsumeQueue),
    )


def _queue_bytes(default: StoreSettings, kind: type[ConsumeQueue]) -> int:
    """Length of the files of one kind of queues, in whole units."""
    files = (path for path in (default.root / kind.folder).glob("*/*/*") if is_numbered(path))
    length = usual_length(files, default.queue_file_bytes(is_batch=kind.is_batch))
    return max(length // kind.unit_bytes, 1) * kind.unit_bytes


def usual_length(paths: Iterable[Path], default: int) -> int:
    """The most frequent length of files; ``default`` without any."""
    lengths = Counter(path.stat().st_size for path in paths)
    return max(lengths, key=lengths.__getitem__) if lengths else default


def _check_index_size(default: StoreSettings) -> None:
    """Raise StoreFormatError unless the index files have the default size.

    The numbers of slots and entries do not follow from a file's length.
    """
    paths = [path for path in (default.root / "index").glob("*") if path.is_file()]
    slots_bytes = default.index_slot_count * SLOT_BYTES
    file_bytes = HEADER_BYTES + slots_bytes + default.index_entry_count * ENTRY_BYTES
    if usual_length(paths, file_bytes) != file_bytes:
        raise StoreFormatError(
            paths[0],
            f"has {paths[0].stat().st_size} bytes, not the default, so its numbers of slots and "
            "entries are unknown",
            "pass the broker's settings with --config",
        )
