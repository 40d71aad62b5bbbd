"""Writes units that a queue in Apache's layout has lost, by the records in its log.

Only while no metadata says how far the units went: with metadata, units that are missing are
reported (``recovery``), and ``headrace tier rebuild`` does without.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace_broker.tiered.container.flat_queue import UNIT_BYTES
from headrace_broker.tiered.container.recovery import tags_codes
from headrace_protocol.columns import UNIT_DTYPE, RecordColumns
from headrace_protocol.errors import CorruptRecord
from headrace_protocol.message import MAGIC_V1, MAGIC_V2
from headrace_protocol.tier.driver import expect, returns_failure
from headrace_protocol.tier.paths import FileKind, segment_name
from headrace_protocol.tier.stored_queue import HEAD_BYTES, read_head

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from headrace_protocol.columns import Array
    from headrace_protocol.tier.driver import AppendDriver, Buffer, Range
    from headrace_protocol.tier.paths import Sizes

_BYTES_AT_ONCE: Final = 8 << 20
_UNITS_AT_ONCE: Final = 4096
_MAGICS: Final = tuple(struct.pack(">i", magic) for magic in (MAGIC_V1, MAGIC_V2))
_MAGIC_AT: Final = 4


@returns_failure
def complete_units(driver: AppendDriver, stored: Mapping[str, Sizes], units_bytes: int) -> None:
    """Complete the consume queues of all queues of a broker.

    stored: as ``sizes_by_folder`` returns it. units_bytes: where a segment ends. Fails as the
    driver does.
    """
    for path, log in sorted(stored.items()):
        queue, _, kind = path.rpartition("/")
        if kind == FileKind.COMMIT_LOG.name:
            units = f"{queue}/{FileKind.CONSUME_QUEUE.name}"
            files = _Files(driver, units, stored.get(units, {}), units_bytes)
            _complete(_Log(driver, path, log), files)


class _Units(NamedTuple):
    """Units of consecutive queue offsets. first: the first of these."""

    first: int
    units: Array


def _complete(log: _Log, files: _Files) -> None:
    for start, end in list(_without_units(log, files)):
        for found in log.units(start, end):
            files.add(found)


def _without_units(log: _Log, files: _Files) -> Iterator[Range]:
    """The ranges of the log that no unit names; what is in them need not be a record."""
    at = log.base
    for base in sorted(files.sizes):
        named = files.trim(base, log)
        if named is not None:
            if at < named[0]:
                yield at, named[0]
            at = max(at, named[1])
    if at < log.end:
        yield at, log.end


class _Log:
    """The segments of a log, which may have a hole."""

    def __init__(self, driver: AppendDriver, path: str, sizes: Sizes) -> None:
        self._driver = driver
        self._path = path
        self._sizes = sizes
        self.base = min(sizes)
        self.end = max(base + size for base, size in sizes.items())

    def units(self, start: int, end: int) -> Iterator[_Units]:
        """The units of all records in a range."""
        for base in sorted(self._sizes):
            at, stop = max(start, base), min(end, base + self._sizes[base])
            want = _BYTES_AT_ONCE
            while at < stop:
                wanted = at - base, min(at + want, stop) - base
                data = bytes(_read(self._driver, f"{self._path}/{segment_name(base)}", wanted))
                ends, done = _records(data, at)
                for first, last in ends:
                    yield from _sound_units(data[first:last], at + first)
                is_last = at + len(data) == stop
                # A record that is larger than what was read.
                want = _BYTES_AT_ONCE if done else want * 2
                at = stop if is_last else at + done

    def has(self, queue_offset: int, unit: np.void) -> bool:
        """True if there is the record of a unit, or a hole instead."""
        log_offset, size = int(unit["physical_offset"]), int(unit["size"])
        base = max((base for base in self._sizes if base <= log_offset), default=None)
        if size <= 0 or log_offset + size > self.end:
            return False
        if base is None or log_offset + size > base + self._sizes[base]:
            return True
        wanted = log_offset - base, log_offset + size - base
        data = bytes(_read(self._driver, f"{self._path}/{segment_name(base)}", wanted))
        head = read_head(data)
        if head is None or head[:3] != (size, queue_offset, log_offset):
            return False
        return any(found.units[0] == unit for found in _sound_units(data, log_offset))


def _records(data: bytes, log_offset: int) -> tuple[list[Range], int]:
    """Ranges of records back to back, and how far the data are understood.

    Codas and damaged records are skipped: each record states its offset.
    """
    found: list[Range] = []
    at = first = 0
    while at < len(data):
        head = read_head(data[at : at + HEAD_BYTES])
        if head is not None and head.log_offset == log_offset + at and head.size > 0:
            if at + head.size > len(data):
                break
            at += head.size
            continue
        if first < at:
            found.append((first, at))
        following = _next_record(data, at + 1, log_offset)
        if following is None:
            # The rest may be the begin of a record.
            first = at = max(at, len(data) - HEAD_BYTES)
            break
        first = at = following
    if first < at:
        found.append((first, at))
    return found, at


def _next_record(data: bytes, at: int, log_offset: int) -> int | None:
    """The first position from ``at`` on with the head of a record that states this offset."""
    found = []
    for magic in _MAGICS:
        hit = data.find(magic, at + _MAGIC_AT)
        while hit >= 0:
            begin = hit - _MAGIC_AT
            head = read_head(data[begin : begin + HEAD_BYTES])
            if head is not None and head.log_offset == log_offset + begin:
                found.append(begin)
                break
            hit = data.find(magic, hit + 1)
    return min(found, default=None)


def _sound_units(data: bytes, log_offset: int) -> list[_Units]:
    """The units of records back to back, except those of damaged ones."""
    with suppress(CorruptRecord):
        return _units_of(data, log_offset)
    found, at = [], 0
    while (head := read_head(data[at : at + HEAD_BYTES])) is not None:
        with suppress(CorruptRecord):
            found += _units_of(data[at : at + head.size], log_offset + at)
        at += head.size
    return found


def _units_of(data: bytes, log_offset: int) -> list[_Units]:
    """Raises CorruptRecord."""
    records = RecordColumns.from_records(data)
    units = np.empty(len(records), UNIT_DTYPE)
    units["physical_offset"] = log_offset + np.cumsum(records.size) - records.size
    units["size"] = records.size
    units["tags_code"] = tags_codes(records)
    offsets = records.queue_offset
    breaks = (np.flatnonzero(np.diff(offsets) != 1) + 1).tolist()
    bounds = pairwise([0, *breaks, len(records)])
    return [_Units(int(offsets[begin]), units[begin:end]) for begin, end in bounds]


class _Files:
    """The segments of a consume queue. sizes: by base."""

    def __init__(self, driver: AppendDriver, path: str, sizes: Sizes, units_bytes: int) -> None:
        self.sizes = dict(sizes)
        self._driver = driver
        self._path = path
        self._limit = units_bytes // UNIT_BYTES * UNIT_BYTES

    def _segment(self, base: int) -> str:
        return f"{self._path}/{segment_name(base)}"

    def trim(self, base: int, log: _Log) -> Range | None:
        """Cut a torn end off a segment; returns what the rest names of the log, None if nothing."""
        path, size = self._segment(base), self.sizes[base]
        end = size // UNIT_BYTES * UNIT_BYTES
        while end:
            begin = max(end - _UNITS_AT_ONCE * UNIT_BYTES, 0)
            units = np.frombuffer(_read(self._driver, path, (begin, end)), UNIT_DTYPE)
            first = (base + begin) // UNIT_BYTES
            numbers = range(len(units) - 1, -1, -1)
            last = next((n for n in numbers if log.has(first + n, units[n])), None)
            if last is not None:
                end = begin + (last + 1) * UNIT_BYTES
                break
            end = begin
        if not end:
            expect(self._driver.delete([path]))
            del self.sizes[base]
            return None
        if end < size:
            expect(self._driver.cut(path, end))
            self.sizes[base] = end
        ends = [(0, UNIT_BYTES), (end - UNIT_BYTES, end)]
        read = [np.frombuffer(_read(self._driver, path, wanted), UNIT_DTYPE)[0] for wanted in ends]
        begin, stop = (int(unit["physical_offset"]) for unit in read)
        return begin, stop + int(read[1]["size"])

    def add(self, found: _Units) -> None:
        """Write units, unless there are others of these queue offsets."""
        at, units = found.first * UNIT_BYTES, found.units
        while len(units):
            bases = sorted(self.sizes)
            base = next((base for base in reversed(bases) if base <= at), None)
            end = base + self.sizes[base] if base is not None else -1
            following = next((base for base in bases if base > at), None)
            count = len(units) if following is None else (following - at) // UNIT_BYTES
            if at < end:  # these are there
                skipped = (end - at) // UNIT_BYTES
                at, units = end, units[skipped:]
                continue
            if base is None or at > end or self.sizes[base] >= self._limit:
                base = at
            size = self.sizes.get(base, 0)
            some = units[: min(count, (self._limit - size) // UNIT_BYTES)]
            expect(self._driver.append(self._segment(base), size, some.tobytes()))
            self.sizes[base] = size + some.nbytes
            at, units = at + some.nbytes, units[len(some) :]


def _read(driver: AppendDriver, path: str, wanted: Range) -> Buffer:
    return expect(driver.read(path, [wanted]))[0]
