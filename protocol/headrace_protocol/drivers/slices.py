"""Work that would keep the loop for too long: done a slice at a time, or in a thread."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING

import structlog
import trio

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace_protocol.serving import Fetch, Then

log = structlog.get_logger("headrace.server")

# Disks answer some at once faster than one after the other.
_FETCHES_AT_ONCE = 4
# How long clients may wait for it, on top of what they wait for each other.
_SLICE_S = 0.002


class SlicedWork:
    """Iterators that are run to their ends between the batches of requests, in turn."""

    def __init__(self) -> None:
        self._waiting: deque[Iterator[None]] = deque()
        self._asked = trio.Event()
        self._at_once_from = 0.0

    def start(self, work: Iterator[None]) -> None:
        """Begin now; what takes longer than a slice goes on while others are served.

        So does what comes right after, since many slices at once would be a long one.
        """
        began = perf_counter()
        if began >= self._at_once_from:
            is_done = _run_slice(work)
            now = perf_counter()
            self._at_once_from = now + (now - began)
            if is_done:
                return
        self._waiting.append(work)
        self._asked.set()

    async def run(self) -> None:
        """Go on with what was begun, until cancelled."""
        while True:
            while self._waiting:
                await trio.lowlevel.checkpoint()
                work = self._waiting.popleft()
                if not _run_slice(work):
                    self._waiting.append(work)
            await self._asked.wait()
            self._asked = trio.Event()


def _run_slice(work: Iterator[None]) -> bool:
    """Whether it came to its end."""
    end = perf_counter() + _SLICE_S
    return all(perf_counter() < end for _ in work)


class Fetches:
    """Waits for the disk in threads, and calls back when what was asked for is there."""

    def __init__(self) -> None:
        self._asked: deque[tuple[Fetch, Then]] = deque()
        self._threads = trio.Semaphore(_FETCHES_AT_ONCE)
        self._is_asked = trio.Event()

    def start(self, fetch: Fetch, then: Then) -> None:
        """Call ``fetch`` in a thread when one is free, then ``then`` with its error, if any."""
        self._asked.append((fetch, then))
        self._is_asked.set()

    async def run(self) -> None:
        """Serve until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._is_asked.wait()
                self._is_asked = trio.Event()
                while self._asked:
                    await self._threads.acquire()
                    nursery.start_soon(self._fetch, *self._asked.popleft())

    async def _fetch(self, fetch: Fetch, then: Then) -> None:
        problem: Exception | None = None
        try:
            await trio.to_thread.run_sync(fetch)
        except OSError as error:
            log.error("old messages can't be read", reason=str(error))
            problem = error
        except Exception as error:  # noqa: BLE001 - passed to the request that asked
            problem = error
        finally:
            self._threads.release()
        then(problem)
