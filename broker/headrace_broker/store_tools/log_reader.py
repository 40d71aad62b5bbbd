"""Reads a whole log as blocks of checked records and damage."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import numpy as np

from headrace_broker.store.log.log_blocks import RECORD_MAGICS, LogBlock, checked, stated_head, walk
from headrace_protocol.message import MAGIC_BLANK, RECORD_BYTES_MIN

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from headrace_broker.store_tools.directory import Advance

BLOCK_BYTES: Final = 4 << 20
# Largest record considered possible while searching damaged bytes for one.
RECORD_BYTES_MAX: Final = 32 << 20
_MAGIC_START: Final = b"\xda\xa3\x20"
_HEAD = struct.Struct(">ii20xq")  # size, magic, physical offset
_ZEROS: Final = bytes(BLOCK_BYTES)


class LogDamage(NamedTuple):
    """A range of physical offsets without a valid record.

    is_tail: only zeros follow.
    """

    start: int
    end: int
    reason: str
    is_tail: bool


class LogReader:
    """Reads the files of a log from the start. end_offset: the end of the last record so far."""

    def __init__(self, paths: Sequence[Path], file_bytes: int, advance: Advance) -> None:
        """paths: in order, all of one length."""
        self.end_offset = int(paths[0].name) if paths else 0
        self._paths = paths
        self._file_bytes = file_bytes
        self._advance = advance

    def __iter__(self) -> Iterator[LogBlock | LogDamage]:
        """Blocks and damage in order; adjacent damage is one piece, even across files."""
        waiting: LogDamage | None = None
        for found in self._all():
            if isinstance(found, LogDamage):
                waiting = _join(waiting, found)
                continue
            if waiting:
                yield waiting
                waiting = None
            self.end_offset = found.end_offset
            yield found
        if waiting:
            yield waiting._replace(is_tail=True)

    def _all(self) -> Iterator[LogBlock | LogDamage]:
        for path in self._paths:
            with _LogFile(path, self._file_bytes, self._advance) as file:
                yield from file.read()


def _join(before: LogDamage | None, damage: LogDamage) -> LogDamage:
    return damage if before is None else before._replace(end=damage.end)


class _LogFile:
    def __init__(self, path: Path, file_bytes: int, advance: Advance) -> None:
        self._start = int(path.name)
        self._end = min(file_bytes, path.stat().st_size)
        self._path = path
        self._advance = advance
        self._advanced = 0

    def __enter__(self) -> Self:
        self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def read(self) -> Iterator[LogBlock | LogDamage]:
        """Blocks and damage; ``advance`` gets the file's whole length, with what is not in use."""
        for found in self._read():
            yield found
            self._advance_to(found.end_offset if isinstance(found, LogBlock) else found.end)
        self._advance_to(self._start + self._end)

    def _advance_to(self, offset: int) -> None:
        self._advance(offset - self._start - self._advanced)
        self._advanced = offset - self._start

    def _read(self) -> Iterator[LogBlock | LogDamage]:
        position, block_bytes = 0, BLOCK_BYTES
        while position < self._end:
            data = os.pread(self._descriptor, min(block_bytes, self._end - position), position)
            starts, end = walk(data)
            if len(starts):
                block, end, reason = checked(data, starts, end, self._start + position)
                if block:
                    yield block
                if reason:
                    bad_end = end + int.from_bytes(data[end : end + 4], "big")
                    yield self._damage(position + end, position + bad_end, reason)
                    end = bad_end
                position, block_bytes = position + end, BLOCK_BYTES
                continue
            size, magic = stated_head(data)
            remaining = self._end - position
            if magic in RECORD_MAGICS and len(data) < size <= min(remaining, RECORD_BYTES_MAX):
                block_bytes = size
                continue
            if magic == MAGIC_BLANK and size == remaining:
                return
            data_end = self._data_end(position)
            if data_end == position:
                return
            following = self._next_record(position) or data_end
            yield self._damage(position, following, _reason(size, magic, remaining))
            position = following

    def _damage(self, start: int, end: int, reason: str) -> LogDamage:
        return LogDamage(self._start + start, self._start + end, reason, is_tail=False)

    def _next_record(self, position: int) -> int | None:
        """The position of the next whole record past damage; None without one in this file."""
        at = self._data_from(position + 1)
        while at < self._end:
            data = os.pread(self._descriptor, BLOCK_BYTES, at)
            found = data.find(_MAGIC_START)
            while found >= 0:
                if found >= 4 and self._is_record(at + found - 4, position):
                    return at + found - 4
                found = data.find(_MAGIC_START, found + 1)
            at = self._data_from(at + max(len(data) - RECORD_BYTES_MIN, 1))
        return None

    def _is_record(self, position: int, after: int) -> bool:
        head = os.pread(self._descriptor, _HEAD.size, position)
        if position <= after or len(head) < _HEAD.size:
            return False
        size, magic, physical_offset = _HEAD.unpack(head)
        if magic not in RECORD_MAGICS or physical_offset != self._start + position:
            return False
        if not RECORD_BYTES_MIN <= size <= min(self._end - position, RECORD_BYTES_MAX):
            return False
        data = os.pread(self._descriptor, size, position)
        block, _, _ = checked(data, np.zeros(1, np.int64), size, physical_offset)
        return block is not None

    def _data_from(self, position: int) -> int:
        """The next position outside a hole; the file's end if there is none."""
        try:
            return os.lseek(self._descriptor, position, os.SEEK_DATA)
        except OSError:  # ENXIO
            return self._end

    def _data_end(self, position: int) -> int:
        """The position just past the last nonzero byte; ``position`` if only zeros follow."""
        end = position
        at = self._data_from(position)
        while at < self._end:
            data = os.pread(self._descriptor, min(BLOCK_BYTES, self._end - at), at)
            if data != _ZEROS[: len(data)]:
                end = at + len(data.rstrip(b"\0"))
            at = self._data_from(at + len(data))
        return end


def _reason(size: int, magic: int, remaining: int) -> str:
    if magic not in RECORD_MAGICS:
        return f"magic number {magic & 0xFFFFFFFF:08X} is not that of a record"
    return f"size {size} is impossible for a record where {remaining} bytes are left"
