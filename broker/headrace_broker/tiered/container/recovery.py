"""Recovery of a queue's files at a start: the store is the truth, not the metadata.

The metadata may be older than the files (a crash came before it was saved) or newer (an expiry was
cut short). Units are cut to whole ones whose record is there, records to the end of the last unit.

What was written since the metadata was saved may be in memory only, and a power cut may have torn
it: it is compared unit by unit, and brought to disk. The broker's log still has these records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from headrace_broker.tiered.container.flat_queue import UNIT_BYTES
from headrace_broker.tiered.container.metadata import LONG_MAX, SegmentRow
from headrace_protocol.columns import UNIT_DTYPE
from headrace_protocol.java_hash import tags_code_of
from headrace_protocol.tier.driver import Failed, Failure, FailureKind, expect, returns_failure
from headrace_protocol.tier.paths import FileKind, Sizes

if TYPE_CHECKING:
    from headrace_broker.tiered.container.flat_file import FlatFile
    from headrace_broker.tiered.container.flat_queue import FlatQueue
    from headrace_protocol.columns import Array, RecordColumns
    from headrace_protocol.tier.stored_queue import RecordHead, UnitRange

    # The rows of each file before the start.
    Saved = dict[FlatFile, tuple[SegmentRow, ...]]

_REBUILD: Final = "headrace tier rebuild writes the missing units"

_UNITS_AT_ONCE: Final = 4096
# Most units that are compared, if the metadata is very old.
_COMPARED_UNITS: Final = 1 << 16


def recover(queue: FlatQueue, stored: dict[str, Sizes], now_ms: int) -> Failure | None:
    """Bring a queue in line with the store; its commit offset is right afterwards.

    stored: as ``sizes_by_folder`` returns it.

    Fails with DAMAGED where appending would overwrite what may still be of use. After a failure the
    metadata is as before, so that another try compares as much.
    """
    files = queue.log, queue.units_file
    saved = {file: file.segments for file in files}
    for file in files:
        file.adopt(_reconciled(file, stored.get(file.address.path, {}), now_ms))
    failure = (_recover if queue.units_file.segments else _without_units)(queue, saved)
    if failure is not None:
        for file in files:
            file.adopt(saved[file])
    elif queue.units_file.segments:
        queue.publish(now_ms)
    return failure


@returns_failure
def _recover(queue: FlatQueue, saved: Saved) -> None:
    """Cut what is not whole, bring the rest to disk, and find start and times."""
    rows = saved[queue.units_file]
    _cut_units(queue, rows[-1].end if rows else 0)
    if rows:
        _cut_torn_units(queue, rows[-1].end)
    for file, known in saved.items():
        expect(file.secure(known))
    _find_start(queue)
    for file in saved:
        _date(queue, file)


def _reconciled(file: FlatFile, sizes: Sizes, now_ms: int) -> list[SegmentRow]:
    """The rows of the segments that count, with the sizes that the store has.

    A segment of the metadata that is missing at the start has expired. One that is missing later
    keeps its row, so that reads of it report it. Files past the last row were begun before a crash.
    """
    rows = list(file.segments)
    while rows and rows[0].base_offset not in sizes and (len(rows) > 1 or rows[0].size):
        del rows[0]
    if rows:
        size = sizes.get(rows[-1].base_offset, 0)
        if size != rows[-1].size:
            # Written to after the metadata was saved: ``_date`` finds the time again.
            rows[-1] = msgspec.structs.replace(rows[-1], size=size, end_timestamp=LONG_MAX)
    path, kind = file.address.queue.path, file.address.kind
    may_have_gaps = kind is FileKind.CONSUME_QUEUE
    for base in sorted(sizes):
        row = SegmentRow(path, kind, base, size=sizes[base], create_timestamp=now_ms)
        is_past = not rows or (base >= rows[-1].end and base > rows[-1].base_offset)
        if is_past and (not rows or may_have_gaps or base == rows[-1].end):
            rows.append(row)
    return rows


@returns_failure
def _without_units(queue: FlatQueue, _saved: Saved) -> None:
    if queue.log.end != queue.log.base and not queue.is_new:
        reason = f"has no consume queue, but the log beside it has records; {_REBUILD}"
        raise Failed(Failure(FailureKind.DAMAGED, queue.units_file.address.path, reason))
    # The first append was cut short; the broker's log has its records.
    queue.log_end = queue.log.base
    _cut(queue.log, queue.log.base)


# -- the end ---------------------------------------------------------------------------------------


def _cut_units(queue: FlatQueue, saved_end: int = 0) -> None:
    """Cut what is not whole. DAMAGED if units before ``saved_end`` are gone, and their records not.

    These records are kept: a crash loses no units that were on disk.
    """
    file = queue.units_file
    _cut(file, file.end - (file.end - file.segments[-1].base_offset) % UNIT_BYTES)
    position, log_end = _last_whole_unit(queue)
    if file.end < saved_end and log_end < queue.log.end:
        reason = f"ends at {file.end} instead of {saved_end}, but records are there; {_REBUILD}"
        raise Failed(Failure(FailureKind.DAMAGED, file.address.path, reason))
    queue.log_end = log_end
    _cut(file, position)
    if queue.log.segments:
        _cut(queue.log, log_end)


def _cut(file: FlatFile, end: int) -> None:
    if end < file.end:
        expect(file.cut(end))


def _last_whole_unit(queue: FlatQueue) -> tuple[int, int]:
    """The end of the last unit whose record is there, and the end of this record."""
    for row in reversed(queue.units_file.segments):
        end = row.end
        while end > row.base_offset:
            begin = max(end - _UNITS_AT_ONCE * UNIT_BYTES, row.base_offset)
            (data,) = expect(queue.units_file.read([(begin, end)]))
            units = np.frombuffer(data, UNIT_DTYPE)
            record_ends = units["physical_offset"].astype(np.int64) + units["size"]
            is_inside = (units["size"] > 0) & (record_ends <= queue.log.end)
            for number in np.flatnonzero(is_inside)[::-1].tolist():
                offset = begin // UNIT_BYTES + number
                if _has_record(queue, offset, units[number]):
                    return (offset + 1) * UNIT_BYTES, int(record_ends[number])
            end = begin
    return queue.units_file.base, queue.log.base


def _cut_torn_units(queue: FlatQueue, saved_end: int) -> None:
    """Cut from the first unit past ``saved_end`` on that is not that of its record."""
    end = queue.commit_offset
    at = max(saved_end // UNIT_BYTES, end - _COMPARED_UNITS)
    while at < end:
        found = expect(queue.units(at, _UNITS_AT_ONCE))
        sound = _sound_units(queue, found)
        if sound < len(found.units):
            expect(queue.units_file.cut((found.first + sound) * UNIT_BYTES))
            _cut_units(queue)
            return
        at = found.first + len(found.units)


def _sound_units(queue: FlatQueue, found: UnitRange) -> int:
    """Number of the first units that state offset, size and tags of their records."""
    for number, unit in enumerate(found.units):
        if not _has_record(queue, found.first + number, unit):
            return number
    offsets = np.arange(found.first, found.first + len(found.units))
    records = expect(queue.records(found.units, offsets))
    others = np.flatnonzero(found.units["tags_code"] != tags_codes(records))
    return int(others[0]) if len(others) else len(found.units)


def tags_codes(records: RecordColumns) -> Array:
    """The tags code of each record, as in its unit."""
    return np.array([tags_code_of(raw) for raw in records.properties()], np.int64)


def _has_record(queue: FlatQueue, queue_offset: int, unit: np.void) -> bool:
    head = queue.head(int(unit["physical_offset"]))
    if isinstance(head, Failure) and head.kind is not FailureKind.UNREACHABLE:
        return False
    log_offset, size = int(unit["physical_offset"]), int(unit["size"])
    return expect(head)[:3] == (size, queue_offset, log_offset)


# -- times and the start ---------------------------------------------------------------------------


def _date(queue: FlatQueue, file: FlatFile) -> None:
    """Set the times of segments that lack them, by their first and last records."""
    used = [row for row in queue.units_file.segments if row.size]
    if not used:
        return
    rows = list(file.segments)
    last = expect(queue.store_time(used[-1].end // UNIT_BYTES - 1))
    for number in range(len(rows) - 1, -1, -1):
        row = rows[number]
        if not row.size:
            continue
        if row.end_timestamp == LONG_MAX:
            first = _first_record(queue, file, row)
            # A unit whose record is in a hole of the log says no time.
            is_in_hole = isinstance(first, Failure) and first.kind is FailureKind.SHORT
            begin_ms = min(row.begin_timestamp, last if is_in_hole else expect(first).store_ms)
            end_ms = max(begin_ms, last)
            row = msgspec.structs.replace(row, begin_timestamp=begin_ms, end_timestamp=end_ms)
            rows[number] = row
        # The last record of the segment before is a little older.
        last = row.begin_timestamp
    file.adopt(rows)


def _first_record(queue: FlatQueue, file: FlatFile, row: SegmentRow) -> RecordHead | Failure:
    if file is queue.log:
        return queue.head(row.base_offset)
    found = expect(queue.units(row.base_offset // UNIT_BYTES, 1))
    return queue.head(int(found.units["physical_offset"][0]))


def _find_start(queue: FlatQueue) -> None:
    """Set the least offset: of the first record, since units may be kept for longer."""
    if queue.log.end == queue.log.base:
        queue.min_offset = queue.commit_offset
        return
    head = expect(queue.head(queue.log.base))
    queue.min_offset = max(queue.units_file.base // UNIT_BYTES, head.queue_offset)
