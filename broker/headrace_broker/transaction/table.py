"""The table of undecided transactions and of recent decisions, in memory.

What always holds:

1. A half is open exactly if its queue offset is ``next_offset`` or later and it has not ended. So a
   send enters nothing; most halves are decided before the next look.
2. The first decision wins, for all copies of a half, and takes effect immediately.
3. ``settled_offset`` never passes a half whose decision is not in the log yet.
"""

from __future__ import annotations

from collections import OrderedDict
from sys import getsizeof
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace_broker.host_budget import Host, HostBudget
    from headrace_broker.transaction.halves import Decision

# Decisions remembered to answer producers that repeat theirs.
_REMEMBERED_MAX: Final = 100_000
# Memory of an open half without its texts, with up to ten ended halves behind it, and of each of
# its copies; measured by tests/abuse/test_undecided_transactions.py.
HALF_BYTES: Final = 2048
_COPY_BYTES: Final = 256


class OpenHalf(msgspec.Struct):
    """An undecided transaction that was looked at.

    first: queue offset of its first half, which is its name. copies: queue offsets of all its
    known halves, the newest last. physical_offset: of the newest. host: of its producer.
    times: number of checks. stored_ms: store time of the first half. due_ms: time of the first
    check. is_check_owed: whether the newest copy counts a check that was not sent yet.
    """

    first: int
    copies: list[int]
    physical_offset: int
    host: Host
    group: str
    topic: str
    times: int
    stored_ms: int
    due_ms: int
    is_check_owed: bool = False

    @property
    def newest(self) -> int:
        """Queue offset of the newest copy."""
        return self.copies[-1]

    @property
    def kept_bytes(self) -> int:
        """Estimated memory, in bytes."""
        texts = getsizeof(self.group) + getsizeof(self.topic)
        return HALF_BYTES + texts + _COPY_BYTES * len(self.copies)


class HalfTable:
    """All transactions of a half queue, from ``next_offset`` on.

    open: undecided transactions that were looked at, by first offset. seen: queue offset before
    which all halves were looked at. to_name: decided halves that have no op record yet.
    superseded: halves that were stored again and have no op record yet.
    """

    def __init__(self, budget: HostBudget, next_offset: int = 0) -> None:
        """budget: counts the open halves for the hosts of their producers."""
        self._budget = budget
        self.next_offset = self.seen = next_offset
        self.open: dict[int, OpenHalf] = {}
        self._ended: set[int] = set()
        self._first_of: dict[int, int] = {}
        # The oldest first. Not a dict, in which finding the first key takes time after deletions.
        self._decisions: OrderedDict[int, Decision] = OrderedDict()
        # Decided halves without a record of the decision in the log; ``to_name`` has their order.
        self._unsettled: set[int] = set()
        self.to_name: list[int] = []
        self.superseded: list[int] = []

    # -- questions ---------------------------------------------------------------------------------

    def first_of(self, queue_offset: int, stated: int | None = None) -> int:
        """The name of a half's transaction. stated: the first offset in the half's properties."""
        if (first := self._first_of.get(queue_offset)) is not None:
            return first
        return queue_offset if stated is None else stated

    def newest_physical_offset(self, first: int, default: int) -> int:
        """Physical offset of the newest copy; ``default`` before the first look at the half."""
        half = self.open.get(first)
        return half.physical_offset if half else default

    def is_open(self, first: int) -> bool:
        """True if a transaction waits for its decision."""
        return first in self.open or (first >= self.next_offset and first not in self._ended)

    def decision(self, queue_offset: int) -> Decision | None:
        """The end of a half's transaction; None if the decision is no longer remembered."""
        return self._decisions.get(queue_offset)

    def unseen(self, end: int) -> list[int]:
        """Queue offsets of the open halves before ``end`` that were not looked at."""
        return [offset for offset in range(self.seen, end) if offset not in self._ended]

    @property
    def settled_offset(self) -> int:
        """Queue offset before which each half has a copy, or a decision that is in the log."""
        return min(self._unsettled, default=self.next_offset)

    @property
    def is_settled(self) -> bool:
        """True if all decisions are in the log."""
        return not self._unsettled

    # -- changes -----------------------------------------------------------------------------------

    def add(self, half: OpenHalf) -> None:
        """Enter a half at its first look."""
        self.open[half.first] = half
        self._budget.add(half.host, half.kept_bytes)
        for queue_offset in half.copies:
            self._first_of[queue_offset] = half.first
        self._ended.update(half.copies[:-1])
        self._advance()

    def copied(self, half: OpenHalf, queue_offset: int, physical_offset: int) -> None:
        """Note that an open half was stored again."""
        self._ended.add(half.newest)
        self.superseded.append(half.newest)
        half.copies.append(queue_offset)
        self._budget.add(half.host, _COPY_BYTES)
        half.physical_offset = physical_offset
        self._first_of[queue_offset] = half.first
        self._advance()

    def end(self, first: int, queue_offset: int, decision: Decision | None) -> list[int]:
        """End an open transaction; returns its halves, for ``owe_names``.

        queue_offset: of the half that the decision is about.
        """
        half = self.open.pop(first, None)
        if half:
            self._budget.add(half.host, -half.kept_bytes)
        copies = half.copies if half else [queue_offset]
        for copy in copies:
            self._first_of.pop(copy, None)
        self.ended(copies, decision)
        self._unsettled.update(copies)
        return copies

    def ended(self, copies: Iterable[int], decision: Decision | None) -> None:
        """Note decided halves."""
        for copy in copies:
            self._ended.add(copy)
            if decision is not None:
                self._decisions[copy] = decision
        while len(self._decisions) > _REMEMBERED_MAX:
            self._decisions.popitem(last=False)
        self._advance()

    def owe_names(self, copies: list[int]) -> None:
        """Have an op record name these halves; any other record of the decision is in the log."""
        self._unsettled.update(copies)
        self.to_name += copies

    def named(self, count: int) -> None:
        """Note that an op record names the first ``count`` of ``to_name``."""
        self._unsettled.difference_update(self.to_name[:count])
        del self.to_name[:count]

    def _advance(self) -> None:
        while self.next_offset in self._ended:
            self._ended.discard(self.next_offset)
            self.next_offset += 1
        self.seen = max(self.seen, self.next_offset)
