"""The CommitLog with the records of all topics: append, and read by physical offset."""

from __future__ import annotations

import struct
from functools import partial
from typing import TYPE_CHECKING, Final

from zlib_ng.zlib_ng import crc32

from headrace_broker.store.errors import (
    RecordTooLarge,
    StoreBusy,
    StoreFormatError,
    StoreNotWritable,
)
from headrace_broker.store.files.mapped_file_queue import MappedFileQueue
from headrace_broker.store.files.page_cache import PageCache
from headrace_broker.store.life import Event, State
from headrace_broker.store.log.batch_records import BatchRecords, Origin, Stamp
from headrace_broker.store.log.log_blocks import RECORD_MAGICS
from headrace_broker.store.log.log_refusals import LogRefusals
from headrace_broker.store.log.record_checksum import SEPARATOR, checksum_slot
from headrace_broker.store.log.ring import (
    COUNT_SHIFT,
    FLAGS_MASK,
    ROW,
    ROW_BYTES,
    WHOLE_BATCH,
    Ring,
)
from headrace_broker.store.log.uniform_batch import UniformBatch
from headrace_protocol.errors import CorruptRecord
from headrace_protocol.message import (
    BLANK_RECORD,
    BORN_HOST_V6,
    CRC_MASK,
    INNER_BASE,
    INNER_BATCH,
    INNER_NUM,
    MAGIC_BLANK,
    NEED_UNWRAP,
    PROPERTIES_BYTES_MAX,
    RECORD_BYTES_MIN,
    RECORD_HEADS,
    STORE_HOST_V6,
    SYS_FLAG_AT,
    Buffer,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace_broker.clock import Clock
    from headrace_broker.store.files.filesystem import Files
    from headrace_broker.store.files.mapped_file import MappedFile
    from headrace_broker.store.log.encoded_records import EncodedRecords
    from headrace_broker.store.settings import StoreSettings
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_protocol.columns import Array

# Queue, body, properties, tags code, flag, sysFlag, born timestamp, reconsume times.
PlainMessage = tuple["StoreQueue", Buffer, bytes, int, int, int, int, int]

# Of the end of the log and of a queue, as far as this process wrote it: in memory without a check.
HOT_BYTES: Final = 256 << 20
HOT_UNITS: Final = 100_000
# Read at once by a start, some thousands of records: larger blocks save nothing, and progress is
# reported after each.
SCAN_BYTES: Final = 4 << 20
BLANK_BYTES: Final = 8
NO_QUEUE_OFFSET: Final = 0x4  # set in PREPARED and ROLLBACK, clear in COMMIT
# Bits that a sender may set: the store itself sets those of hosts and of inner batches.
SENDERS_FLAGS: Final = ~(BORN_HOST_V6 | STORE_HOST_V6 | NEED_UNWRAP | INNER_BATCH)
_INT = struct.Struct(">i")
_SHORT = struct.Struct(">h")
_RECORD_START = struct.Struct(">ii20xq")  # total size, magic, physical offset


BatchItems = UniformBatch | BatchRecords


def _accept(_items: BatchItems) -> None:
    pass


def _items(queue: StoreQueue, batch_body: Buffer, sys_flag: int) -> BatchItems:
    """The checked items of a batch. Raises CorruptRecord, BatchTooLong."""
    if sys_flag & NO_QUEUE_OFFSET:
        raise CorruptRecord(
            0, "a batch cannot be part of a transaction: send its messages one by one"
        )
    uniform = UniformBatch.of(batch_body, sys_flag, queue)
    return uniform or BatchRecords(batch_body, sys_flag, queue)


class CommitLog(LogRefusals):
    """Appends at ``position`` of the last file in use, only from the loop's thread.

    Records stay in memory until ``write_out`` writes all of a turn with one call. Writing through
    the map would cost a page fault and, at each flush, a TLB shoot-down per page; readers do use
    the map. Until it is written out, a record must be neither acknowledged nor read.
    """

    def __init__(
        self,
        settings: StoreSettings,
        fs: Files,
        ring: Ring,
        clock: Clock,
    ) -> None:
        """Nothing on disk is touched."""
        super().__init__(settings, fs, clock)
        self.files = MappedFileQueue(
            settings.root / "commitlog",
            settings.commit_log_file_bytes,
            fs,
            "commit_log_file_bytes",
        )
        self.page_cache = PageCache(fs)
        self.hot_bytes, self.hot_units, self.scan_bytes = HOT_BYTES, HOT_UNITS, SCAN_BYTES
        self.now_ms = 0
        self.ring = ring
        self.file_bytes = settings.commit_log_file_bytes
        self.body_bytes_max = settings.body_bytes_max
        self.store_host = settings.store_host
        self.store_flag = STORE_HOST_V6 if len(settings.store_host) == 20 else 0
        self.position = self.file_start = self.flushed_offset = 0
        self.started_at = 0  # end of the log when this process opened it
        # Called when the next file should be created, and with a file once it is full.
        self.on_half_full: Callable[[], None] = lambda: None
        self.on_full: Callable[[MappedFile], None] = lambda _file: None
        self._file: MappedFile | None = None
        self._descriptor = -1
        self._pending: list[Buffer] = []
        self._pending_position = 0

    # --- append ----------------------------------------------------------------------------

    def append(
        self,
        message: PlainMessage,
        born_host: bytes,
        prepared_transaction_offset: int = 0,
        inner_count: int = 0,
    ) -> int:
        """Append one record; returns its physical offset.

        inner_count: number of its messages if it is a whole batch. The queue offset is
        ``queue.next_offset`` before the call, the store timestamp that of the last
        ``WritePath.begin``. If it raises, nothing is stored. Raises RecordTooLarge,
        StoreNotWritable, StoreBusy; struct.error if a number does not fit its field.
        """
        ring = self.ring
        written = ring.written
        if written == ring.limit:
            raise StoreBusy(ring.slow_taker())
        queue, body, properties, tags_code, flag, sys_flag, born_ms, reconsume_times = message
        body_bytes, checksum_bytes = len(body), queue.checksum_bytes
        if checksum_bytes and properties and not properties.endswith(SEPARATOR):
            properties += SEPARATOR
        properties_bytes, topic_field = len(properties) + checksum_bytes, queue.topic_field
        sys_flag = sys_flag & SENDERS_FLAGS | self.store_flag
        sys_flag |= BORN_HOST_V6 if len(born_host) == 20 else 0
        row_flag = queue.row_flag | inner_count << COUNT_SHIFT
        if inner_count:
            sys_flag = sys_flag & FLAGS_MASK | WHOLE_BATCH
        head = RECORD_HEADS[sys_flag >> 4 & 3]
        size = head.size + body_bytes + len(topic_field) + 2 + properties_bytes
        if self.position + size > self.append_end or size > self.body_bytes_max:
            self._make_room(size, body_bytes, properties_bytes)
        elif properties_bytes > PROPERTIES_BYTES_MAX:
            raise RecordTooLarge("properties", properties_bytes, PROPERTIES_BYTES_MAX)
        position, now_ms = self.position, self.now_ms
        physical_offset = self.file_start + position
        queue_offset = 0 if sys_flag & NO_QUEUE_OFFSET else queue.next_offset
        # fmt: off
        record = b"".join((
            head.pack(
                size, queue.magic, crc32(body) & CRC_MASK, queue.queue_id, flag, queue_offset,
                physical_offset, sys_flag, born_ms, born_host, now_ms, self.store_host,
                reconsume_times, prepared_transaction_offset, body_bytes,
            ),
            body, topic_field, _SHORT.pack(properties_bytes), properties,
        ))
        if checksum_bytes:
            record += checksum_slot(record)
        ROW.pack_into(
            ring.buffer, (written & ring.mask) * ROW_BYTES, physical_offset, queue_offset,
            tags_code, now_ms, size, queue.key, properties_bytes, sys_flag | row_flag,
        )
        # fmt: on
        self._pending.append(record)
        ring.written = written + 1
        self.position = position + size
        if not sys_flag & NO_QUEUE_OFFSET:
            queue.next_offset += inner_count or 1
        return physical_offset

    def append_each(
        self, messages: Sequence[PlainMessage], born_host: bytes
    ) -> list[tuple[int, int]]:
        """Append messages, one record each, up to the first that this fast path can't take.

        Their properties are empty or end with a separator. Returns physical and queue offset of
        each stored record. A message that does not fit the file, the ring or the size limits is
        left to ``append``, with those after it.
        """
        ring, buffer, mask, written = self.ring, self.ring.buffer, self.ring.mask, self.ring.written
        flags = self.store_flag | (BORN_HOST_V6 if len(born_host) == 20 else 0)
        head = RECORD_HEADS[flags >> 4 & 3]
        pack_head, pack_short, pack_row = head.pack, _SHORT.pack, ROW.pack_into
        overhead, store_host, now_ms = head.size + _SHORT.size, self.store_host, self.now_ms
        position, file_start, append_end = self.position, self.file_start, self.append_end
        body_bytes_max = self.body_bytes_max
        offsets: list[tuple[int, int]] = []
        put, put_offsets = self._pending.append, offsets.append
        if written + len(messages) > ring.limit:
            messages = messages[: ring.limit - written]
        try:
            for queue, body, properties, code, flag, sys_flag, born_ms, reconsume_times in messages:
                body_bytes, checksum_bytes = len(body), queue.checksum_bytes
                properties_bytes, topic_field = len(properties) + checksum_bytes, queue.topic_field
                size = overhead + body_bytes + len(topic_field) + properties_bytes
                if (
                    position + size > append_end
                    or body_bytes > body_bytes_max
                    or properties_bytes > PROPERTIES_BYTES_MAX
                ):
                    break
                physical_offset, queue_offset = file_start + position, queue.next_offset
                sys_flag = sys_flag & SENDERS_FLAGS | flags  # noqa: PLW2901 - the store's bits
                # fmt: off
                record = b"".join((
                    pack_head(
                        size, queue.magic, crc32(body) & CRC_MASK, queue.queue_id, flag,
                        queue_offset, physical_offset, sys_flag, born_ms, born_host, now_ms,
                        store_host, reconsume_times, 0, body_bytes,
                    ),
                    body, topic_field, pack_short(properties_bytes), properties,
                ))
                if checksum_bytes:
                    record += checksum_slot(record)
                pack_row(
                    buffer, (written & mask) * ROW_BYTES, physical_offset, queue_offset, code,
                    now_ms, size, queue.key, properties_bytes, sys_flag | queue.row_flag,
                )
                # fmt: on
                put(record)
                put_offsets((physical_offset, queue_offset))
                queue.next_offset = queue_offset + 1
                written += 1
                position += size
        finally:
            ring.written, self.position = written, position
        return offsets

    def append_batch(
        self,
        queue: StoreQueue,
        batch_body: Buffer,
        sys_flag: int,
        origin: Origin,
        check: Callable[[BatchItems], None] = _accept,
    ) -> tuple[int, Array]:
        """Append each item of a batch body as a record: all of them in one file, or none.

        check: called with the items before anything is stored; raises to refuse the batch.

        Returns the first queue offset (they are consecutive) and the physical offsets.
        Raises as ``append``, CorruptRecord for a malformed or empty batch, and BatchTooLong.
        """
        sys_flag = sys_flag & SENDERS_FLAGS | self.store_flag
        sys_flag |= BORN_HOST_V6 if len(origin.born_host) == 20 else 0
        items = _items(queue, batch_body, sys_flag)
        check(items)
        self._make_room_for_block(items.count, items.total_bytes, len(batch_body))
        queue_offset = queue.next_offset
        stamp = Stamp(queue_offset, self.max_offset, self.now_ms, self.store_host, origin)
        block = items.encode(stamp)
        self.ring.put_run(queue.key, queue_offset, items.count, items.fill)
        self._pending.append(block)
        self.position += len(block)
        queue.next_offset += items.count
        return queue_offset, items.physical_offsets

    def append_inner_batch(
        self,
        message: PlainMessage,
        born_host: bytes,
        check: Callable[[BatchItems], None] = _accept,
    ) -> tuple[int, int]:
        """Append a batch to a batch queue, as one record.

        Its messages have the queue offsets from ``queue.next_offset`` on.
        message: its body is the batch. check: as for ``append_batch``.

        Returns the physical offset and the number of messages. Raises as ``append_batch``.
        """
        queue, body, properties, code, flag, sys_flag, born_ms, reconsume_times = message
        items = _items(queue, body, sys_flag)
        check(items)
        properties += b"%s\x01%d\x02" % (INNER_NUM.encode(), items.count)
        properties += b"%s\x01%d\x02" % (INNER_BASE.encode(), queue.next_offset)
        message = queue, body, properties, code, flag, sys_flag, born_ms, reconsume_times
        return self.append(message, born_host, inner_count=items.count), items.count

    def append_records(self, records: EncodedRecords) -> tuple[int, int]:
        """Append records that a producer encoded: all of them in one file, or none.

        Returns queue offset and physical offset of the first record; the others follow it without
        gaps in both. Raises as ``append``.
        """
        assert not self.store_flag, "encoded records have no room for an IPv6 store host"
        queue, rows = records.queue, records.rows
        self._make_room_for_block(len(rows), records.total_bytes, records.body_bytes_max)
        physical_offset = self.max_offset
        block = records.complete(physical_offset, self.now_ms, self.store_host)
        self._pending.append(block)
        self.ring.put(rows)
        self.position += len(block)
        queue_offset = queue.next_offset
        queue.next_offset += len(rows)
        return queue_offset, physical_offset

    def _make_room_for_block(self, row_count: int, block_bytes: int, body_bytes: int) -> None:
        if self.ring.written + row_count > self.ring.limit:
            raise StoreBusy(self.ring.slow_taker())
        if self.position + block_bytes > self.append_end or body_bytes > self.body_bytes_max:
            self._make_room(block_bytes, body_bytes, 0)

    def write_out(self) -> None:
        """Write the pending records to the file.

        Raises StoreNotWritable on failure; then the records must not be acknowledged. They stay
        pending, and the next call tries again.
        """
        if not self._pending:
            return
        assert self._file is not None
        pending = self._pending
        block = pending[0] if len(pending) == 1 else b"".join(pending)
        try:
            self.files.fs.write(self._descriptor, block, self._pending_position)
        except OSError as error:
            self._pending = [block]
            raise self.refuse(
                f"the log can't be written: {self.room.reason(error)}",
                self._file.path,
                error_number=error.errno,
            ) from error
        self._pending.clear()
        self._pending_position += len(block)

    # --- room ------------------------------------------------------------------------------

    def _make_room(self, size: int, body_bytes: int, properties_bytes: int) -> None:
        if body_bytes > self.body_bytes_max:
            raise RecordTooLarge("body", body_bytes, self.body_bytes_max)
        if properties_bytes > PROPERTIES_BYTES_MAX:
            raise RecordTooLarge("properties", properties_bytes, PROPERTIES_BYTES_MAX)
        if size > self.file_bytes - BLANK_BYTES:
            raise RecordTooLarge("record", size, self.file_bytes - BLANK_BYTES)
        while self.position + size > self.append_end:
            self._advance()

    def _advance(self) -> None:
        """Use more of the file or the next one; if that was refused, its success ends the refusal.

        Raises StoreNotWritable.
        """
        self.look_again_if_due()
        if self.life.state is not State.OPEN and not self.life.may_retry:
            raise self.refused_append()
        try:
            if self.append_end < 0:
                self._reopen()
            elif self.append_end < self.file_bytes - BLANK_BYTES:
                self.append_end = self.file_bytes - BLANK_BYTES
                self.on_half_full()
            else:
                self._roll()
        except OSError as error:
            raise self.refuse_for(error, self.files.directory) from error
        self.resume()

    def _reopen(self) -> None:
        if not self.files.files:
            self._prepare()
            self.files.take()
        last = self.files.files[-1]
        # Nothing is written through the map.
        allocate = partial(last.allocate, self.file_bytes, self.file_bytes, self.file_bytes)
        self.room.claim(last.hole_bytes, allocate)
        self._write_to(last, self.position)

    def _prepare(self) -> None:
        if not self.files.is_prepared:
            self.tried_ms = self.clock.now_ms()
            self.room.claim(self.file_bytes, self.files.prepare)

    def _roll(self) -> None:
        # Take the next file first: if the disk is full, nothing has changed.
        self.write_out()
        self._prepare()
        following = self.files.take()
        if self.position < self.file_bytes:
            remaining = self.file_bytes - self.position
            self._pending.append(BLANK_RECORD.pack(remaining, MAGIC_BLANK))
        full = self._file
        assert full is not None
        try:
            self._write_to(following, 0)
        except StoreNotWritable as error:
            # The end of the old file may be missing; only recovery at a start can repair that.
            raise self.refuse(error.reason, error.path, is_final=True) from error
        self.on_full(full)

    def _write_to(self, file: MappedFile, position: int) -> None:
        self.write_out()
        self.stop_writing()
        self._descriptor = self.files.fs.open(file.path)
        self._file = file
        self.file_start = file.start_offset
        self.position = self._pending_position = position
        self.append_end = max(self.file_bytes // 2, RECORD_BYTES_MIN)

    def stop_writing(self) -> None:
        """Close the file's descriptor; all records were written out, or refused."""
        if self._descriptor >= 0:
            self.files.fs.close(self._descriptor)
            self._descriptor = -1

    def prepare_next_file(self) -> None:
        """Create the next file, once half of this one is used; in a thread. Raises OSError."""
        if not self.files.files or self.append_end > self.file_bytes // 2:
            self._prepare()

    def close(self) -> None:
        """Refuse further appends and close the file's descriptor."""
        self.stop_appends(Event.CLOSE, StoreNotWritable("closed", self.files.directory.parent))
        self.stop_writing()

    # --- position and reading --------------------------------------------------------------

    def open_at(self, end_offset: int) -> None:
        """Set the end of the log after recovery, which has removed later files."""
        last = self.files.files[-1] if self.files.files else None
        self.file_start = last.start_offset if last else 0
        self.position = end_offset - self.file_start
        self.flushed_offset = self.started_at = end_offset
        self.append_end = -1

    @property
    def min_offset(self) -> int:
        """Offset of the first byte that still exists."""
        return self.files.min_offset

    @property
    def max_offset(self) -> int:
        """Offset one past the last record."""
        return self.file_start + self.position

    @property
    def used(self) -> list[tuple[MappedFile, int]]:
        """Each file with its number of bytes in use."""
        return [(f, min(f.file_bytes, self.max_offset - f.start_offset)) for f in self.files.files]

    def record_at(self, physical_offset: int) -> memoryview | None:
        """One whole record as a view; None if none begins at the offset.

        Raises NotReady as ``slices``.
        """
        if physical_offset >= self.file_start + self._pending_position:
            self.write_out()
        file = self.files.find(physical_offset)
        if file is None or physical_offset + RECORD_BYTES_MIN > self.max_offset:
            return None
        position = physical_offset - file.start_offset
        if position + RECORD_BYTES_MIN > self.file_bytes:
            return None
        self._check(file, position, position + RECORD_BYTES_MIN)
        size, magic, stated_offset = _RECORD_START.unpack_from(file.map, position)
        end = position + size
        is_record = magic in RECORD_MAGICS and stated_offset == physical_offset
        if not is_record or size < RECORD_BYTES_MIN or file.start_offset + end > self.max_offset:
            return None
        if end > self.file_bytes:
            return None
        self._check(file, position, end)
        return file.view[position:end]

    def _check(self, file: MappedFile, start: int, end: int) -> None:
        if file.start_offset + start < self._hot_from:
            self.page_cache.check(file, start, end)
        file.check_soon(start, end)

    @property
    def _hot_from(self) -> int:
        return max(self.max_offset - self.hot_bytes, self.started_at)

    def slices(self, runs: list[tuple[int, int]]) -> list[memoryview]:
        """Views of runs of bytes, given by physical offsets; each run lies within one file.

        Raises NotReady for old bytes that must be read from disk, or many that must be compared
        with their seal; StoreFormatError for a run that is not in the log.
        """
        if runs[0][0] < self._hot_from:
            self._check_cached(runs)
        views = []
        base, file_end, view = 0, 0, memoryview(b"")
        check: Callable[[int, int], None] | None = None
        for start, end in runs:
            if start < base or end > file_end:
                file = self._file_of(start, end)
                base, file_end, view = file.start_offset, file.end_offset, file.view
                check = None if file.seal is None else file.check_soon
            if check is not None:
                check(start - base, end - base)
            views.append(view[start - base : end - base])
        return views

    def _check_cached(self, runs: list[tuple[int, int]]) -> None:
        for start, end in runs:
            file = self._file_of(start, end)
            self.page_cache.check(file, start - file.start_offset, end - file.start_offset)

    def _file_of(self, start: int, end: int) -> MappedFile:
        file = self.files.find(start)
        if file is None or end > file.end_offset:
            # The run came from a damaged unit: after a crash, units have no checksums.
            raise StoreFormatError(
                self.files.directory,
                f"a unit of a queue points to {start} up to {end}, where no record can be",
                "stop the broker and run `headrace store fsck --repair`",
            )
        return file

    def store_timestamp_at(self, physical_offset: int) -> int | None:
        """Store time of the record at an offset, or None. Raises NotReady as ``slices``."""
        record = self.record_at(physical_offset)
        if record is None:
            return None
        (sys_flag,) = _INT.unpack_from(record, SYS_FLAG_AT)
        at = 68 if sys_flag & BORN_HOST_V6 else 56
        return int.from_bytes(record[at : at + 8], "big", signed=True)

    def start_flush(self) -> tuple[int, Callable[[], None]]:
        """The end of the log now, and a function that makes the log durable up to it.

        The function may run in any thread and raises OSError.
        """
        self.write_out()
        end_offset = self.max_offset
        files = self.files.files
        first = self.files.find(self.flushed_offset)
        dirty = files[files.index(first) :] if first and end_offset > self.flushed_offset else []
        dirty = [file for file in dirty if file.start_offset < end_offset]

        def flush() -> None:
            for file in dirty:
                file.sync()
            self.files.fs.sync_names()

        return end_offset, flush
