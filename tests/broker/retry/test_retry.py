"""Messages that are sent back: they come again later, and end as dead letters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from headrace_broker.retry.dead_letters import DeadLetters
from headrace_daemon.host_log import LINES_MAX
from headrace_protocol.bodies import LockBatchRequestBody, MessageQueue, SubscriptionGroupConfig
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import ConsumerSendMsgBackHeader, SendMessageHeaderV2
from headrace_protocol.message import TRANSACTION_COMMIT, encode_properties
from headrace_protocol.system_topics import SCHEDULE_TOPIC
from tests.support.broker import Answer, BrokerUnderTest, broker_config
from tests.support.channel import MemoryChannel
from tests.support.stores import HOST, put

RETRY, DEAD = "%RETRY%g", "%DLQ%g"


@pytest.fixture
def broker(tmp_path: Path) -> BrokerUnderTest:
    broker = BrokerUnderTest(tmp_path, commit_log_file_bytes=1 << 16)
    broker.create_topic("T")
    broker.groups.put(SubscriptionGroupConfig(group_name="g", retry_queue_nums=2))
    return broker


def send_back(broker: BrokerUnderTest, offset: int, level: int = 0, **fields: Any) -> Answer:
    header = {"offset": offset, "group": "g", "delay_level": level, "origin_topic": "T"}
    return broker.ask(
        RequestCode.CONSUMER_SEND_MSG_BACK, ConsumerSendMsgBackHeader(**{**header, **fields})
    )


def write(broker: BrokerUnderTest, topic: str = "T", times: int = 0, **properties: str) -> int:
    """A message that was retried ``times`` times; returns its physical offset."""
    store = broker.store
    store.write_path.begin()
    raw = encode_properties(properties)
    queue = store.queue(topic, 0)
    offset = store.write_path.append(
        (queue, b"body", raw, 9, 5, TRANSACTION_COMMIT, 17, times), HOST
    )
    store.write_path.publish()
    return offset


# --- send-back -----------------------------------------------------------------------------


@pytest.mark.parametrize(("times", "level", "expected"), [(0, 0, 3), (4, 0, 7), (2, 5, 5)])
def test_a_message_waits_longer_each_time(
    broker: BrokerUnderTest, times: int, level: int, expected: int
) -> None:
    answer = send_back(broker, write(broker, times=times, TAGS="a", KEYS="k"), level)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    (first,) = broker.stored("T")
    (message,) = broker.stored(SCHEDULE_TOPIC, expected - 1)
    assert (message.body, message.reconsume_times) == (b"body", times + 1)
    assert (message.flag, message.sys_flag) == (5, TRANSACTION_COMMIT)
    assert (message.born_timestamp, message.born_host) == (17, HOST)
    properties = message.properties
    assert (properties["TAGS"], properties["KEYS"]) == ("a", "k")
    assert (properties["RETRY_TOPIC"], properties["REAL_TOPIC"]) == ("T", RETRY)
    assert properties["ORIGIN_MESSAGE_ID"] == first.offset_message_id
    assert properties["REAL_QID"] in {"0", "1"}
    assert broker.topics.expect(RETRY).perm == 6


def test_the_first_topic_and_id_are_kept(broker: BrokerUnderTest) -> None:
    broker.topics.create_retry_topic("g", 2)
    offset = write(broker, RETRY, 1, RETRY_TOPIC="T", ORIGIN_MESSAGE_ID="first", REAL_TOPIC=RETRY)
    assert send_back(broker, offset).code == ResponseCode.SUCCESS
    (message,) = broker.stored(SCHEDULE_TOPIC, 3)
    assert message.properties["RETRY_TOPIC"] == "T"
    assert message.properties["ORIGIN_MESSAGE_ID"] == "first"


@pytest.mark.parametrize(
    ("times", "fields"),
    [
        (0, {"level": -1}),
        (16, {}),
        (3, {"max_reconsume_times": 3}),
        (2**31 - 1, {}),
    ],
)
def test_what_was_tried_too_often_is_a_dead_letter(
    broker: BrokerUnderTest, times: int, fields: dict[str, Any]
) -> None:
    assert send_back(broker, write(broker, times=times), **fields).code == ResponseCode.SUCCESS
    (message,) = broker.stored(DEAD)
    assert message.reconsume_times == min(times + 1, 2**31 - 1)
    assert message.properties["DELAY"] == "0"
    assert message.properties["RETRY_TOPIC"] == "T"
    config = broker.topics.expect(DEAD)
    assert (config.perm, config.write_queue_nums, config.read_queue_nums) == (6, 1, 1)


def test_what_is_sent_back_is_counted_under_its_topic(broker: BrokerUnderTest) -> None:
    again = write(broker, "%RETRY%g", RETRY_TOPIC="T")
    forged = write(broker, RETRY_TOPIC="none")
    for offset in (write(broker), again, forged):
        assert send_back(broker, offset).code == ResponseCode.SUCCESS
    assert {key: each.count for key, each in broker.statistics.send_backs.items()} == {
        ("g", "T"): 2
    }


def test_a_group_says_how_often(broker: BrokerUnderTest) -> None:
    broker.groups.put(SubscriptionGroupConfig(group_name="g", retry_max_times=2))
    assert send_back(broker, write(broker, times=1)).code == ResponseCode.SUCCESS
    assert send_back(broker, write(broker, times=2)).code == ResponseCode.SUCCESS
    assert len(broker.stored(SCHEDULE_TOPIC, 3)) == len(broker.stored(DEAD)) == 1


def test_an_unknown_group_is_refused(broker: BrokerUnderTest) -> None:
    answer = send_back(broker, write(broker), group="strangers")
    assert answer.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert "strangers" in answer.remark


def test_a_broker_that_takes_no_messages_says_so(tmp_path: Path) -> None:
    broker = BrokerUnderTest(tmp_path, broker_config(tmp_path, broker_permission=4))
    broker.groups.put(SubscriptionGroupConfig(group_name="g"))
    assert send_back(broker, 0).code == ResponseCode.NO_PERMISSION


def test_a_group_without_retry_queues_loses_the_message_and_the_log_says_so(
    broker: BrokerUnderTest,
) -> None:
    broker.groups.put(SubscriptionGroupConfig(group_name="g", retry_queue_nums=0))
    assert send_back(broker, write(broker)).code == ResponseCode.SUCCESS
    assert broker.part(DeadLetters).lost_count == 1
    assert broker.topics.get(RETRY) is None


def test_only_a_whole_message_of_the_topic_is_sent_back(broker: BrokerUnderTest) -> None:
    offset = write(broker)
    put(broker.store, broker.store.queue("U", 0))
    other = broker.store.source(broker.store.queue("U", 0)).unit(0)[0]
    end = broker.store.commit_log.max_offset
    for wrong in (offset + 1, other, end, end + 1, -1, 2**62):
        answer = send_back(broker, wrong)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert f"look message by offset failed, {wrong}" in answer.remark
    assert broker.store.commit_log.max_offset == end


def test_an_expired_message_is_not_sent_back(broker: BrokerUnderTest) -> None:
    offset = write(broker)
    files = broker.store.commit_log.files
    while len(files.files) < 3:
        broker.store_message("T", 0, bytes(1000))
    broker.store.write_path.drain_all()
    assert files.detach_first(1)
    answer = send_back(broker, offset)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert f"look message by offset failed, {offset}" in answer.remark


def test_an_absurd_level_counts_as_the_last(broker: BrokerUnderTest) -> None:
    assert send_back(broker, write(broker), 2**31 - 1).code == ResponseCode.SUCCESS
    last = len(broker.store.settings.delay_levels_ms)
    (message,) = broker.stored(SCHEDULE_TOPIC, last - 1)
    assert message.properties["DELAY"] == str(last)


def test_a_damaged_message_is_not_sent_back(broker: BrokerUnderTest) -> None:
    offset = write(broker)
    (path,) = (broker.config.store_path_root_dir / "commitlog").iterdir()
    body_at = offset + path.read_bytes()[offset:].index(b"body")
    with path.open("r+b") as file:
        file.seek(body_at)
        file.write(b"\xff")
    answer = send_back(broker, offset)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert f"look message by offset failed, {offset}" in answer.remark


def test_no_host_floods_the_log_with_what_is_lost(broker: BrokerUnderTest) -> None:
    broker.groups.put(SubscriptionGroupConfig(group_name="g", retry_queue_nums=0))
    with structlog.testing.capture_logs() as logs:
        for _ in range(LINES_MAX + 5):
            send_back(broker, 0)
    assert len(logs) == LINES_MAX


def test_a_name_without_its_namespace_is_the_topic(broker: BrokerUnderTest) -> None:
    offset = write(broker, "ns%T")
    assert send_back(broker, offset).code == ResponseCode.SUCCESS
    assert send_back(broker, offset, origin_topic=None).code == ResponseCode.SUCCESS


# --- sends to the retry topic ----------------------------------------------------------------


def send(broker: BrokerUnderTest, times: int, times_max: int | None = 3, **fields: Any) -> Answer:
    header = {
        "producer_group": "CLIENT_INNER_PRODUCER",
        "topic": RETRY,
        "default_topic": "TBW102",
        "default_topic_queue_nums": 4,
        "queue_id": 0,
        "sys_flag": 0,
        "born_timestamp": 1,
        "flag": 0,
        "properties": "RETRY_TOPIC\x01T\x02DELAY\x014\x02",
        "reconsume_times": times,
        "max_reconsume_times": times_max,
        **fields,
    }
    return broker.ask(RequestCode.SEND_MESSAGE_V2, SendMessageHeaderV2(**header), b"body")


def test_a_retry_that_a_client_stores_itself_waits(broker: BrokerUnderTest) -> None:
    assert send(broker, 3).code == ResponseCode.SUCCESS
    (message,) = broker.stored(SCHEDULE_TOPIC, 3)
    assert message.properties["REAL_TOPIC"] == RETRY
    assert message.reconsume_times == 3


@pytest.mark.parametrize(("times", "times_max"), [(4, 3), (17, None)])
def test_one_retry_too_many_is_a_dead_letter(
    broker: BrokerUnderTest, times: int, times_max: int | None
) -> None:
    assert send(broker, times, times_max).code == ResponseCode.SUCCESS
    (message,) = broker.stored(DEAD)
    assert (message.topic, message.properties["DELAY"]) == (DEAD, "0")


def test_what_an_orderly_group_sends_there_is_given_up(broker: BrokerUnderTest) -> None:
    member = broker.join("g", "me", "T")
    lock(broker, member, "me", "T")
    assert send(broker, 1).code == ResponseCode.SUCCESS
    assert len(broker.stored(DEAD)) == 1
    broker.clock.ms += 60_001  # the lock has ended
    assert [*broker.locks.expire(broker.clock.ms)] == ["g"]
    assert send(broker, 1).code == ResponseCode.SUCCESS
    lock(broker, member, "me", "T")
    lock(broker, member, "me", "T", RequestCode.UNLOCK_BATCH_MQ)
    assert send(broker, 1).code == ResponseCode.SUCCESS
    assert (len(broker.stored(DEAD)), len(broker.stored(SCHEDULE_TOPIC, 3))) == (1, 2)


def lock(
    broker: BrokerUnderTest,
    channel: MemoryChannel,
    client_id: str,
    topic: str,
    code: RequestCode = RequestCode.LOCK_BATCH_MQ,
) -> None:
    queue = MessageQueue(topic=topic, broker_name="broker-a", queue_id=0)
    body = LockBatchRequestBody(consumer_group="g", client_id=client_id, mq_set=[queue])
    assert broker.ask(code, body=body.encode(), channel=channel).code == ResponseCode.SUCCESS


@pytest.mark.parametrize("topic", ["T", "invented"])
@pytest.mark.parametrize("client_id", ["me", "stranger"])
def test_locks_of_strangers_make_no_dead_letters(
    broker: BrokerUnderTest, client_id: str, topic: str
) -> None:
    member = broker.join("g", "me", "T")
    stranger = MemoryChannel()
    lock(broker, stranger, client_id, topic)
    lock(broker, member, "me", "invented")
    assert send(broker, 1).code == ResponseCode.SUCCESS
    assert broker.stored(DEAD) == []


def test_a_lock_of_another_host_says_nothing_about_this_one(broker: BrokerUnderTest) -> None:
    other = MemoryChannel()
    other.host_bytes = bytes((192, 0, 2, 7, 0, 0, 1, 1))
    broker.join("g", "me", "T", channel=other)
    lock(broker, other, "me", "T")
    assert send(broker, 1).code == ResponseCode.SUCCESS
    assert broker.stored(DEAD) == []


def test_a_retry_of_an_unknown_group_is_refused(broker: BrokerUnderTest) -> None:
    answer = send(broker, 1, topic="%RETRY%strangers")
    assert answer.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    answer = send(broker, 1, topic="%RETRY%%RETRY%g")
    assert answer.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
