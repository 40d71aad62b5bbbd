"""Bodies of GET_BY_KEY: the keys of the request, and the newest record of each in the answer.

Source: docs/protocol.md "Get by key".
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace_protocol.bounds import ITEMS_MAX, OutOfBounds, check_items
from headrace_protocol.errors import CorruptRecord
from headrace_protocol.message import PROPERTIES_BYTES_MAX, RECORD_BYTES_MIN

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace_protocol.frame import Buffer

ANY_QUEUE: Final = -1
NOTHING_SEEN: Final = -1
# Records of one answer; the rest of a frame is left for its header and for one large record.
ANSWER_BYTES_MAX: Final = 8 * 1024 * 1024

_KEY_HEAD = struct.Struct(">iiq")  # queue id, bytes of the key, seen offset


class WantedKey(NamedTuple):
    """A key to look up.

    key: the whole text of KEYS, in UTF-8.
    queue_id: the key's queue; ANY_QUEUE looks in all queues of the topic at this broker.
    seen_offset: queue offset of a message that the result must take into account, such as the
        asker's own last write; needs a ``queue_id``.
    """

    key: bytes
    queue_id: int = ANY_QUEUE
    seen_offset: int = NOTHING_SEEN


class NoRecord(IntEnum):
    """The size that the answer states for a key without a record.

    NEVER: the topic has no message with the key. NOT_YET: the queue has not reached the offset
    that must be seen.
    """

    NEVER = 0
    NOT_YET = -1


# The newest record of a key; a delete marker, whose body is empty, tells when it was deleted.
Found = bytes | memoryview | NoRecord


def encode_keys(keys: Sequence[WantedKey]) -> bytes:
    """The body of a request with ``len(keys)`` keys."""
    heads = [_KEY_HEAD.pack(each.queue_id, len(each.key), each.seen_offset) for each in keys]
    return b"".join(heads + [each.key for each in keys])


def decode_keys(count: int, body: Buffer) -> list[WantedKey]:
    """The keys in the body of a request. Raises OutOfBounds, which names the first invalid key."""
    check_items("keys", range(count), ITEMS_MAX)
    key_at = count * _KEY_HEAD.size
    data = bytes(body)
    if key_at > len(data):
        raise OutOfBounds(f"a body of {len(data)} bytes cannot hold {count} keys")
    keys = []
    for index, head in enumerate(_KEY_HEAD.iter_unpack(data[:key_at])):
        queue_id, key_bytes, seen_offset = head
        _check_key(index, queue_id, key_bytes, seen_offset)
        keys.append(WantedKey(data[key_at : key_at + key_bytes], queue_id, seen_offset))
        key_at += key_bytes
    if key_at != len(data):
        raise OutOfBounds(f"{count} keys end at byte {key_at} of a body of {len(data)} bytes")
    return keys


def _check_key(index: int, queue_id: int, key_bytes: int, seen_offset: int) -> None:
    if not 0 < key_bytes <= PROPERTIES_BYTES_MAX:
        raise OutOfBounds(f"key {index} has {key_bytes} bytes, expected 1 to 32767")
    if queue_id < ANY_QUEUE or seen_offset < NOTHING_SEEN:
        raise OutOfBounds(
            f"key {index}: neither queue {queue_id} nor offset {seen_offset} is valid"
        )
    if queue_id == ANY_QUEUE and seen_offset != NOTHING_SEEN:
        raise OutOfBounds(f"key {index}: an offset to be seen needs a queue; send its queueId")


def encode_found(found: Sequence[Found]) -> tuple[Buffer, ...]:
    """The buffers of an answer's body: the sizes, then the records."""
    records = [each for each in found if not isinstance(each, NoRecord)]
    sizes = [each if isinstance(each, NoRecord) else len(each) for each in found]
    return (struct.pack(f">{len(sizes)}i", *sizes), *records)


def decode_found(count: int, body: Buffer) -> list[Found]:
    """The result of each key in an answer. Raises CorruptRecord; records are not decoded."""
    return list(_found(count, memoryview(body)))


def _found(count: int, body: memoryview) -> Iterator[Found]:
    end = count * 4
    if end > len(body):
        raise CorruptRecord(0, f"a body of {len(body)} bytes cannot hold {count} results")
    for size in struct.unpack_from(f">{count}i", body):
        if size in (NoRecord.NEVER, NoRecord.NOT_YET):
            yield NoRecord(size)
            continue
        start, end = end, end + size
        if size < RECORD_BYTES_MIN or end > len(body):
            raise CorruptRecord(start, f"size {size} in a body of {len(body)} bytes")
        yield body[start:end]
    if end != len(body):
        raise CorruptRecord(end, f"{len(body) - end} bytes follow the last record")
