"""Reads of a compacted queue: its compaction log, then what follows in the CommitLog.

The follower appends to the compaction log what it has read from the CommitLog, and the CommitLog
keeps what the follower has not brought to disk. So together they have every message, and those of
the CommitLog that the compaction log lacks are newer than all that it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.compaction.log_reader import LogReader
    from headrace_broker.compaction.queues import CompactedQueue
    from headrace_broker.store.store_source import Boundary, GetResult, StoreSource


class CompactedSource:
    """Reads a compacted queue; see ``Source``. Each read may raise NotReady.

    An offset without a message stands for the next message, also one below the first message. If
    the compaction log is lost, the queue begins at 0 all the same, and reads of messages that the
    CommitLog lacks raise RequestError.
    """

    __slots__ = ("_find", "_tail")

    def __init__(self, tail: StoreSource, find: Callable[[], CompactedQueue | None]) -> None:
        """find: the open log of the queue; None before the follower has opened it."""
        self._tail = tail
        self._find = find

    def _find_log(self) -> LogReader | None:
        found = self._find()
        return found.reader if found is not None else None

    # --- by queue offset -------------------------------------------------------------------

    def get(
        self, queue_offset: int, count_max: int, bytes_max: int, tags: frozenset[int] | None
    ) -> GetResult:
        """See ``StoreSource.get``."""
        if (log := self._log_with(queue_offset)) is not None:
            return log.get(queue_offset, count_max, bytes_max, tags, self._tail.max_offset())
        found = self._tail.get(self._in_tail(queue_offset), count_max, bytes_max, tags)
        return found._replace(min_offset=self.min_offset())

    def get_bulk(
        self, queue_offset: int, count_max: int, bytes_max: int, tags: frozenset[int] | None
    ) -> GetResult:
        """See ``StoreSource.get_bulk``."""
        if (log := self._log_with(queue_offset)) is not None:
            return log.get_bulk(queue_offset, count_max, bytes_max, tags, self._tail.max_offset())
        found = self._tail.get_bulk(self._in_tail(queue_offset), count_max, bytes_max, tags)
        return found._replace(min_offset=self.min_offset())

    def _in_tail(self, queue_offset: int) -> int:
        """The CommitLog's queue offset for one that the compaction log does not reach."""
        return max(queue_offset, self._tail.min_offset())

    def _log_with(self, queue_offset: int) -> LogReader | None:
        """The log if it reaches an offset. Raises RequestError if it is lost with the messages."""
        found = self._find()
        if found is not None and queue_offset <= found.reader.last_offset:
            return found.reader
        if found is not None and queue_offset < self._tail.min_offset():
            found.require_whole()
        return None

    @property
    def _oldest(self) -> int | None:
        """The oldest queue offset of the compaction log, also of one that is lost."""
        found = self._find()
        if found is None:
            return None
        return 0 if found.lost else found.reader.min_offset

    def min_offset(self) -> int:
        """The oldest queue offset that has a message."""
        oldest = self._oldest
        return self._tail.min_offset() if oldest is None else oldest

    def max_offset(self) -> int:
        """One past the newest queue offset."""
        return self._tail.max_offset()

    def known_range(self) -> tuple[int, int]:
        """``min_offset`` as far as it is known, and ``max_offset``; never waits for the disk."""
        oldest = self._oldest
        low, end = self._tail.known_range()
        return (low if oldest is None else oldest), end

    def unit(self, queue_offset: int) -> tuple[int, int, int]:
        """Position, size and tags code of a message; the position is in the log that has it."""
        log = self._find_log()
        found = log.unit(queue_offset) if log is not None else None
        if found is None:
            return self._tail.unit(self._in_tail(queue_offset))
        return found.position, found.size, found.tags_code

    def missing_from(self, queue_offset: int) -> int:
        """The number of offsets from ``queue_offset`` on whose message was compacted."""
        log = self._find_log()
        if log is None or queue_offset > log.last_offset:
            return 0
        return log.last_offset + 1 - queue_offset - log.count_from(queue_offset)

    def record_bytes(self) -> int:
        """Bytes of the messages; see ``StoreSource.record_bytes``."""
        log = self._find_log()
        if log is None:
            return self._tail.record_bytes()
        return log.record_bytes() + self._tail.record_bytes(log.last_offset + 1)

    # --- by time ---------------------------------------------------------------------------

    def offset_by_time(self, timestamp_ms: int, boundary: Boundary = "LOWER") -> int:
        """See ``StoreSource.offset_by_time``."""
        found = self._find()
        if found is None or found.lost:
            offset = self._tail.offset_by_time(timestamp_ms, boundary)
            return 0 if found and offset <= self._tail.min_offset() else offset
        log = found.reader
        end = log.last_offset + 1
        is_lower = boundary == "LOWER"
        before, after = log.offsets_around(timestamp_ms if is_lower else timestamp_ms + 1)
        if is_lower:
            return max(self._tail.offset_by_time(timestamp_ms), end) if after is None else after
        in_tail = self._tail.offset_by_time(timestamp_ms, boundary) if after is None else -1
        return in_tail if in_tail >= end else before or 0

    def store_time_at(self, queue_offset: int) -> int | None:
        """Store time of a message in ms; None if there is none from the offset on."""
        log = self._find_log()
        store_ms = log.store_time_at(queue_offset) if log is not None else None
        if store_ms is not None:
            return store_ms
        return self._tail.store_time_at(self._in_tail(queue_offset))
