"""Batches for tests, and the items of one by one, by which faster ways are measured."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from headrace_protocol.blocks import EncodedBlock, encode_records
from headrace_protocol.errors import CorruptRecord
from headrace_protocol.message import BATCH_ITEM_HEAD
from tests.support.stores import HOST

_SHORT = struct.Struct(">h")


def block(*bodies: bytes, topic: str = "T", properties: Any = b"") -> EncodedBlock:
    """Records as a producer of ours sends them. properties: of all, or of each."""
    return encode_records(topic, bodies, properties, born_timestamp=1, born_host=HOST)


def iter_batch(batch_body: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """(flag, body, properties) of each item. Raises CorruptRecord on any wrong length."""
    position, end = 0, len(batch_body)
    while position < end:
        if end - position < BATCH_ITEM_HEAD.size + 2:
            raise CorruptRecord(position, f"{end - position} bytes are no batch item")
        size, flag, body_bytes = BATCH_ITEM_HEAD.unpack_from(batch_body, position)
        body_at = position + BATCH_ITEM_HEAD.size
        length_at = body_at + body_bytes
        position_next = position + size
        if body_bytes < 0 or position_next > end or length_at + 2 > position_next:
            raise CorruptRecord(position, f"batch item size {size}, body length {body_bytes}")
        (properties_bytes,) = _SHORT.unpack_from(batch_body, length_at)
        if properties_bytes < 0 or length_at + 2 + properties_bytes != position_next:
            raise CorruptRecord(position, f"batch item size {size}, properties {properties_bytes}")
        yield flag, batch_body[body_at:length_at], batch_body[length_at + 2 : position_next]
        position = position_next
