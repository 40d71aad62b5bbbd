"""Seeds of mutations: every recorded frame, the same in our own codec, and rare bodies."""

from __future__ import annotations

import zlib
from typing import NamedTuple

from headrace_protocol.codes import RequestCode
from headrace_protocol.command import Command
from headrace_protocol.compression import COMPRESSED, COMPRESSION_LZ4
from headrace_protocol.frame import FrameReader
from headrace_protocol.header_codecs import (
    HEADRACE_MARK,
    SerializeType,
    decode_header,
    encode_frame,
)
from headrace_protocol.message import encode_batch, encode_record
from headrace_protocol.registration import RegisterBrokerBody
from tests.support.golden_frames import golden_frames
from tests.support.registrations import compressed


class Seed(NamedTuple):
    """One frame to start from.

    request_code: what it asks, or what the response answers: tells how its parts are read.
    command: what its header says.
    """

    request_code: int
    command: Command
    serialize_type: int
    header: bytes
    body: bytes


def corpus() -> list[Seed]:
    recorded = [_seed(frame.data, RequestCode[frame.request_name]) for frame in golden_frames()]
    return [*recorded, *_in_msgpack(recorded), *_rare()]


def _seed(data: bytes, request_code: int) -> Seed:
    ((serialize_type, header, body),) = FrameReader().feed(data)
    command = decode_header(serialize_type, header)
    command.ext_fields = command.ext()
    return Seed(request_code, command, serialize_type, bytes(header), bytes(body))


def _in_msgpack(recorded: list[Seed]) -> list[Seed]:
    """One of each kind: the codec differs, not what it carries."""
    kinds = {(seed.request_code, seed.command.is_response): seed for seed in recorded}
    return [_recoded(seed) for seed in kinds.values()]


def _recoded(seed: Seed) -> Seed:
    command = seed.command
    frame = encode_frame(
        SerializeType.MSGPACK,
        command.code,
        command.opaque,
        flag=command.flag,
        fields=command.ext_fields,
        remark=command.remark,
        body_bytes=len(seed.body),
    )
    return _seed(frame + seed.body, seed.request_code)


def _rare() -> list[Seed]:
    """Frames that nobody recorded: compressed registrations, many records, both host lengths."""
    registration = next(
        frame.body for frame in golden_frames() if frame.name == "REGISTER_BROKER" and frame.body
    )
    packed = compressed(RegisterBrokerBody.decode(registration))
    register_fields = {
        "brokerName": "b", "brokerAddr": "1.2.3.4:5", "clusterName": "c", "brokerId": 0,
        "haServerAddr": "", "compressed": True, "bodyCrc32": 0, HEADRACE_MARK: "1",
    }  # fmt: skip
    return [
        _made(RequestCode.REGISTER_BROKER, 0, register_fields, packed),
        _made(RequestCode.REGISTER_BROKER, 0, register_fields, zlib.compress(b"\0" * 64)),
        _made(RequestCode.SEND_BATCH_MESSAGE, 0, {"m": True}, _batch()),
        _made(RequestCode.PULL_MESSAGE, 1, {}, _records()),
    ]


def _made(code: RequestCode, flag: int, fields: dict[str, object], body: bytes) -> Seed:
    frame = encode_frame(
        SerializeType.JSON, code, 7, flag=flag, fields=fields, body_bytes=len(body)
    )
    return _seed(frame + body, code)


def _batch() -> bytes:
    return encode_batch([(0, b"body", b"KEYS\x01k\x02"), (1, b"", b""), (-1, b"x" * 200, b"a")])


def _records() -> bytes:
    v4, v6 = bytes(8), bytes(20)
    return b"".join(
        encode_record(
            topic="t" * length,
            queue_id=1,
            body=b"b" * length,
            born_host=born,
            store_host=store,
            sys_flag=sys_flag,
            properties=b"TAGS\x01a\x02KEYS\x01k\x02",
        )
        for length, born, store, sys_flag in (
            (1, v4, v6, 0),
            (200, v6, v4, 0),
            (20, v6, v6, COMPRESSED),
            (20, v4, v4, COMPRESSED | COMPRESSION_LZ4),
        )
    )
