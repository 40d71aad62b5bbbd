"""A driver for a folder: another disk, or a mounted file system."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace_broker.store.files.filesystem import Files, read_file
from headrace_protocol.tier.driver import Failure, FailureKind, short_read
from headrace_protocol.tier.folder import FolderDriver, read_range, returning_failures

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace_protocol.tier.driver import Buffer

_REWRITTEN_AT_ONCE: Final = 4 << 20


class PosixDriver(FolderDriver):
    """Files below a folder, which is never made; see ``AppendDriver`` and ``PutDriver``."""

    def __init__(self, root: Path, files: Files | None = None) -> None:
        super().__init__(root)
        self._files = files or Files()

    def _make_folders(self, folder: Path) -> None:
        if not self._root.is_dir():
            raise FileNotFoundError(errno.ENOENT, "there is no such folder", str(self._root))
        self._files.make_directories(folder)

    def delete(self, paths: Sequence[str]) -> Failure | None:
        """As ``Driver.delete``."""
        for path in paths:
            failure = self._unlink(path)
            if failure is not None and failure.kind is not FailureKind.MISSING:
                return failure
        return self._sync_names(paths[0]) if paths else None

    @returning_failures
    def _unlink(self, path: str) -> None:
        self._files.unlink(self._root / path)

    @returning_failures
    def _sync_names(self, _path: str) -> None:
        self._files.sync_names()

    @returning_failures
    def append(self, path: str, position: int, data: Buffer) -> Failure | None:
        """As ``AppendDriver.append``."""
        if not position:
            self._create_missing(path)
        with self.opened(path, os.O_RDWR) as descriptor:
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

    @returning_failures
    def cut(self, path: str, size: int) -> Failure | None:
        """As ``AppendDriver.cut``."""
        with self.opened(path, os.O_RDWR) as descriptor:
            size_before = os.fstat(descriptor).st_size
            if size_before < size:
                return short_read(path, (0, size), size_before)
            if size_before > size:
                self._files.truncate(descriptor, size)
            self._files.fsync(descriptor)
        self._mark_names(path)
        self._files.sync_names()
        return None

    @returning_failures
    def rewrite(self, path: str, start: int) -> Failure | None:
        """As ``AppendDriver.rewrite``."""
        with self.opened(path, os.O_RDWR) as descriptor:
            size = os.fstat(descriptor).st_size
            if size < start:
                return short_read(path, (0, start), size)
            for begin in range(start, size, _REWRITTEN_AT_ONCE):
                end = min(begin + _REWRITTEN_AT_ONCE, size)
                self._files.write(descriptor, read_range(descriptor, begin, end), begin)
            self._files.fsync(descriptor)
        self._mark_names(path)
        self._files.sync_names()
        return None

    @returning_failures
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

    @returning_failures
    def etag(self, path: str) -> str:
        """As ``PutDriver.etag``."""
        return _etag(read_file(self._root / path))

    def _replace(self, target: Path, data: Buffer) -> None:
        # All puts into a folder exclude each other: the next one replaces what a crash has left.
        temporary = target.with_name(self.temporary)
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
    def opened(self, path: str, flags: int = os.O_RDONLY) -> Iterator[int]:
        """The descriptor of a file; the folder is this broker's, and so are the names in it."""
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


def _etag(data: Buffer) -> str:
    return blake2b(data, digest_size=16).hexdigest()
