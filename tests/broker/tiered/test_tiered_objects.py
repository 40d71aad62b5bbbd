"""Queues in an object store: one object for all queues of an upload, named by the manifest."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from obstore.store import MemoryStore

from headrace_broker.tiered.container.stored_tier import Group, Name
from headrace_broker.tiered.driver.memory import MemoryDriver
from headrace_broker.tiered.driver.posix import PosixDriver
from headrace_broker.tiered.objects.batch import read_directory
from headrace_broker.tiered.objects.inventory import StoredObject
from headrace_broker.tiered.objects.merge import choose, plan
from headrace_broker.tiered.objects.object_tier import ObjectTier
from headrace_broker.tiered.objects.sizes import ObjectSizes
from headrace_protocol.columns import RecordColumns
from headrace_protocol.message import encode_record
from headrace_protocol.message_ids import encode_host
from headrace_protocol.tier.driver import Failure, FailureKind
from headrace_protocol.tier.objects import ObjectDriver, open_objects
from headrace_protocol.tier.rows import FINAL, ObjectRow, Part
from tests.support.object_server import below
from tests.support.object_tiers import (
    HOME,
    Fault,
    FaultyDriver,
    Killed,
    append_next,
    one,
    open_objects_tier,
)
from tests.support.tiers import BEGIN_MS, TOPIC, block, read, read_all, store_ms

DAY_MS = 24 * 3600 * 1000


@pytest.fixture(params=["file", "obstore", pytest.param("s3", marks=pytest.mark.slow)])
def driver(request: pytest.FixtureRequest) -> Any:
    if request.param == "file":
        return PosixDriver(request.getfixturevalue("tmp_path"))
    if request.param == "obstore":
        return ObjectDriver(MemoryStore())
    location = request.getfixturevalue("bucket")
    return open_objects(below(location, request.node.name))


def objects(driver: Any, folder: str = "data") -> list[str]:
    return [entry.path for entry in driver.entries(f"{ObjectTier(driver, HOME).folder}/{folder}")]


# -- upload and read -------------------------------------------------------------------------------


def test_records_are_read_as_they_were_written(driver: Any) -> None:
    tier = open_objects_tier(driver)
    for number in range(5):
        assert append_next(tier, {(TOPIC, 0): 4, (TOPIC, 1): 7, ("other", 0): number + 1}) is None
    assert len(objects(driver)) == 5
    for found in (tier, open_objects_tier(driver)):
        assert read_all(found.queues[TOPIC, 0]) == list(range(20))
        assert read_all(found.queues[TOPIC, 1]) == list(range(35))
        assert read_all(found.queues["other", 0]) == list(range(15))


def test_gaps_within_a_block_are_kept() -> None:
    tier = open_objects_tier(MemoryDriver())
    tier.create([(TOPIC, 0)], BEGIN_MS)
    records, codes = block(60, 30)
    kept = np.array([2, 3, 7, 8, 9, 29])
    assert tier.append_all({(TOPIC, 0): Group(records.select(kept), codes[kept])}, 0) is None
    assert read_all(tier.queues[TOPIC, 0]) == (kept + 60).tolist()


def test_requests_do_not_depend_on_the_number_of_queues() -> None:
    requests = []
    for queue_count in (1, 50):
        store = FaultyDriver()
        tier = open_objects_tier(store)
        names: list[Name] = [(TOPIC, number) for number in range(queue_count)]
        store.calls.clear()
        for _ in range(40):
            assert append_next(tier, dict.fromkeys(names, 1)) is None
        for name in names:
            tier.delete(*name)
        tier.sync()
        tier.clean_up(lambda _topic: 0, BEGIN_MS + DAY_MS)
        requests.append(dict(store.calls))
        store.calls.clear()
        tier.sync()
        tier.clean_up(lambda _topic: 0, BEGIN_MS + DAY_MS + 1)
        assert not store.calls
    assert requests[0] == requests[1]
    # An object and the manifest for each upload, and a checkpoint after 32.
    assert requests[0]["put"] <= 2 * 40 + 4


def test_a_start_reads_the_tail_and_the_catalogs() -> None:
    store = FaultyDriver()
    tier = open_objects_tier(store)
    for _ in range(100):
        append_next(tier, one(1))
    store.calls.clear()
    assert read_all(open_objects_tier(store).queues[TOPIC, 0]) == list(range(100))
    assert len(objects(store.driver)) == 100
    assert len(tier.inventory.tail) == 100 % 32
    assert len(tier.inventory.catalogs) == 1
    assert store.calls["put"] == 1


def test_records_are_found_by_key() -> None:
    tier = open_objects_tier(MemoryDriver())
    for _ in range(10):
        append_next(tier, {(TOPIC, 0): 3, (TOPIC, 1): 2, ("other", 0): 2})
    hits = tier.index.query(TOPIC, "k7", 0, 1 << 60, 10)
    assert not isinstance(hits, Failure)
    assert sorted(hit.queue_id for hit in hits) == [0, 1]
    for hit in hits:
        head = tier.queues[TOPIC, hit.queue_id].head(hit.log_offset)
        assert not isinstance(head, Failure)
        assert (head.queue_offset, head.size) == (7, hit.size)
        assert head.store_ms == hit.store_ms
    newest = tier.index.query(TOPIC, "even", 0, store_ms(20), 3)
    assert not isinstance(newest, Failure)
    assert [hit.store_ms for hit in newest] == [store_ms(20), store_ms(19), store_ms(19)]
    assert tier.index.query(TOPIC, "none", 0, 1 << 60, 3) == []
    assert tier.index.query("nothing", "k7", 0, 1 << 60, 3) == []


def test_many_keys_are_found_by_their_window() -> None:
    tier = open_objects_tier(MemoryDriver(), sizes=ObjectSizes(window_items=4, read_bytes=0))
    append_next(tier, one(300))
    for offset in range(0, 300, 7):
        hits = tier.index.query(TOPIC, f"k{offset}", 0, 1 << 60, 10)
        assert not isinstance(hits, Failure)
        assert [hit.store_ms for hit in hits] == [store_ms(offset)]
    every = tier.index.query(TOPIC, "even", 0, 1 << 60, 1000)
    assert not isinstance(every, Failure)
    assert len(every) == 300


# -- the manifest ----------------------------------------------------------------------------------


def test_a_broker_that_was_replaced_uploads_nothing_more(driver: Any) -> None:
    first = open_objects_tier(driver)
    append_next(first, one(5))
    second = open_objects_tier(driver)
    failure = append_next(first, one(5))
    assert failure is not None
    assert failure.kind is FailureKind.CHANGED
    assert "another broker named broker has taken over the tier in epoch 2" in failure.reason
    assert first.queues[TOPIC, 0].commit_offset == 5
    assert append_next(second, one(3)) is None
    assert append_next(first, one(5)) == failure
    assert first.clean_up(lambda _topic: 1 << 60, BEGIN_MS) == []
    assert read_all(open_objects_tier(driver).queues[TOPIC, 0]) == list(range(8))


def test_a_replaced_broker_asks_nothing_and_deletes_nothing() -> None:
    store = FaultyDriver()
    first = open_objects_tier(store)
    append_next(first, one(5))
    second = open_objects_tier(store)
    append_next(second, one(5))
    late = BEGIN_MS + 3 * DAY_MS
    (failure,) = first.clean_up(None, late)
    assert failure.kind is FailureKind.CHANGED
    store.calls.clear()
    append_next(first, one(5))
    assert first.clean_up(None, late) == []
    assert not store.calls
    assert read_all(second.queues[TOPIC, 0]) == list(range(10))


def test_a_lost_manifest_is_no_new_beginning(driver: Any) -> None:
    tier = open_objects_tier(driver)
    append_next(tier, one(5))
    driver.delete([tier.manifest.path])
    failure = append_next(tier, one(5))
    assert failure is not None
    assert (failure.kind, failure.path) == (FailureKind.DAMAGED, tier.manifest.path)
    failure = ObjectTier(driver, HOME).start(BEGIN_MS)
    assert failure is not None
    assert "is missing, but there are 2 objects" in failure.reason


def put_back(driver: Any, path: str, data: bytes) -> None:
    etag = driver.etag(path)
    assert isinstance(etag, str)
    assert isinstance(driver.put(path, data, etag), str)


def kept(driver: Any, path: str) -> bytes:
    (data,) = driver.read(path, [(0, driver.size(path))])
    return bytes(data)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("uploads", [1, 2, 40])
def test_an_old_copy_of_the_manifest_is_refused(
    driver: Any, uploads: int, *, restarts: bool
) -> None:
    tier = open_objects_tier(driver)
    append_next(tier, one(5))
    old = kept(driver, tier.manifest.path)
    if restarts:
        tier = open_objects_tier(driver)
    for _ in range(uploads):
        append_next(tier, one(2, 1) | one(1))
    put_back(driver, tier.manifest.path, old)
    failure = ObjectTier(driver, HOME).start(BEGIN_MS)
    if uploads == 1 and not restarts:  # a crash before the manifest was replaced leaves the same
        assert failure is None
        return
    assert failure is not None
    assert (failure.kind, failure.path) == (FailureKind.DAMAGED, tier.manifest.path)
    assert "is an old copy" in failure.reason
    assert kept(driver, tier.manifest.path) == old


def test_what_was_uploaded_in_vain_does_not_make_a_manifest_old(driver: Any) -> None:
    store = FaultyDriver(driver)
    tier = open_objects_tier(store)
    append_next(tier, one(5) | {("gone", 0): 3})
    append_next(tier, {("gone", 0): 3})
    assert tier.delete("gone", 0) is None
    tier.sync()
    puts = store.paths["put"]
    store.fault = lambda call: (
        Fault.FAILS if call == "put" and puts[-1] == tier.manifest.path else Fault.NONE
    )
    for _ in range(3):
        assert append_next(tier, one(4)) is not None
    assert len(objects(driver)) >= 5
    assert read_all(open_objects_tier(driver).queues[TOPIC, 0]) == list(range(5))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"format": 2}, "format 2"), ({"broker": "another"}, "belongs to broker another")],
)
def test_another_manifest_is_refused(changes: dict[str, Any], reason: str) -> None:
    driver = MemoryDriver()
    manifest = open_objects_tier(driver).manifest
    other = msgspec.structs.replace(manifest.manifest, **changes)
    etag = driver.etag(manifest.path)
    assert isinstance(etag, str)
    driver.put(manifest.path, msgspec.json.encode(other), etag)
    failure = ObjectTier(driver, HOME).start(BEGIN_MS)
    assert failure is not None
    assert reason in failure.reason


def test_names_are_never_used_again() -> None:
    driver = MemoryDriver()
    names: list[str] = []
    for _ in range(3):
        tier = open_objects_tier(driver)
        for _ in range(3):
            append_next(tier, one(1))
            names.append(objects(driver)[-1])
    assert len(set(names)) == len(names) == 9
    assert names == sorted(names)


# -- damage ----------------------------------------------------------------------------------------


def test_an_object_says_what_is_in_it(driver: Any) -> None:
    tier = open_objects_tier(driver)
    append_next(tier, {(TOPIC, 0): 3, (TOPIC, 1): 2})
    (path,) = objects(driver)
    row = read_directory(driver, path)
    assert row == tier.inventory.objects[path.removeprefix(f"{tier.folder}/")].row()
    driver.put("folder/garbage", b"x" * 40)
    garbage = read_directory(driver, "folder/garbage")
    assert isinstance(garbage, Failure)
    assert garbage.kind is FailureKind.DAMAGED


@pytest.mark.parametrize("cut", [17, 100, 1000])
def test_a_truncated_object_is_an_error(cut: int) -> None:
    driver = MemoryDriver()
    tier = open_objects_tier(driver)
    append_next(tier, one(20))
    (path,) = objects(driver)
    size = driver.size(path)
    assert isinstance(size, int)
    driver.cut(path, size - cut)
    failure = ObjectTier(driver, HOME).start(BEGIN_MS)
    assert failure is not None
    assert failure.path == path
    driver.cut(path, 700)
    units = tier.queues[TOPIC, 0].units(0, 20)
    assert isinstance(units, Failure)
    assert units.kind is FailureKind.SHORT


@pytest.mark.parametrize("at", [3, 9, 20 * 28 + 4, 20 * 28 + 20, 20 * 28 + 28])
def test_a_changed_byte_is_damage(at: int) -> None:
    driver = MemoryDriver()
    tier = open_objects_tier(driver)
    append_next(tier, one(20))
    (path,) = objects(driver)
    driver.stored[path].data[at] ^= 0x41
    queue = tier.queues[TOPIC, 0]
    found = queue.units(0, 20)
    if not isinstance(found, Failure):
        records = queue.records(found.units, np.arange(20))
        assert isinstance(records, Failure)
        found = records
    assert found.kind is FailureKind.DAMAGED


def test_a_changed_catalog_is_damage() -> None:
    driver = MemoryDriver()
    tier = open_objects_tier(driver)
    for _ in range(32):
        append_next(tier, one(1))
    (path,) = objects(driver, "catalogs")
    driver.stored[path].data[40] ^= 1
    failure = ObjectTier(driver, HOME).start(BEGIN_MS)
    assert failure is not None
    assert (failure.kind, failure.path) == (FailureKind.DAMAGED, path)


# -- removal ---------------------------------------------------------------------------------------


def test_expired_records_leave_the_manifest_and_then_the_store(driver: Any) -> None:
    tier = open_objects_tier(driver)
    for _ in range(6):
        append_next(tier, {(TOPIC, 0): 5, ("other", 0): 5})
    old = objects(driver)
    late = BEGIN_MS + DAY_MS
    assert tier.clean_up(lambda topic: store_ms(11 if topic == TOPIC else 0), late) == []
    assert tier.queues[TOPIC, 0].min_offset == 10
    assert objects(driver) == old
    assert tier.clean_up(lambda topic: store_ms(11 if topic == TOPIC else 25), late) == []
    found = open_objects_tier(driver)
    assert read_all(found.queues[TOPIC, 0]) == list(range(10, 30))
    assert read_all(found.queues["other", 0]) == list(range(25, 30))
    # Readers that found them before still read them for a while.
    assert objects(driver) == old
    tier = found
    assert tier.clean_up(None, late + 2 * DAY_MS) == []
    assert objects(driver) == old[2:]
    assert tier.clean_up(lambda _topic: store_ms(26), late + 2 * DAY_MS) == []
    assert tier.clean_up(None, late + 2 * DAY_MS + 3_600_000) == []
    assert objects(driver) == old[5:]
    assert read_all(tier.queues[TOPIC, 0]) == list(range(25, 30))


def test_a_queue_goes_on_after_all_its_records_have_expired() -> None:
    driver = MemoryDriver()
    tier = open_objects_tier(driver)
    append_next(tier, one(5))
    assert tier.clean_up(lambda _topic: 1 << 60, BEGIN_MS) == []
    for _ in range(3):
        tier = open_objects_tier(driver)
        queue = tier.queues[TOPIC, 0]
        assert (queue.min_offset, queue.commit_offset) == (5, 5)
        assert tier.clean_up(lambda _topic: 0, BEGIN_MS) == []
    append_next(tier, one(5))
    tier = open_objects_tier(driver)
    assert read_all(tier.queues[TOPIC, 0]) == list(range(5, 10))
    tier.delete(TOPIC, 0)
    tier.sync()
    assert not open_objects_tier(driver).queues


def test_a_topic_made_again_is_another_life() -> None:
    driver = MemoryDriver()
    tier = open_objects_tier(driver)
    append_next(tier, {(TOPIC, 0): 5, (TOPIC, 1): 5})
    tier.delete(TOPIC, 0)
    assert tier.create([(TOPIC, 0)], BEGIN_MS) is None
    # The deletion is kept before anything of the new life is.
    assert list(open_objects_tier(driver).queues) == [(TOPIC, 1)]
    tier = open_objects_tier(driver)
    append_next(tier, one(2))
    found = open_objects_tier(driver)
    assert read_all(found.queues[TOPIC, 0]) == [0, 1]
    hits = found.index.query(TOPIC, "k1", 0, 1 << 60, 9)
    assert not isinstance(hits, Failure)
    assert len(hits) == 2


def test_objects_without_an_entry_are_swept_after_a_day() -> None:
    driver = MemoryDriver()
    tier = open_objects_tier(driver)
    append_next(tier, one(2))
    folder = tier.folder
    left = f"{folder}/{tier.manifest.new_name('data', BEGIN_MS)}"
    foreign = f"{folder}/data/notes.txt"
    for path in (left, foreign):
        driver.put(path, b"x")
    assert tier.clean_up(None, BEGIN_MS + DAY_MS) == []
    assert left in objects(driver)
    assert tier.clean_up(None, BEGIN_MS + 2 * DAY_MS) == []
    assert left not in objects(driver)
    assert foreign in objects(driver)
    assert read_all(tier.queues[TOPIC, 0]) == [0, 1]


# -- merge -----------------------------------------------------------------------------------------


# Small numbers, so that all happens soon.
FEW = ObjectSizes(runs=3, object_bytes=2500, tail=5, catalog_parts_min=9, catalog_parts_max=30)


def merge_all(tier: ObjectTier, now_ms: int = BEGIN_MS) -> None:
    while (merged := tier.merge(now_ms)) is True:
        pass
    assert merged is False, merged


@pytest.mark.parametrize("seed", range(5))
def test_merged_objects_have_the_same_records_and_keys(seed: int) -> None:
    rng, driver = Random(seed), MemoryDriver()
    tier = open_objects_tier(driver, sizes=FEW)
    names: list[Name] = [(TOPIC, 0), (TOPIC, 1), ("other", 0)]
    for _ in range(40):
        counts = {name: rng.randrange(1, 6) for name in rng.sample(names, rng.randrange(1, 4))}
        assert append_next(tier, counts, gap=rng.choice([0, 0, 0, 0, 5])) is None
    before = {name: read_all(tier.queues[name]) for name in names}
    hits = {key: tier.index.query(TOPIC, key, 0, 1 << 60, 999) for key in ("k7", "k50", "even")}
    piece_count = sum(len(tier.queues[name].state.pieces) for name in names)
    merge_all(tier)
    for found in (tier, open_objects_tier(driver, sizes=FEW)):
        assert {name: read_all(found.queues[name]) for name in names} == before, f"seed {seed}"
        for key, expected in hits.items():
            assert found.index.query(TOPIC, key, 0, 1 << 60, 999) == expected, f"seed {seed}"
        for name in names:
            queue = found.queues[name]
            for offset in rng.sample(before[name], 9):
                assert queue.offset_by_time(store_ms(offset)) == offset
    assert sum(len(tier.queues[name].state.pieces) for name in names) < piece_count
    levels = {stored.level for stored in tier.inventory.objects.values()}
    assert FINAL in levels
    # What was merged is deleted once no reader needs it.
    tier = open_objects_tier(driver, sizes=FEW)
    assert tier.clean_up(None, BEGIN_MS + 3 * DAY_MS) == []
    named = {f"{tier.folder}/{name}" for name in tier.inventory.objects}
    assert set(objects(driver)) == named


def test_objects_without_keys_are_queried_and_merged() -> None:
    """Such as of batches; object stores refuse a read of no bytes."""
    tier = open_objects_tier(MemoryDriver())
    tier.create([(TOPIC, 0)], BEGIN_MS)
    host = encode_host("10.0.0.1", 10911)
    for offset in range(20):
        data = encode_record(
            topic=TOPIC,
            queue_id=0,
            body=b"body",
            properties=b"",
            queue_offset=offset,
            physical_offset=offset,
            store_timestamp=store_ms(offset),
            born_host=host,
            store_host=host,
        )
        group = Group(RecordColumns.from_records(data), np.zeros(1, np.int64))
        assert tier.append_all({(TOPIC, 0): group}, BEGIN_MS) is None
    assert tier.index.query(TOPIC, "key", 0, 1 << 60, 10) == []
    while (merged := tier.merge(BEGIN_MS)) is True:
        pass
    assert merged is False
    assert len(tier.inventory.objects) == 5
    assert tier.index.query(TOPIC, "key", 0, 1 << 60, 10) == []
    units = tier.queues[TOPIC, 0].units(0, 100)
    assert not isinstance(units, Failure)
    assert len(units.units) == 20


def test_sixteen_uploads_of_64_mib_make_large_objects_of_a_queue() -> None:
    part = Part(0, 0, 0, 1, 0, 16 << 20, 0, 0, 0)
    sources = []
    for number in range(16):
        large = msgspec.structs.replace(part, first=number, log_base=number * part.log_bytes)
        small = msgspec.structs.replace(large, queue_id=1, log_base=number * 9, log_bytes=9)
        name = f"data/{number:02}"
        row = ObjectRow(name, 0, name, 0, 0, {TOPIC: [large, small]})
        sources.append(StoredObject(row))
    assert choose(sources[:15], set(), 16) == []
    assert choose(sources, {"data/03"}, 16) == []
    assert choose(sources, set(), 16) == sources
    planned = plan(sources, 64 << 20)
    assert [level for level, _ in planned] == [FINAL] * 4 + [1]
    counts = [[len(joint.pieces) for joint in joints] for _, joints in planned]
    assert counts == [[4], [4], [4], [4], [16]]


def test_what_is_dropped_during_a_merge_does_not_come_back() -> None:
    driver = MemoryDriver()
    tier = open_objects_tier(driver, sizes=FEW)
    for _ in range(3):
        append_next(tier, {(TOPIC, 0): 2, (TOPIC, 1): 2, (TOPIC, 2): 2})
    assert tier.merge(BEGIN_MS) is True
    tier.delete(TOPIC, 0)
    tier.create([(TOPIC, 0)], BEGIN_MS)
    append_next(tier, one(1))
    assert tier.clean_up(lambda _topic: store_ms(2), BEGIN_MS) == []
    merge_all(tier)
    for found in (tier, open_objects_tier(driver, sizes=FEW)):
        assert read_all(found.queues[TOPIC, 0]) in ([], [0])
        assert read_all(found.queues[TOPIC, 1]) == read_all(found.queues[TOPIC, 2]) == [2, 3, 4, 5]


def test_an_object_that_goes_during_a_merge_is_no_failure() -> None:
    store = FaultyDriver()
    tier = open_objects_tier(store, sizes=FEW)
    for queue_id in (0, 1, 1, 1):
        append_next(tier, {(TOPIC, queue_id): 2})

    def delete_first(_call: str) -> Fault:
        store.fail()
        tier.delete(TOPIC, 0)
        for days in (0, 5):
            assert tier.clean_up(None, BEGIN_MS + days * DAY_MS) == []
        return Fault.NONE

    store.fault = delete_first
    assert tier.merge(BEGIN_MS) is True
    merge_all(tier)
    assert read_all(tier.queues[TOPIC, 1]) == [0, 1, 2, 3, 4, 5]


def test_a_merge_may_take_days() -> None:
    class Slow(MemoryDriver):
        def put(self, path: str, data: Any, replaces: str = "") -> str | Failure:
            etag = super().put(path, data, replaces)
            if now_ms[0] == BEGIN_MS and "/data/" in path:
                now_ms[0] += 5 * DAY_MS
                assert tier.clean_up(None, now_ms[0]) == []
            return etag

    now_ms = [0]
    tier = open_objects_tier(Slow(), sizes=FEW)
    for _ in range(3):
        append_next(tier, one(3))
    now_ms[0] = BEGIN_MS
    assert tier.merge(BEGIN_MS) is True
    assert tier.clean_up(None, now_ms[0]) == []
    merge_all(tier, now_ms[0])
    assert len(tier.inventory.objects) == 1
    assert read_all(tier.queues[TOPIC, 0]) == list(range(9))


def test_what_the_manifest_names_without_an_answer_is_not_swept() -> None:
    store = FaultyDriver()
    tier = open_objects_tier(store)
    puts = iter([Fault.NONE, Fault.ANSWER_LOST])
    store.fault = lambda call: next(puts) if call == "put" else Fault.NONE
    failure = append_next(tier, one(3))
    assert failure is not None
    assert failure.kind is FailureKind.UNREACHABLE
    store.fault = lambda _call: Fault.NONE
    assert tier.clean_up(None, BEGIN_MS + 5 * DAY_MS) == []
    assert not objects(store.driver)
    found = open_objects_tier(store.driver)
    assert not found.queues
    assert append_next(found, one(3)) is None


def test_a_damaged_object_stops_only_its_own_merge() -> None:
    driver = MemoryDriver()
    tier = open_objects_tier(driver, sizes=FEW)
    for _ in range(5):
        append_next(tier, one(3))
    damaged = objects(driver)[1]
    driver.stored[damaged].data[3 * 28 + 27] ^= 1
    failure = tier.merge(BEGIN_MS)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.path) == (FailureKind.DAMAGED, damaged)
    merge_all(tier)
    assert len(tier.inventory.objects) < 5
    queue = open_objects_tier(driver, sizes=FEW).queues[TOPIC, 0]
    for first in (0, 6, 9, 12):
        assert read(queue, first, 3).queue_offset.tolist() == [first, first + 1, first + 2]
    assert isinstance(queue.records(queue.units(3, 3).units, np.arange(3, 6)), Failure)  # type: ignore[union-attr]


# -- faults ----------------------------------------------------------------------------------------


def test_a_kill_at_every_call() -> None:
    """A fixed sequence of calls, ended at each call of the store, before and after it."""

    def run(store: FaultyDriver) -> None:
        tier = open_objects_tier(store, sizes=FEW)
        for number in range(18):
            append_next(tier, {(TOPIC, 0): 2, (TOPIC, 1): 1}, BEGIN_MS + number)
        tier.clean_up(lambda _topic: store_ms(9), BEGIN_MS)
        while tier.merge(BEGIN_MS) is True:
            pass
        tier.delete(TOPIC, 1)
        tier.sync()
        tier.clean_up(None, BEGIN_MS + 3 * DAY_MS)

    whole = FaultyDriver()
    run(whole)
    for number in range(whole.calls.total()):
        for fault in (Fault.KILLED_BEFORE, Fault.KILLED_AFTER):
            store = FaultyDriver()
            left = iter(range(number, -1, -1))
            store.fault = lambda _call, left=left, fault=fault: Fault.NONE if next(left) else fault  # type: ignore[misc]
            with pytest.raises(Killed):
                run(store)
            tier = open_objects_tier(store.driver, BEGIN_MS, sizes=FEW)
            for queue in tier.queues.values():
                assert read_all(queue) == list(range(queue.min_offset, queue.commit_offset))
            append_next(tier, one(3))
            tier.clean_up(None, BEGIN_MS + 3 * DAY_MS)
            queue = open_objects_tier(store.driver, sizes=FEW).queues[TOPIC, 0]
            assert read_all(queue) == list(range(queue.min_offset, queue.commit_offset))
