"""Checks the units of batch queues against the records of the log.

A unit and its record are matched by the physical offset, since a unit's number is not its queue
offset. What is wrong lies between two right units, and is set right where the numbers of units and
of records agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace_broker.store.log.batch_units import BATCH_UNIT_BYTES, BATCH_UNIT_DTYPE, make_units
from headrace_broker.store_tools.findings import ClearFrom, Finding, Overwrite, runs, span
from headrace_broker.store_tools.records import batch_units

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headrace_broker.store.queues.consume_queue import ConsumeQueue
    from headrace_broker.store_tools.directory import Advance
    from headrace_broker.store_tools.records import Records
    from headrace_protocol.columns import Array


class BatchQueueCheck:
    """Compares one queue's units with its records, in log order; ``findings`` comes last."""

    def __init__(self, queue: ConsumeQueue) -> None:
        self.queue = queue
        self._first = queue.first_number
        self._units = _read(queue)
        self._is_matched = np.zeros(len(self._units), bool)
        # Of the records without a right unit.
        self._wanted: list[Array] = [make_units([], [], [], [], [], [])]
        self._order = np.argsort(self._units["physical_offset"], kind="stable")

    @property
    def used_bytes(self) -> int:
        """Bytes of the units that ``findings`` reports as progress."""
        return self._units.nbytes

    def compare(self, records: Records, group: Array) -> None:
        """Compare the units of some of the queue's records, in log order."""
        wanted = batch_units(records, group[records.counts[group] > 0])
        is_right = np.zeros(len(wanted), bool)
        if len(self._units):
            targets = self._units["physical_offset"][self._order]
            at = np.searchsorted(targets, wanted["physical_offset"])
            numbers = self._order[np.minimum(at, len(targets) - 1)]
            is_right = self._units[numbers] == wanted
            self._is_matched[numbers[is_right]] = True
        self._wanted.append(wanted[~is_right])

    # --- at the end ------------------------------------------------------------------------

    def findings(self, log_min: int, log_end: int, advance: Advance) -> Iterator[Finding]:
        """All problems in order, with the units that belong there according to the log."""
        advance(self.used_bytes)
        wanted, units = np.concatenate(self._wanted), self._units
        right = np.flatnonzero(self._is_matched)
        first_right = int(right[0]) if len(right) else len(units)
        is_bad = ~self._is_matched
        is_bad[:first_right] &= ~_expired(units[:first_right], log_min)
        for start, end in runs(is_bad):
            low = int(units["physical_offset"][start - 1]) if start else -1
            high = int(units["physical_offset"][end]) if end < len(units) else log_end
            is_here = (wanted["physical_offset"] > low) & (wanted["physical_offset"] < high)
            here, wanted = wanted[is_here], wanted[~is_here]
            if not start and end < len(units):  # those before are of an earlier topic of this name
                here = here[-(end - start) :]
            yield from self._repaired(start, end, here, log_end)
        yield from self._missing(wanted[wanted["physical_offset"] > self._first_target()])

    def _first_target(self) -> int:
        """Physical offset of the first unit; records before it are of an earlier topic."""
        return int(self._units["physical_offset"][0]) if len(self._units) else -1

    def _missing(self, wanted: Array) -> Iterator[Finding]:
        """Records past the newest unit, and those for whose unit there is no place."""
        last = int(self._units["physical_offset"][-1]) if len(self._units) else -1
        is_new = wanted["physical_offset"] > last
        if is_new.any():
            yield from self._write(len(self._units), wanted[is_new], "record", "without a unit")
        for unit in wanted[~is_new][:1]:
            count = np.count_nonzero(~is_new)
            problem = f"{count} records have no unit, the first at {unit['physical_offset']}"
            yield Finding(self.queue.files.directory, problem)

    def _repaired(self, start: int, end: int, wanted: Array, log_end: int) -> Iterator[Finding]:
        """The findings for wrong units, in place of which records want others."""
        is_tail = end == len(self._units)
        if is_tail and not len(wanted):
            what = f"without a record, at the queue's end (the log ends at {log_end})"
            for path, position, low, high in self._pieces(start, end):
                fix = ClearFrom(path, position, position + (high - low) * BATCH_UNIT_BYTES)
                yield Finding(path, f"{span('unit', low, high)}: {what}", position, fix)
        elif len(wanted) == end - start or (is_tail and len(wanted) > end - start):
            yield from self._write(start, wanted, "unit", "not those of the records in the log")
        else:
            path, position, low, high = next(self._pieces(start, end))
            problem = f"{span('unit', low, high)}: in place of {len(wanted)} records of the log"
            yield Finding(path, problem, position)

    def _write(self, start: int, wanted: Array, what: str, problem: str) -> Iterator[Finding]:
        for path, position, low, high in self._pieces(start, start + len(wanted)):
            # numpy joins tables in native byte order.
            data = wanted[low - start : high - start].astype(BATCH_UNIT_DTYPE).tobytes()
            fix = Overwrite(path, position, data, self.queue.files.file_bytes)
            yield Finding(path, f"{span(what, low, high)}: {problem}", position, fix)

    def _pieces(self, start: int, end: int) -> Iterator[tuple[Path, int, int, int]]:
        """A range of units by files: path, position in it, first and end."""
        files = self.queue.files
        while start < end:
            at = (self._first + start) * BATCH_UNIT_BYTES
            file_start = at // files.file_bytes * files.file_bytes
            upto = min(end, (file_start + files.file_bytes) // BATCH_UNIT_BYTES - self._first)
            yield files.directory / f"{file_start:020d}", at - file_start, start, upto
            start = upto


def _read(queue: ConsumeQueue) -> Array:
    parts = [make_units([], [], [], [], [], [])]
    number = queue.first_number
    while number < queue.end_number:
        view = queue.units_view(number, queue.end_number - number)
        parts.append(np.frombuffer(view, queue.unit_dtype))
        number += len(parts[-1])
    return np.concatenate(parts)


def _expired(units: Array, log_min: int) -> Array:
    physical_offset = units["physical_offset"]
    is_expired: Array = (physical_offset >= 0) & (physical_offset < log_min)
    return is_expired & (units["size"] > 0)
