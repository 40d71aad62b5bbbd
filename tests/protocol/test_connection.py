"""The client's sans-IO connection: requests out, events in, whatever the cut of the bytes."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_protocol.codes import RequestCode
from headrace_protocol.command import FLAG_ONEWAY, FLAG_RESPONSE, Command
from headrace_protocol.connection import Connection, RequestReceived, ResponseReceived
from headrace_protocol.errors import LocalProtocolError, RemoteProtocolError
from headrace_protocol.frame import FRAME_BYTES_MAX, Buffer, FrameReader
from headrace_protocol.header_codecs import (
    HEADRACE_MARK,
    SerializeType,
    decode_header,
    encode_frame,
)
from headrace_protocol.headers import ConsumerGroupHeader, GetMinOffsetHeader

HEADER = GetMinOffsetHeader(topic="T", queue_id=3)


def decoded(buffers: list[Buffer]) -> tuple[int, Command, bytes]:
    """Serialize type, command and body of the one frame in ``buffers``."""
    ((serialize_type, header, body),) = FrameReader().feed(b"".join(buffers))
    return serialize_type, decode_header(serialize_type, header), bytes(body)


def response(
    opaque: int,
    body: bytes = b"",
    code: int = 0,
    serialize_type: SerializeType = SerializeType.JSON,
    **more: Any,
) -> bytes:
    frame = encode_frame(
        serialize_type, code, opaque, flag=FLAG_RESPONSE, body_bytes=len(body), **more
    )
    return frame + body


def hello() -> bytes:
    return encode_frame(SerializeType.JSON, RequestCode.HEADRACE_HELLO, 0, flag=FLAG_ONEWAY)


def test_a_request_carries_code_header_and_body() -> None:
    connection: Connection[str] = Connection()
    opaque, buffers = connection.request(31, HEADER, b"body", waiter="w")
    _, command, body = decoded(buffers)
    assert (command.code, command.opaque, command.flag, body) == (31, opaque, 0, b"body")
    assert command.language == "PYTHON"
    assert command.header(GetMinOffsetHeader) == HEADER


def test_responses_find_their_waiters_in_any_order() -> None:
    connection: Connection[Any] = Connection()
    opaques = [connection.request(31, HEADER, waiter=name)[0] for name in "abc"]
    data = b"".join(response(opaque, str(opaque).encode()) for opaque in reversed(opaques))
    events = connection.receive_data(data)
    assert [event.waiter for event in events if isinstance(event, ResponseReceived)] == [
        "c",
        "b",
        "a",
    ]
    assert [bytes(event.body) for event in events] == [b"%d" % n for n in reversed(opaques)]
    assert connection.waiting_count == 0


@pytest.mark.parametrize("serialize_type", SerializeType)
def test_a_response_is_read_by_its_own_codec(serialize_type: SerializeType) -> None:
    connection: Connection[Any] = Connection(SerializeType.ROCKETMQ)
    opaque, _ = connection.request(31, HEADER, waiter="w")
    (event,) = connection.receive_data(
        response(opaque, code=17, serialize_type=serialize_type, remark="gone")
    )
    assert isinstance(event, ResponseReceived)
    assert (event.command.code, event.command.remark) == (17, "gone")


def test_responses_that_nobody_waits_for_are_dropped() -> None:
    connection: Connection[Any] = Connection()
    opaque, _ = connection.request(31, waiter="w")
    connection.forget(opaque)
    connection.forget(opaque)
    assert connection.receive_data(response(opaque) + response(opaque + 7)) == []


def test_abandoning_returns_every_waiter_once() -> None:
    connection: Connection[Any] = Connection()
    for name in "abc":
        connection.request(31, waiter=name)
    assert connection.abandon() == ["a", "b", "c"]
    assert connection.abandon() == []


def test_expect_gives_the_opaque_for_a_frame_of_the_callers_own() -> None:
    connection: Connection[Any] = Connection()
    opaque = connection.expect("w")
    (event,) = connection.receive_data(response(opaque))
    assert isinstance(event, ResponseReceived)
    assert event.waiter == "w"


def test_oneway_requests_wait_for_nothing() -> None:
    connection: Connection[Any] = Connection()
    _, command, _ = decoded(connection.oneway(15, HEADER))
    assert command.is_oneway
    assert connection.waiting_count == 0


@pytest.mark.parametrize("serialize_type", SerializeType)
def test_the_other_side_is_answered_in_its_own_codec(serialize_type: SerializeType) -> None:
    connection: Connection[Any] = Connection()
    frame = encode_frame(serialize_type, 307, 5, fields={"consumerGroup": "g"})
    (event,) = connection.receive_data(frame)
    assert isinstance(event, RequestReceived)
    assert event.command.header(ConsumerGroupHeader).consumer_group == "g"
    answer_type, command, body = decoded(connection.respond(event, 0, body=b"info"))
    assert answer_type == serialize_type
    assert (command.is_response, command.opaque, command.code, body) == (True, 5, 0, b"info")


def test_only_the_first_request_tells_that_we_know_msgpack() -> None:
    connection: Connection[Any] = Connection()
    fields = [decoded(connection.request(31, HEADER, waiter=0)[1])[1].ext() for _ in range(2)]
    assert [HEADRACE_MARK in ext for ext in fields] == [True, False]


def test_headers_are_msgpack_once_the_server_has_said_hello() -> None:
    connection: Connection[Any] = Connection()
    assert connection.receive_data(hello()) == []
    serialize_type, command, _ = decoded(connection.request(31, HEADER, waiter=0)[1])
    assert serialize_type == SerializeType.MSGPACK
    assert command.header(GetMinOffsetHeader) == HEADER


def test_codes_that_do_not_fit_a_rocketmq_header_go_as_json() -> None:
    connection: Connection[Any] = Connection(SerializeType.ROCKETMQ)
    assert decoded(connection.request(31, waiter=0)[1])[0] == SerializeType.ROCKETMQ
    serialize_type, command, _ = decoded(connection.request(200050, waiter=0)[1])
    assert (serialize_type, command.code) == (SerializeType.JSON, 200050)


def test_a_body_too_large_for_a_frame_is_refused_and_nothing_waits() -> None:
    connection: Connection[Any] = Connection()
    with pytest.raises(LocalProtocolError, match="over the limit"):
        connection.request(31, HEADER, bytes(FRAME_BYTES_MAX), waiter="w")
    assert connection.waiting_count == 0


def test_bytes_of_another_protocol_are_an_error() -> None:
    with pytest.raises(RemoteProtocolError, match="HTTP"):
        Connection().receive_data(b"HTTP/1.1 400 Bad Request\r\n\r\n")
