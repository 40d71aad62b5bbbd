"""One request on its own connection, and the headers of sends and pulls."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace_daemon.network import Network
from headrace_protocol.codes import RequestCode
from headrace_protocol.drivers.aio import AsyncConnection
from headrace_protocol.drivers.response import Response
from headrace_protocol.headers import (
    BulkPullHeader,
    BulkSendHeader,
    PullMessageHeader,
    SendMessageHeaderV2,
)
from tests.support.running import in_background

_SENDER: dict[str, Any] = {
    "producer_group": "p",
    "topic": "T",
    "default_topic": "TBW102",
    "default_topic_queue_nums": 4,
}
_READER: dict[str, Any] = {"consumer_group": "g", "topic": "T", "commit_offset": 0}


async def ask(
    network: Network,
    address: str,
    code: RequestCode,
    header: msgspec.Struct | None = None,
    body: bytes = b"",
) -> Response:
    """The answer of the daemon at ``host:port``."""
    connection = AsyncConnection(await network.connect(address), address)
    async with in_background(connection.run):
        return await connection.request(code, header, body, timeout_ms=10_000)


def send_header(queue_id: int = 0, **fields: Any) -> SendMessageHeaderV2:
    """The header of a send to topic T, which may be created for it."""
    plain = {"sys_flag": 0, "born_timestamp": 1, "flag": 0, "properties": ""}
    return SendMessageHeaderV2(**{**_SENDER, "queue_id": queue_id, **plain, **fields})


def pull_header(queue_offset: int = 0, queue_id: int = 0, **fields: Any) -> PullMessageHeader:
    """The header of a pull of all tags of topic T, held only if ``sys_flag`` says so."""
    plain = {"max_msg_nums": 32, "sys_flag": 4, "sub_version": 0, "subscription": "*"}
    asked = {"queue_offset": queue_offset, "queue_id": queue_id, **plain, **fields}
    return PullMessageHeader(**{**_READER, "suspend_timeout_millis": 15_000, **asked})


def bulk_send_header(queue_id: int = 0, **fields: Any) -> BulkSendHeader:
    return BulkSendHeader(**{**_SENDER, "queue_id": queue_id, **fields})


def bulk_pull_header(queue_offset: int = 0, queue_id: int = 0, **fields: Any) -> BulkPullHeader:
    plain = {"max_msg_nums": 150, "max_msg_bytes": 1 << 20, "sys_flag": 0}
    asked = {"queue_offset": queue_offset, "queue_id": queue_id, **plain, **fields}
    return BulkPullHeader(**{**_READER, "suspend_timeout_millis": 0, **asked})
