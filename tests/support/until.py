"""Waits in tests whose mock clock jumps while threads work."""

from __future__ import annotations

import time
from collections.abc import Callable

import trio

_LIMIT_S = 60


async def until(is_so: Callable[[], bool]) -> None:
    """Let the tasks run until something is so. Raises TimeoutError after a minute.

    The minute is a real one: the mock clock does not wait for threads, however slow the machine.
    """
    deadline = time.monotonic() + _LIMIT_S
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not so after {_LIMIT_S} s")
        await trio.sleep(0.01)
