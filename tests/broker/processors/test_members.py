"""An administrator's view of a group: owners, locks, conflicts, and members' reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_protocol.at_once import run_at_once
from headrace_protocol.bodies import (
    GroupDescription,
    GroupQueue,
    LockBatchRequestBody,
    MessageQueue,
)
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import FLAG_RESPONSE
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.headers import ConsumerGroupHeader, GetConsumerRunningInfoHeader
from tests.support.broker import BrokerUnderTest
from tests.support.channel import MemoryChannel
from tests.support.wire import pull_header


class OtherChannel(MemoryChannel):
    """A client with an address of its own."""

    address = "127.0.0.1:2"


@pytest.fixture
def broker(tmp_path: Path) -> BrokerUnderTest:
    broker = BrokerUnderTest(tmp_path)
    broker.create_topic("t", 3)
    return broker


def pull(broker: BrokerUnderTest, queue_id: int, channel: MemoryChannel, topic: str = "t") -> None:
    header = pull_header(topic=topic, queue_id=queue_id, max_msg_nums=1)
    broker.send(RequestCode.PULL_MESSAGE, header, channel=channel)


def lock(broker: BrokerUnderTest, client_id: str, queue_id: int) -> None:
    queues = [MessageQueue("t", "broker-a", queue_id)]
    body = LockBatchRequestBody(consumer_group="g", client_id=client_id, mq_set=queues)
    broker.ask(RequestCode.LOCK_BATCH_MQ, body=body.encode())


def describe(broker: BrokerUnderTest) -> GroupDescription:
    header = ConsumerGroupHeader(consumer_group="g")
    return GroupDescription.decode(broker.ask(RequestCode.DESCRIBE_GROUP, header).body)


def test_each_queue_has_the_member_of_its_last_pull(broker: BrokerUnderTest) -> None:
    first = broker.join("g", "c1", "t")
    second = broker.join("g", "c2", "t", channel=OtherChannel())
    pull(broker, 0, first)
    pull(broker, 1, first)
    broker.pull_watch.look += 2
    pull(broker, 1, second)
    assert [(row.owner, row.pulled_ms_ago) for row in describe(broker).queues] == [
        ("c1", 20_000),
        ("c2", 0),
        ("", -1),
    ]
    broker.consumers.channel_closed(second)
    assert describe(broker).queues[1].owner == second.address, "it is no member any more"


def test_idle_queues_and_locks(broker: BrokerUnderTest) -> None:
    channel = broker.join("g", "c1", "t")
    lock(broker, "c1", 2)
    watch = broker.pull_watch
    for _ in range(5):
        pull(broker, 2, channel)
        watch.look += 1
        run_at_once(watch.find_idle_queues())
    rows = describe(broker).queues
    assert [row.is_idle for row in rows] == [True, True, False]
    assert rows[2] == GroupQueue(
        topic="t",
        queue_id=2,
        owner="c1",
        pulled_ms_ago=10_000,
        lock_owner="c1",
        lock_ms_left=60_000,
    )
    broker.clock.ms += 60_001
    assert describe(broker).queues[2].lock_owner == "", "it has expired"


def test_a_member_that_left_keeps_its_lock_for_a_while(broker: BrokerUnderTest) -> None:
    broker.join("g", "c0", "t", channel=OtherChannel())
    channel = broker.join("g", "c1", "t")
    lock(broker, "c1", 0)
    broker.consumers.channel_closed(channel)
    row = describe(broker).queues[0]
    assert (row.lock_owner, row.lock_ms_left) == ("c1", 35_000)


def test_a_group_that_nobody_knows_has_no_queues(broker: BrokerUnderTest) -> None:
    assert describe(broker) == GroupDescription()
    lock(broker, "c1", 1)
    (row,) = describe(broker).queues
    assert (row.queue_id, row.lock_owner, row.owner) == (1, "c1", "")


def test_a_conflict_is_shown_until_it_is_over(broker: BrokerUnderTest) -> None:
    broker.create_topic("u", 1)
    broker.join("g", "c1", "t")
    other = broker.join("g", "c2", "u", channel=OtherChannel())
    conflict = describe(broker).conflict
    assert "c1 subscribes to t (*)" in conflict
    assert "c2" in conflict
    broker.consumers.channel_closed(other)
    assert describe(broker).conflict == ""


async def test_a_member_is_asked_and_its_answer_passed_back(broker: BrokerUnderTest) -> None:
    code = RequestCode.GET_CONSUMER_RUNNING_INFO
    header = GetConsumerRunningInfoHeader(consumer_group="g", client_id="c1")
    assert "<c1> not online" in broker.ask(code, header).remark
    member, asker = broker.join("g", "c1", "t"), OtherChannel()
    broker.send(code, header, channel=asker)
    ((request, _),) = [each for each in member.replies() if not each[0].is_response]
    assert request.header(GetConsumerRunningInfoHeader) == header
    assert asker.replies() == []
    answer = b'{"properties":{"a":"b"}}'
    frame = encode_frame(
        SerializeType.JSON, 0, request.opaque, flag=FLAG_RESPONSE, body_bytes=len(answer)
    )
    broker.take(frame + answer, member)
    ((reply, body),) = asker.replies()
    assert (reply.code, body) == (ResponseCode.SUCCESS, answer)

    broker.send(code, header, channel=asker)
    broker.client_requests.channel_closed(member)
    ((reply, _),) = asker.replies()
    assert reply.code == ResponseCode.CONSUME_MSG_TIMEOUT


async def test_a_member_is_not_flooded_with_requests(broker: BrokerUnderTest) -> None:
    code = RequestCode.GET_CONSUMER_RUNNING_INFO
    header = GetConsumerRunningInfoHeader(consumer_group="g", client_id="c1")
    broker.join("g", "c1", "t")
    for _ in range(16):
        broker.send(code, header, channel=OtherChannel())
    assert broker.ask(code, header, channel=OtherChannel()).code == ResponseCode.SYSTEM_BUSY
