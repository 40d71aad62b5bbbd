"""Followers: background readers of the queues that never slow a producer.

A taker (ConsumeQueues, index) consumes the ring in step with the appends. A follower (compaction,
tiered storage) has no cursor in the ring: it is notified which queues got units, and a thread reads
the messages from its position on out of ConsumeQueue and log. It may be minutes behind.

What always holds:

1. Nothing at or past ``flushed_offset`` is followed: a power cut could give its queue offset to
   another message.
2. A position is saved only after ``sync``, so it never covers more than the follower has on disk.
   A start resumes at the saved positions. An error resumes at those last synced, which are the
   saved ones unless saving them failed after ``sync``. Anything beyond is followed again. A queue
   that resumes below its saved position has the lower one saved first.
3. ``needed_from`` is at or before each record that no saved position covers, so the log keeps these
   records: ``_needs`` has the first one of each queue that was scanned, and the records of all
   other queues lie at or past ``_scanned_offset``.
4. The thread runs one piece of work at a time, and only the thread moves a ``Track``.
"""

from __future__ import annotations

import heapq
import math
import random
import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog
import trio

from headrace_broker.store.files.cold_files import ColdFiles
from headrace_broker.store.files.filesystem import NO_ROOM
from headrace_broker.store.followers.follower_work import (
    Pass,
    QueuePass,
    QueueScan,
    Save,
    Scan,
)
from headrace_broker.store.queues.cold_queue import ColdQueue
from headrace_broker.store.queues.queue_blocks import QueueView
from headrace_protocol.outages import Outages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from headrace_broker.store.files.positions import Name, QueuePositions
    from headrace_broker.store.followers.follower_work import Follower, Track
    from headrace_broker.store.log.commit_log import CommitLog
    from headrace_broker.store.store_queue import StoreQueue

log = structlog.get_logger("headrace.broker")

TICK_S: Final = 0.5
# Between two saves: each costs some flushes; a start follows again what came after the last.
SAVE_S: Final = 5.0
# After an error; twice as long after each further one.
RETRY_S: Final = 10.0
RETRY_S_MAX: Final = 60.0
# While the disk has no room, which may come at any time.
ROOM_RETRY_S: Final = 5.0
# A stop lets followers catch up for this long; the next start resumes with the rest.
FINISH_S: Final = 5.0
# Takes the loop some two milliseconds.
_QUEUES_AT_ONCE: Final = 128


class FollowerStatus(NamedTuple):
    """A follower's state for the monitor.

    behind_bytes: of the log, from the oldest record that is still needed. problem: what stops the
    follower, "" if nothing does. problem_seconds: for how long it has failed; 0 for a queue that is
    given up. behind_seconds: for how long it has not caught up.
    """

    name: str
    behind_messages: int
    behind_bytes: int
    problem: str
    problem_seconds: float = 0.0
    behind_seconds: float = 0.0


class FollowedRecord(NamedTuple):
    """The oldest record for which a follower keeps the log. queue: None while it is looked for."""

    physical_offset: int
    follower: str
    queue: StoreQueue | None
    problem: str

    def __str__(self) -> str:
        where = f", topic {self.queue.topic}, queue {self.queue.queue_id}" if self.queue else ""
        return f"follower {self.follower}{where}{f': {self.problem}' if self.problem else ''}"


class FollowedLog(NamedTuple):
    """The log, its queues by topic, and the end of the records that have their units."""

    commit_log: CommitLog
    topics: Mapping[str, Mapping[int, StoreQueue]]
    dispatched_offset: Callable[[], int]


class Following:
    """Runs one follower and keeps its positions."""

    def __init__(
        self,
        follower: Follower,
        positions: QueuePositions,
        log_: FollowedLog,
        save_s: float = SAVE_S,
        holds_log: Callable[[], bool] = lambda: True,
    ) -> None:
        """Read the saved positions. Raises StoreFormatError, OSError.

        save_s: time between two saves. holds_log: whether the log keeps what the follower needs.
        """
        self.follower = follower
        self.holds_log = holds_log
        self._save_s = save_s
        self._file = positions
        self._commit_log, self._topics, self._dispatched_offset = log_
        self._synced = positions.load()
        # The ends of queues that recovery left short of their saved position; 0 for missing queues.
        self._start_ends = {
            name: end for name, at in self._synced.items() if (end := self._end(name)) < at[0]
        }
        self._is_unsaved = False
        # Whether a queue is resumed below its saved position.
        self._is_set_back = False
        self._saved_s = -math.inf
        self._problem = ""
        # Since when messages have waited without a pause; None once it has caught up.
        self._behind_since: float | None = None
        self._outages = Outages(log.error, ended=log.warning)
        # Set by ``retry`` until the next round.
        self._retry = trio.Event()
        self._hurried = trio.Event()
        # Called after each save, which may have released records of the log.
        self.on_saved: Callable[[], None] = lambda: None
        self._threads = trio.CapacityLimiter(1)
        # Deleted queues, which the next scan reports to the follower.
        self._gone: dict[Name, None] = {}
        self._damaged: dict[StoreQueue, str] = {}
        # Survives a restart of the follower: only a completed save releases records.
        self._needs: dict[StoreQueue, int] = {}
        self._restart()

    def _end(self, name: Name) -> int:
        queue = self._find(name)
        return queue.consume_queue.max_offset if queue else 0

    def synced_offset(self, name: Name) -> int | None:
        """The queue offset up to which the follower has a queue on disk; None at its beginning."""
        position = self._synced.get(name)
        return position.queue_offset if position is not None else None

    def _find(self, name: Name) -> StoreQueue | None:
        topic, queue_id = name
        return self._topics.get(topic, {}).get(queue_id)

    def _restart(self) -> None:
        """Resume all queues at the positions last synced."""
        self._tracks: dict[StoreQueue, Track] = {}
        self._behind: dict[Track, None] = {}
        self._scanned_offset = 0
        self._unscanned: list[StoreQueue] = []
        self._pending = {
            queue: None for queues in self._topics.values() for queue in queues.values()
        }
        self._gone.update((name, None) for name in self._synced if not self._find(name))
        self._wakeup = trio.Event()
        self._wakeup.set()

    # --- the store's side ------------------------------------------------------------------

    def notify(self, queues: Iterable[StoreQueue]) -> None:
        """Scan these queues: they got units, or ``wants`` may have changed for their topics.

        A queue that is not followed costs a send no more than this test.
        """
        wants, tracks = self.follower.wants, self._tracks
        for queue in queues:
            if wants(queue.topic) or queue in tracks:
                self._pending[queue] = None
                self._wakeup.set()

    def hurry(self) -> None:
        """Save soon what is followed, since the disk is short of room."""
        self._saved_s = -math.inf
        self._hurried.set()
        self._wakeup.set()

    def forget(self, queue: StoreQueue) -> None:
        """Drop a queue that is about to be deleted."""
        self._gone[queue.topic, queue.queue_id] = None
        self._pending.pop(queue, None)
        self._damaged.pop(queue, None)
        self._drop(queue)
        self._wakeup.set()

    def _drop(self, queue: StoreQueue) -> None:
        name = queue.topic, queue.queue_id
        self._needs.pop(queue, None)
        self._start_ends.pop(name, None)
        track = self._tracks.pop(queue, None)
        if track is not None:
            self._behind.pop(track, None)
        if self._synced.pop(name, None) is not None:
            self._is_unsaved = True

    def retry(self) -> None:
        """Resume queues that were given up as well, without the pause after an error."""
        self._retry.set()
        self._wakeup.set()

    def needed_from(self) -> int:
        """Physical offset from which the log must be kept; very large if no record is needed."""
        needed_from = min(self._needs.values(), default=sys.maxsize)
        is_all_known = not self._pending and not self._unscanned
        return needed_from if is_all_known else min(needed_from, self._scanned_offset)

    def oldest(self) -> FollowedRecord:
        """The record at ``needed_from``."""
        needed_from = self.needed_from()
        queues = (queue for queue, at in list(self._needs.items()) if at == needed_from)
        return FollowedRecord(
            needed_from, self.follower.name, next(queues, None), self.status().problem
        )

    def status(self) -> FollowerStatus:
        """The follower's state, from any thread."""
        # Each copy is one atomic step, since the loop keeps changing the originals.
        queues = {*(track.queue for track in list(self._behind)), *self._pending, *self._unscanned}
        needed_from = max(self.needed_from(), self._commit_log.min_offset)
        return FollowerStatus(
            self.follower.name,
            sum(map(self._behind_count, queues)),
            max(self._commit_log.max_offset - needed_from, 0),
            self._problem or next(iter(self._damaged.values()), ""),
            self.problem_seconds,
            0.0 if self._behind_since is None else monotonic() - self._behind_since,
        )

    @property
    def problem_seconds(self) -> float:
        """Seconds for which the follower has failed; 0 if it works."""
        return self._outages.seconds(self._outage)

    @property
    def _outage(self) -> str:
        return f"follower {self.follower.name}"

    def _behind_count(self, queue: StoreQueue) -> int:
        track = self._tracks.get(queue)
        position = track.to_save if track else self._synced.get((queue.topic, queue.queue_id))
        return max(queue.consume_queue.max_offset - position[0], 0) if position else 0

    # --- running ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow until cancelled; disk errors are logged and retried."""
        pause_s = RETRY_S
        self._restart()
        while True:
            await self._wakeup.wait()
            self._wakeup = trio.Event()
            try:
                await self._run_round()
            except OSError as error:
                self._log_failure(error)
                self._restart()
                wait_s = ROOM_RETRY_S if error.errno in NO_ROOM else pause_s
                with trio.move_on_after(wait_s * random.uniform(0.75, 1.0)):
                    await self._retry.wait()
                pause_s = min(2 * pause_s, RETRY_S_MAX)
            else:
                pause_s = RETRY_S
            with trio.move_on_after(TICK_S):  # messages that arrive meanwhile make one block
                await self._hurried.wait()
            self._hurried = trio.Event()
            if self._behind or self._is_unsaved:
                self._wakeup.set()

    async def _run_round(self) -> None:
        if self._behind_since is None:
            self._behind_since = monotonic()
        for work in self._follow():
            await trio.to_thread.run_sync(work.run, limiter=self._threads)
            await self._save_in_time()
        await self._save_in_time()
        self._problem = ""
        self._outages.worked(self._outage)
        if not self._behind:
            self._behind_since = None

    async def _save_in_time(self) -> None:
        if self._is_unsaved and trio.current_time() - self._saved_s >= self._save_s:
            self._saved_s = trio.current_time()
            with self._saving() as save:
                await trio.to_thread.run_sync(save.run, limiter=self._threads)
            self.on_saved()

    def finish(self) -> None:
        """Catch up for ``FINISH_S`` once ``run`` has ended; errors are logged."""
        try:
            self.catch_up(monotonic() + FINISH_S)
        except OSError as error:
            self._log_failure(error)
        except Exception as error:  # an error in the feature must not prevent the stop
            log.error("follower not finished", follower=self.follower.name, exc_info=error)
        status = self.status()
        if status.behind_messages:
            log.warning("follower is behind, the next start resumes", **status._asdict())

    def catch_up(self, end_s: float = math.inf) -> None:
        """Follow all flushed messages and save, in the caller's thread.

        end_s: when to stop following and save. Raises OSError and any error of the follower.
        """
        with ExitStack() as on_error:
            on_error.callback(self._restart)
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
        self._outages.failed(self._outage, error)

    def _follow(self) -> Iterator[Scan | Save | Pass]:
        """Follow all flushed messages; the caller runs each yielded piece of work, then resumes."""
        if self._retry.is_set():
            self._retry = trio.Event()
            self._damaged.clear()
            self._restart()
        dispatched_offset = self._dispatched_offset()
        self._unscanned += self._pending
        self._pending = {}
        while self._unscanned or self._gone:
            scan = self._start_scan()
            yield scan
            self._note_scan(scan)
        self._scanned_offset = dispatched_offset
        if self._is_set_back:
            with self._saving() as save:
                yield save
        while self._has_readable():
            step = self._start_pass()
            yield step
            self._note_pass(step)
            if not step.moved and not step.damaged:
                return

    # --- scanning -------------------------------------------------------------------------

    def _start_scan(self) -> Scan:
        queues = self._unscanned[:_QUEUES_AT_ONCE]
        items = [
            self._queue_scan(queue)
            for queue in queues
            if self._is_current(queue) and self._wants(queue)
        ]
        return Scan(self.follower, queues, items, list(self._gone))

    def _wants(self, queue: StoreQueue) -> bool:
        """True for a queue to follow; batch queues, whose records hold many messages, are none."""
        return not queue.consume_queue.is_batch and self.follower.wants(queue.topic)

    def _is_current(self, queue: StoreQueue) -> bool:
        """True if the queue still exists under its name."""
        return self._find((queue.topic, queue.queue_id)) is queue

    def _queue_scan(self, queue: StoreQueue) -> QueueScan:
        consume_queue, name = queue.consume_queue, (queue.topic, queue.queue_id)
        return QueueScan(
            queue,
            self._tracks.get(queue),
            self._synced.get(name),
            self._start_ends.get(name),
            _view(queue),
            ColdFiles(self._commit_log.files),
            partial(ColdQueue(consume_queue).first_at, self._commit_log.min_offset),
        )

    def _note_scan(self, scan: Scan) -> None:
        for name in scan.gone:
            self._gone.pop(name, None)
            if self._synced.pop(name, None) is not None:
                self._is_unsaved = True
        del self._unscanned[: len(scan.queues)]
        for track in scan.tracks:
            if self._is_current(track.queue):
                self._note_track(track)
        followed = {track.queue for track in scan.tracks}
        for queue in scan.queues:
            if queue not in followed and self._is_current(queue):
                self._drop(queue)

    def _note_track(self, track: Track) -> None:
        queue = track.queue
        if queue not in self._tracks:
            self._tracks[queue] = track
            synced = self._synced.get(track.name)
            self._is_set_back |= synced is not None and track.position < synced.queue_offset
            self._synced[track.name] = track.to_save
            self._start_ends.pop(track.name, None)
            self._is_unsaved = True
        if track.next_physical_offset is not None:
            self._behind[track] = None
            self._needs.setdefault(queue, track.next_physical_offset)

    # --- passes: one block of each of the queues furthest behind ------------------------------

    def _has_readable(self) -> bool:
        return any(self._is_readable(track) for track in self._behind)

    def _is_readable(self, track: Track) -> bool:
        is_damaged = track.queue in self._damaged
        return _next_physical_offset(track) < self._commit_log.flushed_offset and not is_damaged

    def _start_pass(self) -> Pass:
        readable = filter(self._is_readable, self._behind)
        tracks = heapq.nsmallest(_QUEUES_AT_ONCE, readable, key=_next_physical_offset)
        return Pass(
            self.follower,
            [QueuePass(track, _view(track.queue), self._skip(track)) for track in tracks],
            ColdFiles(self._commit_log.files),
            self._commit_log.flushed_offset,
        )

    def _skip(self, track: Track) -> Callable[[], int] | None:
        """The search for the queue's oldest record in the log if the next one has left it."""
        log_min_offset = self._commit_log.min_offset
        if _next_physical_offset(track) >= log_min_offset:
            return None
        return partial(ColdQueue(track.queue.consume_queue).first_at, log_min_offset)

    def _note_pass(self, step: Pass) -> None:
        self._is_unsaved |= bool(step.moved)
        for track in step.moved:
            if track.next_physical_offset is None:
                self._behind.pop(track, None)
        for track, error in step.damaged:
            # A file that clean-up has removed meanwhile is no damage: the next pass skips it.
            if self._tracks.get(track.queue) is track and self._skip(track) is None:
                self._damaged[track.queue] = str(error)
                log.error(
                    "follower skips a queue, the log is kept from there on",
                    follower=self.follower.name,
                    reason=str(error),
                )

    # --- saving ----------------------------------------------------------------------------

    @contextmanager
    def _saving(self) -> Iterator[Save]:
        """Yield a save for the block to run, then note what it brought to disk.

        If the save fails after ``sync``, the position file may or may not have the new positions.
        What they cover is synced, so the follower resumes there; the log keeps all records that
        the positions of the last completed save need.
        """
        self._is_unsaved = False
        save = Save(self.follower, self._file, list(self._tracks.values()), dict(self._synced))
        try:
            yield save
        except BaseException:
            self._is_unsaved = True
            if save.is_synced:
                self._note_save(save, is_saved=False)
            raise
        self._is_set_back = False
        self._note_save(save, is_saved=True)

    def _note_save(self, save: Save, *, is_saved: bool) -> None:
        """Resume at the synced positions from now on; once saved, release what they cover."""
        for track in save.tracks:
            queue = track.queue
            if self._tracks.get(queue) is not track:
                continue  # deleted meanwhile
            self._synced[track.name] = save.positions[track.name]
            if not is_saved:
                continue
            if track.next_physical_offset is None:
                self._needs.pop(queue, None)
            else:
                self._needs[queue] = track.next_physical_offset


def _next_physical_offset(track: Track) -> int:
    return sys.maxsize if track.next_physical_offset is None else track.next_physical_offset


def _view(queue: StoreQueue) -> QueueView:
    consume_queue = queue.consume_queue
    units = ColdFiles(consume_queue.files)
    return QueueView(queue.topic, queue.queue_id, units, consume_queue.max_offset)
