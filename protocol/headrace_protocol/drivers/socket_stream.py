"""A TCP connection for trio and asyncio that receives in place.

anyio's own streams wake their task for every received piece and allocate new bytes for it; at one
gigabyte per second that costs several times as much as the system call.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream

if TYPE_CHECKING:
    from headrace_protocol.frame import Buffer

_IN_PROGRESS = (errno.EINPROGRESS, errno.EWOULDBLOCK)


class SocketStream(ByteStream):
    """A stream that owns a connected socket. Errors are OSError."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    async def connect(cls, host: str, port: int) -> SocketStream:
        """Try the addresses of ``host`` in turn. Raises the last one's OSError."""
        failure = OSError(f"{host} has no address")
        addresses = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in addresses:
            sock = socket.socket(family, kind, protocol)
            stream = cls(sock)
            try:
                await stream._connect(address)
            except OSError as error:
                sock.close()
                failure = error
            except BaseException:
                sock.close()
                raise
            else:
                return stream
        raise failure

    async def _connect(self, address: Any) -> None:
        code = self._socket.connect_ex(address)
        if code in _IN_PROGRESS:
            await anyio.wait_writable(self._socket)
            code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """The available bytes, at least one. Raises EndOfStream, OSError."""
        await anyio.lowlevel.checkpoint()
        while True:
            try:
                data = self._socket.recv(max_bytes)
            except BlockingIOError:
                await anyio.wait_readable(self._socket)
            else:
                if not data:
                    raise anyio.EndOfStream
                return data

    async def receive_into(self, room: memoryview) -> int:
        """Receive available bytes into the start of ``room``; returns their number.

        Not a checkpoint unless it has to wait. Raises EndOfStream, OSError.
        """
        while True:
            try:
                received = self._socket.recv_into(room)
            except BlockingIOError:
                await anyio.wait_readable(self._socket)
            else:
                if not received:
                    raise anyio.EndOfStream
                return received

    async def send(self, item: Buffer) -> None:
        """Send all bytes. Raises OSError; then, or if cancelled, some bytes may have been sent."""
        await anyio.lowlevel.checkpoint()
        rest = memoryview(item)
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                await anyio.wait_writable(self._socket)

    async def send_eof(self) -> None:
        """Shut down the sending direction."""
        self._socket.shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        """Close the socket; waiting tasks get ClosedResourceError."""
        anyio.notify_closing(self._socket)
        self._socket.close()
        await anyio.lowlevel.checkpoint()
