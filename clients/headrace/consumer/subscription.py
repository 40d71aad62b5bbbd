"""A consumer's subscription to a topic."""

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
# No tag looks like this. Without an error, the consumer would wait forever for such a tag.
_SQL = re.compile(r"\s([<>=]|!=|<>|<=|>=|and|or|is|in|not|between)\s", re.IGNORECASE)


class Subscription:
    """A topic and a tag expression: ``*`` or ``a || b``.

    The broker compares only hashes of tags, so ``filter`` checks the tags again here.
    """

    def __init__(self, topic: str, expression: str = ALL) -> None:
        check_topic(topic)
        if not isinstance(expression, str):
            raise ConfigurationError(
                f"tags={expression!r} of {topic}: must be a str; {ALL!r} means all tags"
            )
        if _SQL.search(expression):
            raise ConfigurationError(
                f"tags={expression!r} of {topic}: SQL92 filters are not supported yet; list tags, "
                f"separated by {_OR}"
            )
        self.topic = topic
        self.expression = expression.strip() or ALL
        parts = (part.strip() for part in self.expression.split(_OR))
        self.tags = frozenset(part for part in parts if part and part != ALL)
        self._raw_tags = frozenset(tag.encode() for tag in self.tags)
        self.version = time.time_ns() // 1_000_000

    def data(self) -> SubscriptionData:
        """The subscription in the form that heartbeats carry."""
        tags = sorted(self.tags)
        return SubscriptionData(
            topic=self.topic,
            sub_string=self.expression,
            tags_set=tags,
            code_set=[java_hash(tag) for tag in tags],
            sub_version=self.version,
        )

    def filter(self, columns: RecordColumns) -> RecordColumns:
        """The messages in ``columns`` that have one of the tags."""
        if not self.tags:
            return columns
        kept = [
            index
            for index, properties in enumerate(columns.properties())
            if property_value(properties, _TAGS) in self._raw_tags
        ]
        return columns if len(kept) == len(columns) else columns.select(kept)
