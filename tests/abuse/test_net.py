"""A frame costs at most its own connection."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgpack
import pytest
import structlog.testing
import trio
import trio.lowlevel

from headrace_daemon.host_log import LINES_MAX, HostLog
from headrace_daemon.network import MemoryNetwork, TcpNetwork
from headrace_daemon.serving.server import RemotingServer, ServerLimits
from headrace_daemon.serving.server_channel import ServerChannel
from headrace_daemon.slices import Fetches
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import Lane, NotReady
from headrace_protocol.frame import Frame, FrameReader
from headrace_protocol.serving import Registry, Reply, Request
from tests.support.channel import MemoryChannel
from tests.support.running import in_background, running
from tests.support.wires import (
    Wire,
    daemons,
    framed,
    request,
    send_fields,
    topic_fields,
)

NESTED = 990


# -- frames that ended a daemon --------------------------------------------------------------------


async def test_a_uniq_key_longer_than_any_answer_is_answered() -> None:
    uniq_key = "A" * 900
    properties = f"UNIQ_KEY\x01{uniq_key}\x02WAIT\x01true\x02"
    async with daemons(MemoryNetwork()) as under_test, under_test.wire() as wire:
        await wire.ask(request(310, send_fields(i="UNIQ_KEY\x01abc\x02WAIT\x01true\x02"), b"x"))
        command, _ = await wire.ask(request(310, send_fields(i=properties), b"x"))
        assert (command.code, command.ext()["transactionId"]) == (0, uniq_key)


async def test_a_first_frame_whose_field_nests_is_closed_by_both_daemons() -> None:
    deep = b"\x91" * NESTED + b"\x01"
    header = b"\x97\x1c\xa4JAVA\xcd\x02\x01\x01\x00\xc0\x81\xa1a" + deep
    async with daemons(MemoryNetwork()) as under_test:
        for address in (under_test.running.broker, under_test.running.nameserver):
            async with under_test.wire(address) as wire:
                await wire.send(framed(0x68, header))
                await wire.closed()
        await under_test.serves()


async def test_a_send_whose_header_nests_is_closed() -> None:
    deep = b'{"code":310,"z":' + b"[" * 5000 + b"]" * 5000 + b',"extFields":{},"opaque":2}'
    async with daemons(MemoryNetwork()) as under_test, under_test.wire() as wire:
        await wire.ask(request(28))
        await wire.send(framed(0, deep))
        await wire.closed()
        await under_test.serves()


@pytest.mark.parametrize("value", [[1], {"a": 1}, msgpack.Timestamp(1, 2), b"\xff"])
async def test_an_invalid_field_of_a_msgpack_header_closes_its_connection(value: object) -> None:
    header = msgpack.packb([28, "JAVA", 513, 1, 0, None, {"a": value}])
    async with daemons(MemoryNetwork()) as under_test, under_test.wire() as wire:
        await wire.send(framed(0x68, header))
        await wire.closed()


# -- the net ---------------------------------------------------------------------------------------


@dataclass
class Faulty:
    """A handler that fails at a given place for one client, and serves the others."""

    fails_in: str
    victim: ServerChannel | None = None
    closed_count: int = 0
    others: list[ServerChannel] = field(default_factory=list)

    def handle(self, channel: ServerChannel, frames: list[Frame]) -> list[Frame]:
        for _, _, body in frames:
            if bytes(body) == b"fail":
                self.victim = channel
                if self.fails_in == "write":
                    channel.write("not bytes")  # type: ignore[arg-type]
                self.check("handle", channel)
            channel.write(request(10, body=bytes(body)))
        return []

    def finish_turn(self) -> None:
        if self.victim is not None:
            self.check("finish_turn", self.victim)

    def replied(self) -> None:
        pass

    def closed(self, channel: ServerChannel) -> None:
        self.closed_count += 1
        self.check("closed", channel)

    def check(self, place: str, channel: ServerChannel) -> None:
        if place == self.fails_in and channel is self.victim:
            raise IndexError(f"no place in {place}")


async def serve(
    network: MemoryNetwork | TcpNetwork, handler: Faulty, talk: Callable[[Wire, Wire], object]
) -> RemotingServer:
    """Let ``talk`` use two connections to a server with the handler."""
    server = RemotingServer(handler)
    listener = network.listen("127.0.0.1", 0)
    async with (
        running(partial(network.serve, listener, server)),
        await network.connect(listener.address) as bad,
        await network.connect(listener.address) as good,
    ):
        await talk(Wire(bad), Wire(good))  # type: ignore[misc]
    return server


networks = pytest.mark.parametrize("network", [MemoryNetwork, TcpNetwork])


@networks
@pytest.mark.parametrize("place", ["handle", "write", "closed"])
async def test_a_fault_closes_its_client_and_nobody_else(
    network: Callable[[], MemoryNetwork | TcpNetwork], place: str
) -> None:
    async def talk(bad: Wire, good: Wire) -> None:
        await bad.send(request(10, body=b"fail"))
        if place == "closed":
            await bad.receive()
            await bad.stream.aclose()
        else:
            await bad.closed()
        for _ in range(2):
            assert (await good.ask(request(10, body=b"echo")))[1] == b"echo"

    handler = Faulty(place)
    with structlog.testing.capture_logs() as logs:
        server = await serve(network(), handler, talk)
    assert server.unexpected_errors == 1
    assert server.held_bytes == 0
    assert handler.closed_count == 2
    (entry,) = [entry for entry in logs if entry["event"] == "unexpected error"]
    assert re.search(f"no place in {place}|bytes-like object", str(entry["exc_info"]))
    assert entry["client"].startswith("127.0.0.1:")


@networks
async def test_replies_that_may_be_false_end_the_server(
    network: Callable[[], MemoryNetwork | TcpNetwork],
) -> None:
    async def talk(bad: Wire, good: Wire) -> None:
        await good.ask(request(10, body=b"echo"))
        await bad.send(request(10, body=b"fail"))
        await bad.receive()

    with pytest.raises(BaseExceptionGroup) as raised:
        await serve(network(), Faulty("finish_turn"), talk)
    assert raised.group_contains(IndexError, match="no place in finish_turn")


# -- requests that are answered later --------------------------------------------------------------


async def never_ready(_request: Request) -> None:
    await NotReady(fail_to_fetch, Lane("tests", 1))


def fail_to_fetch() -> None:
    raise IndexError("no such place")


async def test_a_fetch_that_fails_is_answered() -> None:
    unexpected: list[Exception] = []
    channel = MemoryChannel()
    fetches = Fetches()
    registry = Registry(lambda _, error: unexpected.append(error))
    registry.route(RequestCode.GET_MIN_OFFSET, never_ready)
    registry.run_fetch = fetches.start
    async with in_background(fetches.run):
        registry.handle(channel, FrameReader().feed(request(31)))
        while not channel.written:
            await trio.lowlevel.checkpoint()
    ((command, _),) = channel.replies()
    assert command.code == ResponseCode.SYSTEM_ERROR
    assert [str(error) for error in unexpected] == ["no such place"]


def test_an_answer_that_cant_be_encoded_is_an_error() -> None:
    unexpected: list[Exception] = []
    channel = MemoryChannel()
    registry = Registry(lambda _, error: unexpected.append(error))
    remark = "half a pair: \ud800"
    registry.route(RequestCode.GET_MIN_OFFSET, lambda _: Reply(remark=remark))
    registry.handle(channel, FrameReader().feed(request(31)))
    ((command, _),) = channel.replies()
    assert command.code == ResponseCode.SYSTEM_ERROR
    assert "can't be encoded" in (command.remark or "")
    assert len(unexpected) == 1


# -- the log ---------------------------------------------------------------------------------------


def test_no_host_floods_the_log() -> None:
    with structlog.testing.capture_logs() as logs:
        host_log = HostLog(structlog.get_logger())
        for port in range(LINES_MAX + 5):
            host_log.warning(f"10.0.0.1:{port}", "client closed")
        host_log.warning("10.0.0.2:1", "client closed")
        host_log.report()
        host_log.warning("10.0.0.1:1", "client closed")
        host_log.report()
    closed = [entry for entry in logs if entry["event"] == "client closed"]
    assert len(closed) == LINES_MAX + 2
    (left_out,) = [entry for entry in logs if entry["event"] == "lines suppressed"]
    assert (left_out["host"], left_out["count"]) == ("10.0.0.1", 5)


def test_many_hosts_share_what_one_host_may_log() -> None:
    with structlog.testing.capture_logs() as logs:
        host_log = HostLog(structlog.get_logger())
        for host in range(5000):
            host_log.warning(f"[2001:db8::{host:x}]:1", "client closed")
    assert len(logs) == 1000 + LINES_MAX


class TakesHalf:
    """A transport to a client that takes all at each second time."""

    takes = True

    def flush(self, channel: ServerChannel) -> None:
        self.takes = not self.takes
        if self.takes:
            channel.out_bytes = 0

    def set_reading(self, *, reading: bool) -> None:
        pass

    def close(self) -> None:
        pass


async def test_a_client_that_is_paused_again_and_again_does_not_flood_the_log() -> None:
    server = RemotingServer(Faulty(""), ServerLimits(connection_bytes_max=10))
    channel = server.open_channel(TakesHalf(), "10.0.0.1", 1)
    with structlog.testing.capture_logs() as logs:
        for _ in range(LINES_MAX + 5):
            channel.write(bytes(20))
            assert channel.is_slow
            server.send_more(channel)
            assert not channel.is_slow
    assert [entry["event"] for entry in logs] == ["slow reader paused"] * LINES_MAX


async def test_a_topic_without_a_queue_to_write_to_is_no_fault() -> None:
    with structlog.testing.capture_logs() as logs:
        async with daemons(MemoryNetwork()) as under_test, under_test.wire() as wire:
            await wire.ask(request(17, topic_fields(topic="Full", writeQueueNums=0)))
            command, _ = await wire.ask(request(310, send_fields(b="Full", e=-1), b"x"))
    assert command.code == ResponseCode.NO_PERMISSION
    assert "no queue to write to" in (command.remark or "")
    assert not [entry for entry in logs if entry["event"] == "unexpected error"]
