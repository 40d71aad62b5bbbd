"""The start position of a group that has committed nothing yet."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Literal

from headrace.errors import ConfigurationError

if TYPE_CHECKING:
    from headrace.consumer.offset_store import OffsetStore
    from headrace_protocol.bodies import MessageQueue

Start = Literal["earliest", "latest"] | dt.datetime | int

# A group that has committed nothing yet misses no message.
DEFAULT_START: Start = "earliest"
_NAMES_OF_ROCKETMQ = {"earliest": "CONSUME_FROM_FIRST_OFFSET", "latest": "CONSUME_FROM_LAST_OFFSET"}


def check_start(start: Start) -> None:
    """Raise ConfigurationError unless ``start`` is a valid start position."""
    if isinstance(start, dt.datetime) and start.tzinfo is None:
        raise ConfigurationError(f"start={start}: a datetime needs a time zone")
    if not (start in _NAMES_OF_ROCKETMQ or isinstance(start, dt.datetime | int)):
        raise ConfigurationError(
            f"start={start!r}: must be 'earliest', 'latest', a datetime or milliseconds since 1970"
        )


async def start_offset(start: Start, queue: MessageQueue, offsets: OffsetStore) -> int:
    """The offset in ``queue`` that corresponds to ``start``."""
    if start == "earliest":
        return await offsets.min_offset(queue)
    if start == "latest":
        return await offsets.max_offset(queue)
    return await offsets.offset_at(queue, timestamp_ms(start))


def timestamp_ms(start: Start) -> int:
    """Milliseconds since 1970 of a start position that is a point in time."""
    if isinstance(start, dt.datetime):
        return int(start.timestamp() * 1000)
    assert isinstance(start, int)
    return start


def consume_from_where(start: Start) -> str:
    """RocketMQ's name for ``start``, as used in heartbeats."""
    if isinstance(start, str):
        return _NAMES_OF_ROCKETMQ[start]
    return "CONSUME_FROM_TIMESTAMP"
