"""Finds the segments of a compaction log at a start, also after a crash."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace_broker.compaction.segments import Folders, Segment
from headrace_broker.compaction.units import unpack_unit
from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.log.batch_units import BATCH_UNIT_BYTES, BATCH_UNIT_DTYPE, used_mask
from headrace_broker.store.log.log_blocks import RECORD_MAGICS, stated_head

if TYPE_CHECKING:
    from headrace_broker.compaction.units import FileSizes
    from headrace_broker.store.files.file_seal import FileSeal
    from headrace_broker.store.files.filesystem import Files

QUEUE_OFFSET_END: Final = 28  # of the field in a record
_AFTER_UNITS: Final = 128  # units looked at after the end
FindSeal = Callable[[Path], "FileSeal | None"]


class Opened(NamedTuple):
    """The files found. segments: those whose units are whole, in order.

    rest: the other files, from the first damaged one on; they may hold records past the segments.
    path, problem: what is wrong with the first one; "" if nothing is.
    lost_from: the first queue offset that it has or had; very large if it never had any.
    """

    segments: tuple[Segment, ...]
    rest: list[Path]
    path: Path
    problem: str
    lost_from: int


def open_segments(
    folders: Folders, sizes: FileSizes, fs: Files, find_seal: FindSeal, *, is_clean: bool
) -> Opened:
    """The segments of a queue. Removes files without records; changes no other.

    Raises OSError; StoreFormatError for a file that does not belong here.
    """
    names = _Names(folders, sizes, fs)
    found: list[Segment] = []
    for base in names.paired:
        segment = Segment.open(folders, base, sizes, fs, is_last=base == names.last)
        if not segment.count and not any(segment.log.pread(0, 8)):
            for file in (segment.log, segment.units_file):
                fs.unlink(file.path)
            continue
        for file in (segment.log, segment.units_file):
            file.seal = find_seal(file.path)
        found.append(segment)
    opened = _whole(found, folders, is_clean=is_clean)
    rest = [*opened.rest, *names.rest]
    if opened.problem or not names.problem:
        return opened._replace(rest=rest)
    lost_from = _stated_offset(folders, names.rest[0].name)
    return Opened(opened.segments, rest, names.rest[0], names.problem, lost_from)


def _whole(found: list[Segment], folders: Folders, *, is_clean: bool) -> Opened:
    """Divide segments at the first damage. Units with a seal were whole at the clean stop."""
    end = -1
    for number, segment in enumerate(found):
        seal = segment.units_file.seal
        used_bytes = segment.count * BATCH_UNIT_BYTES
        # Another broker may have appended without changing the file's time.
        has_end = is_end(segment) and (seal is None or used_bytes >= seal.used_bytes)
        is_known = is_clean or (seal is not None and used_bytes == seal.used_bytes)
        count = segment.count if is_known else whole_count(segment)
        is_after = segment.first_queue_offset > end
        if not (has_end and is_after and count == segment.count):
            whole = [replace(segment.cut(count), is_sealed=False)] if is_after and count else []
            after = found[number + len(whole) :]
            return Opened(
                (*found[:number], *whole),
                [file.path for each in after for file in (each.log, each.units_file)],
                segment.units_file.path,
                f"its units are damaged from number {count if whole else 0} on",
                whole[0].last_queue_offset + 1
                if whole
                else _stated_offset(folders, segment.log.path.name),
            )
        end = segment.last_queue_offset
    return Opened(tuple(found), [], folders.units, "", sys.maxsize)


def _stated_offset(folders: Folders, name: str) -> int:
    """The queue offset in the first record or unit; very large if nothing was written there."""
    log, units = folders.log / name, folders.units / name
    head = _head(log, QUEUE_OFFSET_END)
    if len(head) == QUEUE_OFFSET_END and stated_head(head)[1] in RECORD_MAGICS:
        return int.from_bytes(head[-8:], "big", signed=True)
    unit = _head(units, BATCH_UNIT_BYTES)
    if len(unit) == BATCH_UNIT_BYTES and (first := unpack_unit(unit, 0)).is_used:
        return first.queue_offset
    return sys.maxsize


def _head(path: Path, byte_count: int) -> bytes:
    if not path.exists():
        return b""
    with path.open("rb") as file:
        return file.read(byte_count)


def is_end(segment: Segment) -> bool:
    """True if no unit follows the last one, as after one that is damaged."""
    start = (segment.count + 1) * BATCH_UNIT_BYTES
    data = segment.units_file.pread(start, _AFTER_UNITS * BATCH_UNIT_BYTES)
    return not used_mask(np.frombuffer(data, BATCH_UNIT_DTYPE)).any()


def whole_count(segment: Segment) -> int:
    """The number of leading whole units: records back to back, queue offsets that ascend."""
    units = segment.read_units()
    sizes = units["size"].astype(np.int64)
    starts = segment.base + np.cumsum(sizes) - sizes
    offsets = units["queue_offset"].astype(np.int64)
    is_whole = used_mask(units) & (units["physical_offset"] == starts)
    is_whole &= np.diff(offsets, prepend=-1) > 0
    is_whole &= starts + sizes <= segment.log.end_offset
    return len(units) if is_whole.all() else int(is_whole.argmin())


# --- names and lengths ---------------------------------------------------------------------


class _Names:
    """The names of the segments up to the first that lacks one of its files.

    A new segment's two names may reach the disk one by one, and so may those of a removed one; then
    neither was synced as a whole.

    paired: the bases before it; last: the greatest of them. problem: "" if nothing is missing.
    rest: the files from there on.
    """

    def __init__(self, folders: Folders, sizes: FileSizes, fs: Files) -> None:
        logs = _named_files(folders.log, sizes.log_bytes, "compactionMappedFileSize", fs)
        units = _named_files(folders.units, sizes.units_bytes, "compactionCqMappedFileSize", fs)
        first = min(logs.keys() ^ units.keys(), default=None)
        self.paired = sorted(int(name) for name in logs if first is None or name < first)
        self.last = self.paired[-1] if self.paired else -1
        self.problem, self.rest = "", list[Path]()
        if first is not None:
            missing = (folders.units if first in logs else folders.log) / first
            self.problem = f"{missing} is missing"
            found = [*logs.values(), *units.values()]
            self.rest = sorted((p for p in found if p.name >= first), key=lambda p: p.name)


def _named_files(folder: Path, file_bytes: int, setting: str, fs: Files) -> dict[str, Path]:
    """The files of a folder by name, all of them of the right length. Raises StoreFormatError."""
    found = {}
    paths = sorted(folder.iterdir()) if folder.exists() else []
    for path in paths:
        if path.is_dir():
            continue
        name, length = path.name, path.stat().st_size
        if not (len(name) == 20 and name.isascii() and name.isdigit()):
            raise StoreFormatError(
                path,
                "no file of a compaction log has such a name",
                "move it out of the store's directory",
            )
        if not length:  # a power cut came before its length was on disk
            _set_length(path, file_bytes, fs)
        elif length != file_bytes:
            raise StoreFormatError(
                path,
                f"has {length} bytes, but {setting} makes files of {file_bytes}",
                f"set {setting} to the size the compaction log was made with",
            )
        found[name] = path
    return found


def _set_length(path: Path, file_bytes: int, fs: Files) -> None:
    descriptor = fs.open(path)
    try:
        fs.truncate(descriptor, file_bytes)
    finally:
        fs.close(descriptor)
