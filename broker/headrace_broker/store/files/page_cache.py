"""Old data that may have to come from the disk: found out beforehand, and read in a thread.

A page fault holds the interpreter's lock, and sendmsg of a cold range the loop, for as long as the
disk takes. What this process wrote lately is taken for cached without a look.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Final

from zlib_ng.zlib_ng import crc32

from headrace_broker.store.files.file_seal import BLOCK_BYTES
from headrace_broker.store.files.residency import OLD_DATA
from headrace_protocol.errors import NotReady

if TYPE_CHECKING:
    from headrace_broker.store.files.filesystem import Files
    from headrace_broker.store.files.mapped_file import MappedFile

HOT_BYTES: Final = 256 << 20
CHUNK_BYTES: Final = BLOCK_BYTES  # so that a seal says of each whether it is what it was
# How long a look at a chunk holds good; the kernel keeps what was just read for longer.
LOOK_LIFE_S: Final = 5.0
_LOOKS_KEPT: Final = 10_000
_READ_BYTES: Final = 256 << 10


class PageCache:
    """Knows which parts of old files are in memory."""

    def __init__(self, fs: Files) -> None:
        self._fs = fs
        self._looks: dict[tuple[MappedFile, int], float] = {}

    def check(self, file: MappedFile, start: int, end: int) -> None:
        """Raise NotReady when some of a range of a file must be read from the disk."""
        chunks = range(start // CHUNK_BYTES, (end - 1) // CHUNK_BYTES + 1)
        for chunk in chunks:
            if self._looks.get((file, chunk), 0.0) < monotonic():
                chunk_start = chunk * CHUNK_BYTES
                chunk_end = min(chunk_start + CHUNK_BYTES, file.file_bytes)
                if not self._fs.is_cached(file, chunk_start, chunk_end):
                    fetch = partial(self._fetch, file, range(chunk, chunks.stop))
                    raise NotReady(fetch, OLD_DATA)
                self._remember(file, chunk)

    def _remember(self, file: MappedFile, chunk: int) -> None:
        if len(self._looks) >= _LOOKS_KEPT:
            self._looks.clear()
        self._looks[file, chunk] = monotonic() + LOOK_LIFE_S

    def _fetch(self, file: MappedFile, chunks: range) -> None:
        """Bring chunks into the cache; for any thread. Raises OSError."""
        with suppress(FileNotFoundError):  # expired meanwhile; whoever has a view of it waits
            self._read(file, chunks)
        # Not before: somebody else who wants them has to wait as well.
        for chunk in chunks:
            self._remember(file, chunk)

    def _read(self, file: MappedFile, chunks: range) -> None:
        """Read chunks and compare them with the file's seal; have the kernel read on."""
        buffer = bytearray(_READ_BYTES)
        descriptor = self._fs.open(file.path, os.O_RDONLY)
        try:
            for chunk in chunks:
                seal = file.seal if file.seal and file.seal.is_open(chunk) else None
                used_bytes = seal.used_bytes if seal else 0
                checksum = _read_chunk(descriptor, buffer, chunk * CHUNK_BYTES, used_bytes)
                if seal:
                    seal.compare(chunk, checksum)
            end = chunks.stop * CHUNK_BYTES
            os.posix_fadvise(descriptor, end, CHUNK_BYTES, os.POSIX_FADV_WILLNEED)
        finally:
            self._fs.close(descriptor)


def _read_chunk(descriptor: int, buffer: bytearray, start: int, used_bytes: int) -> int:
    """Read a chunk by and by; returns the CRC-32 of what of it lies below ``used_bytes``."""
    checksum = 0
    for position in range(start, start + CHUNK_BYTES, len(buffer)):
        count = os.preadv(descriptor, [buffer], position)
        used = min(count, used_bytes - position)
        if used > 0:  # while the bytes are in the core's own cache
            checksum = crc32(buffer if used == len(buffer) else buffer[:used], checksum)
    return checksum
