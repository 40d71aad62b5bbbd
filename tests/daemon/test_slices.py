"""Long work leaves the loop to others: by slices, or in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from headrace_daemon.slices import Fetches, SlicedWork
from headrace_protocol.errors import Lane, NotReady
from tests.support.channel import MemoryChannel
from tests.support.running import in_background


def long_work(steps: int, done: list[str], name: str) -> Iterator[None]:
    for _ in range(steps):
        end = time.perf_counter() + 0.001
        while time.perf_counter() < end:
            pass
        yield
    done.append(name)


async def test_others_have_their_turns_between_slices() -> None:
    work, turns = SlicedWork(), 0
    done: list[Any] = []
    async with in_background(work.run):
        work.start(long_work(60, done, "long"))
        work.start(long_work(3, done, "short"))
        while len(done) < 2:
            turns += 1
            await trio.lowlevel.checkpoint()
    assert done == ["short", "long"]
    assert turns >= 10


async def test_short_work_is_done_at_once() -> None:
    done: list[str] = []
    SlicedWork().start(long_work(0, done, "short"))
    assert done == ["short"]


async def test_what_comes_at_once_does_not_keep_the_loop_piece_by_piece() -> None:
    work = SlicedWork()
    done: list[Any] = []
    async with in_background(work.run):
        for number in range(60):
            work.start(long_work(1, done, str(number)))
        assert len(done) < 20
        with trio.fail_after(5):
            while len(done) < 60:
                await trio.lowlevel.checkpoint()


class Held:
    """Fetches that are in their threads until they are let go."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.done: list[str] = []
        self.problems: list[Exception | None] = []
        self.is_let_go = threading.Event()
        self.fetches = Fetches()

    def ask(self, channel: MemoryChannel, name: str, lane: Lane) -> None:
        def fetch() -> None:
            self.begun.append(name)
            self.is_let_go.wait(5)

        def then(problem: Exception | None) -> None:
            self.problems.append(problem)
            self.done.append(name)

        self.fetches.start(channel, NotReady(fetch, lane), then)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.fetches.run)
                try:
                    yield
                finally:
                    self.is_let_go.set()
                    nursery.cancel_scope.cancel()

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():  # noqa: ASYNC110 - nothing to wait for but the callbacks
            await trio.sleep(0.001)


async def test_a_lane_uses_its_own_threads_and_no_more() -> None:
    held, lane = Held(), Lane("tests", threads=3)
    for number in range(20):
        held.ask(MemoryChannel(), str(number), lane)
    async with held.running():
        await held.until(lambda: len(held.begun) == 3)
        for _ in range(10):
            await trio.lowlevel.checkpoint()
        assert len(held.begun) == 3
        held.is_let_go.set()
        await held.until(lambda: len(held.done) == 20)
    assert held.problems == [None] * 20


async def test_fetches_leave_the_loop_alone() -> None:
    threads: list[int] = []
    fetches, is_done = Fetches(), trio.Event()
    wait = NotReady(lambda: threads.append(threading.get_ident()), Lane("tests", 1))
    async with in_background(fetches.run):
        fetches.start(MemoryChannel(), wait, lambda _: is_done.set())
        await is_done.wait()
    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_a_thousand_fetches_delay_another_clients_first_by_one_turn() -> None:
    held, lane = Held(), Lane("tests", threads=1)
    greedy, modest = MemoryChannel(), MemoryChannel()
    for number in range(1000):
        held.ask(greedy, f"greedy {number}", lane)
    held.ask(modest, "modest 0", lane)
    held.ask(modest, "modest 1", lane)
    async with held.running():
        await held.until(lambda: bool(held.begun))
        held.is_let_go.set()
        await held.until(lambda: "modest 1" in held.done)
    assert held.done[:4] == ["greedy 0", "modest 0", "greedy 1", "modest 1"]


async def test_a_client_that_comes_late_has_the_turn_after_those_that_wait() -> None:
    held, lane = Held(), Lane("tests", threads=1)
    greedy, late = MemoryChannel(), MemoryChannel()
    for number in range(1000):
        held.ask(greedy, f"greedy {number}", lane)
    async with held.running():
        await held.until(lambda: bool(held.begun))
        held.ask(late, "late", lane)
        held.is_let_go.set()
        await held.until(lambda: "late" in held.done)
    assert held.done.index("late") <= 2


async def test_a_full_lane_does_not_delay_another() -> None:
    held, full, free = Held(), Lane("full", threads=2), Lane("free", threads=1)
    channel = MemoryChannel()
    for number in range(1000):
        held.ask(channel, f"full {number}", full)
    async with held.running():
        await held.until(lambda: len(held.begun) == 2)
        is_there = trio.Event()
        held.fetches.start(channel, NotReady(lambda: None, free), lambda _: is_there.set())
        await is_there.wait()
        assert len(held.begun) == 2
        assert held.done == []


async def test_fetches_of_a_closed_client_do_not_run() -> None:
    held, lane, client = Held(), Lane("tests", threads=1), MemoryChannel()
    for number in range(1000):
        held.ask(client, str(number), lane)
    client.is_open = False
    held.ask(MemoryChannel(), "another client's", lane)
    held.is_let_go.set()
    async with held.running():
        await held.until(lambda: len(held.done) == 1001)
    assert held.begun == ["another client's"]
    assert held.problems.count(None) == 1


async def test_what_saves_runs_for_a_closed_client() -> None:
    held, lane, client = Held(), Lane("tests", threads=1, outlives_client=True), MemoryChannel()
    held.ask(client, "save", lane)
    client.is_open = False
    held.is_let_go.set()
    async with held.running():
        await held.until(lambda: bool(held.done))
    assert (held.begun, held.problems) == (["save"], [None])


async def test_a_lane_goes_on_when_its_service_restarts() -> None:
    held, lane = Held(), Lane("tests", threads=1)
    held.ask(MemoryChannel(), "first", lane)
    held.is_let_go.set()

    def fail(_problem: Exception | None) -> None:
        raise ZeroDivisionError

    wait = NotReady(lambda: None, lane)
    with pytest.raises(ExceptionGroup):  # noqa: PT012
        async with trio.open_nursery() as nursery:
            held.fetches.start(MemoryChannel(), wait, fail)
            nursery.start_soon(held.fetches.run)
    async with held.running():
        held.ask(MemoryChannel(), "second", lane)
        await held.until(lambda: "second" in held.done)


async def test_a_disk_that_fails_is_told_to_who_asked() -> None:
    fetches = Fetches()
    error = OSError(5, "Input/output error")
    problems: list[Exception | None] = []
    is_told = trio.Event()

    def fail() -> None:
        raise error

    def then(problem: Exception | None) -> None:
        problems.append(problem)
        is_told.set()

    async with in_background(fetches.run):
        fetches.start(MemoryChannel(), NotReady(fail, Lane("tests", 1)), then)
        with trio.fail_after(5):
            await is_told.wait()
    assert problems == [error]
