"""What the Spark source and sink raise: on the driver wherever it can be known there."""

from __future__ import annotations

import copyreg
from typing import Any

from headrace.errors import HeadraceError


class SparkConnectorError(HeadraceError):
    """Base of the errors below; they can be pickled, as Spark carries them between processes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class OptionError(SparkConnectorError, ValueError):
    """An option that is unknown, missing or has a value that cannot work.

    nearest: the option that was probably meant.
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
    """A schema of bodies, or of rows to write, that does not fit."""


class TopicNotFound(SparkConnectorError):
    """No broker has a topic that was asked for."""

    refresh_route = True


class BrokerMissing(SparkConnectorError):
    """A broker that a query can't go on without is away."""


class OffsetOutOfRange(SparkConnectorError, ValueError):
    """An offset that was asked for lies outside of its queue."""


class DataLoss(SparkConnectorError):
    """Messages that were to be read are gone.

    The message names the queue, what is missing and how to go on without it.
    """

    def __init__(
        self, topic: str, broker: str, queue_id: int, first_missing: int, found: str
    ) -> None:
        super().__init__(
            f"{topic}/{broker}/{queue_id} has no message at offset {first_missing} any more: "
            f"{found}. Read on without it with option failOnDataLoss=false"
        )
        self.topic = topic
        self.broker = broker
        self.queue_id = queue_id
        self.first_missing = first_missing


class TopicRecreated(SparkConnectorError):
    """A topic was deleted and made anew since the checkpoint was written."""

    def __init__(self, topic: str, broker: str, reason: str) -> None:
        super().__init__(
            f"topic {topic} on broker {broker} is not the one that was read before: {reason}. It "
            "was deleted and made anew, or its broker lost its store. Begin with a new "
            "checkpointLocation, or read what there is now with option failOnDataLoss=false"
        )
        self.topic = topic
        self.broker = broker


class TopicDeleted(SparkConnectorError):
    """Topics that a query reads were deleted, so that nothing is left to read."""

    def __init__(self, topics: str, brokers: str) -> None:
        super().__init__(
            f"topic {topics} was deleted ({brokers} does not have it any more), and what was not "
            "read of it is gone. Begin with a new checkpointLocation, or create the topic again "
            "and read what comes with option failOnDataLoss=false"
        )


class CheckpointMismatch(SparkConnectorError):
    """A checkpoint that belongs to another source."""
