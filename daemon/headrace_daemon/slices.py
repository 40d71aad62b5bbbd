"""Work that would keep the loop for too long: done a slice at a time, or in a thread."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING

import structlog
import trio

from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace_protocol.errors import Lane, NotReady
    from headrace_protocol.serving import Channel, Then

log = structlog.get_logger("headrace.server")

# How long clients may wait for it, on top of what they wait for each other.
_SLICE_S = 0.002


class SlicedWork:
    """Iterators that are run to their ends between the batches of requests, in turn.

    The turns go by work, not by client: of what a client asks for, ``Registry`` starts one work at
    a time, so both are the same. Works that nobody asked for, as for those who waited at a queue,
    belong to many clients.
    """

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
    """Waits in threads for what requests need, and calls back when it is there.

    Each lane has threads of its own. Within a lane clients take turns, so that one with a thousand
    fetches delays the first fetch of another by one turn.
    """

    def __init__(self) -> None:
        self._lanes: dict[Lane, _LaneQueue] = {}
        self._has_news = trio.Event()

    def start(self, channel: Channel, wait: NotReady, then: Then) -> None:
        """Fetch in a thread when it is the client's turn, then call ``then`` with any error."""
        queue = self._lanes.get(wait.lane)
        if queue is None:
            queue = self._lanes[wait.lane] = _LaneQueue(wait.lane)
        queue.put(channel, wait.fetch, then)
        self._has_news.set()

    async def run(self) -> None:
        """Serve until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._has_news.wait()
                self._has_news = trio.Event()
                for queue in self._lanes.values():
                    while queue.has_turn:
                        nursery.start_soon(self._fetch, queue, *queue.take())

    async def _fetch(
        self, queue: _LaneQueue, channel: Channel, fetch: Callable[[], None], then: Then
    ) -> None:
        problem: Exception | None = None
        try:
            if channel.is_open or queue.lane.outlives_client:
                await trio.to_thread.run_sync(fetch, limiter=queue.limiter)
            else:
                # What waits is no longer charged to the client, so it must not pile up.
                problem = RequestError(ResponseCode.SYSTEM_ERROR, "the client has disconnected")
        except OSError as error:
            log.error("can't be fetched", what=queue.lane.name, reason=str(error))
            problem = error
        except Exception as error:  # noqa: BLE001 - passed to the request that asked
            problem = error
        finally:
            queue.running_count -= 1
            self._has_news.set()
        then(problem)


class _LaneQueue:
    """What waits in one lane: for each client its fetches, the client whose turn is next first.

    limiter: the threads of the lane, none of which is in the pool that others share.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.limiter = trio.CapacityLimiter(lane.threads)
        self.running_count = 0
        self._waiting: dict[Channel, deque[tuple[Callable[[], None], Then]]] = {}

    @property
    def has_turn(self) -> bool:
        """Whether something waits and a thread is free for it."""
        return bool(self._waiting) and self.running_count < self.lane.threads

    def put(self, channel: Channel, fetch: Callable[[], None], then: Then) -> None:
        """Add to what a client waits for."""
        fetches = self._waiting.get(channel)
        if fetches is None:
            fetches = self._waiting[channel] = deque()
        fetches.append((fetch, then))

    def take(self) -> tuple[Channel, Callable[[], None], Then]:
        """Begin the oldest fetch of the client with the next turn; the client goes to the end."""
        channel = next(iter(self._waiting))
        fetches = self._waiting.pop(channel)
        fetch, then = fetches.popleft()
        if fetches:
            self._waiting[channel] = fetches
        self.running_count += 1
        return channel, fetch, then
