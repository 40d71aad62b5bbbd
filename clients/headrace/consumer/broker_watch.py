"""Log lines about brokers that a consumer cannot reach: one when they go, one when they return."""

from __future__ import annotations

import logging

from headrace.errors import (
    ConnectFailed,
    ConnectionLost,
    HeadraceError,
    NoQueue,
    RequestTimeout,
    RouteNotFound,
)
from headrace_protocol.statictopic.mapping import NO_LEADER_BROKER

_log = logging.getLogger("headrace.consumer")


def is_absence(error: HeadraceError) -> bool:
    """Whether the error means that a broker does not answer, or has left the topic's route."""
    if isinstance(error, RouteNotFound):
        return error.retryable
    return isinstance(error, ConnectFailed | ConnectionLost | RequestTimeout | NoQueue)


class BrokerWatch:
    """The brokers that do not answer one consumer.

    absent: their names.
    """

    def __init__(self) -> None:
        self.absent: set[str] = set()

    def note_absent(self, broker_name: str, error: HeadraceError) -> None:
        """Log the broker's absence unless it is known."""
        if broker_name not in self.absent:
            self.absent.add(broker_name)
            _log.warning("%s does not answer, retrying: %s", _named(broker_name), error)

    def note_present(self, broker_name: str) -> None:
        """Log the return of an absent broker."""
        if broker_name in self.absent:
            self.absent.remove(broker_name)
            _log.warning("%s answers again", _named(broker_name))


def _named(broker_name: str) -> str:
    is_unknown = broker_name == NO_LEADER_BROKER
    return "the leader of some queues" if is_unknown else f"broker {broker_name}"
