"""State that requests leave in memory is charged to the client, counted for its host, or
refused."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import trio
import trio.testing

from headrace_broker.consumer.groups import MEMBER_LIFE_MS
from headrace_broker.consumer.locks import LOCK_LIFE_MS
from headrace_protocol import bounds
from headrace_protocol.bodies import (
    ConsumerData,
    GetConsumerListByGroupResponseBody,
    HeartbeatData,
    LockBatchRequestBody,
    LockBatchResponseBody,
    MessageQueue,
    ProducerData,
    SubscriptionData,
)
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import (
    ConsumerGroupHeader,
    PullMessageHeader,
    UnregisterClientHeader,
)
from tests.broker.consumer.test_groups import notices
from tests.support.broker import Answer, BrokerUnderTest
from tests.support.channel import MemoryChannel
from tests.support.memory import HOST, kept_bytes
from tests.support.wire import pull_header

# -- heartbeats ------------------------------------------------------------------------------------


def heartbeat(broker: BrokerUnderTest, channel: MemoryChannel, data: HeartbeatData) -> Answer:
    return broker.ask(RequestCode.HEART_BEAT, body=data.encode(), channel=channel)


def of_producers(start: int, count: int) -> HeartbeatData:
    return HeartbeatData(
        client_id=f"c{start}",
        producer_data_set=[ProducerData(group_name=f"p{start + n}") for n in range(count)],
    )


def subscribed(topics: int, tags: int, group: str = "g") -> ConsumerData:
    return ConsumerData(
        group_name=group,
        subscription_data_set=[
            SubscriptionData(
                topic=f"topic{number}",
                sub_string=" || ".join(f"tag{number}-{tag}" for tag in range(tags)),
                tags_set=[f"tag{number}-{tag}" for tag in range(tags)],
                code_set=[1_000_000 + number * tag for tag in range(tags)],
            )
            for number in range(topics)
        ],
    )


def test_a_client_is_charged_for_its_producer_groups(broker: BrokerUnderTest) -> None:
    channels = iter([MemoryChannel(), MemoryChannel()])
    channel = MemoryChannel()

    def join() -> None:
        nonlocal channel
        channel = next(channels)
        heartbeat(broker, channel, of_producers(id(channel), 1000))

    assert 0 < kept_bytes(join) <= channel.charged_bytes


@pytest.mark.parametrize(("topics", "tags"), [(0, 0), (500, 0), (100, 20), (1, 3000)])
def test_a_client_is_charged_for_its_subscriptions(
    broker: BrokerUnderTest, topics: int, tags: int
) -> None:
    channels = [MemoryChannel(), MemoryChannel()]
    names = iter("gh")
    for name in "gh":  # so that only the members are new
        broker.groups.get_or_create(name, HOST)
        broker.topics.create_retry_topic(name)

    def join() -> None:
        name = next(names)
        data = HeartbeatData(client_id="c", consumer_data_set=[subscribed(topics, tags, name)])
        heartbeat(broker, channels["gh".index(name)], data)

    assert 0 < kept_bytes(join) <= channels[1].charged_bytes


def test_a_charge_follows_heartbeats_and_ends_with_the_client(broker: BrokerUnderTest) -> None:
    channel = MemoryChannel()
    charges = []
    for topics in (1, 50, 1):
        data = HeartbeatData(client_id="c", consumer_data_set=[subscribed(topics, 0)])
        heartbeat(broker, channel, data)
        charges.append(channel.charged_bytes)
    assert charges[0] == charges[2] < charges[1]
    silent = HeartbeatData(
        client_id="c", consumer_data_set=[ConsumerData(group_name="g")], without_sub=True
    )
    heartbeat(broker, channel, silent)
    assert channel.charged_bytes == charges[0]
    heartbeat(broker, channel, of_producers(0, 10))
    leaving = UnregisterClientHeader(client_id="c", consumer_group="g", producer_group="p0")
    broker.ask(RequestCode.UNREGISTER_CLIENT, leaving, channel=channel)
    assert 0 < channel.charged_bytes < charges[0] * 10
    broker.producers.channel_closed(channel)
    assert channel.charged_bytes == 0


def test_what_a_member_said_and_its_group_keeps_is_charged_to_another(
    broker: BrokerUnderTest,
) -> None:
    stays, leaves = MemoryChannel(), MemoryChannel()
    small = HeartbeatData(client_id="c", consumer_data_set=[subscribed(1, 0)])
    heartbeat(broker, stays, small)
    charged_bytes = stays.charged_bytes
    large = HeartbeatData(client_id="d", consumer_data_set=[subscribed(500, 0)])
    heartbeat(broker, leaves, large)
    large_bytes = leaves.charged_bytes
    broker.consumers.channel_closed(leaves)
    assert leaves.charged_bytes == 0
    assert large_bytes < stays.charged_bytes < large_bytes + 2 * charged_bytes
    heartbeat(broker, stays, small)
    assert stays.charged_bytes == charged_bytes
    broker.consumers.channel_closed(stays)
    assert stays.charged_bytes == 0


def test_subscriptions_that_a_heartbeat_says_to_leave_out_are_not_kept(
    broker: BrokerUnderTest,
) -> None:
    data = HeartbeatData(client_id="c", consumer_data_set=[subscribed(5, 0)], without_sub=True)
    heartbeat(broker, MemoryChannel(), data)
    group = broker.consumers.group("g")
    assert group is not None
    assert group.data.subscription_data_set == []
    assert group.subscriptions == {}


def test_a_client_that_its_charge_closes_is_no_member(broker: BrokerUnderTest) -> None:
    class Greediest(MemoryChannel):
        def charge(self, added_bytes: int) -> None:
            if added_bytes > 0 and self.is_open:
                self.is_open = False
                broker.consumers.channel_closed(self)

    data = HeartbeatData(client_id="c", consumer_data_set=[subscribed(1, 0)])
    broker.send(RequestCode.HEART_BEAT, None, data.encode(), Greediest())
    assert broker.consumers.groups_of_topic("topic0") == set()
    assert broker.consumers.members("g") == []
    broker.consumers.expire(broker.clock.now_ms() + 10 * MEMBER_LIFE_MS)


def test_a_client_that_leaves_many_groups_lets_others_have_their_turn(
    broker: BrokerUnderTest,
) -> None:
    channel = MemoryChannel()
    works: list[Iterator[None]] = []
    heartbeat(broker, channel, of_producers(0, 10))
    data = HeartbeatData(
        client_id="c", consumer_data_set=[ConsumerData(group_name=f"g{n}") for n in range(10)]
    )
    heartbeat(broker, channel, data)
    broker.consumers.run_long = broker.producers.run_long = works.append
    channel.is_open = False
    broker.consumers.channel_closed(channel)
    broker.producers.channel_closed(channel)
    assert broker.consumers.members("g9")
    assert [sum(1 for _ in work) for work in works] == [10, 10]
    assert not broker.consumers.members("g9")
    assert not broker.producers.members("p0")
    assert channel.charged_bytes == 0


@pytest.mark.parametrize("field", ["producerDataSet", "consumerDataSet", "subscriptionDataSet"])
def test_a_heartbeat_of_too_many_items_is_rejected(broker: BrokerUnderTest, field: str) -> None:
    items: list[dict[str, object]] = [{}] * (bounds.ITEMS_MAX + 1)
    data: dict[str, object] = {"clientID": "c", field: items}
    if field == "subscriptionDataSet":
        data = {"clientID": "c", "consumerDataSet": [{"groupName": "g", field: items}]}
    answer = broker.ask(RequestCode.HEART_BEAT, body=msgspec.json.encode(data))
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert "10001" in answer.remark
    assert "the maximum is 10000" in answer.remark
    assert broker.groups.get("g") is None


def test_a_client_id_over_its_bound_is_rejected(broker: BrokerUnderTest) -> None:
    channel = MemoryChannel()
    data = HeartbeatData(client_id="c" * 255, consumer_data_set=[subscribed(1, 0)])
    assert heartbeat(broker, channel, data).code == ResponseCode.SUCCESS
    data.client_id += "c"
    answer = heartbeat(broker, MemoryChannel(), data)
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert answer.remark == "clientID of 256 characters: the maximum is 255"
    assert [member.channel for member in broker.consumers.members("g")] == [channel]


# -- notices ---------------------------------------------------------------------------------------


async def test_notices_about_a_restless_member_are_coalesced(
    broker: BrokerUnderTest, autojump_clock: trio.testing.MockClock
) -> None:
    victim = broker.join("g", "victim")
    attacker = MemoryChannel()
    notices(victim)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(broker.consumers.run)
        await trio.sleep(1.5)
        for number in range(1000):
            broker.send(
                RequestCode.HEART_BEAT,
                None,
                HeartbeatData(
                    client_id=f"c{number}", consumer_data_set=[ConsumerData(group_name="g")]
                ).encode(),
                attacker,
            )
        assert len(notices(victim)) == 4
        await trio.sleep(1)
        assert notices(victim) == ["g"]  # and now it sees the last change
        listing = broker.ask(
            RequestCode.GET_CONSUMER_LIST_BY_GROUP, ConsumerGroupHeader(consumer_group="g")
        )
        members = GetConsumerListByGroupResponseBody.decode(listing.body).consumer_id_list
        assert members == ["victim", "c999"]
        await trio.sleep(10)
        assert notices(victim) == []
        broker.join("g", "late")
        assert notices(victim) == ["g"]
        nursery.cancel_scope.cancel()


# -- locks -----------------------------------------------------------------------------------------


def lock(broker: BrokerUnderTest, client_id: str, queues: list[MessageQueue]) -> Answer:
    body = LockBatchRequestBody(consumer_group="g", client_id=client_id, mq_set=queues)
    return broker.ask(RequestCode.LOCK_BATCH_MQ, body=body.encode())


def queues(start: int, count: int) -> list[MessageQueue]:
    return [MessageQueue(f"topic{start + n}", "b", n) for n in range(count)]


def test_locks_count_for_the_host_of_their_client(broker: BrokerUnderTest) -> None:
    starts = iter((0, 10_000))
    kept = kept_bytes(lambda: lock(broker, "c", queues(next(starts), 2000)))
    assert len(broker.locks) == 4000
    assert 0 < kept <= broker.budget.kept_bytes(HOST) / 2


def test_locks_that_are_not_renewed_are_forgotten(broker: BrokerUnderTest) -> None:
    lock(broker, "c", queues(0, 10))
    broker.clock.ms += LOCK_LIFE_MS
    lock(broker, "c", queues(0, 3))
    broker.clock.ms += 1
    assert sum(1 for _ in broker.locks.expire(broker.clock.ms)) == 7
    assert len(broker.locks) == 3
    broker.clock.ms += LOCK_LIFE_MS
    list(broker.locks.expire(broker.clock.ms))
    assert len(broker.locks) == broker.budget.kept_bytes(HOST) == 0


def test_locks_beyond_the_bound_of_a_host_are_not_granted(broker: BrokerUnderTest) -> None:
    broker.budget.bytes_max = 5000
    answer = lock(broker, "c", queues(0, 10))
    held = LockBatchResponseBody.decode(answer.body).lock_ok_mq_set
    assert held == queues(0, len(held))
    assert 1 <= len(held) < 10
    assert len(broker.locks) == len(held)


def test_locking_many_queues_lets_others_have_their_turn(broker: BrokerUnderTest) -> None:
    works: list[Iterator[None]] = []
    broker.registry.run_long = works.append
    broker.registry.slice_s = 0.0
    body = LockBatchRequestBody(consumer_group="g", client_id="c", mq_set=queues(0, 4000))
    channel = MemoryChannel()
    broker.send(RequestCode.LOCK_BATCH_MQ, None, body.encode(), channel)
    assert sum(1 for _ in works[0]) > 4000 / 128
    ((_, answer),) = channel.replies()
    assert LockBatchResponseBody.decode(answer).lock_ok_mq_set == queues(0, 4000)


def test_locking_too_many_queues_is_rejected(broker: BrokerUnderTest) -> None:
    answer = lock(broker, "c", queues(0, bounds.ITEMS_MAX + 1))
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert len(broker.locks) == 0


# -- held pulls ------------------------------------------------------------------------------------


def held_pull(subscription: str) -> PullMessageHeader:
    return pull_header(
        topic="t",
        max_msg_nums=1,
        sys_flag=6,
        suspend_timeout_millis=10_000,
        subscription=subscription,
    )


async def test_a_held_pull_is_charged_for_its_tags(broker: BrokerUnderTest) -> None:
    broker.create_topic("t")
    charges = []
    for tags in (1, 1000):
        channel = MemoryChannel()
        text = "||".join(f"{tag:03}" for tag in range(tags))
        broker.send(RequestCode.PULL_MESSAGE, held_pull(text), b"", channel)
        charges.append(channel.charged_bytes)
        broker.long_polling.channel_closed(channel)
        assert channel.charged_bytes == 0
    assert charges[1] > charges[0] + 100_000


async def test_a_client_that_leaves_many_held_pulls_lets_others_have_their_turn(
    broker: BrokerUnderTest,
) -> None:
    broker.create_topic("t")
    channel = MemoryChannel()
    for _ in range(20):
        broker.send(RequestCode.PULL_MESSAGE, held_pull("*"), b"", channel)
    works: list[Iterator[None]] = []
    broker.long_polling.run_long = works.append
    broker.long_polling.channel_closed(channel)
    assert broker.long_polling.held_count == 20
    assert sum(1 for _ in works[0]) == 20
    assert broker.long_polling.held_count == channel.charged_bytes == 0
