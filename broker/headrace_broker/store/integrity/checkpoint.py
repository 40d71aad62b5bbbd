"""The checkpoint: how far each part of the store is on disk, for a start after a crash."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from headrace_broker.store.files.filesystem import read_file
from headrace_broker.store.files.positions import FOLDER, PositionFile

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files

CHECKPOINT_BYTES: Final = 4096
INDEX_MARK_NAME: Final = "index.json"
_VALUES = struct.Struct(">6q")


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
        """Replace the file. Raises OSError."""
        fs.replace(path, _VALUES.pack(*self).ljust(CHECKPOINT_BYTES, b"\0"))


class IndexMark(msgspec.Struct, frozen=True, rename="camel"):
    """The part of the index that is on disk: ``positions/index.json``.

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
    def file(cls, root: Path, fs: Files) -> PositionFile[IndexMark]:
        """The file of a store. An older mark would count entries that later ones have replaced."""
        return PositionFile(root / FOLDER / INDEX_MARK_NAME, cls, fs, has_backup=False)
