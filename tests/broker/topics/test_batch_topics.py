"""Topics with queue.type=BatchCQ: a batch is stored as one record, and read message by message."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_broker.store import reader
from headrace_broker.store.settings import StoreSettings
from headrace_protocol.admin_headers import (
    CreateTopicHeader,
    DeleteTopicHeader,
    GetTopicStatsHeader,
)
from headrace_protocol.bodies import SubscriptionGroupConfig
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.columns import RecordColumns
from headrace_protocol.compression import COMPRESSED, codec
from headrace_protocol.headers import (
    BulkPullResponseHeader,
    ConsumerSendMsgBackHeader,
    GetMaxOffsetHeader,
    OffsetResponseHeader,
    PullMessageResponseHeader,
    QueryMessageHeader,
    SendMessageResponseHeader,
    ViewMessageHeader,
)
from headrace_protocol.inner_batch import unwrap
from headrace_protocol.message import (
    INNER_BATCH,
    NEED_UNWRAP,
    Buffer,
    StoredMessage,
    decode_properties,
    decode_records,
    encode_batch,
    encode_properties,
)
from headrace_protocol.system_topics import SCHEDULE_TOPIC
from tests.support.broker import Answer, BrokerUnderTest, broker_config
from tests.support.channel import MemoryChannel
from tests.support.golden import CONFIG, STORES, copy_golden_store, golden_settings
from tests.support.wire import bulk_pull_header, pull_header, send_header

BATCHED = {"+queue.type": "BatchCQ"}
INNER = INNER_BATCH | NEED_UNWRAP


def attributes(values: dict[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in values.items())


def create(broker: BrokerUnderTest, topic: str = "T", **changes: Any) -> Answer:
    header: dict[str, Any] = {
        "topic": topic,
        "default_topic": "TBW102",
        "read_queue_nums": 2,
        "write_queue_nums": 2,
        "perm": 6,
        "topic_filter_type": "SINGLE_TAG",
        "attributes": attributes(BATCHED),
    }
    return broker.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, CreateTopicHeader(**header | changes))


@pytest.fixture
def broker(tmp_path: Path) -> BrokerUnderTest:
    broker = BrokerUnderTest(tmp_path, commit_log_file_bytes=1 << 20)
    assert create(broker).code == ResponseCode.SUCCESS
    return broker


def batch_of(*names: str) -> bytes:
    return encode_batch(
        (0, name.encode(), encode_properties({"KEYS": f"k-{name}", "UNIQ_KEY": f"U{name}"}))
        for name in names
    )


def send(broker: BrokerUnderTest, *names: str, properties: str = "", **fields: Any) -> Answer:
    """A batch with its own UNIQ_KEY, or one message."""
    is_batch = len(names) > 1
    properties = properties or f"UNIQ_KEY\x01B{names[0]}\x02WAIT\x01true\x02"
    header: dict[str, Any] = {"properties": properties, "batch": is_batch, "topic": "T"}
    body = batch_of(*names) if is_batch else names[0].encode()
    return broker.ask(RequestCode.SEND_MESSAGE_V2, send_header(**header | fields), body)


def sent(answer: Answer) -> SendMessageResponseHeader:
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return answer.command.header(SendMessageResponseHeader)


def pull(broker: BrokerUnderTest, offset: int, **fields: Any) -> tuple[list[StoredMessage], int]:
    """Records as they came, and nextBeginOffset."""
    answer = broker.ask(RequestCode.PULL_MESSAGE, pull_header(offset, topic="T", **fields))
    header = answer.command.header(PullMessageResponseHeader)
    return decode_records(answer.body), header.next_begin_offset


def messages(broker: BrokerUnderTest, offset: int = 0) -> list[tuple[int, bytes]]:
    """Offset and body of each message, by bulk pulls."""
    found: list[tuple[int, bytes]] = []
    header = bulk_pull_header(
        offset,
        topic="T",
        max_msg_nums=10,
        max_msg_bytes=1 << 20,
        sys_flag=4,
        subscription="*",
        suspend_timeout_millis=0,
    )
    while True:
        answer = broker.ask(RequestCode.BULK_PULL, header)
        if answer.code != ResponseCode.SUCCESS:
            return found
        about = answer.command.header(BulkPullResponseHeader)
        columns = unwrap(RecordColumns.from_bulk(about, answer.body), header.queue_offset)
        found += zip(columns.queue_offset.tolist(), columns.bodies(), strict=True)
        header.queue_offset = about.next_begin_offset


# --- sends and pulls --------------------------------------------------------------------------


def test_a_batch_becomes_one_record(broker: BrokerUnderTest) -> None:
    header = sent(send(broker, "a", "b", "c"))
    assert (header.queue_offset, header.batch_uniq_id) == (0, "Ba")
    assert "," not in header.msg_id
    single = sent(send(broker, "d"))
    assert (single.queue_offset, single.batch_uniq_id) == (3, None)
    assert sent(send(broker, "e", "f")).queue_offset == 4
    (first, second, third), next_offset = pull(broker, 0)
    assert next_offset == 6
    assert (first.sys_flag & INNER, second.sys_flag & INNER) == (INNER, 0)
    assert first.body == batch_of("a", "b", "c")
    own = {name: first.properties[name] for name in ("INNER_NUM", "INNER_BASE", "UNIQ_KEY")}
    assert own == {"INNER_NUM": "3", "INNER_BASE": "0", "UNIQ_KEY": "Ba"}
    assert third.properties["INNER_BASE"] == "4"
    assert messages(broker) == list(enumerate(name.encode() for name in "abcdef"))


def test_a_pull_in_a_batch_gets_all_of_it(broker: BrokerUnderTest) -> None:
    for names in ("abc", "defg", "h"):
        send(broker, *names)
    records, next_offset = pull(broker, 4, max_msg_nums=1)
    assert ([record.queue_offset for record in records], next_offset) == ([3], 7)
    assert messages(broker, 4) == [(4, b"e"), (5, b"f"), (6, b"g"), (7, b"h")]
    answer = broker.ask(RequestCode.GET_MAX_OFFSET, GetMaxOffsetHeader(topic="T", queue_id=0))
    assert answer.command.header(OffsetResponseHeader).offset == 8


def test_a_batch_without_a_key_becomes_records_of_one_message(broker: BrokerUnderTest) -> None:
    header = sent(send(broker, *"abc", properties="WAIT\x01true\x02"))
    assert (header.msg_id.count(","), header.batch_uniq_id) == (2, None)
    records, _ = pull(broker, 0)
    assert [record.body for record in records] == [b"a", b"b", b"c"]


def test_messages_that_are_compressed_one_by_one_are_stored_so(broker: BrokerUnderTest) -> None:
    assert sent(send(broker, *"abc", sys_flag=COMPRESSED)).batch_uniq_id is None
    assert [record.queue_offset for record in pull(broker, 0)[0]] == [0, 1, 2]


def test_what_the_store_adds_is_not_taken_from_clients(broker: BrokerUnderTest) -> None:
    forged = "INNER_NUM\x0130000\x02UNIQ_KEY\x01B\x02INNER_BASE\x01-5\x02"
    assert sent(send(broker, *"abc", properties=forged)).queue_offset == 0
    assert sent(send(broker, "d", properties=forged)).queue_offset == 3
    (record, _), next_offset = pull(broker, 0)
    assert next_offset == 4
    assert (record.properties["INNER_NUM"], record.properties["INNER_BASE"]) == ("3", "0")
    assert record.raw_properties.count(b"INNER_NUM") == 1


@pytest.mark.parametrize("topic", ["T", "Plain"])
@pytest.mark.parametrize("names", ["a", "ab"])
def test_a_client_cannot_claim_that_a_record_is_a_batch(
    broker: BrokerUnderTest, topic: str, names: str
) -> None:
    broker.create_topic("Plain")
    answer = send(broker, *names, topic=topic, sys_flag=INNER)
    assert answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
    assert "inner batches" in answer.remark
    assert not broker.store.queue(topic, 0).next_offset


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"torn", "torn at byte 0"),
        (batch_of("a", "b")[:-1], "torn at byte"),
        (batch_of("a") + b"\0\0", "torn at byte"),
        (encode_batch([(0, b"", b"")] * 16_385), "more than 16384 messages"),
    ],
)
def test_a_bad_batch_is_refused_whole(broker: BrokerUnderTest, body: bytes, problem: str) -> None:
    header = send_header(properties="UNIQ_KEY\x01B\x02", batch=True, topic="T")
    answer = broker.ask(RequestCode.SEND_MESSAGE_V2, header, body)
    assert answer.code == ResponseCode.MESSAGE_ILLEGAL, answer.remark
    assert problem in answer.remark
    assert not broker.store.queue("T", 0).next_offset


def test_a_delay_in_a_batch_is_refused(broker: BrokerUnderTest) -> None:
    body = encode_batch([(0, b"a", b"DELAY\x013\x02"), (0, b"b", b"")])
    header = send_header(properties="UNIQ_KEY\x01B\x02", batch=True, topic="T")
    answer = broker.ask(RequestCode.SEND_MESSAGE_V2, header, body)
    assert answer.code == ResponseCode.MESSAGE_ILLEGAL
    assert not broker.store.queue("T", 0).next_offset


@pytest.mark.parametrize("properties", ["MY_UNIQ_KEY\x01B\x02", "UNIQ_KEY\x01\x02", "a\x01b\x02"])
def test_a_batch_without_a_key_of_its_own_is_stored_singly(
    broker: BrokerUnderTest, properties: str
) -> None:
    header = sent(send(broker, *"abc", properties=properties))
    assert not header.batch_uniq_id
    found, _ = pull(broker, 0)
    assert [(each.body, each.sys_flag & INNER) for each in found] == [
        (b"a", 0),
        (b"b", 0),
        (b"c", 0),
    ]


def test_properties_leave_room_for_those_of_the_store(broker: BrokerUnderTest) -> None:
    large = f"UNIQ_KEY\x01B\x02a\x01{'x' * 32_680}\x02"
    answer = send(broker, *"abc", properties=large)
    assert answer.code == ResponseCode.MESSAGE_ILLEGAL
    assert "exceed the maximum" in answer.remark


def test_sends_of_a_turn_are_stored_together(broker: BrokerUnderTest) -> None:
    for number in range(3):
        outcomes = broker.send_at_once(*[f"UNIQ_KEY\x01A{n}\x02" for n in range(10)])
        assert {code for code, _ in outcomes} == {ResponseCode.SUCCESS}
        assert broker.store.queue("T", 1).consume_queue.max_offset == 10 * (number + 1)
    assert len(broker.stored("T", 1)) == 30


# --- one message of a batch -------------------------------------------------------------------


def query(broker: BrokerUnderTest, key: str, **fields: Any) -> list[StoredMessage]:
    header = QueryMessageHeader(
        topic="T", key=key, max_num=9, begin_timestamp=0, end_timestamp=1 << 62, **fields
    )
    answer = broker.ask(RequestCode.QUERY_MESSAGE, header)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return decode_records(answer.body)


def test_a_message_of_a_batch_is_found_by_its_keys(broker: BrokerUnderTest) -> None:
    send(broker, *"abc")
    send(broker, "d", properties="UNIQ_KEY\x01Ud\x02KEYS\x01k-d\x02")
    for name, offset in zip("abcd", range(4), strict=True):
        for key in (f"k-{name}", f"U{name}"):
            (found,) = query(broker, key)
            assert (found.body, found.queue_offset) == (name.encode(), offset)
            assert not found.sys_flag & INNER
    (found,) = query(broker, "Ub", unique_key_query=True)
    assert found.message_id == "Ub"
    assert [found.body for found in query(broker, "Ba")] == [b"a", b"b", b"c"]


def test_the_id_of_a_batch_gives_its_messages(broker: BrokerUnderTest) -> None:
    place = int(sent(send(broker, *"abc")).msg_id[-16:], 16)
    answer = broker.ask(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessageHeader(offset=place))
    assert [message.body for message in decode_records(answer.body)] == [b"a", b"b", b"c"]


def test_one_message_of_a_batch_is_sent_back(broker: BrokerUnderTest) -> None:
    broker.groups.put(SubscriptionGroupConfig(group_name="g"))
    place = int(sent(send(broker, *"abc")).msg_id[-16:], 16)
    header = ConsumerSendMsgBackHeader(
        offset=place, group="g", delay_level=3, origin_topic="T", origin_msg_id="Ub"
    )
    answer = broker.ask(RequestCode.CONSUMER_SEND_MSG_BACK, header)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    (waiting,) = broker.stored(SCHEDULE_TOPIC, 2)
    assert (waiting.body, waiting.sys_flag & INNER) == (b"b", 0)
    assert waiting.properties["KEYS"] == "k-b"
    header.origin_msg_id = "none"
    answer = broker.ask(RequestCode.CONSUMER_SEND_MSG_BACK, header)
    assert answer.code == ResponseCode.SYSTEM_ERROR


def test_keys_in_other_places_of_a_batch_are_no_keys(broker: BrokerUnderTest) -> None:
    """The id of another property, a part of a key, a body; a whole batch costs few decodings."""
    properties = {"KEYS": "k-other k-", "x": "k-wanted", "UNIQ_KEY": "k-wante"}
    items = [(0, b"KEYS\x01k-wanted\x02", encode_properties(properties))]
    items += [(0, b"", encode_properties({"KEYS": f"{number} k-wanted"})) for number in (1, 2)]
    header = send_header(topic="T", batch=True, properties="UNIQ_KEY\x01B\x02WAIT\x01true\x02")
    sent(broker.ask(RequestCode.SEND_MESSAGE_V2, header, encode_batch(items)))
    assert [found.queue_offset for found in query(broker, "k-wanted")] == [1, 2]
    assert [found.queue_offset for found in query(broker, "k-")] == [0]


def test_a_query_decodes_no_message_of_a_batch_that_has_another_key(
    broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of one hash; between candidates, and between those found, others have their turn."""
    decoded: list[Buffer] = []

    def counting(raw: Buffer) -> dict[str, str]:
        decoded.append(raw)
        return decode_properties(raw)

    monkeypatch.setattr(reader, "decode_properties", counting)
    for number in range(20):
        send(broker, *[f"Aa{number}", *"abcdef"])
    send(broker, "BB0", "a")
    (found,) = query(broker, "k-BB0")
    assert found.body == b"BB0"
    assert len(decoded) == 2
    works: list[Iterator[None]] = []
    broker.registry.run_long = works.append
    broker.registry.slice_s = 0.0
    header = QueryMessageHeader(
        topic="T", key="k-a", max_num=64, begin_timestamp=0, end_timestamp=1 << 62
    )
    broker.send(RequestCode.QUERY_MESSAGE, header, b"", MemoryChannel())
    counts = [len(decoded) for _ in works[0]]
    assert max(after - before for before, after in itertools.pairwise(counts)) == 1


@pytest.fixture
def place_without_codec(broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Place of a batch that is compressed with LZ4, where lz4 is not installed."""
    store, queue = broker.store, broker.store.queue("T", 0)
    properties = encode_properties({"INNER_NUM": "2", "INNER_BASE": "0", "KEYS": "kBB"})
    body, flags = codec("lz4").compress(batch_of("a" * 100, "b" * 100))
    store.write_path.begin()
    message = (queue, body, properties, 0, 0, flags, 1, 0)
    place = store.write_path.append(message, bytes(8), inner_count=2)
    store.write_path.publish()
    for name in ("lz4", "lz4.frame"):
        monkeypatch.setitem(sys.modules, name, None)
    return place


def test_a_batch_without_its_codec_is_answered_whole(
    broker: BrokerUnderTest, place_without_codec: int
) -> None:
    """It is for the reader to unwrap it."""
    (found,) = query(broker, "kBB")
    assert (found.physical_offset, found.sys_flag & INNER) == (place_without_codec, INNER)
    header = ViewMessageHeader(offset=place_without_codec)
    answer = broker.ask(RequestCode.VIEW_MESSAGE_BY_ID, header)
    assert answer.body == found.encode()


def test_a_batch_without_its_codec_hides_no_other_message(
    broker: BrokerUnderTest, place_without_codec: int
) -> None:
    """Also if their keys have one hash."""
    send(broker, "l", properties="KEYS\x01kAa\x02")
    (found,) = query(broker, "kAa")
    assert found.body == b"l"
    assert found.physical_offset > place_without_codec


# --- SQL92 filters ---------------------------------------------------------------------------


def send_numbers(broker: BrokerUnderTest, *numbers: int) -> None:
    """A batch whose messages have the property a."""
    items = [(0, b"%d" % number, b"a\x01%d\x02" % number) for number in numbers]
    header = send_header(topic="T", batch=True, properties="UNIQ_KEY\x01B\x02")
    sent(broker.ask(RequestCode.SEND_MESSAGE_V2, header, encode_batch(items)))


SQL: dict[str, Any] = {"sys_flag": 4, "subscription": "a > 5", "expression_type": "SQL92"}


@pytest.mark.parametrize("count", [1, 2, 5, 100])
def test_a_filter_looks_at_each_message_of_a_batch(broker: BrokerUnderTest, count: int) -> None:
    """Readers get those that pass, as records of their own, from any offset on, read by read."""
    send_numbers(broker, 1, 9, 7, 2)
    send(broker, "single", properties="a\x018\x02")
    send(broker, "other", properties="a\x013\x02")
    send_numbers(broker, 1, 2)
    send_numbers(broker, 6, 0, 10)
    expected = [(1, b"9"), (2, b"7"), (4, b"single"), (8, b"6"), (10, b"10")]
    for first in (0, 1, 2, 3, 4, 5, 9, 0):
        found: list[tuple[int, bytes]] = []
        offset = first
        while offset < 11:
            records, offset = pull(broker, offset, max_msg_nums=count, **SQL)
            assert len(records) <= count
            assert not any(each.sys_flag & INNER for each in records)
            found += [(each.queue_offset, each.body) for each in records]
        assert found == [each for each in expected if each[0] >= first]
        assert bulk(broker, first) == found


def bulk(broker: BrokerUnderTest, offset: int) -> list[tuple[int, bytes]]:
    """What bulk pulls with the filter return; one ends after 2 ms."""
    found: list[tuple[int, bytes]] = []
    while offset < 11:
        header = bulk_pull_header(offset, topic="T", max_msg_nums=100, max_msg_bytes=1 << 20, **SQL)
        answer = broker.ask(RequestCode.BULK_PULL, header)
        about = answer.command.header(BulkPullResponseHeader)
        if answer.code == ResponseCode.SUCCESS:
            columns = RecordColumns.from_bulk(about, answer.body)
            found += zip(columns.queue_offset.tolist(), columns.bodies(), strict=True)
        offset = about.next_begin_offset
    return found


def test_a_batch_that_cannot_be_unwrapped_passes_a_filter_whole(
    broker: BrokerUnderTest, place_without_codec: int
) -> None:
    """Its reader says why; the batches next to it are filtered."""
    send_numbers(broker, 1, 9)
    for first in (0, 1):
        found, _ = pull(broker, first, **SQL)
        assert [each.sys_flag & INNER for each in found] == [INNER, 0]
        assert (found[0].physical_offset, found[1].body) == (place_without_codec, b"9")


# --- the topic --------------------------------------------------------------------------------


def test_the_type_is_chosen_when_a_topic_is_made(broker: BrokerUnderTest) -> None:
    broker.create_topic("Plain")
    for topic, value in (("Plain", "BatchCQ"), ("T", "SimpleCQ")):
        answer = create(broker, topic, attributes=f"+queue.type={value}")
        assert answer.code == ResponseCode.INVALID_PARAMETER
        assert "can't change" in answer.remark


@pytest.mark.parametrize("other", ["cleanup.policy=COMPACTION", "tiered=true"])
def test_what_batch_queues_do_not_have_is_refused(broker: BrokerUnderTest, other: str) -> None:
    answer = create(broker, "New", attributes=f"+queue.type=BatchCQ,+{other}")
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert f"{other} needs a record for each message" in answer.remark
    assert broker.topics.get("New") is None


def test_a_tier_is_not_added_later(broker: BrokerUnderTest) -> None:
    answer = create(broker, attributes="+tiered=true")
    assert answer.code == ResponseCode.INVALID_PARAMETER


def test_plain_queues_are_not_turned_into_others(broker: BrokerUnderTest) -> None:
    broker.store_message("Lost", 0)  # as after the loss of topics.json
    answer = create(broker, "Lost")
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert "queues of it with single messages" in answer.remark


def test_a_topic_is_changed_and_deleted(broker: BrokerUnderTest, tmp_path: Path) -> None:
    send(broker, *"abc")
    assert create(broker, read_queue_nums=5, attributes="").code == ResponseCode.SUCCESS
    stats = broker.ask(RequestCode.GET_TOPIC_STATS_INFO, GetTopicStatsHeader(topic="T"))
    assert stats.code == ResponseCode.SUCCESS
    assert b'"maxOffset":3' in stats.body
    answer = broker.ask(RequestCode.DELETE_TOPIC_IN_BROKER, DeleteTopicHeader(topic="T"))
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    assert not (tmp_path / "store" / "batchconsumequeue" / "T").exists()
    broker.create_topic("T")
    send(broker, *"ab")
    assert [message.body for message in broker.stored("T", 0)] == [b"a", b"b"]


def test_a_topic_is_known_after_a_restart(broker: BrokerUnderTest, tmp_path: Path) -> None:
    send(broker, *"abc")
    broker.close()
    again = BrokerUnderTest(tmp_path, commit_log_file_bytes=1 << 20)
    assert sent(send(again, *"de")).queue_offset == 3
    assert sent(send(again, *"fg", queue_id=1)).batch_uniq_id == "Bf"
    assert messages(again, 2) == [(2, b"c"), (3, b"d"), (4, b"e")]
    assert not (tmp_path / "store" / "consumequeue" / "T").exists()


# --- a store of Apache RocketMQ ---------------------------------------------------------------


def vars_of(settings: StoreSettings) -> dict[str, Any]:
    fields = [field.name for field in dataclasses.fields(settings)]
    return {name: getattr(settings, name) for name in fields if name != "root"}


@pytest.mark.parametrize("name", STORES)
def test_a_topic_of_apaches_broker_is_continued(name: str, tmp_path: Path) -> None:
    copy_golden_store(name, tmp_path / "store")
    sizes = vars_of(golden_settings(tmp_path / "store"))
    broker = BrokerUnderTest(tmp_path, broker_config(tmp_path, **CONFIG), **sizes)
    header = pull_header(3, topic="G_BCQ")
    records = decode_records(broker.ask(RequestCode.PULL_MESSAGE, header).body)
    assert [record.queue_offset for record in records] == [0, 5, 7]
    assert sent(send(broker, *"ab", topic="G_BCQ")).queue_offset == 8
    (found,) = decode_records(
        broker.ask(RequestCode.PULL_MESSAGE, pull_header(8, topic="G_BCQ")).body
    )
    assert found.body == batch_of("a", "b")
