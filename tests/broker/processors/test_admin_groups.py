"""Groups: settings, members, progress and resets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_protocol import fastjson
from headrace_protocol.admin_headers import (
    CloneGroupOffsetHeader,
    DeleteSubscriptionGroupHeader,
    GetAllSubscriptionGroupHeader,
    GetAllSubscriptionGroupResponseHeader,
    GetBrokerConsumeStatsHeader,
    GetConsumeStatsHeader,
    GetProducerConnectionListHeader,
    QueryConsumeQueueHeader,
    QueryConsumeTimeSpanHeader,
    QueryTopicConsumeByWhoHeader,
    ResetOffsetHeader,
)
from headrace_protocol.bodies import (
    ConsumeQueueData,
    ConsumerConnection,
    ConsumerData,
    ConsumeStats,
    GroupList,
    HeartbeatData,
    MessageQueue,
    OffsetWrapper,
    ProducerConnection,
    ProducerData,
    QueryConsumeQueueResponseBody,
    QueryConsumeTimeSpanBody,
    QueueTimeSpan,
    ResetOffsetBody,
    SubscriptionData,
    SubscriptionGroupConfig,
    SubscriptionGroupWrapper,
)
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import VERSION
from headrace_protocol.headers import ConsumerGroupHeader, PullMessageResponseHeader
from headrace_protocol.java_hash import tags_code
from headrace_protocol.message import decode_record
from tests.support.broker import Answer, BrokerUnderTest
from tests.support.channel import MemoryChannel
from tests.support.pop_broker import INVISIBLE_MS, PopBroker
from tests.support.wire import pull_header


def queue(queue_id: int, topic: str = "t") -> MessageQueue:
    return MessageQueue(topic, "broker-a", queue_id)


@pytest.fixture
def start_ms(broker: BrokerUnderTest) -> int:
    """Topic t with queues 0 (4 messages, a second apart) and 1 (empty), read by group g."""
    start = broker.clock.ms
    broker.create_topic("t")
    for number in range(4):
        broker.store_message("t", 0, b"%d" % number, TAGS=f"T{number}")
    broker.groups.put(SubscriptionGroupConfig(group_name="g"))
    return start


# -- settings --------------------------------------------------------------------------------------


def put(broker: BrokerUnderTest, group: SubscriptionGroupConfig) -> Answer:
    return broker.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=group.encode())


def test_groups_are_made_read_and_deleted(broker: BrokerUnderTest) -> None:
    group = SubscriptionGroupConfig(group_name="g", retry_max_times=3)
    assert put(broker, group).code == ResponseCode.SUCCESS

    def read(**fields: int) -> SubscriptionGroupWrapper:
        answer = broker.ask(
            RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, GetAllSubscriptionGroupHeader(**fields)
        )
        header = answer.command.header(GetAllSubscriptionGroupResponseHeader)
        assert header.total_group_num == len(broker.groups)
        return SubscriptionGroupWrapper.decode(answer.body)

    assert read().subscription_group_table["g"] == group
    assert read().data_version == broker.groups.data_version
    parts = [read(group_seq=start, max_group_num=5) for start in (0, 5)]
    assert [len(part.subscription_group_table) for part in parts] == [5, len(broker.groups) - 5]

    broker.offsets.commit("g", "t", 0, 1)
    for clean, offset in ((None, 1), (True, None)):
        header = DeleteSubscriptionGroupHeader(group_name="g", clean_offset=clean)
        assert broker.ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, header).code == 0
        assert broker.groups.get("g") is None
        assert broker.offsets.query("g", "t", 0) == offset


# -- members ---------------------------------------------------------------------------------------


def test_who_is_in_a_group(broker: BrokerUnderTest) -> None:
    code, header = RequestCode.GET_CONSUMER_CONNECTION_LIST, ConsumerGroupHeader(consumer_group="g")
    answer = broker.ask(code, header)
    assert answer.code == ResponseCode.CONSUMER_NOT_ONLINE
    assert answer.remark == "the consumer group[g] not online"
    channel = broker.join("g", "c", "t")
    body = ConsumerConnection.decode(broker.ask(code, header).body)
    (connection,) = body.connection_set
    assert (connection.client_id, connection.client_addr) == ("c", channel.address)
    assert (connection.language, connection.version) == ("PYTHON", VERSION)
    assert body.subscription_table["t"].sub_string == "*"
    assert body.message_model == "CLUSTERING"


def test_who_is_in_a_producer_group(broker: BrokerUnderTest) -> None:
    code = RequestCode.GET_PRODUCER_CONNECTION_LIST
    header = GetProducerConnectionListHeader(producer_group="p")
    answer = broker.ask(code, header)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "the producer group[p] not exist" in answer.remark
    data = HeartbeatData(client_id="c", producer_data_set=[ProducerData(group_name="p")])
    broker.ask(RequestCode.HEART_BEAT, body=data.encode())
    body = ProducerConnection.decode(broker.ask(code, header).body)
    assert [connection.client_id for connection in body.connection_set] == ["c"]


# -- progress --------------------------------------------------------------------------------------


def stats(broker: BrokerUnderTest, topic: str | None = None) -> dict[MessageQueue, OffsetWrapper]:
    header = GetConsumeStatsHeader(consumer_group="g", topic=topic)
    answer = broker.ask(RequestCode.GET_CONSUME_STATS, header)
    return fastjson.decode(answer.body, ConsumeStats).offset_table


def test_how_far_a_group_is(broker: BrokerUnderTest, start_ms: int) -> None:
    assert stats(broker) == {}
    broker.offsets.commit("g", "t", 0, 3)
    broker.offsets.commit_pull("g", "t", 0, 4)
    expected = {
        queue(0): OffsetWrapper(
            broker_offset=4, consumer_offset=3, pull_offset=4, last_timestamp=start_ms + 2000
        ),
        queue(1): OffsetWrapper(),
    }
    assert stats(broker) == expected
    assert stats(broker, "t") == expected
    broker.offsets.commit("g", "gone", 0, 3)
    assert stats(broker) == expected
    assert stats(broker, "gone") == {}


def test_what_a_group_has_out(tmp_path: Path) -> None:
    broker = PopBroker(tmp_path)
    for _ in range(5):
        broker.store_message("T", 0)
    _, second, *_ = [handle for _, handle in broker.taken(queue_id=0)]
    broker.ack(second)
    broker.join("g", "c", "T")
    row = stats(broker)[queue(0, "T")]
    assert (row.consumer_offset, row.pull_offset, row.out_count) == (0, 4, 4)
    header = GetBrokerConsumeStatsHeader(is_order=False)
    assert b'"totalInflightDiff":4' in broker.ask(RequestCode.GET_BROKER_CONSUME_STATS, header).body
    broker.clock.ms += INVISIBLE_MS
    broker.revive()
    broker.taken(max_msg_nums=3)
    found = stats(broker)
    assert found[queue(0, "T")].out_count == 0
    assert found[queue(0, "%RETRY%g_T")].out_count == 3


def test_topics_that_a_group_has_given_up_are_left_out(
    broker: BrokerUnderTest, start_ms: int
) -> None:
    broker.offsets.commit("g", "t", 0, 3)
    channel = broker.join("g", "c", "other")
    assert stats(broker) == {}
    broker.join("g", "c", "t", channel=channel)
    assert len(stats(broker)) == 2


def test_who_reads_a_topic(broker: BrokerUnderTest, start_ms: int) -> None:
    broker.offsets.commit("past", "t", 0, 3)
    broker.join("now", "c", "t")
    header = QueryTopicConsumeByWhoHeader(topic="t")
    answer = broker.ask(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, header)
    assert GroupList.decode(answer.body).group_list == ["now", "past"]
    header = QueryTopicConsumeByWhoHeader(topic="t", logical=False)
    answer = broker.ask(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, header)
    assert GroupList.decode(answer.body).group_list == ["past"]


def test_where_a_group_stands_in_time(broker: BrokerUnderTest, start_ms: int) -> None:
    broker.offsets.commit("g", "t", 0, 3)
    header = QueryConsumeTimeSpanHeader(topic="t", group="g")
    answer = broker.ask(RequestCode.QUERY_CONSUME_TIME_SPAN, header)
    assert QueryConsumeTimeSpanBody.decode(answer.body).consume_time_span_set == [
        QueueTimeSpan(
            message_queue=queue(0),
            min_time_stamp=start_ms,
            max_time_stamp=start_ms + 3000,
            consume_time_stamp=start_ms + 2000,
            delay_time=broker.clock.ms - (start_ms + 3000),
        ),
        QueueTimeSpan(message_queue=queue(1)),
    ]
    header = QueryConsumeTimeSpanHeader(topic="x", group="g")
    answer = broker.ask(RequestCode.QUERY_CONSUME_TIME_SPAN, header)
    assert answer.code == ResponseCode.TOPIC_NOT_EXIST


# -- resets ----------------------------------------------------------------------------------------


def reset(broker: BrokerUnderTest, **fields: Any) -> Answer:
    header: dict[str, Any] = {"topic": "t", "group": "g", "timestamp": 0, "is_force": True}
    return broker.ask(
        RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, ResetOffsetHeader(**{**header, **fields})
    )


def targets(answer: Answer) -> dict[MessageQueue, int]:
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return fastjson.decode(answer.body, ResetOffsetBody).offset_table


def test_resets_by_time(broker: BrokerUnderTest, start_ms: int) -> None:
    assert targets(reset(broker, timestamp=start_ms + 1500)) == {queue(0): 2, queue(1): 0}
    assert targets(reset(broker, timestamp=-1)) == {queue(0): 4, queue(1): 0}
    assert targets(reset(broker, timestamp=0, queue_id=0)) == {queue(0): 0}
    assert broker.offsets.query("g", "t", 0) == 0


def test_resets_to_an_offset(broker: BrokerUnderTest, start_ms: int) -> None:
    assert targets(reset(broker, queue_id=0, offset=3)) == {queue(0): 3}
    assert targets(reset(broker, queue_id=0, offset=-1, timestamp=-1)) == {queue(0): 4}
    answer = reset(broker, queue_id=0, offset=5)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "Target offset 5 not in consume queue range [0-4]" in answer.remark
    assert reset(broker, queue_id=7).code == ResponseCode.INVALID_PARAMETER
    assert reset(broker, topic="x").code == ResponseCode.TOPIC_NOT_EXIST
    assert reset(broker, group="x").code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST


def test_the_next_pull_is_told_of_a_reset(broker: BrokerUnderTest, start_ms: int) -> None:
    def pull(queue_offset: int) -> Answer:
        header = pull_header(queue_offset, topic="t")
        return broker.ask(RequestCode.PULL_MESSAGE, header)

    reset(broker, queue_id=0, offset=1)
    answer = pull(4)
    assert answer.code == ResponseCode.PULL_OFFSET_MOVED
    assert answer.command.header(PullMessageResponseHeader).next_begin_offset == 1
    assert pull(1).code == ResponseCode.SUCCESS


def hold_pull(broker: BrokerUnderTest, group: str = "g") -> MemoryChannel:
    """A pull that waits at the end of queue 0."""
    channel = MemoryChannel()
    header = pull_header(4, consumer_group=group, topic="t", sys_flag=2 | 4)
    broker.send(RequestCode.PULL_MESSAGE, header, channel=channel)
    assert channel.replies() == []
    return channel


def sent_to(channel: MemoryChannel) -> int:
    """The offset that a held pull was answered with."""
    ((command, _),) = channel.replies()
    assert command.code == ResponseCode.PULL_OFFSET_MOVED
    return command.header(PullMessageResponseHeader).next_begin_offset


async def test_a_held_pull_is_answered_by_a_reset(broker: BrokerUnderTest, start_ms: int) -> None:
    channel, other = hold_pull(broker), hold_pull(broker, "other")
    reset(broker, queue_id=0, offset=1)
    assert sent_to(channel) == 1
    assert other.replies() == []
    again = hold_pull(broker)
    reset(broker, queue_id=0, offset=4)
    assert sent_to(again) == 4


async def test_a_clone_moves_running_members(broker: BrokerUnderTest, start_ms: int) -> None:
    broker.offsets.commit("source", "t", 0, 2)
    broker.join("g", "c", "t")
    channel = hold_pull(broker)
    header = CloneGroupOffsetHeader(src_group="source", dest_group="g")
    assert broker.ask(RequestCode.CLONE_GROUP_OFFSET, header).code == ResponseCode.SUCCESS
    assert sent_to(channel) == 2


@pytest.mark.parametrize("clones", [False, True])
def test_members_are_requested_to_seek(
    broker: BrokerUnderTest, start_ms: int, clones: bool
) -> None:
    broker.config.use_server_side_reset_offset = False
    java, cpp = broker.join("g", "c1", "t"), broker.join("g", "c2", "t")
    member = next(each for each in broker.consumers.members("g") if each.client_id == "c2")
    member.language = "CPP"
    java.replies(), cpp.replies()
    if clones:
        broker.offsets.commit("source", "t", 0, 3)
        clone = CloneGroupOffsetHeader(src_group="source", dest_group="g")
        broker.ask(RequestCode.CLONE_GROUP_OFFSET, clone)
    else:
        reset(broker, queue_id=0, offset=3)
    ((request, body),) = java.replies()
    assert (request.code, request.is_oneway) == (RequestCode.RESET_CONSUMER_CLIENT_OFFSET, True)
    header = request.header(ResetOffsetHeader)
    assert (header.topic, header.group) == ("t", "g")
    assert fastjson.decode(body, ResetOffsetBody).offset_table == {queue(0): 3}
    ((_, body),) = cpp.replies()
    row = {"brokerName": "broker-a", "offset": 3, "queueId": 0, "topic": "t"}
    assert fastjson.loads(body) == {"offsetTable": [row]}
    # For members that start now; others may commit until they have the request.
    assert broker.offsets.query("g", "t", 0) == 3
    assert broker.offsets.commit("g", "t", 0, 4)


def test_only_members_of_ours_seek_when_the_broker_resets(
    broker: BrokerUnderTest, start_ms: int
) -> None:
    ours, java = broker.join("g", "c1", "t"), broker.join("g", "c2", "t")
    member = next(each for each in broker.consumers.members("g") if each.client_id == "c2")
    member.language = "JAVA"
    ours.replies(), java.replies()
    reset(broker, queue_id=0, offset=3)
    ((request, body),) = ours.replies()
    assert request.code == RequestCode.RESET_CONSUMER_CLIENT_OFFSET
    assert fastjson.decode(body, ResetOffsetBody).offset_table == {queue(0): 3}
    assert java.replies() == []


def test_a_group_goes_on_where_another_is(broker: BrokerUnderTest) -> None:
    for topic in ("t", "u", "%RETRY%g"):
        broker.offsets.commit("g", topic, 0, 5)
    clone = RequestCode.CLONE_GROUP_OFFSET
    broker.ask(clone, CloneGroupOffsetHeader(src_group="g", dest_group="one", topic="t"))
    broker.ask(clone, CloneGroupOffsetHeader(src_group="g", dest_group="all"))
    assert broker.offsets.topics_of("one") == {"t"}
    assert broker.offsets.topics_of("all") == {"t", "u"}
    assert broker.offsets.query("all", "u", 0) == 5


# -- queues ----------------------------------------------------------------------------------------


def units(broker: BrokerUnderTest, **fields: Any) -> QueryConsumeQueueResponseBody:
    header: dict[str, Any] = {"topic": "t", "queue_id": 0, "index": 0, "count": 10}
    answer = broker.ask(
        RequestCode.QUERY_CONSUME_QUEUE, QueryConsumeQueueHeader(**{**header, **fields})
    )
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return QueryConsumeQueueResponseBody.decode(answer.body)


def test_units_of_a_queue(broker: BrokerUnderTest, start_ms: int) -> None:
    body = units(broker)
    assert (body.min_queue_index, body.max_queue_index) == (0, 4)
    assert len(body.queue_data) == 4
    for number, unit in enumerate(body.queue_data):
        record = broker.store.commit_log.record_at(unit.physic_offset)
        assert record is not None
        message = decode_record(record)
        assert message.body == b"%d" % number
        assert unit == ConsumeQueueData(
            physic_offset=message.physical_offset,
            physic_size=len(record),
            tags_code=tags_code(f"T{number}"),
        )
    assert units(broker, index=1, count=2).queue_data == body.queue_data[1:3]
    for outside in ({"index": 4}, {"index": -9, "count": 3}, {"count": -1}, {"index": 2**62}):
        assert units(broker, **outside).queue_data == []


@pytest.mark.usefixtures("start_ms")
@pytest.mark.parametrize(
    ("kind", "expression", "passing"),
    [
        ("TAG", "*", [True] * 4),
        ("TAG", "T1 || T3", [False, True, False, True]),
        ("SQL92", "TAGS IN ('T0', 'T3')", [True, False, False, True]),
        ("SQL92", "missing IS NULL", [True] * 4),
    ],
)
def test_units_say_what_a_group_gets(
    broker: BrokerUnderTest, kind: str, expression: str, passing: list[bool]
) -> None:
    """As its pulls decide it, over any part of the queue."""
    beat(broker, kind, expression)
    body = units(broker, consumer_group="g")
    assert body.subscription_data is not None
    assert body.subscription_data.sub_string == expression
    assert (body.filter_data == "null") is (kind == "TAG")
    assert (expression in (body.filter_data or "")) is (kind == "SQL92")
    assert [unit.eval for unit in body.queue_data] == passing
    part = units(broker, consumer_group="g", index=1, count=2)
    assert [unit.eval for unit in part.queue_data] == passing[1:3]


@pytest.mark.usefixtures("start_ms")
def test_units_without_a_filter_say_why(broker: BrokerUnderTest) -> None:
    assert units(broker).filter_data is None
    body = units(broker, consumer_group="g")
    assert (body.filter_data, body.subscription_data) == ("g@t is not online!", None)
    beat(broker, "SQL92", "a >", ResponseCode.SUBSCRIPTION_PARSE_FAILED)
    body = units(broker, consumer_group="g")
    assert "line 1, column 4" in (body.filter_data or "")
    assert not any(unit.eval for unit in body.queue_data)


def beat(
    broker: BrokerUnderTest, kind: str, expression: str, code: int = ResponseCode.SUCCESS
) -> None:
    """A member of group g joins with a subscription to t."""
    subscription = SubscriptionData(
        topic="t", sub_string=expression, expression_type=kind, sub_version=1
    )
    group = ConsumerData(group_name="g", subscription_data_set=[subscription])
    body = HeartbeatData(client_id="c", consumer_data_set=[group]).encode()
    assert broker.ask(RequestCode.HEART_BEAT, body=body).code == code


def test_units_of_a_queue_that_is_not_there(broker: BrokerUnderTest) -> None:
    header = QueryConsumeQueueHeader(topic="t", queue_id=0, index=0, count=1)
    answer = broker.ask(RequestCode.QUERY_CONSUME_QUEUE, header)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "0@t is not exist!" in answer.remark
