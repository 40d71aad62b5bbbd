"""Old data that may have to come from the disk: found out beforehand, and read in a thread.

A page fault holds the interpreter's lock, and sendmsg of a cold range the loop, for as long as the
disk takes. What was written lately is taken for cached without a look.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Final

from headrace_protocol.errors import NotReady

if TYPE_CHECKING:
    from headrace_broker.store.files import Files
    from headrace_broker.store.mapped_file import MappedFile

HOT_BYTES: Final = 256 << 20
CHUNK_BYTES: Final = 1 << 20
# How long a look at a chunk holds good; the kernel keeps what was just read for longer.
LOOK_LIFE_S: Final = 5.0
_LOOKS_KEPT: Final = 10_000
_READ_BYTES: Final = 256 << 10

_mincore = ctypes.CDLL(None, use_errno=True).mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


class PageCache:
    """Knows which parts of old files are in memory."""

    def __init__(self, seam: Files) -> None:
        self._seam = seam
        self._looks: dict[tuple[MappedFile, int], float] = {}

    def check(self, file: MappedFile, start: int, end: int) -> None:
        """Raise NotReady when some of a range of a file must be read from the disk."""
        for chunk in range(start // CHUNK_BYTES, (end - 1) // CHUNK_BYTES + 1):
            now = monotonic()
            if self._looks.get((file, chunk), 0.0) < now:
                self._remember(file, chunk, now)
                chunk_start = chunk * CHUNK_BYTES
                chunk_end = min(chunk_start + CHUNK_BYTES, file.file_bytes)
                if not self._seam.is_cached(file, chunk_start, chunk_end):
                    raise NotReady(partial(self._read, file, chunk_start, max(end, chunk_end)))

    def _remember(self, file: MappedFile, chunk: int, now: float) -> None:
        # Also of a cold one: it is read now.
        if len(self._looks) >= _LOOKS_KEPT:
            self._looks.clear()
        self._looks[file, chunk] = now + LOOK_LIFE_S

    def _read(self, file: MappedFile, start: int, end: int) -> None:
        """Bring a range into the cache, and have the kernel read on; for any thread.

        Raises OSError.
        """
        try:
            descriptor = self._seam.open(file.path, os.O_RDONLY)
        except FileNotFoundError:  # expired meanwhile; whoever has a view of it waits
            return
        try:
            buffer = bytearray(_READ_BYTES)
            for position in range(start, end, _READ_BYTES):
                os.preadv(descriptor, [buffer], position)
            os.posix_fadvise(descriptor, end, CHUNK_BYTES, os.POSIX_FADV_WILLNEED)
        finally:
            self._seam.close(descriptor)


def is_resident(address: int, byte_count: int) -> bool:
    """Whether all pages of a mapping are in memory."""
    pages = ctypes.create_string_buffer(-(-byte_count // mmap.PAGESIZE))
    if _mincore(address, byte_count, pages):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return b"\0" not in pages.raw[: len(pages)]
