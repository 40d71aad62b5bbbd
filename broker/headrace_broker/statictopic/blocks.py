"""Records of items on other brokers that were fetched ahead of the pulls that will read them.

Source: docs/static-topics.md "Items on other brokers";
tests/broker/statictopic/test_static_blocks.py.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import trio

from headrace_broker.store.store_source import GetResult, GetStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from headrace_protocol.columns import Buffer
    from headrace_protocol.serving import Channel

# Room for all blocks; without any, pulls are relayed one by one.
BLOCKS_BYTES_MAX: Final = 32 * 1024 * 1024
# A block that is not read between two looks is dropped.
LOOK_S: Final = 10.0
_BLOCKS_PER_RUN: Final = 4
# Size and queue offset at the start of a record.
_RECORD: Final = struct.Struct(">i16xq")


class MalformedRecords(ValueError):
    """Records of another broker that are none, or not those that were asked for."""


class Block(Protocol):
    """Records that another broker returned for the physical offsets from ``start`` to ``end``."""

    start: int
    end: int
    held_bytes: int

    def get(self, offset: int, count_max: int, bytes_max: int) -> GetResult | None:
        """The records from an offset on; None if there are none, or none within the limits."""


class RecordBlock:
    """Records back to back, from which pulls of any size are cut."""

    __slots__ = ("_body", "_offsets", "_positions", "end", "held_bytes", "start")

    def __init__(self, start: int, end: int, body: memoryview) -> None:
        """Raises MalformedRecords."""
        self.start = start
        self.end = end
        self._body = body
        self._offsets, self._positions = _equal(body, start, end) or _walked(body, start, end)
        self.held_bytes = len(body) + 16 * len(self._offsets)

    def get(self, offset: int, count_max: int, bytes_max: int) -> GetResult | None:
        """See ``Block``; the first record is returned whatever its size."""
        offsets, positions = self._offsets, self._positions
        first = bisect_left(offsets, offset)
        if first == len(offsets):
            return None
        last = min(first + count_max, len(offsets))
        begin, end = positions[first], positions[last]
        if end - begin > bytes_max:
            last = max(bisect_right(positions, begin + bytes_max) - 1, first + 1)
            end = positions[last]
        next_offset = self.end if last == len(offsets) else offsets[last - 1] + 1
        records = (self._body[begin:end],)
        return GetResult(
            GetStatus.FOUND, records, last - first, end - begin, next_offset, 0, next_offset
        )


def _equal(body: memoryview, start: int, end: int) -> tuple[array[int], array[int]] | None:
    """As ``_walked``, by columns; None unless all records have one size, as most blocks do."""
    size = _RECORD.unpack_from(body)[0] if len(body) >= _RECORD.size else 0
    if size < _RECORD.size or len(body) % size:
        return None
    rows = np.frombuffer(body, _layout(size))
    found = rows["f2"].astype(np.int64)
    is_ascending = start <= found[0] and found[-1] < end and bool((found[1:] > found[:-1]).all())
    if not is_ascending or not (rows["f0"] == size).all():
        return None
    positions = np.arange(len(found) + 1, dtype=np.int64) * size
    return array("q", found.tobytes()), array("q", positions.tobytes())


@lru_cache(maxsize=256)
def _layout(record_bytes: int) -> np.dtype[Any]:
    rest = (f"V{record_bytes - _RECORD.size}",) if record_bytes > _RECORD.size else ()
    return np.dtype(",".join((">i4", "V16", ">i8", *rest)))


def _walked(body: memoryview, start: int, end: int) -> tuple[array[int], array[int]]:
    """The offsets of records, and where each begins and the last one ends.

    Raises MalformedRecords.
    """
    offsets, positions = array("q"), array("q", [0])
    position, size, expected = 0, len(body), start
    while position + _RECORD.size <= size:
        record_bytes, offset = _RECORD.unpack_from(body, position)
        if record_bytes < _RECORD.size or not expected <= offset < end:
            raise MalformedRecords(
                f"{record_bytes} bytes with queue offset {offset} at byte {position} of "
                f"the records from {expected} to {end}"
            )
        position += record_bytes
        expected = offset + 1
        offsets.append(offset)
        positions.append(position)
    if position != size or not offsets:
        raise MalformedRecords(f"{len(offsets)} records of {position} bytes in {size} bytes")
    return offsets, positions


class BulkBlock:
    """The answer to a bulk pull, which another one gets as a whole."""

    __slots__ = ("_result", "end", "held_bytes", "start")

    def __init__(self, start: int, result: GetResult) -> None:
        self.start = start
        self.end = result.next_offset
        self._result = result
        self.held_bytes = sum(map(len, result.buffers))

    def get(self, offset: int, count_max: int, bytes_max: int) -> GetResult | None:
        """See ``Block``."""
        result = self._result
        is_small = result.count <= count_max and result.body_bytes <= bytes_max
        return result if offset == self.start and (is_small or result.count == 1) else None


class _Kept:
    """A block, the client that is charged for it, and what fetches the next one, once."""

    __slots__ = ("block", "channel", "fetch_next")

    def __init__(
        self, block: Block, channel: Channel, fetch_next: Callable[[], None] | None
    ) -> None:
        self.block = block
        self.channel = channel
        self.fetch_next = fetch_next


class _Run:
    """The blocks of one item for one filter."""

    __slots__ = ("is_used", "kept")

    def __init__(self) -> None:
        self.kept: list[_Kept] = []
        self.is_used = True


class Blocks:
    """All blocks of a broker.

    held_bytes: their memory, of which each client is charged with what was fetched for it.
    """

    def __init__(self) -> None:
        self.held_bytes = 0
        self._runs: dict[Hashable, _Run] = {}

    def get(self, key: Hashable, offset: int, count_max: int, bytes_max: int) -> GetResult | None:
        """Records from an offset on; None if they must be fetched.

        A block whose second half is begun fetches the next one, and one that was read to its end
        is dropped.
        """
        run = self._runs.get(key)
        if run is None:
            return None
        for kept in run.kept:
            block = kept.block
            if not block.start <= offset < block.end:
                continue
            if (found := block.get(offset, count_max, bytes_max)) is None:
                continue
            run.is_used = True
            fetch_next = kept.fetch_next
            if fetch_next is not None and 2 * found.next_offset >= block.start + block.end:
                kept.fetch_next = None
                fetch_next()
            if found.next_offset >= block.end:
                run.kept.remove(kept)
                self._release(kept)
            return found
        return None

    def put(
        self,
        key: Hashable,
        block: Block,
        channel: Channel,
        fetch_next: Callable[[], None] | None,
    ) -> None:
        """Keep a block. fetch_next: called when its reader will soon need the next one."""
        run = self._runs.get(key) or self._runs.setdefault(key, _Run())
        run.is_used = True
        run.kept.append(_Kept(block, channel, fetch_next))
        self.held_bytes += block.held_bytes
        channel.charge(block.held_bytes)
        if len(run.kept) > _BLOCKS_PER_RUN:
            self._release(run.kept.pop(0))

    def has_room(self, more_bytes: int) -> bool:
        """Whether another block may be fetched ahead."""
        return self.held_bytes + more_bytes <= BLOCKS_BYTES_MAX

    async def run(self) -> None:
        """Drop blocks that nobody reads, until cancelled."""
        while True:
            await trio.sleep(LOOK_S)
            for key, run in list(self._runs.items()):
                if run.is_used:
                    run.is_used = False
                    continue
                del self._runs[key]
                for kept in run.kept:
                    self._release(kept)

    def _release(self, kept: _Kept) -> None:
        self.held_bytes -= kept.block.held_bytes
        kept.channel.charge(-kept.block.held_bytes)


def records_of(body: tuple[Buffer, ...]) -> memoryview:
    """The body of an answer as one view."""
    return memoryview(body[0]) if body else memoryview(b"")
