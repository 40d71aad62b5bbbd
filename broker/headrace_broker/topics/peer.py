"""Kinds of topics that Apache RocketMQ serves and this broker does not.

A store written by Apache's broker may hold them. They are left as they are, so that Apache's broker
finds them intact. Source: docs/store-format.md "Stores of Apache RocketMQ";
tests/conformance/test_store_both_ways.py.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from headrace_broker.topics.attributes import QUEUE_TYPE
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError

if TYPE_CHECKING:
    from headrace_protocol.bodies import TopicConfig


class PeerKind(Enum):
    """A kind of topic that only Apache's broker serves; values are texts for users."""

    INNER_BATCH = "a topic of inner batches (queue.type=BatchCQ)"

    def rejection(self, topic: str, reason: str) -> RequestError:
        """The error for a request that only Apache's broker can serve."""
        return RequestError(
            ResponseCode.NO_PERMISSION,
            f"topic[{topic}] is {self.value}, which this broker keeps for Apache RocketMQ: "
            f"{reason}; start Apache's broker on this store for it, or use another topic",
        )


def kind_of(topic: TopicConfig) -> PeerKind | None:
    """The peer's kind of a topic; None for a topic that this broker serves."""
    if topic.attributes.get(QUEUE_TYPE) == "BatchCQ":
        return PeerKind.INNER_BATCH
    return None
