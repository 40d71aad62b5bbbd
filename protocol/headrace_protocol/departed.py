"""Brokers that left: what a nameserver's answers say of them, and the request to forget one.

Only requests that ask for them get them, so the answers to Apache RocketMQ's clients stay the same.
Source: docs/protocol.md "Departed brokers"; tests/nameserver/test_departed.py.
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import Enum

import msgspec

from headrace_protocol.headers import Int32, Int64, RequestHeader


class Departure(Enum):
    """The way in which a broker left; the value is a phrase between its name and a time."""

    UNREGISTERED = "was shut down"
    DISCONNECTED = "closed its connection"
    SILENT = "is silent, last heard"
    RENAMED = "registered under another name"
    NOT_BACK = "has not registered since a start of the nameserver"


class DepartedBroker(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    """A broker that left, with its queues of one topic; in a list of brokers without queues.

    how: name of a Departure; newer nameservers may know more. since: ms since 1970.
    compacted: whether the topic is compacted there; None if it is not. topics: names of some of
    its topics, if the answer is not about one; topic_count: of all.
    """

    broker_name: str
    broker_addr: str = ""
    cluster: str = ""
    how: str = ""
    since: Int64 = 0
    read_queue_nums: Int32 = 0
    write_queue_nums: Int32 = 0
    perm: Int32 = 0
    compacted: bool | None = None
    topics: list[str] | None = None
    topic_count: Int32 | None = None

    @property
    def reason(self) -> str:
        """Its way of leaving: a phrase between its name and a time."""
        how = Departure.__members__.get(self.how)
        return how.value if how else "left"

    @property
    def left(self) -> str:
        """Its way of leaving, and the time of it."""
        return f"{self.reason} (since {time_text(self.since)})"


def time_text(timestamp_ms: int) -> str:
    """A time in ms since 1970, in words."""
    try:
        time = datetime.fromtimestamp(timestamp_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):  # of a forged answer
        return f"{timestamp_ms} ms"
    return f"{time:%Y-%m-%dT%H:%M:%SZ}"


class ClusterInfoHeader(RequestHeader, kw_only=True, gc=False):
    """GET_BROKER_CLUSTER_INFO (106). departed: headrace's, name the departed brokers, too."""

    departed: bool | None = None


class ForgetBrokerHeader(RequestHeader, kw_only=True, gc=False):
    """FORGET_BROKER (7680030)."""

    broker_name: str
