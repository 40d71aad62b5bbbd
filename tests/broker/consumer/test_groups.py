"""Members of groups: who is told when somebody comes, changes or goes."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog

from headrace_broker.config import BrokerConfig
from headrace_broker.consumer.conflicts import SubscriptionConflicts
from headrace_broker.consumer.groups import MEMBER_LIFE_MS, ConsumerManager, Member, ProducerManager
from headrace_broker.consumer.locks import QueueLocks
from headrace_broker.consumer.subscriptions import SubscriptionGroups
from headrace_broker.store.files.config_file import ConfigFile
from headrace_daemon.host_log import HostLog
from headrace_protocol.bodies import ConsumerData, SubscriptionData, SubscriptionGroupConfig
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.headers import ConsumerGroupHeader
from tests.broker.consumer.test_subscriptions import Policy
from tests.support.channel import MemoryChannel


@pytest.fixture
def groups(tmp_path: Path) -> SubscriptionGroups:
    return SubscriptionGroups(Policy(), ConfigFile(tmp_path / "groups.json"), lambda: 0)


@pytest.fixture
def consumers(groups: SubscriptionGroups) -> ConsumerManager:
    config = BrokerConfig()
    conflicts = SubscriptionConflicts(config, HostLog(structlog.get_logger()))
    return ConsumerManager(groups, QueueLocks(), conflicts, config)


def wants(*topics: str, version: int = 1, group: str = "g") -> ConsumerData:
    return ConsumerData(
        group_name=group,
        subscription_data_set=[
            SubscriptionData(topic=topic, sub_string="*", sub_version=version) for topic in topics
        ],
    )


def member(channel: MemoryChannel, client_id: str = "c") -> Member:
    return Member(channel, client_id, "JAVA", 513)


def notices(channel: MemoryChannel) -> list[str]:
    """Groups that the client was told about since the last time."""
    replies = channel.replies()
    for command, body in replies:
        assert command.code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED
        assert command.is_oneway
        assert not body
    return [command.header(ConsumerGroupHeader).consumer_group for command, _ in replies]


def test_all_are_told_of_a_new_member_and_of_one_that_leaves(consumers: ConsumerManager) -> None:
    one, two = MemoryChannel(), MemoryChannel()
    consumers.heartbeat(member(one, "c1"), wants("t"), 0)
    assert notices(one) == ["g"]
    consumers.heartbeat(member(two, "c2"), wants("t"), 0)
    assert (notices(one), notices(two)) == (["g"], ["g"])
    consumers.heartbeat(member(one, "c1"), wants("t"), 1)
    assert (notices(one), notices(two)) == ([], [])
    assert [m.client_id for m in consumers.members("g")] == ["c1", "c2"]
    consumers.unregister("g", one)
    assert (notices(one), notices(two)) == ([], ["g"])
    consumers.unregister("g", one)
    consumers.unregister("g", two)
    assert (notices(one), notices(two)) == ([], [])
    assert consumers.group("g") is None


def test_a_client_that_is_gone_leaves_all_its_groups(consumers: ConsumerManager) -> None:
    one, two = MemoryChannel(), MemoryChannel()
    for group in ("g", "h"):
        consumers.heartbeat(member(one, "c1"), wants("t", group=group), 0)
    consumers.heartbeat(member(two, "c2"), wants("t", group="h"), 0)
    notices(one), notices(two)
    consumers.channel_closed(one)
    assert notices(two) == ["h"]
    assert consumers.group("g") is None
    assert [m.client_id for m in consumers.members("h")] == ["c2"]
    consumers.channel_closed(one)


def test_members_that_are_silent_are_dropped(consumers: ConsumerManager) -> None:
    one, two = MemoryChannel(), MemoryChannel()
    consumers.heartbeat(member(one, "c1"), wants("t"), 0)
    consumers.heartbeat(member(two, "c2"), wants("t"), 1)
    consumers.heartbeat(member(one, "c1"), wants("t"), 2)
    notices(one)
    consumers.expire(MEMBER_LIFE_MS + 1)
    assert len(consumers.members("g")) == 2
    consumers.expire(MEMBER_LIFE_MS + 2)
    assert [m.client_id for m in consumers.members("g")] == ["c1"]
    assert notices(one) == ["g"]
    consumers.expire(MEMBER_LIFE_MS + 3)
    assert consumers.group("g") is None


def test_other_topics_are_told_other_versions_only_taken(consumers: ConsumerManager) -> None:
    one = MemoryChannel()
    consumers.heartbeat(member(one), wants("t"), 0)
    notices(one)
    count = consumers.change_count
    consumers.heartbeat(member(one), wants("t", version=2), 1)
    assert notices(one) == []
    assert consumers.change_count == count + 1
    assert consumers.subscription_for_pull("g", "t", 2).sub_version == 2
    consumers.heartbeat(member(one), wants("t", "u", version=2), 1)
    assert notices(one) == ["g"]
    assert consumers.groups_of_topic("u") == {"g"}
    consumers.heartbeat(member(one), wants("u", version=2), 1)
    assert notices(one) == ["g"]
    assert consumers.groups_of_topic("t") == set()
    assert consumers.change_count == count + 3


def test_an_older_version_does_not_replace_a_newer_one(consumers: ConsumerManager) -> None:
    one, two = MemoryChannel(), MemoryChannel()
    consumers.heartbeat(member(one), wants("t", version=5), 0)
    consumers.heartbeat(member(two), wants("t", version=4), 0)
    assert consumers.subscription_for_pull("g", "t", 5).sub_version == 5


def test_a_heartbeat_without_subscriptions_keeps_them(consumers: ConsumerManager) -> None:
    one = MemoryChannel()
    consumers.heartbeat(member(one), wants("t"), 0)
    consumers.heartbeat(member(one), wants(), 1, with_subscriptions=False)
    assert consumers.groups_of_topic("t") == {"g"}


def test_pulls_need_a_subscription_that_is_known_and_new_enough(
    consumers: ConsumerManager,
) -> None:
    for topic, version, code in (
        ("t", 0, ResponseCode.SUBSCRIPTION_NOT_EXIST),
        ("u", 0, ResponseCode.SUBSCRIPTION_NOT_EXIST),
        ("t", 2, ResponseCode.SUBSCRIPTION_NOT_LATEST),
    ):
        with pytest.raises(RequestError) as error:
            consumers.subscription_for_pull("g", topic, version)
        assert error.value.code == code
        consumers.heartbeat(member(MemoryChannel()), wants("t"), 0)


def test_a_group_that_does_not_want_to_be_told(
    consumers: ConsumerManager, groups: SubscriptionGroups
) -> None:
    groups.put(SubscriptionGroupConfig(group_name="g", notify_consumer_ids_changed_enable=False))
    one = MemoryChannel()
    consumers.heartbeat(member(one), wants("t"), 0)
    assert notices(one) == []


def test_a_broker_that_does_not_notify(groups: SubscriptionGroups) -> None:
    config = BrokerConfig(notify_consumer_ids_changed_enable=False)
    conflicts = SubscriptionConflicts(config, HostLog(structlog.get_logger()))
    one = MemoryChannel()
    manager = ConsumerManager(groups, QueueLocks(), conflicts, config)
    manager.heartbeat(member(one), wants("t"), 0)
    assert notices(one) == []
    config.notify_consumer_ids_changed_enable = True
    manager.heartbeat(member(one), wants("u"), 1)
    assert notices(one) == ["g"]


def test_a_broadcasting_group_shares_nothing_to_tell_of(consumers: ConsumerManager) -> None:
    one, two = MemoryChannel(), MemoryChannel()
    for channel in (one, two):
        data = ConsumerData(group_name="g", message_model="BROADCASTING")
        consumers.heartbeat(member(channel), data, 0)
    consumers.channel_closed(two)
    assert notices(one) == []


def test_producers() -> None:
    producers, one, two = ProducerManager(), MemoryChannel(), MemoryChannel()
    producers.heartbeat(member(one, "p1"), "g", 0)
    producers.heartbeat(member(two, "p2"), "g", 5)
    producers.heartbeat(member(two, "p2"), "h", 5)
    producers.unregister("h", two)
    assert producers.members("h") == []
    producers.expire(MEMBER_LIFE_MS + 1)
    assert [m.client_id for m in producers.members("g")] == ["p2"]
    producers.channel_closed(two)
    assert producers.members("g") == []
