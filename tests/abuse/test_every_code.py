"""Every request that a daemon serves, with empty, oversized, deep and foreign headers and bodies.

What is served is asked of the daemons themselves, so that a new request is walked without being
listed here, and fails without a row in the table of bounds.
"""

from __future__ import annotations

import struct
import zlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import pytest
import structlog.testing
import trio

from headrace_protocol.bounds import BODIES, body_of
from headrace_protocol.codes import RequestCode as Code
from headrace_protocol.codes import ResponseCode
from headrace_protocol.drivers.network import MemoryNetwork
from headrace_protocol.frame import FRAME_BYTES_MAX
from headrace_protocol.header_codecs import HEADRACE_MARK, SerializeType
from tests.broker.test_bad_input import Daemons, Wire, daemons, framed, request, send_fields
from tests.support.wire_types import REQUEST_HEADERS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

JSON, ROCKETMQ, MSGPACK = SerializeType
BROKER, NAMESERVER = "broker", "nameserver"

# A pull may wait, and nothing answers a message that is sent back.
MAY_WAIT = frozenset({Code.PULL_MESSAGE, Code.LITE_PULL_MESSAGE, Code.BULK_PULL})
NOT_ANSWERED = frozenset({Code.CONSUMER_SEND_MSG_BACK})


# -- what is asked ---------------------------------------------------------------------------------

FOREIGN_TEXTS = (
    "x" * 30_000,
    "\x1b[2J",
    "../../../etc",
    "%n%s{0}",
    "ä" * 500,
    " ",
    "-1",
    "a\x01b\x02",
)
NO_FIELDS: dict[str, Any] = {}
SAME_HASH = 2**61 - 1
DEEP = 5000

BODIES_OF_OTHERS = {
    "nothing": b"",
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "zeros": bytes(5000),
    "zlib": zlib.compress(bytes(300_000)),
    "a number of blocks": struct.pack(">iii", 2**31 - 1, -(2**31), -1),
    "no text": b"\xff\xfe\xed\xa0\x80" * 20,
    "null": b"null",
    "a list": b'[1,"a",null,{}]',
    "wrong types": b'{"clientID":5,"topicConfigList":{},"mqSet":"x","groupName":[],"a":1e999}',
    "nulls": b'{"clientID":null,"topicConfigList":[null],"mqSet":[null],"groupName":null}',
    "bare names": b"{clientID:'c',mqSet:[{}],groupName:g,topicConfigList:[{}]}",
    "lines": b"noSuchKey=1\nstorePathRootDir=/\n\x1b[2J=\n",
}
DEEP_BODIES = {
    "lists": b"[" * DEEP + b"]" * DEEP,
    "lists without end": b"[" * 100_000,
    "objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "integer keys": b"{1:" * DEEP + b"1" + b"}" * DEEP,
    "object keys": b"{{" * DEEP,
    "a policy": b'{"groupName":"deep","groupRetryPolicy":' + b'{"a":' * 50 + b"1" + b"}" * 51,
}
LARGE_BODIES = {
    "one hash": b"{%b}" % b",".join(b"%d:1" % (n * SAME_HASH) for n in range(1, 8000)),
    "nulls": b'{"clientID":"c","mqSet":[%bnull]}' % (b"null," * 40_000),
    "names": b"{clientID:c,a:[%b1]}" % (b"1," * 100_000),
    "empty lists": b'{"a":[%b[]]}' % (b"[]," * 80_000),
}


def plain_value(field_type: Any) -> Any:
    """A valid value of the field's type."""
    kinds = msgspec.inspect.type_info(field_type)
    if isinstance(kinds, msgspec.inspect.UnionType):
        kinds = kinds.types[0]
    if isinstance(kinds, msgspec.inspect.IntType):
        return max(kinds.ge or 0, 0)
    if isinstance(kinds, msgspec.inspect.BoolType):
        return False
    return "Foreign"


def plain_fields(code: int) -> dict[str, Any]:
    """Valid fields of the request's header."""
    header_type = REQUEST_HEADERS.get(code)
    if header_type is None:
        return {}
    return {
        field.encode_name: plain_value(field.type) for field in msgspec.structs.fields(header_type)
    }


def headers(code: int) -> Iterator[dict[str, Any]]:
    """Fields that are missing, plain, foreign, large or extreme, all of a kind at once."""
    plain = plain_fields(code)
    yield NO_FIELDS
    yield plain
    for text in FOREIGN_TEXTS:
        yield {name: text if value == "Foreign" else value for name, value in plain.items()}
    for number in (-1, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63), 10**30, 1.5):
        yield {name: number if isinstance(value, int) else value for name, value in plain.items()}
    yield {f"field {number}": "x" for number in range(1000)}


class Walk:
    """Sends requests of one code and keeps track of their answers."""

    def __init__(self, wire: Wire, code: Code, codec: SerializeType) -> None:
        self._wire = wire
        self._code = code
        self._codec = codec
        self._opaque = 0
        self.waiting: dict[int, str] = {}

    async def send(self, what: str, fields: dict[str, Any], body: bytes) -> None:
        """One request, unless the codec has no form for it."""
        self._opaque += 1
        frame = request(self._code, fields, body, codec=self._codec, opaque=self._opaque)
        self.waiting[self._opaque] = what
        await self._wire.send(frame)

    async def settle(self) -> None:
        """Wait until everything that must be answered is."""
        end = self._opaque + 1
        await self._wire.send(request(9999, codec=self._codec, opaque=end))
        may_wait = self._code in MAY_WAIT or self._code in NOT_ANSWERED
        has_ended = False
        with trio.fail_after(10):
            while not has_ended or (self.waiting and not may_wait):
                command, _ = await self._wire.receive()
                assert command.opaque == end or command.opaque in self.waiting, command
                has_ended = has_ended or command.opaque == end
                self.waiting.pop(command.opaque, None)


async def walk(walk: Walk, code: Code, codec: SerializeType) -> None:
    for fields in headers(code):
        if codec is not MSGPACK or 10**30 not in fields.values():
            await walk.send(f"header {str(fields)[:80]}", fields, b"")
    plain = plain_fields(code)
    for name, body in (BODIES_OF_OTHERS | DEEP_BODIES).items():
        await walk.send(f"body {name}", plain, body)
    if codec is JSON:
        for name, body in LARGE_BODIES.items():
            await walk.send(f"body {name}", plain, body)
    bytes_max = body_of(code).bytes_max
    if bytes_max < FRAME_BYTES_MAX:
        await walk.send("an oversized body", plain, bytes(bytes_max + 1))
    await walk.settle()


def closing_headers(code: int) -> Iterator[tuple[SerializeType, bytes]]:
    """Malformed or nested headers, which may close only their own connection."""
    deep_list = b"[" * DEEP + b"]" * DEEP
    for deep in (deep_list, b'{"a":' * DEEP + b"1" + b"}" * DEEP, b"[" * 60_000):
        yield JSON, b'{"code":%d,"extFields":%b,"opaque":1}' % (code, deep)
        yield JSON, b'{"code":%d,"extFields":{"topic":%b},"opaque":1}' % (code, deep)
        yield JSON, b'{"code":%d,"z":%b,"extFields":{},"opaque":1}' % (code, deep)
    yield JSON, b'{"code":%d,"extFields":[],"opaque":1}' % code
    yield JSON, b'{"code":%d,"extFields":{"topic":{}},"opaque":1e400}' % code
    fixed = struct.pack(">hBhiiii", code % 2**15, 0, 0, 1, 0, 0, 2**31 - 1)
    yield ROCKETMQ, fixed
    yield ROCKETMQ, fixed[:-4] + struct.pack(">ihi", 6, -1, -1)
    for levels in (100, 990, DEEP):
        start = b"\x97" + struct.pack(">BI", 0xCE, code) + b"\xa4JAVA\xcd\x02\x01\x01\x00\xc0"
        yield MSGPACK, start + b"\x81\xa1a" + b"\x91" * levels + b"\x01"


# -- daemons ---------------------------------------------------------------------------------------


class Innocent:
    """A well-behaved client on a lasting connection."""

    def __init__(self, wire: Wire, target: str) -> None:
        self._wire = wire
        self._target = target

    async def is_served(self) -> None:
        if self._target == BROKER:
            command, _ = await self._wire.ask(request(310, send_fields(b="Alive"), b"well?"))
        else:
            command, _ = await self._wire.ask(request(105, {"topic": "Alive"}))
        assert command.code == ResponseCode.SUCCESS, command.remark


@asynccontextmanager
async def attacked(target: str) -> AsyncIterator[tuple[Daemons, str, Innocent]]:
    """Daemons, the address of one of them, and an innocent client of it."""
    with structlog.testing.capture_logs() as logs:
        async with daemons(MemoryNetwork()) as under_test:
            running = under_test.running
            address = running.broker if target == BROKER else running.nameserver
            async with under_test.wire(address) as wire:
                yield under_test, address, Innocent(wire, target)
    faults = [entry for entry in logs if entry["event"] == "unexpected error"]
    assert not faults, faults[0]


async def routed_codes(wire: Wire) -> list[Code]:
    """The codes that are not answered as unknown."""
    codes = list(Code)
    for number, code in enumerate(codes):
        await wire.send(request(code, opaque=number))
    await wire.send(request(9999, opaque=len(codes)))
    unknown = set()
    while (answer := (await wire.receive())[0]).opaque != len(codes):
        code = codes[answer.opaque]
        if answer.remark == f" request type {code.value} not supported":
            unknown.add(code)
    return [code for code in codes if code not in unknown]


targets = pytest.mark.parametrize("target", [BROKER, NAMESERVER])


async def test_exactly_the_served_requests_have_bounds() -> None:
    routed: set[Code] = set()
    async with daemons(MemoryNetwork()) as under_test:
        for address in (under_test.running.broker, under_test.running.nameserver):
            async with under_test.wire(address) as wire:
                routed |= set(await routed_codes(wire))
    assert len(routed) > 60
    assert routed == BODIES.keys()


@pytest.mark.slow
@targets
@pytest.mark.parametrize("codec", list(SerializeType))
async def test_every_request_is_answered_whatever_it_holds(
    target: str, codec: SerializeType
) -> None:
    async with attacked(target) as (under_test, address, innocent):
        async with under_test.wire(address) as wire:
            codes = await routed_codes(wire)
        for code in codes:
            if codec is ROCKETMQ and code > 2**15 - 1:
                continue
            async with under_test.wire(address) as wire:
                await walk(Walk(wire, code, codec), code, codec)
            await innocent.is_served()


@pytest.mark.slow
@targets
async def test_headers_that_nest_cost_one_connection_at_most(target: str) -> None:
    async with attacked(target) as (under_test, address, innocent):
        async with under_test.wire(address) as wire:
            codes = await routed_codes(wire)
        for code in codes:
            for codec, header in closing_headers(code):
                for is_known in (False, True):
                    async with under_test.wire(address) as wire:
                        if is_known:
                            await wire.ask(request(9999, {HEADRACE_MARK: "1"}))
                            await wire.receive()
                        await send_and_end(wire, framed(codec, header))
            await innocent.is_served()


async def send_and_end(wire: Wire, frame: bytes) -> None:
    """Send a frame and a request after it; end when the other side has answered or closed."""
    with trio.fail_after(5):
        try:
            await wire.send(frame + request(9999, opaque=7))
            while (await wire.receive())[0].opaque != 7:
                pass
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            pass
