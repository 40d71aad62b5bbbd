"""Queries by key, offsets by time and resets over both tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_protocol.admin_headers import ResetOffsetHeader
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import QueryMessageHeader, SearchOffsetHeader
from headrace_protocol.message import decode_records
from tests.support.broker import Answer, BrokerUnderTest
from tests.support.object_tiers import Fault, FaultyDriver
from tests.support.tiered_broker import (
    TOPIC,
    body,
    expire_log,
    put,
    start,
    tier_of,
    upload,
    wrap_driver,
)

LONG_MAX = 2**63 - 1


def query(broker: BrokerUnderTest, key: str, **fields: Any) -> Answer:
    header = {
        "topic": TOPIC,
        "key": key,
        "max_num": 64,
        "begin_timestamp": 0,
        "end_timestamp": LONG_MAX,
        **fields,
    }
    return broker.ask(RequestCode.QUERY_MESSAGE, QueryMessageHeader(**header))


def numbers(answer: Answer) -> list[int]:
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return [int(message.body.split()[0]) for message in decode_records(answer.body)]


async def fill(broker: BrokerUnderTest) -> tuple[int, int]:
    """Twenty messages in the tier, of which the log has the last ones, and three more.

    Returns the time of the first, and the oldest local queue offset.
    """
    begin_ms = broker.clock.ms
    put(broker, 0, 20)
    upload(broker)
    low = await expire_log(broker)
    put(broker, 20, 3)
    return begin_ms, low


async def test_keys_ids_and_tags_are_found_in_both_tiers(tmp_path: Path) -> None:
    broker = start(tmp_path)
    begin_ms, low = await fill(broker)
    for number in (0, 7, low - 1, low, 19, 22):
        assert numbers(query(broker, f"k{number}")) == [number]
    even = numbers(query(broker, "even", index_type="T"))
    assert sorted(even) == [*range(0, 23, 2)]
    assert len(even) == len({*even})
    newest = numbers(query(broker, "even", index_type="T", max_num=4))
    assert newest[0] == 22
    assert len(newest) == 4
    assert query(broker, "k3", index_type="U").code == ResponseCode.QUERY_NOT_FOUND
    assert query(broker, "k77").code == ResponseCode.QUERY_NOT_FOUND
    # Messages were stored a second apart.
    span = {"begin_timestamp": begin_ms + 2000, "end_timestamp": begin_ms + 6000}
    assert sorted(numbers(query(broker, "even", index_type="T", **span))) == [2, 4, 6]


async def test_ids_of_senders(broker: BrokerUnderTest) -> None:
    for number in range(20):
        broker.store_message(TOPIC, 0, body(number), UNIQ_KEY=f"ID{number}", KEYS="ID3 same")
    upload(broker)
    low = await expire_log(broker)
    assert low > 4
    unique = {"unique_key_query": True}
    assert numbers(query(broker, "ID3", **unique)) == [3]
    assert numbers(query(broker, "ID19", **unique)) == [19]
    assert sorted(numbers(query(broker, "same"))) == [*range(20)]


async def test_a_query_for_what_the_log_has_asks_no_tier(tmp_path: Path) -> None:
    broker = start(tmp_path)
    driver = wrap_driver(broker, FaultyDriver)
    _begin_ms, low = await fill(broker)
    oldest_ms = broker.store.commit_log.store_timestamp_at(broker.store.commit_log.min_offset)
    assert oldest_ms is not None
    driver.fault = lambda _call: Fault.FAILS
    assert numbers(query(broker, f"k{low + 1}", begin_timestamp=oldest_ms + 1)) == [low + 1]
    # What the log has is found all the same, and what it lacks is an error.
    assert numbers(query(broker, "k21")) == [21]
    refused = query(broker, "k1")
    assert refused.code == ResponseCode.SYSTEM_BUSY
    assert refused.remark is not None
    assert "unreachable since" in refused.remark
    driver.fault = lambda _call: Fault.NONE
    assert numbers(query(broker, "k1")) == [1]


async def test_expired_messages_are_not_found(tmp_path: Path) -> None:
    broker = start(tmp_path, tiered_store_file_reserved_time=1)
    await fill(broker)
    upload(broker)
    tier_of(broker).clean_up({})
    queue = tier_of(broker).access.queue(TOPIC, 0)
    assert queue is not None
    assert queue.min_offset > 2
    assert query(broker, "k1").code == ResponseCode.QUERY_NOT_FOUND
    assert numbers(query(broker, "k22")) == [22]


async def test_a_level_that_reads_no_tier(tmp_path: Path) -> None:
    broker = start(tmp_path, tiered_storage_level="DISABLE")
    await fill(broker)
    assert query(broker, "k1").code == ResponseCode.QUERY_NOT_FOUND


async def test_offsets_by_time_and_resets_cover_both_tiers(tmp_path: Path) -> None:
    broker = start(tmp_path)
    begin_ms, low = await fill(broker)
    assert low > 5
    broker.join("group", "client", TOPIC)
    broker.offsets.commit("group", TOPIC, 0, 23)
    for number in (0, 5, low, 19):
        at_ms = begin_ms + number * 1000
        header = SearchOffsetHeader(topic=TOPIC, queue_id=0, timestamp=at_ms)
        answer = broker.ask(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header)
        assert answer.command.ext()["offset"] == str(number)
    reset = ResetOffsetHeader(topic=TOPIC, group="group", timestamp=begin_ms + 4000, is_force=True)
    answer = broker.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, reset)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    assert b":4" in bytes(answer.body)


@pytest.mark.parametrize("count", [1, 5])
async def test_long_answers_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    broker = start(tmp_path)
    begin_ms, low = await fill(broker)
    # Two records, the last of which exceeds the bound.
    monkeypatch.setattr("headrace_broker.tiered.access.lookups._ANSWER_BYTES", 1500)
    span = {"begin_timestamp": begin_ms, "end_timestamp": begin_ms + 1000 * (low - 1)}
    found = numbers(query(broker, "even", index_type="T", max_num=count, **span))
    assert len(found) == min(count, 2)
