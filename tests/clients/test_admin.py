"""Admin against a real broker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
import trio

from headrace import Admin, Message, MessageQueue
from headrace.admin.groups import GroupHasMembers
from headrace.admin.shrink import UnreadMessages
from headrace.admin.topics import TopicExists
from headrace.embedded import Embedded
from headrace.errors import (
    BrokerError,
    ClientClosed,
    ConfigurationError,
    GroupNotFound,
    HeadraceError,
    NameserverUnavailable,
    RouteNotFound,
)
from headrace.messages import SendResult
from headrace_protocol.bodies import SubscriptionGroupConfig
from tests.support.fixtures import in_memory

mq = pytest.fixture(in_memory)


@pytest.fixture
async def admin(mq: Embedded) -> AsyncIterator[Admin]:
    async with mq.admin() as admin:
        yield admin


async def send(mq: Embedded, *messages: Any) -> list[SendResult]:
    async with mq.producer() as producer:
        return [await producer.send(message) for message in messages]


async def until(
    condition: Callable[..., Any], wanted: dict[MessageQueue, int] | list[bytes]
) -> dict[MessageQueue, int] | list[bytes]:
    """Wait for what the broker does a moment after it has answered."""
    with trio.fail_after(5):
        while (found := await condition()) != wanted:  # noqa: ASYNC110 - no event crosses the wire
            await trio.sleep(0.005)
    return found


# -- cluster and brokers ---------------------------------------------------------------------------


async def test_the_cluster_lists_its_brokers(mq: Embedded, admin: Admin) -> None:
    (node,) = await admin.cluster()
    assert node.address == mq.broker
    assert node.broker_id == 0
    assert node.broker_name
    assert node.cluster


async def test_a_broker_tells_its_settings_and_its_state(mq: Embedded, admin: Admin) -> None:
    info = await admin.runtime_info(mq.broker)
    assert info["brokerVersionDesc"]
    assert (await admin.broker_config(mq.broker))["brokerName"]


async def test_settings_can_be_changed_where_that_is_allowed(mq: Embedded, admin: Admin) -> None:
    with pytest.raises(BrokerError):
        await admin.update_broker_config(mq.broker, {"storePathRootDir": "/elsewhere"})
    with pytest.raises(ConfigurationError, match="single line"):
        await admin.update_broker_config(mq.broker, {"a": "b\nc=d"})


# -- topics ----------------------------------------------------------------------------------------


async def test_topics_are_made_listed_described_changed_and_deleted(admin: Admin) -> None:
    await admin.create_topic("T", queues=3)
    assert await admin.topics() == ["T"]
    assert {"T", "TBW102"} <= set(await admin.topics(system=True))
    ((broker_name, config),) = (await admin.topic("T")).items()
    assert (config.write_queue_nums, config.read_queue_nums, config.perm) == (3, 3, 6)
    await admin.alter_topic("T", queues=2, perm=4, broker=broker_name)
    config = (await admin.topic("T"))[broker_name]
    assert (config.write_queue_nums, config.read_queue_nums, config.perm) == (2, 2, 4)
    await admin.delete_topic("T")
    assert await admin.topics() == []
    with pytest.raises(RouteNotFound):
        await admin.topic("T")


async def test_create_refuses_an_existing_topic(admin: Admin) -> None:
    attributes = {"message.type": "FIFO"}
    await admin.create_topic("T", queues=8, attributes=attributes)
    with pytest.raises(TopicExists, match=r"8 queues, perm rw, message\.type=FIFO on broker-a"):
        await admin.create_topic("T", queues=8)
    await admin.create_topic("T", queues=8, if_not_exists=True)
    for queues, reads, perm in ((4, 8, 6), (8, 9, 6), (8, 8, 4)):
        with pytest.raises(TopicExists):
            await admin.create_topic(
                "T", queues=queues, read_queues=reads, perm=perm, if_not_exists=True
            )
    (config,) = (await admin.topic("T")).values()
    assert (config.write_queue_nums, config.read_queue_nums, config.perm) == (8, 8, 6)


async def test_alter_keeps_what_it_does_not_name(admin: Admin) -> None:
    await admin.create_topic("T", queues=8, read_queues=9, perm=4)
    await admin.alter_topic("T", attributes={"message.type": "FIFO"})
    (config,) = (await admin.topic("T")).values()
    assert (config.write_queue_nums, config.read_queue_nums, config.perm) == (8, 9, 4)
    assert config.attributes["message.type"] == "FIFO"
    await admin.alter_topic("T", perm=6)
    (config,) = (await admin.topic("T")).values()
    assert (config.perm, config.attributes["message.type"]) == (6, "FIFO")
    with pytest.raises(ConfigurationError, match="broker nobody does not have topic T"):
        await admin.alter_topic("T", perm=4, broker="nobody")


async def test_queues_are_written_and_read(mq: Embedded, admin: Admin) -> None:
    await admin.create_topic("T", queues=1)
    await admin.alter_topic("T", queues=4)
    async with mq.producer() as producer:
        await producer.send(Message("T", b"x"), queue=MessageQueue("T", "broker-a", 3))
    with pytest.raises(UnreadMessages, match="queue 3 of broker-a holds 1 message"):
        await admin.alter_topic("T", queues=2)
    (config,) = (await admin.topic("T")).values()
    assert (config.write_queue_nums, config.read_queue_nums) == (4, 4)
    await admin.alter_topic("T", queues=4, read_queues=6)
    await admin.purge_topic("T")
    await admin.alter_topic("T", queues=2)
    (config,) = (await admin.topic("T")).values()
    assert (config.write_queue_nums, config.read_queue_nums) == (2, 2)


async def test_topics_that_are_not_there(admin: Admin) -> None:
    for call in (
        admin.topic,
        admin.topic_stats,
        admin.topic_groups,
        admin.delete_topic,
        admin.alter_topic,
    ):
        with pytest.raises(RouteNotFound, match="Missing"):
            await call("Missing")


async def test_bad_topics_and_brokers_are_refused(admin: Admin) -> None:
    with pytest.raises(HeadraceError, match="not a valid topic name"):
        await admin.create_topic("bad topic")
    with pytest.raises(ConfigurationError, match="broker named nobody"):
        await admin.create_topic("T", broker="nobody")


async def test_topic_stats_count_messages_by_queue(mq: Embedded, admin: Admin) -> None:
    await admin.create_topic("T", queues=2)
    results = await send(mq, *[Message("T", b"x") for _ in range(6)])
    queues = sorted({result.queue for result in results})

    async def counts() -> dict[MessageQueue, int]:
        stats = await admin.topic_stats("T")
        return {queue: offset.max_offset - offset.min_offset for queue, offset in stats.items()}

    assert await until(counts, dict.fromkeys(queues, 3))


# -- groups ----------------------------------------------------------------------------------------


async def test_groups_are_made_listed_and_deleted(admin: Admin) -> None:
    await admin.create_group(SubscriptionGroupConfig(group_name="g", retry_max_times=3))
    (group,) = [group for group in await admin.groups() if group.group_name == "g"]
    assert group.retry_max_times == 3
    await admin.delete_group("g")
    assert "g" not in {group.group_name for group in await admin.groups()}
    with pytest.raises(ConfigurationError):
        await admin.create_group(SubscriptionGroupConfig(group_name="my group"))


@pytest.mark.parametrize(
    ("method", "arguments"), [("group", ["g"]), ("delete_group", ["g"]), ("clone_offsets", "gh")]
)
async def test_a_group_that_does_not_exist_is_named(
    admin: Admin, method: str, arguments: Sequence[str]
) -> None:
    with pytest.raises(GroupNotFound, match="group g does not exist"):
        await getattr(admin, method)(*arguments)


async def test_lag_members_and_groups_of_a_topic(mq: Embedded, admin: Admin) -> None:
    await admin.create_topic("T", queues=1)
    await send(mq, *[Message("T", b"%d" % n) for n in range(10)])
    queue = MessageQueue("T", (await admin.cluster())[0].broker_name, 0)
    assert await admin.members("g") == {}
    async with mq.consumer("g", "T") as consumer:
        async for message in consumer:
            if message.body == b"3":
                break
        await consumer.commit()
        (lag,) = await admin.lag("g", "T")
        assert (lag.queue, lag.committed_offset, lag.max_offset, lag.lag) == (queue, 4, 10, 6)
        assert lag.last_timestamp_ms > 0
        ((_, connection),) = (await admin.members("g")).items()
        assert len(connection.connection_set) == 1
        assert set(connection.subscription_table) == {"T", "%RETRY%g"}
        assert await admin.topic_groups("T") == ["g"]
        (member,) = connection.connection_set
        with pytest.raises(GroupHasMembers, match=f"connected members.*; stop {member.client_id}"):
            await admin.delete_group("g")
    with pytest.raises(ConfigurationError, match="cannot be cloned to itself"):
        await admin.clone_offsets("g", "g")


async def test_a_group_is_reset_to_first_last_and_a_time(mq: Embedded, admin: Admin) -> None:
    await admin.create_topic("T", queues=1)
    (early,) = await send(mq, Message("T", b"early"))
    await trio.sleep(0.005)
    (late,) = await send(mq, Message("T", b"late"))
    async with mq.consumer("g", "T") as consumer:
        await anext(aiter(consumer))
    queue = early.queue
    stored = await admin.message(late.offset_message_id)
    assert stored is not None
    assert await admin.reset_offsets("g", "T", stored.store_timestamp_ms) == {queue: 1}
    assert await admin.reset_offsets("g", "T", "latest") == {queue: 2}
    assert await admin.reset_offsets("g", "T", "earliest") == {queue: 0}
    with pytest.raises(ConfigurationError):
        await admin.reset_offsets("g", "T", "middle")  # type: ignore[arg-type]


# -- messages --------------------------------------------------------------------------------------


async def test_messages_are_found_by_key_and_by_both_ids(mq: Embedded, admin: Admin) -> None:
    results = await send(
        mq, Message("T", b"1", key="a b"), Message("T", b"2", key="b"), Message("T", b"3")
    )

    async def bodies(key: str) -> list[bytes]:
        return [message.body for message in await admin.query_by_key("T", key)]

    await until(lambda: bodies("b"), [b"1", b"2"])
    assert await bodies("a") == [b"1"]
    assert await bodies("c") == []
    found = await admin.message(results[2].offset_message_id)
    assert found is not None
    assert (found.body, found.queue, found.queue_offset) == (
        b"3",
        results[2].queue,
        results[2].queue_offset,
    )
    found = await admin.message(results[1].message_id, "T")
    assert found is not None
    assert found.body == b"2"


async def test_messages_that_are_not_there(mq: Embedded, admin: Admin) -> None:
    (result,) = await send(mq, Message("T", b"1"))
    with pytest.raises(ConfigurationError, match="topic"):
        await admin.message(result.message_id)
    with pytest.raises(ConfigurationError, match="topic"):
        await admin.message("what")
    assert await admin.message("0" * 32, "T") is None
    behind = result.offset_message_id[:-8] + "00FFFFFF"
    assert await admin.message(behind) is None


# -- wrong use -------------------------------------------------------------------------------------


async def test_an_admin_outside_its_block_is_an_error() -> None:
    with pytest.raises(ClientClosed, match="Admin"):
        await Admin(nameserver="127.0.0.1:65001").topics()


async def test_a_nameserver_that_is_not_there_is_named(mq: Embedded) -> None:
    async with Admin(nameserver="127.0.0.1:65001", connect=mq.connect) as admin:
        with pytest.raises(NameserverUnavailable, match=r"127\.0\.0\.1:65001"):
            await admin.topics()
