"""Pages of a map that are in memory, and the lane whose threads read missing ones."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Final

from headrace_protocol.errors import Lane

# Requests that wait for data to be read from disk or compared with its seal. Several threads,
# because disks serve concurrent reads faster than sequential ones.
OLD_DATA: Final = Lane("old messages", threads=4)

_mincore = ctypes.CDLL(None, use_errno=True).mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


def is_resident(address: int, byte_count: int) -> bool:
    """True if all pages of a mapping are in memory."""
    pages = ctypes.create_string_buffer(-(-byte_count // mmap.PAGESIZE))
    if _mincore(address, byte_count, pages):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return b"\0" not in pages.raw[: len(pages)]
