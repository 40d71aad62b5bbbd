"""No more queues are mapped than allowed, and none notices."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_broker.store.files.filesystem import Files
from headrace_broker.store.files.map_budget import MAPS_MAX, MapBudget, maps_max
from headrace_broker.store.message_store import MessageStore
from tests.support.stores import SetClock, crash, open_store, put, read_all

QUEUES = 20
MAPS = 4


class FewMaps(Files):
    def __init__(self) -> None:
        super().__init__()
        self.map_budget = MapBudget(MAPS)


def mapped_count(store: MessageStore) -> int:
    return sum(file.is_mapped for queue in store.queues for file in queue.consume_queue.files.files)


def open_few(root: Path) -> MessageStore:
    return open_store(root, SetClock(), FewMaps(), commit_log_file_bytes=1 << 16)


@pytest.mark.parametrize("is_clean", [True, False])
def test_queues_take_turns(tmp_path: Path, is_clean: bool) -> None:
    store = open_few(tmp_path)
    for _ in range(15):  # more than the ten units of a file
        for number in range(QUEUES):
            put(store, store.queue("t", number), b"body")
            assert mapped_count(store) <= MAPS
    bodies = [len(read_all(store, store.queue("t", number))) for number in range(QUEUES)]
    assert bodies == [15] * QUEUES
    assert mapped_count(store) <= MAPS
    store.close() if is_clean else crash(store)

    again = open_few(tmp_path)
    assert mapped_count(again) <= MAPS
    for number in range(QUEUES):  # to find out what is in memory takes a map, too
        assert len(read_all(again, again.queue("t", number))) == 15
        assert mapped_count(again) <= MAPS
    for number in range(QUEUES):
        queue = again.queue("t", number)
        put(again, queue, b"more")
        assert [message.body for message in read_all(again, queue)] == [b"body"] * 15 + [b"more"]


def test_a_clean_start_maps_no_queue(tmp_path: Path) -> None:
    store = open_store(tmp_path, SetClock())
    put(store, store.queue("t", 0), b"body")
    store.close()
    again = open_store(tmp_path, SetClock())
    assert mapped_count(again) == 0
    assert len(read_all(again, again.queue("t", 0))) == 1


@settings(max_examples=30, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=120))
def test_any_order_of_writes_and_reads(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, bool]]
) -> None:
    store = open_few(tmp_path_factory.mktemp("store"))
    counts = [0] * 10
    for number, is_write in steps:
        queue = store.queue("t", number)
        if is_write:
            put(store, queue, b"%d" % counts[number])
            counts[number] += 1
        else:
            bodies = [message.body for message in read_all(store, queue)]
            assert bodies == [b"%d" % index for index in range(counts[number])]
    assert mapped_count(store) <= MAPS


@pytest.mark.parametrize(
    ("open_files_max", "expected"),
    [(1024, 512), (1 << 20, MAPS_MAX), (resource.RLIM_INFINITY, MAPS_MAX)],
)
def test_the_limit_is_half_of_the_open_files(open_files_max: int, expected: int) -> None:
    assert maps_max(open_files_max) == expected
