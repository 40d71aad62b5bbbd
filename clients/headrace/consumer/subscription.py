"""A consumer's subscription to a topic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from headrace.errors import ConfigurationError
from headrace.names import check_topic
from headrace.values import ALL_TAGS, OR, TRIMMED, encoded_text, looks_like_sql, now_ms, shown
from headrace_protocol.bodies import SubscriptionData
from headrace_protocol.java_hash import java_hash
from headrace_protocol.message import TAGS, property_value

if TYPE_CHECKING:
    from headrace_protocol.columns import RecordColumns

ALL = ALL_TAGS
_TAGS = TAGS.encode()


class Subscription:
    """A topic and a tag expression: ``*`` or ``a || b``.

    The broker compares only hashes of tags, so ``filter`` checks the tags again here.
    """

    def __init__(self, topic: str, expression: str = ALL) -> None:
        self.topic = check_topic(topic)
        if not isinstance(expression, str):
            raise ConfigurationError(
                f"tags={shown(expression)} of {topic}: must be a str; {ALL!r} means all tags"
            )
        self.expression = str.__str__(expression).strip(TRIMMED) or ALL
        self.tags = frozenset() if self.expression == ALL else self._listed()
        self._raw_tags = frozenset(tag.encode() for tag in self.tags)
        self.version = now_ms()

    def _listed(self) -> frozenset[str]:
        """The tags of an expression that lists them. Raises ConfigurationError."""
        given = f"tags={shown(self.expression)} of {self.topic}"
        encoded_text(self.expression, given, ConfigurationError)
        if looks_like_sql(self.expression):
            raise ConfigurationError(
                f"{given}: SQL92 filters are not supported yet; list tags, separated by {OR}"
            )
        tags = {part.strip(TRIMMED) for part in self.expression.split(OR)} - {""}
        if not tags:
            raise ConfigurationError(f"{given} lists no tag; {ALL!r} means all tags")
        if ALL in tags:
            raise ConfigurationError(
                f"{given}: {ALL!r} means all tags, so it cannot be listed with others"
            )
        return frozenset(tags)

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


def subscriptions_of(
    group: str, topics: str | Iterable[str] | Mapping[str, str]
) -> list[Subscription]:
    """A subscription for each topic that a group reads. Raises ConfigurationError."""
    if isinstance(topics, str):
        topics = {topics: ALL}
    elif not isinstance(topics, Mapping):
        if not isinstance(topics, Iterable):
            raise ConfigurationError(
                f"topics={topics!r}: must be a topic, several topics, or a mapping {{topic: tags}}"
            )
        topics = dict.fromkeys(topics, ALL)
    if not topics:
        raise ConfigurationError(f"group {group} subscribes to no topic")
    return [Subscription(topic, expression) for topic, expression in topics.items()]
