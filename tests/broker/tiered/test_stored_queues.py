"""One suite for all queues of the tier, however their bytes lie, and as Spark's tasks know them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from headrace.spark.tier.reader import slices
from headrace_broker.tiered.container.stored_tier import TierQueue
from headrace_broker.tiered.driver.memory import MemoryDriver
from headrace_broker.tiered.driver.posix import PosixDriver
from headrace_protocol.columns import UNIT_DTYPE
from headrace_protocol.java_hash import tags_code
from headrace_protocol.tier.driver import Failure
from headrace_protocol.tier.span_queue import SpanQueue
from headrace_protocol.tier.stored_queue import StoredQueue
from tests.support.object_tiers import append_next, one, open_objects_tier
from tests.support.tiers import TAGS, TOPIC, append, open_tier, queue_of, read, record, store_ms

# Appends records behind a gap, and returns the queue.
Append = Callable[[int, int], TierQueue]


def in_files(driver: Any, folder: Path) -> Append:
    queue = queue_of(open_tier(folder, driver))

    def append_more(count: int, gap: int) -> TierQueue:
        assert append(queue, count, first=queue.commit_offset + gap) is None
        return queue

    return append_more


def in_objects(driver: Any, _folder: Path) -> Append:
    tier = open_objects_tier(driver)

    def append_more(count: int, gap: int) -> TierQueue:
        assert append_next(tier, one(count), gap=gap) is None
        return tier.queues[TOPIC, 0]

    return append_more


@pytest.fixture(params=[in_files, in_objects])
def build(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("location", [MemoryDriver, PosixDriver])
def test_all_that_was_kept_is_read(build: Any, location: Any, tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    (tmp_path / "tier").mkdir()
    driver = location() if location is MemoryDriver else location(tmp_path / "tier")
    append_more = build(driver, tmp_path)
    kept: list[int] = []
    for _ in range(10):
        count, gap = rng.randrange(1, 20), rng.choice([0, 0, 0, 5])
        queue = append_more(count, gap)
        first = (kept[-1] + 1 if kept else 0) + gap
        kept += range(first, first + count)
    _, units, log = queue.spans((0, 1 << 40), 1000)
    for found in (queue, SpanQueue(driver, "T", units, log)):
        assert (found.min_offset, found.commit_offset) == (kept[0], kept[-1] + 1)
        assert read_through(found) == kept, seed
        for _ in range(8):
            check_range(found, rng.randrange(kept[-1] + 5), rng.randrange(1, 40), kept)
        check_times(found, rng.sample(kept, 4), kept)


@pytest.mark.parametrize("slice_bytes", [1, 700, 1 << 20])
def test_slices_of_spans_keep_to_tags_and_size(
    build: Any, tmp_path: Path, slice_bytes: int
) -> None:
    """As Spark's tasks read the tier."""
    driver, count = MemoryDriver(), 58
    append_more = build(driver, tmp_path)
    for part in (20, 20, 18):
        queue = append_more(part, 0)
    _, units, log = queue.spans((0, count), count)
    spans = SpanQueue(driver, "T", units, log)
    for number, name in enumerate((*TAGS[:2], "none", None)):
        tags = None if name is None else frozenset([tags_code(name), 99])
        wanted = {"none": [], None: [*range(count)]}.get(name, [*range(number, count, 3)])
        offsets: list[int] = []
        for next_offset, columns in slices(spans, 0, count, tags, slice_bytes):
            if columns is not None:
                assert columns.size.sum() <= slice_bytes or len(columns) == 1
                offsets += columns.queue_offset.tolist()
            assert offsets == [offset for offset in wanted if offset < next_offset]
        assert offsets == wanted


def read_through(queue: StoredQueue) -> list[int]:
    """The offsets of all records, each of which is compared with the original."""
    offsets: list[int] = []
    while not offsets or offsets[-1] + 1 < queue.commit_offset:
        records = read(queue, offsets[-1] + 1 if offsets else 0, 37)
        for number, offset in enumerate(records.queue_offset.tolist()):
            stored, original = bytearray(records.record(number)), record(offset)
            stored[28:36] = original[28:36]
            assert stored == original
            offsets.append(offset)
    return offsets


def check_range(queue: StoredQueue, first: int, count: int, kept: list[int]) -> None:
    found = queue.units(first, count)
    assert not isinstance(found, Failure)
    expected = [offset for offset in kept if offset >= first]
    offsets = np.arange(found.first, found.first + len(found.units))
    assert offsets.tolist() == expected[: len(offsets)]
    assert found.first == (expected[0] if expected else queue.commit_offset)
    assert min(len(expected), 1) <= len(offsets) <= count
    # Bulk reads pass units on as they are.
    assert found.units.dtype == UNIT_DTYPE
    some = np.arange(0, len(offsets), 3)
    records = queue.records(found.units[some], offsets[some])
    assert not isinstance(records, Failure)
    assert records.queue_offset.tolist() == offsets[some].tolist()


def check_times(queue: StoredQueue, some: list[int], kept: list[int]) -> None:
    for offset in some:
        exact, after = store_ms(offset), [other for other in kept if other > offset]
        assert queue.store_time(offset) == exact
        assert queue.offset_by_time(exact) == offset
        assert queue.offset_by_time(exact, "UPPER") == offset
        assert queue.offset_by_time(exact + 1) == (after[0] if after else queue.commit_offset)
    assert queue.offset_by_time(0) == queue.offset_by_time(0, "UPPER") == kept[0]
    assert queue.offset_by_time(1 << 50, "UPPER") == kept[-1]
