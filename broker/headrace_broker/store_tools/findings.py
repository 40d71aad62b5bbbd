"""What a check found, and the safe ways to mend it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from headrace_broker.store.files.config_file import ConfigFile
from headrace_broker.store.files.filesystem import make_private

if TYPE_CHECKING:
    from pathlib import Path


class Fix(Protocol):
    """One change to a file that loses nothing: what it replaces is kept first."""

    @property
    def path(self) -> Path:
        """The file that it changes."""

    def apply(self, saved: SavedCopies) -> None:
        """Keep what goes and make the change. Raises OSError."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be.

    position: of the first wrong byte in the file, if there is one.
    is_damage: False for what is worth knowing, but no fault of the store.
    """

    path: Path
    problem: str
    position: int | None = None
    fix: Fix | None = None
    is_damage: bool = True


class SavedCopies:
    """A new folder that keeps what a repair cuts, under the names that it had."""

    def __init__(self, root: Path, folder: Path) -> None:
        """root: of the store. folder: made with the first copy."""
        self.root = root
        self.folder = folder

    def keep(self, path: Path, position: int, data: bytes) -> None:
        """Copy bytes that stood at ``position`` of a file to ``NAME@POSITION``."""
        place = self._place(path)
        place.with_name(f"{place.name}@{position}").write_bytes(data)

    def put_away(self, path: Path) -> None:
        """Move a whole file here."""
        shutil.move(path, self._place(path))

    def _place(self, path: Path) -> Path:
        place = self.folder / path.relative_to(self.root)
        make_private(place.parent)
        return place


@dataclass(frozen=True, slots=True)
class Overwrite:
    """Put other bytes in a place; the file may have to be made."""

    path: Path
    position: int
    data: bytes
    file_bytes: int

    def apply(self, saved: SavedCopies) -> None:
        """As ``Fix`` says."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            self.path.touch()
        with self.path.open("r+b") as file:
            file.truncate(max(self.file_bytes, self.path.stat().st_size))
            file.seek(self.position)
            saved.keep(self.path, self.position, file.read(len(self.data)))
            file.seek(self.position)
            file.write(self.data)


@dataclass(frozen=True, slots=True)
class ClearFrom:
    """Zeros from a place on; behind ``used_end`` there are none but zeros."""

    path: Path
    position: int
    used_end: int

    def apply(self, saved: SavedCopies) -> None:
        """As ``Fix`` says."""
        with self.path.open("r+b") as file:
            file.seek(self.position)
            data = file.read(self.used_end - self.position)
            saved.keep(self.path, self.position, data)
            file.seek(self.position)
            file.write(bytes(len(data)))


@dataclass(frozen=True, slots=True)
class PutAway:
    """Move the whole file out of the store."""

    path: Path

    def apply(self, saved: SavedCopies) -> None:
        """As ``Fix`` says."""
        saved.put_away(self.path)


@dataclass(frozen=True, slots=True)
class IndexAnew:
    """Move an index file out of the store; the repair then makes the index anew from the log."""

    path: Path

    def apply(self, saved: SavedCopies) -> None:
        """As ``Fix`` says."""
        if self.path.exists():
            saved.put_away(self.path)


@dataclass(frozen=True, slots=True)
class RestoreBackup:
    """Write a config file anew from its backup, which stays."""

    path: Path
    data: bytes

    def apply(self, saved: SavedCopies) -> None:
        """As ``Fix`` says."""
        if self.path.exists():
            saved.put_away(self.path)
        ConfigFile(self.path).save(self.data)
