"""Forged records inside the bodies of messages are not served, even at the offsets that they
claim."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest

from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import ViewMessageHeader
from headrace_protocol.message import TRANSACTION_COMMIT, decode_record, encode_record
from headrace_protocol.system_topics import HALF_TOPIC
from tests.support.broker import Answer, BrokerUnderTest
from tests.support.ledger import Half, Ledger
from tests.support.stores import put

HEAD = struct.Struct(">iiiiiqqiq8sq8siqi")
BODY_AT = HEAD.size
HOST = b"\x7f\0\0\1\0\0\0\1"


def forged(body: bytes, topic: bytes, queue_offset: int, physical_offset: int) -> bytes:
    """A record that claims to be of ``topic`` and to lie at ``physical_offset``."""
    properties = b"UNIQ_KEY\x01FORGED\x02"
    size = HEAD.size + len(body) + 1 + len(topic) + 2 + len(properties)
    crc = zlib.crc32(body) & 0x7FFFFFFF
    magic = 0xDAA320A7 - (1 << 32)
    head = HEAD.pack(
        size, magic, crc, 0, 0, queue_offset, physical_offset, 0, 1, HOST, 1, HOST, 0, 0, len(body)
    )
    tail = bytes([len(topic)]) + topic + struct.pack(">h", len(properties)) + properties
    return head + body + tail


def view(broker: BrokerUnderTest, physical_offset: int) -> Answer:
    return broker.ask(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessageHeader(offset=physical_offset))


@pytest.mark.parametrize("topic", [b"payments", b"mine", b"SCHEDULE_TOPIC_XXXX"])
@pytest.mark.parametrize("queue_offset", [0, 1, 2, -1, 2**62])
def test_a_record_inside_a_body_is_not_served(
    broker: BrokerUnderTest, topic: bytes, queue_offset: int
) -> None:
    for name in ("mine", topic.decode()):
        put(broker.store, broker.store.queue(name, 0))
    place = broker.store.commit_log.max_offset + BODY_AT
    body = forged(b"pay mallory", topic, queue_offset, place)
    assert put(broker.store, broker.store.queue("mine", 0), body) + BODY_AT == place
    assert bytes(broker.store.commit_log.record_at(place) or b"") == body
    answer = view(broker, place)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert f"{place}: no record begins there" in answer.remark


@pytest.mark.parametrize("topic", ["t", "SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC"])
def test_messages_of_all_topics_are_served(broker: BrokerUnderTest, topic: str) -> None:
    places = [put(broker.store, broker.store.queue(topic, 3), b"%d" % n) for n in range(3)]
    assert [decode_record(view(broker, place).body).body for place in places] == [b"0", b"1", b"2"]


def test_a_message_is_served_before_it_is_dispatched(broker: BrokerUnderTest) -> None:
    queue = broker.store.queue("t", 0)
    for _ in range(3):  # so that the ring's rows have taken numbers before them
        put(broker.store, queue)
    place = broker.store.commit_log.max_offset + BODY_AT
    inside = forged(b"pay mallory", b"t", 3, place)
    outer = put(broker.store, queue, inside, dispatch=False)
    assert broker.store.find_queue("t", 0) is queue
    assert queue.consume_queue.max_offset == 3
    assert broker.store.message_at(outer) is not None
    assert broker.store.message_at(place) is None


def test_a_message_that_its_queue_no_longer_has_is_not_served(broker: BrokerUnderTest) -> None:
    place = put(broker.store, broker.store.queue("t", 0), b"gone")
    broker.store.delete_topic("t")
    assert broker.store.commit_log.record_at(place) is not None
    assert view(broker, place).code == ResponseCode.SYSTEM_ERROR


def test_a_damaged_record_is_not_served(broker: BrokerUnderTest) -> None:
    place = broker.store.commit_log.max_offset + BODY_AT
    put(broker.store, broker.store.queue("t", 0), forged(b"x", b"t", 0, place)[:-1] + b"\x03")
    inner = forged(b"x", b"t", 0, broker.store.commit_log.max_offset + BODY_AT)
    torn = inner[:8] + b"\0\0\0\0" + inner[12:]  # its body has another CRC
    place = broker.store.commit_log.max_offset + BODY_AT
    put(broker.store, broker.store.queue("t", 0), torn)
    assert broker.store.commit_log.record_at(place) is not None
    assert view(broker, place).code == ResponseCode.SYSTEM_ERROR


@pytest.mark.parametrize("queue_offset", [0, 1, 2])
async def test_a_record_inside_a_body_is_no_half(tmp_path: Path, queue_offset: int) -> None:
    ledger = Ledger(tmp_path)
    ledger.broker.create_topic("T")
    async with ledger.running():
        ledger.send(b"mine")
        (record,) = ledger.stored(HALF_TOPIC, 0)
        place = ledger.broker.store.commit_log.max_offset + BODY_AT
        body = encode_record(
            topic=HALF_TOPIC,
            queue_id=0,
            body=b"forged",
            properties=record.raw_properties,
            queue_offset=queue_offset,
            physical_offset=place,
        )
        assert ledger.send(body).physical_offset + BODY_AT == place
        answer = ledger.end(Half(queue_offset, place, "A1"), TRANSACTION_COMMIT)
        assert "Find prepared transaction message failed" in answer.remark
    assert ledger.bodies() == []
