"""Timers in memory: a numpy table for each second in which some are due.

Distant seconds share a table, so many timers cost little more than their rows. A timer takes work
at its arrival, when its shared table is divided, and in its second.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from headrace_broker.timer.arrivals import TIMER, slots_of
from headrace_broker.timer.demand import SLOT_MS
from headrace_broker.timer.recalls import Recalls, is_among

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from headrace_broker.timer.arrivals import Arrivals, Topics
    from headrace_protocol.columns import Array

# Seven days; Apache's wheel has twice as many slots, so an old slot is never taken for a new one.
WHEEL_SECONDS: Final = 7 * 86_400
_BLANK_SLOTS: Final = 60
ROLL_SLOTS_MIN: Final = 2
_FAR_SLOTS: Final = 64
_GROWTH: Final = 5 / 4
# Rows per slice of a millisecond.
_LOOKED_AT_ONCE: Final = 8192
# A queue offset, beside the millisecond of a slot in 64 bits.
_OFFSET_BITS: Final = 52


class _Table:
    """Rows in order of arrival."""

    def __init__(self, rows: Array) -> None:
        self._rows = rows.copy()
        self._count = len(rows)

    @property
    def rows(self) -> Array:
        """All rows; not to be kept."""
        return self._rows[: self._count]

    def add(self, rows: Array) -> None:
        count = self._count + len(rows)
        if count > len(self._rows):
            grown = np.empty(int(count * _GROWTH), self._rows.dtype)
            grown[: self._count] = self.rows
            self._rows = grown
        self._rows[self._count : count] = rows
        self._count = count

    def keep(self, is_kept: Array) -> None:
        self._rows = self.rows[is_kept]
        self._count = len(self._rows)


class SlotTables:
    """Rows with due_ms and queue_offset, taken out in the order of these two.

    count: number of rows.
    """

    def __init__(self, dtype: np.dtype[np.void]) -> None:
        self.count = 0
        self._dtype = dtype
        self._near: dict[int, _Table] = {}  # by slot
        self._far: dict[int, _Table] = {}  # by slot // _FAR_SLOTS
        self._far_first: float = math.inf
        self._near_end = 0  # rows of this slot and later ones are in far tables
        # Rows of the earliest slot, sorted.
        self._open = np.empty(0, dtype)
        self._open_slot = -1

    def add(self, rows: Array) -> None:
        """Add rows in order of arrival."""
        self.count += len(rows)
        slots = slots_of(rows)
        is_far = slots >= self._near_end
        for number, far in _parted(rows[is_far], slots[is_far] // _FAR_SLOTS):
            _add(self._far, number, far)
            self._far_first = min(self._far_first, number)
        for slot, near in _parted(rows[~is_far], slots[~is_far]):
            if slot == self._open_slot and len(self._open):
                self._open = _merged(self._open, _sorted_slot(near))
            else:
                _add(self._near, slot, near)

    def due_ms(self) -> float:
        """Time to take the first row out or divide its far table; infinite without rows."""
        self._open_first()
        if len(self._open):
            return int(self._open["due_ms"][0])
        return self._far_first * _FAR_SLOTS * SLOT_MS

    def take_due(self, now_ms: int, count: int) -> Array:
        """Take out the first rows that are due, at most ``count`` and of one slot."""
        while self._far_first * _FAR_SLOTS * SLOT_MS <= now_ms:
            self._divide_first()
        self._open_first()
        end = min(int(np.searchsorted(self._open["due_ms"], now_ms, "right")), count)
        taken, self._open = self._open[:end], self._open[end:]
        self.count -= len(taken)
        return taken

    def _divide_first(self) -> None:
        """Divide the earliest far table into a table for each slot."""
        first = int(self._far_first)
        self._near_end = (first + 1) * _FAR_SLOTS
        rows = self._far.pop(first).rows
        self._far_first = min(self._far, default=math.inf)
        for slot, near in _parted(rows, slots_of(rows)):
            _add(self._near, slot, near)

    def _open_first(self) -> None:
        """Sort the rows of the earliest near slot unless they are sorted."""
        first = min(self._near, default=None)
        if first is None or (len(self._open) and first > self._open_slot):
            return
        if len(self._open):
            _add(self._near, self._open_slot, self._open)
        self._open, self._open_slot = _sorted_slot(self._near.pop(first).rows), first

    def of_slot(self, slot: int) -> Array:
        """A copy of the rows of a slot."""
        table = self._table(slot)
        rows = table.rows[slots_of(table.rows) == slot] if table else self._open[:0]
        return np.concatenate([self._open, rows]) if slot == self._open_slot else rows

    def drop(self, slot: int, choose: Callable[[Array], Array]) -> Array:
        """Take rows out of a slot; returns them.

        choose: returns a mask of the rows to take.
        """
        dropped = []
        if slot == self._open_slot and len(self._open):
            where = choose(self._open)
            dropped.append(self._open[where])
            self._open = self._open[~where]
        if (table := self._table(slot)) is not None:
            rows = table.rows
            where = (slots_of(rows) == slot) & choose(rows)
            if where.any():
                dropped.append(rows[where])
                table.keep(~where)
                self._forget_empty(slot)
        taken = np.concatenate(dropped) if dropped else np.empty(0, self._dtype)
        self.count -= len(taken)
        return taken

    def _table(self, slot: int) -> _Table | None:
        if slot < self._near_end:
            return self._near.get(slot)
        return self._far.get(slot // _FAR_SLOTS)

    def _forget_empty(self, slot: int) -> None:
        if slot < self._near_end:
            if not len(self._near[slot].rows):
                del self._near[slot]
        elif not len(self._far[slot // _FAR_SLOTS].rows):
            del self._far[slot // _FAR_SLOTS]
            self._far_first = min(self._far, default=math.inf)

    def lowest_queue_offset(self) -> int | None:
        """The lowest queue offset of all rows; None without rows.

        Cost: one read for each far table, which is in order of arrival.
        """
        lowest = [int(table.rows["queue_offset"][0]) for table in self._far.values()]
        lowest += [int(table.rows["queue_offset"].min()) for table in self._near.values()]
        if len(self._open):
            lowest.append(int(self._open["queue_offset"].min()))
        return min(lowest, default=None)

    def tables(self) -> list[Array | _Table]:
        """All tables, in the order of their times; rows may leave them meanwhile."""
        near = [self._near[slot] for slot in sorted(self._near)]
        far = [self._far[number] for number in sorted(self._far)]
        return [self._open, *near, *far]

    def all_rows(self) -> Array:
        """A copy of all rows, in no order."""
        tables = (*self._near.values(), *self._far.values())
        return np.concatenate([self._open, *(table.rows for table in tables)])


def _add(tables: dict[int, _Table], slot: int, rows: Array) -> None:
    if (table := tables.get(slot)) is not None:
        table.add(rows)
    else:
        tables[slot] = _Table(rows)


def _sorted(rows: Array) -> Array:
    """Rows in the order of their due times, then of arrival."""
    order = np.lexsort((rows["queue_offset"], rows["due_ms"]))
    return rows[order]


def _sorted_slot(rows: Array) -> Array:
    """As ``_sorted``, for rows of one slot; most are in this order already."""
    return rows[np.argsort(_order(rows), kind="stable")]


def _merged(first: Array, second: Array) -> Array:
    """Two sorted tables of one slot as one. Cost: a copy; sorting again would take ten times it."""
    return np.insert(first, np.searchsorted(_order(first), _order(second)), second)


def _order(rows: Array) -> Array:
    """A number for each row of a slot, in the order of ``_sorted``."""
    order: Array = ((rows["due_ms"] - 1) % SLOT_MS << _OFFSET_BITS) + rows["queue_offset"]
    return order


def _parted(rows: Array, values: Array) -> Iterator[tuple[int, Array]]:
    """Each distinct value with its rows, in order; the rows are not to be kept."""
    if not len(rows):
        return
    order = np.argsort(values, kind="stable")
    rows, values = rows[order], values[order]
    breaks = np.flatnonzero(values[1:] != values[:-1]) + 1
    for start, end in itertools.pairwise([0, *breaks.tolist(), len(rows)]):
        yield int(values[start]), rows[start:end]


def groups(values: Array) -> Iterator[tuple[int, Array]]:
    """Each distinct value with the numbers of its rows, in order."""
    if not len(values):
        return
    if (values == values[0]).all():
        yield int(values[0]), np.arange(len(values))
        return
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    parts = np.split(order, starts[1:])
    yield from zip(ordered[starts].tolist(), parts, strict=True)


# A timer to store again: due_ms is the time for that, slot the timer's own.
_ROLL: Final = np.dtype([("due_ms", "i8"), ("queue_offset", "i8"), ("slot", "i8")])


class RollWindow:
    """The time to store a distant timer again, so that its log files can be removed."""

    def __init__(self, slots: int) -> None:
        """slots: timerRollWindowSlot; a number that the wheel can't hold counts as its maximum."""
        fits = ROLL_SLOTS_MIN <= slots <= WHEEL_SECONDS - _BLANK_SLOTS
        self.slots = slots if fits else WHEEL_SECONDS - _BLANK_SLOTS

    def roll_slots(self, arrived: Arrivals) -> Array:
        """The slot in which to store each timer again; -1 for timers that are not rolled."""
        write = arrived.write_ms // SLOT_MS
        rest = slots_of(arrived.rows) - write - self.slots
        is_near = rest < self.slots // 3  # leaves enough time for the next roll
        slots = write + np.where(is_near, self.slots // 2, self.slots)
        return np.where(rest >= 0, slots, -1)


class WaitingTimers:
    """All timers that wait, their recalls, and when to roll them.

    A recall is a row in the slot of its timer. It drops the timers of the slot with the same key
    at its arrival; those that come later, such as a copy stored by rolling, are not added.
    """

    def __init__(self, topics: Topics, window: RollWindow) -> None:
        self.topics = topics
        self._window = window
        self._timers = SlotTables(TIMER)
        self._rolls = SlotTables(_ROLL)
        self._counts = np.zeros(0, np.int64)  # by number of the topic
        self._recalls = Recalls()

    @property
    def count(self) -> int:
        """Number of timers that wait, without recalls."""
        return int(self._counts.sum())

    def counts(self) -> dict[bytes, int]:
        """Number of timers that wait, by topic."""
        return dict(zip(self.topics.names, self._counts.tolist(), strict=False))

    def add(self, arrived: Arrivals) -> Array:
        """Add timers and recalls, in order of arrival; copies replace their originals.

        Returns the next slot of each: where it is rolled or due.
        """
        rows = arrived.rows
        recalls = rows[rows["topic"] < 0]
        self._drop_recalled(recalls)
        self._recalls.add(recalls)
        is_waiting = ~self._recalls.among(rows)
        self._put(rows[is_waiting])
        rolls = self._window.roll_slots(arrived)
        if (is_rolled := (rolls >= 0) & (rows["topic"] >= 0) & is_waiting).any():
            self._add_rolls(rows[is_rolled], rolls[is_rolled])
        copies = arrived.take(arrived.replaces >= 0)
        for slot, numbers in groups(copies.slot):
            self._replace(slot, copies.take(numbers))
        return np.where(is_rolled, rolls, slots_of(rows))

    def of_slot(self, slot: int) -> Array:
        """Timers and recalls that are due or rolled in a slot, in the order of the queue."""
        due, rolled = self._timers.of_slot(slot), self._rolled(self._rolls.of_slot(slot))
        rows = np.concatenate([due, rolled])
        return rows[np.argsort(rows["queue_offset"])]

    def all_with_slots(self) -> tuple[Array, Array]:
        """All timers and recalls in the order of the queue, and the next slot of each."""
        rows, rolls = self._timers.all_rows(), self._rolls.all_rows()
        rows = rows[np.argsort(rows["queue_offset"])]
        slots = slots_of(rows)
        _, of_rows, of_rolls = np.intersect1d(
            rows["queue_offset"], rolls["queue_offset"], return_indices=True
        )
        slots[of_rows] = slots_of(rolls)[of_rolls]
        return rows, slots

    def put_back(self, rows: Array) -> None:
        """Add timers again that were taken out."""
        self._recalls.add(rows[rows["topic"] < 0])
        self._put(rows)

    def _put(self, rows: Array) -> None:
        self._timers.add(rows)
        self._count(rows, 1)

    def _taken(self, rows: Array) -> None:
        """Note that timers and recalls do not wait any more."""
        self._recalls.remove(rows[rows["topic"] < 0])
        self._count(rows, -1)

    def _count(self, rows: Array, sign: int) -> None:
        numbers = rows["topic"][rows["topic"] >= 0]
        more = np.bincount(numbers, minlength=len(self.topics.names))
        self._counts = np.pad(self._counts, (0, len(more) - len(self._counts))) + sign * more

    def _add_rolls(self, rows: Array, slots: Array) -> None:
        rolls = np.empty(len(rows), _ROLL)
        # At the end of the slot, as in Apache's broker.
        rolls["due_ms"] = (slots + 1) * SLOT_MS
        rolls["queue_offset"], rolls["slot"] = rows["queue_offset"], slots_of(rows)
        self._rolls.add(rolls)

    def _replace(self, slot: int, copies: Arrivals) -> None:
        """Drop the timers of a slot that copies replace."""
        named = copies.take(copies.replaces > 0)
        by_source = dict(
            zip(named.replaces.tolist(), named.rows["queue_offset"].tolist(), strict=True)
        )
        if by_source:
            sources = np.array(list(by_source))

            def is_replaced(rows: Array) -> Array:
                where = np.isin(rows["source"], sources)
                for number in np.flatnonzero(where).tolist():
                    newest = by_source[int(rows["source"][number])]
                    where[number] = rows["queue_offset"][number] < newest
                return where

            self._drop(slot, is_replaced)
        unnamed = copies.rows[copies.replaces == 0]
        if len(unnamed):
            self._drop(slot, partial(_oldest_before_each, unnamed))

    def _drop_recalled(self, recalls: Array) -> None:
        """Drop the timers of new recalls."""
        new = Recalls()
        new.add(recalls)
        keys = np.sort(recalls["key"])

        def among(rows: Array) -> Array:
            where = is_among(rows["key"], keys)
            where[where] = new.among(rows[where])
            return where

        for slot in set(slots_of(recalls).tolist()):
            self._drop(slot, among)

    def _drop(self, slot: int, choose: Callable[[Array], Array]) -> int:
        dropped = self._timers.drop(slot, choose)
        self._taken(dropped)
        return len(dropped)

    def recall(self, slot: int, topic: bytes, key: int) -> None:
        """Drop the timers of a key."""
        if (number := self.topics.find(topic)) is not None:
            self._drop(slot, _is_of(number, key))

    def due_of(self, slot: int, topic: bytes, key: int) -> int | None:
        """When the timer of a key is due; None if it does not wait."""
        number = self.topics.find(topic)
        if number is None:
            return None
        rows = self._timers.of_slot(slot)
        dues = rows["due_ms"][_is_of(number, key)(rows)]
        return int(dues[0]) if len(dues) else None

    def first_due(
        self, topics: Iterable[bytes] | None, until_ms: int, count: int
    ) -> Generator[None, None, Array]:
        """The first timers, of some topics or of all, that are due until a time; in slices."""
        found, numbers = np.empty(0, TIMER), None
        if topics is not None:
            known = map(self.topics.find, topics)
            numbers = [number for number in known if number is not None]
            if not numbers:
                return found
        for table in self._timers.tables():
            rows = table.rows if isinstance(table, _Table) else table
            for start in range(0, len(rows), _LOOKED_AT_ONCE):
                part = rows[start : start + _LOOKED_AT_ONCE]
                of_topic = part["topic"]
                where = of_topic >= 0 if numbers is None else np.isin(of_topic, numbers)
                where &= part["due_ms"] <= until_ms
                found = _sorted(np.concatenate([found, part[where]]))[:count]
                yield
            if len(found) == count:
                break
        return found

    def due_ms(self) -> float:
        """Time of the next ``take_due`` and ``take_rolled``; infinite if nothing waits."""
        return min(self._timers.due_ms(), self._rolls.due_ms())

    def take_due(self, now_ms: int, count: int) -> Array:
        """Take out timers and recalls that are due, at most ``count``, in order."""
        rows = self._timers.take_due(now_ms, count)
        self._taken(rows)
        return rows

    def take_rolled(self, now_ms: int, count: int) -> Array:
        """Timers to store again, at most ``count``; they wait until ``forget`` drops them."""
        return self._rolled(self._rolls.take_due(now_ms, count))

    def _rolled(self, rolls: Array) -> Array:
        """The timers of rolls, without those that don't wait any more."""
        return self._still_waiting(rolls["slot"], rolls["queue_offset"])

    def _still_waiting(self, slots: Array, queue_offsets: Array) -> Array:
        found = [self._timers.of_slot(slot) for slot in set(slots.tolist())]
        rows = np.concatenate([*found, np.empty(0, TIMER)])
        return rows[np.isin(rows["queue_offset"], queue_offsets)]

    def still_waiting(self, rows: Array) -> Array:
        """Timers and recalls without those that don't wait any more."""
        return self._still_waiting(slots_of(rows), rows["queue_offset"])

    def stored_before(self, physical_offset: int) -> Generator[Array, None, None]:
        """Timers and recalls whose records lie before a physical offset; in slices.

        The last due come first, except within a shared table.
        """
        for table in reversed(self._timers.tables()):
            rows = table.rows if isinstance(table, _Table) else table
            for start in range(0, len(rows), _LOOKED_AT_ONCE):
                part = rows[start : start + _LOOKED_AT_ONCE]
                yield _sorted(part[part["physical_offset"] < physical_offset])

    def roll_again(self, rows: Array, now_ms: int) -> None:
        """Roll timers again as soon as possible, after a failure."""
        self._add_rolls(rows, np.full(len(rows), now_ms // SLOT_MS - 1))

    def forget(self, rows: Array) -> None:
        """Drop timers whose copies are stored, or that were delivered."""
        for slot, numbers in groups(slots_of(rows)):
            self._drop(slot, partial(_are_at, rows["queue_offset"][numbers]))

    def drop_sources(self, sources: Array) -> Array:
        """Drop the timers with these sources; returns them."""
        rows = self._timers.all_rows()
        found = rows[np.isin(rows["source"], sources)]
        self.forget(found)
        return found

    def first_ms(self) -> int:
        """Due time of the first timer; there must be one."""
        return int(self._timers.all_rows()["due_ms"].min())

    def lowest_queue_offset(self) -> int | None:
        """The lowest queue offset of a timer or recall; None if nothing waits."""
        return self._timers.lowest_queue_offset()


def _are_at(queue_offsets: Array, rows: Array) -> Array:
    where: Array = np.isin(rows["queue_offset"], queue_offsets)
    return where


def _is_of(topic: int, key: int) -> Callable[[Array], Array]:
    return lambda rows: (rows["key"] == np.uint64(key)) & (rows["topic"] == topic)


def _oldest_before_each(copies: Array, rows: Array) -> Array:
    """A mask of the oldest timer with the key of each copy, in order, that precedes the copy."""
    where = np.isin(rows["key"], copies["key"])
    oldest: defaultdict[tuple[int, int], deque[tuple[int, int]]] = defaultdict(deque)
    for number in np.flatnonzero(where)[np.argsort(rows["queue_offset"][where])].tolist():
        row = rows[number]
        oldest[int(row["topic"]), int(row["key"])].append((int(row["queue_offset"]), number))
    where[:] = False
    for copy in copies:
        known = oldest[int(copy["topic"]), int(copy["key"])]
        if known and known[0][0] < copy["queue_offset"]:
            where[known.popleft()[1]] = True
    return where
