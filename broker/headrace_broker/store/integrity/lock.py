"""The lock that admits one broker per directory."""

from __future__ import annotations

import errno
import fcntl
import os
from typing import TYPE_CHECKING

from headrace_broker.store.errors import StoreError, StoreLocked
from headrace_broker.store.files.filesystem import read_file

if TYPE_CHECKING:
    from pathlib import Path

# POSIX record locks belong to the process: a second store in this process would get the lock too,
# and closing its descriptor would release the lock of the first.
_held_by_this_process: set[tuple[int, int]] = set()


class StoreLock:
    """The lock on byte 0 of the file ``lock``, which the peer takes too."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._path = root / "lock"
        self._descriptor = -1
        self._identity = (0, 0)

    def acquire(self) -> None:
        """Take the lock. Raises StoreLocked if another broker holds it."""
        path = self._path
        if path.exists() and _identity(path.stat()) in _held_by_this_process:
            raise StoreLocked(self.root, "another store of this process")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        except OSError as error:
            os.close(descriptor)
            raise StoreLocked(self.root, _holder(self.root)) from error
        os.pwrite(descriptor, b"lock", 0)
        self._descriptor = descriptor
        self._identity = _identity(os.fstat(descriptor))
        _held_by_this_process.add(self._identity)

    def check(self) -> None:
        """Raise OSError (ENOLCK) if the lock file was removed or replaced.

        Then another broker may hold a lock on the new file.
        """
        try:
            is_ours = _identity(self._path.stat()) == self._identity
        except (FileNotFoundError, NotADirectoryError):
            is_ours = False
        if not is_ours:
            raise OSError(
                errno.ENOLCK,
                f"the lock file {self._path} was removed or replaced while this broker held it, so "
                "another broker may write here: make sure that none does, then restart this one",
            )

    def release(self) -> None:
        """Release the lock if it is held."""
        if self._descriptor >= 0:
            _held_by_this_process.discard(self._identity)
            os.close(self._descriptor)
            self._descriptor = -1


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _holder(root: Path) -> str:
    try:
        pid = read_file(root / "abort").decode().strip()
    except (OSError, StoreError, UnicodeDecodeError):
        pid = ""
    return f"another broker (process {pid})" if pid else "another broker"
