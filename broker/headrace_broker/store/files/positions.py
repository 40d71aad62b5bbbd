"""Positions in queues, for the next start: one small file for each owner.

A position names the unit before it, so it counts for the queue that it was saved in and for no
other of this name. Files of this kind: ``followers/NAME.json``, ``config/topicFloors.json``.

Source: docs/store-format.md "followers"; tests/store/test_positions.py.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from headrace_broker.store.files.config_file import ConfigFile

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files

# Topic and queue id.
Name = tuple[str, int]
Positions = dict[Name, "Position"]


class Position(NamedTuple):
    """A queue offset, and the target of the unit before it; -1 without one.

    The second tells a recreated topic from its predecessor: its unit there is another, or missing.
    """

    queue_offset: int
    physical_offset_before: int


class PositionFile:
    """The saved positions of one owner."""

    def __init__(self, path: Path, files: Files) -> None:
        self._file = ConfigFile(path, files)

    def load(self) -> Positions:
        """All saved positions. Raises StoreFormatError, OSError."""
        return self._file.read(_parse) or {}

    def save(self, positions: Positions) -> None:
        """Replace the file; it is on disk when this returns. Raises OSError."""
        topics: dict[str, dict[int, Position]] = {}
        for (topic, queue_id), position in positions.items():
            topics.setdefault(topic, {})[queue_id] = position
        self._file.save(json.dumps(topics).encode())


def _parse(text: bytes) -> Positions:
    """The positions in a file's text. Raises ValueError if it holds none."""
    try:
        return {
            (topic, int(queue_id)): Position(*map(int, position))
            for topic, positions in json.loads(text).items()
            for queue_id, position in positions.items()
        }
    except (AttributeError, TypeError) as error:
        raise ValueError(f"holds no positions: {error}") from error
