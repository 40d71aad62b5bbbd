"""Findings of ``make fuzz``, once each."""

from __future__ import annotations

import msgspec
import pytest

from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.frame import FRAME_BYTES_MAX, FrameReader
from headrace_protocol.header_codecs import SerializeType, decode_header
from headrace_protocol.headers import GetMinOffsetHeader
from headrace_protocol.message import decode_record, encode_record
from headrace_protocol.serving import Registry, Reply, Request
from tests.fuzz.promise import Channel

EXT_FIELDS_THAT_ARE_NONE = [
    b'[1]', b'"text"', b'{"topic":"\xff","queueId":"0"}', b'{"topic":{"a":[1]},"queueId":"0"}'
]  # fmt: skip


@pytest.mark.parametrize("ext_fields", EXT_FIELDS_THAT_ARE_NONE)
def test_ext_fields_that_are_none_are_a_wrong_value(ext_fields: bytes) -> None:
    command = decode_header(0, memoryview(b'{"code":31,"extFields":%b}' % ext_fields))
    with pytest.raises(msgspec.ValidationError):
        command.ext()
    with pytest.raises(msgspec.ValidationError):
        command.header(GetMinOffsetHeader)


def ask(registry: Registry, header: bytes) -> tuple[int, str | None]:
    channel = Channel()
    registry.handle(channel, [(SerializeType.JSON, memoryview(header), memoryview(b""))])
    ((_, answer, _),) = FrameReader().feed(b"".join(channel.written))
    command = decode_header(SerializeType.JSON, answer)
    return command.code, command.remark


def never(_request: Request, error: Exception) -> None:
    raise error


@pytest.mark.parametrize("ext_fields", EXT_FIELDS_THAT_ARE_NONE)
def test_a_first_request_with_such_fields_is_answered(ext_fields: bytes) -> None:
    registry = Registry(never)
    registry.route(RequestCode.GET_MIN_OFFSET, lambda r: Reply(r.header(GetMinOffsetHeader)))
    code, remark = ask(registry, b'{"code":31,"extFields":%b}' % ext_fields)
    assert code == ResponseCode.INVALID_PARAMETER
    assert "malformed request GET_MIN_OFFSET (31)" in (remark or "")


def test_an_answer_too_large_for_a_frame_is_an_error_for_its_request_alone() -> None:
    registry = Registry(never)
    registry.route(RequestCode.GET_MIN_OFFSET, lambda _: Reply(body=(bytes(FRAME_BYTES_MAX),)))
    code, remark = ask(registry, b'{"code":31}')
    assert code == ResponseCode.SYSTEM_ERROR
    assert "is over the limit of 16777216" in (remark or "")


def test_a_record_with_a_negative_physical_offset_has_an_id() -> None:
    record = bytearray(encode_record(topic="t", queue_id=0, body=b"b"))
    record[28:36] = b"\xff" * 8
    message = decode_record(record)
    assert message.physical_offset == -1
    assert message.message_id == "0" * 16 + "F" * 16
