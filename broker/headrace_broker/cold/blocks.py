"""Blocks of messages, kept in memory for those who are about to read them."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from itertools import islice
from threading import Lock
from typing import TYPE_CHECKING, Final

from headrace_broker.cold.cursors import ReadCursors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace_broker.cold.queue import ReadBlock, Stream

# Of all blocks together. Requests run again after their read, so this has room for many blocks of
# the largest size.
BLOCKS_BYTES_MAX: Final = 64 << 20
BLOCK_BYTES_MAX: Final = BLOCKS_BYTES_MAX // 16
# The block to drop is chosen among so many of those that were used longest ago.
_CANDIDATES: Final = 64
_JUST_FETCHED_S: Final = 1.0
# A reader that pauses finds its window after so many times the life of a block.
_CURSOR_LIVES: Final = 4


_Key = tuple["Stream", int]


class ReadBlocks:
    """The blocks by stream, and their readers, for all threads.

    A block goes when nobody is expected to read on in it: each reader is past its end, or would
    arrive after the block has expired. If there are too many, that one goes which will be read
    last. The window of a reader, the messages to read for it at once, grows by what it asks for
    with each read, and is halved when a block expires that it has not read out.
    """

    def __init__(self, expire_s: float, window_max: int) -> None:
        """expire_s: how long a block stays that nobody uses. window_max: in messages."""
        self._expire_s = expire_s
        self._window_max = window_max
        self._lock = Lock()
        self._blocks: OrderedDict[_Key, tuple[ReadBlock, float]] = OrderedDict()
        self._asked: dict[Stream, list[int]] = {}
        self._cursors = ReadCursors()
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

    def window(self, stream: Stream, queue_offset: int) -> int:
        """Messages to read at once for a reader that continues at a queue offset; 0 without one."""
        with self._lock:
            cursor = self._cursors.find(stream, queue_offset)
            return cursor.window if cursor else 0

    def note_read(
        self, stream: Stream, begin: int, end: int, count_asked: int, now_s: float
    ) -> None:
        """Note that a reader has got a range; drop its block if nobody will read on in it."""
        with self._lock:
            cursor = self._cursors.move(stream, begin, end, now_s)
            grown = (cursor.window or count_asked) + count_asked
            cursor.window = min(grown, self._window_max)
            for key in self._keys_before(stream, end):
                if self._blocks[key][0].end <= end and self._wait_s(key, now_s) == math.inf:
                    self._drop(key)

    def _keys_before(self, stream: Stream, queue_offset: int) -> Iterator[_Key]:
        """The last block that begins before a queue offset, of each stream that serves this one."""
        queue, tags = stream
        for source in (stream,) if tags is None else (stream, (queue, None)):
            asked = self._asked.get(source, [])
            number = bisect_left(asked, queue_offset)
            if number:
                yield source, asked[number - 1]

    def put(self, stream: Stream, block: ReadBlock, now_s: float) -> None:
        """Keep a block, and drop others if there is too much."""
        with self._lock:
            key = stream, block.asked
            if key in self._blocks:
                self._drop(key)
            self._blocks[key] = block, now_s
            insort(self._asked.setdefault(stream, []), block.asked)
            self.byte_count += block.held_bytes
            self.message_count += len(block.units)
            while self.byte_count > BLOCKS_BYTES_MAX and len(self._blocks) > 1:
                others = islice(self._blocks, min(len(self._blocks) - 1, _CANDIDATES))
                self._drop(max(others, key=lambda other: self._wait_s(other, now_s)))

    def expire(self, now_s: float) -> None:
        """Drop the blocks that were not used for long, or will not be used in time."""
        with self._lock:
            keys = list(self._blocks)
        for key in keys:
            with self._lock:
                if key in self._blocks:
                    self._expire(key, now_s)
        with self._lock:
            self._cursors.forget(now_s - _CURSOR_LIVES * self._expire_s)

    def _expire(self, key: _Key, now_s: float) -> None:
        block, used_s = self._blocks[key]
        unused_s = now_s - used_s
        if unused_s >= self._expire_s:
            self._halve_windows(key[0], block)
            self._drop(key)
        # One that was just fetched may wait for the request that asked for it.
        elif unused_s >= _JUST_FETCHED_S and self._wait_s(key, now_s) == math.inf:
            self._drop(key)

    def _halve_windows(self, stream: Stream, block: ReadBlock) -> None:
        """Read less at once for those who did not read a block in time."""
        for cursor in self._cursors.of(stream):
            if block.asked <= cursor.position < block.end:
                cursor.window //= 2

    def _wait_s(self, key: _Key, now_s: float) -> float:
        """Seconds until somebody reads on in a block; infinite if nobody does before it expires."""
        (stream, asked), (block, used_s) = key, self._blocks[key]
        left_s = self._expire_s - (now_s - used_s)
        waits = [
            cursor.wait_s(asked, now_s)
            for cursor in self._cursors.of(stream)
            if cursor.position < block.end and now_s - cursor.seen_s < self._expire_s
        ]
        wait_s = min(waits, default=math.inf)
        return wait_s if wait_s <= left_s else math.inf

    def _drop(self, key: _Key) -> None:
        stream, at = key
        block, _ = self._blocks.pop(key)
        self.byte_count -= block.held_bytes
        self.message_count -= len(block.units)
        asked = self._asked[stream]
        asked.remove(at)
        if not asked:
            del self._asked[stream]
