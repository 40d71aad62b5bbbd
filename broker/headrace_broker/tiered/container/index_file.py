"""Index files of the tier, in Apache's two forms.

An open one is a local file whose items link to older ones of their slot. A finished one has the
items of each slot side by side, the newest first, so that a query takes two reads.
Source: docs/store-format.md "Tier".
"""

from __future__ import annotations

import struct
import sys
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace_broker.store.files.mapped_file import MappedFile
from headrace_broker.store.files.sparse_pages import SparsePages

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files
    from headrace_protocol.columns import Array

HEADER: Final = struct.Struct(">iqqii")  # magic, begin ms, end ms, slots in use, items
SLOT: Final = struct.Struct(">ii")  # finished: position and bytes of its items
OPEN_MAGIC: Final = 0xBCC50289 - (1 << 32)
FINISHED_MAGIC: Final = 0xBCC50285 - (1 << 32)
_FIELDS: Final = [
    ("key_hash", ">i4"),
    ("topic_id", ">i4"),
    ("queue_id", ">i4"),
    ("log_offset", ">i8"),
    ("size", ">i4"),
    ("seconds", ">i4"),
]
ITEM: Final = np.dtype(_FIELDS)
OPEN_ITEM: Final = np.dtype([*_FIELDS, ("previous", ">i4")])
_ALLOCATE_STEP_BYTES: Final = 1 << 20
# Of a finished file at a time: its slots or items.
_PART_COUNT: Final = 1 << 18


class IndexSize(NamedTuple):
    """Room of a file, with Apache's defaults. It is the same for all files of a tier."""

    slot_count: int = 5_000_000
    item_count: int = 20_000_000

    @property
    def items_at(self) -> int:
        """Position of the items, or in an open file the unused item 0."""
        return HEADER.size + self.slot_count * SLOT.size

    def slot_at(self, key_hash: int) -> int:
        """Position of the slot of a hash."""
        return HEADER.size + key_hash % self.slot_count * SLOT.size


class OpenIndex:
    """A local index file. One thread adds while others query; blocks are allocated as needed.

    begin_ms: names the file, and items count their seconds from it. end_ms: highest store time.
    """

    def __init__(self, path: Path, size: IndexSize, files: Files) -> None:
        """Open a file or create it. Raises OSError."""
        self.path = path
        self.begin_ms = int(path.name)
        self._size = size
        self._file = _open(path, size.items_at + size.item_count * OPEN_ITEM.itemsize, files)
        self._pages = SparsePages(self._file, size.items_at)
        self._pages.allocate(np.empty(0, np.int64))
        slots = np.frombuffer(self._file.view, ">i4", size.slot_count * 2, HEADER.size)
        self._slots = slots[::2]
        self._items = np.frombuffer(self._file.view, OPEN_ITEM, size.item_count, size.items_at)
        header: tuple[int, ...] = HEADER.unpack_from(self._file.view)
        _magic, _begin, self.end_ms, self._used_slots, count = header
        self.count = min(max(count, 0), size.item_count - 1)
        self._write_header(OPEN_MAGIC)

    @property
    def room(self) -> int:
        """Number of items that still fit; number 0 is never used."""
        return self._size.item_count - 1 - self.count

    def add(self, items: Array, times: Array) -> None:
        """Add items, at most ``room``. times: their store times, which replace ``seconds``.

        Raises OSError if the disk is full; then nothing was added.
        """
        first = self.count + 1
        added = np.empty(len(items), OPEN_ITEM)
        for name in ITEM.names or ():
            added[name] = items[name]
        added["seconds"] = (times - self.begin_ms) // 1000
        slots = added["key_hash"].astype(np.int64) % self._size.slot_count
        self._allocate(slots, first, first + len(items))
        added["previous"], heads = self._linked(slots, first)
        self._items[first : first + len(items)] = added
        self._used_slots += int((self._slots[slots[heads]] <= 0).sum())
        self._slots[slots[heads]] = heads + first
        self.count += len(items)
        self.end_ms = max(self.end_ms, int(times.max()))
        # Last: a query of another thread, or a start after a kill, sees whole items only.
        self._write_header(OPEN_MAGIC)

    def _allocate(self, slots: Array, first: int, item_end: int) -> None:
        """Allocate blocks for these slots and the items from ``first`` to ``item_end``.

        On a full disk a write through the map would end the process.
        """
        # All slots would be 40 MB.
        self._pages.allocate(HEADER.size + slots * SLOT.size, page_count_max=sys.maxsize)
        start, end = (
            self._size.items_at + number * OPEN_ITEM.itemsize for number in (first, item_end)
        )
        self._pages.allocate_after(start, end, _ALLOCATE_STEP_BYTES)

    def _linked(self, slots: Array, first: int) -> tuple[Array, Array]:
        """The item before each in its slot, and which of them are the last of their slots."""
        order = np.argsort(slots, kind="stable")
        ordered = slots[order]
        is_same = ordered[1:] == ordered[:-1]
        previous = self._slots[slots].astype(np.int64)
        previous[order[1:][is_same]] = order[:-1][is_same] + first
        return previous, order[np.append(~is_same, True)[: len(order)]]

    def _write_header(self, magic: int) -> None:
        fields = (self.begin_ms, self.end_ms, self._used_slots, self.count)
        HEADER.pack_into(self._file.view, 0, magic, *fields)

    def link_anew(self) -> None:
        """Rebuild slots and links from the items: after a crash any of them may be lost.

        Raises OSError.
        """
        slots = self._items["key_hash"][1 : self.count + 1].astype(np.int64)
        slots %= self._size.slot_count
        self._pages.clear(HEADER.size)
        self._allocate(slots, 1, self.count + 1)
        previous, heads = self._linked(slots, 1)
        self._items["previous"][1 : self.count + 1] = previous
        self._slots[slots[heads]] = heads + 1
        self._used_slots = len(heads) if self.count else 0
        self._write_header(OPEN_MAGIC)

    def find(self, key_hash: int, count_max: int) -> Array:
        """The newest items of a hash, at most ``count_max``."""
        numbers: list[int] = []
        # Not through the map: on a tmpfs, reading a hole allocates its page.
        slot = self._file.pread(self._size.slot_at(key_hash), SLOT.size)
        number, limit = SLOT.unpack(slot)[0], self.count
        while number > 0 and len(numbers) < count_max:
            item = self._items[number]
            if number <= limit and item["key_hash"] == key_hash:
                numbers.append(number)
            before = int(item["previous"])
            number = before if before < number else 0
        return without_links(self._items[numbers])

    def sync(self) -> None:
        """Bring all items to disk. Raises OSError."""
        self._file.sync()

    def finished(self) -> Iterator[bytes]:
        """The file in its finished form, in parts."""
        yield HEADER.pack(FINISHED_MAGIC, self.begin_ms, self.end_ms, self._used_slots, self.count)
        items = self._items[1 : self.count + 1]
        slots = items["key_hash"].astype(np.int64) % self._size.slot_count
        counts = np.bincount(slots, minlength=self._size.slot_count)
        ends = np.cumsum(counts)
        for first in range(0, len(counts), _PART_COUNT):
            part = slice(first, first + _PART_COUNT)
            table = np.empty((len(counts[part]), 2), ">i4")
            table[:, 0] = self._size.items_at + (ends[part] - counts[part]) * ITEM.itemsize
            table[:, 1] = counts[part] * ITEM.itemsize
            yield table.tobytes()
        # By slot, and the newest first within each.
        order = self.count - 1 - np.argsort(slots[::-1], kind="stable")
        for first in range(0, self.count, _PART_COUNT):
            yield without_links(items[order[first : first + _PART_COUNT]]).tobytes()

    def close(self) -> None:
        """Release the file, once no other thread reads it."""
        del self._slots, self._items
        self._file.unmap()

    def remove(self) -> None:
        """Close the file and delete it. Raises OSError."""
        self.close()
        self._file.delete()


def _open(path: Path, file_bytes: int, files: Files) -> MappedFile:
    """Open a file or create it, without blocks. Raises OSError."""
    if not path.exists():
        return MappedFile.create(path, file_bytes, files, 0)
    descriptor = files.open(path)
    try:
        files.truncate(descriptor, file_bytes)
    finally:
        files.close(descriptor)
    return MappedFile(path, file_bytes, files)


def without_links(items: Array) -> Array:
    """A copy of open items as finished ones."""
    finished = np.empty(len(items), ITEM)
    for name in ITEM.names or ():
        finished[name] = items[name]
    return finished
