"""One file of fixed length, mapped when first touched."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Self

from headrace_broker.store.files.file_seal import LOOP_BYTES_MAX, StoreDamaged
from headrace_broker.store.files.filesystem import NO_ROOM
from headrace_broker.store.files.residency import OLD_DATA, is_resident
from headrace_protocol.errors import NotReady

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from headrace_broker.store.files.file_seal import FileSeal
    from headrace_broker.store.files.filesystem import Files
    from headrace_protocol.message import Buffer

_BLOCK_BYTES = 512  # the unit of st_blocks
_REWRITE_BYTES = 1 << 20
_MADV_POPULATE_WRITE = 23  # mmap has no name for it


class MappedFile:
    """A file of full length from the start, zero-filled; ``allocated_bytes`` have disk blocks.

    Writing to a hole through a map kills the process if the disk is full, so writers stay below
    ``allocated_bytes`` and call ``allocate`` for more, which fails with an exception. On a tmpfs
    reading one does, too, since that allocates the page. So the map is for bytes in use; whoever
    looks for their end reads with ``pread`` and ``has_data``.

    The kernel allocates all blocks that a write touches in its page cache, which keeps a page or,
    after sequential reads, many pages as one. So blocks are allocated by whole pages and large
    steps, descriptors are for random reads, and where that is not enough ``claim`` has the kernel
    say whether pages may be written.
    """

    __slots__ = (
        "_address",
        "_map",
        "_view",
        "allocated_bytes",
        "file_bytes",
        "files",
        "path",
        "seal",
        "start_offset",
    )

    def __init__(self, path: Path, file_bytes: int, files: Files) -> None:
        """Describe an existing file; nothing is opened yet."""
        self.path = path
        self.file_bytes = file_bytes
        self.files = files
        self.start_offset = int(path.name)
        self.allocated_bytes = 0
        self.seal: FileSeal | None = None
        self._map: mmap.mmap | None = None
        self._view: memoryview | None = None
        self._address = 0

    @classmethod
    def create(cls, path: Path, file_bytes: int, files: Files, allocate_bytes: int) -> Self:
        """Create the file and allocate blocks for its first ``allocate_bytes``.

        Raises OSError, and leaves no file behind.
        """
        files.make_directories(path.parent)
        descriptor = files.create(path)
        try:
            files.truncate(descriptor, file_bytes)
            if allocate_bytes:
                files.allocate(descriptor, 0, allocate_bytes)
        except OSError:
            files.unlink(path)
            raise
        finally:
            files.close(descriptor)
        file = cls(path, file_bytes, files)
        file.allocated_bytes = allocate_bytes
        return file

    @property
    def end_offset(self) -> int:
        """The offset one past the file."""
        return self.start_offset + self.file_bytes

    @property
    def map(self) -> mmap.mmap:
        """The mapping: slices are copies, slice assignment writes."""
        if self._map is None:
            with self._descriptor() as descriptor:
                self._map = mmap.mmap(descriptor, self.file_bytes)
                if os.fstat(descriptor).st_blocks * _BLOCK_BYTES < self.file_bytes:
                    # Read-ahead would fill holes with pages of zeros: with 8 MiB of read-ahead,
                    # the first unit of a queue cost milliseconds.
                    self._map.madvise(mmap.MADV_RANDOM)
        return self._map

    @property
    def view(self) -> memoryview:
        """The mapping: slices are views that keep it alive, even after the file is deleted."""
        if self._view is None:
            self._view = memoryview(self.map)
        return self._view

    def check_soon(self, start: int, end: int) -> None:
        """As ``require``, but raises NotReady if the comparison would take too long in the loop."""
        if self.seal is None or start >= self.seal.used_bytes:
            return
        if self.seal.pending_bytes(start, end) > LOOP_BYTES_MAX:
            raise NotReady(partial(self._compare, start, end), OLD_DATA)
        self.require(start, end)

    def _compare(self, start: int, end: int) -> None:
        # The retried request reports the damage, or the deleted file.
        with suppress(StoreDamaged, FileNotFoundError):
            self.require(start, end)

    def require(self, start: int, end: int) -> None:
        """Compare a range with the seal where it was not compared since the start.

        Raises StoreDamaged.
        """
        if self.seal is not None and start < self.seal.used_bytes:
            self.seal.check(self.path, self.pread, start, end)

    def pread(self, position: int, byte_count: int) -> bytes:
        """Bytes of the file, without the map; fewer at its end. Raises OSError."""
        with self._descriptor() as descriptor:
            return os.pread(descriptor, byte_count, position)

    def has_data(self, start: int) -> bool:
        """True if any byte from ``start`` on is not zero. Raises OSError."""
        with self._descriptor() as descriptor:
            for begin, end in self.files.data_ranges(descriptor, start):
                for at in range(begin, end, _REWRITE_BYTES):
                    if any(os.pread(descriptor, min(_REWRITE_BYTES, end - at), at)):
                        return True
        return False

    def data_end(self) -> int:
        """The beginning of the first hole. Raises OSError."""
        with self._descriptor() as descriptor:
            ranges = self.files.data_ranges(descriptor, 0)
            begin, end = next(ranges, (0, 0))
            return 0 if begin else end

    def is_resident(self, start: int, end: int) -> bool:
        """True if all pages of a page-aligned range are in memory."""
        if not self._address:
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        return is_resident(self._address + start, end - start)

    @property
    def is_mapped(self) -> bool:
        """True if the file is mapped now."""
        return self._map is not None

    def unmap(self) -> None:
        """Drop the map; it is freed with its last view, and made again when needed."""
        self._map = self._view = None
        self._address = 0

    def release(self) -> bool:
        """Unmap before the file is removed; in any thread.

        Returns False while a view exists, such as that of a reply that is still being sent.
        """
        self._address = 0
        try:
            if self._view is not None:
                self._view.release()
                self._view = None
            if self._map is not None:
                self._map.close()
        except BufferError:
            return False
        self._map = None
        return True

    @property
    def hole_bytes(self) -> int:
        """Number of bytes without disk blocks. Raises OSError."""
        blocks_bytes = self.path.stat().st_blocks * _BLOCK_BYTES
        return max(self.file_bytes - blocks_bytes, 0)

    def allocate(self, start: int, end: int, step_bytes: int) -> None:
        """Allocate blocks up to ``end``, to a multiple of ``step_bytes`` if there is room for it.

        start: where the map is written next. Raises OSError.
        """
        if end <= self.allocated_bytes:
            return
        try:
            self._allocate(end, step_bytes)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self._allocate(end, mmap.PAGESIZE)
            self.claim(start, end)

    def _allocate(self, end: int, step_bytes: int) -> None:
        target = min(-(-end // step_bytes) * step_bytes, self.file_bytes)
        self.allocate_range(self.allocated_bytes, target)
        self.allocated_bytes = target

    def allocate_range(self, start: int, end: int) -> None:
        """Allocate blocks apart from ``allocated_bytes``. Raises OSError."""
        with self._descriptor() as descriptor:
            self.files.allocate(descriptor, start, end - start)

    def allocate_pages(self, pages: Iterable[int]) -> None:
        """Allocate the blocks of single pages, apart from ``allocated_bytes``. Raises OSError."""
        with self._descriptor() as descriptor:
            for page in pages:
                start = page * mmap.PAGESIZE
                end = min(start + mmap.PAGESIZE, self.file_bytes)
                self.files.allocate(descriptor, start, end - start)
                self.claim(start, end)

    def claim(self, start: int, end: int) -> None:
        """Have the kernel make the pages of a range writable. Raises OSError if it has no room."""
        start -= start % mmap.PAGESIZE
        try:
            self.map.madvise(_MADV_POPULATE_WRITE, start, end - start)
        except OSError as error:
            if error.errno == errno.EFAULT:  # a write would end the process
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            if error.errno != errno.EINVAL:  # Linux before 5.14
                raise

    def give_back(self, used_bytes: int) -> None:
        """Free the blocks allocated ahead of use, from the next page on. Raises OSError."""
        start = -(-used_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if start < self.allocated_bytes:
            with self._descriptor() as descriptor:
                self.files.give_back(descriptor, start, self.file_bytes - start)
            self.allocated_bytes = start

    def clear_from(self, position: int) -> None:
        """Zero everything from ``position`` on.

        Old bytes could pass for records once new records end just before them. Truncating and
        extending the file would zero it too, but a power cut between the two steps leaves a file
        that no start accepts.
        """
        self.seal = None
        with self._descriptor() as descriptor:
            self.files.clear(descriptor, position, self.file_bytes - position)
        self.allocated_bytes = min(self.allocated_bytes, position)

    def clear(self, start: int, end: int) -> None:
        """Zero a range and free its blocks. Raises OSError."""
        with self._descriptor() as descriptor:
            self.files.clear(descriptor, start, end - start)

    def rewrite(self, start: int, end: int) -> None:
        """Write a range again, as it is, so that the next sync brings all of it to disk.

        A failed sync leaves its pages in memory as if they were on disk, and no later sync writes
        them. Raises OSError.
        """
        with self._descriptor() as descriptor:
            for begin in range(start, end, _REWRITE_BYTES):
                data = self.map[begin : min(begin + _REWRITE_BYTES, end)]
                self.files.write(descriptor, data, begin)

    def write(self, data: Buffer, position: int) -> None:
        """Write all of ``data``, without the map. Raises OSError."""
        with self._descriptor() as descriptor:
            self.files.write(descriptor, data, position)

    def sync(self) -> None:
        """Bring all written data to disk; a deleted file is skipped. Raises OSError."""
        with suppress(FileNotFoundError):
            self.files.sync(self.path)

    def delete(self) -> None:
        """Remove the file; existing views stay readable."""
        self.unmap()
        self.files.unlink(self.path)

    @contextmanager
    def _descriptor(self) -> Iterator[int]:
        descriptor = self.files.open(self.path)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            yield descriptor
        finally:
            self.files.close(descriptor)
