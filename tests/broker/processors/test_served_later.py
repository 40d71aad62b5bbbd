"""A request that had to wait keeps every promise when it is served later, outside of its turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_broker.queue_directory import Lookup, Place, QueueDirectory, Use
from headrace_broker.store.write.confirmation import Gate
from headrace_daemon.serving.server_channel import ServerChannel
from headrace_protocol.channel import Channel
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import Lane, NotReady
from headrace_protocol.frame import FrameReader
from headrace_protocol.header_codecs import SerializeType, decode_header, encode_frame
from headrace_protocol.serving import Registry, Request, ServedElsewhere, Then
from tests.support.broker import BrokerUnderTest
from tests.support.features import add_parts
from tests.support.stores import FaultyFiles, put

BODY = b"body"
SEND = (
    encode_frame(
        SerializeType.JSON,
        RequestCode.SEND_MESSAGE_V2,
        1,
        fields={"a": "g", "b": "T", "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 1, "h": 0, "i": ""},
        body_bytes=len(BODY),
    )
    + BODY
)


class Waits:
    """A place that is not known at the first look; ``resume`` ends the wait."""

    def __init__(self) -> None:
        self.is_known = False
        self.then: Then
        self.registry: Registry

    def place(self, _directory: QueueDirectory, lookup: Lookup) -> Place | None:
        if lookup.use is Use.SEND and not self.is_known:
            raise ServedElsewhere(ResponseCode.SYSTEM_BUSY, "not known yet", self.serve)
        return None

    async def serve(self, request: Request) -> None:
        await NotReady(lambda: None, Lane("tests", 1))
        self.registry.admit(request)

    def run_fetch(self, _channel: Channel, _wait: NotReady, then: Then) -> None:
        self.then = then

    def resume(self) -> None:
        self.is_known = True
        self.then(None)


class Wire:
    """Takes what is sent to one client, and notes how many bytes the log's file lacked then."""

    def __init__(self, broker: BrokerUnderTest) -> None:
        self.broker = broker
        self.codes: list[int] = []
        self.unwritten: list[int] = []
        self.is_closed = False

    def flush(self, channel: ServerChannel) -> None:
        for serialize_type, header, _ in FrameReader().feed(b"".join(channel.out)):
            self.codes.append(decode_header(serialize_type, header).code)
            self.unwritten.append(sum(map(len, self.broker.store.commit_log._pending)))
        channel.out.clear()
        channel.out_bytes = 0

    def set_reading(self, *, reading: bool) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def waits() -> Waits:
    return Waits()


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: Waits, files: FaultyFiles
) -> BrokerUnderTest:
    add_parts(monkeypatch, places=(waits.place,))
    broker = BrokerUnderTest(tmp_path, files=files)
    broker.create_topic("T", 1)
    broker.registry.run_fetch = waits.run_fetch
    waits.registry = broker.registry
    return broker


def send(broker: BrokerUnderTest) -> Wire:
    """A client sends a message, whose place is not known yet."""
    wire, server = Wire(broker), broker.server
    channel = server.open_channel(wire, "127.0.0.1", 1)
    server.begin_turn()
    server.received(channel, SEND)
    server.end_turn()
    assert (wire.codes, broker.store.commit_log.max_offset) == ([], 0)
    return wire


async def test_it_is_written_then_answered_then_published(
    broker: BrokerUnderTest, waits: Waits
) -> None:
    wire = send(broker)
    broker.clock.ms += 5000
    waits.resume()
    assert (wire.codes, wire.unwritten) == ([ResponseCode.SUCCESS], [0])
    (message,) = broker.stored("T", 0)
    assert message.store_timestamp == broker.clock.ms


async def test_it_is_not_answered_when_it_cannot_be_written(
    broker: BrokerUnderTest, waits: Waits, files: FaultyFiles
) -> None:
    wire = send(broker)
    files.is_unwritable = True
    waits.resume()
    assert (wire.codes, wire.is_closed) == ([], True)
    broker.faults = 1
    files.is_unwritable = False


async def test_what_continues_at_a_publish_is_written_before_its_answer(
    broker: BrokerUnderTest, waits: Waits
) -> None:
    store, passed = broker.store, [0]

    def advance() -> None:
        passed[0] = store.commit_log.max_offset
        if not waits.is_known:
            waits.resume()

    gate = Gate(lambda: passed[0], advance, lambda _offset, callback: callback(True))
    wire = send(broker)
    store.write_path.confirmation.add(gate)
    other = broker.server.open_channel(Wire(broker), "127.0.0.1", 2)
    broker.registry.in_turn(other, lambda: put(store, store.queue("U", 0), dispatch=False))
    assert (wire.codes, wire.unwritten) == ([ResponseCode.SUCCESS], [0])
    assert [message.body for message in broker.stored("T", 0)] == [BODY]
