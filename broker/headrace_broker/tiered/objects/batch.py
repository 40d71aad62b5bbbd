"""One object of the store: parts of queues, their keys, and a directory of both.

``parts | key items | directory | trailer``. A part is ``units | store times | records``.
Source: docs/tier-format.md.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from headrace_protocol.tier.driver import Failed, Failure, FailureKind, expect, returns_failure
from headrace_protocol.tier.rows import (
    FORMAT,
    ObjectRow,
    Part,
    Reference,
    decode,
    encode,
    reference,
)

if TYPE_CHECKING:
    from headrace_protocol.columns import Array
    from headrace_protocol.tier.driver import Buffer, Driver

# Key items: the hash of a key, and the record that has it, by part and number in the part.
KEY_ITEM: Final = np.dtype([("key_hash", ">i4"), ("part", ">u4"), ("record", ">u4")])
_TRAILER: Final = struct.Struct(">IIII")  # magic, format, bytes and CRC-32 of the directory
_MAGIC: Final = 0x48545431


class Content(NamedTuple):
    """A part to write. units, times: columns of the records. keys: hash and record number.

    offsets in ``units`` continue the queue's log at ``log_base``.
    """

    topic: str
    queue_id: int
    first: int
    log_base: int
    units: Array
    times: Array
    records: list[Buffer]
    keys: Array


class Batch(NamedTuple):
    """An object to put. directory: what a manifest says to have it read."""

    data: bytes
    row: ObjectRow
    directory: Reference


def build(name: str, contents: list[Content], level: int = 0, run: str = "") -> Batch:
    """An object of these parts; see ``ObjectRow``."""
    # Joined once: bytes that grow are copied again and again.
    pieces: list[Buffer] = []
    position = 0
    parts: dict[str, list[Part]] = {}
    keys = []
    for number, content in enumerate(contents):
        count, log_bytes = len(content.units), sum(map(len, content.records))
        pieces += [content.units.tobytes(), content.times.astype(">i8").tobytes()]
        pieces += content.records
        part = Part(
            number,
            content.queue_id,
            content.first,
            count,
            content.log_base,
            log_bytes,
            int(content.times.min()),
            int(content.times.max()),
            position,
        )
        position = part.stop
        parts.setdefault(content.topic, []).append(part)
        keys.append(content.keys)
        content.keys["part"] = number
    items = joined(keys, KEY_ITEM)
    items = items[np.lexsort((items["record"], items["part"], items["key_hash"]))]
    row = ObjectRow(name, level, run or name, position, len(items), parts)
    directory = encode(row)
    named = reference(name, position + items.nbytes, directory)
    trailer = _TRAILER.pack(_MAGIC, FORMAT, len(directory), named.crc)
    return Batch(b"".join([*pieces, items.tobytes(), directory, trailer]), row, named)


def joined(columns: list[Array], kind: np.dtype[Any]) -> Array:
    """Columns as one, in the byte order of the format, which ``np.concatenate`` does not keep."""
    return np.concatenate(columns).astype(kind, copy=False)


def object_bytes_min(row: ObjectRow) -> int:
    """The least size of an object, since its directory follows the parts and keys."""
    stops = [part.stop for parts in row.parts.values() for part in parts]
    return max([row.keys_at + row.key_count * KEY_ITEM.itemsize, *stops]) + _TRAILER.size


@returns_failure
def read_directory(driver: Driver, path: str) -> ObjectRow:
    """The directory of an object that no manifest names. Fails with DAMAGED and as a read."""
    size = expect(driver.size(path))
    found = expect(driver.read(path, [(max(size - _TRAILER.size, 0), size)]))
    magic, version, byte_count, crc = (
        _TRAILER.unpack(found[0]) if len(found[0]) == _TRAILER.size else (0, 0, 0, 0)
    )
    stop = size - _TRAILER.size
    if magic != _MAGIC or version != FORMAT or byte_count > stop:
        reason = "does not end as an object of the tier does"
        raise Failed(Failure(FailureKind.DAMAGED, path, reason))
    named = Reference(path, stop - byte_count, stop, crc)
    (data,) = expect(driver.read(path, [(named.start, named.stop)]))
    return expect(decode(data, ObjectRow, path, named))
