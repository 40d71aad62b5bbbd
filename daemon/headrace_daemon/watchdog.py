"""Stalls of a daemon's loop: how long clients waited, and for which task."""

from __future__ import annotations

import gc
import os
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog
import trio

if TYPE_CHECKING:
    from trio.lowlevel import Task

log = structlog.get_logger("headrace.watchdog")

STALL_MS = 20.0
WARNING_MS = 500.0
_REPORT_S = 1.0
_NAMED_PARTS = 5
_SCHEDULED_PATH = "/proc/thread-self/schedstat"
_SCHEDULED_AGE_S = 0.001


class Stall(NamedTuple):
    """One long step of one task, during which the loop did nothing else.

    ms: its duration, less the time waiting for a core that other processes used. Linux 6.12 and
    later can count a sleep as such waiting, since a sleeping thread may stay in the run queue, so
    a busy machine hides a few of the stalls that wait for a disk.
    cpu_ms: the part in which the loop's thread ran; for the rest it waited, for a disk or for
    another thread of this process.
    ran: the task, with its slowest known parts.
    """

    ms: float
    cpu_ms: float
    ran: str


_NO_STALL = Stall(0.0, 0.0, "")


class Watchdog(trio.abc.Instrument):
    """Timer of every step of every task of one trio loop, and of garbage collections.

    A step of the server's task handles many requests, so this costs a microsecond or two for each
    millisecond.
    longest: the longest step since the start. busiest: the step with the most CPU time, which may
    be another one: a long step may have waited for a disk.
    stall_count, stalled_ms: number of steps over STALL_MS, and their sum.
    longest_collection_ms: the longest garbage collection.
    """

    def __init__(
        self,
        warning_ms: float = WARNING_MS,
        report_s: float = _REPORT_S,
        scheduled_path: str = _SCHEDULED_PATH,
    ) -> None:
        """scheduled_path: the kernel's account of this thread's time on and waiting for a core."""
        self._warning_ms = warning_ms
        self._report_s = report_s
        self._scheduled_path = scheduled_path
        self.longest = self.busiest = _NO_STALL
        self.stall_count = 0
        self.stalled_ms = 0.0
        self.longest_collection_ms = 0.0
        self._began = self._collection_began = 0.0
        self._parts: list[tuple[float, str]] = []
        self._worst = _NO_STALL
        self._scheduled_file = -1
        self._scheduled = b""
        self._scheduled_at = 0.0

    def note(self, what: str, seconds: float) -> None:
        """Note a slow part of the current step."""
        self._parts.append((seconds, what))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch this loop until cancelled; logs the longest stall of each second."""
        self._scheduled_file = _opened(self._scheduled_path)
        self._begin_step()
        trio.lowlevel.add_instrument(self)
        gc.callbacks.append(self._collection)
        task_status.started()
        try:
            while True:
                await trio.sleep(self._report_s)
                self._report()
        finally:
            gc.callbacks.remove(self._collection)
            trio.lowlevel.remove_instrument(self)
            os.close(self._scheduled_file)

    def _report(self) -> None:
        worst, self._worst = self._worst, _NO_STALL
        if worst.ms:
            say = log.warning if worst.ms >= self._warning_ms else log.debug
            say("the loop stalled", ms=round(worst.ms), cpu_ms=round(worst.cpu_ms), ran=worst.ran)

    # -- called by trio and gc ---------------------------------------------------------------------

    def before_task_step(self, task: Task) -> None:  # noqa: ARG002 - trio's signature
        """Start the timer."""
        self._begin_step()

    def after_task_step(self, task: Task) -> None:
        """Record the step if it was long."""
        ms = (perf_counter() - self._began) * 1000
        if ms > min(self.longest.ms, self.busiest.cpu_ms, STALL_MS):
            self._record_step(task, ms)
        if self._parts:
            self._parts.clear()

    def _begin_step(self) -> None:
        self._began = perf_counter()
        if self._began - self._scheduled_at > _SCHEDULED_AGE_S:
            self._scheduled = os.pread(self._scheduled_file, 64, 0)
            self._scheduled_at = self._began

    def _record_step(self, task: Task, ms: float) -> None:
        cpu_ms, waited_ms = self._scheduled_ms()
        ran = ", ".join((_short_name(task), *self._slowest_parts()))
        stall = Stall(ms - waited_ms, cpu_ms, ran)
        self.longest = max(self.longest, stall)
        if stall.cpu_ms > self.busiest.cpu_ms:
            self.busiest = stall
        if stall.ms > STALL_MS:
            self.stall_count += 1
            self.stalled_ms += stall.ms
            self._worst = max(self._worst, stall)

    def _slowest_parts(self) -> list[str]:
        parts = sorted(self._parts, reverse=True)
        texts = [f"{what} {seconds * 1000:.0f} ms" for seconds, what in parts[:_NAMED_PARTS]]
        more = len(parts) - len(texts)
        return [*texts, f"and {more} more"] if more else texts

    def _scheduled_ms(self) -> tuple[float, float]:
        """Milliseconds that the thread ran, and waited for a core, since the step began."""
        before = self._scheduled
        self._scheduled = os.pread(self._scheduled_file, 64, 0)
        now_ns, before_ns = _nanoseconds(self._scheduled), _nanoseconds(before)
        return (now_ns[0] - before_ns[0]) / 1e6, (now_ns[1] - before_ns[1]) / 1e6

    def _collection(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._collection_began = perf_counter()
            return
        seconds = perf_counter() - self._collection_began
        self.longest_collection_ms = max(self.longest_collection_ms, seconds * 1000)
        if info["generation"]:
            self.note(f"garbage collection {info['generation']}", seconds)


def _short_name(task: Task) -> str:
    """The task's function, with its class."""
    return ".".join(task.name.split(".")[-2:])


def _opened(path: str) -> int:
    """The descriptor of a file, or of an empty one where the kernel has none."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def _nanoseconds(scheduled: bytes) -> tuple[int, int]:
    numbers = scheduled.split()
    return (int(numbers[0]), int(numbers[1])) if numbers else (0, 0)
