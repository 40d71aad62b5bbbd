"""What the clients raise. A retry loop needs only ``retryable`` and ``refresh_route``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace_protocol.drivers.errors import (
    BrokerError,
    ConnectFailed,
    ConnectionLost,
    HeadraceError,
    MalformedAnswer,
    RequestTimeout,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace_protocol.bodies import MessageQueue

__all__ = [
    "BrokerError",
    "ClientClosed",
    "ConfigurationError",
    "ConnectFailed",
    "ConnectionLost",
    "HeadraceError",
    "InvalidMessage",
    "MalformedAnswer",
    "NameserverUnavailable",
    "NoQueue",
    "OffsetNotFound",
    "PipelineError",
    "RequestTimeout",
    "RouteNotFound",
]


class ConfigurationError(HeadraceError, ValueError):
    """A setting or argument that cannot work."""


class InvalidMessage(HeadraceError, ValueError):
    """A message that no broker would take."""


class ClientClosed(HeadraceError):
    """The client is used outside its ``async with`` block."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is not open: use it inside `async with {what}(...)`")


class NameserverUnavailable(HeadraceError):
    """None of the nameservers answered.

    failures: what went wrong, by address.
    """

    retryable = True

    def __init__(self, failures: Mapping[str, Exception]) -> None:
        reasons = "; ".join(str(error) for error in failures.values())
        super().__init__(f"no nameserver answered: {reasons}")
        self.failures = dict(failures)


class RouteNotFound(HeadraceError):
    """The nameserver knows no broker with this topic."""

    refresh_route = True

    def __init__(self, topic: str, remark: str | None = None) -> None:
        super().__init__(
            f"topic {topic} is on no broker that the nameserver knows"
            + (f" ({remark})" if remark else "")
            + f": create it with `headrace topic create {topic}`"
        )
        self.topic = topic


class NoQueue(HeadraceError):
    """The topic has a route, but no queue for what is wanted."""

    retryable = True
    refresh_route = True

    def __init__(self, topic: str, wanted: str) -> None:
        super().__init__(
            f"topic {topic} has no queue to {wanted} now: there is none, its perm, or its brokers' "
            f"perm, forbids it, or no master is up (see `headrace topic describe {topic}`)"
        )
        self.topic = topic


class OffsetNotFound(HeadraceError):
    """A queue has nothing at an offset that was to be read."""

    def __init__(
        self, queue: MessageQueue, queue_offset: int, min_offset: int, max_offset: int
    ) -> None:
        super().__init__(
            f"{queue.topic}/{queue.broker_name}/{queue.queue_id} has nothing at offset "
            f"{queue_offset}: it has {min_offset} to {max_offset}, without the last; older "
            "messages are deleted with their log files"
        )
        self.queue = queue
        self.queue_offset = queue_offset
        self.min_offset = min_offset
        self.max_offset = max_offset


class PipelineError(HeadraceError):
    """Messages of a pipeline that were not stored, retries included.

    failures: (message, error) pairs, in the order of failing.
    """

    def __init__(self, failures: Sequence[tuple[Any, HeadraceError]]) -> None:
        super().__init__(
            f"{len(failures)} messages of the pipeline were not sent; the first because: "
            f"{failures[0][1]}"
        )
        self.failures = list(failures)
