"""The server of clients on streams, e.g. in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from headrace_daemon.serving.server import RemotingServer
    from headrace_daemon.serving.server_channel import ServerChannel

_RECEIVE_BYTES = 256 * 1024


async def serve_stream(
    server: RemotingServer, stream: trio.abc.Stream, host: str, port: int
) -> None:
    """Serve one client of ``server`` on a stream until it ends.

    host, port: the address that the client appears to have.
    """
    async with stream, trio.open_nursery() as nursery:
        transport = _StreamTransport(server, stream, nursery.cancel_scope)
        channel = server.open_channel(transport, host, port)
        nursery.start_soon(transport.send_all_written, channel)
        try:
            while data := await transport.receive():
                server.begin_turn()
                server.received(channel, data)
                server.end_turn()
                while channel.deferred:
                    await trio.lowlevel.checkpoint()
                    server.begin_turn()
                    server.guard(channel, server.serve_deferred)
                    server.end_turn()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            server.close_channel(channel, "")
            nursery.cancel_scope.cancel()


class _StreamTransport:
    """A stream with tasks of its own: for a few clients in the same process."""

    def __init__(
        self, server: RemotingServer, stream: trio.abc.Stream, scope: trio.CancelScope
    ) -> None:
        self._server = server
        self._stream = stream
        self._scope = scope
        self._written = trio.Event()
        self._readable = trio.Event()
        self._readable.set()

    def flush(self, channel: ServerChannel) -> None:  # noqa: ARG002 - send_all_written sends
        self._written.set()

    def set_reading(self, *, reading: bool) -> None:
        if reading:
            self._readable.set()
        elif self._readable.is_set():  # its reader may wait for the one there is
            self._readable = trio.Event()

    def close(self) -> None:
        self._scope.cancel()

    async def receive(self) -> bytes | bytearray:
        await self._readable.wait()
        return await self._stream.receive_some(_RECEIVE_BYTES)

    async def send_all_written(self, channel: ServerChannel) -> None:
        try:
            while True:
                await self._written.wait()
                self._written = trio.Event()
                data = b"".join(channel.out)
                channel.out.clear()
                await self._stream.send_all(data)
                if channel.is_open:
                    channel.out_bytes -= len(data)
                    self._server.sent(channel, len(data))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            channel.close("")
        except Exception as error:  # noqa: BLE001 - as in RemotingServer.received
            self._server.failed(channel, error)
