"""Searches of a queue's units in any thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.store.files.cold_files import ColdFiles
from headrace_broker.store.queues.batch_queue import number_with
from headrace_broker.store.queues.consume_queue import first_at, skip_blank

if TYPE_CHECKING:
    from headrace_broker.store.queues.consume_queue import ConsumeQueue


class ColdQueue:
    """A queue as of now; its methods read the disk, and may raise OSError.

    Units deleted since then count as older than those that are left.

    units: its files. end: one past the number of its newest unit.
    """

    __slots__ = ("_first", "_floor", "_is_batch", "_known", "_max_offset", "end", "units")

    def __init__(self, queue: ConsumeQueue) -> None:
        self.units = ColdFiles(queue.files, queue.unit_dtype)
        self._first, self.end = queue.first_number, queue.end_number
        self._max_offset, self._floor = queue.max_offset, queue.floor
        # A minimum set by the floor says nothing about the log.
        self._known = queue.min_offset_seen if queue.min_offset_seen > queue.floor else 0
        self._is_batch = queue.is_batch

    def number_of(self, queue_offset: int) -> int:
        """As ``ConsumeQueue.number_of``."""
        if not self._is_batch:
            return queue_offset
        if queue_offset >= self._max_offset:
            return self.end
        return number_with(queue_offset, range(self._first, self.end), self._batch_at)

    def offset_of(self, number: int) -> int:
        """As ``ConsumeQueue.offset_of``."""
        if not self._is_batch:
            return number
        return self._batch_at(number)[0] if number < self.end else self._max_offset

    def _batch_at(self, number: int) -> tuple[int, int]:
        """Queue offset and count of a batch unit."""
        units = self.units.units(number, 1)
        return (int(units["queue_offset"][0]), int(units["count"][0])) if len(units) else (-1, 0)

    def first_at(self, physical_offset: int, queue_offset: int = 0) -> int:
        """Number of the first unit at or past a physical offset; ``end`` if none is.

        queue_offset: leave out the messages before it.
        """
        low = max(self._first, self.number_of(max(self._known, queue_offset)))
        return first_at(self.units.physical_offset, physical_offset, low, self.end)

    def first_visible(self, log_min_offset: int, queue_offset: int = 0) -> int:
        """Number of the first unit at or above the floor whose record is in the log.

        queue_offset: leave out the messages before it.
        """
        first = self.first_at(log_min_offset, max(self._floor, queue_offset))
        return skip_blank(self.units.units, first, self.end)
