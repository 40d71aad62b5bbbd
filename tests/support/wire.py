"""One request on a connection of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from headrace_protocol.drivers.aio import AsyncConnection

if TYPE_CHECKING:
    import msgspec

    from headrace_protocol.codes import RequestCode
    from headrace_protocol.drivers.network import Network
    from headrace_protocol.drivers.response import Response


async def ask(
    network: Network,
    address: str,
    code: RequestCode,
    header: msgspec.Struct | None = None,
    body: bytes = b"",
) -> Response:
    """The answer of the daemon at ``host:port``."""
    connection = AsyncConnection(await network.connect(address), address)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.run)
        response = await connection.request(code, header, body, timeout_ms=10_000)
        nursery.cancel_scope.cancel()
    return response
