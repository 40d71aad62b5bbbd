"""The three codecs for a command's header.

JSON and ROCKETMQ are RocketMQ's. MSGPACK is headrace's own: it is sent only to peers that have
announced support (``HEADRACE_MARK``), because an Apache peer would close the connection.
Source: docs/protocol.md "Header codecs"; tests/protocol/test_golden_frames.py.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import msgpack
import msgspec

from headrace_protocol.bounds import why_too_large
from headrace_protocol.codes import LanguageCode
from headrace_protocol.command import (
    FLAG_ONEWAY,
    VERSION,
    Command,
    header_fields,
    to_text_fields,
)
from headrace_protocol.errors import LocalProtocolError, RemoteProtocolError
from headrace_protocol.frame import frame_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headrace_protocol.codes import RequestCode
    from headrace_protocol.frame import Buffer


class SerializeType(IntEnum):
    """The first byte of a frame's second word."""

    JSON = 0
    ROCKETMQ = 1
    MSGPACK = 0x68  # "h": far from numbers that RocketMQ may assign


# A headrace client puts this extension field into its first request; a headrace server answers with
# a one-way HELLO. Apache RocketMQ ignores unknown fields.
HEADRACE_MARK = "headrace"

_OURS = "PYTHON"
_LANGUAGE_NAMES = {language.value: language.name for language in LanguageCode}

# Errors of the decoders below for malformed bytes, at any depth of nesting.
_MALFORMED = (
    ValueError,
    IndexError,
    struct.error,
    msgspec.MsgspecError,
    msgpack.UnpackException,
    RecursionError,
)


def decode_header(serialize_type: int, header: Buffer) -> Command:
    """Decode one header.

    Raises RemoteProtocolError for an unknown type or a malformed header.
    """
    try:
        decode = _DECODERS[serialize_type]
    except KeyError:
        raise RemoteProtocolError(
            f"unknown header type {serialize_type}: known types are "
            + ", ".join(f"{known.name} ({known.value})" for known in SerializeType)
        ) from None
    try:
        return decode(header)
    except _MALFORMED as error:
        raise RemoteProtocolError(
            f"malformed {SerializeType(serialize_type).name} header: {error}"
        ) from error


def encode_frame(
    serialize_type: int,
    code: int,
    opaque: int,
    *,
    flag: int = 0,
    fields: Mapping[str, Any] | None = None,
    remark: str | None = None,
    body_bytes: int = 0,
    language: str = _OURS,
    version: int = VERSION,
) -> bytes:
    """A frame without its body, which the caller sends next, unchanged.

    fields: extension fields by wire name; None values are left out.
    body_bytes: length of the body.

    Raises LocalProtocolError for values that the codec or the frame cannot hold.
    """
    header = _ENCODERS[serialize_type](
        Command(code, language, version, opaque, flag, remark, fields)
    )
    return frame_prefix(serialize_type, len(header), body_bytes) + header


# -- JSON ------------------------------------------------------------------------------------------


class _JsonCommand(Command, gc=False):
    # Raw text, decoded only once, directly into the struct of its request.
    ext_fields: msgspec.Raw = msgspec.field(name="extFields", default=msgspec.Raw(b"null"))


_decode_json = msgspec.json.Decoder(_JsonCommand).decode
_encode_json_object = msgspec.json.Encoder().encode


def _encode_json(command: Command) -> bytes:
    # RocketMQ's key order, which makes captures comparable.
    header: dict[str, Any] = {"code": command.code}
    if command.ext_fields is not None:
        header["extFields"] = to_text_fields(command.ext_fields)
    header["flag"] = command.flag
    header["language"] = command.language
    header["opaque"] = command.opaque
    if command.remark is not None:
        header["remark"] = command.remark
    header["serializeTypeCurrentRPC"] = "JSON"
    header["version"] = command.version
    return _encode_json_object(header)


# -- ROCKETMQ --------------------------------------------------------------------------------------

_FIXED = struct.Struct(">hBhiii")  # ..., length of the remark
_SHORT = struct.Struct(">h")
_INT = struct.Struct(">i")


def _decode_rocketmq(header: Buffer) -> Command:
    data = bytes(header)
    code, language, version, opaque, flag, remark_bytes = _FIXED.unpack_from(data)
    position = _FIXED.size + remark_bytes
    if remark_bytes < 0 or position > len(data):
        raise ValueError(f"a remark of {remark_bytes} bytes in a header of {len(data)} bytes")
    remark = data[_FIXED.size : position].decode() or None
    (ext_bytes,) = _INT.unpack_from(data, position)
    position += _INT.size
    end = position + ext_bytes
    if not position <= end <= len(data):
        raise ValueError(f"extension fields of {ext_bytes} bytes at {position} of {len(data)}")
    # An unknown, newer language is no reason to reject its client.
    name = _LANGUAGE_NAMES.get(language, LanguageCode.OTHER.name)
    return Command(code, name, version, opaque, flag, remark, _entries(data, position, end))


def _entries(data: bytes, position: int, end: int) -> dict[str, str]:
    """Extension fields. As in RocketMQ, an empty key or value is null, and null means absent."""
    entries: dict[str, str] = {}
    while position < end:
        key_start = position + 2
        key_end = key_start + (data[position] << 8 | data[position + 1])
        value_start = key_end + 4
        (value_bytes,) = _INT.unpack_from(data, key_end)
        position = value_start + value_bytes
        if value_bytes < 0 or position > end:
            raise ValueError(f"an entry ends at {position}, after its block's end at {end}")
        if key_end > key_start and value_bytes:
            entries[data[key_start:key_end].decode()] = data[value_start:position].decode()
    return entries


def _encode_rocketmq(command: Command) -> bytes:
    remark = (command.remark or "").encode()
    entries = b"".join(
        _entry(key, value) for key, value in to_text_fields(command.ext_fields or {}).items()
    )
    if not -0x8000 <= command.code <= 0x7FFF:
        raise LocalProtocolError(
            f"code {command.code} does not fit a ROCKETMQ header's 16 bits: use JSON for it"
        )
    fixed = _FIXED.pack(
        command.code,
        LanguageCode[command.language],
        command.version,
        command.opaque,
        command.flag,
        len(remark),
    )
    return b"".join((fixed, remark, _INT.pack(len(entries)), entries))


def _entry(key: str, value: str) -> bytes:
    key_bytes, value_bytes = key.encode(), value.encode()
    return b"".join(
        (_SHORT.pack(len(key_bytes)), key_bytes, _INT.pack(len(value_bytes)), value_bytes)
    )


# -- MSGPACK ---------------------------------------------------------------------------------------


class _MsgpackCommand(Command, gc=False):
    # As in the other codecs, fields must not nest.
    ext_fields: dict[str, str | int | float | bool | None] | None = None


def _decode_msgpack(header: Buffer) -> Command:
    values = msgpack.unpackb(header)
    if not isinstance(values, list) or len(values) != len(_MSGPACK_NAMES):
        raise ValueError(f"not an array of {len(_MSGPACK_NAMES)} values")
    return msgspec.convert(dict(zip(_MSGPACK_NAMES, values, strict=True)), _MsgpackCommand)


def _encode_msgpack(command: Command) -> bytes:
    return bytes(msgpack.packb([getattr(command, name) for name in _MSGPACK_NAMES]))


_MSGPACK_NAMES = ("code", "language", "version", "opaque", "flag", "remark", "ext_fields")

_DECODERS: dict[int, Callable[[Buffer], Command]] = {
    SerializeType.JSON: _decode_json,
    SerializeType.ROCKETMQ: _decode_rocketmq,
    SerializeType.MSGPACK: _decode_msgpack,
}
_ENCODERS: dict[int, Callable[[Command], bytes]] = {
    SerializeType.JSON: _encode_json,
    SerializeType.ROCKETMQ: _encode_rocketmq,
    SerializeType.MSGPACK: _encode_msgpack,
}


def notice(
    code: RequestCode, header: msgspec.Struct | None = None, *body: bytes
) -> tuple[bytes, ...]:
    """Encode a one-way request from a daemon to its client, in JSON, which every client reads."""
    frame = encode_frame(
        SerializeType.JSON,
        code,
        0,
        flag=FLAG_ONEWAY,
        fields=header_fields(header),
        body_bytes=sum(map(len, body)),
    )
    return (frame, *body)


def admit(serialize_type: int, header: Buffer, body_bytes: int) -> None:
    """Raise RemoteProtocolError unless the header's code permits a body of that size."""
    code = decode_header(serialize_type, header).code
    if reason := why_too_large(code, body_bytes):
        raise RemoteProtocolError(reason)
