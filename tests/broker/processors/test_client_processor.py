"""Requests of clients about themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from headrace_broker.processors.client import ClientProcessor
from headrace_protocol.bodies import (
    CheckClientRequestBody,
    ConsumerData,
    GetConsumerListByGroupResponseBody,
    HeartbeatData,
    LockBatchRequestBody,
    LockBatchResponseBody,
    MessageQueue,
    ProducerData,
    SubscriptionData,
    SubscriptionGroupConfig,
)
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import FLAG_ONEWAY, header_fields
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.headers import (
    ConsumerGroupHeader,
    OffsetResponseHeader,
    QueryConsumerOffsetHeader,
    UnregisterClientHeader,
    UpdateConsumerOffsetHeader,
)
from tests.support.broker import Answer, BrokerUnderTest, heartbeat
from tests.support.channel import MemoryChannel


def members(broker: BrokerUnderTest, group: str) -> list[str]:
    answer = broker.ask(
        RequestCode.GET_CONSUMER_LIST_BY_GROUP, ConsumerGroupHeader(consumer_group=group)
    )
    if answer.code == ResponseCode.SYSTEM_ERROR:
        assert f"no consumer for this group, {group}" in answer.remark
        return []
    return GetConsumerListByGroupResponseBody.decode(answer.body).consumer_id_list


# -- members ---------------------------------------------------------------------------------------


def test_a_heartbeat_makes_the_group_and_its_retry_topic(broker: BrokerUnderTest) -> None:
    broker.groups.put(SubscriptionGroupConfig(group_name="known", retry_queue_nums=3))
    broker.join("known", "c1", "t")
    broker.join("new", "c2", "t")
    assert broker.topics.expect("%RETRY%known").read_queue_nums == 3
    assert broker.topics.expect("%RETRY%new").read_queue_nums == 1
    assert broker.groups.get("new") == SubscriptionGroupConfig(group_name="new")
    assert members(broker, "new") == ["c2"]


def test_a_heartbeat_is_answered_as_the_peer_does(broker: BrokerUnderTest) -> None:
    answer = broker.ask(RequestCode.HEART_BEAT, body=heartbeat("g", "c", "t"))
    assert answer.command.ext() == {"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": "true"}


def test_members_are_told_of_each_other(broker: BrokerUnderTest) -> None:
    one = broker.join("g", "c1", "t")
    two = broker.join("g", "c2", "t")
    assert [command.code for command, _ in one.replies()] == [
        RequestCode.NOTIFY_CONSUMER_IDS_CHANGED
    ]
    header = UnregisterClientHeader(client_id="c1", consumer_group="g", producer_group="p")
    broker.ask(RequestCode.UNREGISTER_CLIENT, header, channel=one)
    assert len(two.replies()) == 1
    assert members(broker, "g") == ["c2"]
    broker.ask(RequestCode.UNREGISTER_CLIENT, header, channel=one)
    assert two.replies() == []


def test_a_group_that_cannot_be_does_not_spoil_the_others(broker: BrokerUnderTest) -> None:
    data = HeartbeatData(
        client_id="c",
        producer_data_set=[ProducerData(group_name="p")],
        consumer_data_set=[
            ConsumerData(group_name="not a name"),
            ConsumerData(group_name="good"),
            ConsumerData(group_name="nor this"),
        ],
    )
    answer = broker.ask(RequestCode.HEART_BEAT, body=data.encode())
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert "group 'not a name'" in answer.remark
    assert "group 'nor this'" in answer.remark
    assert members(broker, "good") == ["c"]
    assert broker.consumers.members("not a name") == []
    assert [member.client_id for member in broker.producers.members("p")] == ["c"]


def begun_heartbeat(broker: BrokerUnderTest) -> tuple[MemoryChannel, Iterator[None]]:
    """One of 500 groups, and the slices in which it is taken in."""
    consumers = [ConsumerData(group_name=f"g{number}") for number in range(500)]
    data = HeartbeatData(
        client_id="c",
        producer_data_set=[ProducerData(group_name="p")],
        consumer_data_set=consumers,
    )
    works: list[Iterator[None]] = []
    broker.registry.run_long = works.append
    broker.registry.slice_s = 0.0
    channel = MemoryChannel()
    broker.send(RequestCode.HEART_BEAT, None, data.encode(), channel)
    (work,) = works
    return channel, work


def test_a_heartbeat_of_many_groups_lets_others_have_their_turn(broker: BrokerUnderTest) -> None:
    channel, work = begun_heartbeat(broker)
    next(work)
    assert members(broker, "g499") == []
    broker.join("g", "other", "t")
    assert sum(1 for _ in work) >= 500
    (answer,) = (command for command, _ in channel.replies() if command.is_response)
    assert answer.code == ResponseCode.SUCCESS
    assert members(broker, "g0") == members(broker, "g499") == ["c"]


def test_who_leaves_while_its_groups_are_taken_in_is_no_member(broker: BrokerUnderTest) -> None:
    channel, work = begun_heartbeat(broker)
    for _ in range(300):
        next(work)
    assert members(broker, "g100") == ["c"]
    channel.is_open = False
    broker.consumers.channel_closed(channel)
    broker.producers.channel_closed(channel)
    assert list(work) == []
    assert [broker.consumers.members(f"g{number}") for number in range(500)] == [[]] * 500
    assert broker.producers.members("p") == []


@pytest.mark.parametrize("body", [b"", b"[1]", b'{"consumerDataSet":3}', b"{"])
def test_bodies_that_are_no_heartbeat(broker: BrokerUnderTest, body: bytes) -> None:
    with structlog.testing.capture_logs() as logs:
        answer = broker.ask(RequestCode.HEART_BEAT, body=body)
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert "malformed request HEART_BEAT (34)" in answer.remark
    # The C++ client ignores the answer, so the broker's owner must learn of it.
    assert [(line["event"], line["client"], line["language"], line["reason"]) for line in logs] == [
        ("heartbeat refused", "127.0.0.1:1", "PYTHON", answer.remark)
    ]


def test_a_heartbeat_with_enums_as_numbers_joins_the_group(broker: BrokerUnderTest) -> None:
    answer = broker.ask(
        RequestCode.HEART_BEAT,
        body=b"""{"clientID":"cpp","consumerDataSet":[{"consumeFromWhere":4,"consumeType":1,
        "groupName":"g","messageModel":0,"subscriptionDataSet":[{"classFilterMode":false,
        "codeSet":[],"subString":"*","subVersion":"1700000000000","tagsSet":[],"topic":"t"}],
        "unitMode":false}],"producerDataSet":[{"groupName":"p"}]}""",
    )
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    assert members(broker, "g") == ["cpp"]
    group = broker.consumers.group("g")
    assert group is not None
    assert group.data.consume_type == "CONSUME_PASSIVELY"
    assert group.data.message_model == "BROADCASTING"


def check_subscription(broker: BrokerUnderTest, expression_type: str) -> Answer:
    body = CheckClientRequestBody(
        client_id="c",
        group="g",
        subscription_data=SubscriptionData(sub_string="a > 5", expression_type=expression_type),
    )
    return broker.ask(RequestCode.CHECK_CLIENT_CONFIG, body=body.encode())


def test_subscriptions_that_the_broker_does_not_evaluate(broker: BrokerUnderTest) -> None:
    assert check_subscription(broker, "TAG").code == ResponseCode.SUCCESS
    assert check_subscription(broker, "SQL92").code == ResponseCode.SUCCESS
    answer = check_subscription(broker, "LUA")
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "filter message by 'LUA'" in answer.remark


# -- locks -----------------------------------------------------------------------------------------


def test_queue_locks(broker: BrokerUnderTest) -> None:
    queues = [MessageQueue("t", "broker-a", queue_id) for queue_id in range(2)]

    def lock(client_id: str, code: RequestCode = RequestCode.LOCK_BATCH_MQ) -> Answer:
        body = LockBatchRequestBody(consumer_group="g", client_id=client_id, mq_set=queues)
        return broker.ask(code, body=body.encode())

    assert LockBatchResponseBody.decode(lock("c1").body).lock_ok_mq_set == queues
    assert LockBatchResponseBody.decode(lock("c2").body).lock_ok_mq_set == []
    assert lock("c1", RequestCode.UNLOCK_BATCH_MQ).code == ResponseCode.SUCCESS
    assert LockBatchResponseBody.decode(lock("c2").body).lock_ok_mq_set == queues
    broker.clock.ms += 60_001
    assert LockBatchResponseBody.decode(lock("c1").body).lock_ok_mq_set == queues


# -- progress --------------------------------------------------------------------------------------


def query(broker: BrokerUnderTest, topic: str, *, zero: bool | None = None) -> int | None:
    answer = broker.ask(
        RequestCode.QUERY_CONSUMER_OFFSET,
        QueryConsumerOffsetHeader(
            consumer_group="g", topic=topic, queue_id=0, set_zero_if_not_found=zero
        ),
    )
    if answer.code == ResponseCode.QUERY_NOT_FOUND:
        return None
    return answer.command.header(OffsetResponseHeader).offset


def commit(broker: BrokerUnderTest, **fields: Any) -> Answer:
    known: dict[str, Any] = {"consumer_group": "g", "topic": "t", "queue_id": 0, "commit_offset": 1}
    return broker.ask(
        RequestCode.UPDATE_CONSUMER_OFFSET, UpdateConsumerOffsetHeader(**{**known, **fields})
    )


def test_commits_are_found_again(broker: BrokerUnderTest) -> None:
    broker.create_topic("t")
    broker.join("g", "c", "t")
    assert commit(broker, commit_offset=7).code == ResponseCode.SUCCESS
    assert query(broker, "t") == 7


def test_a_group_without_commits_begins_an_empty_queue(broker: BrokerUnderTest) -> None:
    broker.create_topic("t")
    assert query(broker, "t") == 0
    assert query(broker, "t", zero=False) is None


def test_a_group_without_commits_begins_a_young_queue(broker: BrokerUnderTest) -> None:
    broker.create_topic("t")
    broker.store_message("t", 0)
    assert query(broker, "t") == 0
    assert query(broker, "t", zero=True) == 0
    assert query(broker, "t", zero=False) is None


def test_a_group_without_commits_chooses_in_an_old_queue(broker: BrokerUnderTest) -> None:
    broker.create_topic("t")
    broker.store_message("t", 0, b"x" * 1000)
    broker.part(ClientProcessor).memory_bytes = 2000
    assert query(broker, "t") is None


def test_a_commit_does_not_overrun_a_reset(broker: BrokerUnderTest) -> None:
    broker.create_topic("t")
    broker.join("g", "c", "t")
    broker.offsets.reset("g", "t", 0, 3)
    answer = commit(broker, commit_offset=9)
    assert (answer.code, answer.remark) == (0, "Offset has been previously reset")
    assert query(broker, "t") == 3


def test_one_way_requests_get_no_answer(broker: BrokerUnderTest) -> None:
    header = UpdateConsumerOffsetHeader(
        consumer_group="missing", topic="t", queue_id=0, commit_offset=1
    )
    channel = MemoryChannel()
    frame = encode_frame(
        SerializeType.JSON,
        RequestCode.UPDATE_CONSUMER_OFFSET,
        1,
        flag=FLAG_ONEWAY,
        fields=header_fields(header),
    )
    broker.take(frame, channel)
    assert channel.replies() == []
