"""Health checks over HTTP, for systems that start, watch and restart a broker.

Served even before the store is open. Source: deploy/README.md "Health checks".
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from headrace_daemon.serving.listen import listen

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

_HEAD_BYTES_MAX = 8192
_TIMEOUT_S = 1.0
_CLIENTS_MAX = 64
_TURN_S = 1.0
# Far above the longest step that any request may cause.
_STALL_S_MAX = 10.0


class State(StrEnum):
    """State of a broker, in the order of its life."""

    LOADING = "loading"
    SERVING = "serving"
    STOPPING = "stopping"


@dataclass(slots=True)
class Readiness:
    """Progress and health of a broker; written by its loop and threads, read by the monitor's.

    done_queues, queue_count: ConsumeQueues that the start has checked, and their total.
    done_bytes, bytes_max: bytes of the log that it has read again after that, and the maximum.
    failure: while serving, returns why sends are rejected until the next start, or None.
    followers: while serving, returns how far behind each follower of the store is.
    """

    state: State = State.LOADING
    done_queues: int = 0
    queue_count: int = 0
    done_bytes: int = 0
    bytes_max: int = 0
    failure: Callable[[], str | None] = lambda: None
    followers: Callable[[], dict[str, dict[str, Any]]] = dict

    def report(self) -> tuple[bool, dict[str, Any]]:
        """Whether the broker accepts messages, and the details for the answer."""
        report: dict[str, Any] = {"state": self.state}
        if self.state is State.LOADING:
            report |= {
                "doneQueues": self.done_queues,
                "queues": self.queue_count,
                "doneBytes": self.done_bytes,
                "atMostBytes": self.bytes_max,
            }
        failure = self.failure() if self.state is State.SERVING else None
        if failure:
            report["failure"] = failure
        followers = self.followers() if self.state is State.SERVING else {}
        if followers:
            report["followers"] = followers
        return self.state is State.SERVING and not failure, report


class Monitor:
    """Answers GET and HEAD of /live and /ready, one request for each connection.

    Runs in a thread with its own loop, so that answers don't wait for the broker's loop; /live
    reports whether that loop is stalled. Each client has a second for its request; if there are
    too many clients, the oldest is disconnected.

    host, port: to listen on; port 0 takes any free port.
    """

    def __init__(self, readiness: Readiness, host: str, port: int) -> None:
        self._readiness = readiness
        self._host = host
        self._port = port
        self._turned_at = monotonic()
        # Connected clients, oldest first.
        self._clients: dict[trio.CancelScope, None] = {}
        self._is_stopping = False
        self._stop: Callable[[], None] = lambda: None
        self._thread = trio.CapacityLimiter(1)

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
        with trio.move_on_after(_TIMEOUT_S) as scope:
            if len(self._clients) >= _CLIENTS_MAX:
                next(iter(self._clients)).cancel()
            self._clients[scope] = None
            try:
                async with stream:
                    head = await _receive_head(stream)
                    await stream.send_all(self._answer(head))
            except trio.BrokenResourceError:
                pass
            finally:
                del self._clients[scope]

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if not head.endswith(b"\r\n\r\n"):
            answer = HTTPStatus.BAD_REQUEST, {"problem": "not an HTTP request"}
        elif method not in {b"GET", b"HEAD"}:
            answer = HTTPStatus.METHOD_NOT_ALLOWED, {"problem": "only GET and HEAD are allowed"}
        elif path == b"/live":
            answer = self._live()
        elif path == b"/ready":
            is_ready, report = self._readiness.report()
            answer = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE, report
        else:
            answer = HTTPStatus.NOT_FOUND, {"problem": "not found: use /live or /ready"}
        return _encode(*answer, has_body=method != b"HEAD")

    def _live(self) -> tuple[HTTPStatus, dict[str, Any]]:
        stalled_s = monotonic() - self._turned_at
        if stalled_s < _STALL_S_MAX:
            return HTTPStatus.OK, {}
        problem = f"the broker's loop has been stalled for {stalled_s:.0f} s"
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


def _encode(status: HTTPStatus, content: dict[str, Any], *, has_body: bool) -> bytes:
    body = msgspec.json.encode(content) + b"\n"
    head = (
        f"HTTP/1.1 {status} {status.phrase}\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n"
        "Cache-Control: no-store\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (body if has_body else b"")
