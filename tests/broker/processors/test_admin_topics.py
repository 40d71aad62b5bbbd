"""Creating, reading and deleting topics."""

from __future__ import annotations

from typing import Any

from headrace_protocol import fastjson
from headrace_protocol.admin_headers import (
    CreateTopicHeader,
    DeleteTopicHeader,
    GetAllTopicConfigHeader,
    GetAllTopicConfigResponseHeader,
    GetTopicConfigHeader,
    GetTopicStatsHeader,
)
from headrace_protocol.bodies import (
    CreateTopicListRequestBody,
    MessageQueue,
    TopicConfig,
    TopicConfigSerializeWrapper,
    TopicOffset,
    TopicStatsTable,
)
from headrace_protocol.codes import RequestCode, ResponseCode
from tests.support.broker import Answer, BrokerUnderTest
from tests.support.channel import MemoryChannel
from tests.support.wire import pull_header


def create(broker: BrokerUnderTest, topic: str = "t", **fields: Any) -> Answer:
    header: dict[str, Any] = {
        "topic": topic,
        "read_queue_nums": 2,
        "write_queue_nums": 2,
        "perm": 6,
        "topic_filter_type": "SINGLE_TAG",
    }
    return broker.ask(
        RequestCode.UPDATE_AND_CREATE_TOPIC, CreateTopicHeader(**{**header, **fields})
    )


def test_a_topic_is_made_and_changed(broker: BrokerUnderTest) -> None:
    answer = create(broker, attributes="+message.type=FIFO", order=True)
    assert (answer.code, answer.remark) == (ResponseCode.SUCCESS, "")
    answer = create(broker, read_queue_nums=3, write_queue_nums=3, perm=4)
    assert (answer.code, answer.remark) == (ResponseCode.SUCCESS, "")
    assert broker.topics.expect("t") == TopicConfig(
        topic_name="t",
        read_queue_nums=3,
        write_queue_nums=3,
        perm=4,
        attributes={"message.type": "FIFO"},
    )


def test_a_list_is_made_as_a_whole(broker: BrokerUnderTest) -> None:
    def create_list(*topics: TopicConfig) -> Answer:
        body = CreateTopicListRequestBody(topic_config_list=list(topics)).encode()
        return broker.ask(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, body=body)

    one = TopicConfig(topic_name="one", attributes={"+message.type": "FIFO"})
    assert create_list(one, TopicConfig(topic_name="not one")).code != ResponseCode.SUCCESS
    assert broker.topics.get("one") is None
    assert create_list().code == ResponseCode.INVALID_PARAMETER
    assert create_list(one, TopicConfig(topic_name="two")).code == ResponseCode.SUCCESS
    assert broker.topics.expect("one").attributes == {"message.type": "FIFO"}
    assert broker.topics.get("two")


# -- fewer queues ----------------------------------------------------------------------------------


def test_queues_are_taken_away_without_a_loss(broker: BrokerUnderTest) -> None:
    create(broker, read_queue_nums=4, write_queue_nums=4)
    broker.store_message("t", 3)
    broker.offsets.commit("g", "t", 3, 0)
    assert create(broker, read_queue_nums=4, write_queue_nums=2).remark == ""
    broker.offsets.commit("g", "t", 3, 1)
    assert create(broker, read_queue_nums=2, write_queue_nums=2).remark == ""


def test_reading_queues_that_hold_messages_go_with_a_warning(broker: BrokerUnderTest) -> None:
    create(broker, read_queue_nums=4, write_queue_nums=4)
    broker.store_message("t", 3)
    for group, offset in (("slow", 0), ("fast", 1)):
        broker.offsets.commit(group, "t", 3, offset)
        broker.offsets.commit(group, "t", 2, 0)
    answer = create(broker, read_queue_nums=2, write_queue_nums=2)
    assert answer.code == ResponseCode.SUCCESS
    assert answer.remark.startswith("queues 3 of topic t hold messages that slow has not consumed")


def test_queues_that_nobody_reads_are_warned_of(broker: BrokerUnderTest) -> None:
    answer = create(broker, read_queue_nums=2, write_queue_nums=4)
    assert answer.code == ResponseCode.SUCCESS
    assert "messages in queues 2 to 3 reach no consumer" in answer.remark


# -- deletion --------------------------------------------------------------------------------------


def delete(broker: BrokerUnderTest, topic: str) -> Answer:
    return broker.ask(RequestCode.DELETE_TOPIC_IN_BROKER, DeleteTopicHeader(topic=topic))


def test_a_deleted_topic_is_gone_with_all_that_was_known_of_it(broker: BrokerUnderTest) -> None:
    create(broker)
    broker.store_message("t", 0)
    broker.offsets.commit("g", "t", 0, 1)
    assert delete(broker, "t").code == ResponseCode.SUCCESS
    assert broker.topics.get("t") is None
    assert broker.store.queues_of("t") == []
    assert broker.offsets.query("g", "t", 0) is None
    assert delete(broker, "t").code == ResponseCode.SUCCESS
    create(broker)
    broker.store_message("t", 0)
    assert broker.store.source(broker.store.queue("t", 0)).max_offset() == 1


async def test_nobody_waits_for_a_deleted_topic(broker: BrokerUnderTest) -> None:
    create(broker)
    channel = MemoryChannel()
    header = pull_header(topic="t", max_msg_nums=1, sys_flag=2 | 4, suspend_timeout_millis=1000)
    broker.send(RequestCode.PULL_MESSAGE, header, channel=channel)
    assert channel.replies() == []
    delete(broker, "t")
    ((command, _),) = channel.replies()
    assert command.code == ResponseCode.PULL_NOT_FOUND
    assert broker.long_polling.held_count == 0


# -- reads -----------------------------------------------------------------------------------------


def test_all_topics_at_once_and_in_parts(broker: BrokerUnderTest) -> None:
    create(broker)

    def read(**fields: int) -> dict[str, TopicConfig]:
        answer = broker.ask(RequestCode.GET_ALL_TOPIC_CONFIG, GetAllTopicConfigHeader(**fields))
        header = answer.command.header(GetAllTopicConfigResponseHeader)
        wrapper = TopicConfigSerializeWrapper.decode(answer.body)
        assert header.total_topic_num == len(broker.topics)
        assert wrapper.data_version == broker.topics.data_version
        return wrapper.topic_config_table

    every = read()
    assert every == {topic.topic_name: topic for topic in broker.topics.all()}
    parts = [read(topic_seq=start, max_topic_num=10) for start in range(0, len(every), 10)]
    assert [len(part) for part in parts] == [10, len(every) - 10]
    assert parts[0] | parts[1] == every


def test_one_topic(broker: BrokerUnderTest) -> None:
    create(broker)
    answer = broker.ask(RequestCode.GET_TOPIC_CONFIG, GetTopicConfigHeader(topic="t", logical=True))
    assert answer.body == (
        b'{"attributes":{},"order":false,"perm":6,"readQueueNums":2,'
        b'"topicFilterType":"SINGLE_TAG","topicName":"t","topicSysFlag":0,"writeQueueNums":2}'
    )


def test_how_far_queues_reach(broker: BrokerUnderTest) -> None:
    create(broker)
    start_ms = broker.clock.ms
    broker.store_message("t", 1)
    broker.store_message("t", 1)
    answer = broker.ask(RequestCode.GET_TOPIC_STATS_INFO, GetTopicStatsHeader(topic="t"))
    table = fastjson.decode(answer.body, TopicStatsTable).offset_table
    assert table == {
        MessageQueue("t", "broker-a", 0): TopicOffset(),
        MessageQueue("t", "broker-a", 1): TopicOffset(
            max_offset=2, last_update_timestamp=start_ms + 1000
        ),
    }
