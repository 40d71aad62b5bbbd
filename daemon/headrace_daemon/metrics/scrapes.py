"""Scrapes: the monitor's thread asks, the daemon's loop collects, a thread encodes."""

from __future__ import annotations

import math
from concurrent.futures import Future
from contextlib import suppress
from itertools import chain
from time import perf_counter
from typing import TYPE_CHECKING, Any

import structlog
import trio

from headrace_daemon.metrics.samples import Metric, Samples

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence

    from headrace_daemon.metrics.samples import Collect
    from headrace_protocol.errors import NotReady

log = structlog.get_logger("headrace.metrics")

SCRAPE_SECONDS = Metric(
    "headrace_scrape_seconds",
    "gauge",
    "Time that loop and encoding thread spent on the previous page of metrics",
)

_SLICE_S = 0.001
# Whoever reaches the port may ask as often as they like: a page is made once a second at most, and
# for a twentieth of the time.
_FRESH_S = 1.0
_SHARE = 20
# What a scrape may wait for the disk, and for the loop; Prometheus gives up after 10 s.
_DISK_S = 2.0
_LOOP_S = 8.0


class NotServing(Exception):
    """There are no metrics now; the text says why."""


class Scrapes:
    """Pages of metrics. ``run`` is a service of the daemon, ``page`` is called by one thread.

    labels: of every sample. collectors: called in turn for each page, in the daemon's loop.
    """

    def __init__(
        self, labels: Mapping[str, str], clock: Callable[[], float] = perf_counter
    ) -> None:
        # prometheus_client takes start-up time and memory: only a daemon with a monitor pays.
        from headrace_daemon.metrics.exposition import Encoder

        self.collectors: Sequence[Collect] = ()
        self._encoder = Encoder(labels)
        self._clock = clock
        # Set while ``run`` runs; the request is that of the one thread.
        self._token: trio.lowlevel.TrioToken | None = None
        self._request: Future[Samples] | None = None
        self._asked = trio.Event()
        self._page = b""
        self._fresh_until = -math.inf
        self._page_s = self._loop_s = 0.0
        self._threads = trio.CapacityLimiter(1)

    # -- in the monitor's thread -------------------------------------------------------------------

    def page(self) -> bytes:
        """Prometheus' text, made anew at most once a second. Raises NotServing."""
        if self._clock() >= self._fresh_until:
            samples = self._samples()
            began = self._clock()
            self._page = self._encoder.encode(samples)
            now = self._clock()
            self._page_s = self._loop_s + now - began
            self._fresh_until = now + max(_FRESH_S, _SHARE * self._page_s)
        return self._page

    def _samples(self) -> Samples:
        request: Future[Samples] = Future()
        token = self._token
        if token is None:
            raise NotServing("the daemon is starting or stopping")
        try:
            token.run_sync_soon(self._take, request)
            return request.result(_LOOP_S)
        except trio.RunFinishedError:
            raise NotServing("the daemon has stopped") from None
        except TimeoutError:
            raise NotServing(f"the daemon's loop took more than {_LOOP_S:g} s") from None

    # -- in the daemon's loop ----------------------------------------------------------------------

    def _take(self, request: Future[Samples]) -> None:
        if self._token is None:
            _give_up(request)
        else:
            self._request = request
            self._asked.set()

    async def run(self) -> None:
        """Collect what pages need until cancelled."""
        self._token = trio.lowlevel.current_trio_token()
        try:
            while True:
                await self._asked.wait()
                self._asked = trio.Event()
                request, self._request = self._request, None
                assert request is not None
                try:
                    request.set_result(await self._collect())
                finally:
                    _give_up(request)
        finally:
            self._token = None
            if self._request is not None:
                _give_up(self._request)

    async def _collect(self) -> Samples:
        """Run the collectors, with turns for others in between."""
        samples = Samples()
        deadline = trio.current_time() + _DISK_S
        self._loop_s = 0.0
        began = self._clock()
        for wait in chain.from_iterable(_steps(collect(samples)) for collect in self.collectors):
            now = self._clock()
            if wait is None and now - began < _SLICE_S:
                continue
            self._loop_s += now - began
            if wait is None:
                await trio.lowlevel.checkpoint()
            else:
                is_read = await self._fetch(wait)
                samples.may_wait = is_read and trio.current_time() < deadline
            began = self._clock()
        samples.add(SCRAPE_SECONDS, self._page_s)
        self._loop_s += self._clock() - began
        return samples

    async def _fetch(self, wait: NotReady) -> bool:
        try:
            await trio.to_thread.run_sync(wait.fetch, limiter=self._threads)
        except OSError as error:
            log.error("metrics left out", what=wait.lane.name, reason=str(error))
            return False
        return True


def _steps(work: Coroutine[NotReady | None, Any, None]) -> Iterator[NotReady | None]:
    """The breaks and waits of a collector."""
    with suppress(StopIteration):
        while True:
            yield work.send(None)


def _give_up(request: Future[Samples]) -> None:
    if not request.done():
        request.set_exception(NotServing("the daemon is stopping, or see its log"))
