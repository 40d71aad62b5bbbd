"""Residency checks of old data; a thread reads from disk what is not in memory.

A page fault blocks the interpreter, and sendmsg of a cold range the loop, for as long as the disk
takes. Data that this process wrote recently counts as cached without a check.
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

CHUNK_BYTES: Final = BLOCK_BYTES  # one checksum of the seal for each chunk
_READ_BYTES: Final = 256 << 10


class PageCache:
    """Remembers which chunks of old files are in memory."""

    def __init__(self, fs: Files, valid_s: float = 5.0, checks_max: int = 10_000) -> None:
        """valid_s: how long a check of a chunk stays valid; the kernel keeps pages for longer."""
        self.valid_s = valid_s
        self._fs = fs
        self._checks_max = checks_max
        self._valid_until: dict[tuple[MappedFile, int], float] = {}

    def check(self, file: MappedFile, start: int, end: int) -> None:
        """Raise NotReady if any part of a range of a file must be read from disk."""
        chunks = range(start // CHUNK_BYTES, (end - 1) // CHUNK_BYTES + 1)
        for chunk in chunks:
            if self._valid_until.get((file, chunk), 0.0) < monotonic():
                chunk_start = chunk * CHUNK_BYTES
                chunk_end = min(chunk_start + CHUNK_BYTES, file.file_bytes)
                if not self._fs.is_cached(file, chunk_start, chunk_end):
                    fetch = partial(self._fetch, file, range(chunk, chunks.stop))
                    raise NotReady(fetch, OLD_DATA)
                self._remember(file, chunk)

    def _remember(self, file: MappedFile, chunk: int) -> None:
        if len(self._valid_until) >= self._checks_max:
            self._valid_until.clear()
        self._valid_until[file, chunk] = monotonic() + self.valid_s

    def _fetch(self, file: MappedFile, chunks: range) -> None:
        """Bring chunks into the page cache; in any thread. Raises OSError."""
        with suppress(FileNotFoundError):  # just expired: a reader with a view waits for the disk
            self._read(file, chunks)
        # Only now, so that other requests for these chunks wait too.
        for chunk in chunks:
            self._remember(file, chunk)

    def _read(self, file: MappedFile, chunks: range) -> None:
        """Read chunks and compare them with the file's seal; ask for read-ahead of the next."""
        buffer = bytearray(_READ_BYTES)
        descriptor = self._fs.open(file.path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # see ``MappedFile``
            for chunk in chunks:
                seal = file.seal if file.seal and file.seal.is_pending(chunk) else None
                used_bytes = seal.used_bytes if seal else 0
                checksum = _read_chunk(descriptor, buffer, chunk * CHUNK_BYTES, used_bytes)
                if seal:
                    seal.compare(chunk, checksum)
            end = chunks.stop * CHUNK_BYTES
            os.posix_fadvise(descriptor, end, CHUNK_BYTES, os.POSIX_FADV_WILLNEED)
        finally:
            self._fs.close(descriptor)


def _read_chunk(descriptor: int, buffer: bytearray, start: int, used_bytes: int) -> int:
    """Read a chunk in pieces; returns the CRC-32 of its bytes below ``used_bytes``."""
    checksum = 0
    for position in range(start, start + CHUNK_BYTES, len(buffer)):
        count = os.preadv(descriptor, [buffer], position)
        used = min(count, used_bytes - position)
        if used > 0:  # while the bytes are in the core's own cache
            checksum = crc32(buffer if used == len(buffer) else buffer[:used], checksum)
    return checksum
