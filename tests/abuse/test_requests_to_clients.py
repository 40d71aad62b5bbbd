"""A broker that keeps asking its clients and never reads their answers."""

from __future__ import annotations

import anyio
import trio
from anyio.abc import ByteStream

from headrace_protocol.connection import Connection, RequestReceived
from headrace_protocol.drivers.aio import AsyncConnection
from tests.support.running import in_background

ANSWER = bytes(100_000)
COUNT = 1000


class Stuck(ByteStream):
    """A stream that delivers bytes in pieces and accepts none."""

    def __init__(self, piece: bytes, count: int) -> None:
        self._piece = piece
        self._left = count

    async def receive(self, max_bytes: int = 65536) -> bytes:  # noqa: ARG002 - a stream's
        await anyio.lowlevel.checkpoint()
        if not self._left:
            await anyio.sleep_forever()
        self._left -= 1
        return self._piece

    async def send(self, item: bytes) -> None:  # noqa: ARG002 - a stream's
        await anyio.sleep_forever()

    async def send_eof(self) -> None:
        """It takes nothing anyway."""

    async def aclose(self) -> None:
        """Nothing to close."""


async def test_unread_answers_do_not_pile_up() -> None:
    asked: list[RequestReceived] = []

    def answer(connection: AsyncConnection, request: RequestReceived) -> None:
        asked.append(request)
        connection.respond(request, 0, body=ANSWER)

    _, frame = Connection[None]().request(307, waiter=None)
    connection = AsyncConnection(Stuck(b"".join(frame), COUNT), "10.0.0.1:1", answer)
    async with in_background(connection.run):
        await trio.testing.wait_all_tasks_blocked()
        assert len(asked) == COUNT
        assert sum(map(len, connection._outgoing)) < 2 * 1024 * 1024
