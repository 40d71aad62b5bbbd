"""Connections of this broker to other daemons: the one place where they are opened.

What every connection needs, such as TLS or credentials, belongs here. Tests inject faults into the
network behind it.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import trio

from headrace_protocol.drivers.aio import AsyncConnection, open_stream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from headrace_protocol.drivers.aio import Connect
    from headrace_protocol.rights.credentials import Credentials

_REMEDY: Final = (
    "set innerClientAuthenticationCredentials to those of a user of that daemon, such as its own"
)


@asynccontextmanager
async def connected(
    connect: Connect, address: str, credentials: Credentials | None = None
) -> AsyncIterator[AsyncConnection]:
    """A connection for the time of a block, which ends with it.

    credentials: with which it is logged in, if any.

    Raises ConnectFailed, LogInFailed, and ConnectionLost or WrongServer if the other end closes it
    first.
    """
    stream = await open_stream(connect, address)
    connection = AsyncConnection(stream, address)
    problem: Exception | None = None
    is_done = False
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_run, connection, nursery.cancel_scope)
        try:
            if credentials is not None:
                await _log_in(connection, credentials)
            yield connection
            is_done = True
        except Exception as error:  # noqa: BLE001 - raised below
            # Raised here, it would leave the nursery inside an ExceptionGroup.
            problem = error
        nursery.cancel_scope.cancel()
    await trio.lowlevel.checkpoint_if_cancelled()
    if problem is not None:
        raise problem
    if not is_done:
        connection.check_open()


async def _log_in(connection: AsyncConnection, credentials: Credentials) -> None:
    from headrace_protocol.drivers.login import log_in

    await log_in(connection, credentials, _REMEDY)


async def _run(connection: AsyncConnection, scope: trio.CancelScope) -> None:
    await connection.run()
    scope.cancel()
