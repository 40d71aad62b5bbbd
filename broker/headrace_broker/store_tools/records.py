"""Computes what queues and index must contain for records: one row per record of a block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace_broker.store.index.index_keys import (
    Regions,
    index_prefixes,
    key_hashes,
    with_messages,
)
from headrace_broker.store.log.batch_units import COUNT_MAX, make_units
from headrace_protocol.columns import split
from headrace_protocol.java_hash import tags_code_of
from headrace_protocol.message import (
    DELAY,
    INNER_BATCH,
    INNER_NUM,
    TRANSACTION_MASK,
    TRANSACTION_ROLLBACK,
    property_number,
)
from headrace_protocol.system_topics import SCHEDULE_TOPIC

if TYPE_CHECKING:
    from headrace_broker.store.log.log_blocks import LogBlock
    from headrace_protocol.columns import Array

_QUEUE_BITS: Final = 32
_TAGS_MARK: Final = b"TAGS\x01"


class Records(NamedTuple):
    """Columns of one block. queue_number: see ``QueueNumbers``. counts: of a record's messages."""

    queue_number: Array
    physical_offset: Array
    queue_offset: Array
    size: Array
    sys_flag: Array
    store_timestamp: Array
    tags_code: Array
    counts: Array
    regions: Regions


class QueueNumbers:
    """Numbers queues by their topic's number, assigned on first sight, and their queue id."""

    def __init__(self, delay_levels_ms: tuple[int, ...]) -> None:
        self._topics: list[str] = []
        self._prefixes: list[tuple[int, int]] = []
        self._delay_levels_ms = delay_levels_ms
        self._numbers: dict[bytes, int] = {}

    def name(self, queue_number: int) -> tuple[str, int]:
        """Topic and queue id."""
        return self._topics[queue_number >> _QUEUE_BITS], queue_number & ((1 << _QUEUE_BITS) - 1)

    def records(self, block: LogBlock) -> Records:
        """The columns of a block's records."""
        columns = block.columns
        topics = self._topic_numbers(
            split(columns.data, columns.topic_start, columns.topic_bytes.astype(np.int64))
        )
        properties = columns.properties()
        text = np.frombuffer(columns.data, np.uint8)
        records = Records(
            topics << _QUEUE_BITS | columns.queue_id,
            columns.physical_offset.astype(np.int64),
            columns.queue_offset.astype(np.int64),
            columns.size,
            columns.sys_flag,
            columns.store_timestamp.astype(np.int64),
            _tags_codes(properties),
            _counts(columns.sys_flag, properties),
            Regions(text, columns.properties_start, columns.properties_bytes.astype(np.int64)),
        )
        schedule = self._numbers.get(SCHEDULE_TOPIC.encode())
        if schedule is not None:
            self._put_due_times(records, np.flatnonzero(topics == schedule), properties)
        return records

    def index_keys(self, records: Records, *, of_messages: bool = True) -> tuple[Array, Array]:
        """The index entries of the records: (record numbers, key hashes), one pair per entry.

        of_messages: with those of the messages in batches, which Apache's broker does not index.
        """
        is_indexed = records.sys_flag & TRANSACTION_MASK != TRANSACTION_ROLLBACK
        chosen = np.flatnonzero(is_indexed & (records.regions.size > 0))
        if not len(chosen):
            return chosen, chosen
        is_batch = (records.sys_flag[chosen] & INNER_BATCH != 0) & of_messages
        blocks = with_messages(records.regions.take(chosen), records.size[chosen], is_batch)
        found = [self._hashes(records, chosen[numbers], regions) for numbers, regions in blocks]
        numbers, hashes = zip(*found, strict=True)
        return np.concatenate(numbers), np.concatenate(hashes)

    def _hashes(self, records: Records, chosen: Array, regions: Regions) -> tuple[Array, Array]:
        topics = (records.queue_number[chosen] >> _QUEUE_BITS).tolist()
        numbers, hashes = key_hashes(
            regions,
            np.array([self._prefixes[topic] for topic in topics], np.uint32),
            lambda number: self._topics[topics[number]],
        )
        return chosen[numbers], hashes

    def _topic_numbers(self, names: list[bytes]) -> Array:
        for name in set(names) - self._numbers.keys():
            topic = name.decode(errors="replace")
            self._numbers[name] = len(self._topics)
            self._topics.append(topic)
            self._prefixes.append(index_prefixes(topic))
        return np.fromiter(map(self._numbers.__getitem__, names), np.int64, len(names))

    def _put_due_times(self, records: Records, numbers: Array, properties: list[bytes]) -> None:
        # In this topic the tags code is the time at which the message is due.
        for number in numbers.tolist():
            level = property_number(properties[number], DELAY.encode(), 0)
            if level > 0:
                delay_ms = self._delay_levels_ms[min(level, len(self._delay_levels_ms)) - 1]
                records.tags_code[number] = records.store_timestamp[number] + delay_ms


def batch_units(records: Records, group: Array) -> Array:
    """The units of some records in a batch queue."""
    return make_units(
        records.physical_offset[group],
        records.size[group],
        records.tags_code[group],
        records.store_timestamp[group],
        records.queue_offset[group],
        records.counts[group],
    )


def _counts(sys_flags: Array, properties: list[bytes]) -> Array:
    """The number of messages of each record; 0 if a batch states none."""
    counts = np.ones(len(properties), np.int64)
    for number in np.flatnonzero(sys_flags & INNER_BATCH).tolist():
        stated = property_number(properties[number], INNER_NUM.encode(), 0)
        counts[number] = stated if stated <= COUNT_MAX else 0
    return counts


def _tags_codes(properties: list[bytes]) -> Array:
    if _TAGS_MARK not in b"".join(properties):
        return np.zeros(len(properties), np.int64)
    return np.fromiter(map(tags_code_of, properties), np.int64, len(properties))
