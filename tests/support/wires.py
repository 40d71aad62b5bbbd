"""Running daemons, and a client that sends any bytes and reads the answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
import trio
from anyio.abc import ByteStream

from headrace.embedded import Embedded, run_daemons
from headrace_daemon.network import MemoryNetwork, TcpNetwork
from headrace_protocol.codes import RequestCode as Code
from headrace_protocol.command import Command
from headrace_protocol.frame import FrameReader
from headrace_protocol.header_codecs import SerializeType, decode_header, encode_frame
from headrace_protocol.message import decode_records

TOPIC = "Flights"
QUEUES = 2
JSON = SerializeType.JSON


# -- a client that says what it likes --------------------------------------------------------------


class Wire:
    """One connection, on which any bytes can be sent."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self._reader = FrameReader()
        self._received: list[tuple[Command, bytes]] = []

    async def send(self, data: bytes) -> None:
        await self.stream.send(data)

    async def receive(self) -> tuple[Command, bytes]:
        """The next frame; EndOfStream or BrokenResourceError when the other side has closed."""
        while not self._received:
            for serialize_type, header, body in self._reader.feed(await self.stream.receive()):
                self._received.append((decode_header(serialize_type, header), bytes(body)))
        return self._received.pop(0)

    async def ask(self, request: bytes) -> tuple[Command, bytes]:
        await self.send(request)
        with trio.fail_after(5):
            return await self.receive()

    async def closed(self) -> None:
        """Wait until the other side has closed; whatever it said before is dropped."""
        with trio.fail_after(5):
            try:
                while True:
                    await self.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError, OSError):
                pass


def request(
    code: int,
    fields: dict[str, Any] | None = None,
    body: bytes = b"",
    *,
    codec: SerializeType = JSON,
    flag: int = 0,
    opaque: int = 1,
) -> bytes:
    frame = encode_frame(
        codec, code, opaque, flag=flag, fields=fields or {}, body_bytes=len(body), language="JAVA"
    )
    return frame + body


def framed(serialize_type: int, header: bytes) -> bytes:
    mark = serialize_type << 24 | len(header)
    return (4 + len(header)).to_bytes(4, "big") + mark.to_bytes(4, "big") + header


def send_fields(**changes: Any) -> dict[str, Any]:
    fields = {
        "a": "producers", "b": TOPIC, "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 1795235766905,
        "h": 0, "i": "KEYS\x01k\x02", "j": 0, "k": False, "m": False,
    }  # fmt: skip
    return {**fields, **changes}


def pull_fields(**changes: Any) -> dict[str, Any]:
    fields = {
        "consumerGroup": "readers", "topic": TOPIC, "queueId": 0, "queueOffset": 0,
        "maxMsgNums": 32, "sysFlag": 4, "commitOffset": 0, "suspendTimeoutMillis": 0,
        "subVersion": 0, "subscription": "*", "expressionType": "TAG",
    }  # fmt: skip
    return {**fields, **changes}


def queue_fields(**changes: Any) -> dict[str, Any]:
    return {"topic": TOPIC, "queueId": 0, **changes}


def key_fields(**changes: Any) -> dict[str, Any]:
    fields = {
        "topic": TOPIC, "key": "none", "maxNum": 9, "beginTimestamp": 0, "endTimestamp": 2**63 - 1
    }  # fmt: skip
    return {**fields, **changes}


def topic_fields(**changes: Any) -> dict[str, Any]:
    fields = {
        "topic": "Fresh", "defaultTopic": "TBW102", "readQueueNums": QUEUES,
        "writeQueueNums": QUEUES, "perm": 6, "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0,
        "order": False,
    }  # fmt: skip
    return {**fields, **changes}


# -- daemons under test ----------------------------------------------------------------------------


class Daemons:
    """A broker and a nameserver with a few topics, and ways to look at them."""

    def __init__(self, running: Embedded) -> None:
        self.running = running
        self._count = 0

    @asynccontextmanager
    async def wire(self, address: str = "") -> AsyncIterator[Wire]:
        stream = await self.running.connect(address or self.running.broker)
        async with stream:
            yield Wire(stream)

    async def prepare(self) -> None:
        async with self.wire() as wire:
            for topic, perm in ((TOPIC, 6), ("ReadOnly", 4), ("WriteOnly", 2), ("Closed", 0)):
                fields = topic_fields(topic=topic, perm=perm)
                command, _ = await wire.ask(request(Code.UPDATE_AND_CREATE_TOPIC, fields))
                assert command.code == 0, command.remark

    async def serves(self) -> None:
        """Store a message and get it back."""
        self._count += 1
        body = b"round trip %d" % self._count
        async with self.wire() as wire:
            command, _ = await wire.ask(request(Code.SEND_MESSAGE_V2, send_fields(b="Alive"), body))
            assert command.code == 0, command.remark
            offset = command.ext()["queueOffset"]
            fields = pull_fields(topic="Alive", queueOffset=offset)
            command, records = await wire.ask(request(Code.PULL_MESSAGE, fields))
            assert command.code == 0, command.remark
            assert [message.body for message in decode_records(records)] == [body]

    async def max_offset(self, queue_id: int = 0) -> int:
        async with self.wire() as wire:
            fields = queue_fields(queueId=queue_id)
            command, _ = await wire.ask(request(Code.GET_MAX_OFFSET, fields))
            return int(command.ext()["offset"])


@asynccontextmanager
async def daemons(network: MemoryNetwork | TcpNetwork) -> AsyncIterator[Daemons]:
    async with run_daemons(None, network=network) as running:
        under_test = Daemons(running)
        await under_test.prepare()
        await under_test.serves()
        yield under_test
        await under_test.serves()


networks = pytest.mark.parametrize("network", [MemoryNetwork, TcpNetwork])
