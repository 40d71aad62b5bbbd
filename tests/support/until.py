"""Waits until something is so, which end a test that waits in vain."""

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


def wait_until(
    is_so: Callable[[], object],
    otherwise: str | Callable[[], object] = "",
    limit_s: float = 2 * _LIMIT_S,
) -> None:
    """Look until something is so. otherwise: says at the limit what is known of it."""
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline, otherwise() if callable(otherwise) else otherwise
        time.sleep(0.02)
