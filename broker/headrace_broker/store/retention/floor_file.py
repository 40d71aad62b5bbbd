"""config/topicFloors.json: what a topic's own limits have expired stays expired after a restart.

The limits alone don't suffice: one may have been lifted since, or a group's offset been reset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.store.files.positions import QueuePositions

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files
    from headrace_broker.store.files.positions import Position, Positions
    from headrace_broker.store.store_queue import StoreQueue


def floor_file(root: Path, files: Files) -> QueuePositions:
    """The file of the first visible queue offsets."""
    return QueuePositions(root / "config" / "topicFloors.json", files)


class FloorFile:
    """The floors of all queues that have one: the first visible queue offsets."""

    def __init__(self, root: Path, files: Files) -> None:
        self._file = floor_file(root, files)
        self._floors: Positions = {}
        self._is_saved = True

    def load(self, topics: Mapping[str, Mapping[int, StoreQueue]]) -> None:
        """Restore the saved floors of these queues. Raises StoreFormatError, OSError."""
        self._floors = self._file.load()
        for (topic, queue_id), floor in self._of(topics).items():
            topics[topic][queue_id].consume_queue.restore_floor(*floor)

    def _of(self, topics: Mapping[str, Mapping[int, StoreQueue]]) -> Positions:
        floors = self._floors.items()
        return {name: floor for name, floor in floors if name[1] in topics.get(name[0], {})}

    def note(self, queue: StoreQueue, floor: Position) -> None:
        """Record a floor that has risen."""
        self._floors[queue.topic, queue.queue_id] = floor
        self._is_saved = False

    def save(self, topics: Mapping[str, Mapping[int, StoreQueue]]) -> None:
        """Write the file if a floor has risen, without deleted queues. Raises OSError."""
        if not self._is_saved:
            kept = self._of(topics)
            self._file.save(kept)
            self._floors, self._is_saved = kept, True
