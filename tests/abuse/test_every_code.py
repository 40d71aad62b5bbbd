"""Every request that a daemon serves, with empty, oversized, deep and foreign headers and bodies.

What is served is asked of the daemons themselves, so that a new request is walked without being
listed here, and fails without a row in the table of bounds.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
import structlog.testing
import trio

from headrace_daemon.network import MemoryNetwork
from headrace_protocol.bounds import BODIES, body_of
from headrace_protocol.codes import RequestCode as Code
from headrace_protocol.codes import ResponseCode
from headrace_protocol.frame import FRAME_BYTES_MAX
from headrace_protocol.header_codecs import HEADRACE_MARK, SerializeType
from tests.abuse.hostile import (
    BODIES_OF_OTHERS,
    DEEP_BODIES,
    JSON,
    LARGE_BODIES,
    MSGPACK,
    ROCKETMQ,
    closing_headers,
    headers,
    plain_fields,
)
from tests.support.wires import Daemons, Wire, daemons, framed, request, send_fields

BROKER, NAMESERVER = "broker", "nameserver"

# A pull may wait, and nothing answers a message that is sent back.
MAY_WAIT = frozenset({Code.PULL_MESSAGE, Code.LITE_PULL_MESSAGE, Code.BULK_PULL})
NOT_ANSWERED = frozenset({Code.CONSUMER_SEND_MSG_BACK})


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
    # Daemons without authentication serve no log-ins.
    assert routed | {Code.AUTH_SESSION} == BODIES.keys()


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
