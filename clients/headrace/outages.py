"""A client's log lines about servers and topics that its retries wait for."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from headrace.errors import (
    AccessDenied,
    BrokerError,
    ConnectFailed,
    ConnectionLost,
    HeadraceError,
    MalformedAnswer,
    NameserverUnavailable,
    NoQueue,
    PartialAnswer,
    RequestTimeout,
    RouteNotFound,
)
from headrace_protocol.outages import Outages
from headrace_protocol.statictopic.mapping import NO_LEADER_BROKER

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from headrace.route import TopicRoute

_log = logging.getLogger("headrace.client")

_DENIALS_KEPT = 100
SILENT = (ConnectFailed, ConnectionLost, RequestTimeout)


def is_absence(error: HeadraceError) -> bool:
    """True if a broker does not answer, or has left the topic's route."""
    if isinstance(error, RouteNotFound):
        return error.retryable
    return isinstance(error, (*SILENT, NoQueue))


def broker(name: str) -> str:
    """The outage of a broker."""
    return "the leader of some queues" if name == NO_LEADER_BROKER else f"broker {name}"


def away(error: HeadraceError) -> str:
    """Name of what an error says is away."""
    if isinstance(error, NameserverUnavailable):
        return f"nameserver {', '.join(sorted(error.failures))}"
    address, topic = getattr(error, "address", ""), getattr(error, "topic", "")
    return f"broker at {address}" if address else f"topic {topic}" if topic else "the cluster"


def route_of(topic: str) -> str:
    """The outage of a route that a nameserver does not give."""
    return f"the route of topic {topic}"


class ClientOutages(Outages):
    """The outages of one client; each retry loop reports its errors, and whoever is answered.

    A broker is named as in routes, not by its address: it may come back at another one.

    on_denied: called once with each error that only an administrator, or another password, ends.
    """

    def __init__(self, nameservers: Sequence[str], now: Callable[[], float]) -> None:
        super().__init__(_log.warning, now)
        self.nameserver = f"nameserver {', '.join(sorted(nameservers))}"
        self._nameservers = frozenset(nameservers)
        self._names: dict[str, str] = {}
        self._brokers: dict[str, list[str]] = {}
        self.on_denied: Callable[[AccessDenied], object] = lambda _error: None
        self._denials: set[str] = set()

    def failed(self, name: str, reason: object, part: Hashable = None) -> None:
        """See Outages."""
        super().failed(name, reason, part)
        if isinstance(reason, AccessDenied):
            self.denied(reason)

    def denied(self, error: AccessDenied) -> None:
        """An attempt failed in a way that retries don't mend."""
        if str(error) not in self._denials:
            if len(self._denials) >= _DENIALS_KEPT:
                self._denials.clear()
            self._denials.add(str(error))
            self.on_denied(error)

    def know(self, route: TopicRoute) -> None:
        """Learn the names of a topic's brokers from its route, which is readable."""
        self.worked(route_of(route.topic))
        self._brokers[route.topic] = [*route.brokers] or self._brokers.get(route.topic, [])
        for name, replicas in route.brokers.items():
            self._names |= dict.fromkeys(replicas.values(), name)

    def report(
        self, error: HeadraceError, topic: str, broker_name: str = "", part: Hashable = None
    ) -> None:
        """An attempt failed that will be retried.

        broker_name: that of the queue in use, if it is known. part: see ``Outages.failed``.
        """
        name = self._away(error, topic, broker_name)
        self.failed(name, error, part if name.startswith("topic ") else None)

    def _away(self, error: HeadraceError, topic: str, broker_name: str) -> str:
        """Name of what is away."""
        if isinstance(error, NameserverUnavailable):
            return away(error)
        if getattr(error, "address", "") in self._nameservers:
            return route_of(topic)
        if isinstance(error, NoQueue) and error.broker_name:
            return broker(error.broker_name)
        if broker_name and is_absence(error):
            return broker(broker_name)
        if isinstance(error, PartialAnswer) and error.parts[0].broker:
            return broker(error.parts[0].broker)
        if isinstance(error, RouteNotFound | NoQueue):
            return self._away_of(topic)
        if isinstance(error, SILENT):
            return self.at(error.address)
        if isinstance(error, BrokerError | MalformedAnswer):
            return f"topic {topic} on {self.at(error.address)}"
        return f"topic {topic}"

    def _away_of(self, topic: str) -> str:
        """Name of the broker whose absence leaves a topic without queues; or of the topic."""
        brokers = [broker(name) for name in self._brokers.get(topic, [])]
        away = brokers if len(brokers) == 1 else [name for name in brokers if name in self.names]
        return away[0] if away else f"topic {topic}"

    def at(self, address: str) -> str:
        """The name of the broker at an address."""
        name = self._names.get(address)
        return broker(name) if name else f"broker at {address}"

    def answered(self, topic: str, address: str, part: Hashable = None) -> None:
        """A broker has served a request about a topic."""
        if self:
            name = self.at(address)
            self.worked(name)
            self.worked(f"topic {topic} on {name}", part)
            self.worked(f"topic {topic}", part)

    def leave(self, part: Hashable) -> None:
        """Nobody reads a queue any more."""
        for name in self.names:
            self.forget(name, part)
