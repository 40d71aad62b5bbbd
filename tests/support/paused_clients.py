"""Clients of a daemon in memory, where time stands still until the test moves it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from headrace_broker.server import Broker
from headrace_daemon.network import MemoryNetwork
from headrace_nameserver.server import NameServer
from headrace_protocol.codes import RequestCode
from headrace_protocol.drivers.aio import AsyncConnection
from headrace_protocol.drivers.login import log_in
from headrace_protocol.drivers.response import Response
from headrace_protocol.quotas import Of, Quota
from headrace_protocol.rights.credentials import Credentials
from tests.support.broker import broker_config
from tests.support.wire import send_header

SEND = RequestCode.SEND_MESSAGE_V2
BODY = b"x" * 10_000
_RESTS_MAX = 400
# Settings of a broker.
USERS = {
    "authentication_enabled": True,
    "auth_requires_tls": "none",
    "init_authentication_user": '{"username":"root","password":"a password of root"}',
    "inner_client_authentication_credentials": '{"accessKey":"inner","secretKey":"of brokers"}',
}


class Client:
    """A client that waits for no answer unless it is told to."""

    def __init__(self, clock: MockClock, connection: AsyncConnection) -> None:
        self._clock, self._connection = clock, connection

    async def begin(self, code: int, header: Any = None, body: bytes = b"") -> list[Response]:
        """Send a request; the list has its answer once there is one."""
        answers: list[Response] = []
        connection = self._connection

        def take(command: Any, body: Any, error: Any) -> None:
            if error is None:  # else the test has ended
                answers.append(Response(connection.address, code, command, body))

        connection.submit(code, header, body, take)
        await self.rest()
        return answers

    async def become(self, credentials: Credentials, *, by_session: bool) -> None:
        """Log in, or sign from now on."""
        if by_session:
            await log_in(self._connection, credentials)
        else:
            self._connection.sign_as(credentials)

    async def ask(self, code: int, header: Any = None, body: bytes = b"") -> Response:
        answers = await self.begin(code, header, body)
        for _ in range(_RESTS_MAX):
            if answers:
                break
            await self.rest()  # a thread may be saving
        (answer,) = answers
        return answer

    async def set(self, of: Of, name: str, **limits: Any) -> None:
        (await self.ask(RequestCode.SET_QUOTA, body=quota(of, name, **limits))).expect()

    async def send(self, **fields: Any) -> list[Response]:
        return await self.begin(SEND, send_header(**fields), BODY)

    async def close(self) -> None:
        await self._connection.close()
        await self.rest()

    @property
    def peer_is_headrace(self) -> bool:
        return self._connection.peer_is_headrace

    async def passes(self, seconds: float) -> None:
        """Move the clock; the broker ticks before and after."""
        self._clock.jump(seconds)
        await self.rest()

    async def rest(self) -> None:
        """Wait until the broker has done what it can at this time."""
        await wait_all_tasks_blocked(0.005)


def quota(of: Of, name: str, **limits: Any) -> bytes:
    return Quota(of=of, name=name, **limits).encode()


def codes(answers: list[Response]) -> list[int]:
    return [answer.command.code for answer in answers]


@asynccontextmanager
async def clients_of(
    daemon: Broker | NameServer, network: MemoryNetwork, clock: MockClock, count: int
) -> AsyncIterator[list[Client]]:
    """Clients of a daemon that runs within the block."""
    async with trio.open_nursery() as nursery:
        address = await nursery.start(daemon.run)
        connections = [
            AsyncConnection(await network.connect(address), address) for _ in range(count)
        ]
        for connection in connections:
            nursery.start_soon(connection.run)
        yield [Client(clock, connection) for connection in connections]
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def clients(
    folder: Path, clock: MockClock, count: int = 1, **settings: Any
) -> AsyncIterator[tuple[Broker, list[Client]]]:
    """A broker that runs within the block, and its clients."""
    network = MemoryNetwork()
    broker = Broker(broker_config(folder, bind_address="127.0.0.1", **settings), network)
    async with clients_of(broker, network, clock, count) as several:
        yield broker, several
