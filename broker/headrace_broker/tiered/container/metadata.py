"""tieredStoreMetadata.json: the tier's topics, queues and segments, in Apache's form.

Apache opens what stands in this file and lists no folder. Here the store is the truth, and the file
only says which of its queues and segments count: a queue's row is saved before its first file is
made and removed before its files are deleted.
"""

from __future__ import annotations

import re
from threading import Lock
from typing import TYPE_CHECKING, Final

import msgspec

from headrace_broker.persistence import file_text, table_text
from headrace_broker.store.files.config_file import ConfigFile
from headrace_protocol.tier.paths import FileKind, QueueName

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files

LONG_MAX: Final = (1 << 63) - 1
UNKNOWN_OFFSET: Final = -1
STATUS_NEW: Final = 0
STATUS_SEALED: Final = 1
_STRING_OR_KEY: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|(?<=[{,])(\s*+)(-?[0-9]++)(?=\s*+:)')


class TopicRow(msgspec.Struct, frozen=True, rename="camel"):
    """A topic. reserve_time: hours to keep messages; -1 for the broker's setting."""

    topic_id: int
    topic: str
    status: int = 0
    reserve_time: int = -1
    update_timestamp: int = 0


class QueueKey(msgspec.Struct, frozen=True, rename="camel"):
    """Apache's MessageQueue."""

    broker_name: str
    queue_id: int
    topic: str


class QueueRow(msgspec.Struct, frozen=True, rename="camel"):
    """A queue. min_offset, max_offset: of the tier; ``max_offset`` is one past the last.

    ``UNKNOWN_OFFSET``: the row was lost, and its files are still to be compared.
    """

    queue: QueueKey
    min_offset: int
    max_offset: int
    update_timestamp: int = 0


class SegmentRow(msgspec.Struct, frozen=True, rename="camel"):
    """A segment. path: the queue's, for all of its segments; begin, end: of store times.

    Both times are ``LONG_MAX`` while the segment is empty.
    """

    path: str
    type: int
    base_offset: int
    status: int = STATUS_NEW
    size: int = 0
    create_timestamp: int = 0
    begin_timestamp: int = LONG_MAX
    end_timestamp: int = LONG_MAX
    seal_timestamp: int = 0

    @property
    def end(self) -> int:
        """One past its last byte, in the file's address space."""
        return self.base_offset + self.size


Segments = dict[str, dict[int, SegmentRow]]


class _Tables(msgspec.Struct, rename="camel"):
    topic_serial_number: int = -1
    topic_metadata_table: dict[str, TopicRow] = {}
    queue_metadata_table: dict[str, dict[int, QueueRow]] = {}
    commit_log_file_segment_table: Segments = {}
    consume_queue_file_segment_table: Segments = {}
    index_file_segment_table: Segments = {}


class TierMetadata:
    """The metadata, for all threads: rows are replaced, never changed, and so are tables of rows.

    Reads and updates are in memory; ``save`` writes all updates so far.
    """

    def __init__(self, path: Path, files: Files | None = None) -> None:
        """Load the file. Raises StoreFormatError, OSError."""
        self._file = ConfigFile(path, files)
        found = self._file.read(parse)
        # Whether there was no file: it was lost, unless nothing was uploaded yet.
        self.is_new = found is None
        self._tables = found or _Tables()
        self._lock = Lock()
        # By table and name: a value, and its text.
        self._texts: dict[str, dict[str, tuple[object, bytes]]] = {}

    # -- topics and queues -------------------------------------------------------------------------

    def topic_id(self, topic: str, now_ms: int) -> int:
        """The number of a topic in index files; a new topic gets the next one."""
        with self._lock:
            row = self._tables.topic_metadata_table.get(topic)
            if row is None:
                self._tables.topic_serial_number += 1
                row = TopicRow(self._tables.topic_serial_number, topic, update_timestamp=now_ms)
                self._tables.topic_metadata_table[topic] = row
            return row.topic_id

    def topic(self, topic: str) -> TopicRow | None:
        """A topic's row."""
        return self._tables.topic_metadata_table.get(topic)

    def topics(self) -> list[TopicRow]:
        """The rows of all topics."""
        with self._lock:
            return list(self._tables.topic_metadata_table.values())

    def adopt_topics(self, rows: Iterable[TopicRow]) -> None:
        """Take over the ids of topics; new topics get later ones."""
        with self._lock:
            for row in rows:
                self._tables.topic_metadata_table[row.topic] = row
                serial = max(self._tables.topic_serial_number, row.topic_id)
                self._tables.topic_serial_number = serial

    def set_reserve_hours(self, topic: str, hours: int, now_ms: int) -> None:
        """Note how long to keep a known topic's messages; -1 for the broker's setting."""
        row = self.topic(topic)
        if row is not None and row.reserve_time != hours:
            changed = msgspec.structs.replace(row, reserve_time=hours, update_timestamp=now_ms)
            self._tables.topic_metadata_table[topic] = changed

    def queues(self) -> list[QueueName]:
        """All queues."""
        with self._lock:
            return [
                QueueName(row.queue.broker_name, topic, queue_id)
                for topic, rows in self._tables.queue_metadata_table.items()
                for queue_id, row in rows.items()
            ]

    def queue(self, name: QueueName) -> QueueRow | None:
        """A queue's row."""
        return self._tables.queue_metadata_table.get(name.topic, {}).get(name.queue_id)

    def set_queue(self, name: QueueName, min_offset: int, max_offset: int, now_ms: int) -> None:
        """Add or replace a queue's row."""
        key = QueueKey(name.broker, name.queue_id, name.topic)
        with self._lock:
            table = self._tables.queue_metadata_table
            rows = table.get(name.topic, {})
            row = QueueRow(key, min_offset, max_offset, now_ms)
            table[name.topic] = {**rows, name.queue_id: row}

    def remove_queue(self, name: QueueName) -> None:
        """Remove a queue with all of its segments, and its topic with the last queue."""
        with self._lock:
            table = self._tables.queue_metadata_table
            rows = {**table.get(name.topic, {})}
            rows.pop(name.queue_id, None)
            if rows:
                table[name.topic] = rows
            else:
                table.pop(name.topic, None)
                self._tables.topic_metadata_table.pop(name.topic, None)
            for kind in FileKind:
                self._segments(kind).pop(name.path, None)

    # -- segments ----------------------------------------------------------------------------------

    @property
    def has_segments(self) -> bool:
        """True if any segment has bytes."""
        tables = self._segments(FileKind.COMMIT_LOG).values()
        return any(row.size for rows in tables for row in rows.values())

    def segments(self, name: QueueName, kind: FileKind) -> list[SegmentRow]:
        """The rows of a file's segments, in order."""
        rows = self._segments(kind).get(name.path, {})
        return [rows[base] for base in sorted(rows)]

    def set_segments(self, name: QueueName, kind: FileKind, rows: Iterable[SegmentRow]) -> None:
        """Replace the rows of a file's segments."""
        with self._lock:
            self._segments(kind)[name.path] = {row.base_offset: row for row in rows}

    def _segments(self, kind: FileKind) -> Segments:
        tables = self._tables
        return {
            FileKind.COMMIT_LOG: tables.commit_log_file_segment_table,
            FileKind.CONSUME_QUEUE: tables.consume_queue_file_segment_table,
            FileKind.INDEX: tables.index_file_segment_table,
        }[kind]

    # -- the file ----------------------------------------------------------------------------------

    def save(self) -> None:
        """Write the file; it is on disk when this returns. Raises OSError.

        Only what changed since the last call is encoded.
        """
        with self._lock:
            self._file.save(self._text())

    def _text(self) -> bytes:
        tables = self._tables
        fields = {"topicSerialNumber": b"%d" % tables.topic_serial_number}
        columns = zip(tables.__struct_fields__, tables.__struct_encode_fields__, strict=True)
        for name, column in columns:
            if column not in fields:
                fields[column] = table_text(self._lines(column, getattr(tables, name)))
        return file_text(fields)

    def _lines(self, column: str, table: Mapping[str, object]) -> Iterable[bytes]:
        """The encoded entries of a table, each encoded once until it is replaced."""
        known = self._texts.get(column, {})
        texts = {}
        for name, value in table.items():
            entry = known.get(name)
            if entry is None or entry[0] is not value:
                entry = value, msgspec.json.encode(name) + b":" + msgspec.json.encode(value)
            texts[name] = entry
        self._texts[column] = texts
        return [text for _, text in texts.values()]


def parse(text: bytes) -> _Tables:
    """The tables in a file's text. Raises ValueError."""
    try:
        return msgspec.json.decode(_quoted(text), type=_Tables)
    except msgspec.MsgspecError as error:
        raise ValueError(f"holds no metadata of the tier: {error}") from error


def _quoted(text: bytes) -> bytes:
    """The text with quotes around integer keys, which Apache writes bare."""
    return _STRING_OR_KEY.sub(
        lambda match: match[0] if match[2] is None else b'%s"%s"' % (match[1], match[2]), text
    )
