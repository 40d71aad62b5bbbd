"""What a consumer wants of a topic."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from headrace.messages import check_topic
from headrace_protocol.bodies import SubscriptionData
from headrace_protocol.message import java_hash

if TYPE_CHECKING:
    from headrace.messages import MessageBatch

ALL = "*"
_OR = "||"


class Subscription:
    """A topic and a tag expression: ``*`` or ``a || b``.

    The broker compares only hashes of tags, so what it lets through is checked again here.
    """

    def __init__(self, topic: str, expression: str = ALL) -> None:
        check_topic(topic)
        self.topic = topic
        self.expression = expression.strip() or ALL
        parts = (part.strip() for part in self.expression.split(_OR))
        self.tags = frozenset(part for part in parts if part and part != ALL)
        self.version = time.time_ns() // 1_000_000

    def data(self) -> SubscriptionData:
        """The subscription as heartbeats tell it."""
        tags = sorted(self.tags)
        return SubscriptionData(
            topic=self.topic,
            sub_string=self.expression,
            tags_set=tags,
            code_set=[java_hash(tag) for tag in tags],
            sub_version=self.version,
        )

    def filter(self, batch: MessageBatch) -> None:
        """Drop from ``batch`` what has none of the tags."""
        if self.tags:
            batch.keep(lambda message: message.tag in self.tags)
