"""Messages read from the tier, kept in memory for those who read on."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from headrace_broker.tiered.container.stored_queue import StoredQueue
    from headrace_protocol.columns import Array, RecordColumns

# Of all blocks together. Requests run again after their read, so this has room for many blocks of
# the largest size.
BLOCKS_BYTES_MAX: Final = 64 << 20
BLOCK_BYTES_MAX: Final = BLOCKS_BYTES_MAX // 16
_WINDOWS_MAX: Final = 4096
# Unit, position, size and queue offset of a message.
_UNIT_BYTES: Final = 44


# A queue, and the tags codes of the messages that are read of it; None for all.
Stream = tuple["StoredQueue", frozenset[int] | None]


class ReadBlock(NamedTuple):
    """The messages of a stream in a range of queue offsets.

    asked, end: the range, without ``end``. The tier has no other message of the stream in it.
    offsets: queue offset of each message. units: with places in the tier's log.
    """

    asked: int
    end: int
    offsets: Array
    units: Array
    records: RecordColumns


class ReadBlocks:
    """The blocks by stream, for all threads; the one that was used longest ago goes first."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._blocks: OrderedDict[tuple[Stream, int], tuple[ReadBlock, float]] = OrderedDict()
        self._asked: dict[Stream, list[int]] = {}
        self.byte_count = self.message_count = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, stream: Stream, queue_offset: int, now_s: float) -> ReadBlock | None:
        """The block whose range has a queue offset."""
        with self._lock:
            asked = self._asked.get(stream)
            number = bisect_right(asked, queue_offset) if asked else 0
            if not asked or not number:
                return None
            key = stream, asked[number - 1]
            block, _ = self._blocks[key]
            if queue_offset >= block.end:
                return None
            self._blocks[key] = block, now_s
            self._blocks.move_to_end(key)
            return block

    def put(self, stream: Stream, block: ReadBlock, now_s: float) -> None:
        """Keep a block, and drop others if there is too much."""
        with self._lock:
            key = stream, block.asked
            if key in self._blocks:
                self._drop(key)
            self._blocks[key] = block, now_s
            insort(self._asked.setdefault(stream, []), block.asked)
            self.byte_count += block_bytes(block)
            self.message_count += len(block.units)
            while self.byte_count > BLOCKS_BYTES_MAX and len(self._blocks) > 1:
                self._drop(next(iter(self._blocks)))

    def expire(self, before_s: float) -> None:
        """Drop the blocks that were last used before a time."""
        with self._lock:
            while self._blocks:
                key = next(iter(self._blocks))
                if self._blocks[key][1] >= before_s:
                    return
                self._drop(key)

    def _drop(self, key: tuple[Stream, int]) -> None:
        stream, at = key
        block, _ = self._blocks.pop(key)
        self.byte_count -= block_bytes(block)
        self.message_count -= len(block.units)
        asked = self._asked[stream]
        asked.remove(at)
        if not asked:
            del self._asked[stream]


def block_bytes(block: ReadBlock) -> int:
    """Memory of a block."""
    return len(block.records.data) + _UNIT_BYTES * len(block.units)


class Windows:
    """How much to read at once: twice as much as before for a reader that continues there."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._counts: OrderedDict[tuple[Stream, int], int] = OrderedDict()

    def count(self, stream: Stream, queue_offset: int, count_asked: int) -> int:
        """Messages to read from a queue offset on."""
        count = self._counts.pop((stream, queue_offset), 0)
        return max(count, min(count_asked, self._count_max))

    def note(self, stream: Stream, end: int, count: int) -> None:
        """Note that ``count`` messages were asked for, and read up to ``end``."""
        self._counts[stream, end] = min(2 * count, self._count_max)
        if len(self._counts) > _WINDOWS_MAX:
            self._counts.popitem(last=False)
