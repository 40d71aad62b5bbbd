"""Records for the tier, tiers over folders, and what must hold of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headrace_broker.store.files.filesystem import Files
from headrace_broker.tiered.container.flat_queue import FlatQueue, SegmentLimits
from headrace_broker.tiered.container.index_file import IndexSize
from headrace_broker.tiered.container.metadata import TierMetadata
from headrace_broker.tiered.container.stored_tier import TierQueue
from headrace_broker.tiered.container.tier import Tier
from headrace_broker.tiered.container.tier_index import TierIndex
from headrace_broker.tiered.driver.posix import PosixDriver
from headrace_protocol.columns import Array, RecordColumns
from headrace_protocol.java_hash import tags_code
from headrace_protocol.message import encode_properties, encode_record
from headrace_protocol.message_ids import encode_host
from headrace_protocol.tier.driver import AppendDriver, Failure, FailureKind
from headrace_protocol.tier.paths import Home
from headrace_protocol.tier.stored_queue import StoredQueue

TOPIC = "tiered"
BEGIN_MS = 1_700_000_000_000
STEP_MS = 1000
TAGS = ("red", "green", "")
SMALL = SegmentLimits(log_bytes=2000, units_bytes=200, log_age_ms=10**12, log_aged_bytes=0)


def store_ms(queue_offset: int) -> int:
    """The store time of a record."""
    return BEGIN_MS + queue_offset * STEP_MS


def record(queue_offset: int, queue_id: int = 0, topic: str = TOPIC) -> bytes:
    """The record of a queue offset as it is in the broker's log; every third has IPv6 hosts."""
    tags = TAGS[queue_offset % len(TAGS)]
    properties = {"UNIQ_KEY": f"u{queue_offset}", "KEYS": f"k{queue_offset} even"}
    host = encode_host("::1" if queue_offset % 3 == 2 else "10.0.0.1", 10911)
    return encode_record(
        topic=topic,
        queue_id=queue_id,
        body=f"body {queue_id} {queue_offset} ".encode() * (queue_offset % 7),
        properties=encode_properties({**properties, "TAGS": tags} if tags else properties),
        queue_offset=queue_offset,
        physical_offset=7_000_000 + queue_offset * 1000,
        store_timestamp=store_ms(queue_offset),
        born_host=host,
        store_host=host,
    )


def block(
    first: int, count: int, queue_id: int = 0, topic: str = TOPIC
) -> tuple[RecordColumns, Array]:
    """Records from a queue offset on, and their tags codes."""
    offsets = range(first, first + count)
    data = b"".join(record(offset, queue_id, topic) for offset in offsets)
    codes = [tags_code(TAGS[offset % len(TAGS)] or None) for offset in offsets]
    return RecordColumns.from_records(data), np.array(codes, np.int64)


def append(queue: FlatQueue, count: int, first: int | None = None) -> Failure | None:
    """Append the next records; ``first`` leaves a gap."""
    begin = queue.commit_offset if first is None else first
    name = queue.name
    records, codes = block(begin, count, name.queue_id, name.topic)
    return queue.append(records, codes, store_ms(begin + count))


def read(queue: StoredQueue, first: int, count: int) -> RecordColumns:
    """Records from an offset on."""
    found = queue.units(first, count)
    assert not isinstance(found, Failure), found
    offsets = np.arange(found.first, found.first + len(found.units))
    records = queue.records(found.units, offsets, check_bodies=True)
    assert not isinstance(records, Failure), records
    return records


def read_all(queue: TierQueue) -> list[int]:
    """The queue offsets of all records, each of which is compared with the original."""
    offsets: list[int] = []
    at = queue.min_offset
    while at < queue.commit_offset:
        records = read(queue, at, 37)
        if not len(records):
            break  # a gap at the end, whose next record was not appended
        for number, offset in enumerate(records.queue_offset.tolist()):
            stored = bytearray(records.record(number))
            original = record(offset, queue.name.queue_id, queue.name.topic)
            stored[28:36] = original[28:36]
            assert stored == original
            offsets.append(offset)
        at = offsets[-1] + 1
    return offsets


def open_tier(
    root: Path,
    driver: AppendDriver | None = None,
    *,
    limits: SegmentLimits = SMALL,
    files: Files | None = None,
) -> Tier:
    """The tier of a broker, opened: its metadata and, without a driver, its files below a root."""
    files = files or Files()
    metadata = TierMetadata(root / "config" / "tieredStoreMetadata.json", files)
    (root / "tier").mkdir(parents=True, exist_ok=True)
    driver = driver or PosixDriver(root / "tier", files)
    size, home = IndexSize(slot_count=13, item_count=50), Home("cluster", "broker")
    index = TierIndex(root, driver, metadata, home, files, size)
    tier = Tier(driver, home, metadata, limits, index)
    while (failure := tier.open(BEGIN_MS)) is not None:
        assert failure.kind is FailureKind.UNREACHABLE, failure
    return tier


def queue_of(tier: Tier, queue_id: int = 0, topic: str = TOPIC) -> FlatQueue:
    """A queue, which is created if it is not there."""
    if (topic, queue_id) not in tier.queues:
        assert not tier.damaged
        failure = tier.create([(topic, queue_id)], BEGIN_MS)
        assert failure is None, failure
    return tier.queues[topic, queue_id]
