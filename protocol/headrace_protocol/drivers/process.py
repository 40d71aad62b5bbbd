"""What a daemon asks of its process."""

from __future__ import annotations

import resource
import signal
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


async def run_until_signal(run: Callable[[], Awaitable[object]]) -> None:
    """Run a daemon until SIGINT or SIGTERM, then cancel it.

    Raises, in an ExceptionGroup, what keeps it from starting or ends it.
    """
    raise_open_files_limit()
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            async for _ in signals:
                nursery.cancel_scope.cancel()
                break


def raise_open_files_limit() -> None:
    """Use as many file descriptors as the system grants without asking anybody.

    Each client takes one and each mapped file another; the usual soft limit of 1024 is for
    programs that use select().
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
