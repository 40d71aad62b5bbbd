"""Seals: checksums written at a clean stop, so that bit rot is found before it is served.

``headrace.seal`` has a line for each file of log, queues and index: modification time, bytes in
use, and a CRC-32 for each MiB in use. Another program that writes a file changes its modification
time, which voids the file's seal; bit rot does not. Blocks are compared at their first read, so
seals add no reads to a start. The first line is the checkpoint, which changes when the peer has
run; the last line is the checksum of the lines before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zlib_ng.zlib_ng import crc32

from headrace_broker.store.files.file_seal import FileSeal
from headrace_broker.store.files.filesystem import read_file

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files
    from headrace_broker.store.files.mapped_file import MappedFile
    from headrace_broker.store.integrity.checkpoint import Checkpoint

SEAL_NAME: Final = "headrace.seal"


class Seals:
    """The seals of a store directory."""

    def __init__(self, root: Path, files: Files) -> None:
        self._root = root
        self._files = files
        self._found: dict[str, tuple[int, FileSeal]] = {}
        self._checkpoint = ""
        self.is_loaded = False

    def load(self) -> None:
        """Read the seals of the last clean stop; a damaged file counts as no seals."""
        path = self._root / SEAL_NAME
        lines, _, checksum = read_file(path).rpartition(b"\n") if path.exists() else (b"",) * 3
        self.is_loaded = bool(lines) and checksum == b"%08x" % crc32(lines)
        if self.is_loaded:
            self._checkpoint, *rest = lines.decode().split("\n")
            for line in rest:
                time_ns, used_bytes, digits, name = line.split(" ", 3)
                checksums = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
                self._found[name] = int(time_ns), FileSeal(int(used_bytes), checksums)

    def is_of(self, checkpoint: Checkpoint) -> bool:
        """True if the checkpoint is the one that was sealed."""
        return self._checkpoint == _text(checkpoint)

    @property
    def paths(self) -> list[Path]:
        """The sealed files that still exist."""
        return [path for name in self._found if (path := self._root / name).exists()]

    def find(self, path: Path) -> FileSeal | None:
        """The seal of a file, or None if the file has none or was written since."""
        name = str(path)[len(str(self._root)) + 1 :]
        time_ns, seal = self._found.get(name, (0, None))
        return seal if seal is not None and path.stat().st_mtime_ns == time_ns else None

    def save(self, checkpoint: Checkpoint, files: Iterable[tuple[MappedFile, int]]) -> None:
        """Write seals for files that are on disk already, with the bytes in use. Raises OSError."""
        texts = [_text(checkpoint), *(self._line(*used) for used in files)]
        lines = "\n".join(texts).encode()
        self._files.replace(self._root / SEAL_NAME, lines + b"\n%08x" % crc32(lines))

    def _line(self, file: MappedFile, used_bytes: int) -> str:
        path, seal = file.path, FileSeal.of_written(file.path, used_bytes, file.seal)
        digits = "".join(f"{checksum:08x}" for checksum in seal.checksums)
        return f"{path.stat().st_mtime_ns} {used_bytes} {digits} {path.relative_to(self._root)}"


def _text(checkpoint: Checkpoint) -> str:
    return " ".join(map(str, checkpoint))
