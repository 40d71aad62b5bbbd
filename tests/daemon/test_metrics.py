"""Pages of metrics: collected in slices, encoded with breaks, and made for few."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
import trio.testing

from headrace_daemon.metrics.exposition import Encoder
from headrace_daemon.metrics.histogram import Histogram
from headrace_daemon.metrics.samples import Collect, Metric, Samples
from headrace_daemon.metrics.scrapes import NotServing, Scrapes
from headrace_protocol.errors import Lane, NotReady
from headrace_protocol.waiting import take_break
from tests.support.metrics import parse, value

COUNTED = Metric("h_counted_total", "counter", "Counted", ("what",))
MEASURED = Metric("h_measured", "gauge", "Measured")
TIMES = Metric("h_seconds", "histogram", "Times")
LANE = Lane("a test", 1)


@asynccontextmanager
async def running(
    *collectors: Collect, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[Scrapes]:
    scrapes = Scrapes({"node_id": "b"}, clock)
    scrapes.collectors = collectors
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scrapes.run)
        await trio.testing.wait_all_tasks_blocked()
        yield scrapes
        nursery.cancel_scope.cancel()


async def page(scrapes: Scrapes) -> bytes:
    return await trio.to_thread.run_sync(scrapes.page)


def test_a_histogram_counts_up_to_and_with_each_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for seconds in (0.5, 1.0, 1.5, 2.5):
        histogram.add(seconds)
    histogram.add(2.0, 3)
    assert (histogram.counts, histogram.total) == ([2, 4, 1], 11.5)


def test_a_page_is_read_by_prometheus_parser() -> None:
    samples, histogram = Samples(), Histogram((0.1, 1.0))
    histogram.add(0.1, 2)
    histogram.add(5)
    samples.add(COUNTED, 3, 'a"\\\n')
    samples.add(COUNTED, 4, "b")
    samples.add(MEASURED, float("inf"))
    samples.add_histogram(TIMES, histogram)
    text = Encoder({"node_id": "b"}).encode(samples)
    assert b"# HELP h_counted_total Counted\n# TYPE h_counted_total counter\n" in text
    assert b"process_cpu_seconds_total " in text
    found = parse(text)
    assert value(found, "h_counted_total", what='a"\\\n', node_id="b") == 3
    assert value(found, "h_measured") == float("inf")
    buckets = {le: value(found, "h_seconds_bucket", le=le) for le in ("0.1", "1.0", "+Inf")}
    assert buckets == {"0.1": 2, "1.0": 2, "+Inf": 3}
    assert (value(found, "h_seconds_count"), value(found, "h_seconds_sum")) == (3, 5.2)


async def test_others_have_their_turns_while_a_page_is_collected() -> None:
    async def collect(samples: Samples) -> None:
        for _ in range(300):
            end = time.perf_counter() + 0.0002
            while time.perf_counter() < end:
                pass
            await take_break()
        samples.add(MEASURED, 1)

    turns = 0
    async with running(collect) as scrapes, trio.open_nursery() as nursery:
        done = trio.Event()

        async def scrape() -> None:
            assert value(parse(await page(scrapes)), "h_measured") == 1
            done.set()

        nursery.start_soon(scrape)
        while not done.is_set():
            turns += 1
            await trio.lowlevel.checkpoint()
    assert turns >= 30  # 60 ms of work


async def test_many_scrapes_share_a_page() -> None:
    calls: list[int] = []

    async def collect(samples: Samples) -> None:
        calls.append(1)
        samples.add(MEASURED, len(calls))
        await take_break()

    now = 1000.0
    async with running(collect, clock=lambda: now) as scrapes:
        pages = {await page(scrapes) for _ in range(50)}
        assert (len(calls), len(pages)) == (1, 1)
        now += 1
        assert value(parse(await page(scrapes)), "h_measured") == 2


async def test_a_page_that_takes_long_is_kept_for_longer() -> None:
    calls: list[int] = []
    now = 1000.0

    async def collect(samples: Samples) -> None:
        nonlocal now
        calls.append(1)
        now += 0.5
        await take_break()

    async with running(collect, clock=lambda: now) as scrapes:
        await page(scrapes)
        now += 9
        await page(scrapes)
        assert len(calls) == 1
        now += 1
        await page(scrapes)
        assert len(calls) == 2


async def test_what_waits_for_the_disk_is_read_in_a_thread() -> None:
    fetched: list[int] = []

    async def collect(samples: Samples) -> None:
        while not fetched:
            await NotReady(partial(fetched.append, 1), LANE)
        samples.add(MEASURED, 1)

    async with running(collect) as scrapes:
        assert value(parse(await page(scrapes)), "h_measured") == 1


async def test_a_disk_that_fails_costs_only_what_needs_it() -> None:
    def fail() -> None:
        raise OSError("broken")

    async def collect(samples: Samples) -> None:
        while samples.may_wait:
            await NotReady(fail, LANE)
        samples.add(MEASURED, 2)

    async with running(collect) as scrapes:
        assert value(parse(await page(scrapes)), "h_measured") == 2


async def test_there_is_no_page_before_and_after() -> None:
    async with running() as scrapes:
        pass
    with pytest.raises(NotServing, match="starting or stopping"):
        await page(scrapes)


async def test_a_stop_leaves_nobody_waiting() -> None:
    begun = trio.Event()

    async def collect(_samples: Samples) -> None:
        while True:
            begun.set()
            await take_break()

    scrapes = Scrapes({})
    scrapes.collectors = (collect,)
    async with trio.open_nursery() as nursery:

        async def scrape() -> None:
            with pytest.raises(NotServing, match="stopping"):
                await page(scrapes)

        async with trio.open_nursery() as service:
            service.start_soon(scrapes.run)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(scrape)
            await begun.wait()
            service.cancel_scope.cancel()


def test_a_daemon_without_a_monitor_does_not_load_the_client() -> None:
    program = (
        "import sys, headrace_broker.main, headrace_nameserver.main\n"
        "assert not [name for name in sys.modules if 'prometheus' in name]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
