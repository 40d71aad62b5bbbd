"""Checks the units of ConsumeQueues against the records of the log."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import numpy as np

from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.queues.batch_queue import QUEUE_KINDS, queue_at
from headrace_broker.store.queues.consume_queue import BLANK_SIZE, UNIT_BYTES, ConsumeQueue
from headrace_broker.store_tools.batch_queue_check import BatchQueueCheck
from headrace_broker.store_tools.directory import data_ranges
from headrace_broker.store_tools.findings import ClearFrom, Finding, Overwrite, runs, span
from headrace_protocol.columns import UNIT_DTYPE
from headrace_protocol.message import INNER_BATCH, RECORD_BYTES_MIN, TRANSACTION_PREPARED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headrace_broker.store_tools.directory import Advance, StoreDirectory
    from headrace_broker.store_tools.records import QueueNumbers, Records
    from headrace_protocol.columns import Array

_BLOCK_UNITS: Final = 1 << 16
Unit = tuple[int, int, int]


class QueueCheck:
    """Compares one queue's units with its records, in log order; ``findings`` comes last."""

    def __init__(self, queue: ConsumeQueue) -> None:
        self.queue = queue
        self.first, self.end = self.queue.first_offset, self.queue.max_offset
        self._is_matched = np.zeros(self.end - self.first, bool)
        # By queue offset, the unit of the last record that has it, where the queue has another.
        self._wanted: dict[int, Unit] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes of the units that ``findings`` reports as progress."""
        return (self.end - self.first) * UNIT_BYTES

    def compare(self, records: Records, group: Array) -> None:
        """Compare the units of some of the queue's records, in log order."""
        group = group[records.sys_flag[group] & INNER_BATCH == 0]
        if not len(group):
            return
        queue_offset, physical_offset = records.queue_offset[group], records.physical_offset[group]
        size, code = records.size[group], records.tags_code[group]
        is_inside = (queue_offset >= self.first) & (queue_offset < self.end)
        is_right = np.zeros(len(queue_offset), bool)
        inside = np.flatnonzero(is_inside)
        if len(inside):
            units = self._units_at(queue_offset[inside])
            is_right[inside] = (
                (units["physical_offset"] == physical_offset[inside])
                & (units["size"] == size[inside])
                & (units["tags_code"] == code[inside])
            )
            self._is_matched[queue_offset[is_right] - self.first] = True
        for number in np.flatnonzero(~is_right).tolist():
            unit = int(physical_offset[number]), int(size[number]), int(code[number])
            self._wanted[int(queue_offset[number])] = unit

    def _units_at(self, queue_offset: Array) -> Array:
        low, high = int(queue_offset.min()), int(queue_offset.max()) + 1
        if high - low > 4 * len(queue_offset) + _BLOCK_UNITS:
            return np.concatenate([self._units(q, q + 1) for q in queue_offset.tolist()])
        units: Array = self._units(low, high)[queue_offset - low]
        return units

    def _units(self, start: int, end: int) -> Array:
        parts = []
        while start < end:
            view = self.queue.units_view(start, end - start)
            parts.append(np.frombuffer(view, UNIT_DTYPE))
            start += len(parts[-1])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    # --- at the end ------------------------------------------------------------------------

    def findings(self, log_min: int, log_end: int, advance: Advance) -> Iterator[Finding]:
        """All problems in order, with the units that belong there according to the log."""
        for start, end in self._pieces(self.first, self.end):
            units = self._units(start, end)
            is_bad = self._bad(units, start, log_min, log_end)
            for low, high in runs(is_bad):
                yield self._finding(start + low, start + high, units[low:high], log_end)
            advance(len(units) * UNIT_BYTES)
        yield from self._missing(log_end)

    def _bad(self, units: Array, start: int, log_min: int, log_end: int) -> Array:
        physical_offset = units["physical_offset"].astype(np.int64)
        size = units["size"].astype(np.int64)
        number = slice(start - self.first, start - self.first + len(units))
        is_blank = (size == BLANK_SIZE) & (units["tags_code"] == 0)
        is_known = self._is_matched[number] | (is_blank & (physical_offset < log_end))
        is_wanted = np.isin(np.arange(start, start + len(units)), list(self._wanted))
        is_expired = (physical_offset >= 0) & (physical_offset < log_min) & (size > 0)
        is_bad: Array = ~is_known & ~(is_expired & ~is_wanted)
        is_bad |= is_blank & is_wanted & ~self._is_matched[number]
        # Searches rely on ascending physical offsets, even of expired units.
        before = np.maximum.accumulate(np.where(is_bad | is_blank, -1, physical_offset))
        is_bad[1:] |= (
            ~self._is_matched[number][1:] & ~is_blank[1:] & (physical_offset[1:] < before[:-1])
        )
        return is_bad

    def _finding(self, start: int, end: int, units: Array, log_end: int) -> Finding:
        path, position = self._locate(start)
        wanted = [self._wanted.pop(number, None) for number in range(start, end)]
        what = span("unit", start, end)
        if end == self.end and not any(wanted):
            return self._tail(start, what, log_end)
        fix = self._overwrite(start, wanted)
        if not units["size"].any() and not units["physical_offset"].any():
            problem = f"{what}: a hole with units after it"
        elif any(wanted):
            problem = f"{what}: not the position of the record in the log"
        else:
            problem = f"{what}: no record of this queue is there"
        return Finding(path, problem, position, fix)

    def _tail(self, start: int, what: str, log_end: int) -> Finding:
        path, position = self._locate(start)
        in_file = self.queue.files.file_bytes // UNIT_BYTES
        used_end = min(self.end, (start // in_file + 1) * in_file)
        end_position = position + (used_end - start) * UNIT_BYTES
        self.end = start
        problem = f"{what}: without a record, at the queue's end (the log ends at {log_end})"
        return Finding(path, problem, position, ClearFrom(path, position, end_position))

    def _missing(self, log_end: int) -> Iterator[Finding]:
        """Records past the newest unit. Those of an earlier topic of this name lie before it."""
        last = self._last_physical_offset()
        claims = sorted((q, unit) for q, unit in self._wanted.items() if unit[0] > last)
        added = self.end
        while added - self.end < len(claims) and claims[added - self.end][0] == added:
            added += 1
        for start, end in self._pieces(self.end, added):
            path, position = self._locate(start)
            fix = self._overwrite(start, [self._wanted[q] for q in range(start, end)])
            problem = f"{span('record', start, end)}: in the log, but without a unit"
            yield Finding(path, problem, position, fix)
        for queue_offset, unit in claims[added - self.end :]:
            if queue_offset * RECORD_BYTES_MIN > log_end:
                problem = (
                    f"the record at {unit[0]} states an impossible queue offset, {queue_offset}"
                )
            else:
                problem = f"record {queue_offset}: after a gap that the log does not explain"
            yield Finding(self.queue.files.directory, problem)

    def _last_physical_offset(self) -> int:
        matched = np.flatnonzero(self._is_matched[: self.end - self.first])
        if not len(matched):
            return -1
        return self.queue.unit(self.first + int(matched[-1]))[0]

    def _locate(self, queue_offset: int) -> tuple[Path, int]:
        file_bytes = self.queue.files.file_bytes
        start = queue_offset * UNIT_BYTES // file_bytes * file_bytes
        return self.queue.files.directory / f"{start:020d}", queue_offset * UNIT_BYTES - start

    def _pieces(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """A range of queue offsets in pieces, each within one file."""
        in_file = self.queue.files.file_bytes // UNIT_BYTES
        while start < end:
            upto = min(end, start + _BLOCK_UNITS, (start // in_file + 1) * in_file)
            yield start, upto
            start = upto

    def _overwrite(self, start: int, wanted: list[Unit | None]) -> Overwrite:
        """A fix that writes these units, blank ones for None; within one file."""
        path, position = self._locate(start)
        file_bytes = self.queue.files.file_bytes
        before = self.queue.unit(start - 1)[0] if start > self.first else 0
        units = []
        for unit in wanted:
            units.append(unit or (before, BLANK_SIZE, 0))
            before = units[-1][0]
        return Overwrite(path, position, np.array(units, UNIT_DTYPE).tobytes(), file_bytes)


class QueueChecks:
    """All queues of a store."""

    def __init__(self, directory: StoreDirectory, queue_numbers: QueueNumbers) -> None:
        self.findings: list[Finding] = []
        self._queue_numbers = queue_numbers
        self._checks: dict[tuple[str, int], QueueCheck | BatchQueueCheck] = {}
        self._without_queue: dict[tuple[str, int], int] = {}
        self._root = directory.root
        for folder in directory.queue_paths:
            try:
                queue = open_queue(folder, directory)
                check = BatchQueueCheck(queue) if queue.is_batch else QueueCheck(queue)
            except StoreFormatError as error:
                self.findings.append(Finding(error.path, str(error).partition(": ")[2]))
            else:
                self._checks[folder.parent.name, int(folder.name)] = check

    def compare(self, records: Records) -> None:
        """Compare the units of a block's records."""
        numbers = np.flatnonzero((records.sys_flag & TRANSACTION_PREPARED) == 0)
        if not len(numbers):
            return
        order = numbers[np.argsort(records.queue_number[numbers], kind="stable")]
        numbers_found, firsts = np.unique(records.queue_number[order], return_index=True)
        for queue_number, group in zip(
            numbers_found.tolist(), np.split(order, firsts[1:]), strict=True
        ):
            name = self._queue_numbers.name(queue_number)
            check = self._checks.get(name)
            if check:
                check.compare(records, group)
            else:
                self._without_queue[name] = self._without_queue.get(name, 0) + len(group)

    def finish(self, log_min: int, log_end: int, advance: Advance) -> Iterator[Finding]:
        """The findings for all queues, after the last block."""
        yield from self.findings
        for check in self._checks.values():
            yield from check.findings(log_min, log_end, advance)
            file_bytes = sum(file.file_bytes for file in check.queue.files.files)
            advance(file_bytes - check.used_bytes)
            check.queue.unmap()
        for (topic, queue_id), count in sorted(self._without_queue.items()):
            path = self._root / "consumequeue" / topic / str(queue_id)
            problem = f"{count} records in the log have no queue, as after the deletion of a topic"
            yield Finding(path, problem, is_damage=False)


def open_queue(folder: Path, directory: StoreDirectory) -> ConsumeQueue:
    """A queue up to its last unit that is not all zeros. Raises StoreFormatError."""
    queue = queue_at(folder, directory.settings, directory.fs)
    queue.files.load()
    queue.note_end(_end_of(queue))
    return queue


def queue_end(directory: StoreDirectory, topic: str, queue_id: int) -> int | None:
    """The end of a queue; None if it is missing, or unreadable, which another check reports."""
    found = [directory.root / kind.folder / topic / str(queue_id) for kind in QUEUE_KINDS]
    folder = next((path for path in found if path.is_dir()), None)
    if folder is None:
        return None
    try:
        queue = open_queue(folder, directory)
    except StoreFormatError:
        return None
    queue.unmap()
    return queue.max_offset


def _end_of(queue: ConsumeQueue) -> int:
    """Just after the last unit that is not all zeros, in units."""
    unit_bytes = queue.unit_bytes
    for file in reversed(queue.files.files):
        for start, end in reversed(data_ranges(file.path)):
            with file.path.open("rb") as stream:
                data = os.pread(stream.fileno(), end - start, start)
            used = len(data.rstrip(b"\0"))
            if used:
                return (file.start_offset + start + used - 1) // unit_bytes + 1
    return queue.first_number
