"""Followers: what is made from the queues minutes later, and never slows a producer.

A taker (ConsumeQueues, index) consumes the ring in step with the appends. A follower (compaction,
tiered storage) has no place in the ring: it is told which queues got units, and reads from
ConsumeQueue and log, in a thread, what lies between these and its own position.

What always holds:

1. Nothing at or past ``flushed_offset`` is followed: a power cut could give its queue offset to
   another message.
2. A position is saved only after ``sync``, so it never says more than the follower has on disk.
   After an error or a start the follower resumes there; what it has beyond is followed again.
3. ``needed_from`` is at or before each record that no saved position covers, so that the log keeps
   it: ``_needs`` has the first such record of each queue that was looked at, and the units of all
   others lie at or past ``_noticed_from``.
4. The thread runs one thing at a time, and alone moves a ``Track``.
"""

from __future__ import annotations

import heapq
import math
import sys
from contextlib import ExitStack, contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import structlog
import trio

from headrace_broker.store.files.cold_files import ColdFiles
from headrace_broker.store.followers.follower_work import Look, Pass, QueueLook, Save
from headrace_broker.store.followers.position_file import PositionFile
from headrace_broker.store.queues.queue_blocks import QueueView

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    from headrace_broker.store.followers.follower_work import Follower, Track
    from headrace_broker.store.followers.position_file import Name
    from headrace_broker.store.log.commit_log import CommitLog
    from headrace_broker.store.store_queue import StoreQueue

log = structlog.get_logger("headrace.broker")

TICK_S: Final = 0.5
# Between two saves: each costs the disk some flushes, and saves following so much anew.
SAVE_S: Final = 5.0
RETRY_S: Final = 10.0
# A stop waits so long for what is behind; the next start resumes with the rest.
FINISH_S: Final = 5.0
# Some two milliseconds of the loop.
_QUEUES_AT_ONCE: Final = 128


class FollowerStatus(NamedTuple):
    """For the monitor. behind_bytes: of the log, from the oldest record that is still needed.

    problem: what it is stopped by, "" if by nothing.
    """

    name: str
    behind_messages: int
    behind_bytes: int
    problem: str


class Following:
    """Runs one follower."""

    def __init__(
        self,
        follower: Follower,
        positions: PositionFile,
        commit_log: CommitLog,
        topics: Mapping[str, Mapping[int, StoreQueue]],
        dispatched_offset: Callable[[], int],
    ) -> None:
        """Reads the saved positions. Raises StoreFormatError, OSError."""
        self.follower = follower
        self._file = positions
        self._commit_log = commit_log
        self._topics = topics
        self._dispatched_offset = dispatched_offset
        self._saved = positions.load()
        # Saved positions that recovery left without a queue, or a queue without their units.
        self._start_ends = {
            name: end for name, at in self._saved.items() if (end := self._end(name)) < at[0]
        }
        self._is_unsaved = False
        self._saved_s = -math.inf
        self._problem = ""
        self._threads = trio.CapacityLimiter(1)
        # Queues that are gone, for the thread to tell the follower.
        self._gone: dict[Name, None] = {}
        self._damaged: dict[StoreQueue, str] = {}
        # Kept when the follower begins anew: only a good save lets records go.
        self._needs: dict[StoreQueue, int] = {}
        self._begin_anew()

    def _end(self, name: Name) -> int:
        queue = self._find(name)
        return queue.consume_queue.max_offset if queue else 0

    def _find(self, name: Name) -> StoreQueue | None:
        topic, queue_id = name
        return self._topics.get(topic, {}).get(queue_id)

    def _begin_anew(self) -> None:
        """Resume all queues at the positions that are on disk, with what they cover."""
        self._tracks: dict[StoreQueue, Track] = {}
        self._behind: dict[Track, None] = {}
        self._noticed_from = 0
        self._looking: list[StoreQueue] = []
        self._pending = {
            queue: None for queues in self._topics.values() for queue in queues.values()
        }
        self._gone.update((name, None) for name in self._saved if not self._find(name))
        self._asked = trio.Event()
        self._asked.set()

    # --- the store's side ------------------------------------------------------------------

    def notify(self, queues: Iterable[StoreQueue]) -> None:
        """These queues got units, or their topics are wanted now or not any more."""
        self._pending.update(dict.fromkeys(queues))
        self._asked.set()

    def forget(self, queue: StoreQueue) -> None:
        """A queue is about to be deleted."""
        self._gone[queue.topic, queue.queue_id] = None
        self._pending.pop(queue, None)
        self._damaged.pop(queue, None)
        self._drop(queue)
        self._asked.set()

    def _drop(self, queue: StoreQueue) -> None:
        name = queue.topic, queue.queue_id
        self._needs.pop(queue, None)
        self._start_ends.pop(name, None)
        track = self._tracks.pop(queue, None)
        if track is not None:
            self._behind.pop(track, None)
        if self._saved.pop(name, None) is not None:
            self._is_unsaved = True

    def needed_from(self) -> int:
        """Physical offset from which on the log must stay; very large if no record is needed."""
        needed_from = min(self._needs.values(), default=sys.maxsize)
        is_all_known = not self._pending and not self._looking
        return needed_from if is_all_known else min(needed_from, self._noticed_from)

    def status(self) -> FollowerStatus:
        """Where it stands; may be called in any thread."""
        # Copies in one step each: the loop goes on changing the originals.
        queues = {*(track.queue for track in list(self._behind)), *self._pending, *self._looking}
        needed_from = max(self.needed_from(), self._commit_log.min_offset)
        return FollowerStatus(
            self.follower.name,
            sum(map(self._behind_messages, queues)),
            max(self._commit_log.max_offset - needed_from, 0),
            next(iter(self._damaged.values()), self._problem),
        )

    def _behind_messages(self, queue: StoreQueue) -> int:
        track = self._tracks.get(queue)
        saved = track.saved if track else self._saved.get((queue.topic, queue.queue_id))
        return max(queue.consume_queue.max_offset - saved[0], 0) if saved else 0

    # --- running ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow until cancelled; an error of the disk is logged, and tried again."""
        self._begin_anew()
        while True:
            await self._asked.wait()
            self._asked = trio.Event()
            try:
                await self._run_round()
            except OSError as error:
                self._log_failure(error)
                self._begin_anew()
                await trio.sleep(RETRY_S)
            await trio.sleep(TICK_S)  # what comes meanwhile is one block
            if self._behind or self._is_unsaved:
                self._asked.set()

    async def _run_round(self) -> None:
        for work in self._follow():
            await trio.to_thread.run_sync(work.run, limiter=self._threads)
            await self._save_in_time()
        await self._save_in_time()
        self._problem = ""

    async def _save_in_time(self) -> None:
        if self._is_unsaved and trio.current_time() - self._saved_s >= SAVE_S:
            self._saved_s = trio.current_time()
            with self._saving() as save:
                await trio.to_thread.run_sync(save.run, limiter=self._threads)

    def finish(self) -> None:
        """Catch up as far as there is time, after ``run`` has ended; an error is logged."""
        try:
            self.catch_up(monotonic() + FINISH_S)
        except OSError as error:
            self._log_failure(error)
        except Exception as error:  # an error of the feature must not spoil the stop
            log.error("follower not finished", follower=self.follower.name, exc_info=error)
        status = self.status()
        if status.behind_messages:
            log.warning("follower is behind, the next start resumes", **status._asdict())

    def catch_up(self, end_s: float = math.inf) -> None:
        """Follow what is on disk and save, in the caller's thread.

        end_s: when to save, whatever is left. Raises OSError, and what the follower raises.
        """
        with ExitStack() as on_error:
            on_error.callback(self._begin_anew)
            for work in self._follow():
                work.run()
                if monotonic() > end_s:
                    break
            self._save_now()
            on_error.pop_all()

    def _save_now(self) -> None:
        if self._is_unsaved:
            with self._saving() as save:
                save.run()

    def _log_failure(self, error: OSError) -> None:
        self._problem = str(error)
        log.error(
            "follower failed, it resumes where it was last saved",
            follower=self.follower.name,
            reason=self._problem,
        )

    def _follow(self) -> Iterator[Look | Pass]:
        """Follow all that is on disk; what it yields must be run before it is resumed."""
        noticed_from = self._dispatched_offset()
        self._looking += self._pending
        self._pending = {}
        while self._looking or self._gone:
            look = self._start_look()
            yield look
            self._looked(look)
        self._noticed_from = noticed_from
        while self._has_readable():
            step = self._start_pass()
            yield step
            self._passed(step)
            if not step.moved and not step.damaged:
                return

    # --- looking ---------------------------------------------------------------------------

    def _start_look(self) -> Look:
        queues = self._looking[:_QUEUES_AT_ONCE]
        items = [
            self._queue_look(queue)
            for queue in queues
            if self._is_there(queue) and self.follower.wants(queue.topic)
        ]
        return Look(self.follower, queues, items, list(self._gone))

    def _is_there(self, queue: StoreQueue) -> bool:
        """Whether a queue is still the one of its name."""
        return self._find((queue.topic, queue.queue_id)) is queue

    def _queue_look(self, queue: StoreQueue) -> QueueLook:
        consume_queue, name = queue.consume_queue, (queue.topic, queue.queue_id)
        return QueueLook(
            queue,
            self._tracks.get(queue),
            self._saved.get(name),
            self._start_ends.get(name),
            ColdFiles(consume_queue.files),
            consume_queue.search_cold(self._commit_log.min_offset),
            consume_queue.max_offset,
        )

    def _looked(self, look: Look) -> None:
        for name in look.gone:
            self._gone.pop(name, None)
            if self._saved.pop(name, None) is not None:
                self._is_unsaved = True
        del self._looking[: len(look.queues)]
        for track in look.tracks:
            if self._is_there(track.queue):
                self._found(track)
        followed = {track.queue for track in look.tracks}
        for queue in look.queues:
            if queue not in followed and self._is_there(queue):
                self._drop(queue)

    def _found(self, track: Track) -> None:
        queue = track.queue
        if queue not in self._tracks:
            self._tracks[queue] = track
            # Not on disk, but what is there says no more than this, or is of an earlier queue.
            self._saved[track.name] = track.saved
            self._start_ends.pop(track.name, None)
            self._is_unsaved = True
        if track.next_place is not None:
            self._behind[track] = None
            self._needs.setdefault(queue, track.next_place)

    # --- passes: a block of each of the queues that are furthest behind ----------------------

    def _has_readable(self) -> bool:
        return any(self._is_readable(track) for track in self._behind)

    def _is_readable(self, track: Track) -> bool:
        is_damaged = track.queue in self._damaged
        return _next_place(track) < self._commit_log.flushed_offset and not is_damaged

    def _start_pass(self) -> Pass:
        readable = filter(self._is_readable, self._behind)
        tracks = heapq.nsmallest(_QUEUES_AT_ONCE, readable, key=_next_place)
        return Pass(
            self.follower,
            [(track, _view(track.queue)) for track in tracks],
            ColdFiles(self._commit_log.files),
            self._commit_log.flushed_offset,
        )

    def _passed(self, step: Pass) -> None:
        self._is_unsaved |= bool(step.moved)
        for track in step.moved:
            if track.next_place is None:
                self._behind.pop(track, None)
        for track, error in step.damaged:
            if self._tracks.get(track.queue) is track:
                self._damaged[track.queue] = str(error)
                log.error(
                    "follower skips a damaged queue, and keeps the log from there on",
                    follower=self.follower.name,
                    reason=str(error),
                )

    # --- saving ----------------------------------------------------------------------------

    @contextmanager
    def _saving(self) -> Iterator[Save]:
        """A save, to be run in the block; notes what it brought to disk.

        Whether the disk has the positions of a save that fails is unknown. What they cover is
        synced, so the follower resumes there and not before; the log keeps what the positions of
        the last good save need.
        """
        self._is_unsaved = False
        save = Save(self.follower, self._file, list(self._tracks.values()), dict(self._saved))
        try:
            yield save
        except BaseException:
            self._is_unsaved = True
            if save.is_synced:
                self._note_synced(save)
            raise
        self._note_synced(save)
        self._note_saved(save)

    def _note_synced(self, save: Save) -> None:
        for track in save.tracks:
            if self._tracks.get(track.queue) is track:  # else deleted meanwhile
                self._saved[track.name] = save.positions[track.name]

    def _note_saved(self, save: Save) -> None:
        for track in save.tracks:
            queue = track.queue
            if self._tracks.get(queue) is not track:
                continue  # deleted meanwhile
            if track.next_place is None:
                self._needs.pop(queue, None)
            else:
                self._needs[queue] = track.next_place


def _next_place(track: Track) -> int:
    return sys.maxsize if track.next_place is None else track.next_place


def _view(queue: StoreQueue) -> QueueView:
    consume_queue = queue.consume_queue
    units = ColdFiles(consume_queue.files)
    return QueueView(queue.topic, queue.queue_id, units, consume_queue.max_offset)


class Followers:
    """All followers of a store; ``add`` them between its load and its run."""

    def __init__(
        self,
        root: Path,
        commit_log: CommitLog,
        topics: Mapping[str, Mapping[int, StoreQueue]],
        dispatched_offset: Callable[[], int],
    ) -> None:
        """dispatched_offset: up to where the log's records have their units."""
        self.all: list[Following] = []
        self._root = root
        self._commit_log = commit_log
        self._topics = topics
        self._dispatched_offset = dispatched_offset

    def add(self, follower: Follower) -> Following:
        """Follow all queues from where it was. Raises StoreFormatError, OSError."""
        positions = PositionFile(self._root, follower.name, self._commit_log.files.fs)
        following = Following(
            follower, positions, self._commit_log, self._topics, self._dispatched_offset
        )
        self.all.append(following)
        return following

    def notify(self, queues: Collection[StoreQueue]) -> None:
        """These queues got units."""
        for following in self.all:
            following.notify(queues)

    def forget(self, queue: StoreQueue) -> None:
        """A queue is about to be deleted."""
        for following in self.all:
            following.forget(queue)

    def needed_from(self) -> int:
        """Physical offset from which on the log must stay; very large if no record is needed."""
        return min((following.needed_from() for following in self.all), default=sys.maxsize)

    def slowest(self) -> str:
        """The follower that needs the oldest record; "" without followers."""
        if not self.all:
            return ""
        return min(self.all, key=Following.needed_from).follower.name

    def finish(self) -> None:
        """Follow what is on disk before a stop."""
        for following in self.all:
            following.finish()

    def statistics(self) -> tuple[FollowerStatus, ...]:
        """Where each stands."""
        return tuple(following.status() for following in self.all)

    def report(self) -> dict[str, dict[str, Any]]:
        """Where each stands, by name, for /ready; may be called in any thread."""
        return {
            status.name: {
                "behindMessages": status.behind_messages,
                "behindBytes": status.behind_bytes,
                **({"problem": status.problem} if status.problem else {}),
            }
            for status in self.statistics()
        }

    def runtime_info(self) -> dict[str, str]:
        """The same for GET_BROKER_RUNTIME_INFO."""
        return {
            f"follower.{name}.{key}": str(value)
            for name, values in self.report().items()
            for key, value in values.items()
        }
