"""The file system of a store, with a note after each small file that is replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.store.files.filesystem import Files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path


class NotedFiles(Files):
    """note: gets the path and the new text."""

    def __init__(self, note: Callable[[Path, bytes], None]) -> None:
        super().__init__()
        self.note = note

    def replace(
        self, path: Path, data: bytes | Iterable[bytes], backup_path: Path | None = None
    ) -> None:
        super().replace(path, data, backup_path)
        self.note(path, data if isinstance(data, bytes) else b"".join(data))
