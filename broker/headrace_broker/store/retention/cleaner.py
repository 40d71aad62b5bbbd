"""Removing what is no longer kept, and refusing messages while the disk is full.

What to do is decided in ``rules.py`` and ``topic_floors.py``; here it is found out and done.
"""

from __future__ import annotations

import errno
import math
import time
from time import perf_counter
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import structlog
import trio

from headrace_broker.store.files.cold_files import ColdFiles
from headrace_broker.store.retention.outlook import ALARM_EVERY_S, Outlook, nothing_to_consume
from headrace_broker.store.retention.rules import ClockWatch, Facts, LogFile, plan_clean
from headrace_broker.store.retention.topic_trimmer import TopicTrimmer, highest_place

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from headrace_broker.store.files.filesystem import DiskUsage
    from headrace_broker.store.files.mapped_file import MappedFile
    from headrace_broker.store.index.index_file import IndexFiles
    from headrace_broker.store.log.commit_log import CommitLog
    from headrace_broker.store.queues.consume_queue import ConsumeQueue
    from headrace_broker.store.retention.outlook import LowestUnconsumed
    from headrace_broker.store.retention.rules import CleanPlan
    from headrace_broker.store.retention.topic_floors import TopicLimit
    from headrace_broker.store.settings import StoreSettings
    from headrace_broker.store.store_queue import StoreQueue

log = structlog.get_logger("headrace.broker")

# Rounds that an administrator's request is good for, as the peer's.
ASKED_ROUNDS: Final = 20
_SLICE_S: Final = 0.002
# Some file systems count whole seconds, and records have the time of their batch's beginning.
_TIME_SLACK_MS: Final = 10_000
# Freed at a time: the file system lets others write in between.
_FREE_BYTES: Final = 16 << 20
_NO_ROOM: Final = frozenset((errno.ENOSPC, errno.EDQUOT))
_Result = TypeVar("_Result")


class CleanerStatus(NamedTuple):
    """For the monitor. full_in_hours: None when that is not to be expected."""

    removed_files: int
    waiting_files: int
    oldest_unconsumed: str
    full_in_hours: float | None


class Cleaner:
    """One round each ``clean_interval_ms``; threads wait for the disk while ``use_threads``.

    retention: may be replaced.
    look_at_groups: what consumers have yet to read; called once for each look at all queues.
    topic_limits: of the topics that have some.
    settled_from: physical offset from which on records are still flushed, taken by takers or
    followed.
    flush: brings what the takers have made to disk too. durable_from: up to where it is there.
    slowest_follower: the one that needs the oldest record, "" without followers.
    """

    def __init__(
        self,
        settings: StoreSettings,
        commit_log: CommitLog,
        index_files: IndexFiles,
        topics: Mapping[str, Mapping[int, StoreQueue]],
        settled_from: Callable[[], int],
        flush: Callable[[], Awaitable[None]],
        durable_from: Callable[[], int],
        slowest_follower: Callable[[], str],
    ) -> None:
        self.settings = settings
        self.retention = settings.retention
        self.commit_log = commit_log
        self.index_files = index_files
        self.use_threads = False
        self.look_at_groups: Callable[[], LowestUnconsumed] = lambda: nothing_to_consume
        self.topic_limits: Callable[[], Mapping[str, TopicLimit]] = dict
        self.is_refusing = False
        # Files that the store has let go of, and that are still to be removed.
        self.detached: list[MappedFile] = []
        self._settled_from = settled_from
        self._flush = flush
        self._durable_from = durable_from
        self._slowest_follower = slowest_follower
        self._fs = commit_log.files.fs
        self._topics = topics
        self._clock_watch = ClockWatch()
        self.trimmer = TopicTrimmer(settings.root, commit_log, topics)
        self._outlook = Outlook(commit_log, topics)
        self._log_min_cleaned = -1
        self._asked_rounds = 0
        self._removed_files = 0
        self._held_s = -math.inf

    async def begin(self) -> None:
        """Restore the floors that limits of topics had raised before a stop."""
        await self._try(self.raise_floors)

    async def run(self) -> None:
        """Clean at intervals until cancelled; an error of the disk is logged, and tried again."""
        try:
            while True:
                await trio.sleep(self.settings.clean_interval_ms / 1000)
                await self._try(self.round)
        finally:
            self._accept()

    @staticmethod
    async def _try(work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except OSError as error:
            log.error("clean-up failed, trying on", reason=str(error))

    def ask(self) -> None:
        """Remove old files in the next rounds, whatever the hour."""
        self._asked_rounds = ASKED_ROUNDS

    async def round(self) -> None:
        """One look at everything. Raises OSError."""
        self._look_at_clock()
        await self._clean_after_log()  # a start has left it to do
        await self.raise_floors()
        plan = await self._plan()
        self._refuse_or_accept(plan)
        self._report(plan)
        # No start makes units of what is not in the log any more: a queue would begin anew.
        if plan.reasons and not await self._is_made_up_to(len(plan.reasons)):
            return
        self.detached += self.commit_log.files.detach_first(len(plan.reasons))
        await self._clean_after_log()
        await self._remove()
        await self._forecast()

    async def _aside(self, work: Callable[[], _Result]) -> _Result:
        return await trio.to_thread.run_sync(work) if self.use_threads else work()

    async def _bring_to_disk(self) -> bool:
        """What was made of the log too; False if the disk failed: then nothing may be removed."""
        await self._flush()
        return self.commit_log.life.is_writable

    async def _is_made_up_to(self, file_count: int) -> bool:
        """Whether no start needs the first files any more, once all is on disk."""
        last = self.commit_log.files.files[file_count - 1]
        return await self._bring_to_disk() and self._durable_from() >= last.end_offset

    # --- the log ---------------------------------------------------------------------------

    async def _plan(self) -> CleanPlan:
        facts = await self._facts()
        plan = plan_clean(facts, self.retention)
        if plan.reasons:  # Only now it matters what consumers have read.
            await self._search_unconsumed()
            keep_from = min(facts.keep_from, self._outlook.keep_from)
            plan = plan_clean(facts._replace(keep_from=keep_from), self.retention)
        return plan

    async def _facts(self) -> Facts:
        now_ms = self.commit_log.clock.now_ms()
        files = self.commit_log.files.files[: self.retention.files_max + 1]
        cold = ColdFiles(self.commit_log.files)
        limit_ms = now_ms - self.retention.reserved_ms
        is_asked, self._asked_rounds = self._asked_rounds > 0, max(self._asked_rounds - 1, 0)
        return Facts(
            files=await self._aside(lambda: _log_files(files, cold, limit_ms)),
            now_ms=now_ms,
            hour=time.localtime(now_ms / 1000).tm_hour,
            disk=await self._aside(self.disk_usage),
            keep_from=self._settled_from(),
            going_bytes=sum(file.file_bytes for file in self.detached),
            is_asked=is_asked,
            is_clock_trusted=self._clock_watch.is_trusted(trio.current_time()),
            is_out_of_room=self._is_out_of_room(),
            was_refusing=self.is_refusing,
        )

    def disk_usage(self) -> DiskUsage:
        """Of the store's file system."""
        return self._fs.disk_usage(self.settings.root)

    def _is_out_of_room(self) -> bool:
        """Whether an append failed for it of late: of a quota the file system does not tell."""
        life = self.commit_log.life
        refusal = life.refusal
        age_ms = self.commit_log.clock.now_ms() - life.refused_ms
        is_late = 0 <= age_ms <= self.settings.clean_interval_ms
        return is_late and refusal is not None and refusal.error_number in _NO_ROOM

    def _look_at_clock(self) -> None:
        jump_ms = self._clock_watch.look(self.commit_log.clock.now_ms(), trio.current_time())
        if jump_ms:
            log.error(
                "the clock has jumped: nothing is removed by age for an hour, set it right if this "
                "is not the time",
                jump_hours=round(jump_ms / 3_600_000, 1),
            )

    def _report(self, plan: CleanPlan) -> None:
        if plan.reasons:
            first = self.commit_log.files.files[0].path.name
            by_disk = plan.reasons.count("disk")
            log.info("removing log files", count=len(plan.reasons), first=first, by_disk=by_disk)
        now_s = trio.current_time()
        oldest = self._outlook.oldest or self._slowest_follower()
        if plan.held_back and oldest and now_s >= self._held_s + ALARM_EVERY_S:
            self._held_s = now_s
            log.warning(
                "log files are kept for who has not consumed them",
                count=plan.held_back,
                oldest=str(oldest),
            )

    # --- refusing --------------------------------------------------------------------------

    def _refuse_or_accept(self, plan: CleanPlan) -> None:
        if not plan.refuses_writes:
            self._accept()
            return
        reason = (
            f"the disk is {plan.disk.ratio:.1%} full and messages are refused above "
            f"{self.retention.refuse_ratio:.0%}, until no more than "
            f"{self.retention.force_ratio:.0%} is used: make room"
        )
        if not self.is_refusing:
            log.error("messages are refused", reason=reason)
        self.is_refusing = True
        retry_ms = 3 * self.settings.clean_interval_ms
        self.commit_log.refuse(reason, self.settings.root, retry_ms=retry_ms)

    def _accept(self) -> None:
        if self.is_refusing:
            self.is_refusing = False
            self.commit_log.resume()
            log.info("messages are taken again")

    # --- what led to the log ---------------------------------------------------------------

    async def _clean_after_log(self) -> None:
        """Let go of queue and index files that lead below the log's first byte."""
        log_min_offset = self.commit_log.min_offset
        if log_min_offset == self._log_min_cleaned:
            return
        searches: dict[ConsumeQueue, Callable[[], int]] = {}
        await _in_slices(self._look_at_queues(log_min_offset, searches))
        firsts = await self._aside(lambda: [search() for search in searches.values()])
        await _in_slices(self._detach_queue_files(zip(searches, firsts, strict=True)))
        self.detached += self.index_files.detach_below(log_min_offset)
        self._log_min_cleaned = log_min_offset

    def _look_at_queues(
        self, log_min_offset: int, searches: dict[ConsumeQueue, Callable[[], int]]
    ) -> Iterator[None]:
        """Note how a thread finds each queue's first unit that leads into the log."""
        for queues in list(self._topics.values()):
            for queue in list(queues.values()):
                consume_queue = queue.consume_queue
                searches[consume_queue] = consume_queue.search_cold(log_min_offset)
            yield

    def _detach_queue_files(self, firsts: Iterable[tuple[ConsumeQueue, int]]) -> Iterator[None]:
        for consume_queue, first in firsts:
            self.detached += consume_queue.detach_before(first)
            yield

    async def _remove(self) -> None:
        """Remove what was let go of, as far as no reader holds it."""
        if self.detached:
            detached, self.detached = self.detached, []
            left = await trio.to_thread.run_sync(delete_files, detached)
            self.detached = left + self.detached
            self._removed_files += len(detached) - len(left)

    # --- limits of topics ------------------------------------------------------------------

    async def raise_floors(self) -> None:
        """Give up what is beyond the limits of its topic. Raises OSError."""
        limits = self.topic_limits()
        if not limits:
            return
        if not self._clock_watch.is_trusted(trio.current_time()):
            limits = {topic: limit._replace(reserved_ms=None) for topic, limit in limits.items()}
        await _in_slices(self.trimmer.look(limits, self._lowest_unconsumed()))
        now_ms = self.commit_log.clock.now_ms()
        floors = await self._aside(lambda: self.trimmer.find(now_ms))
        # What a power cut takes leaves its queue offset, and perhaps its place, to another record.
        is_young = highest_place(floors) >= self.commit_log.flushed_offset
        if is_young and not await self._bring_to_disk():
            return
        self.trimmer.apply(floors)
        await self._aside(self.trimmer.save)

    def _lowest_unconsumed(self) -> LowestUnconsumed:
        return nothing_to_consume if self.retention.removes_unconsumed else self.look_at_groups()

    # --- forecast --------------------------------------------------------------------------

    async def _forecast(self) -> None:
        """See how what can't be removed grows, and warn while there is time."""
        now_s = trio.current_time()
        if not self._outlook.is_sample_due(now_s):
            return
        await self._search_unconsumed()
        disk = await self._aside(self.disk_usage)
        others_bytes = await self._aside(lambda: self._outlook.used_by_others(disk))
        self._outlook.sample(now_s, disk, others_bytes, self.retention)
        hours = self._outlook.take_alarm(now_s)
        if hours is not None:
            log.warning(
                "the disk will be full: make room, let the group consume or delete it",
                full_in_hours=round(hours, 1),
                bytes_per_second=round(self._outlook.growth.bytes_per_s),
                waits_for=str(self._outlook.oldest or "nobody"),
            )

    async def _search_unconsumed(self) -> None:
        await _in_slices(self._outlook.look(self._lowest_unconsumed()))
        self._outlook.oldest = await self._aside(self._outlook.find_oldest)

    def status(self) -> CleanerStatus:
        """As of the last look."""
        return CleanerStatus(
            removed_files=self._removed_files,
            waiting_files=len(self.detached),
            oldest_unconsumed=str(self._outlook.oldest or ""),
            full_in_hours=self._outlook.full_in_hours,
        )


async def _in_slices(work: Iterator[None]) -> None:
    """Run to the end, with turns for others in between."""
    end = perf_counter() + _SLICE_S
    for _ in work:
        if perf_counter() > end:
            await trio.lowlevel.checkpoint()
            end = perf_counter() + _SLICE_S


def _log_files(files: list[MappedFile], cold: ColdFiles, limit_ms: int) -> list[LogFile]:
    """In a thread: when each was last written. Raises OSError."""
    return [
        LogFile(file.start_offset, file.end_offset, _newest_ms(file, cold, limit_ms))
        for file in files
    ]


def _newest_ms(file: MappedFile, cold: ColdFiles, limit_ms: int) -> int:
    """As the peer by modification time, unless that is older than the file's first record.

    Then a copy has lost the times, and the next file's first record says when this one was full.
    """
    try:
        modified_ms = round(file.path.stat().st_mtime * 1000)
    except FileNotFoundError:  # somebody else has removed it
        return 0
    if modified_ms > limit_ms:
        return modified_ms
    first_ms = cold.store_time_ms(file.start_offset) or 0
    is_lost = modified_ms + _TIME_SLACK_MS < first_ms
    return cold.store_time_ms(file.end_offset) or first_ms if is_lost else modified_ms


def delete_files(files: list[MappedFile]) -> list[MappedFile]:
    """Remove files that the store has let go of, in any thread; returns those that are left.

    Left are those that a reader holds or the disk does not give up, and what follows them in their
    folder: a gap would be left otherwise if the broker were killed now.
    """
    left: list[MappedFile] = []
    blocked: set[Path] = set()
    for file in files:
        folder = file.path.parent
        if folder in blocked or not _delete(file):
            blocked.add(folder)
            left.append(file)
    return left


def _delete(file: MappedFile) -> bool:
    if not file.release():
        return False
    try:
        descriptor = file.files.open(file.path)
    except FileNotFoundError:
        return True
    try:
        file.delete()
        ends = range(file.file_bytes - _FREE_BYTES, 0, -_FREE_BYTES)
        if ends:  # its name must not come back with a power cut: no start takes a shorter file
            file.files.fsync_directory(file.path.parent)
        for end in ends:
            file.files.truncate(descriptor, end)
    except OSError as error:
        log.error("file not removed, trying on", path=str(file.path), reason=str(error))
        return False
    finally:
        file.files.close(descriptor)
    return True
