"""Reads of the messages that a POP takes from one queue."""

from __future__ import annotations

import struct
from time import perf_counter
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace_broker.store.log.record_checksum import without_checksum
from headrace_broker.store.store_source import GetStatus
from headrace_protocol.message import PROPERTIES_BYTES_MAX, decode_records, encode_properties
from headrace_protocol.pop.handle import HANDLE_PROPERTY, Handle

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from headrace_broker.pop.targets import PopSource
    from headrace_protocol.frame import Buffer
    from headrace_protocol.message import StoredMessage

# Maximum size of one answer, as in pulls.
BYTES_MAX: Final = 256 * 1024
# Time limit for passing units that a filter rejects.
_SCAN_S: Final = 0.002
_SIZE: Final = struct.Struct(">i")
_OFFSETS: Final = struct.Struct(">qq")
_OFFSETS_AT: Final = 20
# Statuses of a read after which another one may find something.
_CONTINUES: Final = frozenset(
    {
        GetStatus.NO_MATCHED_MESSAGE,
        GetStatus.MESSAGE_WAS_REMOVING,
        GetStatus.OFFSET_TOO_SMALL,
        GetStatus.OFFSET_OVERFLOW_BADLY,
    }
)


class Scan:
    """One attempt to serve a request, which passes messages that its filter rejects for 2 ms.

    now_ms: when it begins. left_s: of the time for reads that find nothing.
    """

    __slots__ = ("left_s", "now_ms")

    def __init__(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self.left_s = _SCAN_S


class Found(NamedTuple):
    """Messages of a queue.

    offsets: of each; empty if nothing was found. physical_offset: of the first in the log.
    next_offset: where to continue. is_at_end: whether there is nothing more, as far as is known.
    """

    buffers: Sequence[Buffer]
    offsets: Sequence[int]
    physical_offset: int
    body_bytes: int
    next_offset: int
    is_at_end: bool


def read(
    source: PopSource,
    first: int,
    count_max: int,
    bytes_max: int,
    tags: frozenset[int] | None,
    scan: Scan,
) -> Found:
    """Messages from an offset on, past those that a filter rejects. Raises NotReady."""
    if first == source.source.known_range()[1]:
        return Found((), (), 0, 0, first, is_at_end=True)
    while scan.left_s > 0:
        began_s = perf_counter()
        result = source.reader.get(first, count_max, bytes_max, tags)
        if result.status is GetStatus.FOUND:
            offsets, physical_offset = offsets_of(result.buffers)
            return Found(
                result.buffers,
                offsets,
                physical_offset,
                result.body_bytes,
                result.next_offset,
                is_at_end=False,
            )
        scan.left_s -= perf_counter() - began_s
        may_continue = result.status in _CONTINUES and result.next_offset != first
        first = result.next_offset
        if not may_continue or first >= result.max_offset:
            return Found((), (), 0, 0, first, is_at_end=True)
    return Found((), (), 0, 0, first, is_at_end=False)


def offsets_of(buffers: Iterable[Buffer]) -> tuple[Sequence[int], int]:
    """The queue offsets of whole records, and the physical offset of the first."""
    offsets, first_physical = [], -1
    for buffer in buffers:
        position, end = 0, len(buffer)
        while position < end:
            queue_offset, physical = _OFFSETS.unpack_from(buffer, position + _OFFSETS_AT)
            if first_physical < 0:
                first_physical = physical
            offsets.append(queue_offset)
            position += _SIZE.unpack_from(buffer, position)[0]
    neighbours = range(offsets[0], offsets[-1] + 1)
    return neighbours if len(neighbours) == len(offsets) else offsets, first_physical


def as_first_sent(buffers: Sequence[Buffer], topic: str, handle: Handle) -> list[bytes]:
    """Records of a retry topic as their group gets them: of the topic that they were sent to.

    Each has its handle, since it does not name the queue any more that it is in.
    """
    return [
        _renamed(message, topic, handle._replace(queue_offset=message.queue_offset))
        for message in decode_records(b"".join(buffers))
    ]


def _renamed(message: StoredMessage, topic: str, handle: Handle) -> bytes:
    mark = encode_properties({HANDLE_PROPERTY: handle.text()})
    properties = without_checksum(message.raw_properties) + mark
    # One without room for its handle names its retry topic, by which clients find it too.
    if len(properties) <= PROPERTIES_BYTES_MAX:
        message.topic, message.raw_properties = topic, properties
    return message.encode()
