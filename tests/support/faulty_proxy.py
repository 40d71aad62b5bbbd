"""A proxy in front of an S3 server that delays, cuts, refuses, truncates and loses answers."""

from __future__ import annotations

import enum
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_DELAY_S = 0.05
_TIMEOUT_S = 30.0
_HEAD_END = b"\r\n\r\n"


class Fault(enum.Enum):
    """The fate of a request. Only with LOST and TRUNCATED does it take place.

    The numbers are answers of the proxy itself.
    """

    NONE = "none"
    DELAYED = "delayed"
    CUT = "cut"
    LOST = "lost"
    TRUNCATED = "truncated"
    INTERNAL = "500 Internal Server Error"
    BUSY = "503 Slow Down"
    CONFLICT = "412 Precondition Failed"


class Proxy:
    """choose: decides about a request by its method. counts: of requests by fault."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.choose: Callable[[str], Fault] = lambda _method: Fault.NONE
        self.counts: dict[Fault, int] = {}
        self._lock = threading.Lock()

    def serve(self, client: socket.socket) -> None:
        """Serve the only request of a connection."""
        request = _received(client)
        if not request:
            return
        with self._lock:
            fault = self.choose(request.split(b" ", 1)[0].decode())
            self.counts[fault] = self.counts.get(fault, 0) + 1
        if fault is Fault.CUT:
            return
        if fault.value[0].isdigit():
            head = f"HTTP/1.1 {fault.value}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            client.sendall(head.encode())
            return
        answer = self._forwarded(request)
        if fault is Fault.DELAYED:
            time.sleep(_DELAY_S)
        if fault is Fault.TRUNCATED:
            answer = answer[: (answer.index(_HEAD_END) + len(_HEAD_END) + len(answer)) // 2]
        if fault is not Fault.LOST:
            client.sendall(answer)

    def _forwarded(self, request: bytes) -> bytes:
        with socket.create_connection(self.target, _TIMEOUT_S) as server:
            # Not one of the headers that are signed.
            server.sendall(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
            return b"".join(iter(lambda: server.recv(1 << 16), b""))


def _received(client: socket.socket) -> bytes:
    """A whole request; empty if the connection was closed."""
    data = b""
    while _HEAD_END not in data:
        more = client.recv(1 << 16)
        if not more:
            return b""
        data += more
    head, _, body = data.partition(_HEAD_END)
    sizes = [
        int(line.split(b":")[1])
        for line in head.lower().split(b"\r\n")
        if line.startswith(b"content-length:")
    ]
    while len(body) < sum(sizes):
        more = client.recv(1 << 16)
        if not more:
            return b""
        body += more
    return head + _HEAD_END + body


@contextmanager
def faulty_proxy(endpoint: str) -> Iterator[tuple[Proxy, str]]:
    """A proxy of an HTTP server, and its URL."""
    host, _, port = endpoint.removeprefix("http://").rpartition(":")
    proxy = Proxy((host, int(port)))

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                proxy.serve(self.request)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield proxy, f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
