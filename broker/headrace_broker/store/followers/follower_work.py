"""What a follower has done in its thread: looking where queues stand, following, saving.

Made on the loop, run in the thread, read on the loop again; ``followers.py`` says in which order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import structlog

from headrace_broker.store.followers.position_file import Position
from headrace_broker.store.queues.queue_blocks import QueueDamaged, QueueView, read_block

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.store.files.cold_files import ColdFiles
    from headrace_broker.store.followers.position_file import Name, PositionFile, Positions
    from headrace_broker.store.queues.queue_blocks import QueueBlock
    from headrace_broker.store.store_queue import StoreQueue

log = structlog.get_logger("headrace.broker")

# Read in one go; a stop waits for it.
PASS_BYTES: Final = 32 << 20


class Follower(Protocol):
    """What a feature implements; all but ``wants`` is called in a thread, one call at a time.

    What raises OSError is retried, any other error is logged with its traceback; either way the
    follower resumes at its saved positions.
    """

    @property
    def name(self) -> str:
        """For logs, metrics and the file of positions."""

    def wants(self, topic: str) -> bool:
        """Whether the queues of a topic are followed; asked when one gets units. On the loop."""

    def resume(self, topic: str, queue_id: int, queue_offset: int) -> int:
        """A queue will be followed from ``queue_offset`` on: drop what is kept from there on.

        Returns where to begin: that, or less for a follower that lacks what it had.
        """

    def follow(self, block: QueueBlock) -> None:
        """Take the next messages of a queue; they need not be on disk yet.

        The block begins later than the last one ended if the log lost what lay between.
        """

    def sync(self) -> None:
        """Bring all that was taken to disk; none of it is given again."""

    def gone(self, topic: str, queue_id: int) -> None:
        """A queue was deleted, or another one has its name now."""


class Track:
    """How far one queue was followed; a thread moves it.

    position: the next queue offset. place_before: where the unit before it points, -1 without one.
    next_place: where the unit at ``position`` points; None if it was not there at the last look.
    """

    __slots__ = ("next_place", "place_before", "position", "queue")

    def __init__(self, queue: StoreQueue) -> None:
        self.queue = queue
        self.position = 0
        self.place_before = -1
        self.next_place: int | None = None

    @property
    def name(self) -> Name:
        """Topic and queue id."""
        return self.queue.topic, self.queue.queue_id

    @property
    def saved(self) -> Position:
        """What is saved of it."""
        return Position(self.position, self.place_before)


class QueueLook(NamedTuple):
    """A queue to look at.

    track: None at the first look. saved: the position on disk. find_first: the oldest queue offset
    whose record is in the log. start_end: where the queue ended when the store was opened, if that
    was before the saved position. end: where it ends.
    """

    queue: StoreQueue
    track: Track | None
    saved: Position | None
    start_end: int | None
    units: ColdFiles
    find_first: Callable[[], int]
    end: int


class Look:
    """Finds where queues stand, and tells of those that are gone.

    queues: all that are looked at; items: of these, those to follow.
    """

    def __init__(
        self,
        follower: Follower,
        queues: list[StoreQueue],
        items: list[QueueLook],
        gone: list[Name],
    ) -> None:
        self.queues = queues
        self.gone = gone
        self.tracks: list[Track] = []
        self._items = items
        self._follower = follower

    def run(self) -> None:
        """In a thread. Raises OSError, and what the follower raises."""
        for name in self.gone:
            self._follower.gone(*name)
        for item in self._items:
            track = item.track or self._begin(item)
            is_waiting = track.position < item.end
            track.next_place = item.units.place(track.position) if is_waiting else None
            self.tracks.append(track)

    def _begin(self, item: QueueLook) -> Track:
        queue, first = item.queue, item.find_first()
        wanted = self._saved_offset(item)
        if wanted is None:
            wanted = first
        elif wanted < first:
            log.warning(
                "messages left the log before a follower had them",
                follower=self._follower.name,
                queue=f"{queue.topic}/{queue.queue_id}",
                first=wanted,
                end=first,
            )
        resumed = self._follower.resume(queue.topic, queue.queue_id, wanted)
        track = Track(queue)
        track.position = max(min(resumed, wanted), first)
        track.place_before = item.units.place(track.position - 1) if track.position else -1
        return track

    def _saved_offset(self, item: QueueLook) -> int | None:
        """The saved position, unless that is of an earlier queue of this name."""
        saved = item.saved
        if saved is None:
            return None
        at = min(saved.queue_offset, item.end if item.start_end is None else item.start_end)
        place = item.units.place(at - 1) if at else -1
        if at < saved.queue_offset:
            is_same = 0 <= place < saved.place_before  # the log has lost its end
        else:
            # Where the unit before has expired nobody knows its place any more.
            is_same = not at or place in {saved.place_before, -1}
        if is_same:
            return at
        self._follower.gone(item.queue.topic, item.queue.queue_id)
        return None


class Pass:
    """Hands the follower the next block of each of some queues, until it was much.

    damaged: queues that can't be read on.
    """

    def __init__(
        self,
        follower: Follower,
        queues: list[tuple[Track, QueueView]],
        log_files: ColdFiles,
        flushed_offset: int,
    ) -> None:
        self.damaged: list[tuple[Track, QueueDamaged]] = []
        self.moved: list[Track] = []
        self._follower = follower
        self._queues = queues
        self._log = log_files
        self._flushed_offset = flushed_offset

    def run(self) -> None:
        """In a thread. Raises OSError, and what the follower raises."""
        read_bytes = 0
        for track, view in self._queues:
            try:
                block = read_block(view, track.position, self._log, self._flushed_offset)
            except QueueDamaged as error:
                self.damaged.append((track, error))
                continue
            if block is not None:
                read_bytes += len(block.records.data)
                if len(block.units):
                    self._follower.follow(block)
                self._move(track, block.end, view)
            if read_bytes >= PASS_BYTES:
                return

    def _move(self, track: Track, end: int, view: QueueView) -> None:
        track.position = end
        track.place_before = view.units.place(end - 1)
        track.next_place = view.units.place(end) if end < view.end else None
        self.moved.append(track)


class Save:
    """Has the follower bring what it took to disk, then saves how far that is.

    positions: of queues without a track; those of the tracks are added.
    """

    def __init__(
        self, follower: Follower, file: PositionFile, tracks: list[Track], positions: Positions
    ) -> None:
        self.tracks = tracks
        self.positions = positions
        self.is_synced = False
        self._follower = follower
        self._file = file

    def run(self) -> None:
        """In a thread. Raises OSError, and what the follower raises."""
        self._follower.sync()
        self.positions.update((track.name, track.saved) for track in self.tracks)
        self.is_synced = True
        self._file.save(self.positions)
