"""A queue that is not in the local log, and what is fetched of it at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np

from headrace_broker.store.store_source import GetResult, GetStatus
from headrace_protocol.choose import adjoining, choose
from headrace_protocol.columns import QUEUE_OFFSET_DTYPE

if TYPE_CHECKING:
    from headrace_protocol.columns import Array, RecordColumns
    from headrace_protocol.message import Buffer
    from headrace_protocol.tier.driver import Failure

# Unit, position, size and queue offset of a message.
_UNIT_BYTES: Final = 44


class Wanted(NamedTuple):
    """Messages to read. tags: wanted tags codes; None for all."""

    queue_offset: int
    count_max: int
    bytes_max: int
    tags: frozenset[int] | None


class ReadBlock(NamedTuple):
    """The messages of a stream in a range of queue offsets.

    asked, end: the range, without ``end``. The queue has no other message of the stream in it.
    offsets: queue offset of each message. units: with places in the queue's own log.
    """

    asked: int
    end: int
    offsets: Array
    units: Array
    records: RecordColumns

    @property
    def held_bytes(self) -> int:
        """Memory of the block."""
        return len(self.records.data) + _UNIT_BYTES * len(self.units)

    def get(self, wanted: Wanted, shown: tuple[int, int], *, is_bulk: bool) -> GetResult:
        """Messages of the block that fit, at least one if any matches; see ``StoreSource``.

        shown: the range of the queue for the answer.
        """
        begin = int(np.searchsorted(self.offsets, wanted.queue_offset))
        units, offsets = self.units[begin:], self.offsets[begin:]
        where, _, seen = choose(units, wanted.tags, wanted.count_max, wanted.bytes_max)
        next_offset = int(offsets[seen]) if seen < len(offsets) else self.end
        units, offsets = units[where], offsets[where]
        count = len(offsets)
        if not count:
            return GetResult(GetStatus.NO_MATCHED_MESSAGE, [], 0, 0, next_offset, *shown)
        front: list[Buffer] = []
        has_gaps = next_offset - int(offsets[0]) != count
        if is_bulk:
            front.append(units.view(np.uint8).data)
            if has_gaps:
                front.append(offsets.astype(QUEUE_OFFSET_DTYPE).tobytes())
        data, sizes = memoryview(self.records.data), self.records.size[begin:][where]
        pieces = adjoining(self.records.start[begin:][where], sizes)
        return GetResult(
            GetStatus.FOUND,
            [*front, *(data[start:end] for start, end in pieces)],
            count,
            int(sizes.sum()),
            next_offset,
            *shown,
            has_queue_offsets=is_bulk and has_gaps,
        )


class ColdQueue(Protocol):
    """A queue in the files or objects of a tier, or on another broker. path: for messages."""

    path: str

    @property
    def min_offset(self) -> int:
        """Queue offset of the first message."""

    @property
    def commit_offset(self) -> int:
        """One past the last queue offset."""

    def fetch(self, wanted: Wanted, /, *, check_bodies: bool) -> ReadBlock | Failure:
        """Messages from an offset on, at least one if any is wanted and there. May block."""


# A queue, and the tags codes of the messages that are read of it; None for all.
Stream = tuple[ColdQueue, frozenset[int] | None]
