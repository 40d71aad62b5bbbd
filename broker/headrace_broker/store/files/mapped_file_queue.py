"""One address space made of files of equal length, each named by its first offset."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from itertools import takewhile
from typing import TYPE_CHECKING

from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.mapped_file import MappedFile

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files


def drop_from_empty(paths: list[Path], fs: Files) -> list[Path]:
    """Remove the first empty file and all later ones; returns the files before it.

    After a power cut a file may have a name but no content. Then it was never synced, and since
    files are synced in order, no later data was acknowledged as flushed.
    """
    kept = list(takewhile(lambda path: path.stat().st_size, paths))
    for path in reversed(paths[len(kept) :]):  # last first, so an interrupted start leaves no gap
        fs.unlink(path)
    return kept


class MappedFileQueue:
    """``files`` is ordered and without gaps. The owner knows where the data ends."""

    __slots__ = (
        "_making",
        "_prepared",
        "directory",
        "file_bytes",
        "files",
        "fs",
        "setting",
    )

    def __init__(self, directory: Path, file_bytes: int, fs: Files, setting: str) -> None:
        """setting: name of the setting that ``file_bytes`` comes from, for error messages."""
        self.directory = directory
        self.file_bytes = file_bytes
        self.fs = fs
        self.setting = setting
        self.files: list[MappedFile] = []
        self._prepared: MappedFile | None = None
        self._making = threading.Lock()

    def load(self, *, is_clean: bool = True) -> None:
        """Find the files. Raises StoreFormatError for a file that does not belong here."""
        sizes = _file_sizes(self.directory)
        names = sorted(sizes)
        if not is_clean:
            paths = [self.directory / name for name in names]
            names = [path.name for path in drop_from_empty(paths, self.fs)]
        elif names and not sizes[names[-1]]:
            self.fs.unlink(self.directory / names.pop())
        for name in names:
            self._add_found(name, sizes[name])

    def _add_found(self, name: str, length: int) -> None:
        path = self.directory / name
        if not (len(name) == 20 and name.isascii() and name.isdigit()):
            raise StoreFormatError(
                path, "no store file has such a name", "move it out of the store's directory"
            )
        if length != self.file_bytes:
            raise StoreFormatError(
                path,
                f"has {length} bytes, but {self.setting} is {self.file_bytes}",
                f"set {self.setting} to the size the store was made with",
            )
        file = MappedFile(path, self.file_bytes, self.fs)
        if self.files and self.files[-1].end_offset != file.start_offset:
            raise StoreFormatError(
                path,
                f"follows {self.files[-1].path.name} with a gap",
                "restore the missing file or move the later ones away",
            )
        self.files.append(file)

    @property
    def min_offset(self) -> int:
        """Start of the first file; 0 without files."""
        return self.files[0].start_offset if self.files else 0

    def find(self, offset: int) -> MappedFile | None:
        """The file that contains ``offset``, or None."""
        files = self.files
        if not files or offset < files[0].start_offset:
            return None
        index = (offset - files[0].start_offset) // self.file_bytes
        return files[index] if index < len(files) else None

    def rewrite(self, start: int, end: int) -> None:
        """As ``MappedFile.rewrite``, for a range of this address space."""
        for file in self.files:
            if start < file.end_offset and file.start_offset < end:
                file.rewrite(
                    max(start - file.start_offset, 0), min(end - file.start_offset, file.file_bytes)
                )

    def write_again(self, data: memoryview, start: int) -> None:
        """As ``rewrite``, for bytes of one file that were read already."""
        file = self.find(start)
        assert file is not None
        file.write(data, start - file.start_offset)

    @property
    def is_prepared(self) -> bool:
        """True if the next file exists already."""
        return self._prepared is not None

    def prepare(self) -> None:
        """Create the file after the last one, fully allocated; may run in a thread.

        Raises OSError.
        """
        with self._making:
            if self._prepared is None:
                self._prepared = self._make(self._next_offset(), self.file_bytes)

    def take(self) -> MappedFile:
        """Append the prepared file, or one created now. Raises OSError."""
        with self._making:
            taken = self._prepared or self._make(self._next_offset(), self.file_bytes)
            self._prepared = None
            self.files.append(taken)
        return taken

    def add(self, start_offset: int, allocate_bytes: int) -> MappedFile:
        """Append a file that starts at ``start_offset``. Raises OSError."""
        assert not self.files or start_offset == self._next_offset()
        self.files.append(self._make(start_offset, allocate_bytes))
        return self.files[-1]

    def drop_prepared(self) -> None:
        """Remove the prepared file, so that a clean stop leaves no empty file."""
        with self._making:
            if self._prepared is not None:
                self._prepared.delete()
                self._prepared = None

    def delete_from(self, offset: int) -> None:
        """Remove the files that start at or after ``offset``."""
        while self.files and self.files[-1].start_offset >= offset:
            self.files.pop().delete()

    def detach_first(self, count: int) -> list[MappedFile]:
        """Detach the oldest ``count`` files, for the caller to delete."""
        detached, self.files[:] = self.files[:count], self.files[count:]
        return detached

    def _next_offset(self) -> int:
        return self.files[-1].end_offset if self.files else 0

    def _make(self, start_offset: int, allocate_bytes: int) -> MappedFile:
        path = self.directory / f"{start_offset:020d}"
        return MappedFile.create(path, self.file_bytes, self.fs, allocate_bytes)


def _file_sizes(directory: Path) -> dict[str, int]:
    """The length of each file in a folder by its name; empty without the folder."""
    with suppress(FileNotFoundError), os.scandir(directory) as entries:
        return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
    return {}
