"""A location that hangs: what was abandoned may take effect later, and nothing is lost or twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headrace_broker.tiered.container.flat_queue import SegmentLimits
from headrace_broker.tiered.driver.memory import MemoryDriver
from headrace_protocol.tier.driver import Failure, FailureKind
from tests.support.hanging import Hanging, Patience, When
from tests.support.object_tiers import append_next, one, open_objects_tier
from tests.support.seeds import seeds
from tests.support.tiers import BEGIN_MS, TOPIC, append, block, open_tier, queue_of, read_all


def hang_at(location: Hanging, name: str, number: int, when: When) -> None:
    """Have one operation of this name hang, after so many others."""
    left = [number]

    def decide(called: str) -> When | None:
        if called == name:
            left[0] -= 1
            return when if left[0] == -1 else None
        return None

    location.hangs = decide


def fails(result: object) -> None:
    assert isinstance(result, Failure), result
    assert result.kind is FailureKind.UNREACHABLE, result


# -- files -----------------------------------------------------------------------------------------


def files_tier(tmp_path: Path, limits: SegmentLimits | None = None) -> Any:
    location, patience = Hanging(MemoryDriver()), Patience()
    tier = open_tier(tmp_path, patience.limited(location), limits=limits or SegmentLimits())
    return location, patience, tier


@pytest.mark.parametrize("when", When)
@pytest.mark.parametrize("number", [0, 1])
def test_a_late_append_is_stored_once(tmp_path: Path, number: int, when: When) -> None:
    """number: of the append that hangs, of records or of their units."""
    location, patience, tier = files_tier(tmp_path)
    queue = queue_of(tier)
    assert append(queue, 5) is None
    hang_at(location, "append", number, when)
    fails(patience.abandon(location, lambda: append(queue, 7)))
    assert queue.commit_offset == 5
    # A retry with more messages waits for what hangs.
    fails(append(queue, 20))
    location.release_all()
    patience.settle()
    assert append(queue, 20) is None
    assert read_all(queue) == [*range(25)]
    assert read_all(open_tier(tmp_path, location.driver).queues[TOPIC, 0]) == [*range(25)]


@pytest.mark.parametrize("when", When)
def test_a_late_cut_takes_nothing_that_was_appended_since(tmp_path: Path, when: When) -> None:
    location, patience, tier = files_tier(tmp_path)
    queue = queue_of(tier)
    hang_at(location, "append", 0, When.AT_ONCE)
    fails(patience.abandon(location, lambda: append(queue, 5)))
    location.release_all()
    patience.settle()
    hang_at(location, "cut", 0, when)
    fails(patience.abandon(location, lambda: append(queue, 5)))
    fails(append(queue, 5))
    location.release_all()
    patience.settle()
    assert append(queue, 5) is None
    assert read_all(queue) == [*range(5)]


def test_a_late_first_append_is_no_part_of_the_next_life(tmp_path: Path) -> None:
    location, patience, tier = files_tier(tmp_path)
    queue = queue_of(tier)
    hang_at(location, "append", 0, When.LATE)
    fails(patience.abandon(location, lambda: append(queue, 5)))
    # Its file is not made yet, so a listing would not show it.
    fails(tier.delete(TOPIC, 0))
    fails(tier.create([(TOPIC, 0)], BEGIN_MS))
    location.release_all()
    patience.settle()
    assert tier.create([(TOPIC, 0)], BEGIN_MS) is None
    queue = queue_of(tier)
    assert append(queue, 3) is None
    assert read_all(queue) == [*range(3)]


@pytest.mark.parametrize("when", When)
@pytest.mark.parametrize("number", [0, 1])
def test_a_late_part_of_an_index_file_is_not_in_the_next_one(
    tmp_path: Path, number: int, when: When
) -> None:
    location, patience = Hanging(MemoryDriver()), Patience()
    tier = open_tier(tmp_path, patience.limited(location), limits=SegmentLimits())
    queue_of(tier)
    for first in range(0, 60, 20):
        assert tier.append(TOPIC, 0, *block(first, 20), BEGIN_MS) is None
    index = tier.index
    hang_at(location, "append", number, when)
    fails(patience.abandon(location, lambda: index.upload(BEGIN_MS)))
    fails(index.upload(BEGIN_MS))
    location.release_all()
    patience.settle()
    assert index.upload(BEGIN_MS) is None
    for offset in range(60):
        hits = index.query(TOPIC, f"k{offset}", 0, 1 << 60, 10)
        assert not isinstance(hits, Failure)
        assert len(hits) == 1
    tier.close()


@pytest.mark.parametrize("seed", seeds(60))
def test_files_whatever_hangs(tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    location, patience, tier = files_tier(
        tmp_path, SegmentLimits(log_bytes=2000, units_bytes=200, log_age_ms=1 << 50)
    )
    queue = queue_of(tier)
    location.hangs = lambda _name: rng.choice([*When]) if rng.random() < 0.1 else None
    for _ in range(60):
        before, count = queue.commit_offset, rng.randrange(1, 12)
        patience.abandon(location, lambda: append(queue, count))  # noqa: B023
        assert before <= queue.commit_offset <= before + count, f"seed {seed}"
        while location.held and rng.random() < 0.5:
            location.release(rng.randrange(len(location.held)))
    location.release_all()
    patience.settle()
    assert append(queue, 1) is None
    assert queue.commit_offset > 20, f"seed {seed}"
    assert read_all(queue) == [*range(queue.commit_offset)], f"seed {seed}"
    tier.metadata.save()
    assert read_all(open_tier(tmp_path, location.driver).queues[TOPIC, 0]) == [
        *range(queue.commit_offset)
    ]


# -- objects ---------------------------------------------------------------------------------------


def objects_tier() -> Any:
    location, patience = Hanging(MemoryDriver()), Patience()
    return location, patience, open_objects_tier(patience.limited(location))


@pytest.mark.parametrize("when", When)
@pytest.mark.parametrize("number", [0, 1])
def test_a_late_put_is_stored_once(number: int, when: When) -> None:
    """number: of the put that hangs, of an object or of the manifest."""
    location, patience, tier = objects_tier()
    assert append_next(tier, one(5)) is None
    hang_at(location, "put", number, when)
    fails(patience.abandon(location, lambda: append_next(tier, one(7))))
    queue = tier.queues[TOPIC, 0]
    assert queue.commit_offset == 5
    if number:  # the manifest waits for what hangs
        fails(append_next(tier, one(20)))
    else:  # another name
        assert append_next(tier, one(20)) is None
    location.release_all()
    patience.settle()
    assert append_next(tier, one(25 - queue.commit_offset)) is None or number == 0
    assert read_all(queue) == [*range(25)]
    assert read_all(open_objects_tier(location.driver).queues[TOPIC, 0]) == [*range(25)]


def works(tier: Any, rng: Random, now_ms: int) -> Callable[[], Any]:
    match rng.randrange(8):
        case 0:
            return lambda: tier.merge(now_ms)
        case 1:
            return lambda: tier.clean_up(None, now_ms)
        case _:
            counts = {(TOPIC, number): rng.randrange(1, 9) for number in range(3)}
            return lambda: append_next(tier, counts, now_ms)


@pytest.mark.parametrize("seed", seeds(60))
def test_objects_whatever_hangs(seed: int) -> None:
    rng, now_ms = Random(seed), BEGIN_MS
    location, patience, tier = objects_tier()
    location.hangs = lambda _name: rng.choice([*When]) if rng.random() < 0.1 else None
    for _ in range(120):
        now_ms += rng.choice([1000, 60_000, 3_600_000])
        patience.abandon(location, works(tier, rng, now_ms))
        while location.held and rng.random() < 0.5:
            location.release(rng.randrange(len(location.held)))
    location.release_all()
    patience.settle()
    assert append_next(tier, one(1)) is None
    ends = {name: queue.commit_offset for name, queue in tier.queues.items()}
    assert len(ends) == 3, f"seed {seed}"
    for found in (tier, open_objects_tier(location.driver)):
        for name, end in ends.items():
            assert read_all(found.queues[name]) == [*range(end)], f"seed {seed}"
    assert min(ends.values()) > 30
