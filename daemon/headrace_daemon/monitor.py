"""Health checks and metrics over HTTP, for systems that start, watch and restart a daemon.

A broker serves them even before its store is open. Source: deploy/README.md "Health checks",
docs/metrics.md.
"""

from __future__ import annotations

from contextlib import suppress
from http import HTTPStatus
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import trio

from headrace_daemon.metrics.scrapes import NotServing
from headrace_daemon.serving.ports import listen

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

_HEAD_BYTES_MAX = 8192
_REQUEST_S = 1.0
# Prometheus waits for 10 s by default.
_METRICS_S = 10.0
_CLIENTS_MAX = 64
_TURN_S = 1.0
# Of Prometheus' text format.
_TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Far above the longest step that any request may cause.
_STALL_S_MAX = 10.0


class Monitored(Protocol):
    """The daemon as its monitor sees it; called in the monitor's threads."""

    def report(self) -> tuple[bool, dict[str, Any]]:
        """True if the daemon is ready, and the details for the answer."""

    def metrics(self) -> bytes:
        """Metrics in Prometheus' text format. Raises NotServing."""


class Monitor:
    """Answers GET and HEAD of /live, /ready and /metrics, one request for each connection.

    Runs in a thread with its own loop, so that only /metrics waits for the daemon's loop; /live
    reports whether that loop is stalled. Each client has a second for its request, and ten more for
    metrics; if there are too many clients, the oldest is disconnected.

    host, port: to listen on; port 0 takes any free port.
    """

    def __init__(self, monitored: Monitored, host: str, port: int) -> None:
        self._monitored = monitored
        self._host = host
        self._port = port
        self._turned_at = monotonic()
        # Connected clients, oldest first.
        self._clients: dict[trio.CancelScope, None] = {}
        self._is_stopping = False
        self._stop: Callable[[], None] = lambda: None
        self._thread = trio.CapacityLimiter(1)
        self._metrics_turn = trio.Lock()

    async def run(self, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; reports started with the port. Raises OSError for the address."""
        with listen(self._host, self._port) as bound:
            self._port = bound.getsockname()[1]
            self._is_stopping = False
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._record_turns)
                task_status.started(self._port)
                await trio.to_thread.run_sync(trio.run, self._serve, bound, limiter=self._thread)

    async def _record_turns(self) -> None:
        try:
            while True:
                self._turned_at = monotonic()
                await trio.sleep(_TURN_S)
        finally:
            # Cancellation does not reach the thread.
            self._is_stopping = True
            self._stop()

    async def _serve(self, bound: socket.socket) -> None:
        """Serve until stopped; runs in the thread."""
        with trio.CancelScope() as scope:
            token = trio.lowlevel.current_trio_token()
            self._stop = lambda: _call_soon(token, scope.cancel)
            if not self._is_stopping:
                await self.serve(bound)

    async def serve(self, bound: socket.socket) -> None:
        """Serve in this loop until cancelled."""
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(bound))
        await trio.serve_listeners(self._serve_client, [listener])

    async def _serve_client(self, stream: trio.SocketStream) -> None:
        with trio.move_on_after(_REQUEST_S) as scope:
            if len(self._clients) >= _CLIENTS_MAX:
                next(iter(self._clients)).cancel()
            self._clients[scope] = None
            try:
                async with stream:
                    head = await _receive_head(stream)
                    if _path(head) == b"/metrics":
                        scope.deadline += _METRICS_S
                    # Not joined: clients that read the same page share its bytes.
                    for part in await self._answer(head):
                        await stream.send_all(part)
            except trio.BrokenResourceError:
                pass
            finally:
                del self._clients[scope]

    async def _answer(self, head: bytes) -> tuple[bytes, bytes]:
        """Head and body of the answer."""
        method, path = head.partition(b" ")[0], _path(head)
        answer: tuple[HTTPStatus, dict[str, Any] | bytes]
        if not head.endswith(b"\r\n\r\n"):
            answer = HTTPStatus.BAD_REQUEST, {"problem": "not an HTTP request"}
        elif method not in {b"GET", b"HEAD"}:
            answer = HTTPStatus.METHOD_NOT_ALLOWED, {"problem": "only GET and HEAD are allowed"}
        elif path == b"/live":
            answer = self._live()
        elif path == b"/ready":
            is_ready, report = self._monitored.report()
            answer = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE, report
        elif path == b"/metrics":
            answer = await self._metrics()
        else:
            answer = HTTPStatus.NOT_FOUND, {"problem": "not found: use /live, /ready or /metrics"}
        return _encode(*answer, has_body=method != b"HEAD")

    async def _metrics(self) -> tuple[HTTPStatus, dict[str, Any] | bytes]:
        """Fetch a page in a thread, since it waits for the daemon's loop; one page at a time."""
        try:
            async with self._metrics_turn:
                return HTTPStatus.OK, await trio.to_thread.run_sync(self._monitored.metrics)
        except NotServing as reason:
            return HTTPStatus.SERVICE_UNAVAILABLE, {"problem": str(reason)}

    def _live(self) -> tuple[HTTPStatus, dict[str, Any]]:
        stalled_s = monotonic() - self._turned_at
        if stalled_s < _STALL_S_MAX:
            return HTTPStatus.OK, {}
        problem = f"the loop has been stalled for {stalled_s:.0f} s"
        return HTTPStatus.SERVICE_UNAVAILABLE, {"problem": problem}


def _call_soon(token: trio.lowlevel.TrioToken, function: Callable[[], None]) -> None:
    with suppress(trio.RunFinishedError):
        token.run_sync_soon(function)


async def _receive_head(stream: trio.SocketStream) -> bytes:
    """A request up to its empty line, or as much of it as fits and arrives."""
    head = b""
    while not head.endswith(b"\r\n\r\n") and len(head) < _HEAD_BYTES_MAX:
        data = await stream.receive_some(_HEAD_BYTES_MAX - len(head))
        if not data:
            break
        head += data
    return head


def _path(head: bytes) -> bytes:
    """The path of a request, without its query."""
    return head.partition(b" ")[2].partition(b" ")[0].partition(b"?")[0]


def _encode(
    status: HTTPStatus, content: dict[str, Any] | bytes, *, has_body: bool
) -> tuple[bytes, bytes]:
    is_text = isinstance(content, bytes)
    body = content if isinstance(content, bytes) else msgspec.json.encode(content) + b"\n"
    head = (
        f"HTTP/1.1 {status} {status.phrase}\r\n"
        f"Content-Type: {_TEXT_TYPE if is_text else 'application/json'}\r\n"
        f"Content-Length: {len(body)}\r\n"
        "Cache-Control: no-store\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode(), body if has_body else b""
