"""Groups that keep messages from being removed, and the remedies of an administrator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from headrace_broker.consumer.unconsumed import UnconsumedOffsets
from headrace_broker.settings.of_store import retention
from headrace_broker.topics.attributes import topic_limits
from headrace_protocol.at_once import run_at_once
from headrace_protocol.bodies import (
    ConsumerData,
    HeartbeatData,
    KVTable,
    SubscriptionData,
    SubscriptionGroupConfig,
    TopicConfig,
)
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.waiting import at_once
from tests.broker.statictopic.test_static_cleanup import expire
from tests.support.broker import BrokerUnderTest, broker_config
from tests.support.channel import MemoryChannel
from tests.support.static_brokers import GROUP, TOPIC, Brokers, item


def look(broker: BrokerUnderTest, topic: str = "T") -> Mapping[int, tuple[int, str]]:
    unconsumed = UnconsumedOffsets(broker.offsets, broker.groups, broker.consumers)
    return at_once(unconsumed(topic, [0, 1]))


def make_group(broker: BrokerUnderTest, name: str) -> None:
    broker.groups.put(SubscriptionGroupConfig(group_name=name))


def test_the_slowest_group_of_each_queue_counts(broker: BrokerUnderTest) -> None:
    for group, offsets in {"a": (5, 9), "b": (7, 2)}.items():
        make_group(broker, group)
        for queue_id, offset in enumerate(offsets):
            broker.offsets.commit(group, "T", queue_id, offset)
    assert look(broker) == {0: (5, "a"), 1: (2, "b")}
    assert look(broker, "other") == {}


def test_a_group_that_is_not_connected_counts_by_what_it_has_committed(
    broker: BrokerUnderTest,
) -> None:
    make_group(broker, "a")
    broker.offsets.commit("a", "T", 0, 5)
    broker.offsets.commit_pull("a", "T", 1, 3)  # of which nobody knows how far it got
    assert look(broker) == {0: (5, "a")}


def test_a_connected_group_without_offsets_counts_from_the_beginning(
    broker: BrokerUnderTest,
) -> None:
    channel = broker.join("a", "c", "T")
    broker.offsets.commit_pull("a", "T", 1, 3)
    assert look(broker) == {0: (0, "a"), 1: (3, "a")}
    broker.consumers.channel_closed(channel)
    assert look(broker) == {}


def test_a_deleted_group_counts_no_more(broker: BrokerUnderTest) -> None:
    make_group(broker, "a")
    broker.offsets.commit("a", "T", 0, 5)
    broker.groups.delete("a")  # its offsets may be kept
    assert broker.offsets.query("a", "T", 0) == 5
    assert look(broker) == {}


def test_a_group_whose_members_want_other_topics_does_not_count(broker: BrokerUnderTest) -> None:
    broker.offsets.commit("a", "T", 0, 5)
    channel = broker.join("a", "c", "other")
    assert look(broker) == {}
    broker.consumers.channel_closed(channel)
    assert look(broker) == {0: (5, "a")}
    broker.join("a", "c")  # chooses its queues itself
    assert look(broker) == {0: (5, "a")}


@pytest.mark.parametrize("retries", ["%RETRY%a_T", "%RETRY%a+T"])
def test_retries_of_pops_count_although_no_member_subscribes_to_them(
    broker: BrokerUnderTest, retries: str
) -> None:
    broker.offsets.commit("a", retries, 0, 5)
    channel = broker.join("a", "c", "T")
    assert look(broker, retries) == {0: (5, "a")}
    broker.join("a", "c", "other", channel=channel)
    assert look(broker, retries) == {}


def test_members_that_keep_their_offsets_themselves_do_not_count(broker: BrokerUnderTest) -> None:
    broker.offsets.commit("a", "T", 0, 5)
    data = ConsumerData(
        group_name="a",
        message_model="BROADCASTING",
        subscription_data_set=[SubscriptionData(topic="T", sub_string="*", sub_version=1)],
    )
    body = HeartbeatData(client_id="c", consumer_data_set=[data]).encode()
    answer = broker.ask(RequestCode.HEART_BEAT, body=body, channel=MemoryChannel())
    assert answer.code == ResponseCode.SUCCESS
    assert look(broker) == {}


def test_groups_of_compacted_topics_do_not_count(broker: BrokerUnderTest) -> None:
    """The CommitLog would otherwise stay until the slowest group has read its last message."""
    broker.create_topic("plain", 1)
    broker.create_topic("table", 1, attributes={"cleanup.policy": "COMPACTION"})
    make_group(broker, "a")
    for topic in ("plain", "table"):
        broker.offsets.commit("a", topic, 0, 5)
    lowest = broker.store.cleaner.unconsumed()
    assert at_once(lowest("plain", [0])) == {0: (5, "a")}
    assert at_once(lowest("table", [0])) == {}


# --- static topics --------------------------------------------------------------------------

ITEMS = (item("b", 0, 0), item("a", 1, 4))


@pytest.fixture
def brokers(tmp_path: Path) -> Brokers:
    """A queue that has moved from b to a, with messages on both; a group has read what b has."""
    brokers = Brokers(tmp_path)
    for chain, names in ((ITEMS[:1], "b"), (ITEMS, "ab")):
        brokers.map(chain, only=names)
        for _ in range(4):
            brokers.send(chain[-1].bname[-1], bytes(900))
    for broker in brokers.values():
        make_group(broker, GROUP)
    brokers["b"].offsets.commit(GROUP, TOPIC, 0, 4)
    return brokers


async def test_what_a_group_has_only_pulled_of_a_later_item_stays(brokers: Brokers) -> None:
    """Its member died before the first commit there: the group goes on where b says."""
    leader = brokers["a"]
    leader.join(GROUP, "client", TOPIC)
    assert len(brokers.read_all("a", 4)) == 4
    assert leader.offsets.query_pull(GROUP, TOPIC, 0) == 4
    await expire(leader, end=0)
    assert len(brokers.read_all("a", 4)) == 4
    leader.offsets.commit(GROUP, TOPIC, 0, 4)
    assert at_once(leader.store.cleaner.unconsumed()(TOPIC, [0])) == {0: (4, GROUP)}


async def test_a_later_item_stays_for_a_group_that_is_not_connected(brokers: Brokers) -> None:
    """The broker knows that the group reads the topic: it has an offset in another queue."""
    leader = brokers["a"]
    leader.offsets.commit(GROUP, TOPIC, 7, 0)
    await expire(leader, end=0)
    leader.offsets.commit(GROUP, TOPIC, 0, 4)
    assert at_once(leader.store.cleaner.unconsumed()(TOPIC, [0])) == {0: (4, GROUP)}


def end_b_and_open_a(brokers: Brokers, start: int = 4) -> None:
    brokers.map((ITEMS[0], item("a", 1, start)), only="ba")


def open_a_before_b_ends(brokers: Brokers) -> None:
    """As the available mode does."""
    brokers.map((ITEMS[0], item("a", 1, -1)), only="ab")
    end_b_and_open_a(brokers, 10_000)


@pytest.mark.parametrize("move", [end_b_and_open_a, open_a_before_b_ends])
@pytest.mark.parametrize("offset", [2, 4, None], ids=["behind", "at the end", "not there yet"])
async def test_a_new_leader_keeps_its_messages_for_groups_that_it_never_saw(
    move: Callable[[Brokers], None], offset: int | None, tmp_path: Path
) -> None:
    """They left before their queue moved, and come back to the old leader's messages."""
    brokers = Brokers(tmp_path)
    brokers.map(ITEMS[:1], only="b")
    for _ in range(4):
        brokers.send("b", bytes(900))
    channel = brokers["b"].join(GROUP, "client", TOPIC)
    if offset is None:
        brokers["b"].offsets.withdraw(GROUP, TOPIC, 0)
    else:
        brokers["b"].offsets.commit(GROUP, TOPIC, 0, offset)
    brokers["b"].join("only_connected", "client", TOPIC, channel=channel)
    brokers["b"].consumers.channel_closed(channel)
    move(brokers)
    for _ in range(4):
        brokers.send("a", bytes(900))
    brokers["a"].close()
    brokers.start("a")
    await expire(brokers["a"], end=0)
    assert brokers["a"].offsets.groups_of(TOPIC) == {GROUP}
    brokers["a"].offsets.commit(GROUP, TOPIC, 0, 4)
    assert at_once(brokers["a"].store.cleaner.unconsumed()(TOPIC, [0])) == {0: (4, GROUP)}


async def test_a_new_leader_may_not_create_groups_but_keeps_messages_for_its_own(
    tmp_path: Path,
) -> None:
    brokers = Brokers(tmp_path, auto_create_subscription_group=False)
    brokers.map(ITEMS[:1], only="b")
    brokers.send("b", b"body")
    for group in ("unknown", GROUP):
        make_group(brokers["b"], group)
        brokers["b"].offsets.commit(group, TOPIC, 0, 0)
    make_group(brokers["a"], GROUP)
    brokers.map((ITEMS[0], item("a", 1, 1)), only="ba")
    assert at_once(brokers["a"].store.cleaner.unconsumed()(TOPIC, [0])) == {0: (0, GROUP)}
    assert brokers["a"].groups.get("unknown") is None


@pytest.mark.parametrize("steps", [(2,), (6, 2), (10, 2), (10, 6, 2)])
def test_later_items_stay_for_a_group_that_goes_back(steps: Iterable[int], tmp_path: Path) -> None:
    """Also for one whose first offset is in an old item, and which then leaves."""
    chain = (*ITEMS, item("c", 2, 8, 1))
    brokers = Brokers(tmp_path, "abc")
    for end, names in ((1, "b"), (2, "ba"), (3, "ac")):
        brokers.map(chain[:end], only=names)
        for _ in range(4):
            brokers.send(names[-1], b"body")
    channels = [broker.join(GROUP, "client", TOPIC) for broker in brokers.values()]
    for offset in steps:
        brokers.pull("c", offset, sys_flag=1 + 4, commit_offset=offset)
    for broker, channel in zip(brokers.values(), channels, strict=True):
        broker.consumers.channel_closed(channel)
    lowest = {
        name: at_once(broker.store.cleaner.unconsumed()(TOPIC, [chain[at].queue_id]))
        for at, (name, broker) in zip((1, 0, 2), brokers.items(), strict=True)
    }
    assert lowest == {"a": {0: (0, GROUP)}, "b": {0: (2, GROUP)}, "c": {1: (0, GROUP)}}


async def test_what_a_group_without_offsets_has_pulled_of_a_first_item_goes(
    brokers: Brokers,
) -> None:
    first = brokers["b"]
    run_at_once(first.offsets.delete_group(GROUP))
    first.offsets.commit(GROUP, TOPIC, 7, 0)
    first.join(GROUP, "client", TOPIC)
    first.offsets.commit_pull(GROUP, TOPIC, 0, 4)
    await expire(first)


def test_all_items_count_as_later_ones_while_the_mapping_is_lost(brokers: Brokers) -> None:
    broker = brokers["b"]
    broker.offsets.commit("other", TOPIC, 7, 0)
    make_group(broker, "other")
    lowest = broker.store.cleaner.unconsumed
    assert at_once(lowest()(TOPIC, [0])) == {0: (4, GROUP)}
    broker.mappings.remove(TOPIC)  # its mark stays
    assert at_once(lowest()(TOPIC, [0])) == {0: (0, "other")}
    assert at_once(lowest()("plain", [0])) == {}


# --- limits of topics -----------------------------------------------------------------------


def test_limits_of_topics_come_from_their_attributes() -> None:
    def topic(name: str, **attributes: str) -> TopicConfig:
        named = {key.replace("_", "."): value for key, value in attributes.items()}
        return TopicConfig(topic_name=name, attributes=named)

    topics = [
        topic("none"),
        topic("time", reserve_time="5"),
        topic("size", reserve_size="1024", message_type="FIFO"),
        topic("off", reserve_time="-1", reserve_size="-1"),
        topic("odd", reserve_time="soon", reserve_size="0"),  # from another broker's file
    ]
    assert topic_limits(topics) == {"time": (5 * 3_600_000, None), "size": (None, 1024)}


# --- administrators -------------------------------------------------------------------------


def runtime_info(broker: BrokerUnderTest) -> dict[str, str]:
    answer = broker.ask(RequestCode.GET_BROKER_RUNTIME_INFO)
    return dict(KVTable.decode(answer.body).table)


@pytest.mark.parametrize(
    "code", [RequestCode.TRIGGER_DELETE_FILES, RequestCode.DELETE_EXPIRED_COMMITLOG]
)
async def test_old_files_are_removed_when_asked_for(
    broker: BrokerUnderTest, code: RequestCode
) -> None:
    broker.config.update({"deleteWhen": "", "diskMaxUsedSpaceRatio": "95"})
    broker.store.cleaner.retention = retention(broker.config)
    for _ in range(3):
        broker.store_message("T", 0, bytes(3000))
    broker.store.index_tick()
    broker.store.flusher.flush_now()
    broker.clock.ms += 1 << 50
    await broker.store.cleaner.round()
    assert broker.store.commit_log.min_offset == 0
    assert broker.ask(code).code == ResponseCode.SUCCESS
    await broker.store.cleaner.round()
    assert broker.store.commit_log.min_offset == 2 * 4096
    assert int(runtime_info(broker)["filesRemoved"]) >= 2


def test_retention_changes_while_it_runs(broker: BrokerUnderTest) -> None:
    text = b"fileReservedTime=5\ndeleteWhen=01;13\ndiskSpaceWarningLevelRatio=99\n"
    text += b"diskSpaceCleanForciblyRatio=1\ndeleteUnconsumedEnable=true\n"
    assert broker.ask(RequestCode.UPDATE_BROKER_CONFIG, body=text).code == ResponseCode.SUCCESS
    retention = broker.store.cleaner.retention
    assert retention.reserved_ms == 5 * 3_600_000
    assert retention.delete_hours == {1, 13}
    assert (retention.force_ratio, retention.refuse_ratio) == (0.30, 0.90)  # as the peer limits
    assert retention.removes_unconsumed


@pytest.mark.parametrize("hours", ["24", "-1", "four", "4,5"])
def test_hours_that_are_none(tmp_path: Path, hours: str) -> None:
    with pytest.raises(ValueError, match="expected hours from 00 to 23"):
        broker_config(tmp_path, delete_when=hours)
