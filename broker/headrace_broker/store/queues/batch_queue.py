"""BatchConsumeQueue: the ConsumeQueue of a topic with ``queue.type=BatchCQ``.

A unit stands for a record with one or more messages, and states the queue offset of the first. So
a unit's number is not its queue offset; a search finds it. Queue offsets may have gaps.
Source: docs/store-format.md "Batch unit".
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from headrace_broker.store.log.batch_units import (
    BATCH_UNIT,
    BATCH_UNIT_BYTES,
    BATCH_UNIT_DTYPE,
    used_mask,
)
from headrace_broker.store.queues.consume_queue import ConsumeQueue

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files
    from headrace_broker.store.queues.consume_queue import ReadUnits, Units
    from headrace_broker.store.settings import StoreSettings

_WHOLE_UNIT: Final = struct.Struct(">qiqqqhii")


class BatchConsumeQueue(ConsumeQueue):
    """Units of 46 bytes. ``flushed_offset`` and ``started_at`` are numbers of units.

    The dispatcher writes with ``put_unit`` and ``put_units`` only.
    """

    folder: ClassVar = "batchconsumequeue"
    size_setting: ClassVar = "batch_queue_file_bytes"
    unit_dtype: ClassVar = BATCH_UNIT_DTYPE
    unit_bytes: ClassVar = BATCH_UNIT_BYTES
    is_batch: ClassVar = True

    __slots__ = ("_end_number",)

    def __init__(self, directory: Path, file_bytes: int, fs: Files) -> None:
        """directory: ``batchconsumequeue/TOPIC/QUEUE_ID``, created with the first unit."""
        super().__init__(directory, file_bytes, fs)
        self._end_number = 0

    # --- writing ---------------------------------------------------------------------------

    def put_units(self, units: Units) -> None:
        """Add units in log order; those that are there already are skipped.

        Raises OSError on a full disk.
        """
        starts = units["queue_offset"].astype(np.int64)
        ends = starts + units["count"]
        if starts[0] >= self.max_offset and (starts[1:] >= ends[:-1]).all():
            self._put_all(units)
            return
        for *unit, _, _ in units.tolist():
            self.put_unit(*unit)

    def put_unit(
        self,
        physical_offset: int,
        size: int,
        tags_code: int,
        store_ms: int,
        queue_offset: int,
        count: int,
    ) -> None:
        """Add one unit, unless it is there already or the queue is deleted.

        Raises OSError on a full disk.
        """
        if self._is_deleted:
            return
        if queue_offset < self.max_offset and not self._reset_if_recreated(
            queue_offset, physical_offset
        ):
            return
        self._make_room()
        assert self.map is not None
        unit = physical_offset, size, tags_code, store_ms, queue_offset, count, -1, 0
        _WHOLE_UNIT.pack_into(self.map, self.position, *unit)
        self.position += BATCH_UNIT_BYTES
        self._end_number += 1
        self.max_offset = queue_offset + count

    def _put_all(self, units: Units) -> None:
        put_count = 0
        while put_count < len(units):
            put_count += self.put_block(units[put_count:])

    def put_block(self, units: Units) -> int:
        """As ``ConsumeQueue.put_block``."""
        count = super().put_block(units)
        if not self._is_deleted:
            self._end_number += count
            last = units[count - 1]
            self.max_offset = int(last["queue_offset"]) + int(last["count"])
        return count

    def _are_whole(self, units: Units) -> Units:
        return used_mask(units)

    def note_end(self, number: int) -> None:
        """As ``ConsumeQueue.note_end``."""
        self._end_number, self.max_offset = number, 0
        if number > self.first_number:
            *_, queue_offset, count = self._unit_at(number - 1, ConsumeQueue.units_view)
            self.max_offset = queue_offset + count

    def delete(self) -> None:
        """As ``ConsumeQueue.delete``."""
        super().delete()
        self._end_number = 0

    # --- numbers of units ------------------------------------------------------------------

    @property
    def end_number(self) -> int:
        """One past the number of the newest unit."""
        return self._end_number

    def number_of(self, queue_offset: int, read: ReadUnits = ConsumeQueue.units_view, /) -> int:
        """As ``ConsumeQueue.number_of``."""
        first, end = self.first_number, self._end_number
        if queue_offset >= self.max_offset or first == end:
            return end

        return number_with(
            queue_offset, range(first, end), lambda number: self._unit_at(number, read)[4:]
        )

    def offset_of(self, number: int, read: ReadUnits = ConsumeQueue.units_view, /) -> int:
        """As ``ConsumeQueue.offset_of``."""
        return self._unit_at(number, read)[4] if number < self._end_number else self.max_offset

    def _unit_at(self, number: int, read: ReadUnits) -> tuple[int, int, int, int, int, int]:
        return BATCH_UNIT.unpack(read(self, number, 1))


def number_with(
    queue_offset: int, numbers: range, batch_at: Callable[[int], tuple[int, int]]
) -> int:
    """Number of the unit with a message, or of the first unit past it.

    batch_at: returns queue offset and count of the unit with a number.
    """
    found = bisect_right(numbers, queue_offset, key=lambda number: batch_at(number)[0]) - 1
    if found < 0:
        return numbers.start
    start, count = batch_at(numbers[found])
    return numbers[found] + (queue_offset >= start + count)


# By ``is_batch``.
QUEUE_KINDS: Final = ConsumeQueue, BatchConsumeQueue


def queue_at(folder: Path, settings: StoreSettings, fs: Files) -> ConsumeQueue:
    """The queue of a folder KIND/TOPIC/QUEUE_ID, whose files are not loaded yet."""
    kind = QUEUE_KINDS[folder.parts[-3] == BatchConsumeQueue.folder]
    return kind(folder, settings.queue_file_bytes(is_batch=kind.is_batch), fs)
