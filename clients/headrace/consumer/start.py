"""The start position of a group that has committed nothing yet."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Literal

from headrace.errors import ConfigurationError
from headrace.values import is_int, plain_int, shown

if TYPE_CHECKING:
    from headrace.consumer.offset_store import OffsetStore
    from headrace_protocol.bodies import MessageQueue

Start = Literal["earliest", "latest"] | dt.datetime | int

# A group that has committed nothing yet misses no message.
DEFAULT_START: Start = "earliest"
_OFFSET_END = 2**63
_NAMES_OF_ROCKETMQ: dict[Literal["earliest", "latest"], str] = {
    "earliest": "CONSUME_FROM_FIRST_OFFSET",
    "latest": "CONSUME_FROM_LAST_OFFSET",
}


def check_start(start: Start) -> Start:
    """The plain value of a start position. Raises ConfigurationError unless it is a valid one."""
    if isinstance(start, dt.datetime):
        if start.utcoffset() is None:
            raise ConfigurationError(f"start={start}: a datetime needs a time zone")
        return start
    if is_int(start):
        return plain_int(start, "start")
    for name in _NAMES_OF_ROCKETMQ:
        if isinstance(start, str) and str.__str__(start) == name:
            return name
    raise ConfigurationError(
        f"start={shown(start)}: must be 'earliest', 'latest', a datetime or milliseconds since 1970"
    )


def check_offset(offset: int) -> int:
    """The plain number of a queue offset, at least 0. Raises ConfigurationError if it is none."""
    plain = plain_int(offset, "offset", ConfigurationError)
    if plain >= _OFFSET_END:
        raise ConfigurationError(f"offset={plain}: must be less than {_OFFSET_END}")
    return max(0, plain)


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
