"""Reads of old bytes in any thread, by ``pread``: unlike a page fault it lets other threads run."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace_protocol.columns import UNIT_DTYPE
from headrace_protocol.message import BORN_HOST_V6, MAGIC_V1, MAGIC_V2

if TYPE_CHECKING:
    from headrace_broker.store.files.filesystem import Files
    from headrace_broker.store.files.mapped_file_queue import MappedFileQueue
    from headrace_protocol.columns import Array

_HEAD = struct.Struct(">4xi20xqi8x")  # magic, physical offset, sysFlag, born timestamp
_HEAD_BYTES: Final = 80
_STORE_TIME_AT: Final = _HEAD.size + 8  # after an IPv4 born host
_V6_MORE: Final = 12


class ColdFiles:
    """A snapshot of a queue of mapped files; a file deleted since then reads as empty."""

    def __init__(self, files: MappedFileQueue, unit_dtype: np.dtype[Any] = UNIT_DTYPE) -> None:
        """unit_dtype: of the units in a queue's files, which begin as those of ConsumeQueues."""
        self._unit_dtype = unit_dtype
        self._fs: Files = files.fs
        self.file_bytes = files.file_bytes
        self._min_offset = files.min_offset
        self._paths = [file.path for file in files.files]

    def read(self, offset: int, byte_count: int) -> bytes:
        """Up to ``byte_count`` bytes, fewer at the end of a file. Raises OSError."""
        index, position = divmod(offset - self._min_offset, self.file_bytes)
        if not 0 <= index < len(self._paths):
            return b""
        try:
            descriptor = self._fs.open(self._paths[index], os.O_RDONLY)
        except FileNotFoundError:
            return b""
        try:
            return os.pread(descriptor, byte_count, position)
        finally:
            self._fs.close(descriptor)

    def units(self, number: int, count: int) -> Array:
        """Up to ``count`` units of a queue, fewer at the end of a file. Raises OSError."""
        unit_bytes = self._unit_dtype.itemsize
        data = self.read(number * unit_bytes, count * unit_bytes)
        return np.frombuffer(data, self._unit_dtype, len(data) // unit_bytes)

    def physical_offset(self, number: int) -> int:
        """The physical offset in a unit of a queue; -1 if the unit is gone. Raises OSError."""
        data = self.read(number * self._unit_dtype.itemsize, 8)
        return int.from_bytes(data, "big", signed=True) if data else -1

    def store_time_ms(self, physical_offset: int) -> int | None:
        """Store time of the record at an offset; None without a record. Raises OSError."""
        head = self.read(physical_offset, _HEAD_BYTES)
        if len(head) < _HEAD_BYTES:
            return None
        magic, stated_offset, sys_flag = _HEAD.unpack_from(head)
        if magic not in {MAGIC_V1, MAGIC_V2} or stated_offset != physical_offset:
            return None
        at = _STORE_TIME_AT + (_V6_MORE if sys_flag & BORN_HOST_V6 else 0)
        return int.from_bytes(head[at : at + 8], "big", signed=True)
