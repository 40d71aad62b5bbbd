"""Static topics as Admin shows them: logic queues, their messages, and the lag of groups."""

from __future__ import annotations

import pytest

from headrace import Message, MessageQueue, Producer, PullConsumer
from headrace.admin.client import Admin
from headrace.admin.requests import BrokerProblem
from headrace_protocol.bodies import SubscriptionGroupConfig
from headrace_protocol.statictopic.plans import Mode
from tests.support.fixtures import admin_of_brokers, brokers_named
from tests.support.running_brokers import Brokers

QUEUE = MessageQueue("T", "__syslo__global__", 0)


mq = pytest.fixture(brokers_named(["a", "b"]))
admin = pytest.fixture(admin_of_brokers)


async def send(mq: Brokers, count: int) -> None:
    async with Producer(**mq.at) as producer:
        for _ in range(count):
            await producer.send(Message("T", b"x"))


async def commit(mq: Brokers, offset: int) -> None:
    async with PullConsumer("g", **mq.at) as consumer:
        await consumer.commit({QUEUE: offset})


async def jumped(mq: Brokers, admin: Admin) -> None:
    """A queue with messages at 0 to 4 on one broker and at 10000 to 10002 on the other."""
    await admin.create_group(SubscriptionGroupConfig(group_name="g"))
    await admin.create_static_topic("T", 1, brokers=["a"])
    await send(mq, 5)
    await admin.remap_static_topic("T", ["b"], mode=Mode.AVAILABLE)
    await send(mq, 3)


@pytest.mark.parametrize(
    ("committed", "lag"),
    [(0, 8), (2, 6), (5, 3), (10_000, 3), (10_002, 1), (10_003, 0)],
)
async def test_a_lag_counts_messages(mq: Brokers, admin: Admin, committed: int, lag: int) -> None:
    await jumped(mq, admin)
    await commit(mq, committed)
    (found,) = await admin.lag("g")
    assert (found.queue, found.committed_offset, found.max_offset) == (QUEUE, committed, 10_003)
    assert found.lag == lag


async def test_offsets_are_those_of_logic_queues(mq: Brokers, admin: Admin) -> None:
    await jumped(mq, admin)
    stats = await admin.topic_stats("T")
    assert [*stats] == [QUEUE]
    assert (stats[QUEUE].min_offset, stats[QUEUE].max_offset) == (0, 10_003)
    assert stats[QUEUE].last_update_timestamp > 0


async def test_a_broker_that_is_away_leaves_a_hole(mq: Brokers, admin: Admin) -> None:
    await jumped(mq, admin)
    await mq.stop("a")
    first, second = await admin.queue_parts("T")
    assert first.extent is None
    assert second.extent is not None
    assert second.extent.messages == 3
    problems: list[BrokerProblem] = []
    (queue,) = await admin.logic_queues("T", problems=problems)
    assert (queue.leader, queue.messages) == ("b", 3)


async def test_a_reset_names_logic_queues(mq: Brokers, admin: Admin) -> None:
    await jumped(mq, admin)
    await commit(mq, 2)
    assert await admin.reset_offsets("g", "T", "latest") == {QUEUE: 10_003}
    assert (await admin.lag("g"))[0].lag == 0
    assert await admin.reset_offsets("g", "T", "earliest") == {QUEUE: 0}
    assert (await admin.lag("g"))[0].lag == 8


async def test_messages_are_found_in_their_logic_queues(mq: Brokers, admin: Admin) -> None:
    await admin.create_static_topic("T", 2, brokers=["a"])
    results = []
    async with Producer(**mq.at) as producer:
        for target in ("b", "a"):
            results += [await producer.send(Message("T", b"x", key=f"k{n}")) for n in range(4)]
            await admin.remap_static_topic("T", [target], mode=Mode.AVAILABLE)
        results += [await producer.send(Message("T", b"x", key=f"k{n}")) for n in range(4)]
    sent = sorted((each.queue, each.queue_offset) for each in results)
    by_key = [message for n in range(4) for message in await admin.query_by_key("T", f"k{n}")]
    assert sorted((each.queue, each.queue_offset) for each in by_key) == sent
    for result in results:
        for message_id in (result.message_id, result.offset_message_ids[0]):
            found = await admin.message(message_id, "T")
            assert found is not None
            assert (found.queue, found.queue_offset) == (result.queue, result.queue_offset)


async def test_found_messages_are_in_logic_queues(mq: Brokers, admin: Admin) -> None:
    await admin.create_static_topic("T", 1, brokers=["a"])
    sent = []
    for target in ("b", "a"):
        async with Producer(**mq.at) as producer:
            sent.append(await producer.send(Message("T", b"x", key="k")))
        await admin.remap_static_topic("T", [target], mode=Mode.AVAILABLE)
    found = await admin.query_by_key("T", "k")
    assert [(each.queue, each.queue_offset) for each in found] == [(QUEUE, 0), (QUEUE, 10_000)]
    for each, result in zip(found, sent, strict=True):
        assert result.offset_message_id is not None
        again = await admin.message(result.offset_message_id, "T")
        assert again is not None
        assert (again.queue, again.queue_offset) == (each.queue, each.queue_offset)
