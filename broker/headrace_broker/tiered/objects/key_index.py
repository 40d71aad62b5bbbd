"""Query by key: each object has the key items of its records, sorted by hash."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from headrace_broker.tiered.objects.batch import KEY_ITEM
from headrace_protocol.java_hash import index_key_hash
from headrace_protocol.tier.driver import expect, returns_failure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from headrace_broker.tiered.container.stored_tier import Name
    from headrace_broker.tiered.container.tier_index import IndexHit
    from headrace_broker.tiered.objects.inventory import Inventory, StoredObject
    from headrace_broker.tiered.objects.object_queue import ObjectQueue, Piece
    from headrace_broker.tiered.objects.part_reader import PartReader
    from headrace_protocol.columns import Array

_HASHES: Final = 1 << 31
_ITEMS_MAX: Final = 1024


class KeyIndex:
    """Queries by key, from all threads."""

    def __init__(self, inventory: Inventory, reader: PartReader, window_items: int) -> None:
        """window_items: see ``ObjectSizes``."""
        self._inventory = inventory
        self._window_items = window_items
        self._reader = reader

    @returns_failure
    def query(
        self, topic: str, key: str, begin_ms: int, end_ms: int, count_max: int
    ) -> list[IndexHit]:
        """Records whose key has the hash of this one, the newest first. Fails as a read."""
        key_hash = index_key_hash(topic, key)
        hits: list[IndexHit] = []
        for stored, pieces in self._objects(topic, begin_ms, end_ms):
            items = self._find(stored, key_hash)
            for number, (queue, piece) in pieces.items():
                records = items["record"][items["part"] == number][-_ITEMS_MAX:]
                found = expect(queue.hits(piece, records.astype(np.int64)))
                hits += [hit for hit in found if begin_ms <= hit.store_ms <= end_ms]
        hits.sort(key=lambda hit: (hit.store_ms, hit.log_offset, hit.queue_id), reverse=True)
        return hits[:count_max]

    def _objects(
        self, topic: str, begin_ms: int, end_ms: int
    ) -> Iterator[tuple[StoredObject, Mapping[int, tuple[ObjectQueue, Piece]]]]:
        """The objects with records of a topic from this time; of each the parts by number."""
        found: dict[str, dict[int, tuple[ObjectQueue, Piece]]] = {}
        queues: list[tuple[Name, ObjectQueue]] = list(self._inventory.queues.items())
        for name, queue in queues:
            if name[0] != topic:
                continue
            for piece in queue.state.pieces:
                if piece.part.begin_ms <= end_ms and begin_ms <= piece.part.end_ms:
                    found.setdefault(piece.name, {})[piece.part.number] = queue, piece
        for object_name, parts in found.items():
            stored = self._inventory.objects.get(object_name)
            if stored is not None:  # merged meanwhile
                yield stored, parts

    def _find(self, stored: StoredObject, key_hash: int) -> Array:
        """All items of a hash: they are sorted and their hashes spread, so about where expected."""
        count, window = stored.key_count, self._window_items
        while True:
            expected = key_hash * count // _HASHES
            begin, end = max(expected - window, 0), min(expected + window, count)
            items = expect(self.items(stored, begin, end))
            hashes = items["key_hash"].astype(np.int64)
            left, right = np.searchsorted(hashes, [key_hash, key_hash + 1]).tolist()
            if (left or not begin) and (right < len(items) or end == count):
                return items[left:right]
            window *= 8

    @returns_failure
    def items(self, stored: StoredObject, begin: int, end: int) -> Array:
        """Key items of an object, whose messages may have none."""
        if begin == end:
            return np.empty(0, KEY_ITEM)
        at, size = stored.keys_at, KEY_ITEM.itemsize
        region = at, at + stored.key_count * size
        read = self._reader.read(stored.name, region, [(at + begin * size, at + end * size)])
        return np.frombuffer(expect(read)[0], KEY_ITEM)
