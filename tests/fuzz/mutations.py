"""Ways to spoil a frame, from one bit to another frame's bytes in its middle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_protocol.frame import LENGTH_BYTES, PREFIX, PREFIX_BYTES
from headrace_protocol.header_codecs import SerializeType, encode_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from tests.fuzz.corpus import Seed

    Mutation = Callable[[Random, bytearray, bytes], None]

INTEGERS = [
    value.to_bytes(size, "big")
    for size in (1, 2, 4, 8)
    for value in (0, 1, 2 ** (8 * size - 1) - 1, 2 ** (8 * size - 1), 2 ** (8 * size) - 1)
]
NUMBERS = [
    b"0", b"-1", b"127", b"128", b"32768", b"2147483647", b"2147483648", b"-2147483648",
    b"-2147483649", b"4294967296", b"9223372036854775807", b"9223372036854775808",
    b"-9223372036854775809", b"1e999", b"0.5", b"NaN", b"1" * 400, b"9" * 5000,
]  # fmt: skip
TOKENS = [
    b"null", b"true", b'""', b"''", b"{}", b"[]", b"{", b"}", b"[", b"]", b",", b":", b'"',
    b"\\", b"\\u0000", b"\\ud800", b"\\ud83d\\udeb0", b"\x00", b"\x01", b"\x02", b"\xff",
    b"\xc3\x28", b"\xed\xa0\x80", b"{0:1}", b'{{"a":1}:2}', b'"extFields":[1],',
    b'"extFields":{"a":[[{}]]},', b'"code":', b"\xc1", b"\xc7", b"\xdf\xff\xff\xff\xff",
]  # fmt: skip
NESTING = [b"[", b"{", b'{"a":', b"{{", b"\x91", b"\x81\xa1a"]
FOREIGN = [
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-x\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n",
]  # fmt: skip
TYPES = [0, 1, 0x68, 2, 0xFF]
CODECS = list(SerializeType)
ROCKETMQ_CODE_MAX = 0x7FFF
VALUES = [
    None, "", " ", "true", "FALSE", "null", "\0", "\x01\x02", "TAGS\x01", "\x02\x02KEYS\x01\x02",
    "a" * 40_000, "ü🚰", *(number.decode() for number in NUMBERS),
]  # fmt: skip


def below(rng: Random, limit: int) -> int:
    """A number in range(limit); faster than randrange, and as even as this needs."""
    return int(rng.random() * limit)


def choice(rng: Random, options: Sequence[bytes]) -> bytes:
    return options[below(rng, len(options))]


# -- of the bytes of a header, a body or a whole frame ---------------------------------------------


def flip_bit(rng: Random, data: bytearray, other: bytes) -> None:
    data[below(rng, len(data))] ^= 1 << below(rng, 8)


def put_integer(rng: Random, data: bytearray, other: bytes) -> None:
    integer = choice(rng, INTEGERS)
    at = below(rng, len(data))
    data[at : at + len(integer)] = integer


def nudge_byte(rng: Random, data: bytearray, other: bytes) -> None:
    at = below(rng, len(data))
    data[at] = (data[at] + below(rng, 9) - 4) & 0xFF


def put_number(rng: Random, data: bytearray, other: bytes) -> None:
    """Write another number over the digits at or after a place."""
    start = end = below(rng, len(data))
    while end < len(data) and 0x30 <= data[end] <= 0x39:
        end += 1
    data[start:end] = choice(rng, NUMBERS)


def put_token(rng: Random, data: bytearray, other: bytes) -> None:
    at = below(rng, len(data))
    data[at:at] = choice(rng, TOKENS)


def cut_out(rng: Random, data: bytearray, other: bytes) -> None:
    at = below(rng, len(data))
    del data[at : at + 1 + below(rng, 16)]


def cut_off(rng: Random, data: bytearray, other: bytes) -> None:
    del data[below(rng, len(data)) :]


def repeat(rng: Random, data: bytearray, other: bytes) -> None:
    at = below(rng, len(data))
    data[at:at] = data[at : at + 1 + below(rng, 32)]


def splice(rng: Random, data: bytearray, other: bytes) -> None:
    start, other_start = below(rng, len(data)), below(rng, len(other) + 1)
    data[start:] = other[other_start:]


def nest(rng: Random, data: bytearray, other: bytes) -> None:
    at = below(rng, len(data))
    data[at:at] = choice(rng, NESTING) * (1 << below(rng, 12))


_OFTEN: list[Mutation] = [
    flip_bit, put_integer, nudge_byte, put_number, put_token, cut_out, cut_off, repeat, splice,
]  # fmt: skip
# Deep nesting is long, so it would take most of the time.
_MUTATIONS = [*_OFTEN * 8, nest]


def spoil(rng: Random, data: bytearray, other: bytes) -> None:
    """One mutation, sometimes two or three."""
    for _ in range(1 + below(rng, 8) // 6 + below(rng, 8) // 7):
        if not data:
            return
        _MUTATIONS[below(rng, len(_MUTATIONS))](rng, data, other)


# -- of frames -------------------------------------------------------------------------------------


def spoiled_inside(rng: Random, seed: Seed, other: Seed) -> bytes:
    """A frame whose lengths are right and whose header, body or type is not."""
    serialize_type, header, body = seed.serialize_type, bytearray(seed.header), seed.body
    part = below(rng, 16)
    if part == 0:
        serialize_type = TYPES[below(rng, len(TYPES))]
    elif part < 6:
        return spoiled_fields(rng, seed, other)
    elif part < 11 and body:
        spoiled_body = bytearray(body)
        spoil(rng, spoiled_body, other.body)
        body = bytes(spoiled_body)
    else:
        spoil(rng, header, other.header)
    return framed(serialize_type, header, body)


def spoiled_fields(rng: Random, seed: Seed, other: Seed) -> bytes:
    """A frame that any reader takes, in any codec, with a value that its request can't have."""
    command = seed.command
    fields = dict(command.ext_fields)
    name = _key(rng, fields) or _key(rng, other.command.ext_fields)
    value = VALUES[below(rng, len(VALUES))]
    if value is None:
        fields.pop(name, None)
    else:
        fields[name] = value
    serialize_type = CODECS[below(rng, len(CODECS))]
    if command.code > ROCKETMQ_CODE_MAX:
        serialize_type = SerializeType.JSON
    start = encode_frame(
        serialize_type,
        command.code,
        command.opaque,
        flag=command.flag,
        fields=fields,
        remark=command.remark,
        body_bytes=len(seed.body),
    )
    return start + seed.body


def _key(rng: Random, fields: dict[str, str]) -> str:
    return list(fields)[below(rng, len(fields))] if fields else ""


def spoiled_outside(rng: Random, seed: Seed, other: Seed) -> bytes:
    """Bytes that may be no frame at all."""
    kind = below(rng, 8)
    if kind == 0:
        return choice(rng, FOREIGN)
    if kind == 1:
        return rng.randbytes(below(rng, 64))
    frame = bytearray(framed(seed.serialize_type, seed.header, seed.body))
    if kind < 5:
        start = bytearray(frame[:PREFIX_BYTES])
        spoil(rng, start, framed(other.serialize_type, other.header, other.body))
        frame[:PREFIX_BYTES] = start
    else:
        spoil(rng, frame, framed(other.serialize_type, other.header, other.body))
    return bytes(frame)


def framed(serialize_type: int, header: bytes | bytearray, body: bytes) -> bytes:
    length = LENGTH_BYTES + len(header) + len(body)
    return b"".join((PREFIX.pack(length, serialize_type << 24 | len(header)), header, body))
