"""IndexFiles: hash files that map keys to the physical offsets of their records."""

from __future__ import annotations

import datetime as dt
import mmap
import struct
import sys
import threading
from bisect import bisect_left
from collections import deque
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.mapped_file import MappedFile
from headrace_broker.store.files.mapped_file_queue import drop_from_empty
from headrace_broker.store.files.page_cache import PageCache
from headrace_broker.store.files.sparse_pages import PAGES_AT_ONCE_MAX, SparsePages
from headrace_broker.store.integrity.checkpoint import IndexMark

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files
    from headrace_broker.store.settings import StoreSettings

HEADER: Final = struct.Struct(">qqqqii")
HEADER_BYTES: Final = HEADER.size
SLOT_BYTES: Final = 4
ENTRY_DTYPE: Final = np.dtype(
    [("key_hash", ">i4"), ("physical_offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")]
)
ENTRY_BYTES: Final = ENTRY_DTYPE.itemsize
ALLOCATE_STEP_BYTES: Final = 1 << 20
REBUILD_ENTRIES: Final = 1 << 19
LONG_MAX: Final = (1 << 63) - 1
# How far a clock may have been set back while a file was being written.
CLOCK_STEP_MS: Final = 24 * 3600 * 1000
# Entries per step, which takes half a millisecond.
_ENTRIES_AT_ONCE: Final = 128
Array = npt.NDArray[Any]


class IndexHeader(NamedTuple):
    """The file's first 40 bytes; ``index_count`` is the next entry's number, from 1 on."""

    begin_timestamp: int
    end_timestamp: int
    begin_physical_offset: int
    end_physical_offset: int
    hash_slot_count: int
    index_count: int


class IndexFile:
    """A slot has the number of the newest entry of its hashes; entries link to older ones.

    The slots of a large file are 20 MB. Their blocks are allocated as they are used, page by page,
    so that a small store stays small; Apache's files have holes there, too.
    """

    def __init__(self, file: MappedFile, slot_count: int, entry_count: int) -> None:
        self.file = file
        self.slot_count = slot_count
        self.entry_count = entry_count
        self.entries_at = HEADER_BYTES + slot_count * SLOT_BYTES
        self._pages = SparsePages(file, self.entries_at)

    @property
    def slots(self) -> Array:
        """Entry numbers by slot, a view of the file."""
        return np.frombuffer(self.file.view, ">i4", self.slot_count, HEADER_BYTES)

    @property
    def entries(self) -> Array:
        """Entries by number, a view of the file; number 0 is never used."""
        return np.frombuffer(self.file.view, ENTRY_DTYPE, self.entry_count, self.entries_at)

    @property
    def header(self) -> IndexHeader:
        """The header in the file."""
        return IndexHeader(*HEADER.unpack_from(self.file.map, 0))

    @header.setter
    def header(self, header: IndexHeader) -> None:
        HEADER.pack_into(self.file.map, 0, *header)

    @property
    def is_full(self) -> bool:
        """True if no more entries fit."""
        return self.header.index_count >= self.entry_count

    def put(self, key_hashes: Array, physical_offsets: Array, timestamps: Array) -> int:
        """Add entries in log order, as many as fit; returns how many. Raises OSError."""
        self._verify_seal()
        header = self.header
        first = header.index_count
        count = min(len(key_hashes), self.entry_count - first)
        start = self.entries_at + first * ENTRY_BYTES
        end = start + count * ENTRY_BYTES
        self._pages.allocate_after(start, end, ALLOCATE_STEP_BYTES)
        key_hashes, timestamps = key_hashes[:count], timestamps[:count]
        slots = key_hashes % self.slot_count
        self._allocate_slots(slots)
        entries = np.empty(count, ENTRY_DTYPE)
        entries["key_hash"] = key_hashes
        entries["physical_offset"] = physical_offsets[:count]
        entries["seconds"] = _seconds(timestamps, header)
        entries["previous"], new_slots = self._link(slots, first)
        self.file.map[start:end] = entries.tobytes()
        first_put = first <= 1
        self.header = IndexHeader(
            int(timestamps[0]) if first_put else header.begin_timestamp,
            int(timestamps[-1]),
            int(physical_offsets[0]) if first_put else header.begin_physical_offset,
            int(physical_offsets[count - 1]),
            header.hash_slot_count + new_slots,
            first + count,
        )
        return count

    def _allocate_slots(self, slots: Array, page_count_max: int = PAGES_AT_ONCE_MAX) -> None:
        self._pages.allocate(HEADER_BYTES + slots.astype(np.int64) * SLOT_BYTES, page_count_max)

    def _link(self, slots: Array, first: int) -> tuple[Array, int]:
        """Put the entry numbers from ``first`` on at the head of their slots.

        Returns for each the previous entry of its slot, which may be in the same block, and how
        many slots were empty.
        """
        order = np.argsort(slots, kind="stable")
        ordered = slots[order]
        is_first = np.ones(len(slots), bool)
        is_first[1:] = ordered[1:] != ordered[:-1]
        in_file = self.slots[ordered[is_first]].astype(np.int32)
        in_file[(in_file <= 0) | (in_file > first)] = 0
        before = np.empty(len(slots), np.int32)
        before[1:] = order[:-1] + first
        before[is_first] = in_file
        previous = np.empty(len(slots), np.int32)
        previous[order] = before
        is_last = np.append(is_first[1:], True)
        self.slots[ordered[is_last]] = order[is_last] + first
        return previous, int((in_file == 0).sum())

    def _verify_seal(self) -> None:
        """Compare the whole file with its seal once, since links cross the whole file."""
        if self.file.seal is not None:
            self.file.require(0, self.file.seal.used_bytes)
            self.file.seal = None

    def begin_timestamp(self, pages: PageCache) -> int:
        """Store time of the first record. Raises NotReady."""
        pages.check(self.file, 0, HEADER_BYTES)
        return self.header.begin_timestamp

    def newest(self, key_hash: int, pages: PageCache) -> int:
        """Number of the newest entry in the slot of a hash, 0 for none.

        Raises StoreDamaged; NotReady while pages have to be read from the disk or much has to be
        compared with the seal.
        """
        if self.file.seal is not None:
            self.file.check_soon(0, self.file.seal.used_bytes)
        slot_at = HEADER_BYTES + key_hash % self.slot_count * SLOT_BYTES
        pages.check(self.file, 0, HEADER_BYTES)
        pages.check(self.file, slot_at, slot_at + SLOT_BYTES)
        number = int.from_bytes(self.file.pread(slot_at, SLOT_BYTES), "big", signed=True)
        return self._older(number, self.header.index_count)

    def entry(self, number: int, pages: PageCache) -> tuple[int, int, int, int]:
        """Key hash, physical offset, seconds and previous entry's number. Raises NotReady."""
        entry_at = self.entries_at + number * ENTRY_BYTES
        pages.check(self.file, entry_at, entry_at + ENTRY_BYTES)
        key_hash, physical_offset, seconds, previous = self.entries[number].tolist()
        return key_hash, physical_offset, seconds, self._older(previous, number)

    @staticmethod
    def _older(number: int, below: int) -> int:
        # Links point to older entries; any other link is damage and ends the walk.
        return number if 0 < number < below else 0

    def truncate(self, index_count: int, end_timestamp: int) -> None:
        """Keep the entries below ``index_count`` and rebuild the slots from them."""
        header = self.header
        end = self.entries_at + index_count * ENTRY_BYTES
        self.file.clear_from(end)
        # Filling them again needs no more blocks than before.
        self._pages.clear(HEADER_BYTES)
        used = 0
        for first in range(1, index_count, REBUILD_ENTRIES):
            hashes = self.entries["key_hash"][first : min(first + REBUILD_ENTRIES, index_count)]
            slots = hashes.astype(np.int32) % self.slot_count
            self._allocate_slots(slots, sys.maxsize)
            used += self._link(slots, first)[1]
        self.header = header._replace(
            end_timestamp=end_timestamp,
            end_physical_offset=int(self.entries["physical_offset"][index_count - 1]),
            hash_slot_count=used,
            index_count=index_count,
        )


def _seconds(timestamps: Array, header: IndexHeader) -> Array:
    # The first entry counts from the timestamp that the file was seeded with, all others from the
    # first; the first file of a store is seeded with 0, which means "no time".
    base = np.full(len(timestamps), header.begin_timestamp, np.int64)
    if header.index_count <= 1:
        base[1:] = timestamps[0]
    seconds = np.clip((timestamps - base) // 1000, 0, 0x7FFFFFFF)
    return np.where(base > 0, seconds, 0)


class IndexFlush(NamedTuple):
    """Files to bring to disk: full ones, each with its last timestamp, and the last file."""

    full: list[tuple[IndexFile, int]]
    last: IndexFile | None
    mark: IndexMark  # valid once the last file is synced


class IndexFiles:
    """The folder ``index/``: entries go to the last file, queries read all files.

    A thread may add entries, and holds the ``lock`` for some milliseconds. All other code that
    reads entries or changes ``files`` while the store runs takes the lock too.
    """

    def __init__(
        self,
        settings: StoreSettings,
        fs: Files,
        on_vanished: Callable[[list[Path]], None] = lambda _: None,
    ) -> None:
        """on_vanished: called with files that were found missing."""
        self.directory = settings.root / "index"
        self.slot_count = settings.index_slot_count
        self.entry_count = settings.index_entry_count
        self.file_bytes = (
            HEADER_BYTES + self.slot_count * SLOT_BYTES + self.entry_count * ENTRY_BYTES
        )
        self.fs = fs
        self.mark_file = IndexMark.file(settings.root, fs)
        self.page_cache = PageCache(fs)
        self.files: list[IndexFile] = []
        self.lock = threading.Lock()
        # Physical offset of the newest record examined for keys; -1 if unknown.
        self.last_seen = -1
        self._full: list[tuple[IndexFile, int]] = []
        # Name of the first file that another process has removed since the start, "" for none. A
        # start after a crash keeps the files before it and rebuilds the rest from the log.
        self.lost_from = ""
        self._on_vanished = on_vanished

    def load(self, *, is_clean: bool = True) -> None:
        """Find the files. Raises StoreFormatError."""
        paths = sorted(path for path in self.directory.glob("*") if path.is_file())
        for path in paths if is_clean else drop_from_empty(paths, self.fs):
            self._check(path)
            self.files.append(self._open(MappedFile(path, self.file_bytes, self.fs)))

    def _check(self, path: Path) -> None:
        if not (len(path.name) == 17 and path.name.isascii() and path.name.isdigit()):
            raise StoreFormatError(
                path, "is not the name of an index file", "move it out of the store"
            )
        length = path.stat().st_size
        if length != self.file_bytes:
            raise StoreFormatError(
                path,
                f"has {length} bytes, but index_slot_count {self.slot_count} and"
                f" index_entry_count {self.entry_count} require {self.file_bytes}",
                "set them to the values the store was created with, or remove the index folder and"
                " lose the index",
            )

    def _open(self, file: MappedFile) -> IndexFile:
        return IndexFile(file, self.slot_count, self.entry_count)

    def recover(self, index_msg_timestamp: int) -> None:
        """Keep what a crash cannot have damaged: full files, and entries up to the mark."""
        try:
            mark = self.mark_file.load()
        except StoreFormatError:
            # The peer's rule, one millisecond stricter: of several files that became full in the
            # same millisecond the last may not be on disk.
            self._keep_full(index_msg_timestamp - 1)
            return
        if mark is None:
            self._keep_full(index_msg_timestamp)
        else:
            self._keep_to(mark)

    def _keep_full(self, limit_ms: int) -> None:
        # A header that never reached the disk is all zeros, so its file is not full.
        whole = takewhile(lambda f: f.is_full and f.header.end_timestamp <= limit_ms, self.files)
        self._delete_from(len(list(whole)))

    def _keep_to(self, mark: IndexMark) -> None:
        names = [index_file.file.path.name for index_file in self.files]
        kept = bisect_left(names, mark.file_name)
        if mark.file_name in names and mark.index_count > 1:
            self.files[kept].truncate(mark.index_count, mark.end_timestamp)
            kept += 1
        self._delete_from(kept)
        if mark.file_name in {"", *names[:kept]}:
            self.last_seen = mark.last_seen

    def start_flush(self) -> IndexFlush:
        """The files that became full since the last call, the last file and its mark."""
        with self.lock:
            self.forget_vanished()
            full, self._full = self._full, []
            return IndexFlush(full, self.files[-1] if self.files else None, self._mark())

    def _mark(self) -> IndexMark:
        if self.lost_from:
            return IndexMark(self.lost_from, 0, 0, -1)
        if not self.files:
            return IndexMark("", 0, 0, self.last_seen)
        name, header = self.files[-1].file.path.name, self.files[-1].header
        return IndexMark(name, header.index_count, header.end_timestamp, self.last_seen)

    @property
    def end_physical_offset(self) -> int:
        """Physical offset of the newest record whose keys are indexed; -1 if unknown."""
        if not self.files or self.files[-1].header.index_count <= 1:
            return self.last_seen
        return max(self.files[-1].header.end_physical_offset, self.last_seen)

    def put(
        self, key_hashes: Array, physical_offsets: Array, timestamps: Array, now_ms: int
    ) -> None:
        """Add entries in log order, with the lock held. Raises OSError."""
        while len(key_hashes):
            try:
                last = self._last_with_room(now_ms)
                count = last.put(key_hashes, physical_offsets, timestamps)
            except FileNotFoundError:
                if not self.forget_vanished():
                    raise
                continue
            key_hashes, physical_offsets = key_hashes[count:], physical_offsets[count:]
            timestamps = timestamps[count:]
            if last.is_full:
                self._full.append((last, last.header.end_timestamp))

    def _last_with_room(self, now_ms: int) -> IndexFile:
        if not self.files or self.files[-1].is_full:
            self.files.append(self._create(now_ms))
        return self.files[-1]

    def _create(self, now_ms: int) -> IndexFile:
        header_bytes = min(mmap.PAGESIZE, self.file_bytes)
        file = self._open(
            MappedFile.create(self._new_path(now_ms), self.file_bytes, self.fs, header_bytes)
        )
        seed = IndexHeader(0, 0, 0, 0, 0, 1)
        if self.files:
            before = self.files[-1].header
            time, end = before.end_timestamp, before.end_physical_offset
            seed = IndexHeader(time, time, end, end, 0, 1)
        file.header = seed
        return file

    def _new_path(self, now_ms: int) -> Path:
        # Names must ascend even if the clock is set back.
        last = self.files[-1].file.path.name if self.files else ""
        latest = int(max(last, self.lost_from) or 0)
        return self.directory / f"{max(int(_local_time_name(now_ms)), latest + 1):017d}"

    def forget_vanished(self) -> bool:
        """Drop files that another process removed, with the lock held; returns whether any were.

        Apache's broker, started by mistake on our directory, removes unfinished index files before
        it checks the lock.
        """
        there = set(self.directory.glob("*"))
        gone = [f.file for f in self.files if f.file.path not in there]
        if not gone:
            return False
        self.files[:] = [f for f in self.files if f.file not in gone]
        for file in gone:
            file.unmap()  # frees its disk blocks
        self.lost_from = min(self.lost_from or gone[0].path.name, gone[0].path.name)
        self._on_vanished([file.path for file in gone])
        return True

    def detach_below(self, log_min_offset: int) -> list[MappedFile]:
        """Detach files with nothing at or past ``log_min_offset``, except the last one."""
        count = 0
        with self.lock:
            self.forget_vanished()
            for file in self.files[:-1]:
                if file.header.end_physical_offset >= log_min_offset:
                    break
                count += 1
            detached, self.files[:] = self.files[:count], self.files[count:]
        return [index_file.file for index_file in detached]

    @property
    def is_sealed(self) -> bool:
        """True if the last file has yet to be compared with its seal."""
        return bool(self.files) and self.files[-1].file.seal is not None

    @property
    def used(self) -> list[tuple[MappedFile, int]]:
        """Each file and its bytes in use."""
        return [(f.file, f.entries_at + f.header.index_count * ENTRY_BYTES) for f in self.files]

    def _delete_from(self, kept: int) -> None:
        while len(self.files) > kept:  # newest first, so an interrupted start leaves no gap
            self.files.pop().file.delete()


class IndexWalk:
    """Walks the entries of one hash in steps, newest first; files may come and go in between.

    offsets: physical offsets found so far; the caller takes them out.
    entry_count: number of entries visited, including those of other hashes.
    """

    def __init__(self, files: IndexFiles, key_hash: int, end_ms: int = LONG_MAX) -> None:
        """end_ms: entries of records stored later are skipped."""
        self.offsets: deque[int] = deque()
        self.entry_count = 0
        self._files = files
        self._key_hash = key_hash
        self._end_ms = end_ms
        self._file: IndexFile | None = None
        self._number = 0

    def step(self) -> bool:
        """Visit some entries; returns whether there may be more.

        Raises StoreDamaged; NotReady, after which the next call resumes.
        """
        with self._files.lock:
            self._files.forget_vanished()
            for _ in range(_ENTRIES_AT_ONCE):
                if not self._number and not self._begin_older_file():
                    return False
                if self._number:
                    self._visit()
        return True

    def _begin_older_file(self) -> bool:
        name = self._file.file.path.name if self._file else "~"
        file = next((f for f in reversed(self._files.files) if f.file.path.name < name), None)
        if file is None:
            return False
        pages = self._files.page_cache
        if file.begin_timestamp(pages) - CLOCK_STEP_MS <= self._end_ms:
            self._number = file.newest(self._key_hash, pages)
        self._file = file
        return True

    def _visit(self) -> None:
        file = self._file
        assert file is not None
        if file not in self._files.files:  # removed since
            self._number = 0
            return
        entry = file.entry(self._number, self._files.page_cache)
        key_hash, physical_offset, seconds, self._number = entry
        self.entry_count += 1
        if key_hash == self._key_hash and not self._is_later(file, seconds):
            self.offsets.append(physical_offset)

    def _is_later(self, file: IndexFile, seconds: int) -> bool:
        # 0 also means an unknown time, or a clock that was set back.
        return seconds > 0 and file.header.begin_timestamp + seconds * 1000 > self._end_ms


def _local_time_name(now_ms: int) -> str:
    local = dt.datetime.fromtimestamp(now_ms // 1000).astimezone()
    return f"{local:%Y%m%d%H%M%S}{now_ms % 1000:03d}"
