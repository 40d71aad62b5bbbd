"""A queue in the tier: append, read by offset and time, segments, expiry."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace_broker.tiered.container.flat_queue import FlatQueue, SegmentLimits, with_offsets
from headrace_broker.tiered.container.metadata import LONG_MAX, TierMetadata
from headrace_broker.tiered.container.tier import Tier
from headrace_broker.tiered.driver.memory import MemoryDriver
from headrace_protocol import fastjson
from headrace_protocol.columns import RecordColumns
from headrace_protocol.tier.driver import Buffer, Failure, FailureKind
from headrace_protocol.tier.paths import (
    FileKind,
    Home,
    QueueName,
    is_segment,
    segment_base,
    segment_name,
)
from tests.support.seeds import seeds
from tests.support.tiers import (
    BEGIN_MS,
    TOPIC,
    append,
    block,
    open_tier,
    queue_of,
    read_all,
    record,
    store_ms,
)

LARGE = SegmentLimits()


@pytest.fixture(params=["posix", "memory"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    return open_tier(tmp_path, MemoryDriver() if request.param == "memory" else None)


@pytest.fixture
def queue(tier: Tier) -> FlatQueue:
    return queue_of(tier)


def damaged(queue: FlatQueue) -> Failure:
    found = queue.units(queue.min_offset, 100)
    assert not isinstance(found, Failure)
    offsets = np.arange(found.first, found.first + len(found.units))
    records = queue.records(found.units, offsets, check_bodies=True)
    assert isinstance(records, Failure)
    return records


# -- names -----------------------------------------------------------------------------------------


def test_names_are_those_of_the_peer() -> None:
    # Made by Apache's MessageStoreUtil.
    assert Home("DefaultCluster", "b").cluster_folder == "212d6b50_DefaultCluster"
    assert segment_name(0) == "cfcd208400000000000000000000"
    assert segment_name(1073741824) == "952eb02900000000001073741824"


@pytest.mark.parametrize("name", ["", "00000000000000000000", segment_name(5)[:-1] + "6", "x"])
def test_other_names_are_no_segments(name: str) -> None:
    assert segment_base(name) is None
    assert not is_segment(f"a/COMMIT_LOG/{name}")
    assert not is_segment(f"a/OTHER/{segment_name(5)}")
    assert is_segment(f"a/INDEX/{segment_name(5)}")


# -- append and read -------------------------------------------------------------------------------


def test_units_have_places_sizes_and_tags(queue: FlatQueue) -> None:
    append(queue, 9)
    found = queue.units(0, 9)
    assert not isinstance(found, Failure)
    sizes = [len(record(offset)) for offset in range(9)]
    assert found.units["size"].tolist() == sizes
    assert found.units["physical_offset"].tolist() == [sum(sizes[:at]) for at in range(9)]
    assert found.units["tags_code"].tolist() == block(0, 9)[1].tolist()


def test_only_the_stated_offset_changes_in_a_record() -> None:
    records, _ = block(0, 9)
    data = with_offsets(records, np.arange(9) * 10**12)
    stored = RecordColumns.from_records(bytes(data))
    assert stored.physical_offset.tolist() == [number * 10**12 for number in range(9)]
    for number in range(9):
        data[stored.start[number] + 28 : stored.start[number] + 36] = bytes(8)
        original = bytearray(records.record(number))
        original[28:36] = bytes(8)
        assert data[stored.start[number] :][: len(original)] == original


def test_records_that_lie_apart_are_gathered() -> None:
    parts = [record(offset) for offset in range(6)]
    data = b"gap".join(parts)
    sizes = np.array([len(part) for part in parts])
    records = RecordColumns(data, np.cumsum(sizes) - sizes + 3 * np.arange(6), sizes)
    stored = RecordColumns.from_records(bytes(with_offsets(records, np.arange(6))))
    assert stored.queue_offset.tolist() == list(range(6))


def test_gaps_within_a_block_are_kept(queue: FlatQueue) -> None:
    records, codes = block(0, 30)
    kept = np.array([2, 3, 7, 8, 9, 29])
    assert queue.append(records.select(kept), codes[kept], BEGIN_MS) is None
    assert read_all(queue) == kept.tolist()
    assert queue.min_offset == 2


def test_a_record_larger_than_a_segment_is_kept(tmp_path: Path) -> None:
    limits = SegmentLimits(log_bytes=100, units_bytes=20)
    queue = queue_of(open_tier(tmp_path, limits=limits))
    append(queue, 10)
    assert read_all(queue) == list(range(10))
    assert len(queue.log.segments) == len(queue.units_file.segments) == 10


def test_a_log_ends_by_age_once_it_is_large_enough(tmp_path: Path) -> None:
    limits = SegmentLimits(log_age_ms=5000, log_aged_bytes=1000)
    queue = queue_of(open_tier(tmp_path, limits=limits))
    for _ in range(30):
        append(queue, 1)
    rows = queue.log.segments
    assert len(rows) > 1
    assert all(row.size >= 1000 for row in rows[:-1])
    assert len(queue.units_file.segments) == 1
    assert read_all(queue) == list(range(30))


# -- damage ----------------------------------------------------------------------------------------


def posix_queue(tmp_path: Path) -> tuple[FlatQueue, Path]:
    tier = open_tier(tmp_path, limits=LARGE)
    queue = queue_of(tier)
    append(queue, 20)
    return queue, tmp_path / "tier" / queue.log.address.segment_path(0)


@pytest.mark.parametrize("at", [0, 4, 20, 28, -1])
def test_a_changed_byte_is_damage(tmp_path: Path, at: int) -> None:
    queue, path = posix_queue(tmp_path)
    data = bytearray(path.read_bytes())
    # The last record has a body of its own at its end but for the properties.
    position = at if at >= 0 else data.index(b"body 0 5 ")
    data[position] ^= 1
    path.write_bytes(data)
    assert damaged(queue).kind is FailureKind.DAMAGED


def test_a_short_file_is_short(tmp_path: Path) -> None:
    queue, path = posix_queue(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    assert damaged(queue).kind is FailureKind.SHORT


def test_a_missing_file_is_missing(tmp_path: Path) -> None:
    queue, path = posix_queue(tmp_path)
    path.unlink()
    assert damaged(queue).kind is FailureKind.MISSING


# -- by time ---------------------------------------------------------------------------------------


# -- expiry ----------------------------------------------------------------------------------------


def test_segments_expire_as_a_whole(tier: Tier, queue: FlatQueue) -> None:
    append(queue, 100)
    for expired in (0, 20, 50, 51, 99, 200):
        tier.expire(TOPIC, 0, store_ms(expired), BEGIN_MS)
        assert queue.min_offset <= expired
        assert read_all(queue) == list(range(queue.min_offset, 100))
        assert queue.offset_by_time(0) == queue.min_offset
    assert queue.min_offset > 80
    row = tier.metadata.queue(queue.name)
    assert row is not None
    assert (row.min_offset, row.max_offset) == (queue.min_offset, 100)
    append(queue, 10)
    assert read_all(queue)[-1] == 109


def test_the_segment_that_grows_does_not_expire(queue: FlatQueue) -> None:
    append(queue, 3)
    assert queue.expire(LONG_MAX, BEGIN_MS) == []
    assert read_all(queue) == [0, 1, 2]


def test_expired_files_are_deleted_and_a_leftover_is_swept(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    queue, other = queue_of(tier), queue_of(tier, 1)
    append(queue, 100)
    append(other, 30)
    before = set((tmp_path / "tier").rglob("*"))
    paths = queue.expire(store_ms(50), BEGIN_MS)
    assert isinstance(paths, list)
    assert set((tmp_path / "tier").rglob("*")) == before
    foreign = tmp_path / "tier" / queue.log.address.path / "notes.txt"
    foreign.write_text("of the operator")
    tier.metadata.save()
    tier = open_tier(tmp_path)
    assert tier.sweep() is None
    assert before - set((tmp_path / "tier").rglob("*")) == {tmp_path / "tier" / p for p in paths}
    assert foreign.exists()
    assert read_all(tier.queues[TOPIC, 0])[0] == queue.min_offset
    assert read_all(tier.queues[TOPIC, 1]) == list(range(30))


# -- failures --------------------------------------------------------------------------------------


class Failing(MemoryDriver):
    """Fails at some operations. A failed append leaves a part; others may have taken place."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.rng = rng
        self.rate = 0.4

    def append(self, path: str, position: int, data: Buffer) -> Failure | None:
        if self.rng.random() < self.rate:
            super().append(path, position, data[: self.rng.randrange(len(data) + 1)])
            return Failure(FailureKind.UNREACHABLE, path, "broken")
        return super().append(path, position, data)

    def cut(self, path: str, size: int) -> Failure | None:
        return self._may_lose(path, lambda: super(Failing, self).cut(path, size))

    def delete(self, paths: Any) -> Failure | None:
        return self._may_lose(str(paths), lambda: super(Failing, self).delete(paths))

    def _may_lose(self, path: str, operate: Callable[[], Failure | None]) -> Failure | None:
        """Operate, fail, or operate and lose the answer."""
        is_broken = self.rng.random() < self.rate
        done = None if is_broken and self.rng.random() < 0.5 else operate()
        return Failure(FailureKind.UNREACHABLE, path, "broken") if is_broken else done


@pytest.mark.parametrize("seed", seeds(20))
def test_a_failed_append_is_retried_without_loss_or_repeat(tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    driver = Failing(rng)
    queue = queue_of_failing(tmp_path, driver)
    failures = 0
    for _ in range(1000):
        if queue.commit_offset >= 200:
            break
        before = queue.commit_offset
        gap = rng.random() < 0.1
        failures += append(queue, rng.randrange(40), before + gap) is not None
        assert queue.commit_offset >= before
    driver.rate = 0
    offsets = read_all(queue)
    assert failures
    assert queue.commit_offset >= 200, f"seed {seed}"
    assert offsets == sorted(set(offsets)), f"seed {seed}"
    assert append(queue, 5) is None
    again = open_tier(tmp_path, driver)
    # The metadata was never saved after the creation, so all of it comes from the store.
    assert read_all(again.queues[TOPIC, 0]) == read_all(queue), f"seed {seed}"


def queue_of_failing(tmp_path: Path, driver: Failing) -> FlatQueue:
    rate, driver.rate = driver.rate, 0
    queue = queue_of(open_tier(tmp_path, driver))
    driver.rate = rate
    return queue


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_reads_beside_appends_and_expiry_are_whole(tier: Tier, seed: int) -> None:
    rng, queue = Random(seed), queue_of(tier)
    append(queue, 20)
    is_over = Event()

    def read_on() -> int:
        reads, own = 0, Random(seed)
        while not is_over.is_set() or not reads:
            first = own.randrange(queue.min_offset, queue.commit_offset)
            found = queue.units(first, 30)
            if isinstance(found, Failure):
                assert first < queue.min_offset, found
                continue
            offsets = np.arange(found.first, found.first + len(found.units))
            records = queue.records(found.units, offsets, check_bodies=True)
            if isinstance(records, Failure):
                # Only an expiry takes records away, and then the least offset says so.
                assert found.first < queue.min_offset, records
                continue
            assert records.queue_offset.tolist() == offsets.tolist()
            reads += 1
        return reads

    with ThreadPoolExecutor(2) as threads:
        readers = [threads.submit(read_on) for _ in range(2)]
        try:
            for _ in range(60):
                append(queue, rng.randrange(1, 15))
                before_ms = store_ms(queue.commit_offset - rng.randrange(20, 80))
                tier.expire(TOPIC, 0, before_ms, BEGIN_MS)
        finally:
            is_over.set()
        assert all(reader.result() for reader in readers)


# -- metadata --------------------------------------------------------------------------------------


def test_metadata_has_the_form_of_the_peer(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    queue = queue_of(tier, 3)
    append(queue, 30, first=4)
    tier.metadata.save()
    saved = fastjson.loads((tmp_path / "config" / "tieredStoreMetadata.json").read_bytes())
    assert saved["topicSerialNumber"] == 0
    assert saved["topicMetadataTable"][TOPIC]["topicId"] == 0
    row = saved["queueMetadataTable"][TOPIC]["3"]
    assert row["queue"] == {"brokerName": "broker", "queueId": 3, "topic": TOPIC}
    assert (row["minOffset"], row["maxOffset"]) == (4, 34)
    segments = saved["consumeQueueFileSegmentTable"]["broker/tiered/3"]
    first = segments["80"]
    assert first["path"] == "broker/tiered/3"
    assert (first["type"], first["baseOffset"], first["size"]) == (1, 80, 200)
    assert (first["status"], first["beginTimestamp"]) == (1, store_ms(4))
    assert first["endTimestamp"] == store_ms(13)
    assert set(first) == {
        *("path", "type", "baseOffset", "status", "size", "createTimestamp"),
        *("beginTimestamp", "endTimestamp", "sealTimestamp"),
    }


def test_bare_keys_of_the_peer_are_read(tmp_path: Path) -> None:
    path = tmp_path / "config" / "tieredStoreMetadata.json"
    path.parent.mkdir()
    path.write_text(
        '{"topicSerialNumber":7,"topicMetadataTable":{"odd,5:{topic":{"topicId":7,'
        '"topic":"odd,5:{topic","status":0,"reserveTime":-1,"updateTimestamp":1}},'
        '"queueMetadataTable":{"odd,5:{topic":{0:{"queue":{"brokerName":"b","queueId":0,'
        '"topic":"odd,5:{topic"},"minOffset":-1,"maxOffset":12,"updateTimestamp":2},1:{"queue":'
        '{"brokerName":"b","queueId":1,"topic":"odd,5:{topic"},"minOffset":0,"maxOffset":0}}},'
        '"indexFileSegmentTable":{"b/rmq_sys_INDEX/0":{0:{"path":"b/rmq_sys_INDEX/0","type":2,'
        '"baseOffset":0,"size":5}}}}'
    )
    metadata = TierMetadata(path)
    assert metadata.topic_id("odd,5:{topic", 0) == 7
    assert metadata.topic_id("next", 0) == 8
    names = [QueueName("b", "odd,5:{topic", queue_id) for queue_id in (0, 1)]
    assert metadata.queues() == names
    row = metadata.queue(names[0])
    assert row is not None
    assert row.max_offset == 12
    (index,) = metadata.segments(QueueName("b", "rmq_sys_INDEX", 0), FileKind.INDEX)
    assert index.end == 5


def test_only_changed_entries_are_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(tmp_path)
    queues = [queue_of(tier, queue_id, f"T{queue_id}") for queue_id in range(50)]
    for queue in queues:
        append(queue, 5)
    tier.metadata.save()
    append(queues[7], 1)
    encoded: list[object] = []
    encode = msgspec.json.encode

    def counting(value: object) -> bytes:
        encoded.append(value)
        return encode(value)

    monkeypatch.setattr(msgspec.json, "encode", counting)
    tier.metadata.save()
    # A name and a table for each of: queues, log segments, units segments.
    assert len(encoded) == 6
    monkeypatch.undo()
    again = TierMetadata(tmp_path / "config" / "tieredStoreMetadata.json")
    assert again.queues() == tier.metadata.queues()


def test_a_topic_made_again_gets_another_number(tier: Tier) -> None:
    append(queue_of(tier), 50)
    before = tier.metadata.topic_id(TOPIC, 0)
    assert tier.delete(TOPIC, 0) is None
    assert tier.metadata.queue(QueueName("broker", TOPIC, 0)) is None
    queue = queue_of(tier)
    assert tier.metadata.topic_id(TOPIC, 0) > before
    assert queue.commit_offset == 0
    append(queue, 3, first=7)
    assert read_all(queue) == [7, 8, 9]
