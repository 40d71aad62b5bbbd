"""Queries by a key whose Java hash many other keys share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace_broker.store import reader
from headrace_broker.store.index.index_file import IndexFile
from headrace_broker.store.index.indexer import BLOCK_BYTES_MAX
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import QueryMessageHeader
from headrace_protocol.message import StoredMessage, decode_record, decode_records
from tests.support.broker import BrokerUnderTest
from tests.support.channel import MemoryChannel
from tests.support.stores import put

# 64 texts of one hash.
KEYS = ["".join(parts) for parts in itertools.product(("Aa", "BB"), repeat=6)]
LONG_MAX = 2**63 - 1


@pytest.fixture
def broker(tmp_path: Path) -> BrokerUnderTest:
    return BrokerUnderTest(
        tmp_path, ring_rows=2048, commit_log_file_bytes=1 << 23, index_entry_count=10_000
    )


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Physical offsets of the records that queries decode."""
    places: list[int] = []

    def counting(record: memoryview) -> StoredMessage:
        message = decode_record(record)
        places.append(message.physical_offset)
        return message

    monkeypatch.setattr(reader, "decode_record", counting)
    return places


def store(broker: BrokerUnderTest, count: int, *keys: str) -> None:
    queue = broker.store.queue("t", 0)
    for _ in range(count):
        put(broker.store, queue, KEYS=" ".join(keys))
        broker.clock.ms += 1000


def header(key: str, end_ms: int = LONG_MAX, max_num: int = 32) -> QueryMessageHeader:
    return QueryMessageHeader(
        topic="t", key=key, max_num=max_num, begin_timestamp=0, end_timestamp=end_ms
    )


def test_a_record_is_decoded_once_however_many_of_its_keys_share_the_hash(
    broker: BrokerUnderTest, decoded: list[int]
) -> None:
    store(broker, 100, *KEYS[:-1])
    answer = broker.ask(RequestCode.QUERY_MESSAGE, header(KEYS[-1]))
    assert answer.code == ResponseCode.QUERY_NOT_FOUND
    assert len(decoded) == len(set(decoded)) == 100


def test_a_query_lets_others_have_their_turn(broker: BrokerUnderTest) -> None:
    store(broker, 100, *KEYS[:-1])
    works: list[Iterator[None]] = []
    broker.registry.run_long = works.append
    broker.registry.slice_s = 0.0
    channel = MemoryChannel()
    broker.send(RequestCode.QUERY_MESSAGE, header(KEYS[-1]), b"", channel)
    (work,) = works
    assert sum(1 for _ in work) >= 100
    ((answer, _),) = channel.replies()
    assert answer.code == ResponseCode.QUERY_NOT_FOUND


def test_a_query_stops_at_its_bound_and_says_how_to_continue(
    broker: BrokerUnderTest, decoded: list[int]
) -> None:
    store(broker, 1, KEYS[-1])
    end_ms = broker.clock.ms - 1000
    store(broker, reader.CANDIDATES_MAX + 10, KEYS[0])
    answer = broker.ask(RequestCode.QUERY_MESSAGE, header(KEYS[-1]))
    assert len(decoded) == reader.CANDIDATES_MAX
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "set an earlier end of the time range" in answer.remark
    answer = broker.ask(RequestCode.QUERY_MESSAGE, header(KEYS[-1], end_ms))
    assert len(decode_records(answer.body)) == 1


def test_newer_entries_are_skipped_without_decoding(
    broker: BrokerUnderTest, decoded: list[int]
) -> None:
    store(broker, 1, "all")
    end_ms = broker.clock.ms
    store(broker, 50, "all")
    answer = broker.ask(RequestCode.QUERY_MESSAGE, header("all", end_ms))
    assert len(decode_records(answer.body)) == 2
    assert len(decoded) == 2


def test_records_of_many_keys_are_indexed_a_few_at_a_time(broker: BrokerUnderTest) -> None:
    indexer = broker.store.indexer
    queue = broker.store.queue("t", 0)
    for count, size in ((900, 1), (100, 30_000)):
        for _ in range(count):
            put(broker.store, queue, KEYS="k" * size, dispatch=False)
    broker.store.write_path.publish()
    rows = []
    while indexer.waiting_count:
        block = indexer.next_block(None, 1024, BLOCK_BYTES_MAX)
        rows.append(block.row_count)
        indexer.put_copied(block)
    assert rows[0] >= 900
    assert max(rows[1:]) == BLOCK_BYTES_MAX // 30_007


def test_a_query_indexes_what_is_waiting_in_slices(broker: BrokerUnderTest) -> None:
    queue = broker.store.queue("t", 0)
    for _ in range(40):
        put(broker.store, queue, KEYS="wanted " + "k" * 30_000)
    works: list[Iterator[None]] = []
    broker.registry.run_long = works.append
    broker.registry.slice_s = 0.0
    channel = MemoryChannel()
    broker.send(RequestCode.QUERY_MESSAGE, header("wanted", max_num=1), b"", channel)
    waiting = [broker.store.indexer.waiting_count]
    for _ in works[0]:
        waiting.append(broker.store.indexer.waiting_count)  # noqa: PERF401 - it goes on
    assert waiting[0] == 40
    assert waiting[-1] == 0
    assert len(set(waiting)) >= 40 * 30_000 // BLOCK_BYTES_MAX
    ((answer, _),) = channel.replies()
    assert answer.code == ResponseCode.SUCCESS


def test_a_walk_is_bounded(broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "ENTRIES_MAX", 500)
    walked = 0
    entry = IndexFile.entry

    def counting(*args: object) -> tuple[int, int, int, int]:
        nonlocal walked
        walked += 1
        return entry(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(IndexFile, "entry", counting)
    store(broker, 100, *KEYS[:-1])
    answer = broker.ask(RequestCode.QUERY_MESSAGE, header(KEYS[-1]))
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert 500 <= walked <= 500 + 128
