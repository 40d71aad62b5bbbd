"""The key index of a compacted queue: where the newest message of each key is.

A hash table in a file of its own, ``compaction/headrace/TOPIC/QUEUE/keys/SLOTS``, whose name is its
number of slots: a head, then per slot the hash of a key and its place, which is the queue offset of
the key's newest message, plus one, below 16 bits of checksum. The hash has 64 bits, keyed with the
store's seed; whoever reads the message compares its key. The table only grows: an entry is changed
in place or takes a free slot, so after a crash it is as good as before, once the messages from the
saved position on are entered again.

The checksum is the slot's other 16-bit words, combined by exclusive or, so it shows each flipped
bit. A slot on the way to a key that fails the check makes the index anew.

Source: docs/store-format.md "Compaction log"; tests/broker/test_compaction_lookups.py.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import structlog
from zlib_ng.zlib_ng import crc32

from headrace_broker.store.files.mapped_file import MappedFile
from headrace_broker.store.files.residency import OLD_DATA
from headrace_protocol.errors import NotReady
from headrace_protocol.record_keys import find_keys

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_broker.compaction.key_hash import KeyHash
    from headrace_broker.store.files.filesystem import Files
    from headrace_broker.store.files.page_cache import PageCache
    from headrace_protocol.columns import Array, RecordColumns

log = structlog.get_logger("headrace.broker")

_MAGIC: Final = b"keyindx2"
# Magic, the seed of the hash, queue offset up to which messages are entered; then their CRC.
_HEAD: Final = struct.Struct("<8s32sq")
_CRC: Final = struct.Struct("<I")
_HEAD_BYTES: Final = 64
_SLOT: Final = struct.Struct("<QQ")
_SLOT_DTYPE: Final = np.dtype([("hash", "<u8"), ("place", "<u8")])
_FREE: Final = 0
# A slot whose place is not written yet.
_TAKEN: Final = (1 << 64) - 1
_CHECK_AT: Final = 48
_NUMBER_MASK: Final = (1 << _CHECK_AT) - 1
_FILL_MAX: Final = 0.7
_SLOTS_MIN: Final = 1024
_HALF_BITS: Final = np.uint64(32)


class _Table(NamedTuple):
    """An open file. slots: view of its map."""

    file: MappedFile
    slots: Array

    @classmethod
    def of(cls, file: MappedFile) -> _Table:
        return cls(file, np.frombuffer(file.view, _SLOT_DTYPE, file.start_offset, _HEAD_BYTES))


class KeyIndex:
    """All but ``find``, which is for the loop, is called in one thread at a time.

    position: messages below this queue offset are entered. is_open: whether keys may be looked up
    and new messages must be entered.
    """

    def __init__(self, folder: Path, fs: Files, key_hash: KeyHash, page_cache: PageCache) -> None:
        self.position = 0
        self.is_open = False
        self._folder = folder
        self._fs = fs
        self._hash = key_hash
        self._page_cache = page_cache
        self._key_count = 0
        self._is_damaged = False
        self._table: _Table | None = None

    def load(self, end: int) -> None:
        """Read the file, or create an empty one if it is missing, of another seed or damaged.

        end: of the log; an index that goes beyond is not of this log. Raises OSError.
        """
        paths = sorted(self._folder.iterdir()) if self._folder.exists() else []
        for path in paths[:-1]:
            self._fs.unlink(path)  # a crash came before the old table was removed
        if paths and not self._is_damaged and self._read_head(paths[-1], end):
            return
        if paths:
            self._fs.unlink(paths[-1])
        self._is_damaged = False
        self.position = self._key_count = 0
        self._table = self._create(_SLOTS_MIN)

    def open(self, end: int) -> None:
        """Begin to serve: the messages below ``end`` are entered."""
        self.position, self.is_open = end, True

    def resume(self, end: int) -> None:
        """The log has lost its messages from ``end`` on, which will be entered again."""
        self.position = min(self.position, end)

    def _read_head(self, path: Path, end: int) -> bool:
        slot_count, file_bytes = int(path.name), path.stat().st_size
        if file_bytes != _HEAD_BYTES + slot_count * _SLOT.size:
            return False
        table = _Table.of(MappedFile(path, file_bytes, self._fs))
        head = table.file.view[: _HEAD.size]
        magic, seed, position = _HEAD.unpack(head)
        if _CRC.unpack_from(table.file.view, _HEAD.size)[0] != crc32(head):
            return False
        if magic != _MAGIC or seed != self._hash.seed or not 0 <= position <= end:
            return False
        self._table, self.position = table, position
        # Of the messages after the position some may have been entered too.
        self._key_count = int(np.count_nonzero(table.slots["place"]))
        return True

    def _create(self, slot_count: int) -> _Table:
        file_bytes = _HEAD_BYTES + slot_count * _SLOT.size
        path = self._folder / f"{slot_count:020d}"
        table = _Table.of(MappedFile.create(path, file_bytes, self._fs, file_bytes))
        self._write_head(table)
        return table

    def _write_head(self, table: _Table) -> None:
        head = _HEAD.pack(_MAGIC, self._hash.seed, self.position)
        table.file.view[: _HEAD.size + _CRC.size] = head + _CRC.pack(crc32(head))

    # --- entering ----------------------------------------------------------------------------

    def put(self, records: RecordColumns, end: int) -> None:
        """Enter records newer than all before; ``end`` is the queue offset after them.

        Raises OSError.
        """
        starts, sizes = find_keys(records)
        has_key = sizes > 0
        if has_key.any():
            lanes = self._hash.of_slices(records.data, starts[has_key], sizes[has_key])
            hashes, numbers = _mixed(lanes), records.queue_offset[has_key].astype(np.uint64) + 1
            self._enter(hashes, _places(hashes, numbers))
        self.position = end

    def _enter(self, hashes: Array, places: Array) -> None:
        table = self._table
        assert table is not None
        if self._key_count + len(hashes) > _FILL_MAX * len(table.slots):
            entries = _entries(table.slots)
            if entries is None:
                self._report_damage(table)
                return
            table = self._table = self._grown(table, entries, len(hashes))
        self._key_count += _enter(table.slots, hashes, places)

    def _report_damage(self, table: _Table) -> None:
        """Have the next look-up make the index anew."""
        self._is_damaged, self.is_open = True, False
        log.warning("key index is damaged, it is made anew", path=str(table.file.path))

    def _grown(self, old: _Table, entries: Array, room: int) -> _Table:
        """A copy with at least twice as many slots; the old file is removed."""
        slot_count = max(2 * len(old.slots), int((self._key_count + room) / _FILL_MAX) + 1)
        table = self._create(slot_count)
        _enter(table.slots, entries["hash"], entries["place"])
        table.file.sync()
        self._fs.sync_names()
        self._fs.unlink(old.file.path)
        return table

    def sync(self) -> None:
        """Bring all entries to disk, and then how far they go. Raises OSError."""
        if self._table is not None:
            try:
                self._table.file.sync()
            except OSError:
                # The system may have dropped entries: the next look-up enters them again.
                self.is_open = False
                raise
            self._write_head(self._table)
            self._fs.sync_names()

    # --- looking up --------------------------------------------------------------------------

    def find(self, key: bytes) -> int | None:
        """The queue offset of the newest message of a key; None if the key is not entered.

        It may be that of another key. Raises NotReady.
        """
        table = self._table
        assert table is not None
        first, second = self._hash.of_key(key)
        wanted = first ^ (second >> 32 | (second & 0xFFFFFFFF) << 32)
        slot = (wanted >> 32) * len(table.slots) >> 32
        view = table.file.view
        while True:
            at = _HEAD_BYTES + slot * _SLOT.size
            self._page_cache.check(table.file, at, at + _SLOT.size)
            found, place = _SLOT.unpack_from(view, at)
            if place == _FREE:
                return None
            # Read again, a slot that is being taken has its hash.
            if not _is_whole(found, place) and not _is_whole(*_SLOT.unpack_from(view, at)):
                self._report_damage(table)
                raise NotReady(lambda: None, OLD_DATA)
            if found == wanted:
                return (place & _NUMBER_MASK) - 1 if place != _TAKEN else None
            slot = slot + 1 if slot + 1 < len(table.slots) else 0

    def close(self) -> None:
        """Release the map."""
        self.is_open = False
        table, self._table = self._table, None
        if table is not None:
            table.file.unmap()


def _mixed(lanes: Array) -> Array:
    """One hash of both lanes, whose upper bits are the mixed ones."""
    mixed: Array = lanes[0] ^ (lanes[1] >> _HALF_BITS | lanes[1] << _HALF_BITS)
    return mixed


def _places(hashes: Array, numbers: Array) -> Array:
    """The places of keys: their numbers with the checksums of their slots."""
    words = hashes ^ numbers
    words = words ^ words >> np.uint64(32)
    words = words ^ words >> np.uint64(16)
    places: Array = numbers | words << np.uint64(_CHECK_AT)
    return places


def _entries(slots: Array) -> Array | None:
    """The entries in slots; None if one is damaged."""
    places = slots["place"]
    entries: Array = slots[(places != _FREE) & (places != _TAKEN)]
    is_whole = _places(entries["hash"], entries["place"] & _NUMBER_MASK) == entries["place"]
    return entries if is_whole.all() else None


def _is_whole(key_hash: int, place: int) -> bool:
    words = key_hash ^ (place & _NUMBER_MASK)
    words ^= words >> 32
    return place == _TAKEN or place >> _CHECK_AT == (words ^ words >> 16) & 0xFFFF


def _first_slots(hashes: Array, slot_count: int) -> Array:
    slots: Array = (hashes >> _HALF_BITS) * np.uint64(slot_count) >> _HALF_BITS
    return slots.astype(np.int64)


def _enter(slots: Array, hashes: Array, places: Array) -> int:
    """Enter keys, of equal ones the last; returns how many are new."""
    new_count, where = 0, np.empty(len(hashes), np.int64)
    pending, at = np.arange(len(hashes)), _first_slots(hashes, len(slots))
    while len(pending):
        mine = hashes[pending]
        is_free = slots["place"][at] == _FREE
        free = at[is_free]
        # If several keys want a slot, the last one gets it. A reader that finds the slot taken
        # takes the key for missing, as it was before.
        slots["hash"][free] = mine[is_free]
        slots["place"][free] = _TAKEN
        new_count += len(np.unique(free))
        is_same = slots["hash"][at] == mine
        where[pending[is_same]] = at[is_same]
        pending, at = pending[~is_same], at[~is_same] + 1
        at[at == len(slots)] = 0
    # Of equal indices the last value stays, which is the newest.
    slots["place"][where] = places
    return new_count
