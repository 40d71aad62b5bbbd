"""A driver for a folder: another disk, or a mounted file system."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, Final, ParamSpec, TypeVar

from headrace_broker.store.files.filesystem import Files, read_file
from headrace_broker.tiered.driver.interface import Entry, Failure, FailureKind, short_read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from headrace_broker.tiered.driver.interface import Buffer, Range

P = ParamSpec("P")
T = TypeVar("T")

# Of all puts into a folder, which exclude each other: the next one replaces what a crash has left.
_TEMPORARY: Final = ".tmp"
_REWRITTEN_AT_ONCE: Final = 4 << 20


def _returning_failures(
    operate: Callable[Concatenate[PosixDriver, str, P], T],
) -> Callable[Concatenate[PosixDriver, str, P], T | Failure]:
    """Have a method return errors of the file system as failures of its path."""

    def guarded(
        driver: PosixDriver, path: str, /, *args: P.args, **kwargs: P.kwargs
    ) -> T | Failure:
        try:
            return operate(driver, path, *args, **kwargs)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                return Failure(FailureKind.UNREACHABLE, path, str(error))
            return driver.missing(path, error)

    return guarded


class PosixDriver:
    """Files below a folder.

    Each operation opens its file anew, and reads and writes at stated positions, so threads share
    no position (apache/rocketmq #10462), and a folder that was mounted again is found. The folder
    itself is never made: without it all operations fail with UNREACHABLE.
    """

    def __init__(self, root: Path, files: Files | None = None) -> None:
        self._root = root
        self._files = files or Files()

    def missing(self, path: str, error: OSError) -> Failure:
        """The failure of a path that does not exist; without the folder all paths are away."""
        if self._root.is_dir():
            return Failure(FailureKind.MISSING, path, str(error))
        reason = f"the folder {self._root} is not there: mount its file system"
        return Failure(FailureKind.UNREACHABLE, path, reason)

    def _make_folders(self, folder: Path) -> None:
        if not self._root.is_dir():
            raise FileNotFoundError(errno.ENOENT, "there is no such folder", str(self._root))
        self._files.make_directories(folder)

    @_returning_failures
    def read(self, path: str, ranges: Sequence[Range]) -> list[Buffer] | Failure:
        """As ``Driver.read``."""
        found: list[Buffer] = []
        with self._opened(path, os.O_RDONLY) as descriptor:
            for start, end in ranges:
                data = _read_all(descriptor, start, end)
                if len(data) < end - start:
                    return short_read(path, (start, end), len(data))
                found.append(data)
        return found

    @_returning_failures
    def size(self, path: str) -> int:
        """As ``Driver.size``."""
        return (self._root / path).stat().st_size

    @_returning_failures
    def entries(self, folder: str) -> list[Entry]:
        """As ``Driver.entries``."""
        found = []
        self._root.stat()
        for place, _folders, names in os.walk(self._root / folder, onerror=_raise_unless_missing):
            for name in names:
                if name != _TEMPORARY:
                    path = Path(place, name)
                    with suppress(FileNotFoundError):  # deleted since
                        size = path.stat().st_size
                        found.append(Entry(path.relative_to(self._root).as_posix(), size))
        return sorted(found)

    def delete(self, paths: Sequence[str]) -> Failure | None:
        """As ``Driver.delete``."""
        for path in paths:
            failure = self._unlink(path)
            if failure is not None and failure.kind is not FailureKind.MISSING:
                return failure
        return self._sync_names(paths[0]) if paths else None

    @_returning_failures
    def _unlink(self, path: str) -> None:
        self._files.unlink(self._root / path)

    @_returning_failures
    def _sync_names(self, _path: str) -> None:
        self._files.sync_names()

    @_returning_failures
    def append(self, path: str, position: int, data: Buffer) -> Failure | None:
        """As ``AppendDriver.append``."""
        if not position:
            self._create_missing(path)
        with self._opened(path, os.O_RDWR) as descriptor:
            size = os.fstat(descriptor).st_size
            if size != position:
                reason = f"has {size} bytes instead of {position}"
                return Failure(FailureKind.CHANGED, path, reason)
            self._files.write(descriptor, data, position)
            self._files.fdatasync(descriptor)
        self._files.sync_names()
        return None

    def _create_missing(self, path: str) -> None:
        target = self._root / path
        if not target.exists():
            self._make_folders(target.parent)
            self._files.close(self._files.create(target))
        self._mark_names(path)

    def _mark_names(self, path: str) -> None:
        """Have all names of a path synced: a killed process may have made them and not done so."""
        for folder in Path(path).parents:
            self._files.mark_names_unsynced(self._root / folder)
        # The root may be one of these names, unless somebody else made it.
        if os.access(self._root.parent, os.W_OK):
            self._files.mark_names_unsynced(self._root.parent)

    @_returning_failures
    def cut(self, path: str, size: int) -> Failure | None:
        """As ``AppendDriver.cut``."""
        with self._opened(path, os.O_RDWR) as descriptor:
            size_before = os.fstat(descriptor).st_size
            if size_before < size:
                return short_read(path, (0, size), size_before)
            if size_before > size:
                self._files.truncate(descriptor, size)
            self._files.fsync(descriptor)
        self._mark_names(path)
        self._files.sync_names()
        return None

    @_returning_failures
    def rewrite(self, path: str, start: int) -> Failure | None:
        """As ``AppendDriver.rewrite``."""
        with self._opened(path, os.O_RDWR) as descriptor:
            size = os.fstat(descriptor).st_size
            if size < start:
                return short_read(path, (0, start), size)
            for begin in range(start, size, _REWRITTEN_AT_ONCE):
                end = min(begin + _REWRITTEN_AT_ONCE, size)
                self._files.write(descriptor, _read_all(descriptor, begin, end), begin)
            self._files.fsync(descriptor)
        self._mark_names(path)
        self._files.sync_names()
        return None

    @_returning_failures
    def put(self, path: str, data: Buffer, replaces: str = "") -> str | Failure:
        """As ``PutDriver.put``."""
        target = self._root / path
        self._make_folders(target.parent)
        with self._locked(target.parent):
            etag = _etag(read_file(target)) if target.exists() else ""
            if etag != replaces:
                kind = FailureKind.CHANGED if replaces else FailureKind.EXISTS
                return Failure(kind, path, "was written by another")
            self._replace(target, data)
        self._mark_names(path)
        self._files.sync_names()
        return _etag(data)

    @_returning_failures
    def etag(self, path: str) -> str:
        """As ``PutDriver.etag``."""
        return _etag(read_file(self._root / path))

    def _replace(self, target: Path, data: Buffer) -> None:
        temporary = target.with_name(_TEMPORARY)
        descriptor = self._files.create_temporary(temporary)
        try:
            self._files.write(descriptor, data, 0)
            self._files.fsync(descriptor)
        except OSError:  # a full disk needs the room
            with suppress(OSError):
                self._files.unlink(temporary)
            raise
        finally:
            self._files.close(descriptor)
        self._files.rename(temporary, target)

    @contextmanager
    def _opened(self, path: str, flags: int) -> Iterator[int]:
        descriptor = self._files.open(self._root / path, flags)
        try:
            yield descriptor
        finally:
            self._files.close(descriptor)

    @contextmanager
    def _locked(self, folder: Path) -> Iterator[None]:
        """Exclude other writers of this folder, also those of other processes."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _read_all(descriptor: int, start: int, end: int) -> bytes:
    """The bytes of a range, fewer at the end of the file; a call reads 2 GiB at most."""
    data = os.pread(descriptor, end - start, start)
    while 0 < len(data) < end - start:
        more = os.pread(descriptor, end - start - len(data), start + len(data))
        if not more:
            break
        data += more
    return data


def _etag(data: Buffer) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
