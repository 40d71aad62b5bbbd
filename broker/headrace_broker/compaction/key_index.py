"""The key index of a compacted queue: where the newest message of each key is.

A hash table in a file of its own, ``compaction/headrace/TOPIC/QUEUE/keys/SLOTS``, whose name is its
number of slots: a head, then per slot the hash of a key and a value, which is the queue offset of
the key's newest message, plus one, below 16 bits of checksum. The hash has 64 bits, keyed with the
store's seed; whoever reads the message compares its key. The table only grows: an entry is changed
in place or takes a free slot, so after a crash it is as good as before, once the messages from the
saved position on are entered again. A larger table is filled in ``keys-new`` and then renamed, so a
file in ``keys`` is complete.

The checksum is the slot's other 16-bit words, combined by exclusive or, so it shows each flipped
bit. A slot on the way to a key that fails the check makes the index anew.

Source: docs/store-format.md "Compaction log"; tests/broker/compaction/test_compaction_lookups.py.
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

_MAGIC: Final = b"keyindx3"
# Magic, the seed of the hash, queue offset up to which messages are entered, number of keys; then
# their CRC.
_HEAD: Final = struct.Struct("<8s32sqq")
# The number of keys while some are being entered.
_UNKNOWN: Final = -1
_CRC: Final = struct.Struct("<I")
_HEAD_BYTES: Final = 64
_SLOT: Final = struct.Struct("<QQ")
_SLOT_DTYPE: Final = np.dtype([("hash", "<u8"), ("value", "<u8")])
_FREE: Final = 0
# A slot whose value is not written yet.
_TAKEN: Final = (1 << 64) - 1
_CHECK_AT: Final = 48
_NUMBER_MASK: Final = (1 << _CHECK_AT) - 1
_FILL_MAX: Final = 0.7
# Slots that are read at a time, so that memory does not grow with the table.
PART_SLOTS: Final = 1 << 16
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
    and new messages must be entered; until then another process may enter messages. is_damaged:
    whether an entry was found damaged, so that ``load`` begins with an empty table.
    """

    def __init__(
        self,
        folder: Path,
        fs: Files,
        key_hash: KeyHash,
        page_cache: PageCache,
        *,
        trusts_count: bool,
        slots_min: int = 1024,
    ) -> None:
        """trusts_count: no power cut came after the saved number of keys was written.

        slots_min: of a new table.
        """
        self.position = 0
        self.is_open = False
        self.is_damaged = False
        self.trusts_count = trusts_count
        self.folder = folder
        self._new_folder = folder.with_name(f"{folder.name}-new")
        self._fs = fs
        self._slots_min = slots_min
        self._hash = key_hash
        self._page_cache = page_cache
        self._key_count = 0
        self._is_count_saved = False
        self._table: _Table | None = None

    @property
    def is_loaded(self) -> bool:
        """True if ``position`` is that of the file."""
        return self._table is not None and not self.is_damaged

    @property
    def seed(self) -> bytes:
        """The seed of the hash."""
        return self._hash.seed

    def load(self, end: int) -> None:
        """Read the file, or create an empty one if it is missing, of another seed or damaged.

        end: of the log; an index that goes beyond is not of this log. Raises OSError.
        """
        for path in _files(self._new_folder):
            self._fs.unlink(path)
        paths = _files(self.folder)
        for path in paths[:-1]:
            self._fs.unlink(path)  # a crash came before the old table was removed
        is_whole = bool(paths) and not self.is_damaged and self._read_head(paths[-1], end)
        self.is_damaged = False
        if not is_whole:
            if paths:
                self._fs.unlink(paths[-1])
            self.position = self._key_count = 0
            self._table = self._put_in_place(self._create(self._slots_min))

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
        magic, seed, position, key_count = _HEAD.unpack(head)
        if _CRC.unpack_from(table.file.view, _HEAD.size)[0] != crc32(head):
            return False
        if magic != _MAGIC or seed != self._hash.seed or not 0 <= position <= end:
            return False
        self._table, self.position = table, position
        self._is_count_saved = key_count != _UNKNOWN
        is_known = self._is_count_saved and self.trusts_count
        self._key_count = key_count if is_known else _used_count(table.slots)
        self.trusts_count = True
        return True

    def _create(self, slot_count: int) -> _Table:
        """A larger table, to be filled; removes one that a crash or an error has left."""
        file_bytes = _HEAD_BYTES + slot_count * _SLOT.size
        path = self._new_folder / f"{slot_count:020d}"
        if path.exists():
            self._fs.unlink(path)
        return _Table.of(MappedFile.create(path, file_bytes, self._fs, file_bytes))

    def _put_in_place(self, table: _Table) -> _Table:
        """Give a filled table its name, when it is on disk. Raises OSError."""
        self._write_head(table, _UNKNOWN)
        table.file.sync()
        self._fs.make_directories(self.folder)
        path = self.folder / table.file.path.name
        self._fs.rename(table.file.path, path)
        for folder in (self.folder, self._new_folder):
            self._fs.mark_names_unsynced(folder)
        self._fs.sync_names()
        table.file.path = path
        return table

    def _write_head(self, table: _Table, key_count: int) -> None:
        head = _HEAD.pack(_MAGIC, self._hash.seed, self.position, key_count)
        table.file.view[: _HEAD.size + _CRC.size] = head + _CRC.pack(crc32(head))
        self._is_count_saved = key_count != _UNKNOWN

    # --- entering ----------------------------------------------------------------------------

    def put(self, records: RecordColumns, end: int) -> None:
        """Enter records newer than all before; ``end`` is the queue offset after them.

        Afterwards the index may be damaged. Raises OSError.
        """
        hashes, has_key = self.hashes_of(records)
        if len(hashes):
            numbers = records.queue_offset[has_key].astype(np.uint64) + 1
            self._enter(*_newest(hashes, numbers))
        if not self.is_damaged:
            self.position = end

    def _enter(self, hashes: Array, numbers: Array) -> None:
        table = self._table
        assert table is not None
        if self._key_count + len(hashes) > _FILL_MAX * len(table.slots):
            grown = self._grown(table, len(hashes))
            if grown is None:
                self._report_damage(table)
                return
            table = self._table = grown
        if self._is_count_saved:
            self._write_head(table, _UNKNOWN)
        self._key_count += _enter(table.slots, hashes, _values(hashes, numbers))

    def _report_damage(self, table: _Table) -> None:
        """Have the next look-up make the index anew."""
        self.is_damaged, self.is_open = True, False
        log.warning("key index is damaged, it is made anew", path=str(table.file.path))

    def _grown(self, old: _Table, room: int) -> _Table | None:
        """A copy with at least twice as many slots in place of the old file; None if damaged."""
        slot_count = max(2 * len(old.slots), int((self._key_count + room) / _FILL_MAX) + 1)
        table = self._create(slot_count)
        for first in range(0, len(old.slots), PART_SLOTS):
            entries = _entries(old.slots[first : first + PART_SLOTS])
            if entries is None:
                return None
            _enter(table.slots, entries["hash"], entries["value"])
        self._put_in_place(table)
        self._fs.unlink(old.file.path)
        return table

    def sync(self) -> None:
        """Bring all entries to disk, and then how far they go. Raises OSError."""
        if self._table is not None and not self.is_damaged:
            try:
                self._table.file.sync()
            except OSError:
                # The system may have dropped entries: the next look-up enters them again.
                self.is_open = False
                self._table = None
                raise
            self._write_head(self._table, self._key_count)
            self._fs.sync_names()

    # --- looking up --------------------------------------------------------------------------

    def hash_of(self, key: bytes) -> int:
        """The hash by which a key is entered, which nobody can choose."""
        first, second = self._hash.of_key(key)
        return first ^ (second >> 32 | (second & 0xFFFFFFFF) << 32)

    def hashes_of(self, records: RecordColumns) -> tuple[Array, Array]:
        """The hashes of the records that have a key, and a mask of those records."""
        starts, sizes = find_keys(records)
        has_key = sizes > 0
        return _mixed(self._hash.of_slices(records.data, starts[has_key], sizes[has_key])), has_key

    def find(self, key: bytes) -> int | None:
        """The queue offset of the newest message of a key; None if the key is not entered.

        It may be that of another key. Raises NotReady.
        """
        table = self._table
        if table is None:  # closed by the follower's thread just now
            raise NotReady(lambda: None, OLD_DATA)
        wanted = self.hash_of(key)
        slot = (wanted >> 32) * len(table.slots) >> 32
        view = table.file.view
        while True:
            at = _HEAD_BYTES + slot * _SLOT.size
            self._page_cache.check(table.file, at, at + _SLOT.size)
            found, value = _SLOT.unpack_from(view, at)
            if value == _FREE:
                return None
            # Read again, a slot that is being taken has its hash.
            if not _is_whole(found, value) and not _is_whole(*_SLOT.unpack_from(view, at)):
                self._report_damage(table)
                raise NotReady(lambda: None, OLD_DATA)
            if found == wanted:
                return (value & _NUMBER_MASK) - 1 if value != _TAKEN else None
            slot = slot + 1 if slot + 1 < len(table.slots) else 0

    def delete_files(self) -> None:
        """Remove the files, also those that another process has made. Raises OSError."""
        for folder in (self.folder, self._new_folder):
            for path in _files(folder):
                self._fs.unlink(path)
        self._fs.sync_names()

    def close(self) -> None:
        """Release the map."""
        self.is_open = False
        table, self._table = self._table, None
        if table is not None:
            table.file.unmap()


def _files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


def _newest(hashes: Array, numbers: Array) -> tuple[Array, Array]:
    """Each hash once, with its greatest number, in the order of the table's slots."""
    order = np.argsort(hashes)
    hashes, numbers = hashes[order], numbers[order]
    firsts = np.flatnonzero(np.append(True, hashes[1:] != hashes[:-1]))
    if len(firsts) == len(hashes):
        return hashes, numbers
    return hashes[firsts], np.maximum.reduceat(numbers, firsts)


def _mixed(lanes: Array) -> Array:
    """One hash of both lanes, whose upper bits are the mixed ones."""
    mixed: Array = lanes[0] ^ (lanes[1] >> _HALF_BITS | lanes[1] << _HALF_BITS)
    return mixed


def _values(hashes: Array, numbers: Array) -> Array:
    """The values of keys: their numbers with the checksums of their slots."""
    words = hashes ^ numbers
    words = words ^ words >> np.uint64(32)
    words = words ^ words >> np.uint64(16)
    values: Array = numbers | words << np.uint64(_CHECK_AT)
    return values


def _entries(slots: Array) -> Array | None:
    """The entries in slots; None if one is damaged."""
    values = slots["value"]
    entries: Array = slots[(values != _FREE) & (values != _TAKEN)]
    is_whole = _values(entries["hash"], entries["value"] & _NUMBER_MASK) == entries["value"]
    return entries if is_whole.all() else None


def _is_whole(key_hash: int, value: int) -> bool:
    words = key_hash ^ (value & _NUMBER_MASK)
    words ^= words >> 32
    return value == _TAKEN or value >> _CHECK_AT == (words ^ words >> 16) & 0xFFFF


def _first_slots(hashes: Array, slot_count: int) -> Array:
    slots: Array = (hashes >> _HALF_BITS) * np.uint64(slot_count) >> _HALF_BITS
    return slots.astype(np.int64)


def _used_count(slots: Array) -> int:
    parts = range(0, len(slots), PART_SLOTS)
    return sum(int(np.count_nonzero(slots["value"][at : at + PART_SLOTS])) for at in parts)


def _enter(slots: Array, hashes: Array, values: Array) -> int:
    """Enter different keys; returns how many are new."""
    new_count, at = 0, _first_slots(hashes, len(slots))
    slot_hashes, slot_values = slots["hash"], slots["value"]
    while len(hashes):
        is_free = slot_values[at] == _FREE
        free = at[is_free]
        # If several keys want a slot, the last one gets it. A reader that finds the slot taken
        # takes the key for missing, as it was before.
        slot_hashes[free] = hashes[is_free]
        slot_values[free] = _TAKEN
        is_mine = slot_hashes[at] == hashes
        slot_values[at[is_mine]] = values[is_mine]
        new_count += int(np.count_nonzero(is_mine & is_free))
        others = ~is_mine
        hashes, values, at = hashes[others], values[others], at[others] + 1
        at[at == len(slots)] = 0
    return new_count
