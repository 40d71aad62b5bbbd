"""What a daemon asks of its process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import trio
import trio.testing

from headrace_daemon.process import give_back_freed_memory, prepare
from tests.soak.holdings import holding

FREED_PIECES, PIECE_BYTES = 400, 100_000


def memory_mb() -> float:
    return holding(os.getpid()).memory_mb


def free_much(*, in_thread: bool) -> None:
    """Say what a process holds when much was freed, almost a minute later, and in the end."""
    prepare()
    if in_thread:
        worker = threading.Thread(target=use_and_free)
        worker.start()
        worker.join()
    else:
        above = use_and_free()
    trio.run(watch, memory_mb(), clock=trio.testing.MockClock(autojump_threshold=0))
    assert in_thread or above


def use_and_free() -> bytes:
    """Free much memory; returns what lies above it."""
    pieces = [bytes([1]) * PIECE_BYTES for _ in range(FREED_PIECES)]
    above = bytes([2]) * PIECE_BYTES
    pieces.clear()
    return above


async def watch(freed: float) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(give_back_freed_memory)
        await trio.sleep(59)
        sys.stdout.write(f"{freed} {memory_mb()} ")
        # The clock does not wait for the thread that does it.
        with trio.move_on_after(24 * 3600):
            while memory_mb() > freed - 30:  # noqa: ASYNC110 - the heap tells nobody
                await trio.sleep(60)
        sys.stdout.write(f"{memory_mb()}\n")
        nursery.cancel_scope.cancel()


@pytest.mark.slow
@pytest.mark.parametrize("in_thread", [False, True])
def test_freed_memory_goes_back_after_a_minute_though_what_lies_above_is_in_use(
    *, in_thread: bool
) -> None:
    code = f"from {__name__} import free_much; free_much(in_thread={in_thread})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    freed, a_minute_later, at_last = map(float, done.stdout.split())
    assert a_minute_later > freed - 5
    assert at_last < freed - 30
