"""Messages that a rebuild has pulled of a queue, in ``replicating/``, and its checkpoint.

The messages of a master are appended to a compaction log of their own, and the checkpoint is saved
after they are on disk. A rebuild resumes there after a start; without checkpoint, what is in
``replicating/`` is discarded.
Source: docs/store-format.md "Compaction log".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import structlog

from headrace_broker.compaction.queue_log import QueueLog
from headrace_broker.compaction.segments import REPLICATING
from headrace_broker.compaction.worker import Older
from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.positions import PositionFile
from headrace_broker.store.queues.queue_blocks import QueueBlock
from headrace_protocol.columns import UNIT_DTYPE
from headrace_protocol.java_hash import tags_code_of

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_broker.compaction.segments import Folders
    from headrace_broker.compaction.units import FileSizes
    from headrace_broker.store.files.filesystem import Files
    from headrace_protocol.columns import RecordColumns

log = structlog.get_logger("headrace.broker")

_CHECKPOINT_FILE: Final = "rebuild.json"


class RebuildCheckpoint(msgspec.Struct, frozen=True, rename="camel"):
    """The state of a rebuild.

    address: of the master. started_ms: when it began. position: the next queue offset to pull.
    hides_from: the first queue offset of the queue's own log; from there on only delete markers are
    pulled, since they may supersede older messages. end: one past the last offset to pull.
    kept_end: one past the last queue offset in ``replicating/``.
    """

    address: str
    started_ms: int
    hides_from: int
    end: int
    position: int = 0
    kept_end: int = 0


class Replica:
    """The files of one rebuild; all methods in threads, one at a time."""

    def __init__(self, folders: Folders, own_folder: Path, sizes: FileSizes, fs: Files) -> None:
        """own_folder: see ``run_state.own_folder``."""
        self._folders = folders.below(REPLICATING)
        self._file = PositionFile(own_folder / _CHECKPOINT_FILE, RebuildCheckpoint, fs)
        self._sizes = sizes
        self._fs = fs
        self._log = QueueLog(self._folders, sizes, fs)

    def saved(self) -> RebuildCheckpoint | None:
        """The checkpoint of an unfinished rebuild, if any. Raises OSError."""
        try:
            return self._file.load()
        except StoreFormatError as error:
            log.warning("rebuild begins anew", reason=str(error))
            return None

    def resume(self, checkpoint: RebuildCheckpoint) -> bool:
        """Open what was pulled; False if some of it is lost. Raises OSError, StoreFormatError."""
        self._log = QueueLog(self._folders, self._sizes, self._fs)
        self._log.load(lambda _path: None, is_clean=False)
        self._log.resume(checkpoint.kept_end, 0)
        return self._log.end_offset == checkpoint.kept_end

    def begin(self, checkpoint: RebuildCheckpoint) -> None:
        """Discard what is there, and begin. Raises OSError."""
        self.discard()
        self._file.save(checkpoint)

    def append(self, records: RecordColumns, hides_from: int) -> int:
        """Append the records that a merge needs; returns their bytes.

        Raises OSError, StoreError.
        """
        is_marker = (records.body_bytes == 0) & (records.properties_bytes > 0)
        kept = np.flatnonzero((records.queue_offset < hides_from) | is_marker)
        if not len(kept):
            return 0
        records = records.select(kept)
        units = np.zeros(len(kept), UNIT_DTYPE)
        units["size"] = records.size
        units["tags_code"] = [tags_code_of(text) for text in records.properties()]
        first, last = (int(records.queue_offset[at]) for at in (0, -1))
        self._log.append(QueueBlock("", 0, first, last + 1, units, records))
        return int(records.size.sum())

    def save(self, checkpoint: RebuildCheckpoint) -> None:
        """Bring all to disk, and then how far it goes. Raises OSError."""
        self._log.sync()
        checkpoint = msgspec.structs.replace(checkpoint, kept_end=self._log.end_offset)
        self._file.save(checkpoint)

    def older(self, hides_from: int) -> Older | None:
        """The segments to merge; None if nothing was pulled."""
        segments = [(segment.base, segment.count) for segment in self._log.segments]
        return Older(self._folders.texts, segments, hides_from) if segments else None

    def discard(self) -> None:
        """Remove the checkpoint, and then the files. Raises OSError."""
        self._file.remove()
        self._fs.sync_names()
        for folder in self._folders:
            for path in sorted(folder.glob("*")):
                self._fs.unlink(path)
        self._fs.sync_names()
        self._log = QueueLog(self._folders, self._sizes, self._fs)
