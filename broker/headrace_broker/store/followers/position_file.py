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
    """The next queue offset to follow, and where the unit before it points; -1 if there is none.

    A topic that was deleted and made again has another unit there, or none.
    """

    queue_offset: int
    place_before: int


class PositionFile:
    """The positions of one follower."""

    def __init__(self, root: Path, name: str, files: Files) -> None:
        self._file = ConfigFile(root / FOLDER / f"{name}.json", files)

    def load(self) -> Positions:
        """All that are known. Raises StoreFormatError, OSError."""
        return self._file.read(parse) or {}

    def save(self, positions: Positions) -> None:
        """Replace the file, on disk when this returns. Raises OSError."""
        topics: dict[str, dict[int, Position]] = {}
        for (topic, queue_id), position in positions.items():
            topics.setdefault(topic, {})[queue_id] = position
        self._file.save(json.dumps(topics).encode())


def parse(text: bytes) -> Positions:
    """Raises ValueError for another text."""
    try:
        return {
            (topic, int(queue_id)): Position(*map(int, position))
            for topic, positions in json.loads(text).items()
            for queue_id, position in positions.items()
        }
    except (AttributeError, TypeError) as error:
        raise ValueError(f"holds no positions: {error}") from error
