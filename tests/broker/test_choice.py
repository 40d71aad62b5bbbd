"""One suite for all that reads a queue: it finds what fits, by tags, and skips nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headrace.spark.tier.reader import slices
from headrace_broker.compaction.log_reader import LogReader
from headrace_broker.statictopic.blocks import RecordBlock
from headrace_broker.store.files.filesystem import Files
from headrace_broker.store.files.page_cache import PageCache
from headrace_broker.store.store_source import GetResult, GetStatus
from headrace_protocol.java_hash import tags_code
from headrace_protocol.message import decode_records
from headrace_protocol.tier.folder import FolderDriver
from headrace_protocol.tier.span_queue import SpanQueue
from tests.broker.tiered import test_tiered_bucket as objects
from tests.broker.tiered import test_tiered_storage as files
from tests.support.bulk import columns_of
from tests.support.compaction import block, open_log
from tests.support.stores import open_store, put, ready

COUNT = 58
BODIES = [bytes(number * 37 % 400) for number in range(COUNT)]
TAGS = {name: frozenset([tags_code(name), 99]) for name in ("t0", "t1", "none")}
LIMITS = [(1, 1), (3, 100_000), (32, 700), (1000, 2000), (1000, 1 << 20)]
Tags = frozenset[int] | None


class Found(NamedTuple):
    """The result of a read: queue offsets and sizes of messages, and the next offset."""

    offsets: list[int]
    sizes: list[int]
    next_offset: int


def of_source(get: Callable[..., GetResult], *more: int, is_bulk: bool) -> Any:
    def read(*wanted: Any) -> Found:
        result = ready(partial(get, *wanted, *more))
        if not result.count:
            assert result.status is GetStatus.NO_MATCHED_MESSAGE
            return Found([], [], result.next_offset)
        if is_bulk:
            columns = columns_of(result)
            found = columns.queue_offset.tolist(), columns.size.tolist()
        else:
            messages = list(decode_records(b"".join(result.buffers)))
            found = [m.queue_offset for m in messages], [m.size for m in messages]
        assert (result.count, result.body_bytes) == (len(found[0]), sum(found[1]))
        return Found(*found, result.next_offset)

    return read


def of_store(folder: Path) -> dict[str, Any]:
    """Others lie between some of its messages."""
    store = open_store(folder)
    queue, other = store.queue("T", 0), store.queue("U", 0)
    for number, body in enumerate(BODIES):
        put(store, queue, body, TAGS=f"t{number % 3}")
        if number % 7 == 3:
            put(store, other, bytes(2000))
    source = store.source(queue)
    return {
        "get": of_source(source.get, is_bulk=False),
        "get_bulk": of_source(source.get_bulk, is_bulk=True),
    }


def of_compaction(folder: Path) -> dict[str, Any]:
    """Over several segments, with gaps between and inside them."""
    log = open_log(folder)
    offsets = [number for number in range(COUNT) if number % 7 in {1, 2, 5}]
    log.append(block(0, [BODIES[number] for number in offsets], offsets))
    assert len(log.segments) > 2
    reader = LogReader(log, PageCache(Files()))
    return {
        "get": of_source(reader.get, COUNT, is_bulk=False),
        "get_bulk": of_source(reader.get_bulk, COUNT, is_bulk=True),
    }


def of_tier(start: Callable[..., Any]) -> Callable[[Path], dict[str, Any]]:
    def build(folder: Path) -> dict[str, Any]:
        broker = start(folder, tiered_storage_level="FORCE")
        for number, body in enumerate(BODIES):
            broker.store_message(files.TOPIC, 0, body, TAGS=f"t{number % 3}")
            if number % 20 == 17:
                files.upload(broker)
        source = files.source(broker)
        return {
            "get": of_source(source.get, is_bulk=False),
            "get_bulk": of_source(source.get_bulk, is_bulk=True),
            "spans": of_spans(files.tier_of(broker).reader.access, folder / "tier"),
        }

    return build


def of_spans(access: Any, folder: Path) -> Any:
    """As Spark's tasks read the tier."""
    stored = access.queue(files.TOPIC, 0)
    _, units, log = stored.spans((0, COUNT), COUNT)
    queue = SpanQueue(FolderDriver(folder), "T", units, log)

    def read(at: int, _count_max: int, bytes_max: int, tags: Tags) -> Found:
        next_offset, columns = next(slices(queue, at, COUNT, tags, bytes_max))
        if columns is None:
            return Found([], [], next_offset)
        return Found(columns.queue_offset.tolist(), columns.size.tolist(), next_offset)

    return read


def of_another_broker(folder: Path) -> dict[str, Any]:
    """Its tags are chosen there."""
    store = open_store(folder)
    queue = store.queue("T", 0)
    for body in BODIES:
        put(store, queue, body)
    reads = [store.source(queue).get(number, 1, 1, None) for number in range(COUNT)]
    item = RecordBlock(0, COUNT, memoryview(b"".join(read.buffers[0] for read in reads)))

    def get(at: int, count_max: int, bytes_max: int, _tags: Tags) -> GetResult:
        found = item.get(at, count_max, bytes_max)
        assert found is not None
        return found

    return {"get": of_source(get, is_bulk=False)}


READERS = {
    "store": of_store,
    "compaction": of_compaction,
    "tier in files": of_tier(files.start),
    "tier in objects": of_tier(objects.start),
    "another broker": of_another_broker,
}


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_a_read_returns_what_fits_and_skips_nothing(tmp_path: Path, reader: str) -> None:
    for name, read in READERS[reader](tmp_path).items():
        sizes = dict(zip(*read_through(name, read, (1, 1), None), strict=True))
        assert len(sizes) > COUNT // 3
        for tag in (None, *TAGS):
            is_all = tag is None or reader == "another broker"
            wanted = [at for at in sizes if is_all or tag == f"t{at % 3}"]
            tags = None if tag is None else TAGS[tag]
            for limits in LIMITS:
                offsets, found = read_through(name, read, limits, tags)
                assert offsets == wanted, (name, tag, limits)
                assert found == [sizes[at] for at in wanted], (name, tag, limits)


def read_through(
    name: str, read: Any, limits: tuple[int, int], tags: Tags
) -> tuple[list[int], list[int]]:
    """All messages of a queue, by reads each of which keeps its limits."""
    count_max, bytes_max = limits
    offsets: list[int] = []
    sizes: list[int] = []
    at = 0
    while at < COUNT:
        found = read(at, count_max, bytes_max, tags)
        count = len(found.offsets)
        assert at < found.next_offset <= COUNT
        assert not count or at <= found.offsets[0] <= found.offsets[-1] < found.next_offset
        assert count <= count_max or name == "spans"
        assert sum(found.sizes) <= bytes_max or count == 1
        offsets += found.offsets
        sizes += found.sizes
        at = found.next_offset
    return offsets, sizes
