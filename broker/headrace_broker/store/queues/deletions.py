"""End offsets of deleted topics' records: ``positions/deletedTopics.json``, headrace's own.

Records stay in the log when their topic is deleted, and a start reads the log again: all of it
without queues, and from the newest unit on otherwise. Records below the end of a deleted topic get
no unit then, so a topic that was created again does not get the messages of the deleted one.

The end is on disk before the first file of the topic's queues is removed. So a start removes the
rest of a deletion that a crash has interrupted: a part of a topic must not pass for the topic.

Source: docs/store-format.md "Files"; tests/store/test_deletions.py.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from headrace_broker.store.files.positions import FOLDER, PositionFile
from headrace_protocol.errors import Lane
from headrace_protocol.waiting import fetch

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files

DELETIONS_NAME: Final = "deletedTopics.json"
_SAVES: Final = Lane("saves of deletions", threads=1, outlives_client=True)


class Deletions:
    """Physical offsets by topic; the records of the deleted topic are below.

    ends: for reading.
    """

    def __init__(self, root: Path, files: Files) -> None:
        self.ends: dict[str, int] = {}
        self._file = PositionFile(root / FOLDER / DELETIONS_NAME, dict[str, int], files)
        self._saved: dict[str, int] = {}
        self._saving = threading.Lock()

    def load(self) -> None:
        """Read the file. Raises OSError, StoreFormatError."""
        self._saved = self._file.load() or {}
        self.ends = dict(self._saved)

    async def note(self, topic: str, log_end: int, *, use_threads: bool) -> None:
        """Save that a topic is deleted, whose records are below ``log_end``. Raises OSError.

        use_threads: save in a thread.
        """
        self.ends[topic] = log_end
        if use_threads:
            await fetch(self.save, _SAVES)
        else:
            self.save()

    def settle(self, log_start: int, log_end: int) -> None:
        """Forget what the log has lost, and save: what is appended now is of no deleted topic.

        Raises OSError.
        """
        ends = {topic: min(end, log_end) for topic, end in self.ends.items()}
        self.ends = {topic: end for topic, end in ends.items() if end > log_start}
        self.save()

    def save(self) -> None:
        """Bring the file to disk if it has changed; in any thread. Raises OSError."""
        with self._saving:
            ends = self.ends.copy()
            if ends != self._saved:
                self._file.save(ends)
                self._saved = ends
