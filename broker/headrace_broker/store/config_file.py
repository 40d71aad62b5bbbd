"""Small files that must never be half there: ``config/*.json``."""

from __future__ import annotations

import enum
import os
import re
from typing import TYPE_CHECKING, Final

from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files import Files

if TYPE_CHECKING:
    from pathlib import Path

BACKUP_SUFFIX: Final = ".bak"
_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


class ConfigSource(enum.Enum):
    """Where a loaded value came from."""

    FILE = enum.auto()
    BACKUP = enum.auto()
    MISSING = enum.auto()


class ConfigFile:
    """One file and its ``.bak``: at any moment of a crash one of the two is whole.

    ``source`` tells after load() which it was. What the text means is the caller's business.
    """

    def __init__(self, path: Path, files: Files | None = None) -> None:
        self.path = path
        self.backup_path = path.with_name(path.name + BACKUP_SUFFIX)
        self.source = ConfigSource.MISSING
        self._files = files or Files()

    def load(self) -> bytes | None:
        """The file, or its backup when the file is missing or cut; None when there is neither.

        Raises StoreFormatError when there is something, but nothing whole: a damaged file must
        not pass for an empty one.
        """
        found = False
        for path, source in (
            (self.path, ConfigSource.FILE),
            (self.backup_path, ConfigSource.BACKUP),
        ):
            if path.exists():
                found = True
                data = path.read_bytes()
                if is_whole(data):
                    self.source = source
                    return data
        if found:
            raise StoreFormatError(
                self.path,
                "is cut, and there is no whole .bak beside it",
                "put a good copy in its place, or remove both to start without it",
            )
        self.source = ConfigSource.MISSING
        return None

    def save(self, data: bytes) -> None:
        """Replace the file, on disk when this returns. Raises OSError."""
        files = self._files
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new_path = self.path.with_name(self.path.name + ".tmp")
        descriptor = files.open(new_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            files.write(descriptor, data, 0)
            files.fsync(descriptor)
        finally:
            files.close(descriptor)
        if self.path.exists():
            files.rename(self.path, self.backup_path)
        files.rename(new_path, self.path)
        files.fsync_directory(self.path.parent)


def is_whole(data: bytes) -> bool:
    """Whether a JSON object in any dialect was written to its end: no beginning of one is."""
    text = _STRING.sub(b"", data).strip()
    return (
        text.startswith(b"{")
        and b'"' not in text
        and text.count(b"{") == text.count(b"}")
        and text.count(b"[") == text.count(b"]")
    )
