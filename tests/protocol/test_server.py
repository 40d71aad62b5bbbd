"""The serving driver: batches, limits, slow and silent clients, on sockets and in memory."""

from __future__ import annotations

import errno
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import trio
import trio.testing

from headrace_protocol.drivers.network import MemoryNetwork, TcpNetwork
from headrace_protocol.drivers.server import (
    RemotingServer,
    ServerChannel,
    ServerLimits,
    listen,
    pack_host,
)
from headrace_protocol.frame import FrameReader, frame_prefix

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from headrace_protocol.frame import Frame


def frame(body: bytes) -> bytes:
    return frame_prefix(0, 2, len(body)) + b"{}" + body


@dataclass
class Echo:
    """Answers each frame with its own body; b"big:N" with N bytes."""

    closed_channels: list[str] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    handled: int = 0

    def handle(self, channel: ServerChannel, frames: list[Frame]) -> None:
        self.handled += len(frames)
        for _, _, body in frames:
            text = bytes(body)
            answer = b"x" * int(text[4:]) if text.startswith(b"big:") else text
            channel.write(frame_prefix(0, 2, len(answer)) + b"{}", answer)

    def finish_batch(self) -> None:
        self.batches.append(self.handled)

    def closed(self, channel: ServerChannel) -> None:
        self.closed_channels.append(channel.address)


@asynccontextmanager
async def serving(
    limits: ServerLimits | None = None,
) -> AsyncIterator[tuple[RemotingServer, Echo, Any]]:
    echo = Echo()
    server = RemotingServer(echo, limits)
    network = TcpNetwork()
    listener = network.listen("127.0.0.1", 0)
    async with trio.open_nursery() as nursery:
        await nursery.start(network.serve, listener, server)

        streams: list[trio.SocketStream] = []

        async def connect() -> trio.SocketStream:
            streams.append(await trio.open_tcp_stream("127.0.0.1", listener.port))
            return streams[-1]

        yield server, echo, connect
        nursery.cancel_scope.cancel()
    for stream in streams:
        stream.socket.close()


async def receive_frames(stream: trio.abc.ReceiveStream, count: int) -> list[bytes]:
    reader, bodies = FrameReader(), []
    while len(bodies) < count:
        data = await stream.receive_some()
        assert data, f"closed after {len(bodies)} of {count} frames"
        bodies += [bytes(body) for _, _, body in reader.feed(data)]
    return bodies


async def until_closed(stream: trio.abc.ReceiveStream) -> bytes:
    received = b""
    try:
        while data := await stream.receive_some():
            received += data
    except trio.BrokenResourceError:
        pass
    return received


async def test_frames_are_answered_in_order_however_they_are_cut() -> None:
    async with serving() as (_, _, connect):
        stream = await connect()
        bodies = [b"%d" % number for number in range(300)]
        data = b"".join(map(frame, bodies))
        for start in range(0, len(data), 7):
            await stream.send_all(data[start : start + 7])
        assert await receive_frames(stream, 300) == bodies


async def test_what_came_at_once_is_one_batch() -> None:
    async with serving() as (_, echo, connect):
        stream = await connect()
        await stream.send_all(frame(b"a") * 100)
        await receive_frames(stream, 100)
        assert len([batch for batch in echo.batches if batch]) == 1


async def test_a_large_frame_arrives_in_memory_of_its_own() -> None:
    async with serving() as (_, _, connect):
        stream = await connect()
        body = bytes(range(256)) * 8192
        await stream.send_all(frame(body) + frame(b"next"))
        assert await receive_frames(stream, 2) == [body, b"next"]


async def test_many_clients_at_once() -> None:
    async with serving() as (server, _, connect), trio.open_nursery() as nursery:

        async def ask(number: int) -> None:
            stream = await connect()
            await stream.send_all(frame(b"%d" % number))
            assert await receive_frames(stream, 1) == [b"%d" % number]
            await stream.aclose()

        for number in range(200):
            nursery.start_soon(ask, number)
    assert server.channels == set()
    assert server.held_bytes == 0


async def test_malformed_bytes_close_only_their_client() -> None:
    async with serving() as (server, echo, connect):
        good, bad = await connect(), await connect()
        await bad.send_all(b"GET / HTTP/1.1\r\n\r\n")
        assert await until_closed(bad) == b""
        await good.send_all(frame(b"still here"))
        assert await receive_frames(good, 1) == [b"still here"]
        assert len(echo.closed_channels) == 1
        assert len(server.channels) == 1


async def test_a_slow_reader_is_no_longer_read_until_it_reads() -> None:
    limits = ServerLimits(connection_bytes_max=1_000_000)
    async with serving(limits) as (server, echo, connect):
        slow = await connect()
        asked = 100
        # More is asked for than fits into all buffers on the way.
        for _ in range(asked):
            await slow.send_all(frame(b"big:1000000"))
            await trio.testing.wait_all_tasks_blocked()
        assert echo.handled < asked
        assert server.held_bytes < 40_000_000
        other = await connect()
        await other.send_all(frame(b"fast"))
        assert await receive_frames(other, 1) == [b"fast"]
        answers = await receive_frames(slow, asked)
        assert {len(answer) for answer in answers} == {1_000_000}
        assert echo.handled == asked + 1


async def test_over_the_budget_of_all_the_greediest_goes() -> None:
    limits = ServerLimits(total_bytes_max=3_000_000)
    async with serving(limits) as (server, _, connect):
        modest, greedy = await connect(), await connect()
        await modest.send_all(frame(b"m" * 500_000)[:-1])
        with pytest.raises(trio.BrokenResourceError):  # noqa: PT012
            await greedy.send_all(frame(b"g" * 8_000_000))
            await until_closed(greedy)
            await greedy.send_all(b"anything")
        await modest.send_all(b"m")
        assert await receive_frames(modest, 1) == [b"m" * 500_000]
        assert len(server.channels) == 1


async def test_one_client_too_many_is_refused() -> None:
    async with serving(ServerLimits(connections_max=2)) as (_, _, connect):
        streams = [await connect() for _ in range(3)]
        assert await until_closed(streams[2]) == b""
        await streams[0].send_all(frame(b"in"))
        assert await receive_frames(streams[0], 1) == [b"in"]


@asynccontextmanager
async def memory_client(
    limits: ServerLimits | None = None,
) -> AsyncIterator[tuple[RemotingServer, Echo, Any]]:
    echo = Echo()
    server = RemotingServer(echo, limits)
    network = MemoryNetwork()
    listener = network.listen("127.0.0.1", 0)
    async with trio.open_nursery() as nursery:
        await nursery.start(network.serve, listener, server)
        yield server, echo, await network.connect(listener.address)
        nursery.cancel_scope.cancel()


async def test_silent_clients_are_closed(autojump_clock: trio.testing.MockClock) -> None:
    async with memory_client() as (_, echo, stream):
        start = trio.current_time()
        with pytest.raises(anyio.EndOfStream):
            await stream.receive()
        assert 120 <= trio.current_time() - start <= 126
        assert len(echo.closed_channels) == 1


async def test_half_a_frame_does_not_keep_a_client(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with memory_client() as (server, echo, stream):
        start = trio.current_time()
        data = frame(b"x" * 100)
        with pytest.raises(anyio.BrokenResourceError):  # noqa: PT012
            for position in range(len(data)):
                await stream.send(data[position : position + 1])
                await trio.sleep(1)
        assert 30 <= trio.current_time() - start <= 37
        assert echo.handled == 0
        assert server.held_bytes == 0


async def test_memory_clients_get_their_answers() -> None:
    async with memory_client() as (_, _, stream):
        await stream.send(frame(b"one") + frame(b"two")[:5])
        await stream.send(frame(b"two")[5:])
        reader, bodies = FrameReader(), []
        while len(bodies) < 2:
            bodies += [bytes(body) for _, _, body in reader.feed(await stream.receive())]
        assert bodies == [b"one", b"two"]


async def test_nobody_listens_in_memory() -> None:
    network = MemoryNetwork()
    with pytest.raises(ConnectionRefusedError, match=r"nobody listens on 127\.0\.0\.1:5"):
        await network.connect("127.0.0.1:5")
    network.listen("127.0.0.1", 5)
    with pytest.raises(OSError, match="another server of this process"):
        network.listen("127.0.0.1", 5)


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port}.*another process") as raised:
            listen("127.0.0.1", port)
        assert raised.value.errno == errno.EADDRINUSE


def test_hosts_are_packed_as_records_hold_them() -> None:
    assert pack_host("127.0.0.2", 10911).hex() == "7f00000200002a9f"
    assert len(pack_host("::1", 1)) == 20
