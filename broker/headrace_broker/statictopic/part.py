"""An item of a chain, as whoever reads it needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from headrace_broker.store.store_source import GetStatus

if TYPE_CHECKING:
    from headrace_broker.queue_directory import Reader
    from headrace_protocol.statictopic.mapping import MappingItem

UNBOUNDED: Final = 2**63 - 1


class Part(NamedTuple):
    """An item as its reader needs it. Offsets are physical, unless they are called static.

    reader: reads the item; None on another broker. start: its first static offset. delta: static
    minus physical offset. end: bound of its offsets. next_start: static offset of the next item;
    None for the leader, and while it is undecided. stop: bound of its static offsets, with the gap
    behind it. queue: the physical queue, also of a topic that is deleted and created again.
    """

    item: MappingItem
    reader: Reader | None
    start: int
    delta: int
    end: int
    next_start: int | None
    stop: int
    queue: tuple[object, ...]
    is_first: bool
    is_leader: bool

    def outside(self, offset: int, lowest: int, highest: int) -> tuple[GetStatus, int]:
        """The result of a read at an offset that the item does not have, and where to continue.

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
