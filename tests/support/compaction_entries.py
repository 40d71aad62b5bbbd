"""Compaction logs with the records that a test names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from headrace_broker.compaction.queue_log import QueueLog
from headrace_broker.compaction.segments import Segment
from headrace_broker.compaction.units import FileSizes
from headrace_broker.store.queues.queue_blocks import QueueBlock
from headrace_protocol.blocks import encode_records
from headrace_protocol.columns import UNIT_DTYPE, RecordColumns
from headrace_protocol.message import encode_properties

TOPIC = "users"
SMALL = FileSizes.of(4600, 920)


class Entry(NamedTuple):
    """A message: its key, None without one, and its body, empty in a delete marker."""

    key: str | None
    body: bytes
    queue_offset: int
    store_timestamp: int = 1_000


def block(entries: Sequence[Entry]) -> QueueBlock:
    """The entries as a follower gets them."""
    properties = [
        encode_properties({"UNIQ_KEY": f"{entry.queue_offset:032d}"} | _keys(entry))
        for entry in entries
    ]
    bodies = [entry.body for entry in entries]
    encoded = encode_records(TOPIC, bodies, properties, born_timestamp=1, born_host=bytes(8))
    data = bytearray(encoded.data)
    sizes = encoded.sizes.astype(np.int64)
    starts = np.cumsum(sizes) - sizes
    records = RecordColumns(data, starts, sizes)
    _set(records, 20, [entry.queue_offset for entry in entries])
    _set(records, 56, [entry.store_timestamp for entry in entries])
    units = np.zeros(len(entries), UNIT_DTYPE)
    units["size"] = sizes
    first, end = entries[0].queue_offset, entries[-1].queue_offset + 1
    records = RecordColumns(bytes(data), starts, sizes)
    return QueueBlock(TOPIC, 0, first, end, units, records)


def _keys(entry: Entry) -> dict[str, str]:
    return {} if entry.key is None else {"KEYS": entry.key}


def _set(records: RecordColumns, at: int, values: Any) -> None:
    place = np.ndarray((len(records.data) - 7,), ">i8", records.data, strides=(1,))
    place[records.start + at] = values


def read_entries(segments: Sequence[Segment]) -> list[Entry]:
    """All messages of segments, checked against their units."""
    found = []
    for segment in segments:
        units = segment.read_units()
        assert len(units) == segment.count
        starts = units["physical_offset"].astype(np.int64) - segment.base
        data = segment.read_records(0, segment.log_end)
        records = RecordColumns(data, starts, units["size"].astype(np.int64))
        assert (records.physical_offset == units["physical_offset"]).all()
        assert (records.queue_offset == units["queue_offset"]).all()
        assert (records.store_timestamp == units["store_timestamp"]).all()
        messages = [records.message(number) for number in range(len(records))]
        found += [
            Entry(each.properties.get("KEYS"), each.body, each.queue_offset, each.store_timestamp)
            for each in messages
        ]
    return found


def fill(log: QueueLog, entries: Sequence[Entry], block_entries: int = 50) -> None:
    """Append entries in blocks."""
    for first in range(0, len(entries), block_entries):
        log.append(block(entries[first : first + block_entries]))
