"""A daemon's process: its settings of the system, and the memory that it gives back."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from headrace_broker import main as broker_main
from headrace_daemon.process import give_back_freed_memory, prepare
from headrace_nameserver import main as nameserver_main
from tests.soak.holdings import holding
from tests.support.running import in_background

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
    async with in_background(give_back_freed_memory):
        await trio.sleep(59)
        sys.stdout.write(f"{freed} {memory_mb()} ")
        # The clock does not wait for the thread that does it.
        with trio.move_on_after(24 * 3600):
            while memory_mb() > freed - 30:  # noqa: ASYNC110 - the heap tells nobody
                await trio.sleep(60)
        sys.stdout.write(f"{memory_mb()}\n")


def show_arenas(*_: Any) -> None:
    """Print what the C library has allocated for two threads."""
    worker = threading.Thread(target=use_and_free)
    worker.start()
    worker.join()
    library = ctypes.CDLL(None)
    library.fopen.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(library.fopen(b"/dev/stdout", b"w"))
    library.malloc_info(0, stream)
    library.fclose(stream)
    sys.stdout.write(f"switch interval: {sys.getswitchinterval()}\n")


def serve_broker(config: Path) -> None:
    trio.run = show_arenas  # type: ignore[assignment]
    broker_main.serve(config, check_config=False, log_level="info")


def serve_nameserver(config: Path) -> None:
    trio.run = show_arenas  # type: ignore[assignment]
    nameserver_main.serve(config, port=0, check_config=False, log_level="info")


@pytest.mark.parametrize("serve", [serve_broker, serve_nameserver])
def test_threads_share_an_arena_and_take_short_turns(serve: Any, tmp_path: Path) -> None:
    config = tmp_path / "daemon.conf"
    config.touch()
    code = f"import sys, pathlib; from {__name__} import {serve.__name__} as serve; "
    done = subprocess.run(
        [sys.executable, "-c", f"{code}serve(pathlib.Path(sys.argv[1]))", str(config)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.count("<heap nr=") == 1
    assert "switch interval: 0.0005\n" in done.stdout


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
