"""ConsumeQueue: one queue's units, which map queue offsets to physical offsets."""

from __future__ import annotations

import mmap
import struct
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from headrace_broker.store.files.file_seal import StoreDamaged
from headrace_broker.store.files.gallop import gallop
from headrace_broker.store.files.mapped_file_queue import MappedFileQueue
from headrace_protocol.columns import UNIT_DTYPE

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files
    from headrace_broker.store.files.mapped_file import MappedFile
    from headrace_broker.store.integrity.seal import Seals

UNIT: Final = struct.Struct(">qiq")
UNIT_BYTES: Final = UNIT.size
Units = npt.NDArray[Any]
# As ``ConsumeQueue.units_view``; may raise NotReady.
ReadUnits = Callable[["ConsumeQueue", int, int], memoryview]
# Size of a blank unit, which fills queue offsets without a record, as at the start of a queue that
# begins late.
BLANK_SIZE: Final = 0x7FFFFFFF
ALLOCATE_STEP_BYTES: Final = 1 << 18
WARM_FILES: Final = 3
BLANK_UNITS: Final = 512  # checked per read


class ConsumeQueue:
    """Units of 20 bytes in files of one length; ``max_offset`` is the next one to write.

    It goes to ``position`` in ``map``; disk blocks are allocated up to ``room_end``. The dispatcher
    writes there directly while there is room and calls ``put`` or ``put_block`` for everything
    else, which is everything while ``map`` is None.

    A unit's number is its place in the files; here it is its queue offset, too. A
    ``BatchConsumeQueue`` has other units, which may stand for many messages.
    """

    folder: ClassVar = "consumequeue"
    size_setting: ClassVar = "consume_queue_file_bytes"
    unit_dtype: ClassVar = UNIT_DTYPE
    unit_bytes: ClassVar = UNIT_BYTES
    is_batch: ClassVar = False

    __slots__ = (
        "_is_deleted",
        "_log_min_seen",
        "file",
        "files",
        "floor",
        "flushed_offset",
        "is_cut",
        "map",
        "max_offset",
        "min_offset_seen",
        "position",
        "room_end",
        "started_at",
    )

    def __init__(self, directory: Path, file_bytes: int, fs: Files) -> None:
        """directory: ``consumequeue/TOPIC/QUEUE_ID``, created with the first unit."""
        self.files = MappedFileQueue(directory, file_bytes, fs, self.size_setting)
        self.file: MappedFile | None = None
        self.map: mmap.mmap | None = None
        self.position = self.room_end = 0
        self.max_offset = self.flushed_offset = 0
        self.started_at = 0  # units before it predate this process and may not be in memory
        # Whether units were cleared since the last flush; a power cut would bring them back.
        self.is_cut = False
        self._is_deleted = False
        # The last result of min_offset(), which never falls while there are units.
        self.min_offset_seen = 0
        self.floor = 0  # the queue offset below which messages are hidden
        self._log_min_seen = -1

    # --- writing ---------------------------------------------------------------------------

    def put(self, queue_offset: int, physical_offset: int, size: int, tags_code: int) -> bool:
        """Add one unit; returns False if it is there already or the queue is deleted.

        Raises OSError on a full disk.
        """
        if self._is_deleted:
            return False
        if queue_offset < self.max_offset and not self._reset_if_recreated(
            queue_offset, physical_offset
        ):
            return False
        self._fill_to(queue_offset)
        self._make_room()
        assert self.map is not None
        UNIT.pack_into(self.map, self.position, physical_offset, size, tags_code)
        self.position += UNIT_BYTES
        self.max_offset += 1
        return True

    def put_block(self, units: Units) -> int:
        """Add units at ``max_offset``, as many as the file has room for; returns how many.

        Units of a deleted queue are discarded.
        """
        if self._is_deleted:
            return len(units)
        self._make_room()
        assert self.map is not None
        count = min(len(units), (self.room_end - self.position) // self.unit_bytes)
        end = self.position + count * self.unit_bytes
        self.map[self.position : end] = units[:count].tobytes()
        self.position = end
        self.max_offset += count
        return count

    def _reset_if_recreated(self, queue_offset: int, physical_offset: int) -> bool:
        # A recreated topic counts from 0 again, later in the log.
        if queue_offset or physical_offset <= self.last_physical_offset:
            return False
        self.truncate(0)
        return True

    def _fill_to(self, queue_offset: int) -> None:
        if queue_offset == self.max_offset:
            return
        if not self.files.files:
            start = queue_offset * UNIT_BYTES // self.files.file_bytes * self.files.file_bytes
            self.max_offset = self.flushed_offset = start // UNIT_BYTES
        # Searches rely on ascending physical offsets.
        before = max(self.last_physical_offset, 0)
        blank = np.array([(before, BLANK_SIZE, 0)], UNIT_DTYPE)
        while self.max_offset < queue_offset:
            self.put_block(np.repeat(blank, min(queue_offset - self.max_offset, 4096)))

    def _make_room(self) -> None:
        unit_bytes = self.unit_bytes
        if self.position + unit_bytes <= self.room_end:
            return
        if self.map is None and self.file is not None:
            self._map_for_writing(self.file)
            if self.position + unit_bytes <= self.room_end:
                return
        if self.file is None or self.position == self.files.file_bytes:
            start = self.end_number * unit_bytes
            # Most queues stay small: the first step is one page.
            first_bytes = min(mmap.PAGESIZE, self.files.file_bytes)
            self._write_to(self.files.add(start, first_bytes), 0)
        else:
            end = self.position + unit_bytes
            step = ALLOCATE_STEP_BYTES if end > mmap.PAGESIZE else mmap.PAGESIZE
            self.file.allocate(self.position, end, step)
        assert self.file is not None
        self._map_for_writing(self.file)

    def _map_for_writing(self, file: MappedFile) -> None:
        if self.map is None:
            self.files.fs.map_budget.mapped(self)
        self.map = file.map
        self.room_end = file.allocated_bytes - file.allocated_bytes % self.unit_bytes

    def loaded(self) -> None:
        """End the start: all units that existed when the store was opened are loaded."""
        self.started_at = self.end_number
        self.unmap()

    def unmap(self) -> None:
        """Unmap all files until they are needed again."""
        self.map = None
        self.room_end = 0
        for file in self.files.files:
            file.unmap()

    def _write_to(self, file: MappedFile, position: int) -> None:
        self.file = file
        self.map = None
        self.position = position
        self.room_end = 0

    # --- start, truncation, cleaning -------------------------------------------------------

    def load(self, is_clean: bool, durable_below: int) -> None:
        """Find the files and the end of the units. Raises StoreFormatError.

        After a clean stop a binary search finds the end. After a crash all units that may not have
        been flushed are read, since units after a hole may have reached the disk first: the files
        whose first unit is not below the physical offset ``durable_below``, the file before these,
        and at least the last three.
        """
        self.files.load(is_clean=is_clean)
        files = self.files.files
        if is_clean and files:
            self._write_to(files[-1], self._used_units(files[-1]) * self.unit_bytes)
            self.note_end((files[-1].start_offset + self.position) // self.unit_bytes)
        elif files:
            self._end_at(self._unbroken_end(files[self._first_unproven(durable_below) :]))
        self.flushed_offset = self.end_number

    def _first_unproven(self, durable_below: int) -> int:
        files = self.files.files
        number = max(len(files) - WARM_FILES, 0)
        while number:
            physical_offset, size, _ = UNIT.unpack(files[number].pread(0, UNIT_BYTES))
            if size > 0 and physical_offset < durable_below:
                break
            number -= 1
        return number

    def attach_seals(self, seals: Seals) -> int:
        """Attach the files' seals after a clean stop; returns ``last_physical_offset``.

        Raises StoreDamaged if the units do not end where the seals say.
        """
        for file, used_bytes in self.used:
            file.seal = seals.find(file.path)
            if file.seal is not None and file.seal.used_bytes != used_bytes:
                end = max(file.seal.used_bytes, used_bytes)
                raise StoreDamaged(file.path, 0, end)
        return self.last_physical_offset

    def _used_units(self, file: MappedFile) -> int:
        """Count the units; gallops from the start, since most queues have a single page."""
        head, unit_bytes = file.pread(0, mmap.PAGESIZE), self.unit_bytes

        def is_used(number: int) -> bool:
            at = number * unit_bytes
            data = head[at : at + UNIT_BYTES]
            if len(data) < UNIT_BYTES:
                data = file.pread(at, UNIT_BYTES)
            size: int = UNIT.unpack(data)[1]
            return size > 0

        return gallop(0, file.file_bytes // unit_bytes, is_used)

    def _unbroken_end(self, files: list[MappedFile]) -> int:
        """Number of the first unit that is missing or torn between two disk sectors.

        A torn unit that passes for a whole one has the new size, but a physical offset of 0 or
        without its upper half, so it breaks the ascending order.
        """
        before, unit_bytes = 0, self.unit_bytes
        for file in files:
            end = file.data_end() // unit_bytes * unit_bytes
            units = np.frombuffer(file.pread(0, end), self.unit_dtype)
            targets = units["physical_offset"].astype(np.int64)
            is_ascending = np.diff(targets, prepend=before) >= 0
            used = is_ascending & self._are_whole(units)
            count = len(used) if used.all() else int(used.argmin())
            if count < file.file_bytes // unit_bytes:
                return file.start_offset // unit_bytes + count
            before = targets[-1]
        return files[-1].end_offset // unit_bytes

    def _are_whole(self, units: Units) -> Units:
        is_used: Units = units["size"] > 0
        return is_used

    def truncate(self, queue_offset: int) -> None:
        """Remove the messages from ``queue_offset`` on; of a batch all or none."""
        self._truncate_at(self.number_of(queue_offset))

    def _truncate_at(self, number: int) -> None:
        if number < self.end_number:
            self._end_at(max(number, self.files.min_offset // self.unit_bytes))

    def _end_at(self, number: int) -> None:
        self.flushed_offset = min(self.flushed_offset, number)
        self._log_min_seen = -1
        self.min_offset_seen = 0
        end = number * self.unit_bytes
        self.files.delete_from(end)
        self.file = self.map = None
        self.position = self.room_end = 0
        if self.files.files:
            last = self.files.files[-1]
            position = end - last.start_offset
            if last.seal is not None and position < last.seal.used_bytes:
                last.seal = None
            self._write_to(last, position)
            if last.has_data(position):
                last.clear_from(position)
                self.is_cut = True
        self.note_end(number)
        self.floor = min(self.floor, self.max_offset)

    def note_end(self, number: int) -> None:
        """Take the units before ``number`` for those of the queue."""
        self.max_offset = number

    def truncate_from_physical(self, physical_offset: int) -> None:
        """Remove the units that point at or past ``physical_offset``."""
        self._truncate_at(self._first_number_at(physical_offset))

    def detach_before(self, number: int, queue_offset: int) -> list[MappedFile]:
        """Detach the files that end at or before a unit; the records of those left the log.

        queue_offset: of its first message.
        """
        self.min_offset_seen = max(self.min_offset_seen, min(queue_offset, self.max_offset))
        end = number * self.unit_bytes
        return self.files.detach_first(
            sum(file.end_offset <= end for file in self.files.files[:-1])
        )

    def raise_floor(self, queue_offset: int) -> None:
        """Hide everything below ``queue_offset``, though its records are still in the log."""
        if queue_offset > self.floor:
            self.floor = min(queue_offset, self.max_offset)
            self._log_min_seen = -1

    def restore_floor(self, queue_offset: int, physical_offset_before: int) -> None:
        """Raise the floor, if the unit before it points to ``physical_offset_before``."""
        if (
            self.first_offset < queue_offset <= self.max_offset
            and self.unit(queue_offset - 1)[0] == physical_offset_before
        ):
            self.raise_floor(queue_offset)

    def delete(self) -> None:
        """Remove every file and the folder.

        Rows held back by a gate or a full disk may still arrive. They must not create the folder
        again, since it may belong to a later queue of this name.
        """
        self._is_deleted = True
        self.files.delete_from(0)
        if self.files.directory.exists():
            self.files.directory.rmdir()
        self.file = self.map = None
        self.position = self.room_end = self.max_offset = self.flushed_offset = 0

    @property
    def used(self) -> list[tuple[MappedFile, int]]:
        """Each file and its bytes in use."""
        sizes = [self.files.file_bytes] * (len(self.files.files) - 1) + [self.position]
        return list(zip(self.files.files, sizes, strict=False))

    def dirty_bytes(self) -> int:
        """Bytes written since the last flush began."""
        return (self.end_number - self.flushed_offset) * self.unit_bytes

    def start_flush(self) -> Callable[[], None]:
        """The function by which a thread brings all units so far to disk."""
        first = self.files.find(self.flushed_offset * self.unit_bytes)
        files = self.files.files[self.files.files.index(first) :] if first else []
        self.flushed_offset = self.end_number
        self.is_cut = False

        def flush() -> None:
            for file in files:
                file.sync()

        return flush

    # --- numbers of units ------------------------------------------------------------------

    @property
    def end_number(self) -> int:
        """One past the number of the newest unit."""
        return self.max_offset

    @property
    def first_number(self) -> int:
        """Number of the oldest unit on disk, even if its record has left the log."""
        return self.files.min_offset // self.unit_bytes if self.files.files else self.end_number

    # --- reading ---------------------------------------------------------------------------

    def units_view(self, number: int, count_max: int) -> memoryview:
        """Units from ``number`` on as raw bytes; the end of a file returns fewer."""
        unit_bytes = self.unit_bytes
        start = number * unit_bytes
        file = self.files.find(start)
        count = min(count_max, self.end_number - number)
        if file is None or count <= 0:
            return memoryview(b"")
        view = self.view_of(file)
        position = start - file.start_offset
        end = min(position + count * unit_bytes, file.file_bytes)
        if file.seal is not None:
            file.require(position, end)
        return view[position:end]

    def view_of(self, file: MappedFile) -> memoryview:
        """A whole file, mapped within the map budget."""
        if not file.is_mapped:
            self.files.fs.map_budget.mapped(self)
        return file.view

    def number_of(self, queue_offset: int, _read: ReadUnits = units_view, /) -> int:
        """Number of the unit with a message, or of the first unit past it.

        read: reads the units where that takes a search; its exceptions pass through.
        """
        return queue_offset

    def offset_of(self, number: int, _read: ReadUnits = units_view, /) -> int:
        """Queue offset of a unit's first message; ``max_offset`` for ``end_number``.

        read: as in ``number_of``.
        """
        return number

    def unit(self, queue_offset: int) -> tuple[int, int, int]:
        """Physical offset, size and tags code of the unit with a message, which must exist."""
        return self.head_of(self.number_of(queue_offset))

    def head_of(self, number: int) -> tuple[int, int, int]:
        """Physical offset, size and tags code of a unit, which must exist."""
        physical_offset, size, tags_code = UNIT.unpack_from(self.units_view(number, 1))
        return physical_offset, size, tags_code

    @property
    def last_physical_offset(self) -> int:
        """Physical offset in the newest unit; -1 without units."""
        if self.end_number * self.unit_bytes <= self.files.min_offset or not self.files.files:
            return -1
        return self.head_of(self.end_number - 1)[0]

    @property
    def first_offset(self) -> int:
        """Queue offset of the oldest unit on disk, even if its record has left the log."""
        return self.offset_of(self.first_number)

    def min_offset(self, log_min_offset: int, read: ReadUnits = units_view) -> int:
        """Queue offset of the oldest unit at or above the floor whose record is in the log.

        read: reads the units; its exceptions pass through.
        """
        if self._log_min_seen != log_min_offset:
            units = partial(self._units, read)
            found = skip_blank(units, self._first_kept(log_min_offset, read), self.end_number)
            self.min_offset_seen = max(self.offset_of(found, read), self.floor)
            # Not cached for an empty queue: the next unit may be its first one.
            is_empty = self.min_offset_seen >= self.max_offset
            self._log_min_seen = -1 if is_empty else log_min_offset
        return self.min_offset_seen

    def _first_kept(self, log_min_offset: int, read: ReadUnits) -> int:
        def physical_offset_of(number: int) -> int:
            return int(UNIT.unpack_from(read(self, number, 1))[0])

        low = max(self.first_number, self.number_of(self.min_offset_seen, read))
        return first_at(physical_offset_of, log_min_offset, low, self.end_number)

    def first_at_or_after(self, physical_offset: int) -> int:
        """Queue offset of the first unit at or past ``physical_offset``; ``max_offset`` if none."""
        return self.offset_of(self._first_number_at(physical_offset))

    def _first_number_at(self, physical_offset: int) -> int:
        return first_at(
            lambda number: self.head_of(number)[0],
            physical_offset,
            self.first_number,
            self.end_number,
        )

    def _units(self, read: ReadUnits, number: int, count: int) -> Units:
        return np.frombuffer(read(self, number, count), self.unit_dtype)


def skip_blank(read: Callable[[int, int], Units], number: int, end: int) -> int:
    """Number of the first unit from ``number`` on that has a record; ``end`` if none has.

    read: the units from a number on, up to a count.
    """
    while number < end and len(units := read(number, BLANK_UNITS)):
        is_there = units["size"] != BLANK_SIZE
        if is_there.any():
            return number + int(is_there.argmax())
        number += len(units)
    return end


def first_at(
    physical_offset_of: Callable[[int], int], physical_offset: int, low: int, high: int
) -> int:
    """The first unit in ``range(low, high)`` that points at or past it; ``high`` if none does.

    physical_offset_of: returns the physical offset in a unit.
    """
    # Usually nothing has expired since the last call.
    if low < high and physical_offset_of(low) >= physical_offset:
        return low
    return low + bisect_left(range(low, high), physical_offset, key=physical_offset_of)
