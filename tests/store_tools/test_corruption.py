"""Changed bytes; ``python -m tests.store_tools.corruption`` tries thousands."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from headrace_broker.store.files.file_seal import StoreDamaged
from tests.store_tools.corruption import (
    Flip,
    Subject,
    flip_of,
    fsck_outcome,
    start_outcome,
    subjects,
)
from tests.support.damage import fill_store
from tests.support.stores import open_store

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Subject]:
    folder: Path = tmp_path_factory.mktemp("corruption")
    return subjects(folder)


@pytest.mark.parametrize(
    "seeds",
    # Few seeds are harmless to fsck: 119 is the first.
    [range(100, 140), pytest.param(range(200), marks=pytest.mark.long)],
    ids=["40 bytes", "200 bytes"],
)
def test_a_changed_byte_is_found_or_does_no_harm(seeds: range, stores: list[Subject]) -> None:
    outcomes = set()
    for seed in seeds:
        subject = stores[seed % len(stores)]
        flip = flip_of(subject, random.Random(seed))
        outcomes |= {fsck_outcome(subject, flip), start_outcome(subject, flip)}
    assert outcomes == {
        "found by fsck",
        "harmless to fsck",
        "found at the start",
        "found when read",
        "harmless to a start",
    }


def test_the_seal_that_a_clean_stop_leaves_is_checked(tmp_path: Path) -> None:
    root = tmp_path / "store"
    fill_store(root)
    Flip(Path(f"commitlog/{4096:020d}"), 16, 1).apply(root)  # the user's flag: no other checksum
    store = open_store(root)
    queue_offsets = [(q, o) for q in store.queues for o in range(store.source(q).max_offset())]
    refused = []
    for queue, queue_offset in queue_offsets:
        try:
            store.source(queue).get(queue_offset, 1, 1 << 20, None)
        except StoreDamaged as error:
            refused.append(error.path.name)
    assert set(refused) == {f"{4096:020d}"}
    assert len(refused) < len(queue_offsets)
    store.close()


def test_a_peer_that_moves_a_files_time_voids_its_seal(tmp_path: Path) -> None:
    root = tmp_path / "store"
    fill_store(root)
    path = root / "consumequeue/A/0" / f"{0:020d}"
    os.utime(path)
    Flip(path.relative_to(root), 12, 1).apply(root)
    store = open_store(root)
    assert store.source(store.queue("A", 0)).get(0, 1, 1 << 20, None).count == 1
    store.close()
