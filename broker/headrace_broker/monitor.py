"""How the broker is doing, over HTTP: for what starts, watches and restarts it.

It is there before the store is opened. Source: deploy/README.md "Health checks".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from headrace_protocol.drivers.server import listen

if TYPE_CHECKING:
    from collections.abc import Callable

_HEAD_BYTES_MAX = 8192
_TIMEOUT_S = 5.0
_CLIENTS_MAX = 32


class State(StrEnum):
    """Of a broker, in the order in which it goes through them."""

    LOADING = "loading"
    SERVING = "serving"
    STOPPING = "stopping"


@dataclass(slots=True)
class Readiness:
    """Where a broker stands.

    done_queues, queue_count: how many ConsumeQueues a start has looked at, and how many there are.
    done_bytes, bytes_max: how much of the log it has read anew after that, and the most that it
    will.
    failure: called while it serves, for why messages are refused until the next start, or None.
    """

    state: State = State.LOADING
    done_queues: int = 0
    queue_count: int = 0
    done_bytes: int = 0
    bytes_max: int = 0
    failure: Callable[[], str | None] = lambda: None

    def report(self) -> tuple[bool, dict[str, Any]]:
        """Whether messages are taken, and what to tell."""
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
        return self.state is State.SERVING and not failure, report


class Monitor:
    """Answers GET and HEAD of /live and /ready, one request for each connection."""

    def __init__(self, readiness: Readiness) -> None:
        self._readiness = readiness
        self._clients = trio.CapacityLimiter(_CLIENTS_MAX)

    async def run(
        self, host: str, port: int, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve until cancelled; started with the port. Raises OSError for the address."""
        bound = listen(host, port)
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(bound))
        async with trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, self._serve, [listener])
            task_status.started(bound.getsockname()[1])

    async def _serve(self, stream: trio.SocketStream) -> None:
        with trio.move_on_after(_TIMEOUT_S):
            async with stream, self._clients:
                try:
                    head = await _receive_head(stream)
                    await stream.send_all(self._answer(head))
                except trio.BrokenResourceError:
                    pass

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if not head.endswith(b"\r\n\r\n"):
            answer = HTTPStatus.BAD_REQUEST, {"problem": "that is no HTTP request"}
        elif method not in {b"GET", b"HEAD"}:
            answer = HTTPStatus.METHOD_NOT_ALLOWED, {"problem": "only GET and HEAD are answered"}
        elif path == b"/live":
            answer = HTTPStatus.OK, {}
        elif path == b"/ready":
            is_ready, report = self._readiness.report()
            answer = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE, report
        else:
            answer = HTTPStatus.NOT_FOUND, {"problem": "there are /live and /ready"}
        return _encode(*answer, has_body=method != b"HEAD")


async def _receive_head(stream: trio.SocketStream) -> bytes:
    """A request up to its empty line, or as much of it as may come."""
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
