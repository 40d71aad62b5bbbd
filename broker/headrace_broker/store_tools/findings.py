"""Findings of a check, and fixes that lose nothing."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from headrace_broker.store.files.config_file import ConfigFile
from headrace_broker.store.files.filesystem import make_private

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headrace_protocol.columns import Array


class Fix(Protocol):
    """A change to a file that loses nothing: replaced bytes are saved first."""

    @property
    def path(self) -> Path:
        """The file to change."""

    def apply(self, saved: SavedCopies) -> None:
        """Save the bytes to be replaced and make the change. Raises OSError."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem of a file.

    position: of the first wrong byte in the file, if there is one.
    is_damage: False for a note, which is worth knowing but no fault of the store.
    """

    path: Path
    problem: str
    position: int | None = None
    fix: Fix | None = None
    is_damage: bool = True


class SavedCopies:
    """A new folder that keeps the bytes replaced by a repair, under the original names."""

    def __init__(self, root: Path, folder: Path) -> None:
        """root: the store's directory. folder: created with the first copy."""
        self.root = root
        self.folder = folder

    def keep(self, path: Path, position: int, data: bytes) -> None:
        """Save bytes from ``position`` of a file as ``NAME@POSITION``."""
        target = self._target(path)
        target.with_name(f"{target.name}@{position}").write_bytes(data)

    def move_aside(self, path: Path) -> None:
        """Move a whole file into the folder."""
        shutil.move(path, self._target(path))

    def _target(self, path: Path) -> Path:
        target = self.folder / path.relative_to(self.root)
        make_private(target.parent)
        return target


@dataclass(frozen=True, slots=True)
class Overwrite:
    """Write other bytes at ``position``; creates the file if it is missing."""

    path: Path
    position: int
    data: bytes
    file_bytes: int

    def apply(self, saved: SavedCopies) -> None:
        """See ``Fix``."""
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
    """Zero the file from ``position`` to ``used_end``, past which it is zero already."""

    path: Path
    position: int
    used_end: int

    def apply(self, saved: SavedCopies) -> None:
        """See ``Fix``."""
        with self.path.open("r+b") as file:
            file.seek(self.position)
            data = file.read(self.used_end - self.position)
            saved.keep(self.path, self.position, data)
            file.seek(self.position)
            file.write(bytes(len(data)))


@dataclass(frozen=True, slots=True)
class MoveAside:
    """Move the whole file out of the store, if it is still there."""

    path: Path

    def apply(self, saved: SavedCopies) -> None:
        """See ``Fix``."""
        if self.path.exists():
            saved.move_aside(self.path)


class RebuildIndex(MoveAside):
    """Move an index file out of the store; the repair then rebuilds the index from the log."""


@dataclass(frozen=True, slots=True)
class RestoreBackup:
    """Restore a config file from its backup, which stays."""

    path: Path
    data: bytes

    def apply(self, saved: SavedCopies) -> None:
        """See ``Fix``."""
        MoveAside(self.path).apply(saved)
        ConfigFile(self.path).save(self.data)


def runs(marked: Array) -> Iterator[tuple[int, int]]:
    """Start and end of each run of true values."""
    edges = np.flatnonzero(np.diff(marked.astype(np.int8), prepend=0, append=0))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def span(what: str, start: int, end: int) -> str:
    """The things from ``start`` to before ``end`` in a finding: unit 3, units 3 to 5."""
    return f"{what} {start}" if end == start + 1 else f"{what}s {start} to {end - 1}"
