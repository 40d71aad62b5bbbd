"""Reads of one queue over both tiers; see ``Source``.

The newest message is that of the local store, the oldest that of the tier. A read is served by one
of them: the tier, as far as it has the messages and the level permits it, else the local store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from headrace_broker.cold.queue import Wanted
from headrace_broker.store.store_source import GetStatus
from headrace_broker.tiered.access.settings import StorageLevel
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import NotReady, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.store.store_queue import StoreQueue
    from headrace_broker.store.store_source import Boundary, GetResult, StoreSource
    from headrace_broker.tiered.access.tier_reader import TierReader
    from headrace_broker.tiered.container.stored_tier import TierQueue

# What the local store answers for messages that have left it.
_NOT_LOCAL: Final = {
    GetStatus.OFFSET_TOO_SMALL,
    GetStatus.NO_MESSAGE_IN_QUEUE,
    GetStatus.MESSAGE_WAS_REMOVING,
}


class TieredSource:
    """A queue whose messages may be in the tier, in the local store, or in both."""

    __slots__ = ("_is_shown_only", "_level", "_local", "_name", "_queue", "_reader")

    def __init__(
        self,
        queue: StoreQueue,
        local: StoreSource,
        reader: TierReader,
        level: StorageLevel,
        *,
        is_shown_only: bool = False,
    ) -> None:
        """is_shown_only: for statistics, which leave out what can't be trusted."""
        self._is_shown_only = is_shown_only
        self._name = queue.topic, queue.queue_id
        self._queue = queue
        self._local = local
        self._reader = reader
        self._level = level

    def _stored(self) -> TierQueue | None:
        """The queue in the tier if it has a message: the range of an empty one means nothing."""
        queue = self._reader.access.queue(*self._name)
        return queue if queue is not None and queue.min_offset < queue.commit_offset else None

    def _known(self) -> TierQueue | None:
        """The queue in the tier; None if it has no message there, or only ``_opened`` can tell."""
        access = self._reader.access
        is_current = access.lives.is_current(self._name[0])
        is_ours = is_current and not access.standings.is_foreign(self._name)
        return self._stored() if is_ours else None

    def _opened(self) -> TierQueue | None:
        """The queue in the tier; None if it has no message there.

        Raises NotReady before the tier is open, or for a topic of which the tier may have an
        earlier life; RequestError if it has other messages than the log.
        """
        access = self._reader.access
        if not access.is_open:
            raise self._reader.open_first()
        reason, queue = "", self._stored()
        if (given_up := access.standings.given_up.get(self._name)) and given_up.is_foreign:
            reason = given_up.reason
        elif queue is not None:
            if access.lives.is_current(self._name[0]) or self._is_same(queue):
                return queue
            reason = f"{queue.name.path}: the tier has other messages than the log"
        if reason and not self._is_shown_only:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"the tier is not read: {reason}")
        return None

    def _is_same(self, queue: TierQueue) -> bool:
        """True if the tier has this queue's messages, judging by one that both have."""
        at = max(queue.min_offset, self._local.min_offset())
        local_ms = self._local.store_time_at(at)
        if local_ms is None or at >= queue.commit_offset:
            return True
        return local_ms == self._reader.answer((queue, at), lambda: queue.store_time(at))

    # -- by queue offset ---------------------------------------------------------------------------

    def get(
        self, queue_offset: int, count_max: int, bytes_max: int, tags: frozenset[int] | None
    ) -> GetResult:
        """As ``StoreSource.get``."""
        wanted = Wanted(queue_offset, count_max, bytes_max, tags)
        return self._read(wanted, self._local.get, is_bulk=False)

    def get_bulk(
        self, queue_offset: int, count_max: int, bytes_max: int, tags: frozenset[int] | None
    ) -> GetResult:
        """As ``StoreSource.get_bulk``."""
        wanted = Wanted(queue_offset, count_max, bytes_max, tags)
        return self._read(wanted, self._local.get_bulk, is_bulk=True)

    def _read(
        self, wanted: Wanted, read_local: Callable[..., GetResult], *, is_bulk: bool
    ) -> GetResult:
        queue, is_open = self._known(), self._reader.access.is_open
        is_trusted = self._name in self._reader.access.standings.trusted
        if self._level is StorageLevel.FORCE and is_open and is_trusted:
            queue = self._opened()
            is_past = wanted.queue_offset >= self._local.max_offset()
            if queue is not None and not is_past and _has(queue, wanted):
                return self._read_tier(queue, wanted, is_bulk)
        try:
            result = read_local(*wanted)
        except NotReady:
            is_cold_enough = self._level is StorageLevel.NOT_IN_MEM and is_trusted
            if queue is not None and is_cold_enough and _has(queue, wanted):
                return self._read_tier(queue, wanted, is_bulk)
            raise
        if result.status in _NOT_LOCAL and wanted.queue_offset < result.max_offset:
            queue = self._opened()
            if queue is not None and _has(queue, wanted):
                return self._read_tier(queue, wanted, is_bulk)
        return result if queue is None else _widened(result, queue, wanted.queue_offset)

    def _read_tier(self, queue: TierQueue, wanted: Wanted, is_bulk: bool) -> GetResult:
        shown = queue.min_offset, self._local.max_offset()
        wanted = wanted._replace(count_max=max(wanted.count_max, 1))
        return self._reader.get(queue, self._queue.topic, wanted, shown, is_bulk=is_bulk)

    def min_offset(self) -> int:
        """The oldest queue offset of both tiers. Raises NotReady."""
        queue, local = self._opened(), self._local.min_offset()
        return local if queue is None else min(queue.min_offset, local)

    def max_offset(self) -> int:
        """One past the newest queue offset, which is local."""
        return self._local.max_offset()

    def known_range(self) -> tuple[int, int]:
        """As ``StoreSource.known_range``, over both tiers."""
        queue, (low, high) = self._known(), self._local.known_range()
        return (low if queue is None else min(queue.min_offset, low)), high

    def unit(self, queue_offset: int) -> tuple[int, int, int]:
        """As ``StoreSource.unit``; for messages that are only in the tier, with offsets there."""
        queue = self._only_tiered(queue_offset)
        if queue is None:
            return self._local.unit(queue_offset)
        block = self._reader.block_at(queue, queue_offset)
        unit = block.units[int(np.searchsorted(block.offsets, queue_offset))]
        return int(unit["physical_offset"]), int(unit["size"]), int(unit["tags_code"])

    def missing_from(self, _queue_offset: int) -> int:
        """0: only what the log had lost before it was uploaded is a gap."""
        return 0

    def record_bytes(self) -> int:
        """As ``StoreSource.record_bytes``; what only the tier has is estimated by its share."""
        queue, local_bytes = self._opened(), self._local.record_bytes()
        if queue is None:
            return local_bytes
        low, end = queue.min_offset, queue.commit_offset
        only_tiered = min(self._local.min_offset(), end) - low
        tier_bytes = queue.log_bytes
        return local_bytes + tier_bytes * max(only_tiered, 0) // max(end - low, 1)

    def _only_tiered(self, queue_offset: int) -> TierQueue | None:
        """The queue in the tier, if only the tier has a message. Raises NotReady."""
        if queue_offset >= self._local.min_offset():
            return None
        queue = self._opened()
        is_kept = queue is not None and queue.min_offset <= queue_offset < queue.commit_offset
        return queue if is_kept else None

    # -- by time -----------------------------------------------------------------------------------

    def offset_by_time(self, timestamp_ms: int, boundary: Boundary = "LOWER") -> int:
        """As ``StoreSource.offset_by_time``, over both tiers."""
        found, queue = self._local.offset_by_time(timestamp_ms, boundary), self._opened()
        if queue is None:
            return found
        local_min = self._local.min_offset()
        end = min(queue.commit_offset, local_min)
        oldest_ms = self._local.store_time_at(local_min)
        limit_ms = timestamp_ms if boundary == "LOWER" else timestamp_ms + 1
        is_local = oldest_ms is not None and oldest_ms < limit_ms
        if is_local or queue.min_offset >= end:
            return found
        key = queue, queue.commit_offset, timestamp_ms, boundary
        tiered = self._reader.answer(key, lambda: queue.offset_by_time(timestamp_ms, boundary))
        if boundary == "UPPER":
            return min(tiered, end - 1)
        return tiered if tiered < end else found

    def store_time_at(self, queue_offset: int) -> int | None:
        """Store time of a message; None if neither tier has it. Raises NotReady."""
        queue = self._only_tiered(queue_offset) if queue_offset >= 0 else None
        if queue is None:
            return self._local.store_time_at(queue_offset)
        return self._reader.answer((queue, queue_offset), lambda: queue.store_time(queue_offset))


def _has(queue: TierQueue, wanted: Wanted) -> bool:
    return queue.min_offset <= wanted.queue_offset < queue.commit_offset


def _widened(result: GetResult, queue: TierQueue, queue_offset: int) -> GetResult:
    """A result of the local store with the range of both tiers."""
    low = queue.min_offset
    if low >= result.min_offset:
        return result
    if queue_offset < low:
        return result._replace(status=GetStatus.OFFSET_TOO_SMALL, min_offset=low, next_offset=low)
    return result._replace(min_offset=low)
