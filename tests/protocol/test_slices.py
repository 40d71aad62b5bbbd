"""Long work leaves the loop to others: by slices, or in a thread."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import trio
import trio.testing

from headrace_protocol.drivers.slices import Fetches, SlicedWork

if TYPE_CHECKING:
    from collections.abc import Iterator


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
    async with trio.open_nursery() as nursery:
        nursery.start_soon(work.run)
        work.start(long_work(60, done, "long"))
        work.start(long_work(3, done, "short"))
        while len(done) < 2:
            turns += 1
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert done == ["short", "long"]
    assert turns >= 10


async def test_short_work_is_done_at_once() -> None:
    done: list[str] = []
    SlicedWork().start(long_work(0, done, "short"))
    assert done == ["short"]


async def test_what_comes_at_once_does_not_keep_the_loop_piece_by_piece() -> None:
    work = SlicedWork()
    done: list[Any] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(work.run)
        for number in range(60):
            work.start(long_work(1, done, str(number)))
        assert len(done) < 20
        with trio.fail_after(5):
            while len(done) < 60:
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()


async def test_fetches_run_in_threads_a_few_at_a_time() -> None:
    fetches = Fetches()
    threads: list[int] = []
    running = most = 0
    lock = threading.Lock()
    problems: list[Exception | None] = []

    def fetch() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            threads.append(threading.get_ident())
        time.sleep(0.002)
        with lock:
            running -= 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fetches.run)
        for _ in range(20):
            fetches.start(fetch, problems.append)
        with trio.fail_after(5):
            while len(problems) < 20:  # noqa: ASYNC110 - nothing to wait for but the callbacks
                await trio.sleep(0.001)
        nursery.cancel_scope.cancel()
    assert problems == [None] * 20
    assert threading.get_ident() not in threads
    assert most <= 4


async def test_a_disk_that_fails_is_told_to_who_asked() -> None:
    fetches = Fetches()
    error = OSError(5, "Input/output error")
    problems: list[Exception | None] = []

    def fail() -> None:
        raise error

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fetches.run)
        fetches.start(fail, problems.append)
        with trio.fail_after(5):
            while not problems:  # noqa: ASYNC110 - nothing to wait for but the callback
                await trio.sleep(0.001)
        nursery.cancel_scope.cancel()
    assert problems == [error]
