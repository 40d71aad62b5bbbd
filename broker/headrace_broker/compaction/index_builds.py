"""Key indexes that are brought up to date in the background, and the requests that wait for one.

An index that lacks few messages is opened by the first request for a key. One that lacks many gets
them in a process of its own, a queue at a time: when a file of the compaction log is sealed, or
when a request finds the index missing, damaged or far behind. Such a request is held for some
seconds; then it is answered with an error that says how far the index is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog
import trio

from headrace_broker.compaction.key_index_build import lacking_count
from headrace_broker.compaction.throttle import RunStopped
from headrace_broker.compaction.worker import IndexTask
from headrace_broker.store.errors import StoreError
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.waiting import NotHere, Until

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.compaction.queues import CompactedQueue, CompactedQueues, Name
    from headrace_broker.compaction.segments import Segment
    from headrace_broker.compaction.throttle import Throttle
    from headrace_protocol.waiting import Run

    Indexer = Callable[[IndexTask, Callable[[int], None]], None]

log = structlog.get_logger("headrace.broker")

_TICK_S: Final = 1.0
_LATE_TICK_S: Final = 0.2


class IndexLimits(NamedTuple):
    """few_messages: entered at once, which takes a tenth of a second.

    hold_s: how long a request waits; below the usual timeout of clients, three seconds.
    """

    few_messages: int = 100_000
    hold_s: float = 2.0


class _PlanAgain(Exception):
    """The segments that a process reads are no longer those of the queue, or a request waits."""


class _Plan(NamedTuple):
    queue: CompactedQueue
    segments: tuple[Segment, ...]
    task: IndexTask


@dataclass
class _Build:
    """is_wanted: by a request, so that it is urgent and covers the file that is appended to."""

    is_wanted: bool
    is_running: bool = False
    total_bytes: int = 0
    done_bytes: int = 0

    @property
    def percent(self) -> int:
        return min(99, 100 * self.done_bytes // max(1, self.total_bytes))


class IndexBuilds:
    """Runs on the loop, but for ``prepare`` and what ``run`` does in threads."""

    def __init__(
        self, queues: CompactedQueues, indexer: Indexer | None, throttle: Throttle
    ) -> None:
        """indexer: does a task elsewhere; None to enter any number of messages here."""
        self.indexer = indexer
        self.limits = IndexLimits()
        self._queues = queues
        self._throttle = throttle
        self._builds: dict[Name, _Build] = {}
        # Requests that wait, each until a time.
        self._held: dict[Name, list[tuple[float, Run]]] = {}
        # The end of the sealed segments of a queue when it was looked at last.
        self._sealed_ends: dict[Name, int] = {}
        self._limiter = trio.CapacityLimiter(1)
        self._wakeup = trio.Event()
        self._done_count = self._failure_count = 0

    def runtime_info(self) -> dict[str, str]:
        """For GET_BROKER_RUNTIME_INFO."""
        running = sorted(self._builds.items())
        progress = ", ".join(f"{name[0]}/{name[1]} {build.percent} %" for name, build in running)
        return {
            "keyIndexBuilds": str(self._done_count),
            "keyIndexFailures": str(self._failure_count),
            "keyIndexProgress": progress,
        }

    # --- requests ----------------------------------------------------------------------------

    def check(self, name: Name) -> None:
        """Raise NotHere if a key index is being built."""
        if name in self._builds:
            raise NotHere(Until("a key index", partial(self._hold, name)))

    def _remark(self, name: Name) -> str:
        build = self._builds.get(name)
        return (
            f"the key index of queue {name[1]} of topic {name[0]} is being made, "
            f"{build.percent if build else 0} % so far: ask again"
        )

    def prepare(self, name: Name) -> None:
        """Open a key index, or have it built if it lacks many messages; in any thread.

        Raises OSError, StoreError.
        """
        with self._queues.lock:
            if name in self._builds:
                return
            queue = self._queues.open(*name)
            if self.indexer is not None:
                self._load(queue)
                if lacking_count(queue.key_index, queue.log.segments) > self.limits.few_messages:
                    self._builds[name] = _Build(is_wanted=True)
                    return
            self._queues.build_index(*name)

    @staticmethod
    def _load(queue: CompactedQueue) -> None:
        if not queue.key_index.is_loaded:
            queue.key_index.load(queue.log.end_offset)

    def _hold(self, name: Name, run: Run) -> None:
        self._builds[name].is_wanted = True
        self._held.setdefault(name, []).append((monotonic() + self.limits.hold_s, run))
        self._wakeup.set()

    def _answer_late(self) -> None:
        now_s = monotonic()
        for name, waiting in self._held.items():
            late = [run for until_s, run in waiting if until_s <= now_s]
            self._held[name] = [(until_s, run) for until_s, run in waiting if until_s > now_s]
            problem = RequestError(ResponseCode.SYSTEM_BUSY, self._remark(name))
            for run in late:
                run.called_back(problem)

    # --- building ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Build until cancelled."""
        for build in self._builds.values():
            build.is_running = False
        looked_s = -math.inf
        async with trio.open_nursery() as nursery:
            while True:
                if monotonic() - looked_s >= _TICK_S:
                    looked_s = monotonic()
                    self._want_sealed()
                for name, build in [*self._builds.items()]:
                    if not build.is_running:
                        build.is_running = True
                        nursery.start_soon(self._build, name, build)
                self._answer_late()
                self._wakeup = trio.Event()
                is_awaited = any(self._held.values())
                with trio.move_on_after(_LATE_TICK_S if is_awaited else _TICK_S):
                    await self._wakeup.wait()

    def _want_sealed(self) -> None:
        """Have the messages of sealed segments entered, if they are many."""
        if self.indexer is None:
            return
        for name, queue in self._queues.all().items():
            if queue.key_index.is_open or name in self._builds:
                continue
            sealed = [segment for segment in queue.log.segments if segment.is_sealed]
            end = sealed[-1].last_queue_offset + 1 if sealed else 0
            if end != self._sealed_ends.get(name, 0):
                self._sealed_ends[name] = end
                if sum(segment.count for segment in sealed) > self.limits.few_messages:
                    self._builds[name] = _Build(is_wanted=False)

    async def _build(self, name: Name, build: _Build) -> None:
        problem: Exception | None = None
        try:
            async with self._limiter:
                await trio.to_thread.run_sync(self._bring_up, name, build)
        except RunStopped:
            build.is_running = False
            return
        except (OSError, StoreError) as error:
            self._failure_count += 1
            log.error("key index not made", queue=name, reason=str(error))
            problem = error
        del self._builds[name]
        for _, run in self._held.pop(name, []):
            run.called_back(problem)

    def _bring_up(self, name: Name, build: _Build) -> None:
        """In a thread. Raises OSError, StoreError, RunStopped."""
        assert self.indexer is not None
        while (plan := self._plan(name, build)) is not None:
            log.info("making key index", queue=name, end=plan.task.end)
            try:
                self.indexer(plan.task, partial(self._pace, name, build, plan))
            except _PlanAgain:
                pass
            except FileNotFoundError:
                if self._is_current(name, plan):
                    raise
            else:
                self._done_count += 1
            with self._queues.lock:
                queue = self._queues.all().get(name)
                if queue is not None and queue is not plan.queue:
                    # Else a table of the old index may be taken for one of the new index.
                    queue.key_index.delete_files()

    def _plan(self, name: Name, build: _Build) -> _Plan | None:
        """The messages that an index lacks; None if these are few, or the queue is gone."""
        with self._queues.lock:
            queue = self._queues.all().get(name)
            if queue is None:
                return None
            queue.swap.resume(queue.log)
            self._load(queue)
            log_, index = queue.log, queue.key_index
            segments = tuple(each for each in log_.segments if build.is_wanted or each.is_sealed)
            if lacking_count(index, segments) <= self.limits.few_messages:
                return None
            # What the position covers must be on disk.
            log_.sync()
            lacking = [each for each in segments if each.last_queue_offset >= index.position]
            build.total_bytes = sum(segment.log_end for segment in lacking)
            build.done_bytes = 0
            task = IndexTask(
                log_.folders.texts,
                log_.sizes,
                [(segment.base, segment.count) for segment in lacking],
                log_.end_offset,
                str(index.folder),
                index.seed,
                index.trusts_count,
                build.is_wanted,
            )
            index.close()
            return _Plan(queue, tuple(lacking), task)

    def _pace(self, name: Name, build: _Build, plan: _Plan, byte_count: int) -> None:
        self._throttle.pace(byte_count)
        build.done_bytes += byte_count
        is_more_urgent = build.is_wanted and not plan.task.is_wanted
        if is_more_urgent or not self._is_current(name, plan):
            raise _PlanAgain

    def _is_current(self, name: Name, plan: _Plan) -> bool:
        """True if a queue still has the files of the segments of a plan."""
        with self._queues.lock:
            if self._queues.all().get(name) is not plan.queue:
                return False
            counts = {each.units_file: each.count for each in plan.queue.log.segments}
        return all(counts.get(each.units_file, -1) >= each.count for each in plan.segments)
