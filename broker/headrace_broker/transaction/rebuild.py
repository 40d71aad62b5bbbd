"""Rebuilds the table of transactions at a start, from both queues and the log.

A start reads halves and op records from the saved offsets on. A commit or a discarded message may
lack its op record, if the broker was killed or Apache's broker had not written it yet; a scan of
the log finds it.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from headrace_broker.host_budget import Host
from headrace_broker.inner.waiting import RECORDS_AT_ONCE, Unreadable
from headrace_broker.transaction.halves import (
    CHECK_TIMES_MARK,
    Decision,
    HalfNames,
    is_about_copies,
    named_by,
)
from headrace_broker.transaction.table import HalfTable, OpenHalf
from headrace_protocol.message import TRANSACTION_COMMIT, TRANSACTION_MASK
from headrace_protocol.system_topics import CHECK_MAX_TIME_TOPIC

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from headrace_broker.host_budget import HostBudget
    from headrace_broker.inner.waiting import Keep, Waiting, WaitingQueue
    from headrace_protocol.columns import Array, RecordColumns

_Key = tuple[str, bytes]
_DISCARDED = CHECK_MAX_TIME_TOPIC.encode()


class Checkpoint(msgspec.Struct, frozen=True, rename="camel"):
    """The checkpoint: queue offsets of the half queue and the op queue at which a start reads.

    log_offset: op records name the halves of all commits and discarded messages before this
    physical offset; None if another broker saved the offsets.
    """

    half: int
    op: int
    log_offset: int | None


class Decisions:
    """The commits and discarded messages of the log, by the halves that they name."""

    def __init__(self) -> None:
        self._found: list[tuple[Array, Decision]] = []

    def take(self, records: RecordColumns) -> None:
        """Note those among some records of the log."""
        sources = records.prepared_transaction_offset
        is_commit = records.sys_flag & TRANSACTION_MASK == TRANSACTION_COMMIT
        self._found.append((sources[is_commit], Decision.COMMIT))
        names, topics = records.topics
        if _DISCARDED in names:
            # Apache's discards name nothing.
            is_discard = (topics == names.index(_DISCARDED)) & ~is_commit & (sources != 0)
            self._found.append((sources[is_discard], Decision.DISCARD))

    def of(self, halves: Iterable[int]) -> dict[int, Decision]:
        """The decisions about halves at some physical offsets."""
        wanted = np.fromiter(halves, np.int64)
        return {
            half: decision
            for sources, decision in self._found
            for half in sources[np.isin(sources, wanted)].tolist()
        }


class _Found(NamedTuple):
    """A transaction with its halves, as far as they were read, the newest last."""

    first: int
    halves: list[tuple[Waiting, HalfNames]]


def rebuilt(
    halves: WaitingQueue,
    op_queue: WaitingQueue,
    checkpoint: Checkpoint,
    due_ms: Callable[[Waiting, HalfNames], int],
    budget: HostBudget,
    decisions_of: Callable[[list[int]], dict[int, Decision]],
) -> HalfTable:
    """The table; the halves of commits without op records are due to be named.

    decisions_of: those in the log about halves at physical offsets. Raises OSError.
    """
    table = HalfTable(budget, checkpoint.half)
    named: set[int] = set()
    copied: set[int] = set()
    for op in _readable(op_queue, checkpoint.op):
        (copied if is_about_copies(op) else named).update(named_by(op))
    found, others = _transactions(halves, checkpoint.half, named)
    table.ended(others, None)
    undecided = [one for one in found if not _is_named(one, named)]
    decided = decisions_of([half.physical_offset for one in undecided for half, _ in one.halves])
    for one in found:
        copies = [half.queue_offset for half, _ in one.halves]
        offsets = [half.physical_offset for half, _ in one.halves]
        decision = next((decided[offset] for offset in offsets if offset in decided), None)
        if decision or _is_named(one, named):
            table.ended(copies, decision)
            table.owe_names([copy for copy in copies if copy not in named])
            continue
        table.superseded += [copy for copy in copies[:-1] if copy not in copied]
        table.add(open_half(one.first, one.halves, due_ms))
    table.seen = max(table.seen, halves.end)
    return table


def _is_named(one: _Found, named: set[int]) -> bool:
    return one.first in named or any(half.queue_offset in named for half, _ in one.halves)


def open_half(
    first: int,
    halves: Sequence[tuple[Waiting, HalfNames]],
    due_ms: Callable[[Waiting, HalfNames], int],
) -> OpenHalf:
    """An undecided transaction. halves: its original and the copies, the newest last."""
    newest, names = halves[-1]
    oldest, oldest_names = halves[0]
    return OpenHalf(
        first,
        [half.queue_offset for half, _ in halves],
        newest.physical_offset,
        Host.of_address(oldest.born_host),
        names.group,
        names.topic,
        names.times,
        oldest.store_timestamp,
        due_ms(oldest, oldest_names),
    )


def _transactions(
    queue: WaitingQueue, first: int, named: set[int]
) -> tuple[list[_Found], list[int]]:
    """The transactions of a queue from ``first`` on, and offsets of other halves.

    Those can't be read, or are named and no copies.
    """
    known = np.fromiter(named, np.int64, len(named))
    keep = partial(_maybe_open, known)
    halves = [(half, HalfNames(half.properties)) for half in _readable(queue, first, keep)]
    if any(names.times and names.first_offset is None for _, names in halves):
        # Apache's copies do not name their original, which may be one that was left out.
        halves = [(half, HalfNames(half.properties)) for half in _readable(queue, first)]
    by_first: dict[int, _Found] = {}
    by_key: defaultdict[_Key, list[_Found]] = defaultdict(list)
    for half, names in halves:
        of_key = by_key[names.group, names.transaction_id]
        found = _original(names, by_first, of_key)
        if found is None:
            name = half.queue_offset if names.first_offset is None else names.first_offset
            found = by_first[name] = _Found(name, [])
            of_key.append(found)
        found.halves.append((half, names))
    seen = {half.queue_offset for half, _ in halves}
    return list(by_first.values()), [
        offset for offset in range(first, queue.end) if offset not in seen
    ]


def _maybe_open(named: Array, records: RecordColumns) -> Array:
    """Numbers of the halves that are not named, and of copies, which tell of others."""
    is_kept = ~np.isin(records.queue_offset, named)
    texts = records.properties()
    if CHECK_TIMES_MARK in b"".join(texts):
        is_kept |= np.array([CHECK_TIMES_MARK in text for text in texts])
    return np.flatnonzero(is_kept)


def _original(names: HalfNames, by_first: dict[int, _Found], of_key: list[_Found]) -> _Found | None:
    """The transaction that a half is a copy of.

    Apache's copies do not name it. A producer may send the same message twice, so this is the
    oldest transaction of the key that was checked less often.
    """
    if names.first_offset is not None:
        found = by_first.get(names.first_offset)
        return found if found in of_key else None
    if not names.times:
        return None
    return next((found for found in of_key if found.halves[-1][1].times < names.times), None)


def _readable(queue: WaitingQueue, first: int, keep: Keep | None = None) -> Iterator[Waiting]:
    end = queue.end
    while first < end:
        for item in queue.read_now(first, min(first + RECORDS_AT_ONCE, end), keep):
            if not isinstance(item, Unreadable):
                yield item
        first += RECORDS_AT_ONCE
