"""What subscribed groups have yet to consume, for those who remove messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.consumer.groups import BROADCASTING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from headrace_broker.consumer.groups import ConsumerManager
    from headrace_broker.consumer.offsets import ConsumerOffsets
    from headrace_broker.consumer.subscriptions import SubscriptionGroups


class UnconsumedLook:
    """One look at the progress of all groups.

    A group that exists and has committed offsets counts whether or not it is connected, unless its
    members say that they want other topics. One that has committed nothing counts while it is
    connected, from where it has pulled, else from the beginning. Members that each read
    everything keep their offsets themselves, so their groups don't count.
    """

    def __init__(
        self, offsets: ConsumerOffsets, groups: SubscriptionGroups, consumers: ConsumerManager
    ) -> None:
        self._offsets = offsets
        self._groups = groups
        self._consumers = consumers
        self._subscribed = consumers.groups_by_topic()

    def __call__(self, topic: str, queue_ids: Iterable[int]) -> Mapping[int, tuple[int, str]]:
        """By queue id, the lowest queue offset that some group has yet to consume, and its name."""
        lowest: dict[int, tuple[int, str]] = {}
        connected = self._subscribed.get(topic, set())
        for group in self._offsets.groups_of(topic) | connected:
            if not self._counts(group, topic):
                continue
            for queue_id in queue_ids:
                offset = self._offset(group, topic, queue_id, is_connected=group in connected)
                if offset is not None:
                    lowest[queue_id] = min(lowest.get(queue_id, (offset, group)), (offset, group))
        return lowest

    def _counts(self, group: str, topic: str) -> bool:
        if self._groups.get(group) is None:
            return False
        members = self._consumers.group(group)
        if members is None:
            return True
        if members.data.message_model == BROADCASTING:
            return False
        # Without any, its members choose queues themselves and may read this topic.
        return not members.subscriptions or topic in members.subscriptions

    def _offset(self, group: str, topic: str, queue_id: int, *, is_connected: bool) -> int | None:
        offset = self._offsets.query(group, topic, queue_id)
        if offset is None and is_connected:
            offset = self._offsets.query_pull(group, topic, queue_id) or 0
        return offset
