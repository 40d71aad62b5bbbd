"""Checks index files: the links of their entries, and the records they point to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.index.index_file import IndexFiles
from headrace_broker.store_tools.findings import Finding, RebuildIndex

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headrace_broker.store.index.index_file import IndexFile
    from headrace_broker.store_tools.directory import StoreDirectory
    from headrace_broker.store_tools.records import QueueNumbers, Records
    from headrace_protocol.columns import Array

_BLOCK_ENTRIES: Final = 1 << 18
_FAR: Final = 1 << 62
# seconds: store time in seconds since 1970; 0 for a file's first entry, whose base differs.
_ENTRY: Final = np.dtype([("physical_offset", "i8"), ("key_hash", "i8"), ("seconds", "i8")])


class IndexCheck:
    """Compares all index files with the records of the log, in log order.

    The fix is always the same: rebuild all files from the log.
    """

    def __init__(self, directory: StoreDirectory, queue_numbers: QueueNumbers) -> None:
        self.files = IndexFiles(directory.settings, directory.fs)
        self._queue_numbers = queue_numbers
        self._findings: list[Finding] = []
        self._missing_count = 0
        try:
            self.files.load()
        except StoreFormatError as error:
            self._report(error.path, str(error).partition(": ")[2])
            self.files.files.clear()
        self._blocks = self._entries()
        self._waiting = np.empty(0, _ENTRY)

    def compare(self, records: Records, end_offset: int) -> None:
        """Compare the entries of a block's records; ``end_offset`` is just after the block."""
        found = self._upto(end_offset)
        # The records of older entries have left the log.
        found = found[found["physical_offset"] >= records.physical_offset[0]]
        wanted = self._wanted(records)
        names = ["physical_offset", "key_hash"]
        if len(found) != len(wanted) or (found[names] != wanted[names]).any():
            required = self._wanted(records, of_messages=False)
            self._compare_each(found[names], wanted[names], required[names])
            return
        # Both times are truncated to whole seconds.
        is_early_or_late = np.abs(found["seconds"] - wanted["seconds"]) > 1
        for entry in found[is_early_or_late & (found["seconds"] > 0)][:1]:
            physical_offset = int(entry["physical_offset"])
            self._report(
                self._path_of(physical_offset),
                f"the entry of the record at {physical_offset} has another time",
            )

    def finish(self) -> Iterator[Finding]:
        """The findings for all files, after the last block."""
        for physical_offset in self._upto(_FAR)["physical_offset"][:1].tolist():
            self._report(
                self._path_of(physical_offset),
                f"an entry points to {physical_offset}, past the log's end",
            )
        yield from self._findings
        if self._missing_count:
            problem = f"{self._missing_count} keys of records in the log have no entry"
            yield Finding(self.files.directory, problem, is_damage=False)

    def _report(self, path: Path, problem: str) -> None:
        self._findings.append(Finding(path, problem, fix=RebuildIndex(path)))

    # --- entries against records -----------------------------------------------------------

    def _wanted(self, records: Records, *, of_messages: bool = True) -> Array:
        numbers, hashes = self._queue_numbers.index_keys(records, of_messages=of_messages)
        wanted = np.empty(len(numbers), _ENTRY)
        wanted["physical_offset"] = records.physical_offset[numbers]
        wanted["key_hash"] = hashes
        wanted["seconds"] = records.store_timestamp[numbers] // 1000
        return wanted

    def _compare_each(self, found: Array, wanted: Array, required: Array) -> None:
        """Compare one by one: entries may be missing, or doubled after a recovery.

        required: those that Apache's broker makes, too.
        """
        have, want = set(found.tolist()), set(wanted.tolist())
        self._missing_count += len(set(required.tolist()) - have)
        for physical_offset, key_hash in sorted(have - want)[:1]:
            what = f"an entry with hash {key_hash} points to the record at {physical_offset}"
            self._report(self._path_of(physical_offset), f"{what}, which has no such key")

    def _path_of(self, physical_offset: int) -> Path:
        for file in self.files.files:
            if physical_offset <= file.header.end_physical_offset:
                return file.file.path
        return self.files.directory

    def _upto(self, physical_offset: int) -> Array:
        """The next entries that point to records before ``physical_offset``."""
        while not (is_later := self._waiting["physical_offset"] >= physical_offset).any():
            block = next(self._blocks, None)
            if block is None:
                break
            self._waiting = np.concatenate([self._waiting, block])
        count = int(is_later.argmax()) if is_later.any() else len(is_later)
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    # --- links within a file --------------------------------------------------------------

    def _entries(self) -> Iterator[Array]:
        """All entries in order, without those that contradict their file's header or links."""
        for file in self.files.files:
            header = file.header
            if not 1 <= header.index_count <= file.entry_count:
                self._report(file.file.path, f"its header counts {header.index_count} entries")
                continue
            links = _Links(file.slot_count)
            for first in range(1, header.index_count, _BLOCK_ENTRIES):
                raw = file.entries[first : min(first + _BLOCK_ENTRIES, header.index_count)]
                yield self._checked(file, first, raw, links)
            self._check_slots(file, links)

    def _checked(self, file: IndexFile, first: int, raw: Array, links: _Links) -> Array:
        header = file.header
        entries = np.empty(len(raw), _ENTRY)
        entries["physical_offset"], entries["key_hash"] = raw["physical_offset"], raw["key_hash"]
        entries["seconds"] = header.begin_timestamp // 1000 + raw["seconds"].astype(np.int64)
        if first == 1:
            entries["seconds"][0] = 0
        physical_offset = entries["physical_offset"]
        is_good = (physical_offset >= header.begin_physical_offset) & (
            physical_offset <= header.end_physical_offset
        )
        is_good &= (entries["key_hash"] >= 0) & (
            raw["previous"] == links.previous(entries["key_hash"], first)
        )
        for number in np.flatnonzero(~is_good)[:1].tolist():
            self._report(
                file.file.path, f"entry {first + number}: an impossible physical offset or link"
            )
        return entries[is_good]

    def _check_slots(self, file: IndexFile, links: _Links) -> None:
        if not np.array_equal(file.slots, links.newest):
            self._report(file.file.path, "not all slots point to the newest entry of their hashes")
        elif file.header.hash_slot_count != np.count_nonzero(links.newest):
            self._report(file.file.path, "its header miscounts the slots in use")


class _Links:
    """Computes, from the hashes alone, the entry that each entry must link to."""

    def __init__(self, slot_count: int) -> None:
        self.newest = np.zeros(slot_count, np.int32)

    def previous(self, key_hash: Array, first: int) -> Array:
        """For each entry from ``first`` on, the number of the entry before it in its slot."""
        slots = key_hash % len(self.newest)
        order = np.argsort(slots, kind="stable")
        ordered = slots[order]
        is_first = np.diff(ordered, prepend=-1) != 0
        before = np.empty(len(slots), np.int64)
        before[1:] = order[:-1] + first
        before[is_first] = self.newest[ordered[is_first]]
        previous = np.empty(len(slots), np.int64)
        previous[order] = before
        is_last = np.append(is_first[1:], True)[: len(slots)]
        self.newest[ordered[is_last]] = order[is_last] + first
        return previous
