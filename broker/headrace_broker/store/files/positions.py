"""Positions and small tables for the next start: one small file for each owner.

The file holds one value as JSON with a checksum (``config_file``). Its owner saves it after all
that it counts is on disk. Apache's brokers read none of these files.

Source: docs/store-format.md "Positions"; tests/store/test_positions.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

import msgspec

from headrace_broker.store.files.config_file import ConfigFile

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files

# The files that belong to no other folder.
FOLDER: Final = "positions"
# Topic and queue id.
Name = tuple[str, int]
Positions = dict[Name, "Position"]
Value = TypeVar("Value")


class PositionFile(Generic[Value]):
    """The saved value of one owner."""

    def __init__(
        self, path: Path, value_type: type[Value], files: Files, *, has_backup: bool = True
    ) -> None:
        """has_backup: whether an older value serves where the file is damaged."""
        self._file = ConfigFile(path, files, has_backup=has_backup)
        self._files = files
        self._decode = msgspec.json.Decoder(value_type).decode

    def load(self) -> Value | None:
        """The saved value; None without a file. Raises StoreFormatError, OSError."""
        return self._file.read(self._decode)

    def save(self, value: Value) -> None:
        """Replace the value; it is on disk when this returns. Raises OSError."""
        self._file.save(msgspec.json.encode(value))

    def remove(self) -> None:
        """Forget the value; ``Files.sync_names`` makes that durable. Raises OSError."""
        for path in (self._file.damaged_path, self._file.backup_path, self._file.path):
            if path.exists():
                self._files.unlink(path)


class Position(NamedTuple):
    """A queue offset, and the target of the unit before it; -1 without one.

    The second tells a recreated topic from its predecessor: its unit there is another, or missing.
    """

    queue_offset: int
    physical_offset_before: int


class QueuePositions:
    """A file of positions in queues."""

    def __init__(self, path: Path, files: Files) -> None:
        self._file = PositionFile(path, dict[str, dict[int, Position]], files)

    def load(self) -> Positions:
        """All saved positions. Raises StoreFormatError, OSError."""
        return {
            (topic, queue_id): position
            for topic, positions in (self._file.load() or {}).items()
            for queue_id, position in positions.items()
        }

    def save(self, positions: Positions) -> None:
        """Replace the file; it is on disk when this returns. Raises OSError."""
        topics: dict[str, dict[int, Position]] = {}
        for (topic, queue_id), position in positions.items():
            topics.setdefault(topic, {})[queue_id] = position
        self._file.save(topics)
