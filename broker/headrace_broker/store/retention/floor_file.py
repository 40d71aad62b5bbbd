"""config/topicFloors.json: what a topic's own limits have expired stays expired after a restart.

The limits alone don't suffice: one may have been lifted since, or a group's offset been reset.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from headrace_broker.store.files.config_file import ConfigFile

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files
    from headrace_broker.store.store_queue import StoreQueue

Topics = dict[str, dict[int, "Floor"]]


class Floor(NamedTuple):
    """The first visible queue offset, and the target of the unit before it.

    The second tells a recreated topic from its predecessor: its unit there is another, or missing.
    """

    queue_offset: int
    physical_offset_before: int


class FloorFile:
    """The floors of all queues that have one."""

    def __init__(self, root: Path, files: Files) -> None:
        self._file = ConfigFile(root / "config" / "topicFloors.json", files)
        self._floors: Topics = {}
        self._is_saved = True

    def load(self, topics: Mapping[str, Mapping[int, StoreQueue]]) -> None:
        """Restore the saved floors of these queues. Raises StoreFormatError, OSError."""
        self._floors = self._file.read(_parse) or {}
        for queue, floor in self._of(topics):
            queue.consume_queue.restore_floor(floor.queue_offset, floor.physical_offset_before)

    def _of(self, topics: Mapping[str, Mapping[int, StoreQueue]]) -> list[tuple[StoreQueue, Floor]]:
        return [
            (topics[topic][queue_id], floor)
            for topic, floors in self._floors.items()
            for queue_id, floor in floors.items()
            if queue_id in topics.get(topic, {})
        ]

    def note(self, queue: StoreQueue, floor: Floor) -> None:
        """Record a floor that has risen."""
        self._floors.setdefault(queue.topic, {})[queue.queue_id] = floor
        self._is_saved = False

    def save(self, topics: Mapping[str, Mapping[int, StoreQueue]]) -> None:
        """Write the file if a floor has risen, without deleted queues. Raises OSError."""
        if self._is_saved:
            return
        kept: Topics = {}
        for queue, floor in self._of(topics):
            kept.setdefault(queue.topic, {})[queue.queue_id] = floor
        self._file.save(json.dumps(kept).encode())
        self._floors, self._is_saved = kept, True


def _parse(text: bytes) -> Topics:
    """The floors in a file's text. Raises ValueError if it holds none."""
    try:
        return {
            topic: {int(queue_id): Floor(*map(int, floor)) for queue_id, floor in floors.items()}
            for topic, floors in json.loads(text).items()
        }
    except (AttributeError, TypeError) as error:
        raise ValueError(f"holds no floors: {error}") from error
