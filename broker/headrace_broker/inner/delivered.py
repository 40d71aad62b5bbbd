"""What a start finds in the log of the messages that were delivered before a crash."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headrace_broker.store.log.log_rows import scan_from
from headrace_broker.store.recovery import first_records
from headrace_protocol.columns import split
from headrace_protocol.message import TRANSACTION_MASK, property_value
from headrace_protocol.system_topics import CHECK_MAX_TIME_TOPIC, UNDELIVERED_TOPIC

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace_broker.inner.waiting import Waiting
    from headrace_broker.store.log.log_blocks import LogBlock
    from headrace_broker.store.message_store import MessageStore
    from headrace_protocol.columns import Array

_UNDELIVERED = UNDELIVERED_TOPIC.encode()
_DISCARDED = CHECK_MAX_TIME_TOPIC.encode()  # halves, which never waited for a time
_MARK = b"REAL_TOPIC\x01"  # every delivered record has it
_TELLING = (b"UNIQ_KEY", b"REAL_TOPIC", b"REAL_QID")
_Name = tuple[bytes, ...]


class _Left(NamedTuple):
    """What left one queue.

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
        """system_topic: where they waited. queue_key: property that says in which queue."""
        self._system_topic = system_topic.encode()
        self._queue_key = queue_key
        self.newest_ms = 0
        self._left: defaultdict[bytes, _Left] = defaultdict(lambda: _Left(set(), set(), Counter()))

    @property
    def is_empty(self) -> bool:
        """Whether nothing has left since the last ``forget``; costs less than a count."""
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

    def scan(self, store: MessageStore, from_offset: int) -> None:
        """Read the log from ``from_offset`` to its end. Raises OSError."""
        if from_offset >= store.commit_log.max_offset:
            return  # no record begins there, so that a scan would read the whole file
        from_offset = max(from_offset, store.commit_log.min_offset)  # the files before may be gone
        for block in scan_from(store.commit_log.files, from_offset):
            self._note(block)

    def _note(self, block: LogBlock) -> None:
        columns = block.columns
        self.newest_ms = max(self.newest_ms, int(columns.store_timestamp.max()))
        if _MARK not in bytes(columns.data):  # no copy: it is bytes
            return
        topics = split(columns.data, columns.topic_start, columns.topic_bytes.astype(np.int64))
        sources = columns.prepared_transaction_offset.tolist()
        is_commit = (columns.sys_flag & TRANSACTION_MASK != 0).tolist()
        times = columns.reconsume_times.tolist()
        waiting = {self._system_topic, _DISCARDED}
        numbers = [number for number, topic in enumerate(topics) if topic not in waiting]
        starts, sizes = columns.properties_start[numbers], columns.properties_bytes[numbers]
        for number, raw in zip(numbers, split(columns.data, starts, sizes), strict=True):
            if _MARK not in raw or not (queue := property_value(raw, self._queue_key)):
                continue
            topic = topics[number]
            left, source = self._left[queue], sources[number]
            if not source:
                # A half waits for its commit first, and has the same names.
                if topic not in {property_value(raw, b"REAL_TOPIC"), _UNDELIVERED}:
                    continue
                left.names[_name(raw, times[number])] += 1
            elif is_commit[number]:
                left.halves.add(source)
            else:
                left.offsets.add(source)

    def forget_before(self, queue: bytes, physical_offset: int) -> None:
        """Forget what waited before an offset in the log.

        Halves stay: where the message waited that one was committed to is not known.
        """
        offsets = self._left[queue].offsets
        offsets -= {offset for offset in offsets if offset < physical_offset}

    def forget(self, queue: bytes) -> None:
        """Forget what left a queue: all that waited there then was looked at."""
        self._left.pop(queue, None)

    def among(self, queue: bytes, messages: Iterable[Waiting]) -> set[int]:
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

    def forget_each(self, queue: bytes, messages: Iterable[Waiting]) -> None:
        """Forget delivered messages, which the progress of their queue counts now."""
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
    """What the record that is made of ``message`` names: where this one lies, or its half."""
    is_committed = message.sys_flag & TRANSACTION_MASK and message.prepared_transaction_offset
    return message.prepared_transaction_offset if is_committed else message.physical_offset


def stored_since(store: MessageStore, time_ms: int) -> int:
    """A physical offset at or before the first record that was stored at ``time_ms`` or later."""
    found = store.commit_log.min_offset
    for file in first_records(store.commit_log.files.files):
        if file.store_timestamp is not None and file.store_timestamp < time_ms:
            found = file.start_offset
    return found
