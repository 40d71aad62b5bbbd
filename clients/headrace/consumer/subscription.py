"""What a consumer wants of a topic."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from headrace.errors import ConfigurationError
from headrace.messages import check_topic
from headrace_protocol.bodies import SubscriptionData
from headrace_protocol.message import TAGS, java_hash, property_value

if TYPE_CHECKING:
    from headrace_protocol.columns import RecordColumns

ALL = "*"
_OR = "||"
_TAGS = TAGS.encode()
# What no tag looks like; without a word a consumer would wait for it for ever.
_SQL = re.compile(r"\s([<>=]|!=|<>|<=|>=|and|or|is|in|not|between)\s", re.IGNORECASE)


class Subscription:
    """A topic and a tag expression: ``*`` or ``a || b``.

    The broker compares only hashes of tags, so what it lets through is checked again here.
    """

    def __init__(self, topic: str, expression: str = ALL) -> None:
        check_topic(topic)
        if not isinstance(expression, str):
            raise ConfigurationError(f"tags={expression!r} of {topic}: a text, {ALL!r} for all")
        if _SQL.search(expression):
            raise ConfigurationError(
                f"tags={expression!r} of {topic}: SQL92 filters are not there yet; name tags with "
                f"{_OR} between them"
            )
        self.topic = topic
        self.expression = expression.strip() or ALL
        parts = (part.strip() for part in self.expression.split(_OR))
        self.tags = frozenset(part for part in parts if part and part != ALL)
        self._raw_tags = frozenset(tag.encode() for tag in self.tags)
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

    def filter(self, columns: RecordColumns) -> RecordColumns:
        """What of ``columns`` has one of the tags."""
        if not self.tags:
            return columns
        kept = [
            index
            for index, properties in enumerate(columns.properties())
            if property_value(properties, _TAGS) in self._raw_tags
        ]
        return columns if len(kept) == len(columns) else columns.select(kept)
