"""Static topics that are compacted: each item by itself, and read as one queue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_broker.compaction.compactor import Request
from headrace_broker.topics.attributes import CompactionPolicy
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import (
    BulkPullResponseHeader,
    CompactTopicHeader,
    GetByKeyHeader,
    GetByKeyResponseHeader,
    GetMaxOffsetHeader,
    GetMinOffsetHeader,
    OffsetResponseHeader,
)
from headrace_protocol.key_lookup import NoRecord, WantedKey, decode_found, encode_keys
from headrace_protocol.message import decode_record
from tests.broker.statictopic.test_static_cleanup import clean, expire
from tests.support.static_brokers import TOPIC, Brokers, item
from tests.support.wire import bulk_pull_header, send_header

SIZES: dict[str, Any] = {"compaction_mapped_file_size": 4096, "compaction_cq_mapped_file_size": 460}
# Logic queue 1, so that logic and physical ids differ.
OTHER = (item("a", 0, 0, 0),)
A, B = item("a", 0, 0, 1), item("b", 1, 10, 0)
GAP = item("b", 1, 10_000, 0)
RETENTION_MS = 1000


@pytest.fixture
def brokers(tmp_path: Path) -> Brokers:
    """A queue that broker a leads."""
    brokers = compacted(tmp_path)
    brokers.map((A,), OTHER)
    return brokers


def compacted(folder: Path, *more: str) -> Brokers:
    brokers = Brokers(folder, store={"commit_log_file_bytes": 1 << 16}, **SIZES)
    brokers.attributes = ",".join(("+cleanup.policy=COMPACTION", *more))
    return brokers


def put(brokers: Brokers, broker: str, key: str, body: bytes, queue_id: int = 0) -> int:
    """Send a message; returns the code of the answer."""
    header = send_header(queue_id, properties=f"KEYS\x01{key}\x02")
    answer = brokers[broker].ask(RequestCode.SEND_MESSAGE_V2, header, body)
    brokers[broker].clock.ms += 1000
    return answer.code


def fill(brokers: Brokers, broker: str, number: int) -> None:
    """Ten messages of three keys and one of its own."""
    for at in range(10):
        key = f"only {broker}" if at == 4 else f"k{at % 3}"
        assert put(brokers, broker, key, b"%s%d-%d" % (broker.encode(), number, at)) == 0


def compact(brokers: Brokers, broker: str, physical: int) -> None:
    """Bring the messages of a physical queue to its compaction log, and compact it."""
    under_test = brokers[broker]
    under_test.store.flusher.flush_now()
    under_test.store.followers.finish()
    compaction, name = under_test.compaction, (TOPIC, physical)
    policy = CompactionPolicy(delete_retention_ms=RETENTION_MS)
    keeps = under_test.core.own_queues.has_older(*name)
    now_ms = under_test.clock.ms
    compaction.compactor.compact(Request(name, policy, now_ms, 1 << 20, True, keeps))


def newest(messages: list[tuple[int, bytes]]) -> list[int]:
    return [offset for offset, _ in messages]


def get(brokers: Brokers, broker: str, *keys: WantedKey, bytes_max: int = 1 << 20) -> list[Any]:
    """(queue, offset, body) of each key, asked for until each is answered."""
    found: list[Any] = []
    while len(found) < len(keys):
        rest = keys[len(found) :]
        header = GetByKeyHeader(topic=TOPIC, count=len(rest), max_msg_bytes=bytes_max)
        answer = brokers[broker].ask(RequestCode.GET_BY_KEY, header, encode_keys(rest))
        assert answer.code == ResponseCode.SUCCESS, answer.remark
        count = answer.command.header(GetByKeyResponseHeader).count
        assert 0 < count <= len(rest)
        for each in decode_found(count, answer.body):
            if isinstance(each, NoRecord):
                found.append(each)
            else:
                record = decode_record(each)
                found.append((record.queue_id, record.queue_offset, bytes(record.body)))
    return found


def wanted(key: str, queue_id: int = 0, seen_offset: int = -1) -> WantedKey:
    return WantedKey(key.encode(), queue_id, seen_offset)


def moved(brokers: Brokers, second: Any = B) -> None:
    """The queue has ten messages on each broker, and b leads it; both items are compacted."""
    fill(brokers, "a", 0)
    brokers.map((A, second), OTHER)
    fill(brokers, "b", 1)
    for broker, physical in (("a", 1), ("b", 0)):
        compact(brokers, broker, physical)


# -- reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", [B, GAP])
def test_a_reader_gets_the_newest_value_last(brokers: Brokers, second: Any) -> None:
    moved(brokers, second)
    start = second.logic_offset
    a, b = [4, 7, 8, 9], [start + at for at in (4, 7, 8, 9)]
    assert newest(brokers.read_all("b")) == a + b
    assert brokers.read_all("b")[-1] == (start + 9, b"b1-9")
    # Offsets without a message stand for the next one, also that of the next item.
    for offset in range(start + 10):
        expected = [each for each in a + b if each >= offset]
        assert newest(brokers.read_all("b", offset)) == expected
        if second is GAP and offset == 12:
            break
    code, header, found = brokers.pull("b", 5)
    assert (code, newest(found)) == (ResponseCode.SUCCESS, [7, 8, 9])
    assert header.max_offset == start + 10


@pytest.mark.parametrize("broker", ["a", "b"])
def test_bulk_pulls(brokers: Brokers, broker: str) -> None:
    """From another broker's item and from an own one; there are units with offsets."""
    moved(brokers)
    if broker == "a":
        brokers.map((A, B, item("a", 2, 20, 2)), OTHER)
    found, offset = [], 0
    while True:
        header = bulk_pull_header(offset, max_msg_nums=3, subscription="*")
        answer = brokers[broker].ask(RequestCode.BULK_PULL, header)
        if answer.code == ResponseCode.PULL_NOT_FOUND:
            break
        head = answer.command.header(BulkPullResponseHeader)
        if answer.code == ResponseCode.SUCCESS:
            found.append((offset, head.count))
        assert head.next_begin_offset > offset
        offset = head.next_begin_offset
    assert sum(count for _, count in found) == 8
    assert offset == 20


def test_the_range_of_a_compacted_queue(brokers: Brokers) -> None:
    moved(brokers)
    for code, header, expected in (
        (RequestCode.GET_MIN_OFFSET, GetMinOffsetHeader, 4),
        (RequestCode.GET_MAX_OFFSET, GetMaxOffsetHeader, 20),
    ):
        answer = brokers["b"].ask(code, header(topic=TOPIC, queue_id=0))
        assert answer.command.header(OffsetResponseHeader).offset == expected


def test_an_item_stays_when_only_its_compaction_log_has_messages(brokers: Brokers) -> None:
    moved(brokers)
    broker = brokers["a"]
    broker.store.queue(TOPIC, 1).consume_queue.min_offset_seen = 10
    begin, end = broker.mapping_changes._range_of(TOPIC, 1)
    assert (begin, end) == (4, 10)


# -- delete markers --------------------------------------------------------------------------------


def test_a_marker_stays_while_an_older_item_has_the_value(brokers: Brokers) -> None:
    fill(brokers, "a", 0)
    brokers.map((A, B), OTHER)
    put(brokers, "b", "k1", b"")
    put(brokers, "b", "own", b"")
    put(brokers, "b", "other", b"1")
    for _ in range(4):
        compact(brokers, "b", 0)
        brokers["b"].clock.ms += 10 * RETENTION_MS
        put(brokers, "b", "other", b"1")
    compact(brokers, "a", 1)
    messages = dict(brokers.read_all("b"))
    assert messages[7] == b"a0-7"  # k1, as it was before
    assert messages[10] == messages[11] == b""
    assert get(brokers, "b", wanted("k1"))[0][1:] == (10, b"")


def test_a_marker_goes_once_there_is_no_older_item(brokers: Brokers) -> None:
    fill(brokers, "a", 0)
    brokers.map((A, B), OTHER)
    put(brokers, "b", "k1", b"")
    put(brokers, "b", "k2", b"2")
    compact(brokers, "b", 0)
    brokers["b"].clock.ms += 10 * RETENTION_MS
    compact(brokers, "b", 0)
    assert dict(brokers.read_all("b", 10)) == {10: b"", 11: b"2"}
    brokers.map((item("b", 1, 10, 0),), OTHER, only="b")
    compact(brokers, "b", 0)  # due for nothing else
    assert dict(brokers.read_all("b", 10)) == {11: b"2"}


def test_a_marker_in_the_first_item_goes(brokers: Brokers) -> None:
    fill(brokers, "a", 0)
    put(brokers, "a", "k1", b"")
    put(brokers, "a", "k2", b"2")
    for _ in range(3):
        compact(brokers, "a", 1)
        brokers["a"].clock.ms += 10 * RETENTION_MS
        put(brokers, "a", "k2", b"2")
    assert b"" not in dict(brokers.read_all("a")).values()


def test_markers_stay_while_the_mapping_is_lost(brokers: Brokers) -> None:
    moved(brokers)
    queues = brokers["b"].core.own_queues
    assert queues.has_older(TOPIC, 0)
    assert not brokers["a"].core.own_queues.has_older(TOPIC, 1)
    brokers["a"].mappings.remove(TOPIC)  # its mark stays
    assert brokers["a"].core.own_queues.has_older(TOPIC, 1)
    assert not queues.has_older("plain", 0)


@pytest.mark.parametrize("has_value", [True, False])
async def test_an_older_item_goes_when_its_compaction_log_is_empty(
    tmp_path: Path, has_value: bool
) -> None:
    brokers = Brokers(tmp_path, **SIZES)
    brokers.attributes = "+cleanup.policy=COMPACTION"
    brokers.map((A,), OTHER)
    for body in (b"value", b""):
        put(brokers, "a", "k1", body)
    put(brokers, "a", "k2", b"2" if has_value else b"")
    brokers.map((A, item("b", 1, 3, 0)), OTHER)
    put(brokers, "b", "k2", b"")
    put(brokers, "b", "k3", b"3")
    for _ in range(2):
        for broker, physical in (("a", 1), ("b", 0)):
            compact(brokers, broker, physical)
            brokers[broker].clock.ms += 10 * RETENTION_MS
    await expire(brokers["a"], 0)
    assert brokers["a"].store.source(brokers["a"].store.queue(TOPIC, 1)).min_offset() == 3
    await clean(brokers, "ba")
    mapping = brokers["b"].mappings.get(TOPIC)
    assert mapping is not None
    chain = mapping.chain(0)
    assert chain is not None
    compact(brokers, "b", 0)
    messages = dict(brokers.read_all("b"))
    if has_value:
        assert [each.gen for each in chain] == [0, 1]
        assert messages == {2: b"2", 3: b"", 4: b"3"}
    else:
        assert [each.gen for each in chain] == [1]
        assert messages == {4: b"3"}


# -- keys ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", [B, GAP])
def test_a_key_is_found_in_the_newest_item_that_has_it(brokers: Brokers, second: Any) -> None:
    start = second.logic_offset
    fill(brokers, "a", 0)
    brokers.map((A, second), OTHER)
    put(brokers, "b", "k1", b"new")
    put(brokers, "b", "k2", b"")
    put(brokers, "a", "elsewhere", b"x", 1)
    keys = [wanted(key) for key in ("k0", "k1", "k2", "only a", "none")]
    expected = [
        (0, 9, b"a0-9"),
        (0, start, b"new"),
        (0, start + 1, b""),
        (0, 4, b"a0-4"),
        NoRecord.NEVER,
    ]
    for bytes_max in (1 << 20, 1, 200):
        assert get(brokers, "b", *keys, bytes_max=bytes_max) == expected
    compact(brokers, "a", 1)
    compact(brokers, "b", 0)
    assert get(brokers, "b", *keys) == expected
    anywhere = [wanted(key, -1) for key in ("k1", "k2", "only a", "elsewhere")]
    assert get(brokers, "b", *anywhere) == [*expected[1:4], NoRecord.NEVER]
    assert get(brokers, "a", wanted("elsewhere", -1), wanted("k1", -1)) == [
        (1, 0, b"x"),
        NoRecord.NEVER,
    ]


def test_an_own_write_is_seen(brokers: Brokers) -> None:
    moved(brokers)
    keys = [wanted("k1", 0, seen) for seen in (3, 9, 10, 19, 20, 30)]
    assert get(brokers, "b", *keys) == [(0, 17, b"b1-7")] * 4 + [NoRecord.NOT_YET] * 2


def test_what_an_undecided_leader_has_is_not_seen(brokers: Brokers) -> None:
    fill(brokers, "a", 0)
    brokers.map((A, item("b", 1, -1, 0)), OTHER)
    assert put(brokers, "b", "k1", b"new") == 0
    assert get(brokers, "b", wanted("k1")) == [(0, 7, b"a0-7")]
    brokers.map((A, B), OTHER)
    assert get(brokers, "b", wanted("k1")) == [(0, 10, b"new")]


def test_an_older_item_that_is_away(brokers: Brokers) -> None:
    moved(brokers)
    brokers.away.add("a")
    # What can be answered is.
    header = GetByKeyHeader(topic=TOPIC, count=2, max_msg_bytes=1 << 20)
    body = encode_keys([wanted("k1"), wanted("only a")])
    answer = brokers["b"].ask(RequestCode.GET_BY_KEY, header, body)
    assert answer.command.header(GetByKeyResponseHeader).count == 1
    body = encode_keys([wanted("only a"), wanted("k1")])
    answer = brokers["b"].ask(RequestCode.GET_BY_KEY, header, body)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "broker-a" in answer.remark


def test_a_broker_that_does_not_lead_the_queue(brokers: Brokers) -> None:
    moved(brokers)
    for queue_id, code in (
        (0, ResponseCode.NOT_LEADER_FOR_QUEUE),
        (2, ResponseCode.INVALID_PARAMETER),
    ):
        header = GetByKeyHeader(topic=TOPIC, count=1, max_msg_bytes=1 << 20)
        body = encode_keys([wanted("k1", queue_id)])
        answer = brokers["a"].ask(RequestCode.GET_BY_KEY, header, body)
        assert answer.code == code
    physical = GetByKeyHeader(topic=TOPIC, count=1, max_msg_bytes=1 << 20, logical=False)
    answer = brokers["a"].ask(RequestCode.GET_BY_KEY, physical, encode_keys([wanted("k1", 1)]))
    assert answer.code == ResponseCode.SUCCESS


# -- the queue of a key ----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["headrace", "java"])
def test_a_key_belongs_to_a_logic_queue(tmp_path: Path, rule: str) -> None:
    brokers = compacted(tmp_path, f"+key.queue={rule}")
    # Physical queues: 0 and 1 on a, 0 on b; logic ones: 1, 0 and 2.
    brokers.map((A,), OTHER, (item("b", 0, 0, 0),))
    places: dict[str, int] = {}
    for number in range(12):
        # The second is left to a look at each message.
        for prefix in ("", "\u00e4"):
            key = f"{prefix}{number}"
            codes = [put(brokers, "aab"[queue], key, b"1", queue) for queue in range(3)]
            assert sorted(codes) == [0, *[ResponseCode.MESSAGE_ILLEGAL] * 2]
            places[key] = codes.index(0)
    assert set(places.values()) == {0, 1, 2}
    brokers.map((A, item("b", 1, 10_000, 1)), OTHER, (item("b", 0, 0, 0),))
    for key, queue in places.items():
        assert put(brokers, "b" if queue != 1 else "a", key, b"2", queue) == 0


# -- what is refused -------------------------------------------------------------------------------


def test_a_rebuild(brokers: Brokers) -> None:
    header = CompactTopicHeader(topic=TOPIC, rebuild_from="10.0.0.7:10911")
    answer = brokers["a"].ask(RequestCode.COMPACT_TOPIC, header)
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert "is static" in answer.remark
