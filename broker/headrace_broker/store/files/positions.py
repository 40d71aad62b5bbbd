"""followers/NAME.json: how far a follower is in each queue, for the next start."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace_broker.store.files.config_file import ConfigFile

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files

FOLDER: Final = "followers"
Name = tuple[str, int]
Positions = dict[Name, "Position"]


class Position(NamedTuple):
    """The next queue offset to follow, and the target of the unit before it; -1 without one.

    The second tells a recreated topic from its predecessor: its unit there is another, or missing.
    """

    queue_offset: int
    physical_offset_before: int


class PositionFile:
    """The saved positions of one follower."""

    def __init__(self, root: Path, name: str, files: Files) -> None:
        self._file = ConfigFile(root / FOLDER / f"{name}.json", files)

    def load(self) -> Positions:
        """All saved positions. Raises StoreFormatError, OSError."""
        return self._file.read(parse) or {}

    def save(self, positions: Positions) -> None:
        """Replace the file; it is on disk when this returns. Raises OSError."""
        topics: dict[str, dict[int, Position]] = {}
        for (topic, queue_id), position in positions.items():
            topics.setdefault(topic, {})[queue_id] = position
        self._file.save(json.dumps(topics).encode())


def parse(text: bytes) -> Positions:
    """The positions in a file's text. Raises ValueError if it holds none."""
    try:
        return {
            (topic, int(queue_id)): Position(*map(int, position))
            for topic, positions in json.loads(text).items()
            for queue_id, position in positions.items()
        }
    except (AttributeError, TypeError) as error:
        raise ValueError(f"holds no positions: {error}") from error
