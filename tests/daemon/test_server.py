"""The serving driver: batches, limits, slow and silent clients, on sockets and in memory."""

from __future__ import annotations

import errno
import itertools
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import pytest
import structlog.testing
import trio
import trio.testing

from headrace_daemon.network import MemoryNetwork, TcpNetwork
from headrace_daemon.serving.ports import listen
from headrace_daemon.serving.server import RemotingServer, ServerLimits
from headrace_daemon.serving.server_channel import ServerChannel
from headrace_daemon.serving.socket_loop import LARGE_WAIT_S, SocketLoop, serve_sockets
from headrace_daemon.serving.socket_transport import READ, WRITE
from headrace_daemon.serving.stream_transport import serve_stream
from headrace_protocol.drivers.address import pack_host
from headrace_protocol.frame import Frame, FrameReader, frame_prefix
from tests.support.echo import Echo, frame
from tests.support.running import running


@dataclass
class Farewell(Echo):
    """Tells the others of each client that goes, more than their sockets take."""

    others: set[ServerChannel] = field(default_factory=set)

    def handle(self, channel: ServerChannel, frames: list[Frame]) -> list[Frame]:
        self.others.add(channel)
        return super().handle(channel, frames)

    def closed(self, channel: ServerChannel) -> None:
        self.others.discard(channel)
        for other in self.others:
            other.write(bytes(20_000_000))
        super().closed(channel)


@asynccontextmanager
async def serving(
    limits: ServerLimits | None = None,
    echo: Echo | None = None,
) -> AsyncIterator[tuple[RemotingServer, Echo, Any]]:
    echo = echo or Echo()
    server = RemotingServer(echo, limits)
    network = TcpNetwork()
    listener = network.listen("127.0.0.1", 0)
    async with running(partial(network.serve, listener, server)):
        streams: list[trio.SocketStream] = []

        async def connect() -> trio.SocketStream:
            streams.append(await trio.open_tcp_stream("127.0.0.1", listener.port))
            return streams[-1]

        yield server, echo, connect
    for stream in streams:
        stream.socket.close()


async def receive_frames(stream: trio.abc.ReceiveStream, count: int) -> list[bytes]:
    reader = FrameReader()
    bodies: list[bytes] = []
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


async def test_a_large_answer_leaves_in_turns_with_others() -> None:
    async with serving(ServerLimits(turn_send_bytes=1000, small_send_bytes=1000)) as (
        _,
        echo,
        connect,
    ):
        stream = await connect()
        await stream.send_all(frame(b"a") + frame(b"big:50000"))
        assert await receive_frames(stream, 2) == [b"a", b"x" * 50_000]
        assert len(echo.batches) >= 50


@contextmanager
def driven_loop(
    count: int,
    limits: ServerLimits | None = None,
    now_s: Callable[[], float] = time.perf_counter,
) -> Iterator[tuple[SocketLoop, list[ServerChannel], list[socket.socket]]]:
    """A loop whose turns a test makes, with clients that it knows already."""
    server = RemotingServer(Echo(), limits)
    loop = SocketLoop(server, [], None, now_s)
    pairs = [socket.socketpair() for _ in range(count)]
    for ours, _ in pairs:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            ours.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
        loop.add(ours, ("127.0.0.1", 1))
    clients = [theirs for _, theirs in pairs]
    try:
        yield loop, [*loop.channels.values()], clients
    finally:
        server.close_all()
        loop.close()
        for client in clients:
            client.close()


def make_turn(loop: SocketLoop, readable: list[int], writable: list[int]) -> None:
    events = dict.fromkeys(readable, READ)
    for fd in writable:
        events[fd] = events.get(fd, 0) | WRITE
    loop.handle([*events.items()])


async def test_large_answers_of_all_clients_share_a_turn() -> None:
    limits = ServerLimits(turn_send_bytes=1000, small_send_bytes=100)
    with driven_loop(3, limits) as (loop, channels, clients):
        fds = list(loop.channels)
        for client in clients:
            client.sendall(frame(b"big:5000"))
        make_turn(loop, fds, [])
        begun = [channel.out_bytes for channel in channels]
        left = sum(begun)
        # The first fills the turn; each of the others gets what most answers need.
        assert begun[1] == begun[2] == begun[0] + 900
        order = []
        for _ in range(6):
            before = [channel.out_bytes for channel in channels]
            make_turn(loop, [], fds)
            after = [channel.out_bytes for channel in channels]
            order.append([n for n in range(3) if before[n] != after[n]])
            assert left - sum(after) == 1000
            left = sum(after)
    assert order[:3] == order[3:] == [[0], [1], [2]]


async def test_requests_come_before_the_rest_of_large_answers() -> None:
    now_s, limits = 100.0, ServerLimits()
    with driven_loop(2, limits, lambda: now_s) as (loop, (reader, _), clients):
        large, other = loop.channels
        clients[0].sendall(frame(b"big:3000000"))
        make_turn(loop, [large], [])
        make_turn(loop, [], [large])
        left = reader.out_bytes
        assert left < 3_000_000 - limits.turn_send_bytes
        for _ in range(10):
            clients[1].sendall(frame(b"small"))
            make_turn(loop, [other], [large])
        assert reader.out_bytes == left
        now_s += LARGE_WAIT_S * 1.01
        clients[1].sendall(frame(b"small"))
        make_turn(loop, [other], [large])
        small = len(frame_prefix(0, 2, 5)) + len(b"{}small")
        assert reader.out_bytes == left - (limits.turn_send_bytes - small)


async def test_replies_that_are_joined_leave_together() -> None:
    async with serving() as (server, _, connect):
        stream = await connect()
        await stream.send_all(frame(b"a"))
        await receive_frames(stream, 1)
        (channel,) = server.channels
        with server.joined():
            channel.write(frame(b"b"))
            channel.write(frame(b"c"))
            assert len(channel.out) == 2
        assert channel.out == []
        assert await receive_frames(stream, 2) == [b"b", b"c"]


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


async def test_a_stop_closes_all_whatever_the_others_are_told_of_it() -> None:
    async with serving(echo=Farewell()) as (server, echo, connect):
        for _ in range(3):
            stream = await connect()
            await stream.send_all(frame(b"a"))
            await receive_frames(stream, 1)
    assert len(echo.closed_channels) == 3
    assert server.channels == set()
    assert server.held_bytes == 0


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
        streams = [await connect() for _ in range(2)]
        for stream in streams:
            await stream.send_all(frame(b"in"))
            assert await receive_frames(stream, 1) == [b"in"]
        assert await until_closed(await connect()) == b""
        await streams[0].send_all(frame(b"still in"))
        assert await receive_frames(streams[0], 1) == [b"still in"]


async def test_who_has_said_nothing_makes_room_for_others() -> None:
    async with serving(ServerLimits(connections_max=3)) as (server, _, connect):
        known = await connect()
        await known.send_all(frame(b"known"))
        assert await receive_frames(known, 1) == [b"known"]
        silent = [await connect() for _ in range(50)]
        late = await connect()
        await late.send_all(frame(b"late"))
        assert await receive_frames(late, 1) == [b"late"]
        for stream in silent[:-1]:
            assert await until_closed(stream) == b""
        assert len(server.channels) == 3
        await known.send_all(frame(b"still in"))
        assert await receive_frames(known, 1) == [b"still in"]


@asynccontextmanager
async def memory_client(
    limits: ServerLimits | None = None,
) -> AsyncIterator[tuple[RemotingServer, Echo, Any]]:
    echo = Echo()
    server = RemotingServer(echo, limits)
    network = MemoryNetwork()
    listener = network.listen("127.0.0.1", 0)
    async with running(partial(network.serve, listener, server)):
        yield server, echo, await network.connect(listener.address)


@pytest.mark.parametrize(("first", "silence_s"), [(b"", 30), (frame(b"hello"), 120)])
async def test_silent_clients_are_closed(
    first: bytes, silence_s: float, autojump_clock: object
) -> None:
    async with memory_client() as (_, echo, stream):
        start = trio.current_time()
        await stream.send(first)
        with pytest.raises(anyio.EndOfStream):  # noqa: PT012
            while True:
                await stream.receive()
        assert silence_s <= trio.current_time() - start <= silence_s + 6
        assert len(echo.closed_channels) == 1


async def test_half_a_frame_does_not_keep_a_client(autojump_clock: object) -> None:
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
        reader = FrameReader()
        bodies: list[bytes] = []
        while len(bodies) < 2:
            bodies += [bytes(body) for _, _, body in reader.feed(await stream.receive())]
        assert bodies == [b"one", b"two"]


async def test_nobody_listens_in_memory() -> None:
    network = MemoryNetwork()
    with pytest.raises(ConnectionRefusedError, match=r"no server listens on 127\.0\.0\.1:5"):
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


# -- bad company -----------------------------------------------------------------------------------


@dataclass
class Ledger(Echo):
    """Notes whose frames are handled, in order; each takes its time."""

    frame_s: float = 0.0
    order: list[tuple[str, int]] = field(default_factory=list)

    def handle(self, channel: ServerChannel, frames: list[Frame]) -> list[Frame]:  # noqa: ARG002
        names = {bytes(body[:5]).decode() for _, _, body in frames}
        self.order += [(name, len(frames)) for name in names]
        end = time.perf_counter() + self.frame_s * len(frames)
        while time.perf_counter() < end:
            pass
        return []


@contextmanager
def waiting_clients(*data: bytes) -> Iterator[tuple[socket.socket, list[socket.socket]]]:
    """A listener that nobody serves yet, and clients that have sent what they could."""
    listener = listen("127.0.0.1", 0)
    clients = [socket.create_connection(listener.getsockname()) for _ in data]
    try:
        for client, sent in zip(clients, data, strict=True):
            client.setblocking(False)
            with suppress(BlockingIOError):
                client.send(sent)
        yield listener, clients
    finally:
        for client in clients:
            client.close()
        listener.close()


async def serve_until(ledger: Ledger, listener: socket.socket, is_done: Callable[[], bool]) -> None:
    async with running(partial(serve_sockets, RemotingServer(ledger), [listener])):
        with trio.fail_after(20):
            while not is_done():  # noqa: ASYNC110 - the ledger tells nobody
                await trio.sleep(0.001)


def send_more(
    clients: list[socket.socket], floods: list[memoryview], rest: list[memoryview]
) -> list[memoryview]:
    """Send what the connections take of ``rest``, whole frames in the end; returns what is left."""
    left = []
    for client, flood, data in zip(clients, floods, rest, strict=False):
        sent = 0
        with suppress(BlockingIOError):
            sent = client.send(data)
        left.append(data[sent:] or flood)
    return left


async def test_floods_take_turns_and_nobody_waits_for_more_than_one_turn() -> None:
    floods = [memoryview(frame(b"%05d" % number + b"f" * 300) * 3000) for number in range(3)]
    with waiting_clients(*[b""] * 3) as (listener, clients):
        ledger = Ledger()
        rest = send_more(clients, floods, floods)
        seen: list[int] = []

        def is_done() -> bool:
            nonlocal rest
            # Once all have been found to send much, somebody comes who sends little.
            if len(ledger.order) >= 6 and not seen:
                seen.append(len(ledger.order))
                modest = socket.create_connection(clients[0].getpeername())
                clients.append(modest)
                modest.sendall(frame(b"small"))
            rest = send_more(clients, floods, rest)
            return any(name == "small" for name, _ in ledger.order)

        await serve_until(ledger, listener, is_done)
    names = [name for name, _ in ledger.order]
    place = names.index("small")
    turns = names[3:place]
    assert all(first != second for first, second in itertools.pairwise(turns))
    counts = [count for name, count in ledger.order[3:] if name != "small"]
    assert max(counts) * len(frame(b"00000" + b"f" * 300)) <= 80_000


async def test_a_batch_that_takes_long_is_cut_and_goes_on_with_the_rest() -> None:
    clients_count = 40
    sent = [frame(b"%05d" % number) for number in range(clients_count)]
    with waiting_clients(*sent) as (listener, _):
        ledger = Ledger(frame_s=0.002)
        await serve_until(ledger, listener, lambda: len(ledger.order) == clients_count)
    assert sorted(name for name, _ in ledger.order) == [
        f"{number:05d}" for number in range(clients_count)
    ]
    # Replies left after each batch: far from all were in one.
    assert len(ledger.batches) >= clients_count * 0.002 / 0.005 / 2


async def test_requests_that_take_long_are_read_a_few_at_a_time() -> None:
    with waiting_clients((frame(b"costly" + b"x" * 300)) * 600) as (listener, clients):
        ledger = Ledger(frame_s=0.001)
        seen: list[int] = []

        def is_done() -> bool:
            if len(ledger.order) >= 3 and not seen:
                seen.append(len(ledger.order))
                modest = socket.create_connection(clients[0].getpeername())
                clients.append(modest)
                modest.sendall(frame(b"small"))
            return any(name == "small" for name, _ in ledger.order)

        await serve_until(ledger, listener, is_done)
    counts = [count for name, count in ledger.order if name == "costl"]
    # As many before it is known what they cost, then 10 ms of them.
    assert max(counts) <= 15


async def test_light_clients_do_not_starve_heavy_ones() -> None:
    flood = memoryview(frame(b"heavy" + b"x" * 20_000) * 300)
    floods, light = [b""] * 12, [frame(b"light")] * 60
    with waiting_clients(*floods, *light) as (listener, clients):
        ledger = Ledger(frame_s=0.005)
        rounds = 1
        all_floods = rest = [flood] * len(floods)

        def is_done() -> bool:
            nonlocal rounds, rest
            if [name for name, _ in ledger.order].count("light") == rounds * len(light):
                rounds += 1
                for client in clients[len(floods) :]:
                    client.sendall(light[0])
            rest = send_more(clients, all_floods, rest)
            return rounds == 5

        await serve_until(ledger, listener, is_done)
    names = [name for name, _ in ledger.order]
    changes = [first for first, second in itertools.pairwise(names) if first != second]
    # A heavy one per 20 ms instead of all of them after each round of the light ones.
    assert len(changes) > 4 * rounds


async def test_who_costs_little_is_soon_read_as_much_as_there_is() -> None:
    flood = memoryview(frame(b"cheap" + b"x" * 300) * 3000)
    with waiting_clients(b"") as (listener, (client,)):
        ledger = Ledger()
        rest = [flood]

        def is_done() -> bool:
            nonlocal rest
            rest = send_more([client], [flood], rest)
            return bool(ledger.order) and max(count for _, count in ledger.order) > 700

        await serve_until(ledger, listener, is_done)


async def test_what_a_handler_keeps_for_a_client_counts() -> None:
    @dataclass
    class Keeper(Echo):
        def handle(self, channel: ServerChannel, frames: list[Frame]) -> list[Frame]:
            for _, _, body in frames:
                channel.charge(int(bytes(body)))
            channel.write(frame(b"kept"))
            return []

    limits = ServerLimits(total_bytes_max=1_000_000)
    server = RemotingServer(Keeper(), limits)
    network = TcpNetwork()
    listener = network.listen("127.0.0.1", 0)
    with structlog.testing.capture_logs() as logs:
        async with running(partial(network.serve, listener, server)):
            modest = await trio.open_tcp_stream("127.0.0.1", listener.port)
            greedy = await trio.open_tcp_stream("127.0.0.1", listener.port)
            async with modest, greedy:
                await modest.send_all(frame(b"300000"))
                assert await receive_frames(modest, 1) == [b"kept"]
                await modest.send_all(frame(b"-100000"))
                assert await receive_frames(modest, 1) == [b"kept"]
                assert server.held_bytes == 200_000
                await greedy.send_all(frame(b"800001"))
                await until_closed(greedy)
                assert server.held_bytes == 200_000
                await modest.send_all(frame(b"1"))
                assert await receive_frames(modest, 1) == [b"kept"]
    (warning,) = (line for line in logs if line["event"] == "client closed")
    assert "800001 of waiting requests" in warning["reason"]
    assert "over the limit of 1000000" in warning["reason"]


async def test_those_turned_away_get_a_line_for_all_of_a_host(autojump_clock: object) -> None:
    server = RemotingServer(Echo(), ServerLimits(half_frame_s=10))
    network = MemoryNetwork()
    listener = network.listen("127.0.0.1", 0)
    with structlog.testing.capture_logs() as logs:
        async with running(partial(network.serve, listener, server)):
            streams = [await network.connect(listener.address) for _ in range(500)]
            half = await network.connect(listener.address)
            await half.send(frame(b"half")[:-1])
            await trio.sleep(20)
            assert server.channels == set()
        for stream in streams:
            await stream.aclose()
    lines = [(line["host"], line["count"], line["reason"]) for line in logs]
    assert lines == [
        ("127.0.0.1", 500, "connected, and no whole one within 10 s"),
        ("127.0.0.1", 1, "half a frame, and no whole one within 10 s"),
    ]


async def test_refusals_name_the_host_and_the_limit() -> None:
    with structlog.testing.capture_logs() as logs:
        async with serving(ServerLimits(connections_max=1, sweep_s=0.05)) as (_, _, connect):
            known = await connect()
            await known.send_all(frame(b"in"))
            assert await receive_frames(known, 1) == [b"in"]
            for _ in range(5):
                assert await until_closed(await connect()) == b""
            await trio.sleep(0.1)
    refused = [line for line in logs if line["event"] == "clients turned away"]
    assert sum(line["count"] for line in refused) == 5
    assert {line["host"] for line in refused} == {"127.0.0.1"}
    assert {line["reason"] for line in refused} == {"refused: connections_max = 1 are open"}


# -- accounts --------------------------------------------------------------------------------------


async def test_a_client_cut_off_amid_its_frames_leaves_nothing_on_the_account() -> None:
    @dataclass
    class Bouncer(Echo):
        def handle(self, channel: ServerChannel, frames: list[Frame]) -> list[Frame]:  # noqa: ARG002
            channel.close("for a test")
            return []

    server = RemotingServer(Bouncer())
    network = TcpNetwork()
    listener = network.listen("127.0.0.1", 0)
    async with running(partial(network.serve, listener, server)):
        for _ in range(5):
            async with await trio.open_tcp_stream("127.0.0.1", listener.port) as stream:
                # The second frame is under way when the first ends it all.
                await stream.send_all(frame(b"first") + frame(b"x" * 1000)[:-1])
                await until_closed(stream)
        assert server.held_bytes == 0


async def test_a_stream_that_ends_amid_an_answer_leaves_nothing_on_the_account() -> None:
    server = RemotingServer(Echo())
    ours, theirs = trio.testing.lockstep_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_stream, server, theirs, "127.0.0.1", 1)
        await ours.send_all(frame(b"big:1000"))
        await trio.testing.wait_all_tasks_blocked()
        assert server.held_bytes > 1000
        await ours.aclose()
    assert server.held_bytes == 0


async def test_who_takes_slowly_what_it_asked_for_is_not_silent() -> None:
    limits = ServerLimits(connection_bytes_max=1_000_000)
    async with serving(limits) as (server, _, connect):
        stream = await connect()
        await stream.send_all(frame(b"big:10000000") * 3 + frame(b"half")[:-1])
        await trio.testing.wait_all_tasks_blocked()
        (channel,) = server.channels
        assert channel.is_slow
        left_bytes = channel.out_bytes
        # It has been so for longer than anybody may say nothing.
        channel.last_heard = channel.partial_since = trio.current_time() - 1000
        reader, answers = FrameReader(), []
        while channel.out_bytes == left_bytes:
            answers += reader.feed(await stream.receive_some())
        server.close_if_silent(channel, trio.current_time())
        assert channel.is_open
        await stream.send_all(b"f")
        while len(answers) < 4:
            answers += reader.feed(await stream.receive_some())
        assert bytes(answers[-1][2]) == b"half"
