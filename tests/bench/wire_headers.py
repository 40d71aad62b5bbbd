"""A connection of the load generator that keeps only the headers of its answers.

An answer of 4 MiB to ``wire.Client`` is joined from hundreds of pieces, which costs more than the
broker's work for it.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import TYPE_CHECKING, Any, Self

from tests.bench.wire import TIMEOUT_S

if TYPE_CHECKING:
    from types import TracebackType

_PREFIX = struct.Struct(">II")
_RECEIVE_BYTES = 1 << 20


class HeaderClient:
    """One blocking connection; answers come in the order in which they are served."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = memoryview(bytearray(_RECEIVE_BYTES))
        # What is received and not yet looked at.
        self._begin = self._end = 0

    def send(self, request: bytes) -> None:
        self._socket.sendall(request)

    def answer(self) -> dict[str, Any]:
        """The header of the next answer, once its body is there."""
        self._need(_PREFIX.size)
        length, mark = _PREFIX.unpack_from(self._buffer, self._begin)
        body_at = _PREFIX.size + (mark & 0xFFFFFF)
        self._need(body_at)
        header = bytes(self._buffer[self._begin + _PREFIX.size : self._begin + body_at])
        self._begin += 4 + length
        while self._begin > self._end:
            self._begin -= self._end
            self._end = self._receive(self._buffer)
        answer: dict[str, Any] = json.loads(header)
        return answer

    def _need(self, byte_count: int) -> None:
        while self._end - self._begin < byte_count:
            left = bytes(self._buffer[self._begin : self._end])
            self._buffer[: len(left)] = left
            self._begin, self._end = 0, len(left)
            self._end += self._receive(self._buffer[self._end :])

    def _receive(self, room: memoryview) -> int:
        count = self._socket.recv_into(room)
        if not count:
            raise ConnectionResetError("the broker closed a connection of the load generator")
        return count

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()
