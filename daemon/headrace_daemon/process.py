"""What a daemon asks of its process."""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from headrace_daemon.collector import settle
from headrace_daemon.services import Services

# Of glibc's mallopt.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 64 * 1024 * 1024
_MAPPED_FROM_BYTES = 32 * 1024 * 1024  # the most that it takes

_KEPT_S = 60.0

_DESCRIPTORS = 16_384
_RESERVED_DESCRIPTORS = 64
_CONNECTIONS_MIN, _CONNECTIONS_MAX = 8, 20_000

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


async def run_until_signal(run: Callable[..., Awaitable[object]]) -> None:
    """Run a daemon until SIGINT or SIGTERM, then cancel it.

    run: takes a task_status, and tells it when the daemon has started.
    Raises, in an ExceptionGroup, what keeps it from starting or ends it.
    """
    prepare()
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            Services().start_soon(nursery, give_back_freed_memory)
            nursery.start_soon(_start, nursery, run)
            async for _ in signals:
                nursery.cancel_scope.cancel()
                break


async def _start(nursery: trio.Nursery, run: Callable[..., Awaitable[object]]) -> None:
    await nursery.start(run)
    settle()


def prepare() -> None:
    """Set the process up for a daemon."""
    _raise_open_files_limit()
    _grow_descriptor_table()
    _keep_freed_memory()


def _raise_open_files_limit() -> None:
    """Use as many file descriptors as the system grants without asking anybody.

    Each client takes one and each mapped file another; the usual soft limit of 1024 is for
    programs that use select().
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connections_max() -> int:
    """How many clients a daemon can serve without running out of file descriptors.

    Half of the limit is reserved for mapped files, and an eighth, at least 64, for everything else.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _CONNECTIONS_MAX
    left = soft - soft // 2 - max(soft // 8, _RESERVED_DESCRIPTORS)
    return max(min(left, _CONNECTIONS_MAX), _CONNECTIONS_MIN)


def _grow_descriptor_table() -> None:
    """Let the system make its table of our open files large while nobody waits.

    When the table of a process with threads grows, Linux waits for all cores to pass a quiet state:
    that was 20 ms for a client at each power of two. 16,384 take 128 KiB of the kernel's memory.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = _DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, _DESCRIPTORS)
    with suppress(OSError):
        os.close(fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, highest - 1))


def _keep_freed_memory() -> None:
    """Do not give freed memory back to the system at once, where the C library can be told.

    Batches of some 100 KB come and go a thousand times a second. With the library's own limits
    their memory was mapped anew each time, at 14,000 page faults a second, a twentieth of the CPU.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)


async def give_back_freed_memory() -> None:
    """Once a minute give freed memory back to the system, where the C library can be told.

    A moment with many large answers would otherwise stay resident for good: the library gives back
    no more than lies above all that is in use. 64 MiB take a thread some 7 ms.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while malloc_trim is not None:
        await trio.sleep(_KEPT_S)
        await trio.to_thread.run_sync(malloc_trim, 0)
