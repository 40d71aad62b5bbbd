"""Converts the records of the queue of timers to rows, by columns.

Most records of a block have the same layout of properties, so a value is a column of bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace_broker.timer.demand import SLOT_MS
from headrace_protocol.columns import distinct_rows
from headrace_protocol.message import TRANSACTION_MASK, property_number, property_value
from headrace_protocol.property_columns import PropertyColumns

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from headrace_broker.store.queues.queue_blocks import QueueBlock
    from headrace_protocol.columns import Array
    from headrace_protocol.property_columns import Found

# A timer that waits. source: physical offset of its record, or of the half for a committed message;
# its delivery names it. key: hash of the UNIQ_KEY. topic: number of the real topic, or the
# complement of the number for a recall.
TIMER: Final = np.dtype(
    [
        ("due_ms", "i8"),
        ("queue_offset", "i8"),
        ("physical_offset", "i8"),
        ("source", "i8"),
        ("key", "u8"),
        ("size", "i4"),
        ("topic", "i4"),
    ]
)

_OUT, _SEC, _MS, _DELIVER, _UNIQ, _TOPIC, _RECALLED, _ROLLS = NAMES = (
    b"TIMER_OUT_MS",
    b"TIMER_DELAY_SEC",
    b"TIMER_DELAY_MS",
    b"TIMER_DELIVER_MS",
    b"UNIQ_KEY",
    b"REAL_TOPIC",
    b"TIMER_DEL_UNIQKEY",
    b"TIMER_ROLL_TIMES",
)
# For fewer records columns cost more than they save.
_COLUMNS_ROWS_MIN: Final = 20
_NO_NUMBER: Final = -1
_FACTOR: Final = 0x9E3779B97F4A7C15  # odd, so that no byte is lost
_KEY_BYTES_MAX: Final = 256
_POWERS: Final = np.cumprod(np.full(_KEY_BYTES_MAX, _FACTOR, np.uint64))


class Arrivals(NamedTuple):
    """The timers of a block of the queue.

    rows: shape (n,), TIMER. write_ms: store time of each, cut to whole seconds.
    replaces: for a copy stored by rolling, the source of the timer that it replaces, or 0 if an
    Apache broker stored it; -1 for all others.
    """

    rows: Array
    write_ms: Array
    replaces: Array

    @property
    def slot(self) -> Array:
        """TIMER_OUT_MS in seconds."""
        return slots_of(self.rows)

    def take(self, where: Array) -> Arrivals:
        """Some of them."""
        return Arrivals(self.rows[where], self.write_ms[where], self.replaces[where])


def joined(parts: Sequence[Arrivals]) -> Arrivals:
    """The timers of one or more blocks."""
    return Arrivals(*map(np.concatenate, zip(*parts, strict=True)))


def slots_of(rows: Array) -> Array:
    """The slot of each row, in seconds."""
    slots: Array = (rows["due_ms"] - 1) // SLOT_MS
    return slots


class Topics:
    """Numbers of topics, so that a topic takes four bytes in a row."""

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self._numbers: dict[bytes, int] = {}

    def number(self, name: bytes) -> int:
        """The number of a topic; a new topic gets the next one."""
        number = self._numbers.setdefault(name, len(self.names))
        if number == len(self.names):
            self.names.append(name)
        return number

    def find(self, name: bytes) -> int | None:
        """The number of a topic; None if it has none."""
        return self._numbers.get(name)


def key_hash(key: bytes) -> int:
    """The hash of a UNIQ_KEY, as in a row."""
    return int(_hashes(np.frombuffer(key[:_KEY_BYTES_MAX], np.uint8)[None])[0])


def _hashes(cells: Array) -> Array:
    width = min(cells.shape[1], _KEY_BYTES_MAX)
    hashes: Array = (cells[:, :width] * _POWERS[:width]).sum(1, dtype=np.uint64)
    return hashes


def arrivals(
    block: QueueBlock, topics: Topics, columns_rows_min: int = _COLUMNS_ROWS_MIN
) -> Arrivals:
    """The timers of a block, in the order of the queue.

    columns_rows_min: fewer records are read one by one.
    """
    records = block.records
    values = _Values(len(records))
    texts = records.properties()
    if len(texts) < columns_rows_min:
        values.put_each(enumerate(texts), topics)
    else:
        values.put_columns(texts, topics)
    rows = np.empty(len(records), TIMER)
    prepared = records.prepared_transaction_offset
    is_committed = (records.sys_flag & TRANSACTION_MASK != 0) & (prepared != 0)
    rows["due_ms"] = values.due_ms(records.store_timestamp)
    # A recall counts until all timers of its slot are delivered.
    is_recall = values.topic < 0
    rows["due_ms"][is_recall] = (slots_of(rows[is_recall]) + 1) * SLOT_MS
    rows["queue_offset"] = records.queue_offset
    rows["physical_offset"] = records.physical_offset
    rows["source"] = np.where(is_committed, prepared, records.physical_offset)
    rows["key"] = values.key
    rows["size"] = records.size
    rows["topic"] = values.topic
    write_ms = records.store_timestamp // SLOT_MS * SLOT_MS
    return Arrivals(rows, write_ms, np.where(values.is_copy, prepared, -1))


class _Values:
    """The properties of records, by columns."""

    def __init__(self, count: int) -> None:
        self.key = np.zeros(count, np.uint64)
        self.topic = np.zeros(count, np.int32)
        self.is_copy = np.zeros(count, bool)
        self._numbers = {name: np.full(count, _NO_NUMBER) for name in (_OUT, _SEC, _MS, _DELIVER)}

    def put_columns(self, texts: Sequence[bytes], topics: Topics) -> None:
        """Read all records at once."""
        columns = PropertyColumns(texts)
        for name, column in self._numbers.items():
            if len((found := columns.find(name)).records):
                column[found.records] = columns.integers(found, _NO_NUMBER)
        for width, found in _by_width(columns.find(_UNIQ)):
            self.key[found.records] = _hashes(columns.cells(found, min(width, _KEY_BYTES_MAX)))
        with_topic = columns.find(_TOPIC)
        for width, found in _by_width(with_topic):
            names, where = distinct_rows(columns.cells(found, width))
            numbers = [topics.number(name) for name in names]
            self.topic[found.records] = np.array(numbers, np.int32)[where]
        self.is_copy[columns.find(_ROLLS).records] = True
        is_odd = np.ones(len(texts), bool)
        is_odd[with_topic.records] = False
        is_odd[columns.find(_RECALLED).records] = True
        self.put_each(
            [(number, texts[number]) for number in np.flatnonzero(is_odd).tolist()], topics
        )

    def put_each(self, records: Iterable[tuple[int, bytes]], topics: Topics) -> None:
        """Read records one by one."""
        for number, raw in records:
            for name, column in self._numbers.items():
                column[number] = property_number(raw, name, _NO_NUMBER)
            topic = property_value(raw, _TOPIC)
            key, recalled = property_value(raw, _UNIQ), property_value(raw, _RECALLED)
            self.key[number] = key_hash(recalled.removeprefix(topic + b"+") if recalled else key)
            topic_number = topics.number(topic)
            self.topic[number] = ~topic_number if recalled else topic_number
            self.is_copy[number] = bool(property_value(raw, _ROLLS))

    def due_ms(self, stored_ms: Array) -> Array:
        """Due time of each timer: its delivery time if that is in its slot, else the slot's end.

        A delay of a copy stored by rolling, or of a record stored while the broker's clock jumped,
        leads elsewhere.
        """
        out_ms = self._numbers[_OUT]
        out_ms = np.where(out_ms < 0, stored_ms - SLOT_MS, out_ms) // SLOT_MS * SLOT_MS
        due_ms = out_ms + SLOT_MS
        for name in (_DELIVER, _MS, _SEC):  # the last that fits wins
            value = self._numbers[name]
            asked_ms = (
                value if name == _DELIVER else stored_ms + value * (SLOT_MS if name == _SEC else 1)
            )
            fits = (value >= 0) & (asked_ms > out_ms) & (asked_ms <= out_ms + SLOT_MS)
            due_ms = np.where(fits, asked_ms, due_ms)
        return due_ms


def _by_width(found: Found) -> Iterator[tuple[int, Found]]:
    """Values of equal length together."""
    widths = found.ends - found.starts
    if len(widths) and (widths == widths[0]).all():
        yield int(widths[0]), found
        return
    for width in np.unique(widths).tolist():
        yield width, found.take(widths == width)
