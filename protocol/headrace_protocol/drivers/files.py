"""Atomic replacement of small files, for all but the broker's store, which has its own disk."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def replace_file(path: Path, data: bytes, backup_path: Path | None = None) -> None:
    """Replace a file; it is on disk when this returns, and old or new after any crash.

    backup_path: new name of the old file, which is the only one if a crash comes in between.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    # Never write through a file or link created by another user.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
        file.write(data)
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
