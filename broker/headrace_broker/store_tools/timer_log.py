"""The timer log and the wheel, as ``headrace store dump --timers`` and fsck read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace_broker.store_tools.directory import is_numbered
from headrace_broker.timer.demand import SLOT_MS
from headrace_broker.timer.wheel import RECALL, ROLLED, SLOT, UNIT, WHEEL_SLOTS, units_per_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from headrace_protocol.columns import Array

_WHEEL_BYTES: Final = WHEEL_SLOTS * SLOT.itemsize


class TimerUnit(NamedTuple):
    """One unit of the timer log.

    position: in the timer log. kind: "timer", "recall", "rolled" for a timer that is stored again
    at the time of its slot, or "end" for a unit that delivers nothing. slot_ms: that time.
    write_ms: when it began to wait. physical_offset, record_bytes: of its record. topic_hash: of
    its real topic. previous: position of the slot's unit before it, -1 if it is the first.
    is_in_wheel: whether the wheel's slot of that time reaches from a unit at or before it to one at
    or behind it.
    """

    position: int
    kind: str
    slot_ms: int
    write_ms: int
    physical_offset: int
    record_bytes: int
    topic_hash: int
    previous: int
    is_in_wheel: bool


class TimerLog:
    """The units of the timer log's files, which have one length and their positions as names."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Reads all files. Raises OSError."""
        self._file_bytes = paths[0].stat().st_size if paths else 0
        count = units_per_file(self._file_bytes) if paths else 0
        self._files: dict[int, Array] = {
            int(path.name): np.fromfile(path, UNIT, count) for path in sorted(paths)
        }

    def at(self, position: int) -> np.void | None:
        """The unit at a position; None if there is none."""
        start = position // self._file_bytes * self._file_bytes
        number, rest = divmod(position - start, UNIT.itemsize)
        units = self._files.get(start)
        if units is None or rest or number >= len(units):
            return None
        unit: np.void = units[number]
        return unit if unit["size"] == UNIT.itemsize else None

    def files(self) -> Iterator[tuple[Array, Array]]:
        """Positions and units of each file, as far as units were written."""
        for start, units in self._files.items():
            numbers = np.flatnonzero(units["size"] == UNIT.itemsize)
            yield start + numbers * UNIT.itemsize, units[numbers]


def timer_units(root: Path) -> Iterator[TimerUnit]:
    """The units of a store's timer log in order; none if there is no log. Raises OSError."""
    wheel, folder = root / "timerwheel", root / "timerlog"
    is_whole = wheel.exists() and wheel.stat().st_size == _WHEEL_BYTES
    slots = np.fromfile(wheel, SLOT) if is_whole else np.zeros(WHEEL_SLOTS, SLOT)
    for positions, units in TimerLog([*filter(is_numbered, folder.glob("*"))]).files():
        slot_ms = units["write_ms"].astype(np.int64) + units["delay_ms"]
        slot = slots[slot_ms // SLOT_MS % WHEEL_SLOTS]
        is_in_wheel = slot["time"] == slot_ms // SLOT_MS
        is_in_wheel &= (slot["first"] <= positions) & (positions <= slot["last"])
        yield from map(
            TimerUnit,
            positions.tolist(),
            map(_kind, units["magic"].tolist(), units["topic_hash"].tolist()),
            slot_ms.tolist(),
            *(units[name].tolist() for name in _COPIED),
            is_in_wheel.tolist(),
        )


_COPIED: Final = ("write_ms", "physical_offset", "record_bytes", "topic_hash", "previous")


def _kind(magic: int, topic_hash: int) -> str:
    if magic & RECALL:
        return "recall" if topic_hash else "end"
    return "rolled" if magic & ROLLED else "timer"
