"""Messages that compacted topics take: those with keys, and delete markers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from zlib_ng.zlib_ng import crc32

from headrace_broker.compaction.follower import CompactionFollower
from headrace_broker.compaction.keys import KeyDemand, queue_of_key
from headrace_broker.compaction.queues import CompactedQueues
from headrace_broker.topics.attributes import CompactionPolicy
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import BulkSendHeader, StageSendHeader
from headrace_protocol.message import StoredMessage, encode_batch
from tests.support.batches import block
from tests.support.broker import Answer, BrokerUnderTest, broker_config

UNIQ_KEY = "UNIQ_KEY\x010123456789ABCDEF0123456789ABCDEF\x02"
KEYED = f"KEYS\x01k\x02{UNIQ_KEY}"
ILLEGAL = int(ResponseCode.MESSAGE_ILLEGAL)


@pytest.fixture(autouse=True)
def topics(broker: BrokerUnderTest) -> None:
    create(broker, "C")
    broker.create_topic("T")


def create(broker: BrokerUnderTest, name: str, queue_nums: int = 2, **attributes: str) -> None:
    attributes = {key.replace("_", "."): value for key, value in attributes.items()}
    attributes["cleanup.policy"] = "COMPACTION"
    broker.create_topic(name, queue_nums, attributes=attributes)


def send(
    broker: BrokerUnderTest, *all_properties: str, topic: str = "C", body: bytes = b"b", **more: Any
) -> list[tuple[int, str]]:
    return broker.send_at_once(*all_properties, topic=topic, body=body, **more)


def stored(broker: BrokerUnderTest, topic: str = "C", queue_id: int = 1) -> list[StoredMessage]:
    return broker.stored(topic, queue_id)


def test_messages_need_a_key(broker: BrokerUnderTest) -> None:
    answers = send(broker, KEYED, UNIQ_KEY, f"KEYS\x01  \x02{UNIQ_KEY}", KEYED)
    assert [code for code, _ in answers] == [0, ILLEGAL, ILLEGAL, 0]
    assert "has no key" in answers[1][1]
    assert len(stored(broker)) == 2
    assert send(broker, UNIQ_KEY, topic="T") == [(0, "")]


def test_a_blank_key_is_none_in_every_way_in(broker: BrokerUnderTest) -> None:
    for properties in ("DELAY\x013\x02", "TIMER_DELAY_SEC\x0130\x02", "TRAN_MSG\x01true\x02"):
        ((code, remark),) = send(broker, UNIQ_KEY + properties + "PGROUP\x01g\x02")
        assert code == ILLEGAL
        assert "has no key" in remark
    for items in ([(0, b"b", b"")], [(0, b"a", b"KEYS\x01k\x02"), (0, b"b", b"KEYS\x01 \x02")]):
        ((code, remark),) = send(broker, UNIQ_KEY, body=encode_batch(items), m=True)
        assert code == ILLEGAL
        assert "has no key" in remark
    for is_staged in (False, True):
        answer = send_block(broker, [b"KEYS\x01k\x02", b"a\x01b\x02"], is_staged=is_staged)
        assert answer.code == ILLEGAL
        assert "has no key" in answer.remark
    assert broker.store.commit_log.max_offset == 0


def test_batches_and_blocks_with_keys_are_stored(broker: BrokerUnderTest) -> None:
    items = [(0, b"a", b"KEYS\x01k\x02"), (0, b"", b"KEYS\x01l\x02")]
    assert send(broker, UNIQ_KEY, body=encode_batch(items), m=True) == [(0, "")]
    assert [message.body for message in stored(broker)] == [b"a", b""]
    for is_staged in (False, True):
        answer = send_block(broker, [b"KEYS\x01k\x02", b"KEYS\x01l\x02"], is_staged=is_staged)
        assert answer.code == ResponseCode.SUCCESS, answer.remark


def test_delayed_messages_and_halves_with_keys_are_stored(broker: BrokerUnderTest) -> None:
    waiting = [f"{KEYED}DELAY\x013\x02", f"{KEYED}TRAN_MSG\x01true\x02PGROUP\x01g\x02"]
    assert send(broker, *waiting) == [(0, "")] * 2
    assert not stored(broker)
    assert len(stored(broker, "SCHEDULE_TOPIC_XXXX", 2)) == 1
    assert len(stored(broker, "RMQ_SYS_TRANS_HALF_TOPIC", 0)) == 1


@pytest.mark.parametrize("properties", [KEYED, f"{KEYED}TAGS\x01a\x02"])
def test_a_keyed_message_without_body_is_a_delete_marker(
    broker: BrokerUnderTest, properties: str
) -> None:
    assert send(broker, properties, body=b"") == [(0, "")]
    (message,) = stored(broker)
    assert (message.body, message.properties["KEYS"]) == (b"", "k")
    ((code, remark),) = send(broker, UNIQ_KEY, body=b"")
    assert (code, "has no key" in remark) == (ILLEGAL, True)
    ((code, remark),) = send(broker, properties, body=b"", topic="T")
    assert (code, "has no body" in remark) == (ILLEGAL, True)


def test_a_message_with_the_delete_property_is_stored_without_its_body(
    broker: BrokerUnderTest,
) -> None:
    assert send(broker, f"{KEYED}__DELETE__\x01true\x02", f"{KEYED}__DELETE__\x01false\x02") == [
        (0, ""),
        (0, ""),
    ]
    assert [message.body for message in stored(broker)] == [b"", b"b"]
    late = f"{KEYED}__DELETE__\x01true\x02DELAY\x013\x02"
    assert send(broker, late) == [(0, "")]
    assert [message.body for message in stored(broker, "SCHEDULE_TOPIC_XXXX", 2)] == [b""]
    assert send(broker, f"{UNIQ_KEY}__DELETE__\x01true\x02", topic="T") == [(0, "")]
    assert [message.body for message in stored(broker, "T")] == [b"b"]


def test_the_delete_property_is_refused_where_it_would_keep_its_body(
    broker: BrokerUnderTest,
) -> None:
    properties = b"KEYS\x01k\x02__DELETE__\x01true\x02"
    body = encode_batch([(0, b"a", properties)])
    ((code, remark),) = send(broker, UNIQ_KEY, body=body, m=True)
    assert (code, "send them one by one" in remark) == (ILLEGAL, True)
    answer = send_block(broker, [properties])
    assert (answer.code, "send them one by one" in answer.remark) == (ILLEGAL, True)


def test_a_record_larger_than_a_file_of_the_compaction_log_is_refused(tmp_path: Path) -> None:
    config = broker_config(
        tmp_path / "small", compaction_mapped_file_size=4096, compaction_cq_mapped_file_size=460
    )
    broker = BrokerUnderTest(tmp_path / "small", config, commit_log_file_bytes=1 << 16)
    create(broker, "C")
    body = b"b" * 4200
    batch = encode_batch([(0, b"a", b"KEYS\x01k\x02"), (0, body, b"KEYS\x01k\x02")])
    same = encode_batch([(0, body, b"KEYS\x01k\x02")] * 2)
    answers = [
        *send(broker, KEYED, body=body),
        *send(broker, UNIQ_KEY, body=batch, m=True),
        *send(broker, UNIQ_KEY, body=same, m=True),
    ]
    bulk = send_block(broker, [b"KEYS\x01k\x02"], body=body)
    answers.append((bulk.code, bulk.remark))
    for code, remark in answers:
        assert code == ILLEGAL
        assert "(compactionMappedFileSize)" in remark
    assert not stored(broker)


def test_the_broker_checks_the_queue_of_a_key(broker: BrokerUnderTest) -> None:
    """``java_hash("k")`` is 107; the keys of blocks are checked too."""
    create(broker, "J", 4, key_queue="java")
    ((code, remark),) = send(broker, KEYED, topic="J")
    assert code == ILLEGAL
    assert "belongs to queue 3, not 1" in remark
    assert send(broker, f"KEYS\x01i\x02{UNIQ_KEY}", topic="J") == [(0, "")]
    answer = send_block(broker, [b"KEYS\x01i\x02", b"KEYS\x01k\x02"], topic="J", queue_id=1)
    assert "belongs to queue 3, not 1" in answer.remark


def test_queues_of_keys_are_those_that_clients_choose() -> None:
    assert [queue_of_key("java", key, 7) for key in ("k", "polygenelubricants", "你好")] == [
        107 % 7,
        2**31 % 7,
        652829 % 7,
    ]
    assert queue_of_key("headrace", "k", 7) == crc32(b"k") % 7
    # With equally many queues on each broker the choice on the broker is the same.
    for key in map(str, range(100)):
        for rule in ("java", "headrace"):
            assert queue_of_key(rule, key, 12) % 4 == queue_of_key(rule, key, 4)


def test_plain_topics_pay_nothing(broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a queue is known, no message to it reaches the code of compacted topics."""
    calls: list[str] = []

    def count(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(*arguments: Any) -> Any:
            calls.append(name)
            return original(*arguments)

        monkeypatch.setattr(owner, name, counted)

    assert send(broker, UNIQ_KEY, topic="T") == [(0, "")]
    (following,) = broker.store.followers.all
    following.catch_up()
    count(CompactionPolicy, "of")
    count(KeyDemand, "serve")
    count(CompactedQueues, "find")
    count(CompactionFollower, "follow")
    assert send(broker, *[KEYED] * 50, topic="T") == [(0, "")] * 50
    batch = encode_batch([(0, b"a", b"KEYS\x01k\x02")] * 2)
    assert send(broker, UNIQ_KEY, body=batch, m=True, topic="T") == [(0, "")]
    assert following.needed_from() == sys.maxsize, "no scan was asked for"
    following.catch_up()
    assert not calls


def send_block(
    broker: BrokerUnderTest,
    properties: list[bytes],
    *,
    topic: str = "C",
    queue_id: int = 0,
    body: bytes = b"body",
    is_staged: bool = False,
) -> Answer:
    fields: dict[str, Any] = {
        "producer_group": "g",
        "topic": topic,
        "default_topic": "TBW102",
        "default_topic_queue_nums": 1,
        "queue_id": queue_id,
        "count": len(properties),
    }
    bodies = [body] * len(properties)
    body = bytes(block(*bodies, topic=topic, properties=properties).body)
    if is_staged:
        staged = StageSendHeader(query_id="q", batch_id=0, attempt="a", block_number=0, **fields)
        return broker.ask(RequestCode.STAGE_SEND, staged, body)
    return broker.ask(RequestCode.BULK_SEND, BulkSendHeader(**fields), body)
