"""Offset arithmetic on the chain of a logic queue.

Static offset = logicOffset + physical offset - startOffset. Static offsets ascend along a chain,
and may jump between two items.
Source: docs/static-topics.md "Offsets"; tests/protocol/test_statictopic_offsets.py.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

from headrace_protocol.errors import PortableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_protocol.statictopic.mapping import MappingItem

# Apache's tools let the new leader's offsets start at a multiple of this.
BLOCK_OFFSETS = 10_000


class UndecidedOffset(PortableError, ValueError):
    """Arithmetic with an item whose logicOffset is not decided yet."""

    def __init__(self, item: MappingItem) -> None:
        super().__init__(
            f"the static offsets of physical queue {item.queue_id} on {item.bname} "
            f"(gen {item.gen}) are undecided until the remap ends; if its tool died, run: "
            "headrace topic repair TOPIC"
        )
        self.item = item


def offset_delta(item: MappingItem) -> int:
    """Static minus physical offset. Raises UndecidedOffset."""
    if item.logic_offset < 0:
        raise UndecidedOffset(item)
    return item.logic_offset - item.start_offset


def static_offset(item: MappingItem, physical_offset: int) -> int:
    """The static offset of a physical one. Raises UndecidedOffset."""
    return offset_delta(item) + physical_offset


def physical_offset(item: MappingItem, static: int) -> int:
    """The physical offset of a static one. Raises UndecidedOffset."""
    return static - offset_delta(item)


def index_of(chain: Sequence[MappingItem], static: int) -> int:
    """Index of the last decided item that starts at or before ``static``, otherwise 0.

    Cost: O(log n).
    """
    decided = len(chain) - (chain[-1].logic_offset < 0)
    return max(bisect_right(chain, static, hi=decided, key=lambda item: item.logic_offset) - 1, 0)


def item_of(chain: Sequence[MappingItem], static: int) -> MappingItem:
    """The item that holds a static offset; the earliest for offsets below it."""
    return chain[index_of(chain, static)]


def end_of(chain: Sequence[MappingItem], index: int) -> int | None:
    """Bound of an item's physical offsets, exclusive; None while it is open or undecided.

    Without an endOffset the bound follows from the next item, and may lie above the physical end of
    an item that Apache's tools have closed, because they round up.
    """
    item = chain[index]
    if item.end_offset > item.start_offset:
        return item.end_offset
    if index + 1 == len(chain) or chain[index + 1].logic_offset < 0:
        return None
    return physical_offset(item, chain[index + 1].logic_offset)


def decided(chain: Sequence[MappingItem]) -> Sequence[MappingItem]:
    """The items with static offsets: all but an undecided leader."""
    return chain[:-1] if chain[-1].logic_offset < 0 else chain


class Extent(NamedTuple):
    """The static offsets of an item's messages: from ``start`` up to ``end``."""

    start: int
    end: int


def extent_of(chain: Sequence[MappingItem], index: int, lowest: int, highest: int) -> Extent:
    """The part of a physical queue that belongs to an item. Raises UndecidedOffset.

    lowest, highest: range of the queue's offsets; without messages both are the end of the item.
    """
    item, end = chain[index], end_of(chain, index)
    end = highest if end is None else min(highest, end)
    start = max(item.start_offset, lowest)
    return Extent(static_offset(item, min(start, end)), static_offset(item, end))


def max_of(item: MappingItem) -> int:
    """The static end that the item itself states. Raises UndecidedOffset."""
    return static_offset(item, max(item.end_offset, item.start_offset))


def round_up(static: int, block: int = BLOCK_OFFSETS) -> int:
    """The start of the next block, or of the one after it from the middle of a block on."""
    whole, rest = divmod(static, block)
    return (whole + (1 if rest < block // 2 else 2)) * block
