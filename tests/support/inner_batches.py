"""Batches as Apache's clients send them, with an id of their own."""

from __future__ import annotations

from headrace_protocol.codes import RequestCode
from headrace_protocol.drivers.aio import AsyncConnection, Connect
from headrace_protocol.headers import SendMessageResponseHeader
from headrace_protocol.message import encode_batch, encode_properties
from tests.support.running import in_background
from tests.support.wire import send_header


def batch_items(first: int, count: int) -> bytes:
    """Messages with their number as body, key and id; those with even numbers have the tag a."""
    return encode_batch(
        (
            0,
            b"%d" % number,
            encode_properties(
                {"KEYS": f"k{number}", "UNIQ_KEY": f"U{number}", "TAGS": "ab"[number % 2]}
            ),
        )
        for number in range(first, first + count)
    )


async def send_batch(
    connect: Connect, address: str, first: int, count: int, topic: str = "T"
) -> SendMessageResponseHeader:
    """Send a batch to queue 0 of the broker at an address."""
    header = send_header(batch=True, topic=topic, properties=f"UNIQ_KEY\x01B{first}\x02")
    connection = AsyncConnection(await connect(address), address)
    async with in_background(connection.run):
        response = await connection.request(
            RequestCode.SEND_BATCH_MESSAGE, header, batch_items(first, count), timeout_ms=10_000
        )
    return response.expect().header(SendMessageResponseHeader)
