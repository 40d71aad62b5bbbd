"""Queries by key find what the compaction log keeps after the CommitLog has lost it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import ViewMessageHeader
from headrace_protocol.message import decode_records
from tests.broker.test_compaction_source import C, compact, create, follow, start
from tests.broker.test_query_processor import query

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.broker import BrokerUnderTest


def found(broker: BrokerUnderTest, key: str, **fields: Any) -> list[bytes]:
    answer = query(broker, key, topic=C, **fields)
    if answer.code == ResponseCode.QUERY_NOT_FOUND:
        return []
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return [message.body for message in decode_records(answer.body)]


@pytest.fixture
def expired(tmp_path: Path) -> Iterator[BrokerUnderTest]:
    """A broker whose CommitLog and index have lost "a b", "c" and the markers of a compacted topic.

    "d" is still in both logs.
    """
    broker = start(tmp_path)
    create(broker)
    broker.create_topic("filler", 1)
    for name, body in (("a b", b"1"), ("c", b"2"), ("a b", b"3"), ("gone", b"4"), ("gone", b"")):
        broker.store_message(C, 0, body, KEYS=name, UNIQ_KEY=f"U{body!r}")
    follow(broker)
    compact(broker)
    for _ in range(3):
        broker.store_message("filler", 0, bytes(40_000))
    broker.store_message(C, 0, b"5", KEYS="d")
    follow(broker)
    broker.topics.saved.finish()
    broker.close()
    (tmp_path / "store/commitlog" / f"{0:020d}").unlink()
    for path in (tmp_path / "store/index").iterdir():
        path.unlink()
    broker = start(tmp_path)
    yield broker
    broker.close()


def test_the_newest_message_of_a_key_is_found(expired: BrokerUnderTest) -> None:
    assert found(expired, "a b") == [b"3"]
    assert found(expired, "c") == [b"2"]
    assert found(expired, "d") == [b"5"]
    assert found(expired, "gone") == [b""]
    assert found(expired, "never") == []
    assert found(expired, "c", index_type="K") == [b"2"]
    assert found(expired, "c", index_type="T") == []
    assert found(expired, "c", unique_key_query=True) == []


def test_the_time_range_and_the_count_hold(expired: BrokerUnderTest) -> None:
    (stored,) = decode_records(query(expired, "c", topic=C).body)
    at = stored.store_timestamp
    assert found(expired, "c", begin_timestamp=at, end_timestamp=at) == [b"2"]
    assert found(expired, "c", begin_timestamp=at + 1) == []
    assert found(expired, "c", end_timestamp=at - 1) == []
    assert found(expired, "c", max_num=0) == []


def test_a_message_in_both_logs_is_found_once(expired: BrokerUnderTest) -> None:
    expired.store_message(C, 0, b"6", KEYS="c")
    for _ in range(2):
        assert sorted(found(expired, "c")) == [b"6"]
        follow(expired)


def test_odd_keys_are_not_found(expired: BrokerUnderTest) -> None:
    for key in ("", " ", "x" * 1000):
        assert found(expired, key) == []


def test_an_expired_id_names_the_other_ways(expired: BrokerUnderTest) -> None:
    answer = expired.ask(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessageHeader(offset=0))
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "found by its key" in answer.remark
