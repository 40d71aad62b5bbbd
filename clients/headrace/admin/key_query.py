"""Queries by key that resume where an answer ends, for more messages than one answer holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from headrace_protocol.headers import QueryMessageHeader
    from headrace_protocol.message import StoredMessage

# Most messages of one answer, RocketMQ's limits.
KEY_PAGE: Final = 64
ID_PAGE: Final = 32


class UnlistedMessages(HeadraceError):
    """A broker has more messages with a key than can be listed."""

    def __init__(self, address: str, key: str, timestamp_ms: int) -> None:
        super().__init__(
            f"the broker at {address} has more messages with key {key!r} that it stored at "
            f"{timestamp_ms} ms since 1970 than it returns at once: the rest of them is not "
            "listed, nor older ones; for these choose an earlier end of the time range"
        )
        self.address = address


class Found(NamedTuple):
    """Messages of one broker, newest first.

    stopped_ms: store time at which messages are missing, if any are.
    """

    messages: list[StoredMessage]
    stopped_ms: int | None


async def newest(
    page: Callable[[QueryMessageHeader], Awaitable[list[StoredMessage]]],
    header: QueryMessageHeader,
    matches: Callable[[StoredMessage], bool],
    max_count: int,
) -> Found:
    """The newest ``max_count`` messages that match. page: asks the broker once.

    Our brokers resume below a physical offset. Apache's know only store times, so pages overlap,
    and a millisecond with more messages than fit an answer ends the query.
    """
    seen: set[str] = set()
    found: list[StoredMessage] = []
    while len(found) < max_count:
        records = await page(header)
        new = [stored for stored in records if stored.offset_message_id not in seen]
        if not new:
            is_full = len(records) >= header.max_num
            return Found(found, header.end_timestamp if is_full else None)
        seen.update(stored.offset_message_id for stored in new)
        found += filter(matches, new)
        header = msgspec.structs.replace(
            header,
            max_num=ID_PAGE if header.unique_key_query else KEY_PAGE,
            end_timestamp=min(stored.store_timestamp for stored in new),
            before_offset=min(stored.physical_offset for stored in new),
        )
    return Found(found[:max_count], None)
