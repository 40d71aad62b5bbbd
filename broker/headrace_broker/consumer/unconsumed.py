"""Messages that subscribed groups have yet to consume, which the clean-up must keep."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from headrace_broker.consumer.groups import BROADCASTING

if TYPE_CHECKING:
    from collections.abc import (
        Awaitable,
        Callable,
        Container,
        Generator,
        Iterable,
        Iterator,
        Mapping,
    )

    from headrace_broker.consumer.groups import ConsumerManager
    from headrace_broker.consumer.offsets import ConsumerOffsets
    from headrace_broker.consumer.subscriptions import SubscriptionGroups
    from headrace_protocol.message import StoredMessage

# Groups or queues between two breaks, less than a millisecond.
_AT_ONCE = 256


class InnerConsumer(NamedTuple):
    """A service that consumes a system topic.

    name: for log lines, in the place of a group. next_offset: the queue offset of the oldest
    message of a queue that still waits, None for a queue that it does not read.
    carry_over: stores again what waits before a physical offset, so that its log file can go.
    due_ms: when a record of the topic goes to its own topic, 0 if that is undecided; None if it
    waits no more.
    """

    topic: str
    name: str
    next_offset: Callable[[int], int | None]
    carry_over: Callable[[int], Awaitable[None]] | None = None
    due_ms: Callable[[StoredMessage], int | None] = lambda _message: None


class UnconsumedOffsets:
    """The lowest unconsumed queue offsets of a topic; made for one scan of all queues.

    A group that exists and has committed offsets counts whether or not it is connected, unless its
    members subscribe to other topics only. A group without committed offsets counts while it is
    connected, from the offset it last pulled, else from 0. Groups of broadcasting consumers, which
    keep their offsets themselves, don't count.

    A static topic's queue may continue another one, in which a group has its offset. So a group
    without one there counts from 0 if it is connected, has committed offsets in the topic, or is
    expected; see ``ConsumerOffsets.expect``.

    Queues in which messages wait for the broker itself have its service in the place of a group.
    """

    def __init__(
        self,
        offsets: ConsumerOffsets,
        groups: SubscriptionGroups,
        consumers: ConsumerManager,
        waiting: Mapping[str, InnerConsumer] | None = None,
        later_queues: Callable[[str], Container[int]] = lambda _topic: (),
    ) -> None:
        """waiting: by topic, the service for which messages wait there.

        later_queues: of a topic, those that continue another queue.
        """
        self._waiting = waiting or {}
        self._later_queues = later_queues
        self._offsets = offsets
        self._groups = groups
        self._consumers = consumers
        # Kept for the last topic, since its queues come in several calls: its groups with and
        # without members, by queue id the lowest offset of one without, and its later queues.
        self._topic = ""
        self._connected: list[str] = []
        self._offline: list[str] = []
        self._offline_lowest: dict[int, tuple[int, str]] = {}
        self._later: Container[int] = ()

    def __call__(
        self, topic: str, queue_ids: Iterable[int]
    ) -> Generator[None, None, Mapping[int, tuple[int, str]]]:
        """By queue id, the lowest queue offset that a group has yet to consume, and the group.

        Yields now and then, since the work grows with queues and groups.
        """
        if (consumer := self._waiting.get(topic)) is not None:
            offsets = ((queue_id, consumer.next_offset(queue_id)) for queue_id in queue_ids)
            return {
                queue_id: (offset, consumer.name)
                for queue_id, offset in offsets
                if offset is not None
            }
        if topic != self._topic:
            yield from self._load_topic(topic)
        found: dict[int, tuple[int, str]] = {}
        for queue_id in queue_ids:
            lowest = yield from self._lowest(queue_id)
            if lowest is not None:
                found[queue_id] = lowest
        return found

    def _load_topic(self, topic: str) -> Iterator[None]:
        self._topic = topic
        self._later = self._later_queues(topic)
        connected = self._consumers.groups_of_topic(topic)
        self._connected = yield from self._counting(connected, topic)
        offline = self._offsets.groups_of(topic) - connected
        self._offline = yield from self._counting(offline, topic)
        self._offline_lowest = {}
        for group in self._offline:
            offsets = self._offsets.offsets_of(group, topic)
            for number, (queue_id, offset) in enumerate(offsets.items()):
                lowest = self._offline_lowest.get(queue_id, (offset, group))
                self._offline_lowest[queue_id] = min(lowest, (offset, group))
                if not number % _AT_ONCE:
                    yield

    def _counting(self, groups: Iterable[str], topic: str) -> Generator[None, None, list[str]]:
        counting = []
        for number, group in enumerate(sorted(groups), 1):
            if self.counts(group, topic):
                counting.append(group)
            if not number % _AT_ONCE:
                yield
        return counting

    def counts(self, group: str, topic: str) -> bool:
        """True if messages of a topic are kept until a group has consumed them."""
        if self._groups.get(group) is None:
            return False
        members = self._consumers.group(group)
        if members is None:
            return True
        if members.data.message_model == BROADCASTING:
            return False
        return members.may_read(topic)

    def _lowest(self, queue_id: int) -> Generator[None, None, tuple[int, str] | None]:
        lowest = self._offline_lowest.get(queue_id)
        is_later = queue_id in self._later
        groups = chain(self._connected, self._offline if is_later else ())
        for number, group in enumerate(groups, 1):
            if not number % _AT_ONCE:
                yield
            offset = self._offset(group, queue_id)
            if lowest is None or (offset, group) < lowest:
                lowest = offset, group
            if not offset:
                break
        return lowest

    def _offset(self, group: str, queue_id: int) -> int:
        offset = self._offsets.query(group, self._topic, queue_id)
        if offset is None and queue_id not in self._later:
            offset = self._offsets.query_pull(group, self._topic, queue_id)
        return offset or 0
