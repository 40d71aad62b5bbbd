"""The checkpoint: how far each part of the store is on disk, for a start after a crash."""

from __future__ import annotations

import os
import struct
import zlib
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace_broker.store.files.filesystem import read_file

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files

CHECKPOINT_BYTES: Final = 4096
INDEX_MARK_NAME: Final = "headrace.indexmark"
_VALUES = struct.Struct(">6q")
_MARK = struct.Struct(">17sqqq")
_CRC = struct.Struct(">I")


class Checkpoint(NamedTuple):
    """The six values of the checkpoint file; times are store timestamps of records, in ms."""

    physic_msg_timestamp: int = 0
    logics_msg_timestamp: int = 0
    index_msg_timestamp: int = 0
    master_flushed_offset: int = 0
    confirm_physical_offset: int = 0
    logics_physical_offset: int = 0

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """The stored values; zeros if the file is missing or truncated."""
        if not path.exists():
            return cls()
        data = read_file(path)[: _VALUES.size]
        return cls(*_VALUES.unpack(data)) if len(data) == _VALUES.size else cls()

    def save(self, path: Path, fs: Files) -> None:
        """Write the values in place (one sector) and sync. Raises OSError."""
        _write_in_place(path, _VALUES.pack(*self), CHECKPOINT_BYTES, fs)


class IndexMark(NamedTuple):
    """How much of the index is on disk; a file of our own, which the peer ignores.

    After a crash the peer deletes an unfinished index file with all its entries; the mark lets us
    keep those that are on disk.

    file_name, index_count, end_timestamp: the newest index file and where its entries end; ""
    without files. last_seen: physical offset of the newest indexed record, with or without keys;
    -1 if unknown.
    """

    file_name: str
    index_count: int
    end_timestamp: int
    last_seen: int

    @classmethod
    def load(cls, path: Path) -> IndexMark | None:
        """The stored values; None if the file is missing or damaged."""
        if not path.exists():
            return None
        data = read_file(path)
        if len(data) != _MARK.size + _CRC.size:
            return None
        name, *numbers = _MARK.unpack_from(data)
        if _CRC.unpack_from(data, _MARK.size)[0] != zlib.crc32(data[: _MARK.size]):
            return None
        return cls(name.rstrip(b"\0").decode(), *numbers)

    def save(self, path: Path, fs: Files) -> None:
        """Write the values in place and sync. Raises OSError."""
        name, *numbers = self
        data = _MARK.pack(name.encode(), *numbers)
        data += _CRC.pack(zlib.crc32(data))
        _write_in_place(path, data, len(data), fs)


def _write_in_place(path: Path, data: bytes, byte_count: int, fs: Files) -> None:
    fs.reserve.save(lambda: _write(path, data, byte_count, fs))


def _write(path: Path, data: bytes, byte_count: int, fs: Files) -> None:
    descriptor = fs.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fs.truncate(descriptor, byte_count)
        fs.write(descriptor, data, 0)
        fs.fsync(descriptor)
    finally:
        fs.close(descriptor)
