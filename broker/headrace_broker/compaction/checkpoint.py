"""``compaction/position-checkpoint``: how far runs have read each queue.

Source: docs/store-format.md "Compaction log".
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Final

import structlog

from headrace_broker.compaction.segments import COMPACTION_FOLDER
from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.config_file import ConfigFile

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files

log = structlog.get_logger("headrace.broker")

POSITION_FILE: Final = "position-checkpoint"
_OFFSETS: Final = "queueOffsetMap"
NEVER: Final = -1


class PositionCheckpoint:
    """The last queue offset that runs have read, by topic and queue; in any thread."""

    def __init__(self, root: Path, files: Files) -> None:
        self._file = ConfigFile(root / COMPACTION_FOLDER / POSITION_FILE, files)
        self._offsets: dict[str, int] = {}
        self._lock = threading.Lock()

    def load(self) -> None:
        """Read the file. If none is whole, runs read all segments again. Raises OSError."""
        try:
            self._offsets = self._file.read(parse) or {}
        except StoreFormatError as error:
            log.warning("runs begin anew, their positions can't be read", reason=str(error))

    def get(self, topic: str, queue_id: int, end_offset: int) -> int:
        """The last queue offset read; NEVER without one.

        end_offset: of the compaction log. A position that is not below it is that of an earlier
        topic or of a log that was lost, and counts as none.
        """
        offset = self._offsets.get(_key(topic, queue_id), NEVER)
        return offset if offset < end_offset else NEVER

    def save(self, topic: str, queue_id: int, queue_offset: int) -> None:
        """Set a position; on disk when this returns. Raises OSError."""
        self._change(_key(topic, queue_id), queue_offset)

    def drop(self, topic: str, queue_id: int) -> None:
        """Remove the position of a deleted queue. Raises OSError."""
        if _key(topic, queue_id) in self._offsets:
            self._change(_key(topic, queue_id), None)

    def _change(self, key: str, queue_offset: int | None) -> None:
        with self._lock:
            offsets = self._offsets | ({} if queue_offset is None else {key: queue_offset})
            if queue_offset is None:
                offsets.pop(key, None)
            self._file.save(offsets_text(offsets))
            self._offsets = offsets


def _key(topic: str, queue_id: int) -> str:
    return f"{topic}_{queue_id}"


def offsets_text(offsets: dict[str, int]) -> bytes:
    """The text of the file."""
    return json.dumps({"empty": False, _OFFSETS: offsets}).encode()


def parse(text: bytes) -> dict[str, int]:
    """Offsets by TOPIC_QUEUEID. Raises ValueError for another text."""
    try:
        return {key: int(offset) for key, offset in json.loads(text)[_OFFSETS].items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"holds no positions: {error}") from error
