"""Small files, for all but the broker's store: atomic replacement, and secrets of one user."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from headrace_protocol.errors import PortableError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from typing import Protocol

    class Replace(Protocol):
        """Replaces a file as ``replace_file`` does, by data in parts."""

        def __call__(self, path: Path, data: Iterable[bytes], /) -> None:
            """Raise OSError if it can't."""


_SECRET_BYTES_MAX: Final = 64 * 1024
_OTHERS: Final = 0o077
_BUFFER_BYTES: Final = 1024 * 1024
# Of a file: its inode, size, and time of change in ns; None if it can't be read.
FileStamp = tuple[int, int, int] | None


class NotPrivate(PortableError):
    """A file with a secret that other users of the machine may read."""


def read_private(path: Path, bytes_max: int = _SECRET_BYTES_MAX) -> bytes:
    """The contents of a file with secrets. Raises NotPrivate, OSError."""
    with path.open("rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if mode & _OTHERS and os.name == "posix":
            raise NotPrivate(
                f"{path}: other users may read or change it (mode {mode & 0o777:04o}), which a "
                f"file with secrets must not permit: chmod 600 {path}"
            )
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise NotPrivate(f"{path}: has over {bytes_max} bytes, so it is another file")
    return data


def file_stamp(path: Path) -> FileStamp:
    """The stamp of a file, which changes when it is written or replaced."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def replace_file(
    path: Path, data: bytes | Iterable[bytes], backup_path: Path | None = None
) -> None:
    """Replace a file; it is on disk when this returns, and old or new after any crash.

    data: may be in parts. backup_path: new name of the old file, which is the only one if a crash
    comes in between.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    # Never write through a file or link created by another user.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    with os.fdopen(os.open(temporary, flags, 0o600), "wb", _BUFFER_BYTES) as file:
        file.writelines((data,) if isinstance(data, bytes) else data)
        file.flush()
        os.fsync(file.fileno())
    if backup_path is not None and path.exists():
        path.replace(backup_path)
    temporary.replace(path)
    with suppress(PermissionError):  # Windows opens no folders
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
