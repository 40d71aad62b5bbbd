"""The transactions that are not decided, and what ended the others: one table, in memory.

What always holds:

1. A half is open exactly when its queue offset is at or past ``next_offset`` and not in the table
   of the ended ones. So halves need not be entered when they are sent; most are decided before
   anyone looks at them.
2. The first decision wins, for all copies of a half, and takes effect at once.
3. ``settled_offset`` never passes a half whose decision is not in the log yet.
"""

from __future__ import annotations

from sys import getsizeof
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace_broker.host_budget import Host, HostBudget
    from headrace_broker.transaction.halves import Decision

# Decisions that are remembered to answer producers that tell theirs again.
_REMEMBERED_MAX: Final = 100_000
# Memory of an open half without its texts, with up to ten ended halves behind it, and of each of
# its copies; measured by tests/abuse/test_kept_memory.py.
HALF_BYTES: Final = 2048
_COPY_BYTES: Final = 256


class OpenHalf(msgspec.Struct):
    """A transaction that has waited for a while.

    first: queue offset of its first half, which is its name. copies: queue offsets of all its
    halves that are known, the newest last. physical_offset: of the newest. host: of its producer.
    due_ms: when its producer may be asked. stored_ms: since when it waits. times: how often its
    producer was asked. is_check_owed: the newest copy counts a check that nobody was sent.
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
        """Estimated memory."""
        texts = getsizeof(self.group) + getsizeof(self.topic)
        return HALF_BYTES + texts + _COPY_BYTES * len(self.copies)


class HalfTable:
    """All transactions of one half queue, from ``next_offset`` on.

    open: by first offset, those that were looked at. seen: queue offset before which all were.
    to_name: halves that are decided, without an op record. superseded: the same of halves that
    were stored again.
    """

    def __init__(self, budget: HostBudget, next_offset: int = 0) -> None:
        """budget: counts the open halves for the hosts of their producers."""
        self._budget = budget
        self.next_offset = self.seen = next_offset
        self.open: dict[int, OpenHalf] = {}
        self._ended: set[int] = set()
        self._first_of: dict[int, int] = {}
        self._decisions: dict[int, Decision] = {}
        # Decided, without a record in the log that says so; those to be named come in order.
        self._unsettled: set[int] = set()
        self.to_name: list[int] = []
        self.superseded: list[int] = []

    # -- questions ---------------------------------------------------------------------------------

    def first_of(self, queue_offset: int, stated: int | None = None) -> int:
        """The name of a half's transaction. stated: the first offset that the half states."""
        if (first := self._first_of.get(queue_offset)) is not None:
            return first
        return queue_offset if stated is None else stated

    def newest_place(self, first: int, default: int) -> int:
        """Physical offset of the newest copy; ``default`` for a half that was not looked at."""
        half = self.open.get(first)
        return half.physical_offset if half else default

    def is_open(self, first: int) -> bool:
        """Whether a transaction waits for its decision."""
        return first in self.open or (first >= self.next_offset and first not in self._ended)

    def decision(self, queue_offset: int) -> Decision | None:
        """What ended the transaction of a half; None if that was too long ago to know."""
        return self._decisions.get(queue_offset)

    def unseen(self, end: int) -> list[int]:
        """Queue offsets before ``end`` of the halves that were not looked at and are open."""
        return [offset for offset in range(self.seen, end) if offset not in self._ended]

    @property
    def settled_offset(self) -> int:
        """Queue offset before which all halves are decided, which the log says, or have copies."""
        return min(self._unsettled, default=self.next_offset)

    @property
    def is_settled(self) -> bool:
        """Whether the log says all that was decided."""
        return not self._unsettled

    # -- changes -----------------------------------------------------------------------------------

    def add(self, half: OpenHalf) -> None:
        """Enter a half that was looked at."""
        self.open[half.first] = half
        self._budget.add(half.host, half.kept_bytes)
        for queue_offset in half.copies:
            self._first_of[queue_offset] = half.first
        self._ended.update(half.copies[:-1])
        self._advance()

    def copied(self, half: OpenHalf, queue_offset: int, physical_offset: int) -> None:
        """An open half was stored again."""
        self._ended.add(half.newest)
        self.superseded.append(half.newest)
        half.copies.append(queue_offset)
        self._budget.add(half.host, _COPY_BYTES)
        half.physical_offset = physical_offset
        self._first_of[queue_offset] = half.first
        self._advance()

    def end(self, first: int, queue_offset: int, decision: Decision | None) -> list[int]:
        """End an open transaction; returns all its halves, which ``owe_names`` is due for.

        queue_offset: of the half that the decision names.
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
        """Note halves that are decided."""
        for copy in copies:
            self._ended.add(copy)
            if decision is not None:
                self._decisions[copy] = decision
        while len(self._decisions) > _REMEMBERED_MAX:
            del self._decisions[next(iter(self._decisions))]
        self._advance()

    def owe_names(self, copies: list[int]) -> None:
        """What was decided is in the log, but for the op record that names these halves."""
        self._unsettled.update(copies)
        self.to_name += copies

    def named(self, count: int) -> None:
        """An op record names the first of ``to_name``."""
        self._unsettled.difference_update(self.to_name[:count])
        del self.to_name[:count]

    def _advance(self) -> None:
        while self.next_offset in self._ended:
            self._ended.discard(self.next_offset)
            self.next_offset += 1
        self.seen = max(self.seen, self.next_offset)
