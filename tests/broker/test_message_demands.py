"""Demands of messages on the broker: a feature adds a row of the table and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_broker import assembly
from headrace_broker.feature import merge
from headrace_broker.message_demands import Demand, MessageDemands, SentMessage
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.headers import BulkSendHeader, StageSendHeader
from headrace_protocol.message import TRANSACTION_MASK, encode_batch
from tests.support.batches import block
from tests.support.broker import Answer, BrokerUnderTest

DELAYED = "SCHEDULE_TOPIC_XXXX"
HALF = "RMQ_SYS_TRANS_HALF_TOPIC"
UNIQ_KEY = "UNIQ_KEY\x017F00000133E730946E0967FBFA710001\x02"


def delay(message: SentMessage) -> None:
    """Much as delayed messages will be stored."""
    (level,) = (item[6:] for item in message.properties if item.startswith("DELAY\x01"))
    if not level.isdigit():
        raise RequestError(ResponseCode.MESSAGE_ILLEGAL, f"DELAY={level}: expected a number")
    message.properties[-1:] = [
        f"REAL_TOPIC\x01{message.topic}",
        f"REAL_QID\x01{message.queue_id}",
        "",
    ]
    message.topic, message.queue_id, message.tags_code = DELAYED, int(level) - 1, 1234


def hide(message: SentMessage) -> None:
    """Much as halves of transactions will be stored."""
    message.topic, message.queue_id = HALF, 0
    message.sys_flag &= ~TRANSACTION_MASK


def need_key(message: SentMessage) -> None:
    """As messages to compacted topics."""
    if not any(item.startswith("KEYS\x01") for item in message.properties):
        raise RequestError(ResponseCode.MESSAGE_ILLEGAL, "a message without key")


ROWS = (
    Demand("transactional messages", ("TRAN_MSG",), TRANSACTION_MASK, apply=hide),
    Demand("delayed messages", ("DELAY",), apply=delay),
    Demand("recalled messages", ("RECALL",)),
    Demand("messages to compacted topics", matches_topic="Compacted".__eq__, apply=need_key),
)


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BrokerUnderTest:
    monkeypatch.setattr(assembly, "merge", lambda each: merge(each)._replace(demands=ROWS))
    broker = BrokerUnderTest(tmp_path, commit_log_file_bytes=1 << 16)
    for topic in ("T", "Compacted"):
        broker.create_topic(topic)
    return broker


def test_a_row_chooses_queue_properties_and_tags_code(broker: BrokerUnderTest) -> None:
    plain, late = f"{UNIQ_KEY}TAGS\x01a\x02", f"{UNIQ_KEY}TAGS\x01a\x02DELAY\x013\x02"
    # Also right after plain messages that come at once.
    assert broker.send_at_once(plain, plain, late, plain) == [(0, "")] * 4
    assert len(broker.stored("T", 1)) == 3
    (message,) = broker.stored(DELAYED, 2)
    names = dict(message.properties)
    assert (names["REAL_TOPIC"], names["REAL_QID"], names["DELAY"]) == ("T", "1", "3")
    unit = broker.store.source(broker.store.queue(DELAYED, 2)).unit(0)
    assert unit is not None
    assert 1234 in tuple(unit)


def test_rows_are_asked_in_their_order(broker: BrokerUnderTest) -> None:
    def note(message: SentMessage) -> None:
        seen.append((message.topic, message.sys_flag))

    seen: list[tuple[str, int]] = []
    first, last = ROWS[0], Demand("others", ("DELAY",), apply=note)
    message = SentMessage("T", 1, ["DELAY\x013", ""], sys_flag=4)
    MessageDemands((last, first)).apply(message)
    MessageDemands((first, last)).apply(SentMessage("T", 1, ["DELAY\x013", ""], sys_flag=4))
    assert seen == [("T", 4), (HALF, 0)]


def test_properties_that_are_put_replace_others_of_their_names() -> None:
    message = SentMessage("T", 1, ["A\x011", "", "B\x012", "A\x013", "C\x01", ""])
    assert message.values() == {"A": "3", "B": "2"}
    message.put({"A": "4", "D": "5"}, dropped=["B"])
    assert message.properties == ["C\x01", "A\x014", "D\x015", ""]
    assert SentMessage.property_items(message.raw_properties) == message.properties


def test_properties_that_are_no_text_stay_as_they_are() -> None:
    raw = b"A\x01\xff\xfe\x02"
    assert SentMessage("T", 1, SentMessage.property_items(raw)).raw_properties == raw


def test_flags_make_demands_too(broker: BrokerUnderTest) -> None:
    assert broker.send_at_once(UNIQ_KEY, f=4) == [(0, "")]
    (message,) = broker.stored(HALF, 0)
    assert message.sys_flag & TRANSACTION_MASK == 0


@pytest.mark.parametrize("value", ["", "0", "false"])
def test_some_values_ask_for_nothing(broker: BrokerUnderTest, value: str) -> None:
    assert broker.send_at_once(f"{UNIQ_KEY}DELAY\x01{value}\x02") == [(0, "")]
    assert len(broker.stored("T", 1)) == 1


def test_a_row_may_refuse(broker: BrokerUnderTest) -> None:
    assert broker.send_at_once(f"{UNIQ_KEY}DELAY\x01late\x02") == [
        (ResponseCode.MESSAGE_ILLEGAL, "DELAY=late: expected a number")
    ]
    assert broker.store.commit_log.max_offset == 0


def test_what_no_row_serves_is_refused(broker: BrokerUnderTest) -> None:
    ((code, remark),) = broker.send_at_once(f"{UNIQ_KEY}RECALL\x01yes\x02")
    assert code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
    assert remark.startswith("recalled messages are not served by this broker")
    assert "property RECALL=yes" in remark
    assert broker.store.commit_log.max_offset == 0


def test_each_message_to_some_topics_is_looked_at(broker: BrokerUnderTest) -> None:
    keyed = f"KEYS\x01k\x02{UNIQ_KEY}"
    refused = (ResponseCode.MESSAGE_ILLEGAL, "a message without key")
    answers = broker.send_at_once(keyed, UNIQ_KEY, keyed, UNIQ_KEY, topic="Compacted")
    assert answers == [(0, ""), refused, (0, ""), refused]
    assert broker.send_at_once(keyed, UNIQ_KEY) == [(0, "")] * 2
    assert len(broker.stored("Compacted", 1)) == 2


@pytest.mark.parametrize(
    ("fields", "properties", "words"),
    [
        ({"topic": "Compacted"}, "", "a message without key"),
        ({}, "DELAY\x013\x02", "delayed messages in a batch (property DELAY=3)"),
        ({"f": 4}, "", "transactional messages in a batch (sysFlag 4 to T)"),
        ({}, "RECALL\x01yes\x02", "recalled messages are not served by this broker"),
    ],
)
def test_a_batch_that_would_be_changed_is_refused(
    broker: BrokerUnderTest, fields: dict[str, Any], properties: str, words: str
) -> None:
    body = encode_batch([(0, b"one", b""), (0, b"two", b"")])
    ((code, remark),) = broker.send_at_once(UNIQ_KEY + properties, body=body, m=True, **fields)
    assert code in {ResponseCode.MESSAGE_ILLEGAL, ResponseCode.REQUEST_CODE_NOT_SUPPORTED}
    assert words in remark
    assert broker.store.commit_log.max_offset == 0


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize(
    ("topic", "properties", "words"),
    [
        ("T", b"DELAY\x013\x02", "delayed messages in a batch (property DELAY=3)"),
        ("T", b"RECALL\x01yes\x02", "recalled messages are not served"),
        ("Compacted", b"a\x01b\x02", "a message without key"),
    ],
)
def test_a_block_that_would_be_changed_is_refused(
    broker: BrokerUnderTest, topic: str, properties: bytes, words: str, is_staged: bool
) -> None:
    answer = send_block(broker, topic, properties, is_staged)
    assert words in answer.remark
    assert broker.store.commit_log.max_offset == 0
    answer = send_block(broker, topic, b"KEYS\x01k\x02", is_staged)
    assert answer.code == ResponseCode.SUCCESS


def send_block(broker: BrokerUnderTest, topic: str, properties: bytes, is_staged: bool) -> Answer:
    fields: dict[str, Any] = {
        "producer_group": "g",
        "topic": topic,
        "default_topic": "TBW102",
        "default_topic_queue_nums": 1,
        "queue_id": 0,
        "count": 1,
    }
    body = bytes(block(b"body", topic=topic, properties=properties).body)
    if is_staged:
        staged = StageSendHeader(query_id="q", batch_id=0, attempt="a", block_number=0, **fields)
        return broker.ask(RequestCode.STAGE_SEND, staged, body)
    return broker.ask(RequestCode.BULK_SEND, BulkSendHeader(**fields), body)
