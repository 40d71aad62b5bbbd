"""Work that would block the loop for too long: run in slices, or in a thread."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import structlog
import trio

from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.serving import SLICE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Iterator

    from headrace_protocol.channel import Channel
    from headrace_protocol.errors import Lane, NotReady
    from headrace_protocol.serving import Then

log = structlog.get_logger("headrace.server")

Result = TypeVar("Result")


async def in_slices(
    work: Generator[None, None, Result] | Coroutine[None, Any, Result],
) -> Result:
    """Run a task's own work to its end, in slices, and return its result."""
    breaks = Breaks()
    while True:
        try:
            work.send(None)
        except StopIteration as ended:
            result: Result = ended.value
            return result
        await breaks.take()


class Breaks:
    """The breaks of a task whose loop need not wait: others run when its slice is over."""

    def __init__(self) -> None:
        self._end = perf_counter() + SLICE_S

    async def take(self) -> None:
        """Let others run if the slice is over."""
        if perf_counter() > self._end:
            await trio.lowlevel.checkpoint()
            self._end = perf_counter() + SLICE_S


class SlicedWork:
    """Iterators that run round robin, in slices between the turns of the loop.

    Each iterator gets one slice at a time. ``Registry`` starts one iterator per client at a time,
    so this also shares the time between clients. An iterator that no request started, such as one
    that wakes the held pulls of a queue, serves many clients.
    """

    def __init__(self) -> None:
        self._waiting: deque[Iterator[None]] = deque()
        self._has_work = trio.Event()
        self._next_immediate_at = 0.0

    def start(self, work: Iterator[None]) -> None:
        """Run the first slice now, and queue the rest.

        Work that is started soon after another is queued as a whole: many first slices in
        succession would be one long slice.
        """
        began = perf_counter()
        if began >= self._next_immediate_at:
            is_done = _run_slice(work)
            now = perf_counter()
            self._next_immediate_at = now + (now - began)
            if is_done:
                return
        self._waiting.append(work)
        self._has_work.set()

    async def run(self) -> None:
        """Run the queued work until cancelled."""
        while True:
            while self._waiting:
                await trio.lowlevel.checkpoint()
                work = self._waiting.popleft()
                if not _run_slice(work):
                    self._waiting.append(work)
            await self._has_work.wait()
            self._has_work = trio.Event()


def _run_slice(work: Iterator[None]) -> bool:
    """Run one slice; returns whether the work is finished."""
    end = perf_counter() + SLICE_S
    return all(perf_counter() < end for _ in work)


class Fetches:
    """Threads that fetch the data for which requests wait, then call back.

    Each lane has threads of its own. Within a lane clients take turns, so a client with a thousand
    fetches delays the first fetch of another by only one.
    """

    def __init__(self) -> None:
        self._lanes: dict[Lane, _LaneQueue] = {}
        self._has_news = trio.Event()

    def start(self, channel: Channel, wait: NotReady, then: Then) -> None:
        """Fetch in a thread at the client's turn, then call ``then`` with the error or None."""
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
                # The queued fetches of a closed client are not charged, so they must not pile up.
                problem = RequestError(ResponseCode.SYSTEM_ERROR, "the client has disconnected")
        except OSError as error:
            log.error("fetch failed", lane=queue.lane.name, reason=str(error))
            problem = error
        except Exception as error:  # noqa: BLE001 - passed to the waiting request
            problem = error
        finally:
            queue.running_count -= 1
            self._has_news.set()
        then(problem)


class _LaneQueue:
    """The waiting fetches of one lane by client, the client with the next turn first.

    limiter: the lane's own threads, apart from trio's default limiter.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.limiter = trio.CapacityLimiter(lane.threads)
        self.running_count = 0
        self._waiting: dict[Channel, deque[tuple[Callable[[], None], Then]]] = {}

    @property
    def has_turn(self) -> bool:
        """True if a fetch waits and a thread is free."""
        return bool(self._waiting) and self.running_count < self.lane.threads

    def put(self, channel: Channel, fetch: Callable[[], None], then: Then) -> None:
        """Add a fetch for a client."""
        fetches = self._waiting.get(channel)
        if fetches is None:
            fetches = self._waiting[channel] = deque()
        fetches.append((fetch, then))

    def take(self) -> tuple[Channel, Callable[[], None], Then]:
        """Take the oldest fetch of the client with the next turn, which then goes to the end."""
        channel = next(iter(self._waiting))
        fetches = self._waiting.pop(channel)
        fetch, then = fetches.popleft()
        if fetches:
            self._waiting[channel] = fetches
        self.running_count += 1
        return channel, fetch, then
