"""The work of a follower's thread: scanning the queues, following them, saving positions.

Each piece of work is made on the loop, run in the thread and evaluated on the loop again;
``followers.py`` has the order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np
import structlog

from headrace_broker.store.files.positions import Position, QueuePositions
from headrace_broker.store.queues.consume_queue import BLANK_SIZE
from headrace_broker.store.queues.queue_blocks import (
    QueueNotFollowed,
    QueueView,
    read_block,
    read_records,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from headrace_broker.store.files.cold_files import ColdFiles
    from headrace_broker.store.files.filesystem import Files
    from headrace_broker.store.files.mapped_file import MappedFile
    from headrace_broker.store.files.positions import Name, Positions
    from headrace_broker.store.queues.queue_blocks import QueueBlock
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_protocol.columns import RecordColumns

log = structlog.get_logger("headrace.broker")

POSITIONS_FOLDER: Final = "followers"

# Read in one pass; a stop waits for the pass to end.
PASS_BYTES: Final = 32 << 20


def position_file(root: Path, name: str, files: Files) -> QueuePositions:
    """The file of the next queue offsets that a follower reads."""
    return QueuePositions(root / POSITIONS_FOLDER / f"{name}.json", files)


class Follower(Protocol):
    """The part of a feature; its verbs but ``wants`` run in a thread, one call at a time.

    After an OSError the follower is retried; any other error is logged with its traceback. Either
    way it resumes at its saved positions or, if saving failed after ``sync``, at those synced.
    """

    @property
    def name(self) -> str:
        """Its name in logs, in metrics and of its position file."""

    @property
    def is_part_of_stop(self) -> bool:
        """True if a stop is clean only if the follower has every message on disk."""

    def wants(self, topic: str) -> bool:
        """True if a topic's queues are followed; called on the loop when one of them gets units."""

    def resume(self, queue: LocalQueue, queue_offset: int) -> int:
        """Prepare to follow a queue from ``queue_offset`` on: drop what was kept from there on.

        queue: as the log has it now.

        Returns the queue offset to begin at: this one, or a lower one if data was lost.
        """

    def follow(self, block: QueueBlock) -> None:
        """Take the next messages of a queue; they need not reach the disk before ``sync``.

        A block begins past the end of the previous one if the log lost the messages in between.
        Raises QueueNotFollowed to stop at this queue: the log keeps it from this block on.
        """

    def sync(self) -> None:
        """Bring all messages taken so far to disk; they are not delivered again."""

    def gone(self, topic: str, queue_id: int) -> None:
        """A queue was deleted, or replaced by a new one of the same name."""

    def used(self) -> list[tuple[MappedFile, int]]:
        """Its files with the bytes in use, to be sealed at a clean stop."""

    def close(self) -> None:
        """Release descriptors and maps, without writing anything; the last call."""


class LocalQueue(NamedTuple):
    """A queue in the log, for use in a thread. first: its oldest record. log: the files."""

    view: QueueView
    first: int
    log: ColdFiles

    @property
    def name(self) -> Name:
        """Topic and queue id."""
        return self.view.topic, self.view.queue_id

    def record(self, queue_offset: int) -> RecordColumns | None:
        """The record at a queue offset; None if the log has none there.

        Raises OSError, QueueDamaged.
        """
        units = self.view.units.units(queue_offset, 1)
        if not self.first <= queue_offset < self.view.end or not len(units):
            return None
        if units["size"][0] == BLANK_SIZE:
            return None
        return read_records(self.view, units, np.array([queue_offset]), self.log)


class Track:
    """The position in one queue that is followed; only the thread moves it.

    position: the next queue offset. physical_offset_before: target of the unit before it, -1
    without one. next_physical_offset: target of the unit at ``position``; None if the last scan
    or pass found no unit there.
    """

    __slots__ = ("next_physical_offset", "physical_offset_before", "position", "queue")

    def __init__(self, queue: StoreQueue) -> None:
        self.queue = queue
        self.position = 0
        self.physical_offset_before = -1
        self.next_physical_offset: int | None = None

    @property
    def name(self) -> Name:
        """Topic and queue id."""
        return self.queue.topic, self.queue.queue_id

    @property
    def to_save(self) -> Position:
        """The position to save."""
        return Position(self.position, self.physical_offset_before)


class QueueScan(NamedTuple):
    """A queue to scan.

    track: None at the first scan. synced: the position to resume at. find_first: returns the oldest
    queue offset whose record is in the log. start_end: the queue's end when the store was opened,
    if that was before the saved position.
    """

    queue: StoreQueue
    track: Track | None
    synced: Position | None
    start_end: int | None
    view: QueueView
    log: ColdFiles
    find_first: Callable[[], int]

    @property
    def units(self) -> ColdFiles:
        """Its units."""
        return self.view.units

    @property
    def end(self) -> int:
        """Its end now."""
        return self.view.end


class Scan:
    """Finds the position of each queue and reports deleted queues to the follower.

    queues: all queues scanned. items: those of them to follow. gone: the deleted ones.
    """

    def __init__(
        self,
        follower: Follower,
        queues: list[StoreQueue],
        items: list[QueueScan],
        gone: list[Name],
    ) -> None:
        self.queues = queues
        self.gone = gone
        self.tracks: list[Track] = []
        self._items = items
        self._follower = follower

    def run(self) -> None:
        """Run in the thread. Raises OSError and any error of the follower."""
        for name in self.gone:
            self._follower.gone(*name)
        for item in self._items:
            track = item.track or self._begin(item)
            is_waiting = track.position < item.end
            track.next_physical_offset = (
                item.units.physical_offset(track.position) if is_waiting else None
            )
            self.tracks.append(track)

    def _begin(self, item: QueueScan) -> Track:
        queue, first = item.queue, item.find_first()
        wanted = self._synced_offset(item)
        if wanted is None:
            wanted = first
        elif wanted < first:
            _warn_of_loss(self._follower, queue, wanted, first)
        resumed = self._follower.resume(LocalQueue(item.view, first, item.log), wanted)
        track = Track(queue)
        track.position = max(min(resumed, wanted), first)
        if track.position:
            track.physical_offset_before = item.units.physical_offset(track.position - 1)
        return track

    def _synced_offset(self, item: QueueScan) -> int | None:
        """The synced position; None if there is none, or it is of an earlier queue of this name."""
        synced = item.synced
        if synced is None:
            return None
        at = min(synced.queue_offset, item.end if item.start_end is None else item.start_end)
        before = item.units.physical_offset(at - 1) if at else -1
        if at < synced.queue_offset:
            is_same = 0 <= before < synced.physical_offset_before  # the log has lost its end
        else:
            # -1: the unit before has expired, so there is nothing to compare.
            is_same = not at or before in {synced.physical_offset_before, -1}
        if is_same:
            return at
        self._follower.gone(item.queue.topic, item.queue.queue_id)
        return None


def _warn_of_loss(follower: Follower, queue: StoreQueue, first: int, end: int) -> None:
    log.warning(
        "messages left the log before a follower read them",
        follower=follower.name,
        queue=f"{queue.topic}/{queue.queue_id}",
        first=first,
        end=end,
    )


class QueuePass(NamedTuple):
    """A queue to read on. skip: finds where to begin if the log has lost the next message."""

    track: Track
    view: QueueView
    skip: Callable[[], int] | None


class Pass:
    """Hands the follower one block per queue, up to ``PASS_BYTES`` in all.

    moved: tracks that have advanced. damaged: queues that can't be followed any further.
    """

    def __init__(
        self,
        follower: Follower,
        queues: list[QueuePass],
        log_files: ColdFiles,
        flushed_offset: int,
    ) -> None:
        self.damaged: list[tuple[Track, QueueNotFollowed]] = []
        self.moved: list[Track] = []
        self._follower = follower
        self._queues = queues
        self._log = log_files
        self._flushed_offset = flushed_offset

    def run(self) -> None:
        """Run in the thread. Raises OSError and any error of the follower."""
        read_bytes = 0
        for track, view, skip in self._queues:
            if skip is not None and (first := skip()) > track.position:
                _warn_of_loss(self._follower, track.queue, track.position, first)
                self._move(track, first, view)
            try:
                block = read_block(view, track.position, self._log, self._flushed_offset)
                if block is not None and len(block.units):
                    self._follower.follow(block)
            except QueueNotFollowed as error:
                self.damaged.append((track, error))
                continue
            if block is not None:
                read_bytes += len(block.records.data)
                self._move(track, block.end, view)
            if read_bytes >= PASS_BYTES:
                return

    def _move(self, track: Track, end: int, view: QueueView) -> None:
        track.position = end
        track.physical_offset_before = view.units.physical_offset(end - 1)
        track.next_physical_offset = view.units.physical_offset(end) if end < view.end else None
        self.moved.append(track)


class Save:
    """Has the follower sync, then saves its positions.

    positions: those of queues without a track; ``run`` adds those of the tracks. is_synced: whether
    the follower has brought to disk what the positions cover.
    """

    def __init__(
        self, follower: Follower, file: QueuePositions, tracks: list[Track], positions: Positions
    ) -> None:
        self.tracks = tracks
        self.positions = positions
        self.is_synced = False
        self._follower = follower
        self._file = file

    def run(self) -> None:
        """Run in the thread. Raises OSError and any error of the follower."""
        self._follower.sync()
        self.positions.update((track.name, track.to_save) for track in self.tracks)
        self.is_synced = True
        self._file.save(self.positions)
