"""Joins the parts of many small objects into fewer and larger ones, in the background.

Uploads are runs of one object. Sixteen runs of a level become a run of the next one: objects in the
order of their queues, in which the parts of a queue that follow each other are one. A queue with
64 MiB among them gets objects of its own, which are final. So a record is written again once per
level, and a queue has few parts, whatever its rate.
"""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headrace_broker.tiered.objects.batch import KEY_ITEM, Batch, Content, build, joined
from headrace_broker.tiered.objects.object_queue import Piece
from headrace_protocol.columns import UNIT_DTYPE, RecordColumns
from headrace_protocol.errors import CorruptRecord
from headrace_protocol.tier.driver import Failed, Failure, FailureKind, expect, returns_failure
from headrace_protocol.tier.rows import FINAL, TIME_BYTES, UNIT_BYTES, ObjectRow, Part

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

    from headrace_broker.tiered.container.stored_tier import Name
    from headrace_broker.tiered.objects.inventory import StoredObject
    from headrace_broker.tiered.objects.key_index import KeyIndex
    from headrace_broker.tiered.objects.part_reader import PartReader
    from headrace_protocol.columns import Array
    from headrace_protocol.tier.driver import Buffer, Driver


class Joint(NamedTuple):
    """Pieces of a queue that become one part."""

    name: Name
    pieces: tuple[Piece, ...]


class _Read(NamedTuple):
    units: Array
    times: Array
    records: memoryview
    keys: Array


def choose(objects: Iterable[StoredObject], spared: set[str], run_count: int) -> list[StoredObject]:
    """The oldest runs of the lowest level that has so many; none if no level has."""
    found = [each for each in objects if each.level < FINAL and each.name not in spared]
    found.sort(key=lambda each: (each.level, each.run, each.name))
    for _, of_level in groupby(found, key=lambda each: each.level):
        runs = [list(of_run) for _, of_run in groupby(of_level, key=lambda each: each.run)]
        if len(runs) >= run_count:
            return [each for of_run in runs[:run_count] for each in of_run]
    return []


def plan(sources: list[StoredObject], object_bytes: int) -> list[tuple[int, list[Joint]]]:
    """The objects to make: the level of each, and its parts in the order of their queues."""
    level = sources[0].level + 1
    planned: list[tuple[int, list[Joint]]] = []
    shared: list[Joint] = []
    shared_bytes = 0
    for whole in _joints(sources):
        for part, size in _portions(whole, object_bytes):
            if size >= object_bytes:
                planned.append((FINAL, [part]))
                continue
            shared.append(part)
            shared_bytes += size
            if shared_bytes >= object_bytes:
                planned.append((level, shared))
                shared, shared_bytes = [], 0
    return [*planned, (level, shared)] if shared else planned


def _joints(sources: list[StoredObject]) -> Iterator[Joint]:
    found: dict[Name, list[Piece]] = {}
    for source in sources:
        for name, parts in source.parts.items():
            found.setdefault(name, []).extend(Piece(source.name, part) for part in parts)
    for name in sorted(found):
        pieces = sorted(found[name], key=lambda piece: piece.part.first)
        begin = 0
        for number, (one, other) in enumerate(pairwise(pieces), 1):
            if (one.part.end, one.part.log_end) != (other.part.first, other.part.log_base):
                yield Joint(name, tuple(pieces[begin:number]))
                begin = number
        yield Joint(name, tuple(pieces[begin:]))


def _portions(joint: Joint, object_bytes: int) -> Iterator[tuple[Joint, int]]:
    """A joint in portions that are large enough for an object of their own, and the rest."""
    begin = size = 0
    for number, piece in enumerate(joint.pieces, 1):
        size += piece.part.stop - piece.part.position
        if size >= object_bytes or number == len(joint.pieces):
            yield Joint(joint.name, joint.pieces[begin:number]), size
            begin, size = number, 0


class Merger:
    """Makes the objects that are planned from their sources."""

    def __init__(
        self,
        driver: Driver,
        reader: PartReader,
        keys: KeyIndex,
        sources: list[StoredObject],
        object_bytes: int,
    ) -> None:
        self._driver = driver
        self._reader = reader
        self._keys = keys
        self._sources = {source.name: source for source in sources}
        # Parts may be dropped from the sources meanwhile.
        self.left = plan(sources, object_bytes)
        self.made: list[tuple[ObjectRow, list[Joint]]] = []

    @returns_failure
    def make(self, name: str) -> Batch:
        """The next object. Fails as a read, and with DAMAGED; the path is that of a source."""
        level, joints = self.left[0]
        read = self._read_all(joints)
        contents = [_content(joint, read) for joint in joints]
        return build(name, contents, level, self.made[0][0].run if self.made else name)

    def has_all_of(self, objects: Container[str]) -> bool:
        """True if all its sources are among the objects of these names."""
        return all(name in objects for name in self._sources)

    def note_made(self, row: ObjectRow) -> None:
        """Note that the next object is stored."""
        _, joints = self.left.pop(0)
        self.made.append((row, joints))

    def _read_all(self, joints: list[Joint]) -> dict[Piece, _Read]:
        wanted: dict[str, list[Part]] = {}
        for joint in joints:
            for piece in joint.pieces:
                wanted.setdefault(piece.name, []).append(piece.part)
        found: dict[Piece, _Read] = {}
        for name, parts in wanted.items():
            source = self._sources[name]
            keys = expect(self._keys.items(source, 0, source.key_count))
            path = self._reader.path(name)
            read = expect(self._driver.read(path, [(part.position, part.stop) for part in parts]))
            for part, data in zip(parts, read, strict=True):
                columns = _columns(part, data, keys)
                if columns is None:
                    reason = f"part {part.number} is not what was written"
                    raise Failed(Failure(FailureKind.DAMAGED, path, reason))
                found[Piece(name, part)] = columns
        return found


def _columns(part: Part, data: Buffer, keys: Array) -> _Read | None:
    """The columns of a part; None if it is damaged."""
    view = memoryview(data)
    times_at, records_at = UNIT_BYTES * part.count, (UNIT_BYTES + TIME_BYTES) * part.count
    units = np.frombuffer(view[:times_at], UNIT_DTYPE)
    sizes = units["size"].astype(np.int64)
    starts = part.log_base + np.cumsum(sizes) - sizes
    is_whole = (sizes > 0).all() and int(sizes.sum()) == part.log_bytes
    if not is_whole or (units["physical_offset"] != starts).any():
        return None
    try:
        records = RecordColumns(view[records_at:], starts - part.log_base, sizes)
    except CorruptRecord:
        return None
    offsets = np.arange(part.first, part.end)
    if (records.queue_offset != offsets).any() or (records.physical_offset != starts).any():
        return None
    times = np.frombuffer(view[times_at:records_at], ">i8")
    return _Read(units, times, view[records_at:], keys[keys["part"] == part.number])


def _content(joint: Joint, read: dict[Piece, _Read]) -> Content:
    found = [read[piece] for piece in joint.pieces]
    keys, begin = [], 0
    for columns in found:
        items = columns.keys.astype(KEY_ITEM)
        items["record"] += begin
        keys.append(items)
        begin += len(columns.units)
    first = joint.pieces[0].part
    return Content(
        *joint.name,
        first.first,
        first.log_base,
        joined([columns.units for columns in found], UNIT_DTYPE),
        np.concatenate([columns.times for columns in found]),
        [columns.records for columns in found],
        joined(keys, KEY_ITEM),
    )
