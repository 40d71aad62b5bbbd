"""A consumer's subscription to a topic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace.errors import ConfigurationError
from headrace.names import check_topic
from headrace.values import ALL_TAGS, OR, TRIMMED, encoded_text, looks_like_sql, now_ms, shown
from headrace_protocol.bodies import SubscriptionData
from headrace_protocol.java_hash import java_hash
from headrace_protocol.message import TAGS, property_value

if TYPE_CHECKING:
    from headrace_protocol.columns import RecordColumns

ALL = ALL_TAGS
TAG: Final = "TAG"
SQL92: Final = "SQL92"
_TAGS = TAGS.encode()


# SQL92 conditions: one for all topics, or one for each.
Filters = str | Mapping[str, str] | None


class Choice(NamedTuple):
    """The messages of a topic that a reader wants; see ``Subscription``."""

    tags: str = ALL
    filter: str | None = None


class Subscription:
    """A topic and a tag expression, ``*`` or ``a || b``, or a SQL92 filter.

    The broker compares only hashes of tags, so ``filter`` checks the tags again here. Filters are
    left to the broker. kind: TAG or SQL92.
    """

    def __init__(self, topic: str, expression: str = ALL, sql: str | None = None) -> None:
        """sql: a condition on properties, instead of tags."""
        self.topic = check_topic(topic)
        self.kind = TAG if sql is None else SQL92
        if not isinstance(expression, str):
            raise ConfigurationError(
                f"tags={shown(expression)} of {topic}: must be a str; {ALL!r} means all tags"
            )
        self.expression = str.__str__(expression).strip(TRIMMED) or ALL
        self.tags = frozenset() if self.expression == ALL else self._listed()
        if sql is not None:
            self.expression = self._checked(sql)
        self._raw_tags = frozenset(tag.encode() for tag in self.tags)
        self.version = now_ms()

    def _listed(self) -> frozenset[str]:
        """The tags of an expression that lists them. Raises ConfigurationError."""
        given = f"tags={shown(self.expression)} of {self.topic}"
        encoded_text(self.expression, given, ConfigurationError)
        if looks_like_sql(self.expression):
            raise ConfigurationError(
                f"{given}: this is a SQL92 filter, pass it as filter=; or list tags, separated "
                f"by {OR}"
            )
        tags = {part.strip(TRIMMED) for part in self.expression.split(OR)} - {""}
        if not tags:
            raise ConfigurationError(f"{given} lists no tag; {ALL!r} means all tags")
        if ALL in tags:
            raise ConfigurationError(
                f"{given}: {ALL!r} means all tags, so it cannot be listed with others"
            )
        return frozenset(tags)

    def _checked(self, sql: str) -> str:
        """A filter that can be parsed. Raises ConfigurationError."""
        given = f"filter={shown(sql)} of {self.topic}"
        if not isinstance(sql, str):
            raise ConfigurationError(f'{given}: must be a str, such as "price > 5"')
        if self.tags:
            raise ConfigurationError(
                f"{given} with tags={shown(self.expression)}: give one of them, or write "
                "TAGS IN ('a', 'b') in the filter"
            )
        encoded_text(sql, given, ConfigurationError)
        from headrace_protocol.filters.expression import compiled
        from headrace_protocol.filters.tokens import FilterError

        try:
            return compiled(str.__str__(sql)).text
        except FilterError as error:
            raise ConfigurationError(f"{given}: {error}") from None

    def data(self) -> SubscriptionData:
        """The subscription in the form that heartbeats carry."""
        tags = sorted(self.tags)
        return SubscriptionData(
            topic=self.topic,
            sub_string=self.expression,
            expression_type=self.kind,
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


def expressions_of(topics: str | Iterable[str] | Mapping[str, str]) -> Mapping[str, str]:
    """Topics as callers give them, with the tag expression of each. Raises ConfigurationError."""
    if isinstance(topics, str):
        return {topics: ALL}
    if isinstance(topics, Mapping):
        return topics
    if isinstance(topics, Iterable):
        return dict.fromkeys(topics, ALL)
    raise ConfigurationError(
        f"topics={topics!r}: must be a topic, several topics, or a mapping {{topic: tags}}"
    )


def subscriptions_of(
    group: str, topics: str | Iterable[str] | Mapping[str, str], filters: Filters = None
) -> list[Subscription]:
    """A subscription for each topic that a group reads. Raises ConfigurationError."""
    topics = expressions_of(topics)
    if not topics:
        raise ConfigurationError(f"group {group} subscribes to no topic")
    if not isinstance(filters, Mapping):
        filters = {} if filters is None else dict.fromkeys(topics, filters)
    if unknown := [topic for topic in filters if topic not in topics]:
        raise ConfigurationError(
            f"filter={filters!r}: group {group} does not subscribe to {unknown[0]!r}"
        )
    return [
        Subscription(topic, expression, filters.get(topic)) for topic, expression in topics.items()
    ]
