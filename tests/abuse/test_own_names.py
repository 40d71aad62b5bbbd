"""No request of a client changes groups, topics and positions that are the broker's own.

The requests are those that the broker serves, each with the broker's own names in all fields that
name a group or a topic.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import structlog.testing

from headrace_protocol.admin_headers import ResetOffsetHeader
from headrace_protocol.bodies import (
    LockBatchRequestBody,
    LockBatchResponseBody,
    MessageQueue,
    SubscriptionGroupConfig,
    TopicConfig,
)
from headrace_protocol.codes import RequestCode as Code
from headrace_protocol.codes import ResponseCode
from headrace_protocol.headers import PullMessageHeader, UpdateConsumerOffsetHeader
from headrace_protocol.statictopic.mapping import TopicMapping, encode_detail
from headrace_protocol.system_topics import (
    CHECK_MAX_TIME_TOPIC,
    HALF_TOPIC,
    OP_HALF_TOPIC,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
    TRANSACTION_GROUP,
    UNDELIVERED_TOPIC,
    is_own_group,
    is_own_topic,
)
from tests.abuse.hostile import plain_value
from tests.support.batches import block
from tests.support.broker import BrokerUnderTest, heartbeat
from tests.support.channel import MemoryChannel
from tests.support.memory import HOST
from tests.support.wire_types import REQUEST_HEADERS
from tests.support.wires import request

GROUPS = [TRANSACTION_GROUP, "CID_RMQ_SYS_REVIVE_GROUP"]
TOPICS = [
    HALF_TOPIC,
    OP_HALF_TOPIC,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
    UNDELIVERED_TOPIC,
    CHECK_MAX_TIME_TOPIC,
    f"%RETRY%{TRANSACTION_GROUP}",
    f"%DLQ%{TRANSACTION_GROUP}",
]
NAMES = [
    *((group, topic) for group in GROUPS for topic in (*TOPICS, "T")),
    *(("g", topic) for topic in TOPICS),
]
OF_GROUPS = {"group", "consumer_group", "dest_group", "group_name"}
VALUES: dict[str, Any] = {
    "sys_flag": 5,  # of a pull: commit, with a subscription
    "commit_offset": 1,
    "max_msg_nums": 32,
    "subscription": "*",
    "expression_type": "TAG",
    "timestamp": -1,
    "count": 1,
    "is_force": True,
    "clean_offset": True,
    "read_queue_nums": 4,
    "write_queue_nums": 4,
    "perm": 6,
    "topic_filter_type": "SINGLE_TAG",
    "default_topic": "TBW102",
    "default_topic_queue_nums": 4,
    "src_group": "g",
    "properties": "",
    "attributes": "",
    "offset": 0,
    "logical": False,
}


def fields(code: int, group: str, topic: str) -> dict[str, Any]:
    """The request's header, as hostile as it can be about the names."""
    header_type = REQUEST_HEADERS.get(code)
    named = {}
    for field in msgspec.structs.fields(header_type) if header_type else ():
        value = VALUES.get(field.name, plain_value(field.type))
        if field.name in OF_GROUPS:
            value = group
        elif field.name == "topic":
            value = topic
        elif field.name == "origin_topic":
            value = "T"
        named[field.encode_name] = value
    return named


def bodies(code: int, group: str, topic: str) -> Iterator[bytes]:
    yield b""
    yield struct.pack(">iiq", 0, 3, -1) + b"key"
    if code in (Code.BULK_SEND, Code.STAGE_SEND):
        yield bytes(block(b"body", topic=topic).body)
    if code in (Code.LOCK_BATCH_MQ, Code.UNLOCK_BATCH_MQ):
        queues = [MessageQueue(topic, "broker-a", 0)]
        yield LockBatchRequestBody(consumer_group=group, client_id="c", mq_set=queues).encode()
    if code == Code.HEART_BEAT:
        yield heartbeat(group, "c", topic)
    if code == Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP:
        yield SubscriptionGroupConfig(group_name=group, consume_enable=False).encode()
    if code == Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST:
        one = SubscriptionGroupConfig(group_name=group, consume_enable=False)
        yield b'{"groupConfigList":[%b]}' % one.encode()
    if code == Code.UPDATE_AND_CREATE_TOPIC_LIST:
        config = TopicConfig(topic_name=topic, read_queue_nums=9, write_queue_nums=9)
        yield b'{"topicConfigList":[%b]}' % config.encode()
    if code == Code.UPDATE_AND_CREATE_STATIC_TOPIC:
        yield encode_detail(TopicMapping(topic=topic, bname="broker-a", total_queues=1))


def own_state(broker: BrokerUnderTest) -> dict[str, Any]:
    """Everything of the broker's own in its tables and its store."""
    tables = (broker.offsets.committed(), broker.offsets.pulled())
    names = {*TOPICS, *(topic.topic_name for topic in broker.topics.all())}
    return {
        "offsets": [
            {name: dict(row) for name, row in table if is_own_group(name.rpartition("@")[2])}
            for table in tables
        ],
        "groups": [group for group in broker.groups.all() if is_own_group(group.group_name)],
        "locks": [list(broker.locks.of_group(group, 0)) for group in GROUPS],
        "members": [name for name in broker.consumers.names() if is_own_group(name)],
        "topics": [broker.topics.get(name) for name in sorted(names) if is_own_topic(name)],
        "messages": {
            name: [queue.next_offset for queue in broker.store.queues_of(name)]
            for name in sorted(names)
            if is_own_topic(name) and any(q.next_offset for q in broker.store.queues_of(name))
        },
    }


def served(broker: BrokerUnderTest) -> list[int]:
    return sorted(broker.registry.functions)


@pytest.mark.slow
async def test_no_request_changes_what_is_the_brokers_own(broker: BrokerUnderTest) -> None:
    broker.create_topic("T")
    broker.store_message("T", 0)
    broker.join("g", "c", "T")
    for topic in (HALF_TOPIC, OP_HALF_TOPIC):
        broker.offsets.commit(TRANSACTION_GROUP, topic, 0, 7)
    for topic in (HALF_TOPIC, UNDELIVERED_TOPIC):
        broker.topics.create_system_topic(topic)
        broker.store_message(topic, 0)
    before = own_state(broker)
    for code in served(broker):
        for group, topic in NAMES:
            for body in bodies(code, group, topic):
                header = fields(code, group, topic)
                broker.take(request(code, header, body), MemoryChannel())
                assert own_state(broker) == before, (Code(code), group, topic)


def of_commit(group: str, topic: str) -> UpdateConsumerOffsetHeader:
    return UpdateConsumerOffsetHeader(
        consumer_group=group, topic=topic, queue_id=0, commit_offset=1
    )


def of_pull(group: str, topic: str) -> PullMessageHeader:
    values = fields(Code.PULL_MESSAGE, group, topic)
    return msgspec.convert(values, PullMessageHeader, strict=False)


@pytest.mark.parametrize(
    ("code", "header", "body"),
    [
        (Code.UPDATE_CONSUMER_OFFSET, of_commit(TRANSACTION_GROUP, HALF_TOPIC), b""),
        (Code.PULL_MESSAGE, of_pull(TRANSACTION_GROUP, HALF_TOPIC), b""),
        (Code.HEART_BEAT, None, heartbeat(TRANSACTION_GROUP, "c", "T")),
        (
            Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
            None,
            SubscriptionGroupConfig(group_name=TRANSACTION_GROUP).encode(),
        ),
    ],
)
def test_a_rejection_names_the_group(
    broker: BrokerUnderTest, code: int, header: msgspec.Struct | None, body: bytes
) -> None:
    answer = broker.ask(code, header, body)
    assert answer.code == ResponseCode.NO_PERMISSION
    assert f"group {TRANSACTION_GROUP} belongs to the broker" in answer.remark


@pytest.mark.parametrize("topic", [HALF_TOPIC, UNDELIVERED_TOPIC, CHECK_MAX_TIME_TOPIC])
async def test_groups_of_users_read_the_brokers_own_topics(
    broker: BrokerUnderTest, topic: str
) -> None:
    broker.topics.create_system_topic(topic)
    broker.store_message(topic, 0)
    broker.join("g", "c", topic)
    assert broker.ask(Code.PULL_MESSAGE, of_pull("g", topic)).code == ResponseCode.SUCCESS
    assert broker.ask(Code.UPDATE_CONSUMER_OFFSET, of_commit("g", topic)).code == 0
    queues = [MessageQueue(topic, "broker-a", 0)]
    lock = LockBatchRequestBody(consumer_group="g", client_id="c", mq_set=queues).encode()
    locked = broker.ask(Code.LOCK_BATCH_MQ, body=lock).body
    assert LockBatchResponseBody.decode(locked).lock_ok_mq_set == queues
    reset = ResetOffsetHeader(topic=topic, group="g", timestamp=-1, is_force=True)
    assert broker.ask(Code.INVOKE_BROKER_TO_RESET_OFFSET, reset).code == ResponseCode.SUCCESS


def test_progress_that_can_not_be_saved_is_an_error_in_the_log(broker: BrokerUnderTest) -> None:
    broker.offsets.reset(TRANSACTION_GROUP, HALF_TOPIC, 0, 5)
    broker.transactions.load()
    with structlog.testing.capture_logs() as logs:
        broker.transactions.finish()
    errors = [entry for entry in logs if entry["log_level"] == "error"]
    assert [entry["topic"] for entry in errors] == [HALF_TOPIC]


def test_budgeted_groups_are_of_users(broker: BrokerUnderTest) -> None:
    before = broker.budget.kept_bytes(HOST)
    broker.ask(Code.HEART_BEAT, body=heartbeat("CID_RMQ_SYS_NEW", "c", "T"))
    assert broker.budget.kept_bytes(HOST) == before
