"""One request on its own connection, and the header of a plain message."""

from __future__ import annotations

import msgspec
import trio

from headrace_daemon.network import Network
from headrace_protocol.codes import RequestCode
from headrace_protocol.drivers.aio import AsyncConnection
from headrace_protocol.drivers.response import Response
from headrace_protocol.headers import SendMessageHeaderV2


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


def send_header(topic: str, properties: str = "") -> SendMessageHeaderV2:
    """Of a message that may create its topic."""
    return SendMessageHeaderV2(
        producer_group="p",
        topic=topic,
        default_topic="TBW102",
        default_topic_queue_nums=1,
        queue_id=0,
        sys_flag=0,
        born_timestamp=1,
        flag=0,
        properties=properties,
    )
