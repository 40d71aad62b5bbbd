"""The socket of one client in the server's loop."""

from __future__ import annotations

import contextlib
import itertools
import select
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    import socket

    from headrace_daemon.serving.server import RemotingServer
    from headrace_daemon.serving.server_channel import ServerChannel
    from headrace_protocol.frame import Buffer

READ: Final = select.EPOLLIN
WRITE: Final = select.EPOLLOUT
_BUFFERS_PER_SEND = 1024  # IOV_MAX on Linux


class Loop(Protocol):
    """The part of the server's loop that a transport uses.

    channels: clients by descriptor. room: bytes of large answers that may leave in this turn.
    """

    server: RemotingServer
    epoll: select.epoll
    channels: dict[int, ServerChannel]
    room: int


class SocketTransport:
    """A client without TLS."""

    __slots__ = ("_loop", "_mask", "socket")

    def __init__(self, client: socket.socket, loop: Loop) -> None:
        self.socket = client
        self._loop = loop
        self._mask = READ

    def receive(self, channel: ServerChannel, room: memoryview) -> memoryview:  # noqa: ARG002
        """The bytes that are there, in ``room``; none at the end. Raises OSError."""
        return room[: self.socket.recv_into(room)]

    def flush(self, channel: ServerChannel) -> None:
        """Send as much as the client accepts and the turn has room for."""
        out, begin = channel.out, channel.out_bytes
        room = max(self._loop.room, self._loop.server.limits.small_send_bytes)
        try:
            while out and room:
                if channel.out_bytes > room:
                    sent = self.socket.sendmsg(first_of(out, room))
                elif len(out) == 1:
                    sent = self.socket.send(out[0])
                else:
                    sent = self.socket.sendmsg(itertools.islice(out, _BUFFERS_PER_SEND))
                room -= sent
                channel.out_bytes -= sent
                drop_sent(out, sent)
        except BlockingIOError:
            pass
        except OSError:
            channel.close("")
            return
        self._loop.room -= begin - channel.out_bytes
        self._set_writing(writing=bool(out))

    def set_reading(self, *, reading: bool) -> None:
        """See Transport."""
        self._set_mask(self._mask | READ if reading else self._mask & ~READ)

    def close(self) -> None:
        """See Transport."""
        self._loop.channels.pop(self.socket.fileno(), None)
        with contextlib.suppress(OSError):  # never registered
            self._loop.epoll.unregister(self.socket)
        self.socket.close()

    def _set_writing(self, *, writing: bool) -> None:
        self._set_mask(self._mask | WRITE if writing else self._mask & ~WRITE)

    def _set_mask(self, mask: int) -> None:
        if mask != self._mask:
            self._mask = mask
            self._loop.epoll.modify(self.socket, mask)


def first_of(out: list[Buffer], bytes_max: int) -> list[Buffer]:
    """The first buffers of ``out``, cut to ``bytes_max`` or fewer bytes in total."""
    some: list[Buffer] = []
    for buffer in itertools.islice(out, _BUFFERS_PER_SEND):
        some.append(memoryview(buffer)[:bytes_max])
        bytes_max -= len(some[-1])
        if not bytes_max:
            break
    return some


def drop_sent(out: list[Buffer], sent: int) -> None:
    """Remove the first ``sent`` bytes of ``out``."""
    for count, buffer in enumerate(out):
        if len(buffer) > sent:
            out[: count + 1] = [memoryview(buffer)[sent:]]
            return
        sent -= len(buffer)
    out.clear()
