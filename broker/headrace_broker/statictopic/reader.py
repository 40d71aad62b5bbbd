"""Reads a logic queue: the items of its chain, one after the other.

Items of this broker are read through their sources, those on other brokers through the
``RemoteReader``.

OFFSET_MOVED, which makes clients reset their offset, comes from two brokers only: the leader for an
offset behind its end, and the earliest item for one before its beginning. Anywhere else a client
continues at the nearest offset that has messages.
Source: docs/static-topics.md "Offsets"; tests/broker/statictopic/test_static_reader.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from headrace_broker.cold.queue import Wanted
from headrace_broker.statictopic.part import UNBOUNDED, Part
from headrace_broker.store.store_source import EmptySource, GetResult, GetStatus
from headrace_protocol.statictopic.offsets import end_of, index_of

if TYPE_CHECKING:
    from headrace_broker.queue_directory import Reader
    from headrace_broker.statictopic.leaders import Leaders
    from headrace_broker.statictopic.remote_queue import RemoteQueue, RemoteReader
    from headrace_protocol.statictopic.mapping import Chain, MappingItem

_EMPTY: Final = EmptySource()
_OUTSIDE: Final = frozenset(
    {
        GetStatus.NO_MESSAGE_IN_QUEUE,
        GetStatus.OFFSET_TOO_SMALL,
        GetStatus.OFFSET_OVERFLOW_ONE,
        GetStatus.OFFSET_OVERFLOW_BADLY,
    }
)


# The source of one of this broker's physical queues of a topic.
FindSource = Callable[[int], "Reader"]
# Makes the reader of a topic's logic queue.
MakeReader = Callable[[str, int, FindSource], "StaticReader"]


class StaticReader:
    """Reads a logic queue by static offsets; see ``Reader``.

    filter_text: of the filter that ``find_source`` applies to this broker's queues, if it does;
    other brokers apply it to theirs.

    It follows the mapping, so a held pull continues with a new one.
    """

    __slots__ = (
        "_chain",
        "_change_count",
        "_current",
        "_find_source",
        "_first",
        "_last",
        "_leaders",
        "_mappings",
        "_queue",
        "_remote",
        "filter_text",
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
        remote: RemoteReader,
        topic: str,
        queue_id: int,
        find_source: FindSource,
    ) -> None:
        self.filter_text: str | None = None
        self._find_source = find_source
        self._leaders = leaders
        self._mappings = leaders.mappings
        self._remote = remote
        # What was read last on another broker.
        self._queue: RemoteQueue | None = None
        self.topic = topic
        self.queue_id = queue_id
        self._change_count = -1

    def get(
        self, queue_offset: int, count_max: int, bytes_max: int, tags: frozenset[int] | None
    ) -> GetResult:
        """See ``Reader``."""
        return self._read(queue_offset, count_max, bytes_max, tags, is_bulk=False)

    def get_bulk(
        self, queue_offset: int, count_max: int, bytes_max: int, tags: frozenset[int] | None
    ) -> GetResult:
        """See ``Reader``."""
        return self._read(queue_offset, count_max, bytes_max, tags, is_bulk=True)

    def _read(
        self,
        queue_offset: int,
        count_max: int,
        bytes_max: int,
        tags: frozenset[int] | None,
        *,
        is_bulk: bool,
    ) -> GetResult:
        part, offset, count_max = self._locate(queue_offset, count_max)
        if offset >= part.end:
            return self._behind(part, offset)
        if part.reader is None:
            key = part.queue, tags if self.filter_text is None else self.filter_text, is_bulk
            if self._queue is None or self._queue.key != key:
                self._queue = self._remote.queue(key)
            wanted = Wanted(offset, count_max, bytes_max, None)  # the item's broker filters
            result = self._remote.read(self._queue, part, wanted)
        else:
            read = part.reader.get_bulk if is_bulk else part.reader.get
            result = read(offset, count_max, bytes_max, tags)
        return self._static(part, offset, result)

    def known_range(self) -> tuple[int, int]:
        """The static range; an item of another broker counts from its start, as far as known."""
        if self._change_count != self._mappings.change_count:
            self._follow()
        last = self._last
        queue, highest = self._queue, 0
        if last.reader is not None:
            highest = last.reader.known_range()[1]
        elif queue is not None and queue.outside is not None and queue.key[0] == last.queue:
            highest = queue.outside.highest
        return self._lowest(), highest + last.delta

    def _lowest(self) -> int:
        first = self._first
        lowest = first.reader.known_range()[0] if first.reader is not None else 0
        return lowest + first.delta

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

    def _follow(self) -> None:
        """Adopt a changed mapping. Raises RequestError if this broker no longer leads the queue."""
        change_count = self._mappings.change_count
        chain = self._chain = self._leaders.chain(self.topic, self.queue_id)
        is_waiting = len(chain) > 1 and chain[-1].logic_offset < 0
        self._first = self._part(0)
        self._last = self._current = self._part(len(chain) - 1 - is_waiting)
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
            UNBOUNDED if end is None else end,
            None if next_start < 0 else next_start,
            UNBOUNDED if next_start < 0 else next_start,
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
