"""A broker's mapping of one static topic as numpy rows: 52 bytes per item, no objects.

Source: docs/static-topics.md; tests/broker/statictopic/test_static_table.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, overload

import numpy as np

from headrace_protocol.statictopic.mapping import MappingItem, TopicMapping

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_ITEM: Final = np.dtype(
    [
        ("broker", "<i4"),
        ("gen", "<i4"),
        ("queue_id", "<i4"),
        ("logic_offset", "<i8"),
        ("start_offset", "<i8"),
        ("end_offset", "<i8"),
        ("time_of_start", "<i8"),
        ("time_of_end", "<i8"),
    ]
)


class BrokerMapping:
    """One broker's mapping of a static topic; never changed, only replaced.

    Its fields are those of ``TopicMapping``. Memory: 52 bytes per item, 4 per logic queue of the
    topic, some 100 per queue that this broker leads, and about 600 for the objects.
    """

    __slots__ = (
        "_brokers",
        "_items",
        "_led",
        "_starts",
        "bname",
        "dirty",
        "epoch",
        "scope",
        "topic",
        "total_queues",
    )

    def __init__(self, mapping: TopicMapping) -> None:
        self.topic = mapping.topic
        self.bname = mapping.bname
        self.dirty = mapping.dirty
        self.epoch = mapping.epoch
        self.scope = mapping.scope
        self.total_queues = mapping.total_queues
        numbers: dict[str, int] = {}
        rows: list[tuple[int, ...]] = []
        counts = np.zeros(mapping.total_queues + 1, np.int32)
        for queue in sorted(mapping.hosted):
            chain = mapping.hosted[queue]
            counts[queue + 1] = len(chain)
            rows += (
                (
                    numbers.setdefault(item.bname, len(numbers)),
                    item.gen,
                    item.queue_id,
                    item.logic_offset,
                    item.start_offset,
                    item.end_offset,
                    item.time_of_start,
                    item.time_of_end,
                )
                for item in chain
            )
        self._brokers = tuple(numbers)
        self._items = np.array(rows, _ITEM)
        # The chain of a queue is the rows from starts[queue] up to starts[queue + 1].
        self._starts = np.cumsum(counts, dtype=np.int32)
        # Kept because every registration has the queues of all topics.
        self._led = self._find_led()

    @property
    def led_count(self) -> int:
        """The number of logic queues whose leader is this broker."""
        return len(self._led)

    @property
    def item_count(self) -> int:
        """The number of items of all chains."""
        return len(self._items)

    def queues(self) -> list[int]:
        """The logic queues whose chains this broker has, in ascending order."""
        hosted: list[int] = np.flatnonzero(np.diff(self._starts)).tolist()
        return hosted

    def chain(self, queue: int) -> PackedChain | None:
        """The chain of a logic queue; None if this broker does not have it."""
        if not 0 <= queue < self.total_queues:
            return None
        start, end = self._starts[queue : queue + 2].tolist()
        return PackedChain(self, start, end) if start < end else None

    def led(self) -> Mapping[int, int]:
        """Physical queue of each logic queue whose leader is this broker."""
        return self._led

    def _find_led(self) -> dict[int, int]:
        if self.bname not in self._brokers:
            return {}
        ours = self._brokers.index(self.bname)
        queues = np.flatnonzero(np.diff(self._starts))
        lasts = self._items[self._starts[queues + 1] - 1]
        is_ours = lasts["broker"] == ours
        physical = lasts["queue_id"][is_ours].tolist()
        return dict(zip(queues[is_ours].tolist(), physical, strict=True))

    def logic_queue_of(self, physical: int) -> int | None:
        """The logic queue of one of this broker's physical queues; None if it has none."""
        if self.bname not in self._brokers:
            return None
        ours = self._brokers.index(self.bname)
        items = self._items
        found = np.flatnonzero((items["broker"] == ours) & (items["queue_id"] == physical))
        if not len(found):
            return None
        return int(np.searchsorted(self._starts, found[0], side="right")) - 1

    def own_queues(self) -> list[int]:
        """The physical queues of this broker that have an item, leaders or not."""
        if self.bname not in self._brokers:
            return []
        is_ours = self._items["broker"] == self._brokers.index(self.bname)
        queue_ids: list[int] = self._items["queue_id"][is_ours].tolist()
        return queue_ids

    def later_queues(self) -> set[int]:
        """The physical queues of this broker that do not begin their logic queue."""
        if self.bname not in self._brokers:
            return set()
        items = self._items
        is_ours = items["broker"] == self._brokers.index(self.bname)
        return set(items["queue_id"][is_ours & (items["logic_offset"] != 0)].tolist())

    def undecided(self) -> list[int]:
        """The logic queues whose last item has no logicOffset yet."""
        queues = np.flatnonzero(np.diff(self._starts))
        lasts = self._items[self._starts[queues + 1] - 1]
        found: list[int] = queues[lasts["logic_offset"] < 0].tolist()
        return found

    def unpacked(self) -> TopicMapping:
        """The mapping as objects."""
        chains = ((queue, self.chain(queue)) for queue in self.queues())
        return TopicMapping(
            topic=self.topic,
            bname=self.bname,
            dirty=self.dirty,
            epoch=self.epoch,
            scope=self.scope,
            total_queues=self.total_queues,
            hosted={queue: tuple(chain) for queue, chain in chains if chain is not None},
        )

    def item(self, row: int) -> MappingItem:
        """An item as an object; ``PackedChain`` knows the rows."""
        fields: tuple[Any, ...] = self._items[row].item()
        broker, gen, queue_id, logic_offset, start_offset, end_offset, since, until = fields
        return MappingItem(
            bname=self._brokers[broker],
            gen=gen,
            queue_id=queue_id,
            logic_offset=logic_offset,
            start_offset=start_offset,
            end_offset=end_offset,
            time_of_start=since,
            time_of_end=until,
        )

    def items_by_offset(self, start: int, end: int) -> Any:
        """The logic offsets of rows, in ascending order unless the last is undecided."""
        return self._items["logic_offset"][start:end]


class PackedChain(Sequence[MappingItem]):
    """The chain of a logic queue; creates an object for each item that is asked for."""

    __slots__ = ("_end", "_mapping", "_start")

    def __init__(self, mapping: BrokerMapping, start: int, end: int) -> None:
        self._mapping = mapping
        self._start = start
        self._end = end

    def __len__(self) -> int:
        return self._end - self._start

    @overload
    def __getitem__(self, index: int) -> MappingItem: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[MappingItem, ...]: ...

    def __getitem__(self, index: int | slice) -> MappingItem | tuple[MappingItem, ...]:
        rows = range(self._start, self._end)[index]
        if isinstance(rows, int):
            return self._mapping.item(rows)
        return tuple(map(self._mapping.item, rows))

    def __iter__(self) -> Iterator[MappingItem]:
        return map(self._mapping.item, range(self._start, self._end))
