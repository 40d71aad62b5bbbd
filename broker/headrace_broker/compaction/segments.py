"""Segments of a compaction log: a file of records with its file of units.

A segment never changes. An append or a roll makes a new ``Segment`` over the same files; a run
makes new files with the names of old ones. So a file is known by name and inode: a reader that
still has the old segment sees the old bytes or is asked to look again, never the new bytes.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from headrace_broker.compaction.units import END_UNIT, CompactionUnit, FileSizes, unpack_unit
from headrace_broker.store.files.file_seal import FileSeal
from headrace_broker.store.files.gallop import gallop
from headrace_broker.store.files.mapped_file import MappedFile
from headrace_broker.store.files.residency import OLD_DATA
from headrace_broker.store.log.batch_units import BATCH_UNIT_BYTES, BATCH_UNIT_DTYPE
from headrace_protocol.errors import NotReady

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files
    from headrace_protocol.columns import Array

COMPACTION_FOLDER: Final = "compaction"
LOG_FOLDER: Final = "compactionLog"
UNITS_FOLDER: Final = "compactionCq"
COMPACTING: Final = "compacting"
REPLICATING: Final = "replicating"


class Folders(NamedTuple):
    """The folders of one compaction log, or of unfinished work below them."""

    log: Path
    units: Path

    @classmethod
    def of(cls, root: Path, topic: str, queue_id: int) -> Folders:
        """Those of a queue in the store ``root``."""
        name, base = f"{topic}/{queue_id}", root / COMPACTION_FOLDER
        return cls(base / LOG_FOLDER / name, base / UNITS_FOLDER / name)

    def below(self, name: str) -> Folders:
        """Those of unfinished work: COMPACTING or REPLICATING."""
        return Folders(self.log / name, self.units / name)

    @property
    def texts(self) -> tuple[str, str]:
        """For another process."""
        return str(self.log), str(self.units)


class SegmentFile(MappedFile):
    """A sparse file that is written without its map.

    The map counts in the store's map budget. It is made from the inode that the segment was opened
    with: where a run has replaced the file, ``map`` raises NotReady and ``pread``
    FileNotFoundError, and the reader takes the current segments instead.
    """

    __slots__ = ("_inode",)

    def __init__(self, path: Path, file_bytes: int, files: Files) -> None:
        super().__init__(path, file_bytes, files)
        self._inode = path.stat().st_ino

    @property
    def max_offset(self) -> int:
        """For the map budget, which then goes by age alone."""
        return 0

    @property
    def map(self) -> Any:
        """As ``MappedFile.map``. Raises NotReady if a run has replaced the file."""
        if self._map is None:
            self.files.map_budget.mapped(self)
            try:
                return super().map
            except FileNotFoundError as error:
                raise look_again() from error
        return self._map

    @contextmanager
    def opened(self) -> Iterator[int]:
        """A descriptor of this very file. Raises FileNotFoundError if a run has replaced it."""
        descriptor = self.files.open(self.path)
        try:
            if os.fstat(descriptor).st_ino != self._inode:
                raise FileNotFoundError(2, "replaced by a run", str(self.path))
            yield descriptor
        finally:
            self.files.close(descriptor)

    _descriptor = opened


def look_again() -> NotReady:
    """The error for a read to be repeated, which then finds the current segments."""
    return NotReady(lambda: None, OLD_DATA)


@dataclass(frozen=True, slots=True)
class Segment:
    """``count`` records and their units; ``log_end`` is the position after the last one.

    first_queue_offset, last_queue_offset: -1 without records.
    is_sealed: never appended to again.
    """

    log: SegmentFile
    units_file: SegmentFile
    count: int
    log_end: int
    first_queue_offset: int
    last_queue_offset: int
    is_sealed: bool

    @property
    def base(self) -> int:
        """The name of both files: where the segment begins in the compaction log."""
        return self.log.start_offset

    @property
    def has_gaps(self) -> bool:
        """True if queue offsets are missing between the first record and the last."""
        return self.last_queue_offset - self.first_queue_offset != self.count - 1

    @property
    def units(self) -> Array:
        """All units, shape (count,), as a view of the map; cold pages wait for the disk.

        Raises NotReady if a run has replaced the file.
        """
        return np.frombuffer(self.units_file.view, BATCH_UNIT_DTYPE, self.count)

    def unit(self, number: int) -> CompactionUnit:
        """One unit, from the map. Raises as ``units``."""
        return unpack_unit(self.units_file.view, number)

    def read_units(self, first: int = 0, count: int | None = None) -> Array:
        """Units as a copy, without the map; for threads. Raises OSError."""
        wanted = min(self.count - first, self.count if count is None else count)
        at, byte_count = first * BATCH_UNIT_BYTES, wanted * BATCH_UNIT_BYTES
        return np.frombuffer(self.units_file.pread(at, byte_count), BATCH_UNIT_DTYPE)

    def records(self, start: int, end: int) -> memoryview:
        """Bytes of the log between two positions in the file, as a view that keeps the map.

        Raises NotReady if a run has replaced the file.
        """
        return self.log.view[start:end]

    def read_records(self, start: int, end: int) -> bytes:
        """The same as a copy, without the map; for threads. Raises OSError."""
        return self.log.pread(start, end - start)

    def unmap(self) -> None:
        """Drop the maps; existing views stay readable."""
        self.log.unmap()
        self.units_file.unmap()

    @property
    def used(self) -> list[tuple[SegmentFile, int]]:
        """Both files with the bytes in use, without end marks."""
        units_bytes = self.count * BATCH_UNIT_BYTES
        return [(self.log, self.log_end), (self.units_file, units_bytes)]

    def add_seals(self) -> Segment:
        """The segment with checksums of both files, for the clean stop; in any thread.

        Raises OSError.
        """
        for file, used_bytes in self.used:
            file.seal = FileSeal.of_written(file.path, used_bytes, file.seal)
        return replace(self, is_sealed=True)

    @classmethod
    def create(cls, folders: Folders, base: int, sizes: FileSizes, fs: Files) -> Segment:
        """An empty segment with new files; no files are left if that fails. Raises OSError."""
        name = f"{base:020d}"
        log = SegmentFile.create(folders.log / name, sizes.log_bytes, fs, 0)
        try:
            units_file = SegmentFile.create(folders.units / name, sizes.units_bytes, fs, 0)
        except OSError:
            with suppress(OSError):
                fs.unlink(log.path)
            raise
        return cls(log, units_file, 0, 0, -1, -1, is_sealed=False)

    @classmethod
    def open(
        cls, folders: Folders, base: int, sizes: FileSizes, fs: Files, *, is_last: bool = False
    ) -> Segment:
        """The segment of existing files of the right length; the units' end is searched for.

        is_last: further records may be appended unless an end unit follows. Raises OSError.
        """
        name = f"{base:020d}"
        log = SegmentFile(folders.log / name, sizes.log_bytes, fs)
        units_file = SegmentFile(folders.units / name, sizes.units_bytes, fs)
        count, has_end = _used_count(units_file)
        is_sealed = has_end or not is_last
        return cls(log, units_file, 0, 0, -1, -1, is_sealed=is_sealed).cut(count)

    def cut(self, count: int) -> Segment:
        """The segment reduced to its first ``count`` units; changes no file. Raises OSError."""
        if not count:
            return replace(self, count=0, log_end=0, first_queue_offset=-1, last_queue_offset=-1)
        with self.units_file.opened() as descriptor:
            first, last = (_read_unit(descriptor, number) for number in (0, count - 1))
        return replace(
            self,
            count=count,
            log_end=last.end - self.base,
            first_queue_offset=first.queue_offset,
            last_queue_offset=last.queue_offset,
        )


def _used_count(file: SegmentFile) -> tuple[int, bool]:
    """The number of leading used units, and whether the end unit follows them.

    Most files hold few units.
    """
    with file.opened() as descriptor:
        slots = file.file_bytes // BATCH_UNIT_BYTES
        count = gallop(0, slots, lambda number: _read_unit(descriptor, number).is_used)
        end = os.pread(descriptor, BATCH_UNIT_BYTES, count * BATCH_UNIT_BYTES)
    return count, end == END_UNIT


def _read_unit(descriptor: int, number: int) -> CompactionUnit:
    at = number * BATCH_UNIT_BYTES
    return unpack_unit(os.pread(descriptor, BATCH_UNIT_BYTES, at), 0)
