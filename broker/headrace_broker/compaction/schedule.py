"""The schedule of compaction: at intervals, with a random part, and by hand."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Final

import structlog
import trio

from headrace_broker.compaction.compactor import Request
from headrace_broker.compaction.throttle import RunStopped
from headrace_broker.store.errors import StoreError
from headrace_daemon.slices import in_slices

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from random import Random

    from headrace_broker.compaction.compactor import Compactor
    from headrace_broker.compaction.queues import Name
    from headrace_broker.compaction.run import Result
    from headrace_broker.config import BrokerConfig
    from headrace_broker.topics.attributes import CompactionPolicy

log = structlog.get_logger("headrace.broker")

_TICK_S: Final = 1.0
# Looked at in one slice, some milliseconds.
_QUEUES_AT_ONCE: Final = 4096


@dataclass
class RunTotals:
    """Sums over all runs."""

    run_count: int = 0
    run_s: float = 0.0
    failure_count: int = 0
    dropped_count: int = 0
    bytes_written: int = 0

    def add(self, result: Result, seconds: float) -> None:
        """Count a finished run, which took so long."""
        self.run_count += 1
        self.run_s += seconds
        self.dropped_count += result.dropped_count
        self.bytes_written += result.bytes_written


class CompactionSchedule:
    """Runs ``Compactor.compact`` for each compacted queue in its turn."""

    def __init__(
        self,
        compactor: Compactor,
        policy_of: Callable[[str], CompactionPolicy | None],
        has_older: Callable[[str, int], bool],
        config: BrokerConfig,
        now_ms: Callable[[], int],
        rng: Random,
    ) -> None:
        """policy_of: the policy of a topic, None if it is not compacted.

        has_older: whether other queues may have values that the delete markers of a queue hide.
        """
        self.queues = compactor.queues
        self.totals = RunTotals()
        self._compactor = compactor
        self._throttle = compactor.throttle
        self._policy_of = policy_of
        self._has_older = has_older
        self._config = config
        self._now_ms = now_ms
        self._rng = rng
        self._due_s: dict[Name, float] = {}
        self._forced: set[Name] = set()
        self._running: set[Name] = set()
        self._wakeup = trio.Event()

    def request(self, topic: str) -> int:
        """Compact the queues of a topic as soon as possible; returns how many there are."""
        names = [name for name in self.queues.all() if name[0] == topic]
        self._forced.update(names)
        self._wakeup.set()
        return len(names)

    def is_pending(self, topic: str) -> bool:
        """True if a queue of a topic is being compacted, or is to be by request."""
        return any(name[0] == topic for name in (*self._forced, *self._running))

    async def run(self) -> None:
        """Compact until cancelled; runs on the way are stopped then."""
        self._throttle.restart()
        self._running.clear()
        threads = min(self._config.compaction_thread_num, os.cpu_count() or 1)
        limiter = trio.CapacityLimiter(threads)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._stop_runs)
            while True:
                self._wakeup = trio.Event()
                for name in await in_slices(self._take_due()):
                    nursery.start_soon(self._compact, name, limiter)
                with trio.move_on_after(_TICK_S):
                    await self._wakeup.wait()

    async def _stop_runs(self) -> None:
        # A thread is never abandoned, so the cancelled nursery waits for it.
        try:
            await trio.sleep_forever()
        finally:
            self._throttle.stop()

    def _take_due(self) -> Generator[None, None, list[Name]]:
        """The queues whose turn it is, from now on running; in slices."""
        names, now_s = self.queues.all(), trio.current_time()
        for number, name in enumerate([*self._due_s, *self._forced], 1):
            if not number % _QUEUES_AT_ONCE:
                yield
            if name not in names:
                self._due_s.pop(name, None)
                self._forced.discard(name)
        due = []
        for number, name in enumerate(names, 1):
            if not number % _QUEUES_AT_ONCE:
                yield
            if name not in self._due_s:
                self._due_s[name] = self._next_s(now_s)
            is_due = name in self._forced or self._due_s[name] <= now_s
            if is_due and name not in self._running:
                self._due_s[name] = self._next_s(now_s)
                due.append(name)
        self._running.update(due)
        return due

    def _next_s(self, now_s: float) -> float:
        interval_s = self._config.compaction_schedule_internal / 1000
        return now_s + interval_s * (1 + self._rng.random())

    async def _compact(self, name: Name, limiter: trio.CapacityLimiter) -> None:
        try:
            async with limiter:
                await self._compact_now(name, limiter)
        finally:
            self._running.discard(name)

    async def _compact_now(self, name: Name, limiter: trio.CapacityLimiter) -> None:
        policy = self._policy_of(name[0])
        is_forced = name in self._forced
        self._forced.discard(name)
        if policy is None or not (self._config.enable_compaction or is_forced):
            return
        map_bytes = self._config.max_offset_map_size // int(limiter.total_tokens)
        keeps_markers = self._has_older(*name)
        request = Request(name, policy, self._now_ms(), map_bytes, is_forced, keeps_markers)
        start_s = monotonic()
        try:
            result = await trio.to_thread.run_sync(partial(self._compactor.compact, request))
        except RunStopped:
            return
        except (OSError, StoreError) as error:
            self.totals.failure_count += 1
            log.error("queue not compacted, retrying", queue=name, reason=str(error))
            return
        if result is not None:
            self.totals.add(result, monotonic() - start_s)
            queue = self.queues.all().get(name)
            if queue is not None:
                queue.log.release_replaced()
