"""Objects and parts that count in the store, in memory, and the catalogs that list them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from headrace_broker.tiered.container.stored_tier import oldest
from headrace_broker.tiered.objects.object_queue import ObjectQueue, Piece, State
from headrace_protocol.tier.paths import QueueName
from headrace_protocol.tier.rows import ObjectRow, Part

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from headrace_broker.tiered.container.stored_tier import Name
    from headrace_broker.tiered.objects.part_reader import PartReader
    from headrace_broker.tiered.objects.sizes import ObjectSizes
    from headrace_protocol.tier.rows import Named, Reference

# The row of queues without records: all have expired.
_ENDED: Final = ""


class StoredObject:
    """An object, and by queue the parts in it that count."""

    def __init__(self, row: ObjectRow) -> None:
        self.name, self.level, self.run = row.name, row.level, row.run
        self.keys_at, self.key_count = row.keys_at, row.key_count
        self.parts: dict[Name, list[Part]] = {}
        for topic, parts in row.parts.items():
            for part in parts:
                self.parts.setdefault((topic, part.queue_id), []).append(part)

    def row(self) -> ObjectRow:
        """As it is written."""
        parts: dict[str, list[Part]] = {}
        for (topic, _), found in self.parts.items():
            parts.setdefault(topic, []).extend(found)
        return ObjectRow(self.name, self.level, self.run, self.keys_at, self.key_count, parts)


class _Catalog(NamedTuple):
    names: frozenset[str]
    part_count: int


class Inventory:
    """Queues and objects. changed: objects of which catalogs or tail say something else.

    unused: objects without a part that counts; they may be deleted once the manifest names them no
    more.
    """

    def __init__(self, broker: str, reader: PartReader, sizes: ObjectSizes) -> None:
        self.queues: dict[Name, ObjectQueue] = {}
        self.objects: dict[str, StoredObject] = {}
        self.catalogs: dict[str, tuple[Reference, _Catalog]] = {}
        self.tail: list[Reference] = []
        self.is_changed = False
        self.unused: list[str] = []
        # Which queues have ended changes without an object, so their catalog is never kept.
        self._changed: set[str] = {_ENDED}
        self._broker = broker
        self._reader = reader
        self._sizes = sizes

    def new_queue(self, name: Name) -> ObjectQueue:
        """Add a queue without messages."""
        queue = ObjectQueue(QueueName(self._broker, *name), self._reader)
        self.queues[name] = queue
        return queue

    # -- what was written --------------------------------------------------------------------------

    def load(self, named: Named, references: list[Reference]) -> None:
        """Take over what the manifest names. references: of the tail."""
        for catalog, rows in named.catalogs:
            self.catalogs[catalog.name] = catalog, _catalog(rows)
        self.tail = references
        found: dict[Name, list[Piece]] = {}
        for row in named.rows():
            stored = StoredObject(row)
            if row.name != _ENDED:
                self.objects[row.name] = stored
            for name, parts in stored.parts.items():
                found.setdefault(name, []).extend(Piece(row.name, part) for part in parts)
        for name, pieces in found.items():
            pieces.sort(key=lambda piece: (piece.part.first, piece.part.end))
            self.new_queue(name).extend(pieces)

    def add(self, row: ObjectRow, named: Reference) -> None:
        """Take over an object that the manifest has at the end of its tail now."""
        self._add(row)
        self.tail = [*self.tail, named]

    def _add(self, row: ObjectRow) -> None:
        stored = self.objects[row.name] = StoredObject(row)
        for name, parts in stored.parts.items():
            self.queues[name].extend(Piece(row.name, part) for part in parts)

    # -- changes -----------------------------------------------------------------------------------

    def expire(self, name: Name, before_ms: int) -> None:
        """Drop the first pieces of a queue whose records were all stored before a time."""
        state = self.queues[name].state
        count = 0
        while count < len(state.pieces) and state.pieces[count].part.end_ms < before_ms:
            count += 1
        self._drop_first(name, count)

    def shrink(self, topic: str, bytes_max: int) -> None:
        """Drop a topic's oldest pieces while the rest is at least of a size."""
        names = [name for name in self.queues if name[0] == topic]
        excess_bytes = sum(self.queues[name].log_bytes for name in names) - bytes_max
        pieces = [self.queues[name].state.pieces for name in names]
        sizes = [[(each.part.end_ms, each.part.log_bytes) for each in found] for found in pieces]
        for name, count in zip(names, oldest(sizes, excess_bytes), strict=True):
            self._drop_first(name, count)

    def _drop_first(self, name: Name, count: int) -> None:
        state = self.queues[name].state
        if count:
            self.queues[name].state = state._replace(pieces=state.pieces[count:])
            self._drop(name, state.pieces[:count])

    def delete(self, name: Name) -> None:
        """Drop a queue."""
        queue = self.queues.pop(name, None)
        if queue is not None:
            self._drop(name, queue.state.pieces)
            self.is_changed = True

    def cut(self, name: Name, queue_offset: int) -> None:
        """Drop all pieces of a queue that have messages from an offset on."""
        pieces = self.queues[name].state.pieces
        kept = [piece for piece in pieces if piece.part.end <= queue_offset]
        self._drop(name, pieces[len(kept) :])
        self.new_queue(name).extend(kept)

    def add_unlisted(self, row: ObjectRow) -> None:
        """Take over an object that the next checkpoint lists."""
        self._add(row)
        self.is_changed = True

    def replace(self, name: Name, old: Sequence[Piece], new: Piece, row: ObjectRow) -> bool:
        """Replace pieces of a queue by one with the same records, unless some are gone."""
        queue = self.queues.get(name)
        pieces = queue.state.pieces if queue is not None else ()
        at = pieces.index(old[0]) if old[0] in pieces else len(pieces)
        if queue is None or pieces[at : at + len(old)] != tuple(old):
            return False
        queue.state = queue.state._replace(pieces=(*pieces[:at], new, *pieces[at + len(old) :]))
        if row.name not in self.objects:
            empty = msgspec.structs.replace(row, parts={})
            self.objects[row.name] = StoredObject(empty)
        self.objects[row.name].parts.setdefault(name, []).append(new.part)
        self._drop(name, old)
        return True

    def _drop(self, name: Name, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            stored = self.objects[piece.name]
            stored.parts[name].remove(piece.part)
            if not stored.parts[name]:
                del stored.parts[name]
            if not stored.parts:
                del self.objects[piece.name]
                self.unused.append(piece.name)
            self._changed.add(piece.name)
            self.is_changed = True

    # -- what is to be written ---------------------------------------------------------------------

    def kept(self) -> list[Reference]:
        """The catalogs that say what still holds, and are large enough."""
        least = self._sizes.catalog_parts_min
        return [
            named
            for named, catalog in self.catalogs.values()
            if not catalog.names & self._changed and catalog.part_count >= least
        ]

    def rows_beside(self, kept: list[Reference]) -> list[list[ObjectRow]]:
        """Rows of all that the kept catalogs do not have, in portions for a catalog each."""
        listed = {name for named in kept for name in self.catalogs[named.name][1].names}
        portions: list[list[ObjectRow]] = [[]]
        part_count = 0
        for name in sorted(self.objects.keys() - listed):
            row = self.objects[name].row()
            if part_count + row.part_count > self._sizes.catalog_parts_max and portions[-1]:
                portions.append([])
                part_count = 0
            portions[-1].append(row)
            part_count += row.part_count
        ended = self._ended()
        if ended.parts:
            portions[-1].append(ended)
        return [portion for portion in portions if portion]

    def _ended(self) -> ObjectRow:
        parts: dict[str, list[Part]] = {}
        for (topic, queue_id), queue in self.queues.items():
            state: State = queue.state
            if state.end and not state.pieces:
                part = Part(0, queue_id, state.end, 0, state.log_end, 0, 0, 0, 0)
                parts.setdefault(topic, []).append(part)
        return ObjectRow(_ENDED, 0, _ENDED, 0, 0, parts)

    def written(
        self, kept: list[Reference], new: list[tuple[Reference, list[ObjectRow]]]
    ) -> list[str]:
        """Note what the manifest names now, without a tail; returns what it names no more."""
        gone = self.catalogs.keys() - {named.name for named in kept}
        self.catalogs = {
            **{named.name: self.catalogs[named.name] for named in kept},
            **{named.name: (named, _catalog(rows)) for named, rows in new},
        }
        self.tail = []
        self._changed = {_ENDED}
        self.is_changed = False
        unused, self.unused = self.unused, []
        return [*gone, *unused]


def _catalog(rows: list[ObjectRow]) -> _Catalog:
    names = frozenset(row.name for row in rows)
    return _Catalog(names, sum(row.part_count for row in rows))
