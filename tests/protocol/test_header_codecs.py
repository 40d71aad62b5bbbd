"""Headers in three codecs: round trips, the peer's quirks, any bytes."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec
import pytest

from headrace_protocol.admin_headers import GetAllTopicConfigHeader
from headrace_protocol.command import Command
from headrace_protocol.errors import LocalProtocolError, RemoteProtocolError
from headrace_protocol.frame import FrameReader
from headrace_protocol.header_codecs import SerializeType, decode_header, encode_frame
from headrace_protocol.headers import PullMessageHeader, SendMessageHeaderV2

SEND = {
    "a": "group", "b": "topic", "c": "TBW102", "d": 4, "e": 1, "f": 0, "g": 1795235766905,
    "h": -1, "i": "KEYS\x01k 1\x02TAGS\x01ä🚰\x02", "j": 0, "k": False, "m": True,
}  # fmt: skip


def decode(data: bytes) -> Command:
    ((serialize_type, header, _),) = FrameReader().feed(data)
    return decode_header(serialize_type, header)


@pytest.mark.parametrize("serialize_type", list(SerializeType))
def test_typed_header_is_the_same_in_every_codec(serialize_type: SerializeType) -> None:
    command = decode(encode_frame(serialize_type, 310, 77, fields=SEND, remark="why"))
    assert (command.code, command.opaque, command.remark) == (310, 77, "why")
    header = command.header(SendMessageHeaderV2)
    assert (header.topic, header.queue_id, header.flag) == ("topic", 1, -1)
    assert (header.unit_mode, header.batch, header.max_reconsume_times) == (False, True, None)
    assert header.properties == SEND["i"]


@pytest.mark.parametrize(
    "header",
    [b"[" * 100_000, b'{"code":1,"extFields":' + b'{"a":' * 100_000, b"\x91" * 100_000],
)
@pytest.mark.parametrize("serialize_type", list(SerializeType))
def test_deep_nesting_is_a_protocol_error(serialize_type: SerializeType, header: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="malformed"):
        decode_header(serialize_type, memoryview(header))


def test_unknown_type_names_the_known_ones() -> None:
    with pytest.raises(
        RemoteProtocolError, match=r"unknown header type 9: known types are JSON \(0\)"
    ):
        decode_header(9, memoryview(b""))


@pytest.mark.parametrize("ext", ["null", "{}", None])
def test_optional_fields_may_be_absent_as_a_whole(ext: str | None) -> None:
    middle = "" if ext is None else f',"extFields":{ext}'
    command = decode_header(0, memoryview(f'{{"code":21{middle}}}'.encode()))
    assert command.header(GetAllTopicConfigHeader).topic_seq is None
    assert command.ext() == {}


def test_missing_and_wrong_fields_are_named() -> None:
    command = decode(encode_frame(0, 310, 1, fields={**SEND, "e": "one"}))
    with pytest.raises(msgspec.ValidationError, match=r"`int`.*\$\.e"):
        command.header(SendMessageHeaderV2)
    command = decode(encode_frame(1, 310, 1, fields={**SEND, "g": None}))
    with pytest.raises(msgspec.ValidationError, match="missing required field `g`"):
        command.header(SendMessageHeaderV2)


@pytest.mark.parametrize("serialize_type", list(SerializeType))
@pytest.mark.parametrize("queue_id", [2**31, -(2**31) - 1, 2**70])
def test_numbers_beyond_the_peers_types_are_refused(
    serialize_type: SerializeType, queue_id: int
) -> None:
    command = decode(encode_frame(serialize_type, 310, 1, fields={**SEND, "e": str(queue_id)}))
    with pytest.raises(msgspec.ValidationError):
        command.header(SendMessageHeaderV2)


def test_unknown_fields_are_ignored() -> None:
    fields: dict[str, Any] = {
        "consumerGroup": "g", "topic": "t", "queueId": 0, "queueOffset": 5, "maxMsgNums": 32,
        "sysFlag": 6, "commitOffset": 0, "suspendTimeoutMillis": 15000, "subVersion": 0,
        "ReqT": "0", "bname": "b",
    }  # fmt: skip
    for serialize_type in SerializeType:
        header = decode(encode_frame(serialize_type, 11, 1, fields=fields)).header(
            PullMessageHeader
        )
        assert (header.queue_offset, header.subscription) == (5, None)


@pytest.mark.parametrize("code", [0x8000, -0x8001, 200050])
def test_codes_over_16_bits_do_not_fit_the_binary_header(code: int) -> None:
    with pytest.raises(LocalProtocolError, match="use JSON"):
        encode_frame(SerializeType.ROCKETMQ, code, 1)


def test_binary_header_reads_empty_as_null_and_the_last_of_two() -> None:
    def entry(key: bytes, value: bytes) -> bytes:
        return len(key).to_bytes(2, "big") + key + len(value).to_bytes(4, "big") + value

    entries = entry(b"k", b"1") + entry(b"e", b"") + entry(b"k", b"2")
    fixed = bytes([0, 10, 99, 2, 1]) + (7).to_bytes(4, "big") + bytes(4) + bytes(4)
    command = decode_header(1, memoryview(fixed + len(entries).to_bytes(4, "big") + entries))
    assert (command.language, command.remark, command.ext()) == ("OTHER", None, {"k": "2"})


@pytest.mark.parametrize(
    "values", [[1], {"code": 1}, [1, "P", 0, 0, 0, None, ["x"]], ["x", "P", 0, 0, 0, None, None]]
)
def test_msgpack_of_another_shape_is_a_protocol_error(values: object) -> None:
    with pytest.raises(RemoteProtocolError, match="MSGPACK"):
        decode_header(SerializeType.MSGPACK, memoryview(msgpack.packb(values)))
