"""Writes the timer wheel and the timer log for an Apache broker; headrace never reads them.

Each start creates both from the timers that wait. The wheel has a slot for each second, with the
positions of its first and last unit in the log. Units of a slot are chained, newest first.

Source: docs/store-format.md "Timers"; tests/broker/timer/test_timer_files.py.
"""

from __future__ import annotations

import os
import shutil
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace_broker.timer.arrivals import slots_of
from headrace_broker.timer.demand import SLOT_MS
from headrace_broker.timer.waiting_timers import WHEEL_SECONDS, groups
from headrace_protocol.java_hash import java_hash

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files
    from headrace_broker.timer.arrivals import Topics
    from headrace_protocol.columns import Array

SLOT: Final = np.dtype(
    [("time", ">i8"), ("first", ">i8"), ("last", ">i8"), ("count", ">i4"), ("magic", ">i4")]
)
UNIT: Final = np.dtype(
    [
        ("size", ">i4"),
        ("previous", ">i8"),
        ("magic", ">i4"),
        ("write_ms", ">i8"),
        ("delay_ms", ">i4"),
        ("physical_offset", ">i8"),
        ("record_bytes", ">i4"),
        ("topic_hash", ">i4"),
        ("reserved", ">i8"),
    ]
)
WHEEL_SLOTS: Final = 2 * WHEEL_SECONDS
PLAIN, ROLLED, RECALL = 1, 2, 4
_NO_UNIT: Final = -1
_BLANK: Final = struct.Struct(">iqI")
_BLANK_MAGIC: Final = 0xCBD43194


def units_per_file(file_bytes: int) -> int:
    """Number of units in a file of the timer log."""
    return (file_bytes - _BLANK.size) // UNIT.itemsize


class WheelChanges(NamedTuple):
    """Changes to write in a thread.

    units: from number ``first`` on. slots: of the wheel, at ``indexes``.
    is_anew: whether to create the files anew. log_position: end of the log after the write.
    """

    first: int
    units: Array
    indexes: Array
    slots: Array
    is_anew: bool
    log_position: int


class TimerWheel:
    """Both files. The wheel is in memory, where unused pages cost nothing."""

    def __init__(self, root: Path, fs: Files, file_bytes: int, topics: Topics) -> None:
        self._wheel_path = root / "timerwheel"
        self._log_folder = root / "timerlog"
        self._fs = fs
        self._file_bytes = file_bytes
        self._file_units = units_per_file(file_bytes)
        self._topics = topics
        self._hashes: list[int] = []
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all units; the next write creates both files anew."""
        self._is_anew = True
        self._slots = np.zeros(WHEEL_SLOTS, SLOT)
        self._count = 0  # of units in the log
        self._written = 0
        self._pending: list[Array] = []
        self._changed: list[Array] = []
        self._last_slots: dict[int, int] = {}  # by number of the log file, of its units

    def add(self, rows: Array, slots: Array, write_ms: Array | int) -> None:
        """Add timers and recalls.

        rows: in the order of the queue. slots: the next slot of each; a timer whose next slot is
        not its own is rolled there.
        """
        if not len(rows):
            return
        units = np.zeros(len(rows), UNIT)
        is_rolled = (slots != slots_of(rows)) & (rows["topic"] >= 0)
        units["size"] = UNIT.itemsize
        units["magic"] = PLAIN + is_rolled * ROLLED + (rows["topic"] < 0) * RECALL
        units["write_ms"] = write_ms
        units["delay_ms"] = slots * SLOT_MS - units["write_ms"].astype(np.int64)
        units["physical_offset"], units["record_bytes"] = rows["physical_offset"], rows["size"]
        topics = np.where(rows["topic"] < 0, ~rows["topic"], rows["topic"])
        units["topic_hash"] = self._topic_hashes()[topics]
        self._chain(units, slots, np.where(rows["topic"] < 0, -1, 1))
        self._append(units, slots)

    def end_with(self, row: np.void, slot: int) -> None:
        """Add a unit for the queue's last message to a slot; it delivers nothing.

        An Apache broker resumes reading the queue after the last unit's message, and chains each
        slot anew from the last unit of the slot in the log. It takes this unit for a recall, and
        only a message with TIMER_DEL_UNIQKEY recalls one.
        """
        units, slots = np.zeros(1, UNIT), np.array([slot])
        units["size"], units["magic"] = UNIT.itemsize, PLAIN + RECALL
        units["write_ms"] = slot * SLOT_MS
        units["physical_offset"], units["record_bytes"] = row["physical_offset"], row["size"]
        self._chain(units, slots, np.zeros(1, np.int64))
        self._append(units, slots)

    def used_slots(self, first: int, last: int) -> list[int]:
        """The slots from ``first`` to ``last`` that lead to units."""
        times = self._slots["time"]
        used: list[int] = np.sort(times[(times >= max(first, 1)) & (times <= last)]).tolist()
        return used

    def replace_slot(self, slot: int, rows: Array) -> None:
        """Let a slot lead to these timers and recalls only."""
        index = slot % WHEEL_SLOTS
        self._slots[index] = np.zeros((), SLOT)
        self._changed.append(np.array([index]))
        self.add(rows, np.full(len(rows), slot), slot * SLOT_MS)

    def _topic_hashes(self) -> Array:
        names = self._topics.names
        self._hashes += [java_hash(name.decode()) for name in names[len(self._hashes) :]]
        return np.array(self._hashes)

    def _position(self, number: Array | int) -> Array:
        """Positions of units in the log."""
        file, index = np.divmod(number, self._file_units)
        position: Array = file * self._file_bytes + index * UNIT.itemsize
        return position

    def _chain(self, units: Array, slots: Array, signs: Array) -> None:
        """Chain new units to the units of their slots."""
        positions = self._position(self._count + np.arange(len(units)))
        order = np.argsort(slots, kind="stable")
        ordered, placed = slots[order], positions[order]
        is_first = np.append(True, ordered[1:] != ordered[:-1])
        starts = np.flatnonzero(is_first)
        ends = np.append(starts[1:], len(order)) - 1
        distinct = ordered[starts]
        indexes = distinct % WHEEL_SLOTS
        before = self._slots[indexes]
        is_used = before["time"] == distinct
        previous = np.append(_NO_UNIT, placed[:-1])
        previous[starts] = np.where(is_used, before["last"], _NO_UNIT)
        units["previous"][order] = previous
        after = np.zeros(len(indexes), SLOT)
        after["time"], after["last"] = distinct, placed[ends]
        after["first"] = np.where(is_used, before["first"], placed[starts])
        after["count"] = np.add.reduceat(signs[order], starts) + np.where(
            is_used, before["count"], 0
        )
        self._slots[indexes] = after
        self._changed.append(indexes)

    def _append(self, units: Array, slots: Array) -> None:
        numbers = self._count + np.arange(len(units))
        for file, where in groups(numbers // self._file_units):
            last = int(slots[where].max())
            self._last_slots[file] = max(self._last_slots.get(file, 0), last)
        self._count += len(units)
        self._pending.append(units)

    # -- to disk -----------------------------------------------------------------------------------

    @property
    def is_changed(self) -> bool:
        """True if there are changes to write."""
        return self._is_anew or any(map(len, (*self._pending, *self._changed)))

    def changes(self) -> WheelChanges:
        """The changes since the last call of ``written``."""
        units = np.concatenate([np.empty(0, UNIT), *self._pending], dtype=UNIT)
        indexes = np.unique(np.concatenate([np.empty(0, np.int64), *self._changed]))
        self._pending, self._changed = [units], [indexes]
        position = int(self._position(self._count))
        return WheelChanges(
            self._written, units, indexes, self._slots[indexes], self._is_anew, position
        )

    def written(self, changes: WheelChanges, read_slot: int) -> None:
        """Forget changes that are on disk, and remove log files without units of later slots.

        read_slot: all slots before it are delivered.
        """
        self._is_anew = False
        self._written += len(changes.units)
        # ``changes`` joined the written parts into the first one.
        self._pending, self._changed = self._pending[1:], self._changed[1:]
        newest = max(self._last_slots, default=0)
        for file, last in list(self._last_slots.items()):
            if file < newest and last < read_slot and file < self._written // self._file_units:
                self._log_path(file).unlink(missing_ok=True)
                del self._last_slots[file]

    def write(self, changes: WheelChanges) -> None:
        """Write changes to disk: units before the slots that name them. Raises OSError."""
        self._fs.reserve.save(lambda: self._write(changes))

    def _write(self, changes: WheelChanges) -> None:
        fs = self._fs
        if changes.is_anew:
            self._wheel_path.unlink(missing_ok=True)
            shutil.rmtree(self._log_folder, ignore_errors=True)
        if not self._log_folder.exists():
            fs.make_directories(self._log_folder)
        numbers = changes.first + np.arange(len(changes.units))
        for file, where in groups(numbers // self._file_units):
            self._write_units(file, int(numbers[where[0]] % self._file_units), changes.units[where])
        self._write_slots(changes)
        fs.fsync_directory(self._log_folder)
        fs.fsync_directory(self._log_folder.parent)

    def _write_units(self, file: int, index: int, units: Array) -> None:
        fs = self._fs
        descriptor = fs.open(self._log_path(file), os.O_RDWR | os.O_CREAT)
        try:
            fs.truncate(descriptor, self._file_bytes)
            fs.write(descriptor, units.tobytes(), index * UNIT.itemsize)
            if index + len(units) == self._file_units:
                end = self._file_units * UNIT.itemsize
                blank = _BLANK.pack(self._file_bytes - end, 0, _BLANK_MAGIC)
                fs.write(descriptor, blank, end)
        finally:
            fs.close(descriptor)
        fs.sync(self._log_path(file))

    def _write_slots(self, changes: WheelChanges) -> None:
        fs = self._fs
        descriptor = fs.open(self._wheel_path, os.O_RDWR | os.O_CREAT)
        try:
            fs.truncate(descriptor, WHEEL_SLOTS * SLOT.itemsize)
            indexes = changes.indexes
            breaks = np.flatnonzero(np.diff(indexes) != 1) + 1
            for run in np.split(np.arange(len(indexes)), breaks):
                if len(run):
                    data = changes.slots[run].tobytes()
                    fs.write(descriptor, data, int(indexes[run[0]]) * SLOT.itemsize)
        finally:
            fs.close(descriptor)
        fs.sync(self._wheel_path)

    def _log_path(self, file: int) -> Path:
        return self._log_folder / f"{file * self._file_bytes:020d}"
