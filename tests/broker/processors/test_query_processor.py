"""Looking up messages and offsets."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_protocol.bodies import TopicConfig
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import (
    GetEarliestMsgStoretimeHeader,
    GetMaxOffsetHeader,
    GetMinOffsetHeader,
    OffsetResponseHeader,
    QueryMessageHeader,
    QueryMessageResponseHeader,
    SearchOffsetHeader,
    TimestampResponseHeader,
    ViewMessageHeader,
)
from headrace_protocol.message import decode_records
from tests.support.broker import Answer, BrokerUnderTest

LONG_MAX = 2**63 - 1


@pytest.fixture
def start_ms(broker: BrokerUnderTest) -> int:
    """Five messages in queue 0 of topic t, a second apart; returns when the first was stored."""
    start = broker.clock.ms
    broker.create_topic("t")
    for number in range(5):
        broker.store_message(
            "t", 0, b"%d" % number, KEYS=f"all k{number}", UNIQ_KEY=f"U{number}", TAGS="tag"
        )
    return start


def query(broker: BrokerUnderTest, key: str, **fields: Any) -> Answer:
    header: dict[str, Any] = {
        "topic": "t",
        "key": key,
        "max_num": 64,
        "begin_timestamp": 0,
        "end_timestamp": LONG_MAX,
    }
    return broker.ask(RequestCode.QUERY_MESSAGE, QueryMessageHeader(**{**header, **fields}))


def bodies(answer: Answer) -> list[bytes]:
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return sorted(message.body for message in decode_records(answer.body))


def test_messages_by_key(broker: BrokerUnderTest, start_ms: int) -> None:
    answer = query(broker, "k3")
    assert bodies(answer) == [b"3"]
    header = answer.command.header(QueryMessageResponseHeader)
    assert header.index_last_update_timestamp == start_ms + 4000
    (newest,) = decode_records(query(broker, "k4").body)
    assert header.index_last_update_phyoffset == newest.physical_offset
    assert bodies(query(broker, "all")) == [b"0", b"1", b"2", b"3", b"4"]
    assert bodies(query(broker, "all", max_num=2)) == [b"3", b"4"]
    assert bodies(query(broker, "U2")) == [b"2"]


def test_messages_by_key_and_time(broker: BrokerUnderTest, start_ms: int) -> None:
    answer = query(broker, "all", begin_timestamp=start_ms + 1000, end_timestamp=start_ms + 2000)
    assert bodies(answer) == [b"1", b"2"]


def test_messages_by_kind_of_key(broker: BrokerUnderTest, start_ms: int) -> None:
    assert bodies(query(broker, "U2", unique_key_query=True)) == [b"2"]
    assert bodies(query(broker, "U2", index_type="U")) == [b"2"]
    assert bodies(query(broker, "k2", index_type="K")) == [b"2"]
    assert len(bodies(query(broker, "tag", index_type="T"))) == 5
    for key, index_type in (("U2", "K"), ("k2", "U"), ("k2", "T")):
        assert query(broker, key, index_type=index_type).code == ResponseCode.QUERY_NOT_FOUND


def test_no_such_key(broker: BrokerUnderTest, start_ms: int) -> None:
    answer = query(broker, "none")
    assert answer.code == ResponseCode.QUERY_NOT_FOUND
    assert "topic t with key none" in answer.remark
    assert query(broker, "k1", topic="other").code == ResponseCode.QUERY_NOT_FOUND
    assert query(broker, "k1", index_type="Z").code == ResponseCode.INVALID_PARAMETER


def test_no_message_at_all(broker: BrokerUnderTest) -> None:
    assert query(broker, "k").code == ResponseCode.QUERY_NOT_FOUND


def test_a_message_by_its_place(broker: BrokerUnderTest) -> None:
    broker.create_topic("t")
    broker.store_message("t", 0, b"first")
    place = broker.store_message("t", 0, b"second")
    answer = broker.ask(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessageHeader(offset=place))
    assert bodies(answer) == [b"second"]


def offset(answer: Answer) -> int:
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return answer.command.header(OffsetResponseHeader).offset


@pytest.mark.parametrize(
    ("seconds", "boundary", "expected"),
    [
        (-1, None, 0),
        (0, None, 0),
        (0.5, "LOWER", 1),
        (0.5, "upper", 0),
        (3, "LOWER", 3),
        (3, "UPPER", 3),
        (99, "lower", 5),
        (99, "UPPER", 4),
    ],
)
def test_offsets_by_time(
    broker: BrokerUnderTest, start_ms: int, seconds: float, boundary: str | None, expected: int
) -> None:
    header = SearchOffsetHeader(
        topic="t", queue_id=0, timestamp=start_ms + int(seconds * 1000), boundary_type=boundary
    )
    assert offset(broker.ask(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header)) == expected


def test_the_ends_of_a_queue(broker: BrokerUnderTest, start_ms: int) -> None:
    ask = broker.ask
    assert offset(ask(RequestCode.GET_MAX_OFFSET, GetMaxOffsetHeader(topic="t", queue_id=0))) == 5
    assert offset(ask(RequestCode.GET_MIN_OFFSET, GetMinOffsetHeader(topic="t", queue_id=0))) == 0
    header = GetEarliestMsgStoretimeHeader(topic="t", queue_id=0)
    answer = ask(RequestCode.GET_EARLIEST_MSG_STORETIME, header)
    assert answer.command.header(TimestampResponseHeader).timestamp == start_ms


def test_the_ends_of_a_queue_that_was_never_written(broker: BrokerUnderTest) -> None:
    broker.create_topic("t")
    ask = broker.ask
    assert offset(ask(RequestCode.GET_MAX_OFFSET, GetMaxOffsetHeader(topic="t", queue_id=1))) == 0
    assert offset(ask(RequestCode.GET_MIN_OFFSET, GetMinOffsetHeader(topic="t", queue_id=1))) == 0
    search = SearchOffsetHeader(topic="t", queue_id=1, timestamp=5)
    assert offset(ask(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, search)) == 0
    header = GetEarliestMsgStoretimeHeader(topic="t", queue_id=1)
    answer = ask(RequestCode.GET_EARLIEST_MSG_STORETIME, header)
    assert answer.command.header(TimestampResponseHeader).timestamp == -1


def test_a_queue_that_was_taken_away_is_still_read(broker: BrokerUnderTest) -> None:
    broker.create_topic("t", 2)
    broker.store_message("t", 1)
    broker.topics.put(TopicConfig(topic_name="t", read_queue_nums=1, write_queue_nums=1))
    header = GetMaxOffsetHeader(topic="t", queue_id=1)
    assert offset(broker.ask(RequestCode.GET_MAX_OFFSET, header)) == 1
