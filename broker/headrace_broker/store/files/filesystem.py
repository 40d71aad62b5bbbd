"""The store's interface to the operating system, which tests replace by a faulty one."""

from __future__ import annotations

import ctypes
import errno
import math
import os
import stat
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.map_budget import MapBudget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

# A full disk, or one user's share of it. A file system without inodes has no room either.
NO_ROOM: Final = frozenset((errno.ENOSPC, errno.EDQUOT))
RESERVE_FOLDER: Final = "headrace.reserve"
RESERVE_BYTES_MAX: Final = 4 << 20
# Of the disk, so that a small one is not full of it.
_SHARE: Final = 64
_STEP_BYTES_MIN: Final = 4096
# Files without blocks, for what is saved first when the disk has no inodes.
_INODES: Final = 7
_BLOCKS_FILE: Final = "blocks"
_PIECE_BYTES: Final = 256 * 1024
_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Paged(Protocol):
    """A mapped file."""

    path: Path

    def is_resident(self, start: int, end: int) -> bool:
        """True if all pages of a page-aligned range are in memory."""


class DiskUsage(NamedTuple):
    """Usage of a file system as ``df`` counts: root's reserve is neither used nor usable.

    usable_inodes: None if the file system makes them as needed.
    """

    used_bytes: int
    usable_bytes: int
    usable_inodes: int | None = None

    @property
    def ratio(self) -> float:
        """The used share, 0 to 1."""
        total = self.used_bytes + self.usable_bytes
        return self.used_bytes / total if total else 0.0

    def excess_bytes(self, ratio: float) -> int:
        """The bytes to free until usage is ``ratio``; negative if usage is below it."""
        return math.ceil(self.used_bytes - ratio * (self.used_bytes + self.usable_bytes))


class Files:
    """File system calls of the store. All raise OSError."""

    def __init__(self) -> None:
        # Called before a file or folder is created; raises OSError if the store's lock was lost.
        self.check_owner: Callable[[], None] = lambda: None
        self._changed_directories: set[Path] = set()
        self._syncing_names = threading.Lock()
        self.map_budget = MapBudget()
        self.reserve = Reserve(self)

    def apart(self) -> Files:
        """The same calls for another folder, whose names are synced by themselves.

        A disk that hangs or fails then stops no ``sync_names`` of the store.
        """

        def check_owner() -> None:  # of the store, whose lock may be taken later
            self.check_owner()

        other = Files()
        other.check_owner = check_owner
        return other

    def open(self, path: Path, flags: int = os.O_RDWR) -> int:
        """Open a file and return its descriptor; a file that ``flags`` create has mode 0600.

        Creation fails if the path is a symbolic link, and opening a FIFO never blocks.
        """
        if flags & os.O_CREAT:
            self.check_owner()
            flags |= os.O_NOFOLLOW
        return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)

    def allocate(self, descriptor: int, position: int, byte_count: int) -> None:
        """Allocate disk blocks for a range, so that a mapped write to it cannot fail."""
        if (error := self.reserve.lent_for) is not None:
            raise OSError(error.errno, error.strerror, error.filename)
        os.posix_fallocate(descriptor, position, byte_count)

    def truncate(self, descriptor: int, byte_count: int) -> None:
        """Set the length; added bytes read as zeros and have no blocks yet."""
        os.ftruncate(descriptor, byte_count)

    def clear(self, descriptor: int, position: int, byte_count: int) -> None:
        """Zero a range and free its blocks; the file's length never changes, even briefly."""
        if byte_count and _fallocate(descriptor, _KEEP_SIZE_AND_PUNCH_HOLE, position, byte_count):
            number = ctypes.get_errno()
            if number != errno.EOPNOTSUPP:
                raise OSError(number, os.strerror(number))
            self._overwrite(descriptor, position, byte_count)

    def give_back(self, descriptor: int, position: int, byte_count: int) -> None:
        """Free the blocks of a range of zeros; length and modification time stay.

        Where the file system has no holes the blocks stay too.
        """
        status = os.fstat(descriptor)
        _fallocate(descriptor, _KEEP_SIZE_AND_PUNCH_HOLE, position, byte_count)
        os.utime(descriptor, ns=(status.st_atime_ns, status.st_mtime_ns))

    def data_ranges(self, descriptor: int, position: int) -> Iterator[tuple[int, int]]:
        """Ranges of a file from ``position`` on that may hold anything but zeros."""
        while True:
            try:
                begin = os.lseek(descriptor, position, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # only a hole is left
                    return
                raise
            position = os.lseek(descriptor, begin, os.SEEK_HOLE)
            yield begin, position

    def _overwrite(self, descriptor: int, position: int, byte_count: int) -> None:
        zeros = bytes(min(byte_count, 1 << 20))
        for start in range(position, position + byte_count, len(zeros)):
            self.write(descriptor, zeros[: position + byte_count - start], start)

    def write(self, descriptor: int, data: bytes | bytearray | memoryview, position: int) -> None:
        """Write all of ``data``."""
        view = memoryview(data)
        while view:
            written = os.pwrite(descriptor, view, position)
            view, position = view[written:], position + written

    def fsync(self, descriptor: int) -> None:
        """Bring data and metadata to disk."""
        os.fsync(descriptor)

    def fdatasync(self, descriptor: int) -> None:
        """Bring data to disk; releases the interpreter lock, unlike mmap.flush."""
        os.fdatasync(descriptor)

    def fsync_directory(self, path: Path) -> None:
        """Make the names in a folder durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def make_directories(self, directory: Path) -> None:
        """Create a folder and its missing parents; ``sync_names`` makes them durable."""
        self.check_owner()
        for made in make_private(directory):
            self._changed_directories.add(made.parent)

    def create(self, path: Path) -> int:
        """Create a file and return its descriptor; ``sync_names`` makes its name durable."""
        descriptor = self.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self._changed_directories.add(path.parent)
        return descriptor

    def create_temporary(self, path: Path) -> int:
        """Create a file to be renamed later, replacing one left by a crash; returns its fd."""
        if os.path.lexists(path):
            self.unlink(path)
        return self.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def replace(
        self, path: Path, data: bytes | Iterable[bytes], backup_path: Path | None = None
    ) -> None:
        """Replace a small file; it is on disk when this returns, and old or new after any crash.

        data: may be in parts. backup_path: new name of the old file, which is the only one if a
        crash comes in between. On a full disk this uses the reserve.
        """
        self.reserve.save(lambda: self._replace(path, data, backup_path))

    def _replace(self, path: Path, data: bytes | Iterable[bytes], backup_path: Path | None) -> None:
        if not path.parent.exists():
            self.make_directories(path.parent)
            self.sync_names()
        new_path = path.with_name(path.name + ".tmp")
        descriptor = self.create_temporary(new_path)
        try:
            position = 0
            for piece in (data,) if isinstance(data, bytes) else _pieces(data):
                self.write(descriptor, piece, position)
                position += len(piece)
            self.fsync(descriptor)
        finally:
            self.close(descriptor)
        if backup_path is not None and path.exists():
            self.rename(path, backup_path)
        self.rename(new_path, path)
        self.fsync_directory(path.parent)

    def sync(self, path: Path) -> None:
        """Bring the data of a file to disk."""
        descriptor = self.open(path)
        try:
            self.fdatasync(descriptor)
        finally:
            self.close(descriptor)

    def mark_names_unsynced(self, directory: Path) -> None:
        """Have ``sync_names`` sync a folder too, even if this process has not changed it."""
        self._changed_directories.add(directory)

    def sync_names(self) -> None:
        """Make all changes of names durable, by one fsync per folder; in any thread."""
        with self._syncing_names:  # a caller that finds nothing left waits for the one syncing it
            while self._changed_directories:
                directory = self._changed_directories.pop()
                try:
                    with suppress(FileNotFoundError):  # the folder of a deleted topic
                        self.fsync_directory(directory)
                except OSError:
                    self._changed_directories.add(directory)
                    raise

    def is_cached(self, file: Paged, start: int, end: int) -> bool:
        """True if a range of a mapped file can be read without the disk."""
        return file.is_resident(start, end)

    def rename(self, source: Path, target: Path) -> None:
        """Rename ``source`` to ``target``, replacing it."""
        source.replace(target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name; durable after ``sync_names``."""
        target.hardlink_to(source)
        self._changed_directories.add(target.parent)

    def disk_usage(self, path: Path) -> DiskUsage:
        """Usage of the file system that holds a folder."""
        disk = os.statvfs(path)
        used_blocks = disk.f_blocks - disk.f_bfree
        inodes = disk.f_favail if disk.f_files else None
        return DiskUsage(used_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize, inodes)

    def unlink(self, path: Path) -> None:
        """Remove a file; durable after ``sync_names``. Its maps stay readable."""
        path.unlink()
        self._changed_directories.add(path.parent)


class Reserve:
    """Files that lend their blocks and inodes to a save that finds no room.

    Clean-up, uploads and a clean stop depend on saved positions, tables and checkpoints. If saving
    these waited for room, nothing could ever make room. ``lent_for``: the error of the save to
    which the room belongs, so that nobody else may allocate it; else None.
    """

    def __init__(self, files: Files) -> None:
        self.lent_for: OSError | None = None
        self._files = files
        self._root: Path | None = None
        self._is_whole = False
        self._lock = threading.Lock()

    def open(self, root: Path) -> None:
        """Allocate the reserve of a store, as far as there is room."""
        self._root = root
        self._is_whole = False
        self.fill()

    def fill(self) -> None:
        """Allocate again what was used up, as far as there is room."""
        with self._lock:
            if self._root is not None and not self._is_whole:
                self._fill(self._root)

    def _fill(self, root: Path) -> None:
        files, folder = self._files, root / RESERVE_FOLDER
        try:
            disk = files.disk_usage(root)
            reserve_bytes = min((disk.used_bytes + disk.usable_bytes) // _SHARE, RESERVE_BYTES_MAX)
            files.make_directories(folder)
            self._is_whole = self._allocate(folder / _BLOCKS_FILE, reserve_bytes) >= reserve_bytes
            for number in range(_INODES):
                files.close(files.open(folder / str(number), os.O_RDWR | os.O_CREAT))
        except OSError:
            self._is_whole = False

    def _allocate(self, path: Path, byte_count: int) -> int:
        """Allocate as much as there is room for, up to ``byte_count``; returns how much."""
        position, step = 0, byte_count
        descriptor = self._files.open(path, os.O_RDWR | os.O_CREAT)
        try:
            while position < byte_count and step >= _STEP_BYTES_MIN:
                try:
                    more = min(step, byte_count - position)
                    self._files.allocate(descriptor, position, more)
                    position += more
                except OSError:
                    step //= 2
        finally:
            self._files.close(descriptor)
        return position

    def release(self) -> None:
        """Free it until the next ``fill``."""
        with self._lock:
            if self._root is not None:
                self._free(self._root)

    def _free(self, root: Path) -> None:
        files, folder = self._files, root / RESERVE_FOLDER
        self._is_whole = False
        if (blocks := folder / _BLOCKS_FILE).exists():
            # An ext4 gives freed blocks to others only once its journal has the change.
            descriptor = files.open(blocks)
            try:
                files.truncate(descriptor, 0)
                files.fsync(descriptor)
            finally:
                files.close(descriptor)
        for path in folder.glob("*"):
            files.unlink(path)

    def save(self, save: Callable[[], None]) -> None:
        """Run ``save``; if it finds no room, run it again with the reserve. Raises OSError."""
        try:
            save()
        except OSError as error:
            if error.errno not in NO_ROOM or self._root is None:
                raise
            self._lend(self._root, save, error)

    def _lend(self, root: Path, save: Callable[[], None], error: OSError) -> None:
        with self._lock:
            self.lent_for = error
            try:
                self._free(root)
                save()
            finally:
                self.lent_for = None
                self._fill(root)


def _pieces(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Parts joined to pieces, neither so many nor so long that the loop waits for the thread."""
    piece = bytearray()
    for part in parts:
        piece += part
        if len(piece) >= _PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece)


def make_private(directory: Path) -> list[Path]:
    """Create a folder and its missing parents, with mode 0700; returns the new folders."""
    missing = []
    while not directory.exists():
        missing.append(directory)
        directory = directory.parent
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
    return missing


def read_file(path: Path) -> bytes:
    """The content of a file. Raises OSError; StoreFormatError if it is not a regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise StoreFormatError(path, "is not a regular file", "move it out of the store folder")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)
