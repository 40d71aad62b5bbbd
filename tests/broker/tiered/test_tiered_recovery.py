"""A tier after a crash, and beside metadata that is older, newer or lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Container
from pathlib import Path
from random import Random

import pytest

from headrace_broker.tiered.container.flat_queue import SegmentLimits
from headrace_broker.tiered.container.tier import Tier
from headrace_protocol.tier.driver import Failure, FailureKind
from headrace_protocol.tier.paths import QueueName
from tests.support.faulty_files import FaultRates, PowerCut, next_life
from tests.support.seeds import seeds
from tests.support.tiers import BEGIN_MS, TOPIC, append, open_tier, queue_of, read_all, store_ms

QUEUES = 3


class Model:
    """The messages that must be in the tier after any crash.

    durable: one past the last offset whose append was answered, by queue. tried: one past the last
    one whose append began. expired: the time before which segments were dropped.
    """

    def __init__(self) -> None:
        self.durable = [0] * QUEUES
        self.tried = [0] * QUEUES
        self.expired_ms = 0

    def check(self, tier: Tier, seed: int) -> None:
        for queue_id in range(QUEUES):
            queue = tier.queues.get((TOPIC, queue_id))
            if queue is None:
                assert not self.durable[queue_id], f"seed {seed} {tier.damaged}"
                continue
            assert self.durable[queue_id] <= queue.commit_offset, f"seed {seed}"
            assert queue.commit_offset <= self.tried[queue_id], f"seed {seed}"
            offsets = read_all(queue)
            assert offsets == list(range(queue.min_offset, queue.commit_offset)), f"seed {seed}"
            is_kept = not offsets or store_ms(offsets[0]) <= max(self.expired_ms, store_ms(0))
            assert is_kept, f"seed {seed}"
            self._check_times(tier, queue_id, seed)
            self.durable[queue_id] = queue.commit_offset

    def _check_times(self, tier: Tier, queue_id: int, seed: int) -> None:
        queue = tier.queues[TOPIC, queue_id]
        for row in queue.units_file.segments:
            if row.size:
                first, end = row.base_offset // 20, row.end // 20
                assert row.begin_timestamp == store_ms(first), f"seed {seed}"
                assert row.end_timestamp in {store_ms(end - 1), store_ms(end)}, f"seed {seed}"

    def work(self, tier: Tier, rng: Random) -> None:
        """Append, save, expire and delete at random until the power goes."""
        while True:
            queue_id = rng.randrange(QUEUES)
            queue = queue_of(tier, queue_id)
            match rng.randrange(12):
                case 0:
                    tier.metadata.save()
                case 1:
                    self.expired_ms = max(self.expired_ms, store_ms(queue.commit_offset // 2))
                    tier.expire(TOPIC, queue_id, store_ms(queue.commit_offset // 2), BEGIN_MS)
                case 2:
                    tier.sweep()
                case _:
                    count = rng.randrange(1, 25)
                    # What a failed append left may be found after a crash, and is as good.
                    tried = queue.commit_offset + count
                    self.tried[queue_id] = max(self.tried[queue_id], tried)
                    append(queue, count)
                    self.durable[queue_id] = queue.commit_offset


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(400))
@pytest.mark.parametrize("end", ["power cut", "kill", "either"])
def test_nothing_is_lost_or_repeated_by_a_crash(tmp_path: Path, seed: int, end: str) -> None:
    rng, model = Random(f"{seed} {end}"), Model()
    root = tmp_path / "disk"
    (root / "config").mkdir(parents=True)
    rates = FaultRates(write=0.02, sync=0.02)
    life = next_life(root, rng, rates)
    for _ in range(4):
        after = rng.randrange(5, 150)
        is_kill = end == "kill" or (end == "either" and rng.random() < 0.5)
        if is_kill:
            life.kill_after = after
        else:
            life.cut_after = after
        try:
            tier = open_tier(root, files=life)
            model.check(tier, seed)
            model.work(tier, rng)
        except (PowerCut, OSError, AssertionError) as error:
            if isinstance(error, AssertionError) and "seed" in str(error):
                raise
        if is_kill:
            life.kill()
        else:
            life.cut_power()
        life = next_life(root, rng, rates, life)
    life.is_calm = True
    model.check(open_tier(root, files=life), seed)


def test_units_torn_by_a_power_cut_are_cut(tmp_path: Path) -> None:
    """The last unit is whole, but one of those written with it is not."""
    for at, byte_count in ((3, 20), (5, 8), (7, 1)):
        root = tmp_path / str(at)
        tier = open_tier(root, limits=SegmentLimits())
        append(queue_of(tier), 10)
        tier.metadata.save()
        append(queue_of(tier), 10)
        (units,) = (root / "tier").rglob("CONSUME_QUEUE/*")
        data = bytearray(units.read_bytes())
        end = (10 + at + 1) * 20
        data[end - byte_count : end] = b"\x7f" * byte_count
        units.write_bytes(data)
        queue = queue_of(open_tier(root, limits=SegmentLimits()))
        assert queue.commit_offset == 10 + at
        append(queue, 20)
        assert read_all(queue) == [*range(30 + at)]


# -- the metadata and the files differ -------------------------------------------------------------


def filled(root: Path, count: int = 100) -> Tier:
    tier = open_tier(root)
    for queue_id in range(2):
        for _ in range(count // 10):
            append(queue_of(tier, queue_id), 10)
    tier.metadata.save()
    return tier


def metadata_file(root: Path) -> Path:
    return root / "config" / "tieredStoreMetadata.json"


def test_metadata_may_be_much_older_than_the_files(tmp_path: Path) -> None:
    tier = filled(tmp_path, 20)
    old = metadata_file(tmp_path).read_bytes()
    for _ in range(10):
        append(tier.queues[TOPIC, 0], 20)
    tier.metadata.save()
    rows = tier.queues[TOPIC, 0].units_file.segments
    metadata_file(tmp_path).write_bytes(old)
    again = open_tier(tmp_path)
    queue = again.queues[TOPIC, 0]
    assert read_all(queue) == list(range(220))
    found = queue.units_file.segments
    assert [row.base_offset for row in found] == [row.base_offset for row in rows]
    assert [row.begin_timestamp for row in found] == [row.begin_timestamp for row in rows]
    append(queue, 10)
    assert read_all(queue) == list(range(230))


def test_lost_metadata_is_rebuilt(tmp_path: Path) -> None:
    tier = filled(tmp_path)
    tier.expire(TOPIC, 0, store_ms(50), BEGIN_MS)
    least = tier.queues[TOPIC, 0].min_offset
    shutil.rmtree(tmp_path / "config")
    again = open_tier(tmp_path)
    assert not again.queues
    assert again.rebuild(BEGIN_MS) is None
    assert not again.damaged
    assert read_all(again.queues[TOPIC, 0]) == list(range(least, 100))
    assert read_all(again.queues[TOPIC, 1]) == list(range(100))
    assert open_tier(tmp_path).queues.keys() == again.queues.keys()


def test_metadata_of_another_broker_is_left_alone(tmp_path: Path) -> None:
    tier = filled(tmp_path)
    name = QueueName("other", TOPIC, 9)
    tier.metadata.set_queue(name, 0, 5, BEGIN_MS)
    tier.metadata.save()
    again = open_tier(tmp_path)
    assert set(again.queues) == {(TOPIC, 0), (TOPIC, 1)}
    assert again.metadata.queue(name) is not None


def test_a_folder_emptied_behind_our_back_begins_anew(tmp_path: Path) -> None:
    filled(tmp_path)
    shutil.rmtree(tmp_path / "tier")
    queue = open_tier(tmp_path).queues[TOPIC, 0]
    assert (queue.min_offset, queue.commit_offset) == (0, 0)
    append(queue, 10, first=70)
    assert read_all(queue) == list(range(70, 80))


def segment(tier: Tier, root: Path, kind: str, number: int) -> Path:
    queue = tier.queues[TOPIC, 0]
    file = queue.log if kind == "log" else queue.units_file
    return root / "tier" / file.address.segment_path(file.segments[number].base_offset)


def test_a_missing_first_segment_has_expired(tmp_path: Path) -> None:
    tier = filled(tmp_path)
    segment(tier, tmp_path, "log", 0).unlink()
    queue = open_tier(tmp_path).queues[TOPIC, 0]
    assert queue.min_offset > 0
    assert read_all(queue) == list(range(queue.min_offset, 100))


def test_a_segment_missing_in_between_is_reported_by_reads(tmp_path: Path) -> None:
    tier = filled(tmp_path)
    segment(tier, tmp_path, "units", 3).unlink()
    queue = open_tier(tmp_path).queues[TOPIC, 0]
    failure = queue.units(queue.units_file.segments[3].base_offset // 20, 5)
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.MISSING
    assert queue.commit_offset == 100


DAMAGES: dict[str, tuple[dict[str, Callable[[bytes], bytes]], Container[int]]] = {
    "a record is cut": ({"log": lambda data: data[:-3]}, {99}),
    "records are zeros": ({"log": lambda data: bytes(len(data))}, range(81, 100)),
    "both are torn": (
        {"log": lambda data: data + b"torn record", "units": lambda data: data + b"torn unit"},
        {100},
    ),
}


@pytest.mark.parametrize(("damages", "ends"), DAMAGES.values(), ids=DAMAGES)
def test_units_without_whole_records_are_cut(
    tmp_path: Path, damages: dict[str, Callable[[bytes], bytes]], ends: Container[int]
) -> None:
    tier = filled(tmp_path)
    for kind, damage in damages.items():
        path = segment(tier, tmp_path, kind, -1)
        path.write_bytes(damage(path.read_bytes()))
    queue = open_tier(tmp_path).queues[TOPIC, 0]
    assert queue.commit_offset in ends
    append(queue, 110 - queue.commit_offset)
    assert read_all(queue) == list(range(110))


def test_records_without_any_units_are_not_overwritten(tmp_path: Path) -> None:
    tier = filled(tmp_path)
    address = tier.queues[TOPIC, 0].units_file.address
    shutil.rmtree(tmp_path / "tier" / address.path)
    again = open_tier(tmp_path)
    assert (TOPIC, 0) not in again.queues
    failure = again.damaged[TOPIC, 0]
    assert failure.kind is FailureKind.DAMAGED
    assert address.path in str(failure)
    assert again.sweep() is None
    assert any((tmp_path / "tier" / tier.queues[TOPIC, 0].log.address.path).iterdir())
    assert read_all(again.queues[TOPIC, 1]) == list(range(100))


def test_a_first_append_that_was_cut_short_is_repeated(tmp_path: Path) -> None:
    queue = queue_of(open_tier(tmp_path))
    append(queue, 5)
    shutil.rmtree(tmp_path / "tier" / queue.units_file.address.path)
    again = open_tier(tmp_path)
    queue = again.queues[TOPIC, 0]
    assert queue.commit_offset == 0
    append(queue, 7)
    assert read_all(queue) == list(range(7))


def test_a_topic_is_deleted_although_the_first_try_was_cut_short(tmp_path: Path) -> None:
    tier = filled(tmp_path)
    tier.metadata.remove_queue(QueueName("broker", TOPIC, 0))
    tier.metadata.save()
    again = open_tier(tmp_path)
    assert (TOPIC, 0) not in again.queues
    queue = queue_of(again)
    append(queue, 5, first=3)
    assert read_all(queue) == list(range(3, 8))


def test_leftovers_of_the_last_topic_do_not_return(tmp_path: Path) -> None:
    """Metadata without queues is not lost metadata."""
    tier = filled(tmp_path)
    for queue_id in range(2):
        tier.metadata.remove_queue(QueueName("broker", TOPIC, queue_id))
    tier.metadata.save()
    again = open_tier(tmp_path)
    assert again.start(BEGIN_MS) is None
    assert not again.queues
    assert again.sweep() is None
    assert not list((tmp_path / "tier").rglob("COMMIT_LOG/*"))
