"""Compacts one queue: whether it is due, the run, the swap; in threads."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import structlog

from headrace_broker.compaction.run import Group, Job
from headrace_broker.compaction.run_state import MarkerTimes
from headrace_broker.compaction.worker import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace_broker.compaction.checkpoint import PositionCheckpoint
    from headrace_broker.compaction.queues import CompactedQueue, CompactedQueues, Name
    from headrace_broker.compaction.run import Result
    from headrace_broker.compaction.run_state import RunState
    from headrace_broker.compaction.segments import Segment
    from headrace_broker.compaction.throttle import Throttle
    from headrace_broker.compaction.worker import Older
    from headrace_broker.topics.attributes import CompactionPolicy

    Runner = Callable[[Task, Callable[[int], None]], Result]

log = structlog.get_logger("headrace.broker")

# Share of sealed bytes that no run has read, from which on a run is worth rewriting the others.
_DIRTY_SHARE: Final = 0.5


class Request(NamedTuple):
    """A queue to look at.

    is_forced: compact it whatever its age and share of new messages.
    keeps_markers: keep delete markers whose time is over: other queues may have values of the key.
    """

    name: Name
    policy: CompactionPolicy
    now_ms: int
    map_bytes_max: int
    is_forced: bool
    keeps_markers: bool = False


class _Plan(NamedTuple):
    queue: CompactedQueue
    segments: tuple[Segment, ...]
    state: RunState
    task: Task


class Compactor:
    """Compacts queues, at most one run for a queue at a time; ``run`` may take long.

    runner: runs a task, such as ``worker.run_in_process``. require_free: raises OSError unless the
    disk has so many bytes free, for what a run writes before it removes what it read.
    """

    def __init__(
        self,
        queues: CompactedQueues,
        positions: PositionCheckpoint,
        runner: Runner,
        throttle: Throttle,
        require_free: Callable[[int], None],
    ) -> None:
        self.queues = queues
        self._require_free = require_free
        self._positions = positions
        self._runner = runner
        self.throttle = throttle
        self._busy: set[Name] = set()

    def compact(self, request: Request) -> Result | None:
        """Compact a queue if it is due; None if not, or if it was deleted meanwhile.

        Raises OSError, StoreError, RunStopped.
        """
        return self._compact(request, self._plan)

    def merge(self, request: Request, older: Older) -> Result | None:
        """Merge a master's segments into a queue and compact all; None as ``compact``.

        Raises OSError, StoreError, RunStopped.
        """
        return self._compact(request, partial(self._plan_merge, older=older))

    def _compact(
        self, request: Request, make_plan: Callable[[Request], _Plan | None]
    ) -> Result | None:
        with self.queues.lock:
            plan = make_plan(request) if request.name not in self._busy else None
            if plan is None:
                return None
            self._busy.add(request.name)
        try:
            self._require_free(sum(segment.log_end for segment in plan.segments))
            return self._run(request, plan)
        finally:
            self._busy.discard(request.name)

    def _run(self, request: Request, plan: _Plan) -> Result | None:
        start_s = monotonic()
        try:
            result = self._runner(plan.task, self.throttle.pace)
        except BaseException as error:
            self._discard(plan)
            if isinstance(error, OSError) and not self._is_current(request.name, plan):
                return None  # the files of a deleted queue are gone
            raise
        with self.queues.lock:
            if self._is_current(request.name, plan):
                self._put_in_place(request, plan, result, start_s)
                return result
        self._discard(plan)
        return None

    def _plan(self, request: Request) -> _Plan | None:
        queue = self.queues.all().get(request.name)
        if queue is None:
            return None
        queue.swap.resume(queue.log)
        end = queue.log.end_offset
        read_until = self._positions.get(*request.name, end) + 1
        state = queue.state_file.load()
        if state.position < read_until:  # by another broker
            state = msgspec.structs.replace(state, position=read_until)
        state = state.cut(end)
        if _is_live_due(queue.log.segments, state.position, request):
            queue.log.roll()
        segments = tuple(segment for segment in queue.log.segments if segment.is_sealed)
        if not segments or not _is_due(segments, state, request):
            return None
        return _new_plan(queue, segments, state, request)

    def _plan_merge(self, request: Request, older: Older) -> _Plan | None:
        queue = self.queues.all().get(request.name)
        if queue is None:
            return None
        queue.swap.resume(queue.log)
        queue.log.roll()
        segments = queue.log.segments
        queue.log.leave_names(len(older.segments) + len(segments))
        if segments:
            oldest = min(older.hides_from, segments[0].first_queue_offset)
            older = msgspec.structs.replace(older, hides_from=oldest)
        # No run has contained the master's delete markers, so all markers stay for their time.
        state = msgspec.structs.replace(
            queue.state_file.load(), position=0, marker_times=MarkerTimes([], [])
        )
        return _new_plan(queue, segments, state, request, older)

    def _discard(self, plan: _Plan) -> None:
        """Free the space of unfinished files, unless the disk fails again."""
        with self.queues.lock, suppress(OSError):
            plan.queue.swap.discard()

    def _is_current(self, name: Name, plan: _Plan) -> bool:
        """True if the queue still exists with the segments of the run."""
        segments = plan.queue.log.segments[: len(plan.segments)]
        return self.queues.all().get(name) is plan.queue and segments == plan.segments

    def _put_in_place(self, request: Request, plan: _Plan, result: Result, start_s: float) -> None:
        queue, segments = plan.queue, plan.segments
        if plan.task.older is not None:
            own = [segment.base for segment in segments]
            result = result._replace(groups=[Group(own, group.new) for group in result.groups])
            self.queues.renew_index(*request.name)
        # What the position covers must be on disk, also in segments that stay as they are.
        queue.log.sync()
        state = msgspec.structs.replace(
            plan.state,
            position=result.next_position,
            kept_end=result.kept_end,
            marker_times=result.marker_times,
            marker_count=result.marker_count,
            keeps_markers=request.keeps_markers,
            last_run_ms=request.now_ms,
            last_run_s=round(monotonic() - start_s, 3),
            bytes_before=sum(segment.log_end for segment in segments),
            kept_count=result.kept_count,
            dropped_count=result.dropped_count,
            bytes_after=_bytes_after(segments, result),
        )
        queue.swap.swap(queue.log, result.groups, state)
        self._positions.save(*request.name, result.next_position - 1)
        log.info(
            "queue compacted",
            queue=f"{request.name[0]}/{request.name[1]}",
            kept=result.kept_count,
            dropped=result.dropped_count,
            rounds=result.round_count,
            seconds=state.last_run_s,
        )


def _new_plan(
    queue: CompactedQueue,
    segments: tuple[Segment, ...],
    state: RunState,
    request: Request,
    older: Older | None = None,
) -> _Plan:
    queue.swap.discard()
    task = Task(
        queue.swap.folders.texts,
        queue.log.sizes,
        [(segment.base, segment.count) for segment in segments],
        _job(state, request),
        older,
    )
    return _Plan(queue, segments, state, task)


def _job(state: RunState, request: Request) -> Job:
    now_ms, policy = request.now_ms, request.policy
    return Job(
        position=state.position,
        now_ms=now_ms,
        stored_until_ms=now_ms - policy.min_lag_ms,
        markers_before_ms=now_ms - policy.delete_retention_ms,
        marker_times=state.marker_times,
        map_bytes_max=request.map_bytes_max,
        keeps_markers=request.keeps_markers,
    )


def _is_live_due(segments: Sequence[Segment], position: int, request: Request) -> bool:
    """True if the newest segment is to end early: its oldest dirty message is old enough."""
    if not segments or segments[-1].is_sealed or segments[-1].last_queue_offset < position:
        return False
    return request.is_forced or _is_old(segments[-1], position, request)


def _is_due(segments: Sequence[Segment], state: RunState, request: Request) -> bool:
    """True if a run has enough to do."""
    position = state.position
    dirty = [segment for segment in segments if segment.last_queue_offset >= position]
    if dirty and (request.is_forced or _is_old(dirty[0], position, request)):
        return True
    dirty_bytes = sum(segment.log_end for segment in dirty)
    all_bytes = sum(segment.log_end for segment in segments)
    if dirty and dirty_bytes >= _DIRTY_SHARE * all_bytes:
        return True
    if request.keeps_markers or not state.marker_count:
        return False
    # Delete markers whose time has ended since the last run, or that it kept all the same.
    retention_ms = request.policy.delete_retention_ms
    ended = range(state.last_run_ms - retention_ms, request.now_ms - retention_ms)
    return state.keeps_markers or any(time_ms in ended for time_ms in state.marker_times.times_ms)


def _is_old(segment: Segment, position: int, request: Request) -> bool:
    """True if the oldest dirty message of a segment has waited for the maximum lag."""
    units = segment.read_units()
    dirty = units["store_timestamp"][units["queue_offset"] >= position]
    return bool(len(dirty)) and int(dirty[0]) <= request.now_ms - request.policy.max_lag_ms


def _bytes_after(segments: Sequence[Segment], result: Result) -> int:
    replaced = {base for group in result.groups for base in group.old}
    kept = sum(segment.log_end for segment in segments if segment.base not in replaced)
    return kept + sum(file.log_end for group in result.groups for file in group.new)
