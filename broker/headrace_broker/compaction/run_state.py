"""The state that runs of a queue leave to the next: a file in ``compaction/headrace/``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np
import structlog

from headrace_broker.compaction.segments import COMPACTION_FOLDER
from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.positions import PositionFile

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files
    from headrace_protocol.columns import Array

log = structlog.get_logger("headrace.broker")

OWN_FOLDER: Final = "headrace"
_STATE_NAME: Final = "state.json"


class MarkerTimes(NamedTuple):
    """The times of a queue's runs, oldest first: when delete markers were first part of one.

    A run enters all messages up to some queue offset that no run has entered before.
    ends: the queue offset after the last message that the run entered. times_ms: when it ran.
    """

    ends: list[int]
    times_ms: list[int]

    def is_over(self, queue_offsets: Array, before_ms: int) -> Array:
        """A mask of the markers that were in a run before a time. False where no run is known."""
        times_ms = np.array([*self.times_ms, np.iinfo(np.int64).max])
        is_over: Array = times_ms[np.searchsorted(self.ends, queue_offsets, "right")] < before_ms
        return is_over

    def after_run(self, end: int, now_ms: int, before_ms: int) -> MarkerTimes:
        """With one more run, and one entry only for the runs before ``before_ms``."""
        old = int(np.searchsorted(self.times_ms, before_ms))
        first = max(old - 1, 0)
        ends, times_ms = self.ends[first:], self.times_ms[first:]
        if not ends or end > ends[-1]:
            ends, times_ms = [*ends, end], [*times_ms, max(now_ms, *times_ms, 0)]
        return MarkerTimes(ends, times_ms)


class RunState(msgspec.Struct, frozen=True, rename="camel"):
    """The end of the runs of a queue, and the figures of the last one.

    position: the first queue offset whose key no run has entered yet.
    marker_count: delete markers that the last run has kept; keeps_markers: even those whose time
    was over.
    last_run_ms, last_run_s: when it ended, and how long it took; 0 if there was none.
    bytes_before, bytes_after: of the segments that it read, and of those that it left.
    kept_end: one past the queue offset of the last message that it kept.
    """

    position: int = 0
    marker_times: MarkerTimes = MarkerTimes([], [])
    marker_count: int = 0
    keeps_markers: bool = False
    last_run_ms: int = 0
    last_run_s: float = 0.0
    bytes_before: int = 0
    bytes_after: int = 0
    kept_count: int = 0
    dropped_count: int = 0
    kept_end: int = 0

    def dropped_end(self, found_end: int, synced_offset: int) -> int:
        """The queue offset up to which runs have dropped what a log lacks at its end.

        found_end: of the log as a start found it; synced_offset: where that is cut.
        """
        return min(self.position, synced_offset) if found_end >= self.kept_end else 0

    def cut(self, queue_offset: int) -> RunState:
        """The state for a log to which messages are appended from a queue offset on.

        Those that are appended again after a crash have not been part of a run.
        """
        if max(self.position, self.kept_end) <= queue_offset:
            return self
        return msgspec.structs.replace(
            self,
            position=min(self.position, queue_offset),
            kept_end=min(self.kept_end, queue_offset),
        )


def own_folder(root: Path, topic: str, queue_id: int) -> Path:
    """The folder of headrace's own files about a compacted queue."""
    return root / COMPACTION_FOLDER / OWN_FOLDER / topic / str(queue_id)


class StateFile:
    """The state of one queue on disk."""

    def __init__(self, folder: Path, fs: Files) -> None:
        self._file = PositionFile(folder / _STATE_NAME, RunState, fs)

    def load(self) -> RunState:
        """The saved state, or that of a queue without runs. Raises OSError.

        A damaged file counts as none: the next run begins at the first message then, and delete
        markers stay longer.
        """
        try:
            return self._file.load() or RunState()
        except StoreFormatError as error:
            log.warning("compaction begins anew", reason=str(error))
            return RunState()

    def save(self, state: RunState) -> None:
        """Replace the file; it is on disk when this returns. Raises OSError."""
        self._file.save(state)
