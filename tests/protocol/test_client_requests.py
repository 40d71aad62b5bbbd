"""A daemon asks its clients: each asker is told once, by the answer, the clock or the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
import trio.testing

from headrace_daemon.network import MemoryNetwork
from headrace_daemon.serving.client_requests import TIMEOUT_S, Answer, ClientRequests
from headrace_daemon.serving.server import RemotingServer
from headrace_daemon.serving.server_channel import ServerChannel
from headrace_protocol.codes import RequestCode
from headrace_protocol.connection import RequestReceived
from headrace_protocol.drivers.aio import AsyncConnection
from headrace_protocol.frame import Frame, FrameReader
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.headers import GetMinOffsetHeader
from headrace_protocol.serving import Registry, Reply, Request
from tests.support.channel import MemoryChannel

ASKED = RequestCode.GET_CONSUMER_RUNNING_INFO
RESPONSE = 1


class Daemon:
    """Keeps its clients' channels, and asks them."""

    def __init__(self) -> None:
        self.asking = ClientRequests()
        self.server = RemotingServer(self)
        self.registry = Registry(self.server.request_failed)
        self.registry.answered = self.asking.answered
        self.registry.route(RequestCode.GET_MIN_OFFSET, self._note)
        self.channels: list[ServerChannel] = []
        self.told: list[tuple[str, Answer | None]] = []

    def _note(self, request: Request) -> Reply:
        self.channels.append(request.channel)  # type: ignore[arg-type]
        return Reply()

    def ask(self, name: str, channel: ServerChannel, body: bytes = b"") -> None:
        def then(answer: Answer | None) -> None:
            self.told.append((name, answer))

        header = GetMinOffsetHeader(topic=name, queue_id=0)
        self.asking.ask(channel, ASKED, header, body, then)

    def bodies(self) -> list[tuple[str, bytes | None]]:
        return [(name, bytes(answer.body) if answer else None) for name, answer in self.told]

    def handle(self, channel: ServerChannel, frames: list[Frame]) -> list[Frame]:
        return self.registry.handle(channel, frames)

    def finish_turn(self) -> None:
        pass

    def replied(self) -> None:
        pass

    def closed(self, channel: ServerChannel) -> None:
        self.asking.channel_closed(channel)


class Client:
    """Answers with the name that it was asked for and the body, or not at all."""

    def __init__(self) -> None:
        self.is_silent = False
        self.asked: list[RequestReceived] = []
        self.connection: AsyncConnection

    def on_request(self, connection: AsyncConnection, request: RequestReceived) -> None:
        self.asked.append(request)
        if not self.is_silent:
            topic = request.command.header(GetMinOffsetHeader).topic
            connection.respond(request, 0, None, f"{topic}:".encode() + request.body)


@asynccontextmanager
async def running(count: int) -> AsyncIterator[tuple[Daemon, list[Client]]]:
    daemon, network = Daemon(), MemoryNetwork()
    clients = [Client() for _ in range(count)]
    listener = network.listen("127.0.0.1", 0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(daemon.asking.run)
        await nursery.start(network.serve, listener, daemon.server)
        for client in clients:
            stream = await network.connect(listener.address)
            client.connection = AsyncConnection(stream, "daemon", client.on_request)
            nursery.start_soon(client.connection.run)
            header = GetMinOffsetHeader(topic="hello", queue_id=0)
            await client.connection.request(RequestCode.GET_MIN_OFFSET, header, timeout_ms=1000)
        yield daemon, clients
        nursery.cancel_scope.cancel()


async def test_each_answer_reaches_who_asked(autojump_clock: object) -> None:
    async with running(2) as (daemon, _):
        one, other = daemon.channels
        for name, channel in (("a", one), ("b", other), ("c", one)):
            daemon.ask(name, channel, b"body")
        assert one.charged_bytes > other.charged_bytes > 0
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(daemon.bodies()) == [("a", b"a:body"), ("b", b"b:body"), ("c", b"c:body")]
        assert one.charged_bytes == other.charged_bytes == 0
        await trio.sleep(2 * TIMEOUT_S)
        assert len(daemon.told) == 3


async def test_who_is_not_answered_is_told_in_time(autojump_clock: object) -> None:
    async with running(1) as (daemon, (client,)):
        (channel,) = daemon.channels
        client.is_silent = True
        start = trio.current_time()
        daemon.ask("first", channel)
        await trio.sleep(4)
        daemon.ask("second", channel)
        await trio.sleep_until(start + TIMEOUT_S - 0.1)
        assert daemon.told == []
        await trio.sleep_until(start + TIMEOUT_S + 0.1)
        assert daemon.told == [("first", None)]
        await trio.sleep_until(start + TIMEOUT_S + 4.1)
        assert daemon.told == [("first", None), ("second", None)]
        assert channel.charged_bytes == 0
        # An answer that comes too late is nobody's.
        client.connection.respond(client.asked[0], 0)
        await trio.testing.wait_all_tasks_blocked()
        assert len(daemon.told) == 2
        client.is_silent = False
        daemon.ask("third", channel)
        await trio.testing.wait_all_tasks_blocked()
        assert daemon.bodies()[2:] == [("third", b"third:")]


async def test_who_asked_a_client_that_leaves_is_told(autojump_clock: object) -> None:
    async with running(2) as (daemon, clients):
        gone, there = daemon.channels
        for client in clients:
            client.is_silent = True
        daemon.ask("gone", gone)
        daemon.ask("there", there)
        daemon.ask("gone too", gone)
        start = trio.current_time()
        gone.close("")
        assert daemon.told == [("gone", None), ("gone too", None)]
        daemon.ask("late", gone)
        assert daemon.told[2:] == [("late", None)]
        await trio.sleep_until(start + TIMEOUT_S + 1)
        assert daemon.told[3:] == [("there", None)]


async def test_unasked_answers_are_dropped() -> None:
    asking, registry = ClientRequests(), Registry(lambda *_: None)
    registry.answered = asking.answered
    told: list[Answer | None] = []
    asked, other = MemoryChannel(), MemoryChannel()
    asking.ask(asked, ASKED, None, b"", told.append)
    ((request, _),) = asked.replies()

    def answer(channel: MemoryChannel, opaque: int) -> float:
        frame = encode_frame(SerializeType.JSON, 0, opaque, flag=RESPONSE)
        return registry.serve(channel, FrameReader().feed(frame)[0])

    # One that nobody asked for, and one that was asked of another client: neither takes time.
    assert answer(asked, request.opaque + 1) == 0
    assert answer(other, request.opaque) == 0
    assert told == []
    assert answer(asked, request.opaque) > 0
    assert len(told) == 1
    assert answer(asked, request.opaque) == 0
    assert len(told) == 1
    assert asked.charged_bytes == 0
    assert asked.written == other.written == b""
