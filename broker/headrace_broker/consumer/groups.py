"""Who is connected: members of consumer groups with what they want, and producers.

A client is known by its channel. Members tell by heartbeats that they are alive; whoever falls
silent is dropped, and the others of its group are told to share the queues anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.headers import ConsumerGroupHeader
from headrace_protocol.serving import notice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace_broker.consumer.subscriptions import SubscriptionGroups
    from headrace_protocol.bodies import ConsumerData, SubscriptionData
    from headrace_protocol.serving import Channel

MEMBER_LIFE_MS = 120_000
BROADCASTING = "BROADCASTING"


class Member(msgspec.Struct):
    """A client as its heartbeats describe it. language: name; version: as in its frames."""

    channel: Channel
    client_id: str
    language: str
    version: int


class _Members:
    """Members of groups, with the time that each was last heard, the most silent first."""

    def __init__(self) -> None:
        self.groups: dict[str, dict[Channel, Member]] = {}
        self._heard_ms: dict[tuple[str, Channel], int] = {}
        self._groups_of: dict[Channel, set[str]] = {}

    def heard(self, group: str, member: Member, now_ms: int) -> bool:
        """Note that a member is alive; whether it is new, or has another client id than before."""
        channel = member.channel
        members = self.groups.setdefault(group, {})
        known = members.get(channel)
        members[channel] = member
        self._groups_of.setdefault(channel, set()).add(group)
        self._heard_ms.pop((group, channel), None)
        self._heard_ms[group, channel] = now_ms
        return known is None or known.client_id != member.client_id

    def remove(self, group: str, channel: Channel) -> bool:
        """Forget a member; whether it was one."""
        if self._heard_ms.pop((group, channel), None) is None:
            return False
        self._groups_of[channel].discard(group)
        if not self._groups_of[channel]:
            del self._groups_of[channel]
        members = self.groups[group]
        del members[channel]
        if not members:
            del self.groups[group]
        return True

    def groups_of(self, channel: Channel) -> set[str]:
        return set(self._groups_of.get(channel, ()))

    def silent(self, now_ms: int) -> Iterator[tuple[str, Channel]]:
        """Members that have been silent for too long."""
        for key, heard_ms in list(self._heard_ms.items()):
            if now_ms - heard_ms <= MEMBER_LIFE_MS:
                return
            yield key


class ConsumerGroup:
    """What the members of a group have in common; all of them must say the same.

    subscriptions: by topic.
    """

    def __init__(self, data: ConsumerData) -> None:
        self.data = data
        self.subscriptions: dict[str, SubscriptionData] = {}

    def update(self, data: ConsumerData) -> tuple[bool, bool]:
        """Take over what a member says: whether anything, and whether the topics, changed.

        Of two that disagree about a topic, the newer version counts.
        """
        before = dict(self.subscriptions)
        wanted = {item.topic: item for item in data.subscription_data_set}
        self.subscriptions = {
            topic: _newer(before.get(topic), item) for topic, item in wanted.items()
        }
        self.data = data
        return before != self.subscriptions, before.keys() != self.subscriptions.keys()


def _newer(known: SubscriptionData | None, said: SubscriptionData) -> SubscriptionData:
    return said if known is None or said.sub_version > known.sub_version else known


class ConsumerManager:
    """Consumer groups with somebody in them.

    change_count: grows when a subscription changes, for those who keep what they looked up.
    """

    def __init__(self, groups: SubscriptionGroups) -> None:
        self.change_count = 0
        self._settings = groups
        self._members = _Members()
        self._groups: dict[str, ConsumerGroup] = {}

    def heartbeat(
        self, member: Member, data: ConsumerData, now_ms: int, *, with_subscriptions: bool = True
    ) -> None:
        """A member says that it is alive and what it wants; tells its group when that is news.

        with_subscriptions: False for a heartbeat that leaves them out, as unchanged.
        """
        group = self._groups.get(data.group_name)
        if group is None:
            group = self._groups[data.group_name] = ConsumerGroup(data)
        is_news = self._members.heard(data.group_name, member, now_ms)
        if with_subscriptions:
            has_changed, has_other_topics = group.update(data)
            self.change_count += has_changed
            is_news |= has_other_topics
        if is_news:
            self._notify(data.group_name)

    def unregister(self, group: str, channel: Channel) -> None:
        """A member leaves; tells the others."""
        if not self._members.remove(group, channel):
            return
        if group in self._members.groups:
            self._notify(group)
        else:
            del self._groups[group]
            self.change_count += 1

    def channel_closed(self, channel: Channel) -> None:
        """A client is gone; tells the others of its groups."""
        for group in self._members.groups_of(channel):
            self.unregister(group, channel)

    def expire(self, now_ms: int) -> None:
        """Drop members that have been silent for too long; tells the others."""
        for group, channel in self._members.silent(now_ms):
            self.unregister(group, channel)

    def group(self, group: str) -> ConsumerGroup | None:
        """What a group wants; None when nobody of it is connected."""
        return self._groups.get(group)

    def members(self, group: str) -> list[Member]:
        """Who is in a group."""
        return list(self._members.groups.get(group, {}).values())

    def groups_of_topic(self, topic: str) -> set[str]:
        """Groups that are subscribed to a topic now."""
        return {name for name, group in self._groups.items() if topic in group.subscriptions}

    def groups_by_topic(self) -> dict[str, set[str]]:
        """Of each topic somebody is subscribed to, the groups."""
        by_topic: dict[str, set[str]] = {}
        for name, group in self._groups.items():
            for topic in group.subscriptions:
                by_topic.setdefault(topic, set()).add(name)
        return by_topic

    def subscription_for_pull(self, group: str, topic: str, sub_version: int) -> SubscriptionData:
        """What a group wants of a topic, for a pull that does not say it itself.

        Raises RequestError when it is not known, or older than ``sub_version``.
        """
        known = self._groups.get(group)
        subscription = known.subscriptions.get(topic) if known else None
        if subscription is None:
            raise RequestError(
                ResponseCode.SUBSCRIPTION_NOT_EXIST,
                f"the consumer's subscription not exist: group {group} has no member subscribed "
                f"to {topic}; send a heartbeat with the subscription first",
            )
        if subscription.sub_version < sub_version:
            raise RequestError(
                ResponseCode.SUBSCRIPTION_NOT_LATEST,
                f"the consumer's subscription not latest: group {group} pulls {topic} with "
                f"version {sub_version}, its heartbeats have said {subscription.sub_version}; "
                "all members must subscribe to the same",
            )
        return subscription

    def _notify(self, group: str) -> None:
        if self._groups[group].data.message_model == BROADCASTING:
            return  # each member reads all queues, whoever else is there
        settings = self._settings.get(group)
        if settings is None or settings.notify_consumer_ids_changed_enable:
            message = notice(
                RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, ConsumerGroupHeader(consumer_group=group)
            )
            for channel in self._members.groups.get(group, {}):
                channel.write(message)


class ProducerManager:
    """Producer groups with somebody in them."""

    def __init__(self) -> None:
        self._members = _Members()

    def heartbeat(self, member: Member, group: str, now_ms: int) -> None:
        """A member says that it is alive."""
        self._members.heard(group, member, now_ms)

    def unregister(self, group: str, channel: Channel) -> None:
        """A member leaves."""
        self._members.remove(group, channel)

    def channel_closed(self, channel: Channel) -> None:
        """A client is gone."""
        for group in self._members.groups_of(channel):
            self._members.remove(group, channel)

    def expire(self, now_ms: int) -> None:
        """Drop members that have been silent for too long."""
        for group, channel in self._members.silent(now_ms):
            self._members.remove(group, channel)

    def members(self, group: str) -> list[Member]:
        """Who is in a group."""
        return list(self._members.groups.get(group, {}).values())
