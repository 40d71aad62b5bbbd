"""A broker as its registrations describe it, and the changes that the next one makes.

Source: docs/protocol.md "Registration"; tests/nameserver/test_routes.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from headrace_nameserver.departed import mapped_queues
from headrace_protocol.bounds import OutOfBounds

if TYPE_CHECKING:
    from headrace_nameserver.registrations import BrokerTopics
    from headrace_protocol.bodies import BrokerData, DataVersion, QueueData
    from headrace_protocol.channel import Channel
    from headrace_protocol.statictopic.mapping import MappingInfo


class LiveBroker(msgspec.Struct):
    """A registered broker address."""

    name: str
    cluster: str
    address: str
    ha_address: str
    data_version: DataVersion
    channel: Channel
    timeout_ms: int
    last_heard_ms: int

    @property
    def expires_ms(self) -> int:
        """The time at which the broker expires unless heard from."""
        return self.last_heard_ms + self.timeout_ms


class Broker(msgspec.Struct):
    """A broker, with the state shared by all of its addresses.

    queues, mappings: by topic. compacted: the topics that keep the newest message of each key.
    """

    data: BrokerData
    queues: dict[str, QueueData] = {}
    mappings: dict[str, MappingInfo] = {}
    compacted: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        """The number of topics and mapped queues that counts towards the limits."""
        return len(self.queues) + mapped_queues(self.mappings)

    def fits(self, topics: BrokerTopics, size_max: int) -> bool:
        """True if a broker's known and new topics together are within the limit.

        A registration need not name all topics, so deleted topics stay until the limit is reached.
        """
        added = topics.queues.keys() - self.queues.keys()
        return len(self.queues) + len(added) <= size_max

    def size_with(self, topics: BrokerTopics, size_max: int) -> int:
        """A broker's size after registering ``topics``. Raises OutOfBounds."""
        fits = self.fits(topics, size_max)
        queues = self.queues.keys() | topics.queues.keys() if fits else topics.queues
        mapped_count = mapped_queues(self.mappings_after(topics))
        # A single topic is an update, which must not replace the others.
        if mapped_count > size_max or not (fits or len(queues) > 1):
            raise OutOfBounds(
                f"broker {self.data.broker_name} with {len(self.queues)} topics: "
                f"the maximum is {size_max} topics and mapped queues"
            )
        return len(queues) + mapped_count

    def names_all(self, topics: BrokerTopics) -> bool:
        """True if a registration names all topics of a broker.

        A change names only the topics that changed. Every broker has a topic of its own name, so a
        registration that has it beside others names all.
        """
        return len(topics.queues) > 1 and self.data.broker_name in topics.queues

    def mappings_after(self, topics: BrokerTopics) -> dict[str, MappingInfo]:
        """A broker's mappings after registering ``topics``: a topic without one is not static."""
        if self.names_all(topics):
            return topics.mappings
        others = {t: info for t, info in self.mappings.items() if t not in topics.queues}
        return others | topics.mappings

    def deleted_static_topics(self, topics: BrokerTopics) -> set[str]:
        """Static topics that a registration of all topics omits; they must not look plain."""
        if not self.names_all(topics):
            return set()
        return self.mappings.keys() - topics.queues.keys()


def host_of(channel: Channel) -> str:
    """The host at the other end of a connection."""
    return channel.address.rpartition(":")[0]
