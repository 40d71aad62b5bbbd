"""Messages that were delivered before a crash, as a start finds them in the log."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headrace_broker.store.recovery import first_records
from headrace_protocol.message import TRANSACTION_MASK, property_value
from headrace_protocol.property_columns import PropertyColumns
from headrace_protocol.system_topics import CHECK_MAX_TIME_TOPIC, UNDELIVERED_TOPIC

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace_broker.inner.waiting import Waiting
    from headrace_broker.store.message_store import MessageStore
    from headrace_protocol.columns import Array, RecordColumns

_UNDELIVERED = UNDELIVERED_TOPIC.encode()
_DISCARDED = CHECK_MAX_TIME_TOPIC.encode()  # halves, which never waited for a time
_REAL = b"REAL_TOPIC"  # every delivered record has it
_MARK = _REAL + b"\x01"
_NO_QUEUE = -1
_TELLING = (b"UNIQ_KEY", b"REAL_TOPIC", b"REAL_QID")
_Name = tuple[bytes, ...]


class _Left(NamedTuple):
    """The messages that left one queue.

    offsets: of the records that waited. halves: of the halves that were committed to wait.
    names: of what names neither.
    """

    offsets: set[int]
    halves: set[int]
    names: Counter[_Name]

    @property
    def total(self) -> int:
        return len(self.offsets) + len(self.halves) + self.names.total()


class Delivered:
    """Names of messages that left their queues; each record that leaves one names what waited.

    Ours names the physical offset of the record that waited, or the half's when a transaction was
    committed to wait. Apache's names nothing, so its properties tell.

    newest_ms: the latest store time of all records that were scanned.
    """

    def __init__(self, system_topic: str, queue_key: bytes) -> None:
        """system_topic: where they waited. queue_key: property with the number of the queue."""
        self._system_topic = system_topic.encode()
        self._queue_key = queue_key
        self.newest_ms = 0
        self._left: defaultdict[int, _Left] = defaultdict(lambda: _Left(set(), set(), Counter()))

    @property
    def is_empty(self) -> bool:
        """True if nothing has left since the last ``forget``; costs less than a count."""
        return not self._left

    def __len__(self) -> int:
        return sum(left.total for left in self._left.values())

    def take_sources(self) -> Array:
        """The sources that deliveries name: records that waited, and halves. Forgets them."""
        sources: set[int] = set()
        for left in self._left.values():
            sources |= left.offsets | left.halves
            left.offsets.clear()
            left.halves.clear()
        return np.fromiter(sources, np.int64, len(sources))

    def take(self, records: RecordColumns) -> None:
        """Note which of these records of the log were delivered."""
        self.newest_ms = max(self.newest_ms, int(records.store_timestamp.max()))
        names, topics = records.topics
        waiting = {self._system_topic, _DISCARDED}
        is_elsewhere = np.array([name not in waiting for name in names])[topics]
        sources = records.prepared_transaction_offset
        for found in (is_elsewhere & (sources != 0), is_elsewhere & (sources == 0)):
            if found.any():
                self._take(records.select(np.flatnonzero(found)), topics[found], names)

    def _take(self, records: RecordColumns, topics: Array, names: list[bytes]) -> None:
        """Note records of which all name a source, or none does."""
        texts = records.properties()
        if _MARK not in b"".join(texts):
            return
        columns = PropertyColumns(texts)
        in_queue = columns.find(self._queue_key)
        queues = columns.integers(in_queue, _NO_QUEUE)
        is_found = (queues != _NO_QUEUE) & np.isin(in_queue.records, columns.find(_REAL).records)
        numbers, queues = in_queue.records[is_found], queues[is_found]
        sources = records.prepared_transaction_offset[numbers]
        if not len(numbers):
            return
        if not sources[0]:
            times = records.reconsume_times.tolist()
            for number, queue in zip(numbers.tolist(), queues.tolist(), strict=True):
                # A half waits for its commit first, and has the same names.
                real = property_value(texts[number], _REAL)
                if names[topics[number]] in {real, _UNDELIVERED}:
                    self._left[queue].names[_name(texts[number], times[number])] += 1
            return
        is_commit = records.sys_flag[numbers] & TRANSACTION_MASK != 0
        for queue in np.unique(queues).tolist():
            left, is_here = self._left[queue], queues == queue
            left.halves.update(sources[is_here & is_commit].tolist())
            left.offsets.update(sources[is_here & ~is_commit].tolist())

    def forget_before(self, queue: int, physical_offset: int) -> None:
        """Forget what waited before an offset in the log.

        Halves stay: where the message waited that one was committed to is not known.
        """
        offsets = self._left[queue].offsets
        offsets -= {offset for offset in offsets if offset < physical_offset}

    def forget(self, queue: int) -> None:
        """Forget what left a queue: all that waited there then was looked at."""
        self._left.pop(queue, None)

    def among(self, queue: int, messages: Iterable[Waiting]) -> set[int]:
        """Queue offsets of those messages that were delivered; forgets nothing."""
        left = self._left.get(queue)
        if left is None:
            return set()
        used: Counter[_Name] = Counter()
        found = set()
        for message in messages:
            source = source_of(message)
            if source in left.offsets or source in left.halves:
                found.add(message.queue_offset)
            elif left.names:
                name = _name(message.properties, message.reconsume_times)
                used[name] += 1
                if used[name] <= left.names[name]:
                    found.add(message.queue_offset)
        return found

    def forget_each(self, queue: int, messages: Iterable[Waiting]) -> None:
        """Forget delivered messages, which the checkpoint of their queue counts now."""
        left = self._left[queue]
        for message in messages:
            source = source_of(message)
            if source in left.offsets:
                left.offsets.discard(source)
            elif source in left.halves:
                left.halves.discard(source)
            else:
                left.names[_name(message.properties, message.reconsume_times)] -= 1


def _name(properties: bytes, reconsume_times: int) -> _Name:
    values = (property_value(properties, key) for key in _TELLING)
    return (*values, b"%d" % reconsume_times)


def source_of(message: Waiting) -> int:
    """The source that a delivery of ``message`` names: its physical offset, or its half's."""
    is_committed = message.sys_flag & TRANSACTION_MASK and message.prepared_transaction_offset
    return message.prepared_transaction_offset if is_committed else message.physical_offset


def stored_since(store: MessageStore, time_ms: int) -> int:
    """A physical offset at or before the first record that was stored at ``time_ms`` or later."""
    found = store.commit_log.min_offset
    for file in first_records(store.commit_log.files.files):
        if file.store_timestamp is not None and file.store_timestamp < time_ms:
            found = file.start_offset
    return found
