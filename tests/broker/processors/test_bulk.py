"""BULK_SEND and BULK_PULL at the broker: by the rules of ordinary sends and pulls."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from headrace_broker.store.store_source import GetStatus
from headrace_protocol.blocks import EncodedBlock
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.columns import RecordColumns
from headrace_protocol.command import FLAG_ONEWAY, header_fields
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.headers import (
    BulkPullHeader,
    BulkPullResponseHeader,
    BulkSendHeader,
    PullMessageHeader,
    SendMessageResponseHeader,
)
from headrace_protocol.message import TRANSACTION_PREPARED, encode_record
from headrace_protocol.message_ids import decode_offset_message_id, encode_host
from tests.support.batches import block
from tests.support.broker import Answer, BrokerUnderTest, broker_config
from tests.support.channel import MemoryChannel
from tests.support.running import in_background
from tests.support.stores import HOST

SUCCESS = ResponseCode.SUCCESS
COMMIT_OFFSET, SUSPEND, SUBSCRIPTION = 1, 2, 4


@pytest.fixture
def broker(broker: BrokerUnderTest) -> BrokerUnderTest:
    broker.create_topic("T")
    return broker


def send_header(**changes: Any) -> BulkSendHeader:
    fields = {
        "producer_group": "producers",
        "topic": "T",
        "default_topic": "TBW102",
        "default_topic_queue_nums": 3,
        "queue_id": 0,
        "count": 1,
    }
    return BulkSendHeader(**{**fields, **changes})


def send(broker: BrokerUnderTest, sent: EncodedBlock, **changes: Any) -> Answer:
    header = send_header(count=sent.record_count, **changes)
    return broker.ask(RequestCode.BULK_SEND, header, bytes(sent.body))


def pull_header(**changes: Any) -> BulkPullHeader:
    fields = {
        "consumer_group": "readers",
        "topic": "T",
        "queue_id": 0,
        "queue_offset": 0,
        "max_msg_nums": 100,
        "max_msg_bytes": 1 << 20,
        "sys_flag": 0,
        "commit_offset": 0,
        "suspend_timeout_millis": 0,
    }
    return BulkPullHeader(**{**fields, **changes})


def pull(broker: BrokerUnderTest, **changes: Any) -> Answer:
    return broker.ask(RequestCode.BULK_PULL, pull_header(**changes))


def columns(answer: Answer) -> RecordColumns:
    assert answer.code == SUCCESS, answer.remark
    return RecordColumns.from_bulk(answer.command.header(BulkPullResponseHeader), answer.body)


# --- BULK_SEND -----------------------------------------------------------------------------


def test_the_answer_says_where_all_records_are(broker: BrokerUnderTest) -> None:
    send(broker, block(b"before", b"it"))
    answer = send(broker, block(b"one", b"two", b"three"))
    assert answer.code == SUCCESS
    header = answer.command.header(SendMessageResponseHeader)
    assert (header.queue_id, header.queue_offset) == (0, 2)
    store_host, physical_offset = decode_offset_message_id(header.msg_id)
    assert store_host == broker.store.settings.store_host
    messages = broker.stored("T", 0)[2:]
    assert [m.body for m in messages] == [b"one", b"two", b"three"]
    assert [m.queue_offset for m in messages] == [2, 3, 4]
    assert messages[0].physical_offset == physical_offset
    assert messages[0].message_id == header.msg_id
    counter = broker.statistics.topic_puts["T"]
    assert (counter.count, counter.body_bytes) == (5, len(b"beforeitonetwothree"))


def test_a_block_damaged_on_its_way_is_refused(broker: BrokerUnderTest) -> None:
    sent = block(b"one", b"two")
    body = bytearray(sent.body)
    crc = zlib.crc32(body)
    assert send(broker, sent, body_crc32=crc).code == SUCCESS
    body[-1] ^= 1  # in the topic, the properties ... which no checksum of a body covers
    damaged = EncodedBlock(sent.record_count, bytes(body))
    answer = send(broker, damaged, body_crc32=crc)
    assert answer.code == ResponseCode.MESSAGE_ILLEGAL
    assert f"not {crc}; nothing was stored" in (answer.remark or "")
    assert len(broker.stored("T", 0)) == 2


def test_the_topic_is_made_on_the_first_send(broker: BrokerUnderTest) -> None:
    assert send(broker, block(b"a", topic="New"), topic="New", queue_id=2).code == SUCCESS
    assert broker.topics.check_readable("New").write_queue_nums == 3
    assert len(broker.stored("New", 2)) == 1


def test_oneway_stores_without_an_answer(broker: BrokerUnderTest) -> None:
    channel, sent = MemoryChannel(), block(b"a", b"b")
    frame = encode_frame(
        SerializeType.MSGPACK,
        RequestCode.BULK_SEND,
        7,
        flag=FLAG_ONEWAY,
        fields=header_fields(send_header(count=2)),
        body_bytes=len(sent.body),
    )
    broker.take(frame + bytes(sent.body), channel)
    assert channel.replies() == []
    assert len(broker.stored("T", 0)) == 2


async def test_with_sync_flush_the_answer_waits_for_the_disk(tmp_path: Path) -> None:
    config = broker_config(tmp_path, flush_disk_type="SYNC_FLUSH")
    broker = BrokerUnderTest(tmp_path, config, flush="sync")
    broker.create_topic("T")
    channel, sent = MemoryChannel(), block(b"a", b"b")
    broker.send(RequestCode.BULK_SEND, send_header(count=2), bytes(sent.body), channel)
    assert channel.replies() == []
    assert pull(broker).code == ResponseCode.PULL_NOT_FOUND
    async with in_background(broker.store.flusher.run_group_commit):
        flushed = trio.Event()
        broker.store.flusher.when_flushed(
            broker.store.commit_log.max_offset, lambda _: flushed.set()
        )
        await flushed.wait()
    broker.store.write_path.publish()
    assert [command.code for command, _ in channel.replies()] == [SUCCESS]
    assert columns(pull(broker)).bodies() == [b"a", b"b"]


def plain(**changes: Any) -> bytes:
    fields = {"topic": "T", "queue_id": 0, "body": b"body", "born_host": HOST, **changes}
    record = encode_record(**fields)
    return struct.pack(">i", len(record)) + record


LONG_TOPIC = "t" * 120
ILLEGAL = ResponseCode.MESSAGE_ILLEGAL
INVALID = ResponseCode.INVALID_PARAMETER
UNSUPPORTED = ResponseCode.REQUEST_CODE_NOT_SUPPORTED


@pytest.mark.parametrize(
    ("changes", "body", "code", "remark"),
    [
        ({"count": 0}, plain(), INVALID, "count"),
        ({"count": -1}, plain(), INVALID, "count"),
        ({"count": 2}, plain(), ILLEGAL, "torn at byte 0"),
        ({"count": 65_537}, plain(), ILLEGAL, "the maximum is 65536"),
        ({"queue_id": -1}, plain(), INVALID, "queueId"),
        ({"queue_id": 2}, plain(), INVALID, "there are 2"),
        ({"topic": "U" * 128}, plain(), INVALID, "127"),
        ({"topic": "%RETRY%g"}, plain(topic="%RETRY%g"), ILLEGAL, "one by one"),
        ({"topic": "Locked"}, plain(topic="Locked"), ResponseCode.NO_PERMISSION, "Locked"),
        ({"topic": "No", "default_topic": "no"}, plain(), ResponseCode.TOPIC_NOT_EXIST, "No"),
        ({}, b"", ILLEGAL, "0 bytes are not 1 sizes"),
        ({}, plain()[:-1], ILLEGAL, "sizes of"),
        ({}, plain(topic="U"), ILLEGAL, "of topic T"),
        ({}, plain(sys_flag=TRANSACTION_PREPARED), ILLEGAL, "sysFlag"),
        ({}, plain(properties=b"DELAY\x013\x02"), ILLEGAL, "delayed messages"),
        ({}, plain(properties=b"TRAN_MSG\x01true\x02PGROUP\x01g\x02"), ILLEGAL, "transactional"),
        ({}, plain(body=bytes(5 << 20)), ILLEGAL, "more than 4194304"),
        ({}, plain(body=bytes(1 << 18)), ILLEGAL, "record has"),
    ],
)
def test_what_can_not_be_stored_is_refused_as_a_whole(
    broker: BrokerUnderTest, changes: dict[str, Any], body: bytes, code: int, remark: str
) -> None:
    broker.create_topic("Locked", perm=4)
    answer = broker.ask(RequestCode.BULK_SEND, send_header(**changes), body)
    assert (answer.code, remark in answer.remark) == (code, True), answer.remark
    assert broker.store.commit_log.max_offset == 0


def test_a_property_that_looks_like_an_order_is_none(broker: BrokerUnderTest) -> None:
    sent = block(b"a", properties=b"note\x01DELAY\x02DELAY\x010\x02")
    assert send(broker, sent).code == SUCCESS


def test_a_full_ring_is_busy_and_a_closed_store_unavailable(broker: BrokerUnderTest) -> None:
    answer = send(broker, block(*[b""] * 65))
    assert answer.code == ResponseCode.SYSTEM_BUSY
    broker.store.commit_log.refuse("full", broker.store.root)
    answer = send(broker, block(b"a"))
    assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert "full" in answer.remark
    broker.store.commit_log.resume()


def test_a_broker_with_an_ipv6_address_has_no_blocks_of_records(tmp_path: Path) -> None:
    broker = BrokerUnderTest(tmp_path, store_host=encode_host("::1", 10911))
    broker.create_topic("T")
    answer = send(broker, block(b"a"))
    assert answer.code == UNSUPPORTED
    assert "one by one" in answer.remark
    broker.store_message("T", 0, b"a")
    assert columns(pull(broker)).bodies() == [b"a"]


# --- BULK_PULL -----------------------------------------------------------------------------


def test_a_block_comes_back_as_it_was_sent(broker: BrokerUnderTest) -> None:
    send(broker, block(b"one", b"two", b"three", properties=[b"", b"k\x01v\x02", b"TAGS\x01a\x02"]))
    answer = pull(broker)
    got = columns(answer)
    assert got.bodies() == [b"one", b"two", b"three"]
    assert got.properties() == [b"", b"k\x01v\x02", b"TAGS\x01a\x02"]
    assert got.queue_offset.tolist() == [0, 1, 2]
    header = answer.command.header(BulkPullResponseHeader)
    assert (header.next_begin_offset, header.min_offset, header.max_offset) == (3, 0, 3)
    assert answer.remark == "FOUND"
    assert broker.statistics.group_gets["readers", "T"].count == 3


def test_records_are_those_of_an_ordinary_pull(broker: BrokerUnderTest) -> None:
    for number in range(9):
        broker.store_message("T", number % 2, b"%d" % number, TAGS="ab"[number % 3 == 0])
    for queue_id in (0, 1):
        for subscription in ("*", "a", "a || b", "c"):
            got = pull(broker, queue_id=queue_id, subscription=subscription)
            header = PullMessageHeader(
                consumer_group="readers",
                topic="T",
                queue_id=queue_id,
                queue_offset=0,
                max_msg_nums=100,
                sys_flag=SUBSCRIPTION,
                commit_offset=0,
                suspend_timeout_millis=0,
                sub_version=0,
                subscription=subscription,
            )
            ordinary = broker.ask(RequestCode.PULL_MESSAGE, header)
            assert (got.code, got.remark) == (ordinary.code, ordinary.remark)
            if got.code == SUCCESS:
                found = columns(got)
                whole = b"".join(bytes(found.record(n)) for n in range(len(found)))
                assert whole == ordinary.body


def test_filtered_records_say_which_of_the_queue_they_are(broker: BrokerUnderTest) -> None:
    tags = [b"TAGS\x01%s\x02" % tag for tag in (b"a", b"b", b"a", b"b")]
    send(broker, block(b"0", b"1", b"2", b"3", properties=tags))
    answer = pull(broker, subscription="b")
    assert answer.command.header(BulkPullResponseHeader).has_queue_offsets
    got = columns(answer)
    assert got.queue_offset.tolist() == [1, 3]
    assert got.bodies() == [b"1", b"3"]


@pytest.mark.parametrize(
    ("queue_offset", "code", "status", "next_offset"),
    [
        (3, ResponseCode.PULL_NOT_FOUND, GetStatus.OFFSET_OVERFLOW_ONE, 3),
        (9, ResponseCode.PULL_OFFSET_MOVED, GetStatus.OFFSET_OVERFLOW_BADLY, 3),
        (-1, ResponseCode.PULL_OFFSET_MOVED, GetStatus.OFFSET_TOO_SMALL, 0),
    ],
)
def test_offsets_outside(
    broker: BrokerUnderTest, queue_offset: int, code: int, status: GetStatus, next_offset: int
) -> None:
    send(broker, block(b"a", b"b", b"c"))
    answer = pull(broker, queue_offset=queue_offset)
    assert (answer.code, answer.remark, answer.body) == (code, status.name, b"")
    header = answer.command.header(BulkPullResponseHeader)
    assert (header.next_begin_offset, header.count) == (next_offset, 0)


def test_a_pull_commits_and_hears_of_a_reset(broker: BrokerUnderTest) -> None:
    send(broker, block(b"a", b"b", b"c"))
    pull(broker, sys_flag=COMMIT_OFFSET, commit_offset=2)
    assert broker.offsets.query("readers", "T", 0) == 2
    broker.offsets.reset("readers", "T", 0, 1)
    answer = pull(broker, queue_offset=3)
    assert (answer.code, answer.remark) == (ResponseCode.PULL_OFFSET_MOVED, "OFFSET_RESET")
    assert answer.command.header(BulkPullResponseHeader).next_begin_offset == 1


def test_a_held_pull_is_answered_by_what_arrives(broker: BrokerUnderTest) -> None:
    channel = MemoryChannel()
    header = pull_header(sys_flag=SUSPEND, suspend_timeout_millis=9000, subscription="b")

    async def hold() -> None:
        broker.send(RequestCode.BULK_PULL, header, channel=channel)

    trio.run(hold, clock=trio.testing.MockClock())
    assert channel.replies() == []
    send(broker, block(b"a", properties=b"TAGS\x01a\x02"))
    assert channel.replies() == []
    send(broker, block(b"b", properties=b"TAGS\x01b\x02"))
    ((command, body),) = channel.replies()
    assert columns(Answer(command, body)).bodies() == [b"b"]
    assert broker.long_polling.held_count == 0


@pytest.mark.parametrize("wanted", [-1, 0, 1])
def test_at_least_one_record_comes_whatever_is_asked(broker: BrokerUnderTest, wanted: int) -> None:
    send(broker, block(b"a", b"b"))
    assert columns(pull(broker, max_msg_nums=wanted)).bodies() == [b"a"]
    assert columns(pull(broker, max_msg_bytes=wanted)).bodies() == [b"a"]
