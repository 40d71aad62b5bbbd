"""Blocks of messages, kept in memory for those who are about to read them."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from itertools import islice
from math import inf
from threading import Lock
from typing import TYPE_CHECKING, Final

from headrace_broker.cold.cursors import ReadCursors

if TYPE_CHECKING:
    from headrace_broker.cold.queue import Block, Stream

# The block to drop is chosen among so many of those that were used longest ago.
_CANDIDATES: Final = 64
_JUST_FETCHED_S: Final = 1.0
# A reader that pauses finds its window after so many times the life of a block.
_CURSOR_LIVES: Final = 4


class ReadBlocks:
    """The blocks by stream, and their readers, for all threads.

    access_count, hit_count: blocks that were found, and those that had been found before.

    A block goes when nobody is expected to read on in it: each reader is past its end, or would
    arrive after the block has expired. If there are too many, that one goes which will be read
    last. The window of a reader, the messages to read for it at once, grows by what it asks for
    with each read, and is halved when a block expires that it has not read out.
    """

    def __init__(self, expire_s: float, window_max: int, bytes_max: int) -> None:
        """expire_s: how long a block stays that nobody uses. window_max: in messages.

        bytes_max: of all blocks together.
        """
        self.bytes_max = bytes_max
        self._expire_s = expire_s
        self._window_max = window_max
        self._lock = Lock()
        # Those that were used longest ago first.
        self._blocks: OrderedDict[Block, None] = OrderedDict()
        # Of each stream the beginnings of its blocks, and the blocks.
        self._rows: dict[Stream, tuple[list[int], list[Block]]] = {}
        self._cursors = ReadCursors()
        self.byte_count = self.message_count = self.access_count = self.hit_count = 0

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def block_bytes_max(self) -> int:
        """Most bytes to read for a block."""
        return self.bytes_max // 16

    def has_room(self, more_bytes: int) -> bool:
        """True if a block fits without another one being dropped."""
        return self.byte_count + more_bytes <= self.bytes_max

    def find(self, stream: Stream, queue_offset: int, now_s: float) -> Block | None:
        """The block whose range has a queue offset, of the stream or of all tags."""
        with self._lock:
            block = self._before(stream, queue_offset + 1)
            if block is None or queue_offset >= block.end:
                if stream[1] is None:
                    return None
                block = self._before((stream[0], None), queue_offset + 1)
                if block is None or queue_offset >= block.end:
                    return None
            self.access_count += 1
            self.hit_count += block.was_read
            block.was_read, block.used_s = True, now_s
            self._blocks.move_to_end(block)
            return block

    def has(self, stream: Stream, queue_offset: int) -> bool:
        """True if a block of the stream has a queue offset."""
        with self._lock:
            block = self._before(stream, queue_offset + 1)
            return block is not None and queue_offset < block.end

    def _before(self, stream: Stream, queue_offset: int) -> Block | None:
        """The last block of a stream that begins before a queue offset."""
        row = self._rows.get(stream)
        number = bisect_left(row[0], queue_offset) if row else 0
        return row[1][number - 1] if row and number else None

    def window(self, stream: Stream, queue_offset: int) -> int:
        """Messages to read at once for a reader that continues at a queue offset; 0 without one."""
        with self._lock:
            cursor = self._cursors.find(stream, queue_offset)
            return cursor.window if cursor else 0

    def expect(self, stream: Stream, queue_offset: int, count: int, now_s: float) -> None:
        """Note that so many readers are about to read from a queue offset on."""
        with self._lock:
            self._cursors.expect(stream, queue_offset, count, now_s)

    def move(self, stream: Stream, begin: int, end: int, now_s: float) -> None:
        """Note that the reader at ``begin`` has read to ``end`` since, if none is there."""
        with self._lock:
            cursor = self._cursors.find(stream, begin)
            if cursor is not None and self._cursors.find(stream, end) is None:
                cursor.window = min(cursor.window + end - begin, self._window_max)
                self._cursors.move(stream, begin, end, now_s)

    def note_read(
        self, stream: Stream, begin: int, end: int, count_asked: int, now_s: float
    ) -> None:
        """Note that a reader has got a range; drop its block if nobody will read on in it."""
        with self._lock:
            cursor = self._cursors.move(stream, begin, end, now_s)
            grown = (cursor.window or count_asked) + count_asked
            cursor.window = min(grown, self._window_max)
            queue, tags = stream
            for source in (stream,) if tags is None else (stream, (queue, None)):
                block = self._before(source, end)
                if block is not None and block.end <= end and self._wait_s(block, now_s) == inf:
                    self._drop(block)

    def put(self, stream: Stream, block: Block, now_s: float) -> None:
        """Keep a block, and drop others if there is too much."""
        with self._lock:
            same = self._before(stream, block.asked + 1)
            if same is not None and same.asked == block.asked:
                self._drop(same)
            block.stream, block.used_s = stream, now_s
            self._blocks[block] = None
            asked, blocks = self._rows.setdefault(stream, ([], []))
            number = bisect_left(asked, block.asked)
            asked.insert(number, block.asked)
            blocks.insert(number, block)
            self.byte_count += block.held_bytes
            self.message_count += block.count
            while self.byte_count > self.bytes_max and len(self._blocks) > 1:
                others = islice(self._blocks, min(len(self._blocks) - 1, _CANDIDATES))
                self._drop(max(others, key=lambda other: self._wait_s(other, now_s)))

    def expire(self, now_s: float) -> None:
        """Drop the blocks that were not used for long, or will not be used in time."""
        with self._lock:
            blocks = list(self._blocks)
        for block in blocks:
            with self._lock:
                if block in self._blocks:
                    self._expire(block, now_s)
        with self._lock:
            self._cursors.forget(now_s - _CURSOR_LIVES * self._expire_s)

    def _expire(self, block: Block, now_s: float) -> None:
        if block.is_used:
            block.is_used, block.used_s = False, now_s
        unused_s = now_s - block.used_s
        if unused_s >= self._expire_s:
            self._halve_windows(block)
            self._drop(block)
        # One that was just fetched may wait for the request that asked for it.
        elif unused_s >= _JUST_FETCHED_S and self._wait_s(block, now_s) == inf:
            self._drop(block)

    def _halve_windows(self, block: Block) -> None:
        """Read less at once for those who did not read a block in time."""
        for cursor in self._cursors.of(block.stream):
            if block.asked <= cursor.position < block.end:
                cursor.window //= 2

    def _wait_s(self, block: Block, now_s: float) -> float:
        """Seconds until somebody reads on in a block; infinite if nobody does before it expires."""
        left_s = self._expire_s - (now_s - block.used_s)
        waits = [
            cursor.wait_s(block.asked, now_s)
            for cursor in self._cursors.of(block.stream)
            if cursor.position < block.end and now_s - cursor.seen_s < self._expire_s
        ]
        wait_s = min(waits, default=inf)
        return wait_s if wait_s <= left_s else inf

    def _drop(self, block: Block) -> None:
        del self._blocks[block]
        self.byte_count -= block.held_bytes
        self.message_count -= block.count
        asked, blocks = self._rows[block.stream]
        number = bisect_left(asked, block.asked)
        del asked[number], blocks[number]
        if not asked:
            del self._rows[block.stream]
