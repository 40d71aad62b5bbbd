"""Queries by key and id find what the compaction log keeps after the CommitLog has lost it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_broker.compaction.lookups import LookupLimits
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import ViewMessageHeader
from headrace_protocol.message import decode_records
from tests.broker.compaction.test_compaction_source import C, compact, create, follow, start
from tests.broker.processors.test_query_processor import query
from tests.support.broker import BrokerUnderTest


def found(broker: BrokerUnderTest, key: str, **fields: Any) -> list[bytes]:
    answer = query(broker, key, topic=C, **fields)
    if answer.code == ResponseCode.QUERY_NOT_FOUND:
        return []
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return [message.body for message in decode_records(answer.body)]


@pytest.fixture
def expired(tmp_path: Path) -> BrokerUnderTest:
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
    return start(tmp_path)


def test_the_newest_message_of_a_key_is_found(expired: BrokerUnderTest) -> None:
    assert found(expired, "a b") == [b"3"]
    assert found(expired, "c") == [b"2"]
    assert found(expired, "d") == [b"5"]
    assert found(expired, "gone") == [b""]
    assert found(expired, "never") == []
    assert found(expired, "c", index_type="K") == [b"2"]
    assert found(expired, "c", index_type="T") == []
    assert found(expired, "c", unique_key_query=True) == []


def with_id(broker: BrokerUnderTest, message_id: str, **fields: Any) -> list[bytes]:
    return found(broker, message_id, unique_key_query=True, **fields)


def test_a_message_is_found_by_its_producers_id(
    expired: BrokerUnderTest,
) -> None:
    expired.compaction.lookups.limits = LookupLimits(id_part_count=1)
    for body in (b"2", b"3", b""):
        assert with_id(expired, f"U{body!r}") == [body]
        assert found(expired, f"U{body!r}", index_type="U") == [body]
    for superseded in (b"1", b"4"):
        assert with_id(expired, f"U{superseded!r}") == []
    for part in ("U", "U" + repr(b"2")[:-1], ""):
        assert with_id(expired, part) == []
    (stored,) = decode_records(query(expired, "c", topic=C).body)
    name, at = repr(stored.body), stored.store_timestamp
    assert with_id(expired, f"U{name}", begin_timestamp=at, end_timestamp=at) == [b"2"]
    assert with_id(expired, f"U{name}", begin_timestamp=at + 1) == []
    assert with_id(expired, f"U{name}", end_timestamp=at - 1) == []
    expired.compaction.lookups.limits = LookupLimits(id_part_count=1, id_bytes_max=1)
    assert with_id(expired, f"U{name}") == [b"2"]
    assert with_id(expired, f"U{b'3'!r}") == []


def test_ids_of_other_topics_are_not_searched_for(expired: BrokerUnderTest) -> None:
    for topic in ("filler", "nowhere"):
        answer = query(expired, "U", topic=topic, unique_key_query=True)
        assert answer.code == ResponseCode.QUERY_NOT_FOUND


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


def test_an_id_does_not_find_a_message_of_another_topic(expired: BrokerUnderTest) -> None:
    """The id of a message in a compaction log may be that of another's record in the CommitLog."""
    result = expired.store.source(expired.store.queue("filler", 0)).get(1, 1, 1, None)
    offset = decode_records(result.buffers[0])[0].physical_offset
    for topic, code in ((None, 0), ("filler", 0), (C, ResponseCode.SYSTEM_ERROR)):
        header = ViewMessageHeader(offset=offset, topic=topic)
        assert expired.ask(RequestCode.VIEW_MESSAGE_BY_ID, header).code == code
