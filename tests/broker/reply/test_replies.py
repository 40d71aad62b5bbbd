"""Replies: pushed to the client that waits, then stored, and only then confirmed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_broker.metrics.table import REPLIES
from headrace_broker.reply.processor import ReplyProcessor
from headrace_daemon.metrics.samples import Samples
from headrace_protocol.bodies import HeartbeatData, ProducerData
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import FLAG_RESPONSE, Command
from headrace_protocol.frame import FRAME_BYTES_MAX
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.headers import (
    PushReplyHeader,
    SendMessageHeader,
    SendMessageHeaderV2,
    SendMessageResponseHeader,
)
from headrace_protocol.message import decode_properties
from tests.support.broker import Answer, BrokerUnderTest, broker_config
from tests.support.channel import MemoryChannel

REPLY_TOPIC = "DefaultCluster_REPLY_TOPIC"
PROPERTIES = "MSG_TYPE\x01reply\x02CORRELATION_ID\x01id\x02REPLY_TO_CLIENT\x01c1\x02TTL\x013000\x02"
HEADERS = {
    RequestCode.SEND_REPLY_MESSAGE: SendMessageHeader,
    RequestCode.SEND_REPLY_MESSAGE_V2: SendMessageHeaderV2,
}
both_codes = pytest.mark.parametrize("code", HEADERS)


class OtherChannel(MemoryChannel):
    """A client with an address of its own."""

    address = "127.0.0.1:2"


@pytest.fixture
def broker(tmp_path: Path) -> BrokerUnderTest:
    return BrokerUnderTest(tmp_path)


def register(broker: BrokerUnderTest, *groups: str, client_id: str = "c1") -> MemoryChannel:
    """A requester, as a producer whose heartbeat the broker has."""
    channel = MemoryChannel()
    beat(broker, channel, *groups or ("p",), client_id=client_id)
    return channel


def beat(
    broker: BrokerUnderTest, channel: MemoryChannel, *groups: str, client_id: str = "c1"
) -> None:
    producers = [ProducerData(group_name=group) for group in groups]
    body = HeartbeatData(client_id=client_id, producer_data_set=producers).encode()
    broker.ask(RequestCode.HEART_BEAT, body=body, channel=channel)


def send(
    broker: BrokerUnderTest,
    code: RequestCode = RequestCode.SEND_REPLY_MESSAGE_V2,
    properties: str = PROPERTIES,
    body: bytes = b"42",
    **fields: Any,
) -> MemoryChannel:
    replier = OtherChannel()
    values = {
        "producer_group": "replier",
        "topic": REPLY_TOPIC,
        "default_topic": "TBW102",
        "default_topic_queue_nums": 4,
        "queue_id": 0,
        "sys_flag": 0,
        "born_timestamp": 7,
        "flag": 3,
        "properties": properties,
    }
    broker.send(code, HEADERS[code](**values | fields), body, replier)
    return replier


def answered(replier: MemoryChannel) -> list[Answer]:
    return [Answer(*each) for each in replier.replies()]


def pushed(requester: MemoryChannel) -> tuple[Command, bytes]:
    (request,) = [each for each in requester.replies() if not each[0].is_response]
    return request


def confirm(
    broker: BrokerUnderTest, requester: MemoryChannel, opaque: int, code: int = 0, remark: str = ""
) -> None:
    frame = encode_frame(SerializeType.JSON, code, opaque, flag=FLAG_RESPONSE, remark=remark)
    broker.take(frame, requester)


async def outcomes(broker: BrokerUnderTest) -> dict[str, Any]:
    samples = Samples()
    await broker.part(ReplyProcessor).collect(samples)
    return {labels[0]: value for labels, value in samples.values[REPLIES]}


@both_codes
async def test_a_reply_is_pushed_then_stored_then_confirmed(
    broker: BrokerUnderTest, code: RequestCode
) -> None:
    requester = register(broker)
    replier = send(broker, code)
    request, body = pushed(requester)
    header = request.header(PushReplyHeader)
    assert (request.code, body) == (RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, b"42")
    assert (header.topic, header.producer_group, header.flag) == (REPLY_TOPIC, "replier", 3)
    assert (header.born_host, header.store_host) == ("127.0.0.1:1", "127.0.0.1:10911")
    assert header.store_timestamp == broker.clock.ms
    assert decode_properties((header.properties or "").encode()) == {
        "MSG_TYPE": "reply",
        "CORRELATION_ID": "id",
        "REPLY_TO_CLIENT": "c1",
        "TTL": "3000",
        "PUSH_REPLY_TIME": str(broker.clock.ms),
    }
    assert answered(replier) == [], "the requester has not confirmed it yet"
    assert broker.stored(REPLY_TOPIC) == []

    confirm(broker, requester, request.opaque)
    (answer,) = answered(replier)
    assert answer.code == ResponseCode.SUCCESS
    assert answer.command.header(SendMessageResponseHeader).queue_offset == 0
    (stored,) = broker.stored(REPLY_TOPIC)
    assert (stored.body, stored.properties["CLUSTER"]) == (b"42", "DefaultCluster")
    assert await outcomes(broker) == {"pushed": 1}


async def test_a_reply_need_not_be_stored(tmp_path: Path) -> None:
    broker = BrokerUnderTest(tmp_path, broker_config(tmp_path, store_reply_message_enable=False))
    requester = register(broker)
    # Without the separator at the end, too.
    replier = send(broker, properties=PROPERTIES.rstrip("\x02"))
    request, _ = pushed(requester)
    assert "TTL\x013000\x02PUSH" in (request.header(PushReplyHeader).properties or "")
    confirm(broker, requester, request.opaque)
    (answer,) = answered(replier)
    header = answer.command.header(SendMessageResponseHeader)
    assert (answer.code, header.msg_id, header.queue_offset) == (0, "0", 0)
    assert broker.stored(REPLY_TOPIC) == []


async def test_a_reply_that_was_pushed_and_cannot_be_stored_is_a_success(
    broker: BrokerUnderTest,
) -> None:
    requester = register(broker)
    replier = send(broker)
    broker.create_topic(REPLY_TOPIC, 0)
    confirm(broker, requester, pushed(requester)[0].opaque)
    (answer,) = answered(replier)
    assert (answer.code, answer.command.header(SendMessageResponseHeader).msg_id) == (0, "0")


async def test_a_reply_without_a_body_is_pushed_and_not_stored(broker: BrokerUnderTest) -> None:
    requester = register(broker)
    replier = send(broker, body=b"")
    request, body = pushed(requester)
    assert body == b""
    confirm(broker, requester, request.opaque)
    (answer,) = answered(replier)
    assert (answer.code, answer.command.header(SendMessageResponseHeader).msg_id) == (0, "0")
    assert broker.stored(REPLY_TOPIC) == []


@pytest.mark.parametrize(
    ("properties", "fields", "code", "remark"),
    [
        (PROPERTIES, {}, ResponseCode.SYSTEM_ERROR, "channel of <c1> not found."),
        (
            PROPERTIES + "REPLY_TO_CLIENT\x01\x02",
            {},
            ResponseCode.SYSTEM_ERROR,
            "channel of <c1> not found.",
        ),
        ("MSG_TYPE\x01reply\x02", {}, ResponseCode.SYSTEM_ERROR, "REPLY_TO_CLIENT is null"),
        (PROPERTIES, {"body": bytes(2**22 + 1)}, ResponseCode.MESSAGE_ILLEGAL, "4194305 bytes"),
        (PROPERTIES * 600, {}, ResponseCode.MESSAGE_ILLEGAL, "at most 4194304 and 32767"),
        (
            f"{PROPERTIES}x\x01{'€' * 11_000}\x02",
            {},
            ResponseCode.MESSAGE_ILLEGAL,
            "at most 4194304 and 32767",
        ),
        (None, {}, ResponseCode.SYSTEM_ERROR, "REPLY_TO_CLIENT is null"),
        (PROPERTIES, {"batch": True}, ResponseCode.MESSAGE_ILLEGAL, "one by one"),
        (PROPERTIES, {"queue_id": 9}, ResponseCode.INVALID_PARAMETER, "queue"),
        (
            PROPERTIES,
            {"topic": "none", "default_topic": ""},
            ResponseCode.TOPIC_NOT_EXIST,
            "none",
        ),
    ],
)
async def test_replies_that_cannot_be_passed_on(
    broker: BrokerUnderTest, properties: Any, fields: dict[str, Any], code: int, remark: str
) -> None:
    (answer,) = answered(send(broker, properties=properties, **fields))
    assert answer.code == code
    assert remark in answer.remark
    assert broker.stored(REPLY_TOPIC) == []


async def test_a_reply_whose_push_fits_no_frame_is_refused(tmp_path: Path) -> None:
    """A push has more fields than the reply, which may fill a frame."""
    broker = BrokerUnderTest(tmp_path, broker_config(tmp_path, max_message_size=FRAME_BYTES_MAX))
    register(broker)
    (answer,) = answered(send(broker, body=bytes(FRAME_BYTES_MAX - 500)))
    assert (answer.code, "bytes" in answer.remark) == (ResponseCode.MESSAGE_ILLEGAL, True)


async def test_a_requester_that_refuses_or_leaves_is_an_error(broker: BrokerUnderTest) -> None:
    requester = register(broker)
    replier = send(broker)
    confirm(broker, requester, pushed(requester)[0].opaque, ResponseCode.SYSTEM_ERROR, "no memory")
    (answer,) = answered(replier)
    assert (answer.code, "no memory" in answer.remark) == (ResponseCode.SYSTEM_ERROR, True)

    replier = send(broker)
    broker.client_requests.channel_closed(requester)
    (answer,) = answered(replier)
    assert "has left" in answer.remark
    assert broker.stored(REPLY_TOPIC) == []
    assert await outcomes(broker) == {"failed": 2}


async def test_repliers_cannot_fill_the_budget_of_a_requester(broker: BrokerUnderTest) -> None:
    requester = register(broker)
    repliers = [send(broker) for _ in range(1000)]
    (answer,) = answered(send(broker))
    assert answer.code == ResponseCode.SYSTEM_BUSY
    broker.client_requests.channel_closed(requester)
    assert all(len(answered(each)) == 1 for each in repliers)
    assert await outcomes(broker) == {"failed": 1000, "requester busy": 1}


async def test_the_newest_connection_of_a_client_gets_its_replies(broker: BrokerUnderTest) -> None:
    producers = broker.producers
    first, second = register(broker, "p", "q"), register(broker)
    assert producers.channel_of("c1") is second
    producers.channel_closed(second)
    assert producers.channel_of("c1") is first
    producers.unregister("p", first)
    assert producers.channel_of("c1") is first, "it is still a member of q"
    beat(broker, first, "q", client_id="c2")
    assert (producers.channel_of("c1"), producers.channel_of("c2")) == (None, first)
    first.is_open = False
    assert producers.channel_of("c2") is None
    producers.unregister("q", first)
    producers.unregister("q", first)
    first.is_open = True
    assert producers.channel_of("c2") is None, "it has left"
