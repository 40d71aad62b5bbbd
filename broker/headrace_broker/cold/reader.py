"""Reads of queues that are not in the local log, from what was fetched of them."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace_broker.cold.blocks import ReadBlocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.cold.queue import Block, Stream, Wanted
    from headrace_broker.store.store_source import GetResult

_MEMORY_BYTES: Final = 64 << 20


class ReadAhead(NamedTuple):
    """Settings of reads.

    window_count, window_bytes: most messages and bytes that are read at once. expire_s: how long
    they stay in memory. grows: whether more is read than was asked for. checks_bodies: whether
    their checksums are compared. memory_bytes: of all that is in memory; requests run again after
    their read, so this should have room for many reads of the largest size.
    """

    window_count: int
    window_bytes: int
    expire_s: float
    grows: bool
    checks_bodies: bool
    memory_bytes: int = _MEMORY_BYTES


class ColdReader:
    """Serves what was fetched; how that is done, and for whom, is up to the subclass."""

    def __init__(self, read_ahead: ReadAhead, now_s: Callable[[], float] = monotonic) -> None:
        self.blocks = ReadBlocks(
            read_ahead.expire_s, read_ahead.window_count, read_ahead.memory_bytes
        )
        self._now_s = now_s

    def take(
        self, block: Block, wanted: Wanted, shown: tuple[int, int], now_s: float, *, is_bulk: bool
    ) -> GetResult | None:
        """Messages of a block for a reader that will continue behind them; see ``Block``."""
        found = block.get(wanted, shown, is_bulk=is_bulk)
        if found is None:
            return None
        begin, end = wanted.queue_offset, found.next_offset
        self.blocks.note_read((block.stream[0], wanted.tags), begin, end, wanted.count_max, now_s)
        if block.fetch_next is not None:
            fetch_next, block.fetch_next = block.fetch_next, None
            fetch_next(end)
        return found

    def put(self, stream: Stream, block: Block) -> None:
        """Keep a block that was fetched."""
        self.blocks.put(stream, block, self._now_s())

    def expire(self) -> None:
        """Drop what nobody has read for a while, or will read in time. In any thread."""
        self.blocks.expire(self._now_s())
