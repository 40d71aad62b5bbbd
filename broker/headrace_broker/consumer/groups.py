"""Connected members of consumer groups, with their subscriptions, and of producer groups.

A client is identified by its channel, which is charged for the memory that its heartbeats take. A
member whose heartbeats stop is removed, and the rest of its group is notified to rebalance, now and
when its queue locks end.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter, OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, Protocol

import msgspec
import trio

from headrace_broker.consumer.conflicts import Declarations
from headrace_protocol.at_once import run_at_once
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.header_codecs import notice
from headrace_protocol.headers import ConsumerGroupHeader
from headrace_protocol.pop.handle import original_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator

    from headrace_broker.consumer.conflicts import SubscriptionConflicts
    from headrace_broker.consumer.locks import QueueLocks
    from headrace_broker.consumer.subscriptions import SubscriptionGroups
    from headrace_protocol.bodies import ConsumerData, SubscriptionData
    from headrace_protocol.channel import Channel
    from headrace_protocol.serving import RunLong
    from headrace_protocol.subject import Subject

MEMBER_LIFE_MS = 120_000
BROADCASTING = "BROADCASTING"
# Memory of a member, a subscribed topic and a tag without their texts, measured by
# tests/abuse/test_kept_memory.py.
_MEMBER_BYTES = 3072
_SUBSCRIPTION_BYTES = 1024
_TAG_BYTES = 160
# Notices per group and period, so that one unstable member can't keep the others rebalancing.
_NOTICES_MAX = 4
_NOTICE_PERIOD_S = 1.0


class Member(msgspec.Struct):
    """A client as its heartbeats describe it. language: name; version: as in its frames.

    subject: the user of its heartbeats; None where nobody is checked.
    """

    channel: Channel
    client_id: str
    language: str
    version: int
    subject: Subject | None = None

    @property
    def held_bytes(self) -> int:
        """Memory charged for the member in each of its groups."""
        return _MEMBER_BYTES + 2 * (len(self.client_id) + len(self.language))


class _Members:
    """Members of groups, with the time of their last heartbeat, the oldest first."""

    def __init__(self) -> None:
        self.groups: dict[str, dict[Channel, Member]] = {}
        self._heartbeat_ms: OrderedDict[tuple[str, Channel], int] = OrderedDict()
        # channel -> group -> bytes charged for the membership.
        self._charges: dict[Channel, dict[str, int]] = {}

    def __len__(self) -> int:
        return len(self._heartbeat_ms)

    def heartbeat(
        self, group: str, member: Member, now_ms: int, held_bytes: int | None = None
    ) -> bool:
        """Record a heartbeat; returns whether the member is new, or its client id has changed.

        held_bytes: memory of its subscriptions; None leaves the charge unchanged.
        """
        channel = member.channel
        members = self.groups.setdefault(group, {})
        known = members.get(channel)
        members[channel] = member
        self._heartbeat_ms[group, channel] = now_ms
        self._heartbeat_ms.move_to_end((group, channel))
        charges = self._charges.setdefault(channel, {})
        charged = charges.setdefault(group, 0)
        if held_bytes is not None or known is None:
            bytes_now = member.held_bytes + 2 * len(group) + (held_bytes or 0)
            self.charge(group, channel, bytes_now - charged)
        return known is None or known.client_id != member.client_id

    def charge(self, group: str, channel: Channel, added_bytes: int) -> None:
        """Add to the charge of a member. Must come last: it may close the member's connection."""
        self._charges[channel][group] += added_bytes
        channel.charge(added_bytes)

    def remove(self, group: str, channel: Channel) -> Member | None:
        """Remove and return a member; None if it was none."""
        if self._heartbeat_ms.pop((group, channel), None) is None:
            return None
        charges = self._charges[channel]
        channel.charge(-charges.pop(group))
        if not charges:
            del self._charges[channel]
        members = self.groups[group]
        member = members.pop(channel)
        if not members:
            del self.groups[group]
        return member

    def heard_ms(self, group: str, channel: Channel) -> int:
        """Time of a member's last heartbeat; 0 for a client that is not a member."""
        return self._heartbeat_ms.get((group, channel), 0)

    def groups_of(self, channel: Channel) -> list[str]:
        return list(self._charges.get(channel, ()))

    def expired(self, now_ms: int) -> Iterator[tuple[str, Channel]]:
        """Members whose heartbeats have stopped; the caller must remove each."""
        while self._heartbeat_ms:
            key, heartbeat_ms = next(iter(self._heartbeat_ms.items()))
            if now_ms - heartbeat_ms <= MEMBER_LIFE_MS:
                return
            yield key


class _Groups:
    """Groups that have members. run_long: runs work in slices."""

    def __init__(self, run_long: RunLong = run_at_once) -> None:
        self.run_long = run_long
        self._members = _Members()

    def members(self, group: str) -> list[Member]:
        """The members of a group."""
        return list(self._members.groups.get(group, {}).values())

    def heard_ms(self, group: str, channel: Channel) -> int:
        """When a member's last heartbeat came, by the steady clock."""
        return self._members.heard_ms(group, channel)

    @abstractmethod
    def _left(self, group: str, channel: Channel) -> None:
        """Remove a member whose connection or heartbeats have ended."""

    def channel_closed(self, channel: Channel) -> None:
        """Remove a closed client from its groups."""
        groups = self._members.groups_of(channel)
        self.run_long(self._leave_each((group, channel) for group in groups))

    def expire(self, now_ms: int) -> None:
        """Remove members whose heartbeats have stopped."""
        self.run_long(self._leave_each(self._members.expired(now_ms)))

    def _leave_each(self, members: Iterable[tuple[str, Channel]]) -> Iterator[None]:
        for group, channel in members:
            self._left(group, channel)
            yield


class ConsumerGroup:
    """Settings and subscriptions of a group, on which all its members should agree.

    subscriptions: by topic. payer: the member that is charged for them.
    declarations: what each member subscribes to.
    """

    def __init__(self, data: ConsumerData, payer: Channel) -> None:
        self.data = data
        self.payer = payer
        self.subscriptions: dict[str, SubscriptionData] = {}
        self.declarations = Declarations()

    def update(self, data: ConsumerData) -> tuple[bool, bool]:
        """Adopt a heartbeat's data; return whether what pulls depend on, and any topic, changed.

        Of two subscriptions to a topic, the newer version wins.
        """
        before = dict(self.subscriptions)
        has_other_model = data.message_model != self.data.message_model
        wanted = {item.topic: item for item in data.subscription_data_set}
        self.subscriptions = {
            topic: _newer(before.get(topic), item) for topic, item in wanted.items()
        }
        self.data = data
        has_other_topics = before.keys() != self.subscriptions.keys()
        return has_other_model or before != self.subscriptions, has_other_topics

    def may_read(self, topic: str) -> bool:
        """True if members have subscribed to a topic, or pop its retries with another.

        Members without subscriptions choose queues themselves and may read any topic.
        """
        wanted = self.subscriptions
        popped = original_topic(topic, self.data.group_name)
        return not wanted or topic in wanted or popped in wanted


def _newer(known: SubscriptionData | None, other: SubscriptionData) -> SubscriptionData:
    return other if known is None or other.sub_version > known.sub_version else known


def _held_bytes(subscriptions: Iterable[SubscriptionData]) -> int:
    return sum(
        _SUBSCRIPTION_BYTES
        + 4 * (len(each.topic) + len(each.sub_string) + sum(map(len, each.tags_set)))
        + _TAG_BYTES * (len(each.tags_set) + len(each.code_set))
        for each in subscriptions
    )


class NoticePolicy(Protocol):
    """Settings of the broker about notices; they may change while it runs."""

    notify_consumer_ids_changed_enable: bool


class ConsumerManager(_Groups):
    """Consumer groups that have members, which are notified of those that come and go.

    change_count: grows when a subscription changes, to invalidate caches.
    """

    def __init__(
        self,
        groups: SubscriptionGroups,
        locks: QueueLocks,
        conflicts: SubscriptionConflicts,
        policy: NoticePolicy,
        run_long: RunLong = run_at_once,
        last_left: Callable[[str], None] = lambda _group: None,
    ) -> None:
        """last_left: called with a group whose last member has left."""
        super().__init__(run_long)
        self.change_count = 0
        self._last_left = last_left
        self._locks = locks
        self._conflicts = conflicts
        self._policy = policy
        # Notices per group in this period.
        self._notice_counts: Counter[str] = Counter()
        # Groups whose members are notified at the end of the period.
        self._waiting: dict[str, None] = {}
        self._settings = groups
        self._groups: dict[str, ConsumerGroup] = {}
        self._groups_of: dict[str, set[str]] = {}

    def heartbeat(
        self, member: Member, data: ConsumerData, now_ms: int, *, with_subscriptions: bool = True
    ) -> None:
        """Register or renew a member; notify its group of a new member or changed topics.

        with_subscriptions: False for a heartbeat that omits them because they are unchanged.
        Raises RequestError for subscriptions that conflict with another member's, if the broker
        refuses those.
        """
        if not with_subscriptions:
            data = msgspec.structs.replace(data, subscription_data_set=[])
        group = self._groups.get(data.group_name)
        if group is None:
            group = self._groups[data.group_name] = ConsumerGroup(data, member.channel)
        must_notify = False
        held_bytes: int | None = None
        if with_subscriptions:
            self._conflicts.check(group.declarations, member.channel, member.client_id, data)
            group.declarations.put(member.channel, member.client_id, data)
            held_bytes = _held_bytes(data.subscription_data_set)
            before = group.subscriptions
            has_changed, must_notify = group.update(data)
            group.payer = member.channel
            self.change_count += has_changed
            if must_notify:
                self._update_index(data.group_name, before, group.subscriptions)
        if self._members.heartbeat(data.group_name, member, now_ms, held_bytes):
            self._locks.returned(data.group_name, member.client_id)
            must_notify = True
        if must_notify:
            self.notify(data.group_name)

    def conflict(self, group: str) -> str:
        """Two members of a group whose subscriptions differ, as a text; "" if all agree."""
        known = self._groups.get(group)
        return known.declarations.difference(group) if known else ""

    def unregister(self, group: str, channel: Channel) -> None:
        """Remove a member that has stopped reading, release its locks and notify the others."""
        self._leave(group, channel, self._locks.release)

    def _leave(self, group: str, channel: Channel, end_locks: Callable[[str, str], None]) -> None:
        member = self._members.remove(group, channel)
        if member is None:
            return
        self._groups[group].declarations.remove(channel)
        if self._locks.is_holder(group, member.client_id) and not self._is_connected(group, member):
            end_locks(group, member.client_id)
        if group in self._members.groups:
            self._pass_charge(group, channel)
            self.notify(group)
        else:
            self._update_index(group, self._groups.pop(group).subscriptions, ())
            self.change_count += 1
            self._last_left(group)

    def _is_connected(self, group: str, member: Member) -> bool:
        """True if a client is still a member, by another connection."""
        return any(other.client_id == member.client_id for other in self.members(group))

    def _pass_charge(self, name: str, channel: Channel) -> None:
        """Charge another member for the subscriptions if the one that leaves paid for them."""
        group = self._groups[name]
        if group.payer is channel:
            group.payer = next(iter(self._members.groups[name]))
            self._members.charge(name, group.payer, _held_bytes(group.subscriptions.values()))

    def _left(self, group: str, channel: Channel) -> None:
        self._leave(group, channel, self._locks.left)

    def expire_locks(self, now_ms: int) -> None:
        """Remove locks that were not renewed, and notify their groups."""
        self.run_long(self._notify_each(self._locks.expire(now_ms)))

    def _notify_each(self, groups: Iterable[str | None]) -> Iterator[None]:
        for group in groups:
            if group is not None:
                self.notify(group)
            yield

    def group(self, group: str) -> ConsumerGroup | None:
        """A group; None if no member is connected."""
        return self._groups.get(group)

    def topics_of(self, name: str, channel: Channel, client_id: str) -> Container[str]:
        """The topics that a client consumes as a member of a group; none for any other client."""
        member = self._members.groups.get(name, {}).get(channel)
        if member is None or member.client_id != client_id:
            return ()
        return self._groups[name].subscriptions

    def names(self) -> list[str]:
        """The groups that have members."""
        return list(self._groups)

    def member_counts(self, count_max: int) -> list[tuple[str, int]]:
        """The first connected groups with the number of their members."""
        groups = self._members.groups.items()
        return [(group, len(members)) for group, members in islice(groups, count_max)]

    def pairs(self, count_max: int) -> list[tuple[str, str]]:
        """The first topics with their connected groups."""
        groups = self._groups.items()
        pairs = ((topic, name) for name, group in groups for topic in group.subscriptions)
        return list(islice(pairs, count_max))

    def groups_of_topic(self, topic: str) -> set[str]:
        """Groups with members that are subscribed to a topic."""
        return set(self._groups_of.get(topic, ()))

    def _update_index(self, group: str, before: Iterable[str], after: Iterable[str]) -> None:
        """Update the index of groups by topic."""
        before, after = set(before), set(after)
        for topic in before - after:
            groups = self._groups_of[topic]
            groups.discard(group)
            if not groups:
                del self._groups_of[topic]
        for topic in after - before:
            self._groups_of.setdefault(topic, set()).add(group)

    def subscription_for_pull(self, group: str, topic: str, sub_version: int) -> SubscriptionData:
        """A group's subscription to a topic, for a pull that does not contain its own.

        Raises RequestError if it is unknown, or older than ``sub_version``.
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
                f"version {sub_version}, its heartbeats have {subscription.sub_version}; "
                "all members must have the same subscriptions",
            )
        return subscription

    async def run(self) -> None:
        """Send waiting notices at the end of each period, until cancelled."""
        while True:
            await trio.sleep(_NOTICE_PERIOD_S)
            waiting, self._waiting = self._waiting, {}
            self._notice_counts.clear()
            for group in waiting:
                self.run_long(self._send_notices(group))

    def notify(self, group: str) -> None:
        """Notify the members of a group of a change, at once or at the end of the period."""
        self._notice_counts[group] += 1
        if self._notice_counts[group] <= _NOTICES_MAX:
            self.run_long(self._send_notices(group))
        else:
            self._waiting[group] = None

    def _send_notices(self, name: str) -> Iterator[None]:
        group = self._groups.get(name)
        if group is None or group.data.message_model == BROADCASTING:
            return  # broadcasting members read all queues anyway
        if not self._policy.notify_consumer_ids_changed_enable:
            return
        settings = self._settings.get(name)
        if settings is None or settings.notify_consumer_ids_changed_enable:
            message = notice(
                RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, ConsumerGroupHeader(consumer_group=name)
            )
            for channel in list(self._members.groups.get(name, ())):
                channel.write(*message)
                yield


class ProducerManager(_Groups):
    """Producer groups that have members, and the channels of each client id."""

    def __init__(self, run_long: RunLong = run_at_once) -> None:
        super().__init__(run_long)
        # client id -> its memberships, by group and channel, the oldest first.
        self._clients: dict[str, dict[tuple[str, Channel], Member]] = {}

    def names(self) -> list[str]:
        """The groups that have members."""
        return list(self._members.groups)

    @property
    def member_count(self) -> int:
        """Connected producers, counted once in each of their groups."""
        return len(self._members)

    def heartbeat(self, member: Member, group: str, now_ms: int) -> None:
        """Register or renew a member."""
        known = self._members.groups.get(group, {}).get(member.channel)
        if known is not None and known.client_id != member.client_id:
            self._forget(group, known)
        self._note(group, member)
        self._members.heartbeat(group, member, now_ms)

    def channel_of(self, client_id: str) -> Channel | None:
        """The newest connection of a client; None if no producer has that id."""
        members = reversed(self._clients.get(client_id, {}).values())
        return next((each.channel for each in members if each.channel.is_open), None)

    def _note(self, group: str, member: Member) -> None:
        memberships = self._clients.setdefault(member.client_id, {})
        # Nobody takes over what is meant for another user's client.
        if not memberships or next(iter(memberships.values())).subject == member.subject:
            memberships[group, member.channel] = member

    def _forget(self, group: str, member: Member) -> None:
        memberships = self._clients.get(member.client_id, {})
        memberships.pop((group, member.channel), None)
        if not memberships:
            self._clients.pop(member.client_id, None)

    def unregister(self, group: str, channel: Channel) -> None:
        """Remove a member."""
        member = self._members.remove(group, channel)
        if member is not None:
            self._forget(group, member)

    _left = unregister
