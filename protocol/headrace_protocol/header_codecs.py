"""The three ways in which a command's header is written.

JSON and ROCKETMQ are the peer's. MSGPACK is ours: it goes only to a side that has shown that it
knows it (``HEADRACE_MARK``), so an Apache peer, which would close the connection, never sees it.
Source: docs/protocol.md "Header codecs"; tests/protocol/test_golden_frames.py.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import msgpack
import msgspec

from headrace_protocol.codes import LanguageCode
from headrace_protocol.command import VERSION, Command, to_text_fields
from headrace_protocol.errors import LocalProtocolError, RemoteProtocolError
from headrace_protocol.frame import frame_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headrace_protocol.frame import Buffer


class SerializeType(IntEnum):
    """The first byte of a frame's second word."""

    JSON = 0
    ROCKETMQ = 1
    MSGPACK = 0x68  # "h": far from the numbers that the peer may come to use


# A client of ours puts this extension field into its first request; a server of ours answers with
# a one-way HELLO. Apache's ignore fields that they do not know.
HEADRACE_MARK = "headrace"

_OURS = "PYTHON"
_LANGUAGE_NAMES = {language.value: language.name for language in LanguageCode}

# What the decoders below raise for bytes that are none of theirs, however deep they nest.
_MALFORMED = (
    ValueError,
    IndexError,
    struct.error,
    msgspec.MsgspecError,
    msgpack.UnpackException,
    RecursionError,
)


def decode_header(serialize_type: int, header: Buffer) -> Command:
    """Read one header.

    Raises RemoteProtocolError for an unknown type or bytes that are no such header.
    """
    try:
        decode = _DECODERS[serialize_type]
    except KeyError:
        raise RemoteProtocolError(
            f"unknown header type {serialize_type}: known are "
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
    """A frame up to its body, which follows unchanged.

    fields: extension fields by wire name; None values are left out.
    body_bytes: length of the body that the caller will send next.
    Raises LocalProtocolError for what the codec or the frame can't hold.
    """
    header = _ENCODERS[serialize_type](
        Command(code, language, version, opaque, flag, remark, fields)
    )
    return frame_prefix(serialize_type, len(header), body_bytes) + header


# -- JSON ------------------------------------------------------------------------------------------


class _JsonCommand(Command, gc=False):
    # Raw text: read once, straight into the struct of its request.
    ext_fields: msgspec.Raw = msgspec.field(name="extFields", default=msgspec.Raw(b"null"))


_decode_json = msgspec.json.Decoder(_JsonCommand).decode
_encode_json_object = msgspec.json.Encoder().encode


def _encode_json(command: Command) -> bytes:
    # The peer's key order, for the eyes of those who compare captures.
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
        raise ValueError(f"a remark of {remark_bytes} bytes in a header of {len(data)}")
    remark = data[_FIXED.size : position].decode() or None
    (ext_bytes,) = _INT.unpack_from(data, position)
    position += _INT.size
    end = position + ext_bytes
    if not position <= end <= len(data):
        raise ValueError(f"extension fields of {ext_bytes} bytes at {position} of {len(data)}")
    # A language that came after this was written is no reason to refuse its client.
    name = _LANGUAGE_NAMES.get(language, LanguageCode.OTHER.name)
    return Command(code, name, version, opaque, flag, remark, _entries(data, position, end))


def _entries(data: bytes, position: int, end: int) -> dict[str, str]:
    """Extension fields; the peer reads an empty key or value as null, and null as not there."""
    entries: dict[str, str] = {}
    while position < end:
        key_start = position + 2
        key_end = key_start + (data[position] << 8 | data[position + 1])
        value_start = key_end + 4
        (value_bytes,) = _INT.unpack_from(data, key_end)
        position = value_start + value_bytes
        if value_bytes < 0 or position > end:
            raise ValueError(f"an entry that ends at {position}, after its block's end at {end}")
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
