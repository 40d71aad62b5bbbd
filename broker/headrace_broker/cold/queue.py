"""Messages of a queue that is not in the local log, in memory, and how much of it is read."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace_broker.store.store_source import GetResult, GetStatus
from headrace_protocol.choose import adjoining, choose
from headrace_protocol.columns import QUEUE_OFFSET_DTYPE

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from headrace_protocol.columns import Array, RecordColumns
    from headrace_protocol.message import Buffer

# Unit, queue offset twice, and where the record is.
_UNIT_BYTES: Final = 44


class Wanted(NamedTuple):
    """Messages to read. tags: wanted tags codes; None for all."""

    queue_offset: int
    count_max: int
    bytes_max: int
    tags: frozenset[int] | None


class Block:
    """The messages of a stream in a range of queue offsets, in memory.

    asked, end: the range, without ``end``. The queue has no other message of the stream in it.
    count, held_bytes: its messages, and their memory. fetch_next: called when the first reader has
    begun to read it, with the queue offset where the reader continues; fetches what is behind it.
    stream, used_s: in ``ReadBlocks``. is_used: set by those who read it without a look-up.
    was_read: whether a reader has found it.
    """

    __slots__ = (
        "__weakref__",
        "asked",
        "count",
        "end",
        "fetch_next",
        "held_bytes",
        "is_used",
        "stream",
        "used_s",
        "was_read",
    )

    stream: Stream
    used_s: float

    def __init__(
        self,
        asked: int,
        end: int,
        count: int,
        held_bytes: int,
        fetch_next: Callable[[int], None] | None = None,
    ) -> None:
        self.asked = asked
        self.end = end
        self.count = count
        self.held_bytes = held_bytes
        self.fetch_next = fetch_next
        self.was_read = self.is_used = False

    @abstractmethod
    def get(self, wanted: Wanted, shown: tuple[int, int], *, is_bulk: bool) -> GetResult | None:
        """Messages of the block that fit, at least one if any matches; see ``StoreSource``.

        None if they must be fetched once more. shown: the range of the queue for the answer.
        """


class BulkBlock(Block):
    """The answer to a bulk pull, which another one gets as a whole."""

    __slots__ = ("_result",)

    def __init__(
        self, asked: int, result: GetResult, fetch_next: Callable[[int], None] | None
    ) -> None:
        held_bytes = sum(map(len, result.buffers))
        super().__init__(asked, result.next_offset, result.count, held_bytes, fetch_next)
        self._result = result

    def get(self, wanted: Wanted, _shown: tuple[int, int], *, is_bulk: bool) -> GetResult | None:
        """See ``Block``."""
        result = self._result
        is_small = result.count <= wanted.count_max and result.body_bytes <= wanted.bytes_max
        is_whole = is_bulk and wanted.queue_offset == self.asked
        return result if is_whole and (is_small or result.count == 1) else None


class ReadBlock(Block):
    """Records back to back, from which reads of any size are cut.

    offsets: queue offset of each message. units: with addresses in the queue's own log.
    """

    __slots__ = ("_data", "_numbers", "_starts", "offsets", "units")

    def __init__(
        self,
        asked: int,
        end: int,
        offsets: Array,
        units: Array,
        records: RecordColumns,
        fetch_next: Callable[[int], None] | None = None,
    ) -> None:
        self.offsets = offsets
        self.units = units
        # Arrays whose single values come faster than those of numpy. starts: also of the end.
        self._numbers = array("q", offsets.tobytes())
        starts = np.zeros(len(units) + 1, np.int64)
        np.cumsum(records.size, out=starts[1:])
        self._starts = array("q", starts.tobytes())
        self._data = _gathered(records, self._starts[-1])
        held_bytes = len(self._data) + _UNIT_BYTES * len(units)
        super().__init__(asked, end, len(units), held_bytes, fetch_next)

    def get(self, wanted: Wanted, shown: tuple[int, int], *, is_bulk: bool) -> GetResult:
        """See ``Block``."""
        numbers = self._numbers
        begin = bisect_left(numbers, wanted.queue_offset)
        where: slice | Array
        if wanted.tags is None:
            starts, seen = self._starts, min(begin + wanted.count_max, len(numbers))
            start, bytes_max = starts[begin], wanted.bytes_max
            if starts[seen] - start > bytes_max:
                seen = max(bisect_right(starts, start + bytes_max, begin, seen) - 1, begin + 1)
            where, count, byte_count = slice(begin, seen), seen - begin, starts[seen] - start
            records = [self._data[start : start + byte_count]]
        else:
            where, count, seen, records = self._choose(begin, wanted)
            byte_count = sum(map(len, records))
        next_offset = numbers[seen] if seen < len(numbers) else self.end
        if not count:
            return GetResult(GetStatus.NO_MATCHED_MESSAGE, [], 0, 0, next_offset, *shown)
        if not is_bulk:
            return GetResult(GetStatus.FOUND, records, count, byte_count, next_offset, *shown)
        offsets = self.offsets[where]
        front: list[Buffer] = [self.units[where].view(np.uint8).data]
        has_gaps = next_offset - int(offsets[0]) != count
        if has_gaps:
            front.append(offsets.astype(QUEUE_OFFSET_DTYPE).tobytes())
        return GetResult(
            GetStatus.FOUND,
            [*front, *records],
            count,
            byte_count,
            next_offset,
            *shown,
            has_queue_offsets=has_gaps,
        )

    def _choose(self, begin: int, wanted: Wanted) -> tuple[Array, int, int, list[memoryview]]:
        """The indexes of messages that fit, their number, the index behind them, the records."""
        units = self.units[begin:]
        where, _, seen = choose(units, wanted.tags, wanted.count_max, wanted.bytes_max)
        chosen = np.arange(begin, len(self.units))[where]
        if not len(chosen):
            return chosen, 0, begin + seen, []
        pieces = adjoining(np.asarray(self._starts)[chosen], self.units["size"][chosen])
        records = [self._data[start:end] for start, end in pieces]
        return chosen, len(chosen), begin + seen, records


def _gathered(records: RecordColumns, byte_count: int) -> memoryview:
    """The bytes of records, without what is between them; a view if there is nothing."""
    data, starts, sizes = memoryview(records.data), records.start, records.size
    first = int(starts[0]) if len(starts) else 0
    if not len(starts) or int(starts[-1] + sizes[-1]) - first == byte_count:
        return data[first : first + byte_count]
    return memoryview(b"".join(data[start:end] for start, end in adjoining(starts, sizes)))


# A queue, and the tags codes of the messages that are read of it; None for all.
Stream = tuple["Hashable", frozenset[int] | None]
