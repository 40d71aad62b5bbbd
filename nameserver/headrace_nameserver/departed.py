"""The memory of brokers that left: what they had, and when and how they went.

A departed broker still has its messages, so an answer without it is only a part, and clients must
be able to tell. It is remembered until it registers again, a person says that it won't come back,
or the time is over. Bounded per host, so that no host evicts the brokers of another one.
Source: docs/protocol.md "Departed brokers"; tests/nameserver/test_departed.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from headrace_protocol.bounds import REGISTERED_TOPICS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace_protocol.bodies import QueueData
    from headrace_protocol.departed import Departure
    from headrace_protocol.statictopic.mapping import MappingInfo


class Limits(NamedTuple):
    """The most that is kept: of one broker, of those of one host, and of all.

    Sizes count topics and mapped queues. departed: of brokers that left. One of them has at most
    half of what its host may have.
    """

    size: int = REGISTERED_TOPICS_MAX
    brokers_of_host: int = 256
    brokers: int = 1024
    size_of_host: int = 4 * REGISTERED_TOPICS_MAX
    size_of_all: int = 16 * REGISTERED_TOPICS_MAX
    departed_of_host: int = 256
    departed: int = 1024
    departed_size_of_host: int = 2 * REGISTERED_TOPICS_MAX
    departed_size: int = 4 * REGISTERED_TOPICS_MAX


LIMITS = Limits()


class Departed(msgspec.Struct):
    """A broker without a live address.

    host: the one that it registered from. since_ms: on the clock of the table.
    queues, mappings: by topic. compacted: the topics that keep the newest message of each key.
    """

    name: str
    cluster: str
    address: str
    host: str
    how: Departure
    since_ms: int
    queues: dict[str, QueueData] = {}
    mappings: dict[str, MappingInfo] = {}
    compacted: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        """The number of topics and mapped queues that counts towards the limits."""
        return len(self.queues) + mapped_queues(self.mappings)


def mapped_queues(mappings: dict[str, MappingInfo]) -> int:
    """The number of mapped queues that counts towards the limits."""
    return sum(1 + len(info.curr_id_map) for info in mappings.values())


class DepartedBrokers:
    """Departed brokers by name, the longest away first.

    keep_ms: how long a broker is remembered. change_count: grows with each change.
    """

    def __init__(self, keep_ms: int, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self._keep_ms = keep_ms
        self._brokers: dict[str, Departed] = {}
        # Counted once: many brokers may leave in one step, each with many mapped queues.
        self._sizes: dict[str, int] = {}
        self.change_count = 0

    def __len__(self) -> int:
        return len(self._brokers)

    def __iter__(self) -> Iterator[Departed]:
        return iter(self._brokers.values())

    def get(self, name: str) -> Departed | None:
        """A departed broker."""
        return self._brokers.get(name)

    def with_topic(self, topic: str) -> list[Departed]:
        """The departed brokers that had a topic, the latest first."""
        return [each for each in reversed(self._brokers.values()) if topic in each.queues]

    def add(self, broker: Departed) -> None:
        """Remember a broker; forget others, the longest away first, beyond the limits."""
        self._brokers.pop(broker.name, None)
        self._brokers[broker.name] = broker
        self._sizes[broker.name] = broker.size
        self.change_count += 1
        of_host = [name for name, each in self._brokers.items() if each.host == broker.host]
        self._shrink(of_host, self.limits.departed_of_host, self.limits.departed_size_of_host)
        self._shrink(list(self._brokers), self.limits.departed, self.limits.departed_size)

    def _shrink(self, names: list[str], count_max: int, size_max: int) -> None:
        size = sum(map(self._sizes.__getitem__, names))
        for index, name in enumerate(names):
            if len(names) - index <= count_max and size <= size_max:
                return
            size -= self._sizes[name]
            self.forget(name)

    def forget(self, name: str) -> bool:
        """Forget a broker; returns whether it was remembered."""
        if self._brokers.pop(name, None) is None:
            return False
        del self._sizes[name]
        self.change_count += 1
        return True

    def expire(self, now_ms: int) -> list[Departed]:
        """Forget brokers that left too long ago; returns them."""
        gone = [each for each in self if each.since_ms + self._keep_ms <= now_ms]
        for each in gone:
            self.forget(each.name)
        return gone

    def delete_topic(self, topic: str, cluster: str | None) -> None:
        """Forget a topic, everywhere or in one cluster: nothing of it is missing any more."""
        for each in self:
            if cluster in {None, each.cluster}:
                removed = each.queues.pop(topic, None), each.mappings.pop(topic, None)
                if any(removed):
                    self._sizes[each.name] = each.size
        self.change_count += 1


class Known(NamedTuple):
    """A copy of what is saved. live: brokers that have not left, as if they had."""

    departed: list[Departed]
    live: list[Departed]
