"""Query by key in the tier: local index files, and finished ones in the store.

Items are added after the records' units, so an item never points past the records that are kept. A
crash loses those that were added after the last ``sync``: whoever appends adds them again from its
last position on, and a query drops the repeated ones.
"""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace_broker.store.index.index_keys import Regions, index_prefixes, key_hashes
from headrace_broker.tiered.container.flat_file import FileAddress
from headrace_broker.tiered.container.index_file import (
    FINISHED_MAGIC,
    HEADER,
    ITEM,
    SLOT,
    IndexSize,
    OpenIndex,
)
from headrace_broker.tiered.container.metadata import STATUS_SEALED, SegmentRow
from headrace_protocol.java_hash import index_key_hash
from headrace_protocol.tier.driver import Failed, Failure, FailureKind, expect, returns_failure
from headrace_protocol.tier.paths import FileKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files
    from headrace_broker.tiered.container.metadata import TierMetadata
    from headrace_protocol.columns import Array, RecordColumns
    from headrace_protocol.tier.driver import AppendDriver
    from headrace_protocol.tier.paths import Home

FOLDER: Final = "tiered_index_file"
# Items count seconds, and Apache rounds towards the file's begin.
_SECOND_MS: Final = 1000
_ITEMS_MAX: Final = 1024
_PART_BYTES: Final = ITEM.itemsize << 18


class IndexHit(NamedTuple):
    """A record that may have the key: its hash is the same. store_ms: to within a second."""

    queue_id: int
    log_offset: int
    size: int
    store_ms: int


def record_keys(topic: str, records: RecordColumns) -> tuple[Array, Array]:
    """All index keys of a topic's records: record numbers, and hashes."""
    number = np.flatnonzero(records.properties_bytes)
    if not len(number):
        return number, np.empty(0, np.int32)
    start, count = records.properties_start[number], records.properties_bytes[number]
    regions = Regions(np.frombuffer(records.data, np.uint8), start, count)
    prefixes = np.tile(np.array(index_prefixes(topic), np.uint32), (len(number), 1))
    found, hashes = key_hashes(regions, prefixes, lambda _number: topic)
    return number[found], hashes


class TierIndex:
    """The index of a broker's tier; one thread adds, uploads and expires while others query."""

    def __init__(
        self,
        root: Path,
        driver: AppendDriver,
        metadata: TierMetadata,
        home: Home,
        files: Files,
        size: IndexSize,
    ) -> None:
        """Open the local files, in a folder of the store's ``root``. Raises OSError."""
        self._local = root / FOLDER
        self._driver = driver
        self.metadata = metadata
        queue = home.index_queue
        self._address = FileAddress(home.cluster_folder, queue, FileKind.INDEX)
        self._files = files
        self._size = size
        self._lock = Lock()
        self._open = self._opened()

    def _opened(self) -> tuple[OpenIndex, ...]:
        uploaded = {row.begin_timestamp for row in self._rows()}
        names = [path for path in self._local.glob("*") if path.name.isdecimal() and path.is_file()]
        opened = []
        for path in sorted(names, key=lambda path: int(path.name)):
            file = OpenIndex(path, self._size, self._files)
            if file.begin_ms in uploaded:  # a crash came before it was removed
                file.remove()
                continue
            file.link_anew()
            opened.append(file)
        if opened:
            # A killed process may have given names to folder and files, and not synced them.
            for folder in (self._local, self._local.parent):
                self._files.mark_names_unsynced(folder)
        return tuple(opened)

    def _rows(self) -> list[SegmentRow]:
        return self.metadata.segments(self._address.queue, self._address.kind)

    def _row(self, base: int, size: int, begin_ms: int, end_ms: int, now_ms: int) -> SegmentRow:
        """The row of a finished file."""
        return SegmentRow(
            self._address.queue.path,
            self._address.kind,
            base,
            status=STATUS_SEALED,
            size=size,
            create_timestamp=now_ms,
            begin_timestamp=begin_ms,
            end_timestamp=end_ms,
            seal_timestamp=now_ms,
        )

    def adopt(self, sizes: Mapping[int, int], now_ms: int) -> list[SegmentRow] | Failure:
        """Name the finished files that the store has, instead of what the metadata says.

        sizes: by base. Returns those that follow each other. Fails as a read.
        """
        rows: list[SegmentRow] = []
        for base in sorted(sizes):
            if base != (rows[-1].end if rows else base):
                break
            read = self._driver.read(self._address.segment_path(base), [(0, HEADER.size)])
            if isinstance(read, Failure) and read.kind is not FailureKind.SHORT:
                return read
            header = HEADER.unpack(read[0]) if isinstance(read, list) else (0, 0, 0, 0, 0)
            least = self._size.items_at + header[4] * ITEM.itemsize
            if header[0] != FINISHED_MAGIC or sizes[base] < least:  # the upload was cut short
                break
            rows.append(self._row(base, sizes[base], header[1], header[2], now_ms))
        self.metadata.set_segments(self._address.queue, self._address.kind, rows)
        return rows

    @returns_failure
    def last_log_offsets(self) -> dict[tuple[str, int], int]:
        """The last offset in the log of each queue in the finished files, by topic and queue id.

        Fails as a read.
        """
        log_offsets: dict[int, int] = {}
        for row in self._rows():
            path = self._address.segment_path(row.base_offset)
            for at in range(self._size.items_at, row.size, _PART_BYTES):
                wanted = at, min(at + _PART_BYTES, row.size)
                (data,) = expect(self._driver.read(path, [wanted]))
                items = np.frombuffer(data, ITEM, len(data) // ITEM.itemsize)
                keys = items["topic_id"].astype(np.int64) << 32 | items["queue_id"]
                queues, numbers = np.unique(keys, return_inverse=True)
                last = np.zeros(len(queues), np.int64)
                np.maximum.at(last, numbers, items["log_offset"])
                for queue, log_offset in zip(queues.tolist(), last.tolist(), strict=True):
                    log_offsets[queue] = max(log_offsets.get(queue, 0), log_offset)
        names = {row.topic_id: row.topic for row in self.metadata.topics()}
        return {
            (names[queue >> 32], queue & 0xFFFFFFFF): log_offset
            for queue, log_offset in log_offsets.items()
            if queue >> 32 in names
        }

    # -- writing -----------------------------------------------------------------------------------

    def add(
        self, topic: str, queue_id: int, records: RecordColumns, log_offsets: Array, now_ms: int
    ) -> None:
        """Add the keys of records that are kept. log_offsets: theirs in the queue's log.

        Raises OSError.
        """
        number, hashes = record_keys(topic, records)
        if not len(number):
            return
        items = np.empty(len(number), ITEM)
        items["key_hash"] = hashes
        items["topic_id"] = self.metadata.topic_id(topic, now_ms)
        items["queue_id"] = queue_id
        items["log_offset"] = log_offsets[number]
        items["size"] = records.size[number]
        self._add(items, records.store_timestamp[number], now_ms)

    def _add(self, items: Array, times: Array, now_ms: int) -> None:
        begin = 0
        while begin < len(items):
            if not self._open or not self._open[-1].room:
                # Apache asks no file that begins after the time of the log's first message.
                self._begin_file(min(now_ms, int(times[begin:].min())))
            file = self._open[-1]
            part = slice(begin, begin + file.room)
            file.add(items[part], times[part])
            begin = part.stop

    def _begin_file(self, wanted_ms: int) -> None:
        begins = [row.begin_timestamp for row in self._rows()]
        begins += [file.begin_ms for file in self._open]
        begin_ms = max([wanted_ms, *(begin + 1 for begin in begins)])
        self._files.make_directories(self._local)
        file = OpenIndex(self._local / str(begin_ms), self._size, self._files)
        with self._lock:
            self._open = (*self._open, file)

    def sync(self) -> None:
        """Bring all items to disk. Raises OSError."""
        for file in self._open:
            file.sync()
        self._files.sync_names()

    def upload(self, now_ms: int) -> Failure | None:
        """Upload the full files and remove them here. Raises OSError."""
        while len(self._open) > 1:
            failure = self._upload(self._open[0], now_ms)
            if failure is not None:
                return failure
        return None

    def _upload(self, file: OpenIndex, now_ms: int) -> Failure | None:
        rows = self._rows()
        base = rows[-1].end if rows else 0
        path = self._address.segment_path(base)
        # A try that was cut short may have left a part.
        failure = self._driver.delete([path])
        position = 0
        for part in file.finished():
            failure = failure or self._driver.append(path, position, part)
            if failure is not None:
                return failure
            position += len(part)
        row = self._row(base, position, file.begin_ms, file.end_ms, now_ms)
        self.metadata.set_segments(self._address.queue, self._address.kind, [*rows, row])
        # A file counts from its row on; the local one is kept until that is on disk.
        self.metadata.save()
        with self._lock:
            self._open = self._open[1:]
            file.remove()
        return None

    def expire(self, before_ms: int) -> Failure | None:
        """Delete the files in the store whose records were all stored before a time.

        Raises OSError.
        """
        rows = self._rows()
        kept = [row for row in rows if row.end_timestamp >= before_ms]
        if len(kept) == len(rows):
            return None
        self.metadata.set_segments(self._address.queue, self._address.kind, kept)
        self.metadata.save()
        expired = [row for row in rows if row.end_timestamp < before_ms]
        return self._driver.delete([self._address.segment_path(row.base_offset) for row in expired])

    def close(self) -> None:
        """Release the local files."""
        with self._lock:
            for file in self._open:
                file.close()
            self._open = ()

    # -- queries -----------------------------------------------------------------------------------

    @returns_failure
    def query(
        self, topic: str, key: str, begin_ms: int, end_ms: int, count_max: int
    ) -> list[IndexHit]:
        """Records whose key has the hash of this one, the newest first.

        begin_ms, end_ms: store times to look for; records up to a second off may be among them.
        Every file with records at or after ``begin_ms`` is asked. Fails as ``Driver.read``.
        """
        row = self.metadata.topic(topic)
        if row is None:
            return []
        key_hash = index_key_hash(topic, key)
        hits: dict[tuple[int, int], IndexHit] = {}
        for file_ms, found in self._found(key_hash, begin_ms):
            items = found[(found["key_hash"] == key_hash) & (found["topic_id"] == row.topic_id)]
            for queue_id, log_offset, size, seconds in items[
                ["queue_id", "log_offset", "size", "seconds"]
            ].tolist():
                store_ms = file_ms + seconds * _SECOND_MS
                if begin_ms - _SECOND_MS <= store_ms <= end_ms + _SECOND_MS:
                    hit = IndexHit(queue_id, log_offset, size, store_ms)
                    hits.setdefault((queue_id, log_offset), hit)
        newest = sorted(hits.values(), key=lambda hit: (hit.store_ms, hit.log_offset), reverse=True)
        return newest[:count_max]

    def _found(self, key_hash: int, begin_ms: int) -> Iterator[tuple[int, Array]]:
        with self._lock:  # a file that is uploaded meanwhile is not closed under a reader
            rows = self._rows()
            local = [
                (file.begin_ms, file.find(key_hash, _ITEMS_MAX))
                for file in reversed(self._open)
                if file.end_ms >= begin_ms
            ]
        yield from local
        for row in reversed(rows):
            if row.end_timestamp >= begin_ms:
                yield row.begin_timestamp, self._find_finished(row, key_hash)

    def _find_finished(self, row: SegmentRow, key_hash: int) -> Array:
        path = self._address.segment_path(row.base_offset)
        at = self._size.slot_at(key_hash)
        (slot,) = expect(self._driver.read(path, [(at, at + SLOT.size)]))
        position, byte_count = SLOT.unpack(slot)
        if not byte_count:
            return np.empty(0, ITEM)
        if position < self._size.items_at or byte_count < 0 or byte_count % ITEM.itemsize:
            reason = f"slot at {at} points to no items"
            raise Failed(Failure(FailureKind.DAMAGED, path, reason))
        wanted = position, position + min(byte_count, _ITEMS_MAX * ITEM.itemsize)
        return np.frombuffer(expect(self._driver.read(path, [wanted]))[0], ITEM)
