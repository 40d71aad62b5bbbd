"""Requests that cost much and come at once keep nobody else waiting for all of them."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import pytest
import trio
from anyio.abc import ByteStream

from headrace_daemon.network import MemoryNetwork, TcpNetwork
from headrace_daemon.serving.server import RemotingServer
from headrace_daemon.serving.server_channel import ServerChannel
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.frame import Frame, FrameReader
from headrace_protocol.serving import Registry, Reply, Request
from tests.support.channel import MemoryChannel
from tests.support.running import running
from tests.support.wires import Wire, framed, request

COSTLY, CHEAP = RequestCode.GET_BROKER_RUNTIME_INFO, RequestCode.GET_MIN_OFFSET
COUNT = 100


class Daemon:
    """Serves one request in a turn, and keeps the order in which it served them."""

    def __init__(self) -> None:
        self.server = RemotingServer(self)
        self.registry = Registry(lambda _, error: pytest.fail(str(error)))
        self.registry.turn_s = 0
        self.address = "", 0
        self.served: list[tuple[int, int]] = []
        self.on_first: Callable[[], None] = lambda: None
        for code in (COSTLY, CHEAP):
            self.registry.route(code, self.serve)

    def serve(self, request: Request) -> Reply:
        if not self.served:
            self.on_first()
        self.served.append((request.command.code, request.command.opaque))
        return Reply()

    def handle(self, channel: ServerChannel, frames: list[Frame]) -> list[Frame]:
        return self.registry.handle(channel, frames)

    def finish_turn(self) -> None:
        pass

    def replied(self) -> None:
        pass

    def closed(self, channel: ServerChannel) -> None:
        pass


@asynccontextmanager
async def listening(
    daemon: Daemon, network: MemoryNetwork | TcpNetwork
) -> AsyncIterator[Callable[[], AbstractAsyncContextManager[ByteStream]]]:
    """A function that opens a connection to the daemon."""
    listener = network.listen("127.0.0.1", 0)
    daemon.address = listener.host, listener.port

    @asynccontextmanager
    async def connect() -> AsyncIterator[ByteStream]:
        async with await network.connect(listener.address) as stream:
            yield stream

    async with running(partial(network.serve, listener, daemon.server)):
        yield connect


def pipeline(count: int = COUNT) -> bytes:
    return b"".join(request(COSTLY, opaque=number) for number in range(count))


networks = pytest.mark.parametrize("network", [MemoryNetwork, TcpNetwork])


@networks
async def test_the_requests_of_a_pipeline_are_served_in_order_in_many_turns(
    network: Callable[[], MemoryNetwork | TcpNetwork],
) -> None:
    daemon = Daemon()
    async with listening(daemon, network()) as connect, connect() as stream:
        wire = Wire(stream)
        await wire.send(pipeline())
        with trio.fail_after(5):
            answers = [(await wire.receive())[0].opaque for _ in range(COUNT)]
        # What comes after them is served after them.
        await wire.ask(request(CHEAP, opaque=COUNT))
        assert daemon.server.held_bytes == 0
    assert answers == list(range(COUNT))
    assert daemon.served[-1] == (CHEAP, COUNT)


async def test_others_have_their_turn_between_the_requests_of_a_pipeline() -> None:
    daemon = Daemon()
    async with listening(daemon, TcpNetwork()) as connect, connect() as greedy:
        with socket.create_connection(daemon.address) as modest:
            daemon.on_first = lambda: modest.sendall(request(CHEAP))
            await greedy.send(pipeline())
            with trio.fail_after(5):
                while len(daemon.served) <= COUNT:
                    await trio.lowlevel.checkpoint()
    assert daemon.served.index((CHEAP, 1)) <= 3


@networks
async def test_requests_that_wait_for_their_turn_go_with_their_client(
    network: Callable[[], MemoryNetwork | TcpNetwork],
) -> None:
    daemon = Daemon()
    async with listening(daemon, network()) as connect:
        async with connect() as greedy:
            await greedy.send(pipeline(2) + framed(0, b"{") + pipeline())
            await Wire(greedy).closed()
        assert daemon.server.held_bytes == 0
    assert daemon.served == [(COSTLY, 0), (COSTLY, 1)]


def test_a_turn_ends_after_the_request_that_takes_its_time() -> None:
    daemon, channel = Daemon(), MemoryChannel()
    frames = FrameReader().feed(pipeline(5))
    rest = daemon.registry.handle(channel, frames)
    assert (len(rest), len(channel.replies())) == (4, 1)
    daemon.registry.turn_s = 60
    assert daemon.registry.handle(channel, rest) == []
    codes = [command.code for command, _ in channel.replies()]
    assert codes == [ResponseCode.SUCCESS] * 4
