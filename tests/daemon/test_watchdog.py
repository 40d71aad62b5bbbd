"""The watchdog sees real stalls of a real loop, and says what ran."""

from __future__ import annotations

import gc
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog.testing
import trio

from headrace_daemon.watchdog import STALL_MS, WARNING_MS, Watchdog
from tests.support.running import running


@asynccontextmanager
async def watching(**settings: Any) -> AsyncIterator[Watchdog]:
    watchdog = Watchdog(report_s=0.01, **settings)
    async with running(watchdog.run):
        yield watchdog


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


async def step(watchdog: Watchdog, seconds: float) -> None:
    await trio.lowlevel.checkpoint()
    compute(seconds)
    watchdog.note("GET_TOPIC_STATS_INFO", seconds)
    await trio.lowlevel.checkpoint()


@pytest.mark.parametrize(("warning_ms", "level"), [(WARNING_MS, "debug"), (STALL_MS, "warning")])
async def test_a_long_step_is_measured_named_and_logged(warning_ms: float, level: str) -> None:
    with structlog.testing.capture_logs() as logs:
        async with (
            watching(warning_ms=warning_ms) as watchdog,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(step, watchdog, 0.03)
            await trio.sleep(0.1)
    assert watchdog.longest.ms >= 29
    assert watchdog.stall_count >= 1
    # Not the longest of all: a host can keep the machine from any other step for longer than this.
    ran = "test_watchdog.step, GET_TOPIC_STATS_INFO 30 ms"
    warning = next(line for line in logs if line["ran"] == ran)
    assert (warning["log_level"], warning["event"]) == (level, "the loop stalled")
    assert warning["ms"] >= 29
    assert warning["cpu_ms"] >= 29


async def test_the_most_cpu_time_is_that_of_any_step() -> None:
    async with watching() as watchdog:
        await step(watchdog, 0.03)
        await trio.lowlevel.checkpoint()
        time.sleep(0.2)  # noqa: ASYNC251 - that is the point
        await trio.lowlevel.checkpoint()
        longest, busiest = watchdog.longest, watchdog.busiest
    assert longest.ms > busiest.cpu_ms >= 29
    assert "GET_TOPIC_STATS_INFO 30 ms" in busiest.ran


async def test_waiting_for_the_disk_is_a_stall_without_cpu() -> None:
    async with watching() as watchdog:
        # Under load, Linux counts one in a few hundred sleeps as waiting for a core.
        for _ in range(4):
            await trio.lowlevel.checkpoint()
            time.sleep(0.03)  # noqa: ASYNC251 - that is the point
            await trio.lowlevel.checkpoint()
        stall = watchdog.longest
    assert stall.ms >= STALL_MS
    assert stall.cpu_ms < stall.ms / 2


async def test_what_is_slow_is_told_with_its_own_step_only() -> None:
    async with watching() as watchdog:
        watchdog.note("an earlier request", 0.001)
        await step(watchdog, 0.03)
        await trio.lowlevel.checkpoint()
    assert "an earlier request" not in watchdog.longest.ran


@pytest.fixture
def _without_collections() -> Iterator[None]:
    """A garbage collection is a part, too."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_without_collections")
async def test_of_many_slow_parts_the_slowest_are_named() -> None:
    async with watching() as watchdog:
        await trio.lowlevel.checkpoint()
        for number in range(300):
            watchdog.note(f"part {number}", number / 1000)
        compute(0.03)
        await trio.lowlevel.checkpoint()
    _, _, parts = watchdog.longest.ran.partition(", ")
    assert parts == (
        "part 299 299 ms, part 298 298 ms, part 297 297 ms, part 296 296 ms, part 295 295 ms, "
        "and 295 more"
    )


async def test_garbage_collections_are_measured() -> None:
    async with watching() as watchdog:
        cycles: list[list[object]] = [[] for _ in range(50_000)]
        for cycle in cycles:
            cycle.append(cycle)
        del cycles, cycle
        await trio.lowlevel.checkpoint()
        gc.collect()
        compute(STALL_MS / 1000)
        await trio.lowlevel.checkpoint()
    assert watchdog.longest_collection_ms > 0.1
    assert "garbage collection 2" in watchdog.longest.ran


async def test_it_leaves_nothing_behind() -> None:
    callbacks = list(gc.callbacks)
    async with watching():
        assert len(gc.callbacks) == len(callbacks) + 1
    assert gc.callbacks == callbacks


async def test_a_system_without_schedules_is_watched_too() -> None:
    async with watching(scheduled_path="/nowhere/schedstat") as watchdog:
        await step(watchdog, 0.03)
    assert watchdog.longest.ms >= 30
    assert watchdog.longest.cpu_ms == 0
