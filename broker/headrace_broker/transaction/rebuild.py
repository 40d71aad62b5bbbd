"""Rebuilds the table of transactions at a start, from both queues and the log.

A start reads halves and op records from the saved offsets on. A commit or a discarded message may
lack its op record, if the broker was killed or Apache's broker had not written it yet; a scan of
the log finds it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from headrace_broker.host_budget import Host
from headrace_broker.inner.waiting import RECORDS_AT_ONCE, Unreadable
from headrace_broker.store.log.log_rows import scan_from
from headrace_broker.transaction.halves import Decision, HalfNames, is_about_copies, named_by
from headrace_broker.transaction.table import HalfTable, OpenHalf
from headrace_protocol.message import TRANSACTION_COMMIT, TRANSACTION_MASK
from headrace_protocol.system_topics import CHECK_MAX_TIME_TOPIC

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from headrace_broker.host_budget import HostBudget
    from headrace_broker.inner.waiting import Waiting, WaitingQueue
    from headrace_broker.store.message_store import MessageStore

_Key = tuple[str, bytes]


class Progress(msgspec.Struct, frozen=True, rename="camel"):
    """Where to start reading: queue offsets of the half queue and the op queue.

    log_offset: op records name the halves of all commits and discarded messages before this
    physical offset; None if another broker saved the offsets.
    """

    half: int
    op: int
    log_offset: int | None


class _Found(NamedTuple):
    """A transaction with its halves, as far as they were read, the newest last."""

    first: int
    halves: list[tuple[Waiting, HalfNames]]


def rebuilt(
    store: MessageStore,
    halves: WaitingQueue,
    op_queue: WaitingQueue,
    progress: Progress,
    due_ms: Callable[[Waiting, HalfNames], int],
    budget: HostBudget,
) -> HalfTable:
    """The table; the halves of commits without op records are due to be named. Raises OSError."""
    table = HalfTable(budget, progress.half)
    found, unreadable = _transactions(halves, progress.half)
    table.ended(unreadable, None)
    named: set[int] = set()
    copied: set[int] = set()
    for op in _readable(op_queue, progress.op):
        (copied if is_about_copies(op) else named).update(named_by(op))
    undecided = [
        one for one in found if not any(half.queue_offset in named for half, _ in one.halves)
    ]
    decisions = _decisions(store, undecided, progress.log_offset)
    for one in found:
        copies = [half.queue_offset for half, _ in one.halves]
        places = [half.physical_offset for half, _ in one.halves]
        decision = next((decisions[place] for place in places if place in decisions), None)
        if decision or not named.isdisjoint(copies):
            table.ended(copies, decision)
            table.owe_names([copy for copy in copies if copy not in named])
            continue
        table.superseded += [copy for copy in copies[:-1] if copy not in copied]
        table.add(open_half(one.first, one.halves, due_ms))
    table.seen = max(table.seen, halves.end)
    return table


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


def _transactions(queue: WaitingQueue, first: int) -> tuple[list[_Found], list[int]]:
    """The transactions of a queue from ``first`` on, and offsets of halves that can't be read."""
    by_first: dict[int, _Found] = {}
    by_key: defaultdict[_Key, list[_Found]] = defaultdict(list)
    seen: set[int] = set()
    for half in _readable(queue, first):
        seen.add(half.queue_offset)
        names = HalfNames(half.properties)
        of_key = by_key[names.group, names.transaction_id]
        found = _original(names, by_first, of_key)
        if found is None:
            name = half.queue_offset if names.first_offset is None else names.first_offset
            found = by_first[name] = _Found(name, [])
            of_key.append(found)
        found.halves.append((half, names))
    return list(by_first.values()), [
        offset for offset in range(first, queue.end) if offset not in seen
    ]


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


def _readable(queue: WaitingQueue, first: int) -> Iterator[Waiting]:
    end = queue.end
    while first < end:
        for item in queue.read_now(first, min(first + RECORDS_AT_ONCE, end)):
            if not isinstance(item, Unreadable):
                yield item
        first += RECORDS_AT_ONCE


def _decisions(
    store: MessageStore, undecided: list[_Found], log_offset: int | None
) -> dict[int, Decision]:
    """Commits and discarded messages that are in the log, by half. Raises OSError."""
    places = [half.physical_offset for one in undecided for half, _ in one.halves]
    if not places:
        return {}
    wanted = np.array(places, np.int64)
    found: dict[int, Decision] = {}
    for block in scan_from(store.commit_log.files, max(min(places), log_offset or 0)):
        is_wanted = np.isin(block.columns.prepared_transaction_offset, wanted)
        for number in np.flatnonzero(is_wanted).tolist():
            record = block.columns.message(number)
            source = record.prepared_transaction_offset
            if record.sys_flag & TRANSACTION_MASK == TRANSACTION_COMMIT:
                found[source] = Decision.COMMIT
            elif record.topic == CHECK_MAX_TIME_TOPIC and source:  # Apache's names nothing
                found[source] = Decision.DISCARD
    return found
