"""Reads a logic queue: the items of its chain, one after the other.

Items of this broker are read through their sources, those on other brokers from what was fetched
there. A read of what was not fetched raises NotReady, whose wait fetches it.

OFFSET_MOVED, which makes clients reset their offset, comes from two places only: the leader for an
offset behind its end, and the earliest item for one before its beginning. Anywhere else a client
continues at the nearest offset that has messages.
Source: docs/static-topics.md "Offsets"; tests/broker/statictopic/test_static_reader.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import trio

from headrace_broker.store.store_source import EmptySource, GetResult, GetStatus
from headrace_protocol.statictopic.offsets import end_of, index_of

if TYPE_CHECKING:
    from headrace_broker.queue_directory import Reader, Source
    from headrace_broker.statictopic.leaders import Leaders
    from headrace_protocol.statictopic.mapping import Chain, MappingItem

# How long the end of an item on another broker is believed while it may still be written.
_END_LIFE_S: Final = 1.0
_UNBOUNDED: Final = 2**63 - 1
_EMPTY: Final = EmptySource()
_OUTSIDE: Final = frozenset(
    {
        GetStatus.NO_MESSAGE_IN_QUEUE,
        GetStatus.OFFSET_TOO_SMALL,
        GetStatus.OFFSET_OVERFLOW_ONE,
        GetStatus.OFFSET_OVERFLOW_BADLY,
    }
)


class Part(NamedTuple):
    """An item as its reader needs it. Offsets are physical, unless they are called static.

    reader: reads the item; None on another broker. start: its first static offset. delta: static
    minus physical offset. end: bound of its offsets. next_start: static offset of the next item;
    None for the leader, and while it is undecided. stop: bound of its static offsets, with the gap
    behind it. place: the physical queue, also of a topic that is deleted and created again.
    """

    item: MappingItem
    reader: Reader | None
    start: int
    delta: int
    end: int
    next_start: int | None
    stop: int
    place: tuple[object, ...]
    is_first: bool
    is_leader: bool

    def outside(self, offset: int, lowest: int, highest: int) -> tuple[GetStatus, int]:
        """What a read finds at an offset that the item does not have, and where to continue.

        lowest, highest: the range of offsets that the item's broker has. Returns a static offset.
        """
        lowest = min(lowest, self.end)
        if offset < lowest:
            status = GetStatus.OFFSET_TOO_SMALL if self.is_first else GetStatus.NO_MATCHED_MESSAGE
            return status, lowest + self.delta
        if self.next_start is not None:
            return GetStatus.NO_MATCHED_MESSAGE, self.next_start
        if self.is_leader and offset > highest:
            return GetStatus.OFFSET_OVERFLOW_BADLY, highest + self.delta
        return GetStatus.OFFSET_OVERFLOW_ONE, offset + self.delta


class Wanted(NamedTuple):
    """What a reader wants of an item: its place, the wanted tags, and whether in bulk."""

    place: tuple[object, ...]
    tags: frozenset[int] | None
    is_bulk: bool


class Relay(Protocol):
    """Reads what other brokers have."""

    def read(
        self,
        reader: StaticReader,
        part: Part,
        offset: int,
        count_max: int,
        bytes_max: int,
        wanted: Wanted,
    ) -> GetResult:
        """Records that were fetched. Raises NotReady without any."""


# The source of one of this broker's physical queues of a topic.
FindSource = Callable[[int], "Source"]
# Makes the reader of a topic's logic queue.
MakeReader = Callable[[str, int, FindSource], "StaticReader"]


class StaticReader:
    """Reads a logic queue by static offsets; see ``Reader``.

    It follows the mapping, so a held pull continues with a new one.
    """

    __slots__ = (
        "_chain",
        "_change_count",
        "_current",
        "_ends",
        "_find_source",
        "_first",
        "_last",
        "_leaders",
        "_mappings",
        "_relay",
        "queue_id",
        "topic",
    )

    _chain: Chain
    # The part that was read last.
    _current: Part
    _first: Part
    _last: Part

    def __init__(
        self,
        leaders: Leaders,
        relay: Relay,
        topic: str,
        queue_id: int,
        find_source: FindSource,
    ) -> None:
        self._find_source = find_source
        self._leaders = leaders
        self._mappings = leaders.mappings
        self._relay = relay
        self.topic = topic
        self.queue_id = queue_id
        self._change_count = -1
        # Item of another broker -> the end that it had, and until when that is believed.
        self._ends: dict[MappingItem, tuple[int, float]] = {}

    def get(
        self, queue_offset: int, count_max: int, bytes_max: int, tags: frozenset[int] | None
    ) -> GetResult:
        """See ``Reader``."""
        part, offset, count_max = self._locate(queue_offset, count_max)
        if offset >= part.end:
            return self._behind(part, offset)
        if part.reader is not None:
            result = part.reader.get(offset, count_max, bytes_max, tags)
        else:
            wanted = Wanted(part.place, tags, is_bulk=False)
            result = self._elsewhere(part, offset, count_max, bytes_max, wanted)
        return self._static(part, offset, result)

    def get_bulk(
        self, queue_offset: int, count_max: int, bytes_max: int, tags: frozenset[int] | None
    ) -> GetResult:
        """See ``Reader``."""
        part, offset, count_max = self._locate(queue_offset, count_max)
        if offset >= part.end:
            return self._behind(part, offset)
        if part.reader is not None:
            result = part.reader.get_bulk(offset, count_max, bytes_max, tags)
        else:
            wanted = Wanted(part.place, tags, is_bulk=True)
            result = self._elsewhere(part, offset, count_max, bytes_max, wanted)
        return self._static(part, offset, result)

    def known_range(self) -> tuple[int, int]:
        """The static range; an item of another broker counts from its start, as far as known."""
        self._follow()
        last = self._last
        if last.reader is not None:
            highest = last.reader.known_range()[1]
        else:
            highest = self._ends.get(last.item, (0, 0.0))[0]
        return self._lowest(), highest + last.delta

    def _lowest(self) -> int:
        first = self._first
        lowest = first.reader.known_range()[0] if first.reader is not None else 0
        return lowest + first.delta

    def note_end(self, part: Part, end: int) -> None:
        """Note where an item of another broker ends, so that pulls can wait there."""
        self._ends[part.item] = end, trio.current_time() + _END_LIFE_S

    # -- items -------------------------------------------------------------------------------------

    def _locate(self, static: int, count_max: int) -> tuple[Part, int, int]:
        """The part that holds a static offset, the offset in it, and the messages to read there."""
        if self._change_count != self._mappings.change_count:
            self._follow()
        part = self._current
        if not part.start <= static < part.stop:
            part = self._last
            if static < part.start:
                part = self._part(index_of(self._chain, static))
            self._current = part
        offset = static - part.delta
        return part, offset, max(min(count_max, part.end - offset), 1)

    def _behind(self, part: Part, offset: int) -> GetResult:
        """A read behind a closed item: it finds nothing, even if its broker took more messages."""
        status, next_offset = part.outside(offset, 0, part.end)
        lowest, highest = self.known_range()
        return GetResult(status, (), 0, 0, next_offset, lowest, highest, offset_delta=part.delta)

    def _elsewhere(
        self, part: Part, offset: int, count_max: int, bytes_max: int, wanted: Wanted
    ) -> GetResult:
        """A read of another broker's part. Raises NotReady if it must be asked first."""
        if part.next_start is None and offset >= self._known_end(part):
            return _EMPTY.get(offset, count_max, bytes_max, None)
        return self._relay.read(self, part, offset, count_max, bytes_max, wanted)

    def _known_end(self, part: Part) -> int:
        end, believed_until = self._ends.get(part.item, (_UNBOUNDED, 0.0))
        return end if trio.current_time() < believed_until else _UNBOUNDED

    def _follow(self) -> None:
        """Adopt a changed mapping. Raises RequestError if this broker no longer leads the queue."""
        change_count = self._mappings.change_count
        if self._change_count == change_count:
            return
        chain = self._chain = self._leaders.chain(self.topic, self.queue_id)
        is_waiting = len(chain) > 1 and chain[-1].logic_offset < 0
        self._first = self._part(0)
        self._last = self._current = self._part(len(chain) - 1 - is_waiting)
        self._ends.clear()
        self._change_count = change_count

    def _part(self, index: int) -> Part:
        chain = self._chain
        item, end = chain[index], end_of(chain, index)
        is_last = index == len(chain) - 1
        next_start = -1 if is_last else chain[index + 1].logic_offset
        is_decided = item.logic_offset >= 0
        return Part(
            item,
            self._item_reader(item) if is_decided else _EMPTY,
            item.logic_offset,
            item.logic_offset - item.start_offset if is_decided else 0,
            _UNBOUNDED if end is None else end,
            None if next_start < 0 else next_start,
            _UNBOUNDED if next_start < 0 else next_start,
            (self._mappings.marks.incarnation(self.topic), item.bname, item.queue_id),
            not index,
            is_last and is_decided,
        )

    def _item_reader(self, item: MappingItem) -> Reader | None:
        if item.bname != self._mappings.broker_name:
            return None
        return self._find_source(item.queue_id)

    def _static(self, part: Part, offset: int, result: GetResult) -> GetResult:
        """The result of a read of a part, with static offsets."""
        status, delta = result.status, part.delta
        next_offset = result.next_offset + delta
        # Most reads find something, and the hash of a status takes its time.
        if not result.count and status in _OUTSIDE:
            status, next_offset = part.outside(offset, result.min_offset, result.max_offset)
        if part.is_leader:
            lowest = result.min_offset + delta if part.is_first else self._lowest()
            highest = result.max_offset + delta
        else:
            lowest, highest = self.known_range()
        return GetResult(
            status,
            result.buffers,
            result.count,
            result.body_bytes,
            next_offset,
            lowest,
            highest,
            result.layout,
            result.first_physical_offset,
            result.has_queue_offsets,
            delta,
        )
