"""The process of a daemon: signals, file descriptors, memory."""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from headrace_daemon.collector import settle
from headrace_daemon.services import Services

# Parameters of glibc's mallopt.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_TRIM_THRESHOLD_BYTES = 64 * 1024 * 1024
_MMAP_THRESHOLD_BYTES = 32 * 1024 * 1024  # the maximum that mallopt accepts

_TRIM_INTERVAL_S = 60.0

# How long a thread that computes keeps the loop waiting for the interpreter. With Python's own 5 ms
# a thread that checks CRCs has it for nine tenths of the time, and with this for a fifth.
_SWITCH_INTERVAL_S = 0.0005

_DESCRIPTORS = 16_384
_RESERVED_DESCRIPTORS = 64
_CONNECTIONS_MIN, _CONNECTIONS_MAX = 8, 20_000

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


async def run_until_signal(run: Callable[..., Awaitable[object]]) -> None:
    """Run a daemon until SIGINT or SIGTERM, then cancel it.

    run: takes a task_status, and reports to it when the daemon has started.
    Raises an ExceptionGroup with the errors of a failed start or a failed daemon.
    """
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
    """Prepare the process for a daemon, before it starts a thread.

    The C library's number of arenas is fixed once a second thread has allocated memory.
    """
    _raise_open_files_limit()
    _grow_descriptor_table()
    _keep_freed_memory()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def _raise_open_files_limit() -> None:
    """Raise the soft limit of file descriptors to the hard limit.

    Each client takes a descriptor, and so does each mapped file; the usual soft limit of 1024 is
    for programs that use select().
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connections_max() -> int:
    """Maximum number of clients for which the file descriptors suffice.

    Half of the limit is reserved for mapped files, and an eighth, at least 64, for everything else.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _CONNECTIONS_MAX
    left = soft - soft // 2 - max(soft // 8, _RESERVED_DESCRIPTORS)
    return max(min(left, _CONNECTIONS_MAX), _CONNECTIONS_MIN)


def _grow_descriptor_table() -> None:
    """Make the kernel enlarge the table of open files now, while no client waits.

    When the table of a process with threads grows, Linux waits until all cores have passed a quiet
    state: a pause of 20 ms at each power of two. 16,384 entries take 128 KiB of kernel memory.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = _DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, _DESCRIPTORS)
    with suppress(OSError):
        os.close(fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, highest - 1))


def _keep_freed_memory() -> None:
    """Keep freed memory for reuse, if the C library has mallopt.

    Buffers of some 100 KB come and go a thousand times a second. With the library's own limits
    their memory was mapped anew each time, at 14,000 page faults a second, a twentieth of the CPU.
    All threads share one arena, since malloc_trim keeps the end of every other: the thread that
    writes a table of 12 MB held 45 MB for good.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        mallopt(_M_ARENA_MAX, 1)


async def give_back_freed_memory() -> None:
    """Return freed memory to the system once a minute, if the C library has malloc_trim.

    Otherwise the memory of a few large answers stays resident for good: by itself the library
    returns only what lies above all memory in use. 64 MiB take a thread some 7 ms.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while malloc_trim is not None:
        await trio.sleep(_TRIM_INTERVAL_S)
        await trio.to_thread.run_sync(malloc_trim, 0)
