"""Changes of static topics on running brokers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace import Admin, Message, Producer, PullConsumer
from headrace.admin.chains import LogicQueue
from headrace.admin.statictopic import HalfDone, StaticTopicError, UnchangedTopic
from headrace.admin.topics import TopicExists
from headrace.errors import (
    BrokerError,
    ConfigurationError,
    ConnectionLost,
    NotEverywhere,
    RouteNotFound,
)
from headrace_protocol.admin_headers import DeleteTopicHeader
from headrace_protocol.bodies import SubscriptionGroupConfig
from headrace_protocol.codes import RequestCode
from headrace_protocol.statictopic.mapping import TopicMapping
from headrace_protocol.statictopic.plans import Mode
from tests.support.fixtures import admin_of_brokers, brokers_named
from tests.support.running_brokers import Brokers

mq = pytest.fixture(brokers_named(["a", "b", "c"]))
admin = pytest.fixture(admin_of_brokers)


async def leaders(admin: Admin, topic: str = "T") -> list[str]:
    return [each.leader for each in await admin.logic_queues(topic)]


async def send(mq: Brokers, topic: str = "T", count: int = 12) -> None:
    """Messages to all queues, by their keys."""
    async with Producer(**mq.at) as producer:
        for number in range(count):
            await producer.send(Message(topic, b"x", key=f"k{number}"))


async def test_a_topic_is_created_and_grows(admin: Admin) -> None:
    await admin.create_static_topic("T", 4)
    assert await leaders(admin) == ["a", "b", "c", "a"]
    await admin.create_static_topic("T", 6, brokers=["c"])
    assert await leaders(admin) == ["a", "b", "c", "a", "c", "c"]
    with pytest.raises(StaticTopicError, match="only added"):
        await admin.create_static_topic("T", 5)


async def test_a_topic_is_created_in_a_cluster(admin: Admin) -> None:
    await admin.create_static_topic("T", 3, cluster="DefaultCluster")
    assert await leaders(admin) == ["a", "b", "c"]
    with pytest.raises(StaticTopicError, match="no broker"):
        await admin.create_static_topic("U", 3, cluster="elsewhere")


async def test_a_compacted_topic_on_several_brokers_is_static(admin: Admin) -> None:
    wanted: dict[str, Any] = {"queues": 4, "attributes": {"cleanup.policy": "COMPACTION"}}
    await admin.create_topic("T", **wanted)
    assert await leaders(admin) == ["a", "b", "c", "a"]
    with pytest.raises(TopicExists):
        await admin.create_topic("T", **wanted)
    await admin.create_topic("T", **wanted, if_not_exists=True)
    with pytest.raises(StaticTopicError, match="has 4 queues"):
        await admin.create_topic("T", **wanted | {"queues": 5}, if_not_exists=True)
    odd_ones: list[dict[str, Any]] = [{"perm": 4}, {"read_queues": 2}]
    for odd in odd_ones:
        with pytest.raises(ConfigurationError, match="on several brokers it is a static one"):
            await admin.create_topic("odd", **wanted, **odd)
    assert not await admin.is_static("odd")


async def test_a_compacted_topic_is_plain_where_a_broker_is_named(admin: Admin) -> None:
    wanted: dict[str, Any] = {"queues": 2, "attributes": {"cleanup.policy": "COMPACTION"}}
    await admin.create_topic("T", **wanted, broker="a")
    assert not await admin.is_static("T")
    assert list(await admin.topic("T")) == ["a"]
    with pytest.raises(TopicExists):
        await admin.create_topic("T", **wanted)


async def test_a_queue_moves_without_a_gap(mq: Brokers, admin: Admin) -> None:
    await admin.create_static_topic("T", 2, brokers=["a"])
    await send(mq)
    before = await admin.topic_stats("T")
    change = await admin.remap_static_topic("T", ["b", "c"])
    assert sorted(await leaders(admin)) == ["b", "c"]
    assert await admin.topic_stats("T") == before
    starts = [new.logic_offset for _, new in change.leaders().values()]
    assert starts == [at.max_offset for at in before.values()]
    await send(mq)
    assert sum(each.messages for each in await admin.logic_queues("T")) == 24


@pytest.mark.parametrize("mode", Mode)
async def test_a_group_keeps_its_offset_where_an_empty_leader_leaves_its_chain(
    mq: Brokers, admin: Admin, mode: Mode
) -> None:
    await admin.create_static_topic("T", 2, brokers=["a"])
    await admin.create_group(SubscriptionGroupConfig(group_name="g"))
    queue, other = (each.queue for each in await admin.logic_queues("T"))
    async with PullConsumer("g", **mq.at) as consumer:
        await consumer.commit({queue: 0})
        await admin.remap_static_topic("T", ["b"], mode=mode)
        await admin.remap_static_topic("T", ["c"], mode=mode)
        assert [await consumer.committed(each) for each in (queue, other)] == [0, None]


async def test_a_change_has_what_was_and_what_will_be(admin: Admin) -> None:
    await admin.create_static_topic("T", 2, brokers=["a"])
    change = await admin.remap_static_topic("T", ["b"], dry_run=True)
    assert await leaders(admin) == ["a", "a"]
    before, after = change.before, change.after
    assert (before["type"], before["brokerToMapIn"], before["brokerToMapOut"]) == (
        "REMAPPING",
        ["b"],
        ["a"],
    )
    assert decoded(before, "a").led() == {0: 0, 1: 1}
    assert decoded(after, "a").led() == {}
    assert decoded(after, "b").led() == {0: 0, 1: 1}
    assert after["brokerConfigMap"]["b"]["writeQueueNums"] == 2
    change = await admin.remap_static_topic("T", ["b"])
    assert decoded(change.after, "b").hosted[0][-1].logic_offset == 0


def decoded(table: Any, broker: str) -> TopicMapping:
    return msgspec.convert(
        table["brokerConfigMap"][broker]["mappingDetail"], TopicMapping, str_keys=True
    )


async def test_an_available_remap_leaves_a_gap(mq: Brokers, admin: Admin) -> None:
    await admin.create_static_topic("T", 1, brokers=["a"])
    await send(mq, count=5)
    await admin.remap_static_topic("T", ["b"], mode=Mode.AVAILABLE)
    await send(mq, count=2)
    (queue,) = await admin.logic_queues("T")
    assert (queue.offsets.max_offset, queue.messages, queue.gaps) == (10_002, 7, ((5, 10_000),))
    first, second = await admin.queue_parts("T")
    assert first.extent is not None
    assert first.extent[:3] == (0, 5, 5)
    assert second.extent is not None
    assert second.extent[:3] == (10_000, 10_002, 2)
    assert first.item.end_offset == 5
    assert first.item.time_of_end >= first.item.time_of_start > 0


async def test_a_broker_that_joins_gets_its_share(mq: Brokers, admin: Admin) -> None:
    await admin.create_static_topic("T", 6)
    await mq.start("d")
    await admin.rebalance_static_topic("T")
    assert sorted(await leaders(admin)) == ["a", "a", "b", "b", "c", "d"]
    assert await admin.static_topics() == ["T"]


async def test_what_is_not_a_static_topic(admin: Admin) -> None:
    await admin.create_topic("PLAIN")
    with pytest.raises(StaticTopicError, match="PLAIN is not static"):
        await admin.remap_static_topic("PLAIN", ["a"])
    with pytest.raises(StaticTopicError, match="without its mapping: a plain topic"):
        await admin.create_static_topic("PLAIN", 4)
    with pytest.raises(RouteNotFound, match="no master has it"):
        await admin.rebalance_static_topic("NONE")
    with pytest.raises(StaticTopicError, match="not a static topic"):
        await admin.repair_static_topic("NONE")
    assert await admin.static_topics() == []


async def test_a_topic_is_purged(mq: Brokers, admin: Admin) -> None:
    await admin.create_static_topic("T", 3, brokers=["a"])
    await admin.remap_static_topic("T", ["b", "c"])
    before = await leaders(admin)
    await send(mq)
    await admin.alter_topic("T", perm=4, broker="b")
    await admin.purge_topic("T")
    assert sorted(await leaders(admin)) == sorted(before)
    assert [queue.messages for queue in await admin.logic_queues("T")] == [0, 0, 0]
    settings = await admin.topic("T")
    assert {name: each.perm for name, each in settings.items()} == {"a": 6, "b": 4, "c": 6}


async def test_a_topic_that_is_not_whole_is_not_purged(mq: Brokers, admin: Admin) -> None:
    await admin.create_static_topic("T", 3)
    await send(mq)
    await mq.stop("c")
    with pytest.raises(NotEverywhere, match=r"T is not purged, .*broker c \(queue 2\)"):
        await admin.purge_topic("T")
    await admin.forget_broker("c")
    with pytest.raises(StaticTopicError, match=r"queue 2: .*has no leader"):
        await admin.purge_topic("T")
    await mq.start("c")
    assert sum(queue.messages for queue in await admin.logic_queues("T")) == 12


async def test_a_topic_is_listed_with_its_logic_queues(mq: Brokers, admin: Admin) -> None:
    await admin.create_static_topic("T", 2, brokers=["a"])
    await send(mq, count=4)
    await admin.remap_static_topic("T", ["b"])
    (totals,) = await admin.topic_totals()
    assert (totals.queues, totals.messages) == (2, 4)


# -- tools that die --------------------------------------------------------------------------------


class CutOffAdmin(Admin):
    """A tool that loses its connections after so many changes of mappings."""

    requests_left = 4

    async def _ask(self, address: str, code: int, *args: Any) -> Any:
        if code == RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC:
            if not self.requests_left:
                raise ConnectionLost(address, "cut off")
            self.requests_left -= 1
        return await super()._ask(address, code, *args)

    async def delete_on(self, topic: str, address: str) -> None:
        header = DeleteTopicHeader(topic=topic)
        await super()._ask(address, RequestCode.DELETE_TOPIC_IN_BROKER, header)


async def test_a_tool_that_is_cut_off_says_how_to_finish(mq: Brokers, admin: Admin) -> None:
    await admin.create_static_topic("T", 2, brokers=["a"])
    async with CutOffAdmin(**mq.at) as cut_off:
        with pytest.raises(HalfDone, match="headrace topic repair T"):
            await cut_off.remap_static_topic("T", ["b", "c"])
    await mq.stop("a")
    with pytest.raises(StaticTopicError, match="a is away"):
        await admin.repair_static_topic("T")
    await mq.start("a")
    await admin.repair_static_topic("T")
    with pytest.raises(UnchangedTopic):
        await admin.repair_static_topic("T")


async def test_a_delete_that_dies(mq: Brokers, admin: Admin) -> None:
    """The topic is deleted on one broker only: delete it again, or give up what was there."""
    for topic in ("T1", "T2"):
        await admin.create_static_topic(topic, 2, brokers=["a"])
        await send(mq, topic, 6)
        await admin.remap_static_topic(topic, ["b"], queues=[1])
        async with CutOffAdmin(**mq.at) as cut_off:
            await cut_off.delete_on(topic, mq.brokers["b"].address)
        with pytest.raises(StaticTopicError, match=r"gone on b.*topic delete.*--forget-broker b"):
            await admin.repair_static_topic(topic)
    await admin.delete_topic("T1")
    await admin.create_static_topic("T1", 1)
    change = await admin.repair_static_topic("T2", forget=["b"])
    assert [(gone.queue, gone.broker) for gone in change.plan.gone] == [(1, "b")]
    assert messages(await admin.logic_queues("T2")) == 6
    await send(mq, "T2", 6)


def messages(queues: list[LogicQueue]) -> int:
    return sum(each.messages for each in queues)


async def test_two_tools_at_once(mq: Brokers, admin: Admin) -> None:
    """The second tool has read the topic before the first one changes it, and changes nothing."""
    await admin.create_static_topic("T", 2, brokers=["a"])

    class SlowAdmin(Admin):
        async def read_static_topic(self, topic: str) -> Any:
            found = await super().read_static_topic(topic)
            await admin.remap_static_topic("T", ["b"])
            return found

    async with SlowAdmin(**mq.at) as slow:
        with pytest.raises(BrokerError, match="another tool"):
            await slow.remap_static_topic("T", ["c"])
    assert await leaders(admin) == ["b", "b"]
    with pytest.raises(UnchangedTopic):
        await admin.repair_static_topic("T")


async def test_a_broker_that_is_gone_is_forgotten(mq: Brokers, admin: Admin) -> None:
    await admin.create_static_topic("T", 2, brokers=["a", "b"])
    await send(mq, count=6)
    await mq.stop("b")
    with pytest.raises(StaticTopicError, match="b is away: start it"):
        await admin.repair_static_topic("T")
    change = await admin.repair_static_topic("T", forget=["b"])
    assert [(gone.queue, gone.broker) for gone in change.plan.gone] == [(1, None)]
    assert "b" not in await leaders(admin)
    await send(mq, count=6)
