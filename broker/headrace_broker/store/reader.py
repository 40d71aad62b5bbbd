"""Reads by physical offset and by key."""

from __future__ import annotations

import sys
from itertools import compress
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

from headrace_broker.store.batch_source import source_of
from headrace_broker.store.index.index_file import IndexWalk
from headrace_broker.store.index.index_keys import TAGS_MARK
from headrace_protocol.errors import CorruptRecord
from headrace_protocol.inner_batch import is_batch, raw_properties_of, unwrap_record
from headrace_protocol.java_hash import index_key_hash
from headrace_protocol.message import (
    INNER_BATCH,
    KEYS,
    TAGS,
    UNIQ_KEY,
    decode_properties,
    decode_record,
    property_text,
    split_keys,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from headrace_broker.store.index.index_file import IndexFiles
    from headrace_broker.store.log.commit_log import CommitLog
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_protocol.message import Buffer, StoredMessage

QUERY_COUNT_MAX: Final = 64
# Bounds of a query by key: half a second of decoding, and half a second of walking.
CANDIDATES_MAX: Final = 1000
ENTRIES_MAX: Final = 200_000
IndexType = Literal["K", "U", "T"]


class WantedMessages(NamedTuple):
    """The messages of a topic that a query by key wants: with the key, in a range of store times.

    count_max: maximum number. begin_ms, end_ms: range of the store time, inclusive.
    index_type: K for KEYS, U for UNIQ_KEY, T for TAGS; None for KEYS or UNIQ_KEY.
    before_offset: only records below this physical offset; None for all.
    found_count: number found before. accepts: False for records that are not wanted all the same.
    """

    topic: str
    key: str
    count_max: int
    begin_ms: int
    end_ms: int
    index_type: IndexType | None = None
    before_offset: int | None = None
    found_count: int = 0
    accepts: Callable[[StoredMessage], bool] = lambda _message: True

    @property
    def index_text(self) -> str:
        """The key as the index has it."""
        return TAGS_MARK + self.key if self.index_type == "T" else self.key

    def matches(self, message: StoredMessage) -> bool:
        """True if a record has topic and key, or a message of its batch has, and is not too new."""
        if message.store_timestamp > self.end_ms or message.topic != self.topic:
            return False
        has_key = self._has_key(message.properties) or any(self._inner_have_key(message))
        return has_key and self.accepts(message)

    def matching(self, record: Buffer) -> list[Buffer]:
        """The record of a match; of a batch the records of its messages that have the key.

        All of them if the batch itself has the key, such as the id that its producer got.
        """
        if not is_batch(record):
            return [record]
        records = unwrap_record(record)
        batch = decode_record(record)
        is_whole = self._has_key(batch.properties)
        return [*(records if is_whole else compress(records, self._inner_have_key(batch)))]

    def _has_key(self, properties: Mapping[str, str]) -> bool:
        if self.index_type == "T":
            return properties.get(TAGS) == self.key
        is_uniq_key = self.index_type != "K" and properties.get(UNIQ_KEY) == self.key
        has_key = self.index_type != "U" and self.key in split_keys(properties.get(KEYS, ""))
        return is_uniq_key or has_key

    def _inner_have_key(self, message: StoredMessage) -> Iterator[bool]:
        """Whether each message of a batch has the key; nothing if it can't be unwrapped.

        A batch may have thousands of them: only properties with the key in them are decoded.
        """
        if not message.sys_flag & INNER_BATCH:
            return
        try:
            each_raw = raw_properties_of(message)
        except ValueError:  # damaged, too large, or its codec is missing
            return
        for raw in each_raw:
            yield self.key in property_text(raw) and self._has_key(decode_properties(raw))


class Reader:
    """Reads records by physical offset, and finds them through the index."""

    def __init__(self, commit_log: CommitLog, index_files: IndexFiles) -> None:
        self.commit_log = commit_log
        self.index_files = index_files

    def has_unit(
        self,
        queues: Mapping[tuple[str, int], StoreQueue],
        physical_offset: int,
    ) -> bool:
        """True if the unit at the record's queue offset points to the record. Raises NotReady."""
        message = self.message_at(physical_offset)
        queue = queues.get((message.topic, message.queue_id)) if message else None
        if message is None or queue is None:
            return False
        return self._is_unit_of(message, queue, message.queue_offset)

    def message_in(
        self, queue: StoreQueue, queue_offset: int, physical_offset: int
    ) -> StoredMessage | None:
        """The message of a queue that is at both offsets; None if there is none.

        Raises NotReady.
        """
        message = self.message_at(physical_offset)
        if message is None or not self._is_unit_of(message, queue, queue_offset):
            return None
        return message

    def _is_unit_of(self, message: StoredMessage, queue: StoreQueue, queue_offset: int) -> bool:
        source = source_of(queue, self.commit_log)
        if not source.has_unit(queue_offset):
            return False
        return source.unit(queue_offset)[:2] == (message.physical_offset, message.size)

    # --- by key ----------------------------------------------------------------------------

    def query_index(
        self, wanted: WantedMessages, prepare: Callable[[], bool] = lambda: False
    ) -> KeyQuery:
        """A query for records of a topic with a key, at most ``QUERY_COUNT_MAX``.

        prepare: called by the first steps, until it returns False.
        """
        key_hash = index_key_hash(wanted.topic, wanted.index_text)
        walk = IndexWalk(self.index_files, key_hash, wanted.end_ms)
        return KeyQuery(wanted, prepare, walk, self.message_at)

    def message_at(self, physical_offset: int) -> StoredMessage | None:
        """The record at an offset; None if it is missing or damaged. Raises NotReady."""
        record = self.commit_log.record_at(physical_offset)
        try:
            return decode_record(record) if record is not None else None
        except CorruptRecord:
            return None


class KeyQuery:
    """A query by key, run in steps.

    Every candidate is decoded, because different keys may share a hash. A client can send many
    such keys on purpose, so the query stops after ``CANDIDATES_MAX`` records or ``ENTRIES_MAX``
    entries; an earlier ``end_ms`` skips newer entries.

    found: physical offsets, newest first. is_cut: whether the query stopped at a bound.
    """

    def __init__(
        self,
        wanted: WantedMessages,
        prepare: Callable[[], bool],
        walk: IndexWalk,
        message_at: Callable[[int], StoredMessage | None],
    ) -> None:
        self.found: list[int] = []
        self.is_cut = False
        self._wanted = wanted
        self._prepare = prepare
        self._walk = walk
        self._message_at = message_at
        self._count_max = min(wanted.count_max, QUERY_COUNT_MAX)
        before_offset = wanted.before_offset
        self._before_offset = sys.maxsize if before_offset is None else before_offset
        self._seen: set[int] = set()
        self._is_over = False

    def step(self) -> bool:
        """Examine one candidate, or find more of them; returns whether work remains.

        Raises StoreDamaged, and NotReady, after which the next call resumes.
        """
        if self._prepare():
            return True
        offsets = self._walk.offsets
        if not offsets and not self._walk.step() and not offsets:
            return False
        if offsets:
            self._examine(offsets[0])
            offsets.popleft()
        self.is_cut = len(self._seen) >= CANDIDATES_MAX or self._walk.entry_count >= ENTRIES_MAX
        return not (self._is_over or self.is_cut)

    def _examine(self, physical_offset: int) -> None:
        # A record has an entry per key with the hash, and recovery may duplicate entries.
        if physical_offset in self._seen or physical_offset >= self._before_offset:
            return
        message = self._message_at(physical_offset)
        if message is None:
            return
        self._seen.add(physical_offset)
        if message.store_timestamp < self._wanted.begin_ms:
            self._is_over = True
        elif self._wanted.matches(message):
            self.found.append(physical_offset)
            self._is_over = len(self.found) >= self._count_max


class KeySource(Protocol):
    """Messages that may have left the log, and so its index."""

    async def find(self, wanted: WantedMessages, /) -> Sequence[Buffer]:
        """Messages of the key; some may be known, or outside the range. Raises RequestError."""

    def has_foreign_ids(self, topic: str, /) -> bool:
        """True if ids of a topic's messages may name records of another topic in this log."""
