"""Java's hash of texts, as ConsumeQueues hold it of tags and IndexFiles of keys."""

from __future__ import annotations

import struct
from functools import lru_cache
from operator import mul
from typing import TYPE_CHECKING

from headrace_protocol.bounds import HASHED_CHARS_MAX, OutOfBounds
from headrace_protocol.message import property_value

if TYPE_CHECKING:
    from collections.abc import Sequence

# Long texts are hashed in blocks: powers for all of their units would cost time and memory.
_BLOCK_UNITS = 128
_POWERS_OF_31 = [pow(31, exponent, 1 << 32) for exponent in range(_BLOCK_UNITS + 1)]
# The powers for a block, by its number of units.
_POWERS = [tuple(_POWERS_OF_31[:count][::-1]) for count in range(_BLOCK_UNITS + 1)]


def java_hash(text: str) -> int:
    """Java's ``String.hashCode``: over UTF-16 units, wrapped to a signed 32-bit integer.

    Raises OutOfBounds for a text longer than any tags or key.
    """
    if len(text) > HASHED_CHARS_MAX:
        raise OutOfBounds(
            f"tags or key of {len(text)} characters: the maximum is {HASHED_CHARS_MAX}"
        )
    units: Sequence[int]
    if text.isascii():
        units = text.encode()
    else:
        raw = text.encode("utf-16-be", "surrogatepass")
        units = struct.unpack(f">{len(raw) // 2}H", raw)
    value = 0
    for start in range(0, len(units), _BLOCK_UNITS):
        block = units[start : start + _BLOCK_UNITS]
        count = len(block)
        value = (value * _POWERS_OF_31[count] + sum(map(mul, block, _POWERS[count]))) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


_java_hash_cached = lru_cache(maxsize=4096)(java_hash)
# Longer tags are not used in practice; caching them would only fill memory.
_CACHED_CHARS_MAX = 256


def tags_code(tags: str | None) -> int:
    """The hash of the TAGS text that a ConsumeQueue unit holds; 0 without tags."""
    if not tags:
        return 0
    return java_hash(tags) if len(tags) > _CACHED_CHARS_MAX else _java_hash_cached(tags)


def tags_code_of(raw_properties: bytes) -> int:
    """The tags code of a record with these properties."""
    start = raw_properties.rfind(b"\x02TAGS\x01") + 6
    if start == 5 and not raw_properties.startswith(b"TAGS\x01"):
        return 0
    end = raw_properties.find(b"\x02", start)
    if end <= start:  # no value, or no separator after it
        return tags_code(property_value(raw_properties, b"TAGS").decode(errors="replace"))
    if end - start > _CACHED_CHARS_MAX:
        return java_hash(raw_properties[start:end].decode(errors="replace"))
    return _tags_code_of_bytes(raw_properties[start:end])


@lru_cache(maxsize=4096)
def _tags_code_of_bytes(tags: bytes) -> int:
    return java_hash(tags.decode(errors="replace"))


def index_key_hash(topic: str, key: str) -> int:
    """The key hash of an IndexFile entry: never negative."""
    value = abs(java_hash(f"{topic}#{key}"))
    return 0 if value == 1 << 31 else value
