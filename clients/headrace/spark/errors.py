"""Errors of the Spark source and sink, raised on the driver wherever possible."""

from __future__ import annotations

from headrace.errors import HeadraceError


class SparkConnectorError(HeadraceError):
    """Base of the errors below."""


class OptionError(SparkConnectorError, ValueError):
    """An option that is unknown, missing or has an invalid value.

    nearest: the option that was probably meant, if any.
    """

    def __init__(
        self, option: str, value: str | None, reason: str, nearest: str | None = None
    ) -> None:
        given = f"option {option}" if value is None else f"option {option}={value!r}"
        hint = f"; did you mean {nearest}?" if nearest else ""
        super().__init__(f"{given}: {reason}{hint}")
        self.option = option
        self.value = value
        self.reason = reason
        self.nearest = nearest


class SchemaError(SparkConnectorError, ValueError):
    """An invalid schema of message bodies or of rows to write."""


class TopicNotFound(SparkConnectorError):
    """No broker has a requested topic."""

    refresh_route = True


class BrokerMissing(SparkConnectorError):
    """A broker that a query depends on is unreachable."""


class OffsetOutOfRange(SparkConnectorError, ValueError):
    """A requested offset lies outside its queue."""


class DataLoss(SparkConnectorError):
    """Messages that were to be read no longer exist.

    The text names the queue, the missing messages and the option that skips them.
    """

    def __init__(
        self, topic: str, broker: str, queue_id: int, first_missing: int, found: str
    ) -> None:
        super().__init__(
            f"{topic}/{broker}/{queue_id} no longer has a message at offset {first_missing}: "
            f"{found}. To skip lost messages, set option failOnDataLoss=false"
        )
        self.topic = topic
        self.broker = broker
        self.queue_id = queue_id
        self.first_missing = first_missing


class KeyInTwoQueues(SparkConnectorError):
    """A key of a table has messages in two queues, so its newest value is unknown."""

    def __init__(self, key: str, one: str, other: str) -> None:
        super().__init__(
            f"key {key!r} has messages in {one} and in {other}: its writers choose queues in "
            "different ways, or the number of queues has changed. Only messages of one queue have "
            "an order: write the table anew to a topic with a fixed number of queues"
        )
        self.key = key


class TopicRecreated(SparkConnectorError):
    """A topic was deleted and recreated after the checkpoint was written."""

    def __init__(self, topic: str, broker: str, reason: str) -> None:
        super().__init__(
            f"topic {topic} on broker {broker} is not the one that was read before: {reason}. It "
            "was deleted and recreated, or its broker lost its store. Start with a new "
            "checkpointLocation, or read its current messages with option failOnDataLoss=false"
        )
        self.topic = topic
        self.broker = broker


class TopicDeleted(SparkConnectorError):
    """The topics of a query were deleted, so nothing is left to read."""

    def __init__(self, topics: str, brokers: str) -> None:
        super().__init__(
            f"topic {topics} was deleted ({brokers} no longer has it), and its unread messages are "
            "lost. Start with a new checkpointLocation, or recreate the topic and read its new "
            "messages with option failOnDataLoss=false"
        )


class CheckpointMismatch(SparkConnectorError):
    """A checkpoint that belongs to another source."""


class TierGone(SparkConnectorError):
    """Bytes of a tier that were merged, moved or expired meanwhile, or are not those written."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path} in the tier: {reason}")


class TierUnreachable(SparkConnectorError):
    """A tier that this machine can't read."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"the tier can't be read at {path}: {reason}")
