"""Removes files that have expired, or whose room is needed.

``rules.py`` and ``topic_floors.py`` decide what to do; this module collects the facts they need and
carries the decisions out.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import structlog
import trio

from headrace_broker.store.files.cold_files import ColdFiles
from headrace_broker.store.life import State
from headrace_broker.store.queues.cold_queue import ColdQueue
from headrace_broker.store.retention.disk_forecast import (
    ALARM_EVERY_S,
    DiskForecast,
    nothing_to_consume,
)
from headrace_broker.store.retention.rules import ClockWatch, Facts, LogFile, plan_clean
from headrace_broker.store.retention.topic_trimmer import TopicTrimmer, newest_physical_offset
from headrace_daemon.slices import in_slices

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
    from pathlib import Path

    from headrace_broker.store.files.mapped_file import MappedFile
    from headrace_broker.store.index.index_file import IndexFiles
    from headrace_broker.store.log.commit_log import CommitLog
    from headrace_broker.store.queues.consume_queue import ConsumeQueue
    from headrace_broker.store.retention.disk_forecast import LowestUnconsumed, NeededRecord
    from headrace_broker.store.retention.rules import CleanPlan, Reason
    from headrace_broker.store.retention.topic_floors import TopicLimit
    from headrace_broker.store.settings import Retention, StoreSettings
    from headrace_broker.store.store_queue import StoreQueue

log = structlog.get_logger("headrace.broker")

# Rounds for which an administrator's request holds, as the peer's.
REQUESTED_ROUNDS: Final = 20
_SLICE_S: Final = 0.002
# Some file systems have times in whole seconds, and records carry the time their turn began.
_TIME_SLACK_MS: Final = 10_000
FREE_BYTES: Final = 16 << 20
# Between two rounds on request; a share of the time that rounds may take.
_PAUSE_S: Final = 0.1
_ROUNDS_SHARE: Final = 0.1
_LOG_EVERY_S: Final = 10.0
_Result = TypeVar("_Result")


class CleanerStatus(NamedTuple):
    """The cleaner's state for the monitor. full_in_hours: None if that is not to be expected."""

    removed_files: int
    waiting_files: int
    oldest_unconsumed: str
    full_in_hours: float | None


class Rest(NamedTuple):
    """The rest of the store, as the cleaner sees it.

    settled_from: returns the physical offset from which records are still to be flushed, taken by
    takers or followed.
    flush: brings log, queues and index to disk. durable_from: returns the physical offset up to
    which the takers' files are on disk.
    oldest_followed: returns the oldest record that a follower needs, None if that holds no file.
    hurry: called when files that are to make room still have to be flushed or followed.
    """

    settled_from: Callable[[], int]
    flush: Callable[[], Awaitable[None]]
    durable_from: Callable[[], int]
    oldest_followed: Callable[[], NeededRecord | None]
    hurry: Callable[[], None]


class Cleaner:
    """Runs one clean-up round per ``clean_interval_ms``; threads do disk work if ``use_threads``.

    retention: may be replaced at any time.
    unconsumed: returns the ``LowestUnconsumed`` for one scan of all queues.
    topic_limits: returns the limits of all topics that have their own.
    carriers: by topic, appends its unconsumed records before a physical offset anew, some at each
    call, so that they don't keep their files.
    """

    def __init__(
        self,
        settings: StoreSettings,
        commit_log: CommitLog,
        index_files: IndexFiles,
        topics: Mapping[str, Mapping[int, StoreQueue]],
        rest: Rest,
    ) -> None:
        self.settings = settings
        self.commit_log = commit_log
        self.index_files = index_files
        self.use_threads = False
        self.unconsumed: Callable[[], LowestUnconsumed] = lambda: nothing_to_consume
        self.topic_limits: Callable[[], Mapping[str, TopicLimit]] = dict
        self.carriers: Mapping[str, Callable[[int], Awaitable[None]]] = {}
        # Files that the store has detached, still to be removed from the disk.
        self.detached: list[MappedFile] = []
        # Freed at a time, so that other writes get through in between.
        self.free_bytes = FREE_BYTES
        self._rest = rest
        self._asked = trio.Event()
        self._topics = topics
        self._clock_watch = ClockWatch()
        self.trimmer = TopicTrimmer(settings.root, commit_log, topics)
        self._disk_forecast = DiskForecast(commit_log, topics)
        self._log_min_cleaned = -1
        self._requested_rounds = 0
        self._removed_files = 0
        self._held_logged_s = self._removal_logged_s = -math.inf
        # Files removed since the last line about them, by reason.
        self._unlogged: Counter[Reason] = Counter()

    async def begin(self) -> None:
        """Raise floors before the first round, so a restart shows no expired messages again."""
        await self._try(self.raise_floors)

    @property
    def retention(self) -> Retention:
        """The rules, which may be replaced at any time."""
        return self.commit_log.room.retention

    @retention.setter
    def retention(self, retention: Retention) -> None:
        self.commit_log.room.retention = retention

    async def run(self) -> None:
        """Clean at intervals, and on request, until cancelled; disk errors are retried."""
        interval_s = self.settings.clean_interval_ms / 1000
        while True:
            with trio.move_on_after(interval_s):
                await self._asked.wait()
            self._asked = trio.Event()
            began_s = trio.current_time()
            await self._try(self.round)
            pause_s = max((trio.current_time() - began_s) / _ROUNDS_SHARE, _PAUSE_S)
            await trio.sleep(min(pause_s, interval_s))

    def ask(self) -> None:
        """Have the next round begin soon: the disk is short of room."""
        self._asked.set()

    @staticmethod
    async def _try(work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except OSError as error:
            log.error("clean-up failed, retrying", reason=str(error))

    def request(self) -> None:
        """Have the next rounds remove expired files, whatever the hour."""
        self._requested_rounds = REQUESTED_ROUNDS

    async def round(self) -> None:
        """Run one clean-up. Raises OSError."""
        self._check_clock()
        self.commit_log.look_again()
        await self._clean_after_log()  # left over from before the start
        await self.raise_floors()
        plan = await self._plan()
        self._report(plan)
        # A start can't rebuild the units of removed records: a queue would begin at 0 again.
        if plan.reasons and not await self._is_durable_past(len(plan.reasons)):
            return
        self.detached += self.commit_log.files.detach_first(len(plan.reasons))
        await self._clean_after_log()
        await self._remove()
        await self._in_thread(self._use_room)
        self.commit_log.look_again()
        await self._forecast()

    def _use_room(self) -> None:
        """Allocate what found no room before, the reserve first."""
        self.commit_log.files.fs.reserve.fill()
        with suppress(OSError):
            self.commit_log.room.retry()

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        return await trio.to_thread.run_sync(work) if self.use_threads else work()

    async def _bring_to_disk(self) -> bool:
        """Flush log, queues and index; if the disk failed, returns False: remove nothing."""
        await self._rest.flush()
        return self.commit_log.life.is_writable

    async def _is_durable_past(self, file_count: int) -> bool:
        """Flush everything; returns whether no start needs the first files of the log any more."""
        last = self.commit_log.files.files[file_count - 1]
        return await self._bring_to_disk() and self._rest.durable_from() >= last.end_offset

    # --- the log ---------------------------------------------------------------------------

    async def _plan(self) -> CleanPlan:
        facts = await self._facts()
        plan = plan_clean(facts, self.retention)
        if plan.held_back:
            self._rest.hurry()
        if plan.reasons:  # only then does it matter what consumers have read
            await self._find_unconsumed()
            keep_from = min(facts.keep_from, self._disk_forecast.keep_from)
            plan = plan_clean(facts._replace(keep_from=keep_from), self.retention)
            if plan.held_back and self.commit_log.life.state is State.OPEN:
                held = facts.files[len(plan.reasons)]
                await self._carry_over(held.end_offset, facts.keep_from)
        return plan

    async def _carry_over(self, end_offset: int, keep_from: int) -> None:
        """Free a file that only records of carriers keep; a later round removes it.

        end_offset: of the file.
        """
        find_oldest = self._disk_forecast.find_oldest
        oldest = await self._in_thread(lambda: find_oldest(self.carriers))
        if oldest is not None:
            keep_from = min(keep_from, oldest.physical_offset)
        if keep_from >= end_offset:
            for carry_over in self.carriers.values():
                await carry_over(end_offset)

    async def _facts(self) -> Facts:
        now_ms = self.commit_log.clock.now_ms()
        files = self.commit_log.files.files[: self.retention.files_max + 1]
        cold = ColdFiles(self.commit_log.files)
        limit_ms = now_ms - self.retention.reserved_ms
        is_requested = self._requested_rounds > 0
        self._requested_rounds -= is_requested
        return Facts(
            files=await self._in_thread(lambda: _log_files(files, cold, limit_ms)),
            now_ms=now_ms,
            hour=time.localtime(now_ms / 1000).tm_hour,
            disk=await self._in_thread(self.commit_log.room.usage),
            keep_from=self._rest.settled_from(),
            pending_bytes=sum(file.file_bytes for file in self.detached),
            is_requested=is_requested,
            is_clock_trusted=self._clock_watch.is_trusted(trio.current_time()),
            wanted_bytes=self._wanted_bytes(now_ms),
        )

    def _wanted_bytes(self, now_ms: int) -> int:
        """Size of what found no room, if somebody has tried to append recently."""
        is_recent = 0 <= now_ms - self.commit_log.tried_ms <= self.settings.clean_interval_ms
        return self.commit_log.room.wanted_bytes if is_recent else 0

    def _check_clock(self) -> None:
        jump_ms = self._clock_watch.observe(self.commit_log.clock.now_ms(), trio.current_time())
        if jump_ms:
            log.error(
                "the clock has jumped: nothing is removed by age for an hour; correct it if wrong",
                jump_hours=round(jump_ms / 3_600_000, 1),
            )

    def _report(self, plan: CleanPlan) -> None:
        now_s = trio.current_time()
        self._unlogged.update(plan.reasons)
        # On a disk that is short of room files go one by one.
        if self._unlogged and now_s >= self._removal_logged_s + _LOG_EVERY_S:
            self._removal_logged_s = now_s
            first = self.commit_log.files.files[0].path.name
            count, by_disk = self._unlogged.total(), self._unlogged["disk"]
            log.info("removing log files", count=count, next=first, by_disk=by_disk)
            self._unlogged.clear()
        oldest = self._disk_forecast.oldest or self._rest.oldest_followed()
        if plan.held_back and oldest and now_s >= self._held_logged_s + ALARM_EVERY_S:
            self._held_logged_s = now_s
            log.warning(
                "log files are kept because they are still needed",
                count=plan.held_back,
                oldest=str(oldest),
            )

    # --- queue and index files ---------------------------------------------------------------

    async def _clean_after_log(self) -> None:
        """Detach queue and index files whose records are all below the log's first byte."""
        log_min_offset = self.commit_log.min_offset
        if log_min_offset == self._log_min_cleaned:
            return
        queues: dict[ConsumeQueue, ColdQueue] = {}
        await in_slices(self._collect_queues(queues))
        firsts = await self._in_thread(
            lambda: [
                (number := cold.first_at(log_min_offset), cold.offset_of(number))
                for cold in queues.values()
            ]
        )
        await in_slices(self._detach_queue_files(zip(queues, firsts, strict=True)))
        self.detached += self.index_files.detach_below(log_min_offset)
        self._log_min_cleaned = log_min_offset

    def _collect_queues(self, found: dict[ConsumeQueue, ColdQueue]) -> Generator[None, None, None]:
        for queues in list(self._topics.values()):
            for queue in list(queues.values()):
                found[queue.consume_queue] = ColdQueue(queue.consume_queue)
            yield

    def _detach_queue_files(
        self, firsts: Iterable[tuple[ConsumeQueue, tuple[int, int]]]
    ) -> Generator[None, None, None]:
        """Detach files before a unit of each queue, given by its number and queue offset."""
        for consume_queue, first in firsts:
            self.detached += consume_queue.detach_before(*first)
            yield

    async def _remove(self) -> None:
        """Remove the detached files that no reader holds."""
        if self.detached:
            detached, self.detached = self.detached, []
            left = await trio.to_thread.run_sync(delete_files, detached, self.free_bytes)
            self.detached = left + self.detached
            self._removed_files += len(detached) - len(left)

    # --- limits of topics ------------------------------------------------------------------

    async def raise_floors(self) -> None:
        """Expire messages beyond their topic's own limits. Raises OSError."""
        limits = self.topic_limits()
        if not limits:
            return
        if not self._clock_watch.is_trusted(trio.current_time()):
            limits = {topic: limit._replace(reserved_ms=None) for topic, limit in limits.items()}
        await in_slices(self.trimmer.scan(limits, self._lowest_unconsumed()))
        now_ms = self.commit_log.clock.now_ms()
        floors = await self._in_thread(lambda: self.trimmer.find(now_ms))
        # A power cut could give the queue offset, and perhaps the physical offset, of an unflushed
        # record to another one.
        is_young = newest_physical_offset(floors) >= self.commit_log.flushed_offset
        if is_young and not await self._bring_to_disk():
            return
        self.trimmer.apply(floors)
        await self._in_thread(self.trimmer.save)

    def _lowest_unconsumed(self) -> LowestUnconsumed:
        return nothing_to_consume if self.retention.removes_unconsumed else self.unconsumed()

    # --- forecast --------------------------------------------------------------------------

    async def _forecast(self) -> None:
        """Sample the growth of what can't be removed, and warn in time."""
        now_s = trio.current_time()
        if not self._disk_forecast.is_sample_due(now_s):
            return
        await self._find_unconsumed()
        disk = await self._in_thread(self.commit_log.room.usage)
        others_bytes = await self._in_thread(lambda: self._disk_forecast.used_by_others(disk))
        self._disk_forecast.sample(now_s, disk, others_bytes, self.retention)
        hours = self._disk_forecast.take_alarm(now_s)
        if hours is not None:
            self._warn_of_full_disk(hours)

    def _warn_of_full_disk(self, hours: float) -> None:
        forecast = self._disk_forecast
        figures = {
            "full_in_hours": round(hours, 1),
            "bytes_per_second": round(forecast.growth.bytes_per_s),
        }
        if forecast.is_filled_by_others:
            log.warning("the disk will be full of files outside the log: make room", **figures)
            return
        log.warning(
            "the disk will be full: make room, let what it waits for catch up, or delete the group",
            waits_for=str(forecast.oldest or "nobody"),
            **figures,
        )

    async def _find_unconsumed(self) -> None:
        await in_slices(self._disk_forecast.scan(self._lowest_unconsumed()))
        unconsumed = await self._in_thread(self._disk_forecast.find_oldest)
        records = [each for each in (unconsumed, self._rest.oldest_followed()) if each is not None]
        self._disk_forecast.oldest = min(
            records, key=lambda record: record.physical_offset, default=None
        )

    def status(self) -> CleanerStatus:
        """The state as of the last round."""
        return CleanerStatus(
            removed_files=self._removed_files,
            waiting_files=len(self.detached),
            oldest_unconsumed=str(self._disk_forecast.oldest or ""),
            full_in_hours=self._disk_forecast.full_in_hours,
        )


def _log_files(files: list[MappedFile], cold: ColdFiles, limit_ms: int) -> list[LogFile]:
    """The files with the time each was last written; for a thread. Raises OSError."""
    return [
        LogFile(file.start_offset, file.end_offset, _newest_ms(file, cold, limit_ms))
        for file in files
    ]


def _newest_ms(file: MappedFile, cold: ColdFiles, limit_ms: int) -> int:
    """The time of a file's last write: its modification time, as in the peer.

    A modification time older than the file's first record was lost in a copy; then the first record
    of the next file stands for it.
    """
    try:
        modified_ms = round(file.path.stat().st_mtime * 1000)
    except FileNotFoundError:  # removed by someone else
        return 0
    if modified_ms > limit_ms:
        return modified_ms
    first_ms = cold.store_time_ms(file.start_offset) or 0
    is_lost = modified_ms + _TIME_SLACK_MS < first_ms
    return cold.store_time_ms(file.end_offset) or first_ms if is_lost else modified_ms


def delete_files(files: list[MappedFile], free_bytes: int = FREE_BYTES) -> list[MappedFile]:
    """Remove detached files, in any thread; returns those that are left.

    Left are files that a reader holds or that could not be removed, and all later ones in the same
    folder: otherwise a broker killed now would leave a gap.
    """
    left: list[MappedFile] = []
    blocked: set[Path] = set()
    for file in files:
        folder = file.path.parent
        if folder in blocked or not _delete(file, free_bytes):
            blocked.add(folder)
            left.append(file)
    return left


def _delete(file: MappedFile, free_bytes: int) -> bool:
    if not file.release():
        return False
    try:
        descriptor = file.files.open(file.path)
    except FileNotFoundError:
        return True
    try:
        file.delete()
        ends = range(file.file_bytes - free_bytes, 0, -free_bytes)
        if ends:  # a power cut must not bring the name back: a start rejects a shorter file
            file.files.fsync_directory(file.path.parent)
        for end in ends:
            file.files.truncate(descriptor, end)
    except OSError as error:
        log.error("file not removed, retrying", path=str(file.path), reason=str(error))
        return False
    finally:
        file.files.close(descriptor)
    return True
