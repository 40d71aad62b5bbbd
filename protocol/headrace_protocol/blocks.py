"""Encode many records at once, as the body of a BULK_SEND.

Work per record (slices, CRC) is done in C; everything else takes a few numpy calls for all records.
Source: docs/protocol.md "Bulk", docs/store-format.md "record".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headrace_protocol.columns import HEAD, SIZE_DTYPE, checksums
from headrace_protocol.message import MAGIC_V1, PROPERTIES_BYTES_MAX, topic_field

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from headrace_protocol.columns import Array, Buffer

# Up to this size copying equally long bodies twice, as rows, is faster than copying each once.
_ROW_BYTES_MAX = 512


class EncodedBlock(NamedTuple):
    """Records ready for BULK_SEND.

    record_count: number of records. body: the request's body: the sizes, then the records.
    """

    record_count: int
    body: bytes | memoryview

    @property
    def sizes(self) -> Array:
        """Bytes of each record, big-endian int32."""
        return np.frombuffer(self.body, SIZE_DTYPE, self.record_count)

    @property
    def data(self) -> memoryview:
        """The records back to back."""
        return memoryview(self.body)[self.record_count * SIZE_DTYPE.itemsize :]


def encode_records(
    topic: str,
    bodies: Sequence[Buffer],
    properties: Sequence[bytes] | bytes,
    *,
    born_timestamp: npt.ArrayLike,
    born_host: bytes,
    sys_flag: npt.ArrayLike = 0,
) -> EncodedBlock:
    """Encode whole records, except for the fields that only the broker knows.

    topic: at most 127 bytes.
    bodies: one or more, as stored: compressed if their sys_flag says so.
    properties: one per body, or the same for all, as ``message.encode_properties`` returns them.
    born_timestamp, sys_flag: one value for all, or one per body.
    born_host: 8 bytes, as ``message_ids.encode_host`` returns for IPv4.

    Raises ValueError if a part does not fit its field.
    """
    name = _topic_field(topic)
    count = len(bodies)
    body_bytes = _one_or_each(list(map(len, bodies)))
    tails: list[bytes] | bytes
    if isinstance(properties, bytes):
        tails = _tail(name, properties)
        tail_bytes: Array | int = len(tails)
    else:
        if len(properties) != count:
            raise ValueError(f"{len(properties)} properties for {count} bodies: give one for each")
        tails = [_tail(name, raw) for raw in properties]
        tail_bytes = np.fromiter(map(len, tails), np.int64, count)
    sizes = body_bytes + tail_bytes + HEAD.itemsize
    heads = _heads(sizes, checksums(bodies), body_bytes, born_host)
    heads["sys_flag"], heads["born_timestamp"] = sys_flag, born_timestamp
    if not isinstance(tails, bytes):
        return _block_of_parts(heads, bodies, tails)
    if isinstance(body_bytes, int) and body_bytes <= _ROW_BYTES_MAX:
        values = np.frombuffer(b"".join(bodies), np.uint8).reshape(count, body_bytes)
        return _block_of_rows(heads, values, tails)
    return _block_of_pairs(heads, bodies, tails)


def _one_or_each(lengths: list[int]) -> Array | int:
    """The common length if all are equal, else all lengths."""
    count = len(lengths)
    if count and lengths.count(lengths[0]) == count:
        return lengths[0]
    return np.fromiter(lengths, np.int64, count)


def _block_of_parts(heads: Array, bodies: Sequence[Buffer], tails: list[bytes]) -> EncodedBlock:
    parts: list[Buffer] = [b""] * (3 * len(heads) + 1)
    parts[0] = heads["size"].tobytes()
    parts[1::3], parts[2::3], parts[3::3] = _bytes_of_each(heads), bodies, tails
    return EncodedBlock(len(heads), b"".join(parts))


def _block_of_pairs(heads: Array, bodies: Sequence[Buffer], tail: bytes) -> EncodedBlock:
    """A block of records with equal tails: the bytes between two bodies form one part."""
    count, tail_bytes = len(heads), len(tail)
    between = np.empty((count, tail_bytes + HEAD.itemsize), np.uint8)
    between[:, :tail_bytes] = np.frombuffer(tail, np.uint8)
    between[:, tail_bytes:] = heads.view(np.uint8).reshape(count, HEAD.itemsize)
    parts: list[Buffer] = [b""] * (2 * count + 1)
    parts[0:-1:2], parts[1::2], parts[-1] = _bytes_of_each(between), bodies, tail
    parts[0] = heads["size"].tobytes() + heads[0].tobytes()
    return EncodedBlock(count, b"".join(parts))


def _block_of_rows(heads: Array, values: Array, tail: bytes) -> EncodedBlock:
    """A block of records with equal tails and bodies of one size."""
    count, body_bytes = values.shape
    body_end = HEAD.itemsize + body_bytes
    size, sizes_bytes = body_end + len(tail), count * SIZE_DTYPE.itemsize
    body = np.empty(sizes_bytes + count * size, np.uint8)
    body[:sizes_bytes].view(SIZE_DTYPE)[:] = size
    records = body[sizes_bytes:].reshape(count, size)
    records[:, : HEAD.itemsize] = heads.view(np.uint8).reshape(count, HEAD.itemsize)
    records[:, HEAD.itemsize : body_end] = values
    records[:, body_end:] = np.frombuffer(tail, np.uint8)
    return EncodedBlock(count, body.data)


def encode_uniform(
    topic: str,
    values: Array,
    properties: bytes,
    *,
    born_timestamp: npt.ArrayLike,
    born_host: bytes,
) -> EncodedBlock:
    """As ``encode_records`` for bodies of one size: the rows of ``values``, uint8 (n, bytes).

    Cost: half of ``encode_records``.
    """
    count, body_bytes = values.shape
    tail = _tail(_topic_field(topic), properties)
    size = HEAD.itemsize + body_bytes + len(tail)
    bodies = _bytes_of_each(np.ascontiguousarray(values)) if body_bytes else [b""] * count
    heads = _heads(size, checksums(bodies), body_bytes, born_host)
    heads["born_timestamp"] = born_timestamp
    return _block_of_rows(heads, values, tail)


def _topic_field(topic: str) -> bytes:
    magic, field = topic_field(topic)
    if magic != MAGIC_V1:
        raise ValueError(f"topic {topic} has more than 127 bytes: send messages to it one by one")
    return field


def _tail(name: bytes, properties: bytes) -> bytes:
    """The part of a record after its body."""
    if len(properties) > PROPERTIES_BYTES_MAX:
        raise ValueError(f"properties have {len(properties)} bytes, more than 32767")
    return name + len(properties).to_bytes(2, "big") + properties


def _heads(
    sizes: Array | int, body_crcs: Array, body_bytes: Array | int, born_host: bytes
) -> Array:
    if not len(body_crcs):
        raise ValueError("no bodies: a block has at least one record")
    if len(born_host) != 8:
        raise ValueError(f"born host of {len(born_host)} bytes: a block has room for IPv4 only")
    heads = np.zeros(len(body_crcs), HEAD)
    heads["size"], heads["magic"] = sizes, MAGIC_V1
    heads["body_crc"], heads["body_bytes"] = body_crcs, body_bytes
    heads["born_host"] = np.void(born_host)
    return heads


def _bytes_of_each(rows: Array) -> list[bytes]:
    """The bytes of each row of a contiguous array."""
    width = rows.nbytes // len(rows) if len(rows) else 1
    copies: list[bytes] = rows.view(f"V{width}").ravel().tolist()
    return copies
