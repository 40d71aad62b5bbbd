"""Retention of single topics: queues begin later, the log stays as it is."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from headrace_broker.store.log.batch_units import BATCH_UNIT_BYTES
from headrace_broker.store.retention.rules import TRUST_S
from headrace_broker.store.retention.topic_floors import TopicLimit
from headrace_broker.store.settings import Retention
from headrace_broker.store.store_source import GetStatus
from tests.support.stores import SetClock, crash, new_store, open_store, put, read_all, units_from

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping
    from pathlib import Path

    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.store.retention.disk_forecast import LowestUnconsumed

MINUTE_MS = 60_000
NEVER = Retention(delete_hours=frozenset(), clean_ratio=1.0, force_ratio=1.0, refuse_ratio=1.0)


def timed_store(root: Path, count: int = 30, queue_count: int = 2) -> MessageStore:
    """Messages a minute apart, the last one now, in turn to the queues of topic T."""
    clock = SetClock()
    store = open_store(root, clock, retention=NEVER, ring_rows=1024)
    clock.ms -= count * MINUTE_MS
    for number in range(count):
        clock.ms += MINUTE_MS
        put(store, store.queue("T", number % queue_count), bytes(300))
    return store


def limit(store: MessageStore, minutes: float | None = None, size: int | None = None) -> None:
    reserved_ms = None if minutes is None else round(minutes * MINUTE_MS)
    store.cleaner.topic_limits = lambda: {"T": TopicLimit(reserved_ms, size)}


def firsts(store: MessageStore) -> list[int]:
    return [store.source(queue).min_offset() for queue in store.queues_of("T")]


def unconsumed(lowest: Mapping[int, int]) -> LowestUnconsumed:
    def look(
        _topic: str, queue_ids: Iterable[int]
    ) -> Generator[None, None, Mapping[int, tuple[int, str]]]:
        yield
        return {queue_id: (lowest[queue_id], "g") for queue_id in queue_ids if queue_id in lowest}

    return look


def shown_bytes(store: MessageStore) -> int:
    return sum(
        size
        for queue in store.queues_of("T")
        for _, size, _ in units_from(queue.consume_queue, store.source(queue).min_offset())
    )


async def test_what_is_older_than_its_topic_allows_is_not_shown(tmp_path: Path) -> None:
    store = timed_store(tmp_path)
    put(store, store.queue("other", 0))
    limit(store, minutes=9.5)
    await store.cleaner.round()
    assert firsts(store) == [10, 10]
    queue = store.queue("T", 0)
    assert store.source(queue).get(9, 9, 9, None).status is GetStatus.OFFSET_TOO_SMALL
    assert store.source(queue).get(9, 9, 9, None).next_offset == 10
    assert [message.queue_offset for message in read_all(store, queue)] == list(range(10, 15))
    assert store.source(queue).offset_by_time(0) == 10
    assert store.source(store.queue("other", 0)).min_offset() == 0
    assert store.commit_log.min_offset == 0


async def test_when_all_has_expired_the_queue_is_empty_and_goes_on(tmp_path: Path) -> None:
    store = timed_store(tmp_path)
    limit(store, minutes=9)
    assert isinstance(store.clock, SetClock)
    store.clock.ms += 50 * MINUTE_MS
    await store.cleaner.round()
    assert firsts(store) == [15, 15]
    queue = store.queue("T", 0)
    assert store.source(queue).get(15, 9, 9, None).status is GetStatus.OFFSET_OVERFLOW_ONE
    assert store.source(queue).get(14, 9, 9, None).next_offset == 15
    put(store, queue, b"new")
    assert [message.body for message in read_all(store, queue)] == [b"new"]


async def test_the_newest_bytes_of_a_topic_stay_over_all_queues(tmp_path: Path) -> None:
    store = timed_store(tmp_path)
    size = store.queue("T", 0).consume_queue.unit(0)[1]
    limit(store, size=10 * size + 1)
    await store.cleaner.round()
    assert firsts(store) == [10, 10]
    for _ in range(3):  # all into one queue: both give
        put(store, store.queue("T", 1), bytes(300))
    await store.cleaner.round()
    assert firsts(store) == [12, 11]
    limit(store, size=size - 1)
    await store.cleaner.round()
    assert firsts(store) == [15, 18]


async def test_time_and_size_together(tmp_path: Path) -> None:
    store = timed_store(tmp_path)
    size = store.queue("T", 0).consume_queue.unit(0)[1]
    limit(store, minutes=19.5, size=10 * size)
    await store.cleaner.round()
    assert firsts(store) == [10, 10]
    store.cleaner.topic_limits = dict
    put(store, store.queue("T", 0))
    await store.cleaner.round()
    assert firsts(store) == [10, 10]  # what was given up does not come back


async def test_what_a_group_has_not_consumed_is_shown(tmp_path: Path) -> None:
    store = timed_store(tmp_path)
    size = store.queue("T", 0).consume_queue.unit(0)[1]
    consumed = {0: 3}
    store.cleaner.unconsumed = lambda: unconsumed(consumed)
    limit(store, minutes=9.5)
    await store.cleaner.round()
    assert firsts(store) == [3, 10]
    limit(store, size=4 * size)
    await store.cleaner.round()
    assert firsts(store) == [3, 15]
    consumed[0] = 99
    await store.cleaner.round()
    assert firsts(store) == [11, 15]
    consumed[0] = 0  # a reset to before the beginning holds what is left
    put(store, store.queue("T", 0), bytes(300))
    await store.cleaner.round()
    assert firsts(store) == [11, 15]
    store.cleaner.retention = Retention(removes_unconsumed=True)
    await store.cleaner.raise_floors()
    assert firsts(store) == [12, 15]


@pytest.mark.parametrize("is_batch", [False, True])
async def test_a_clean_up_reads_units_in_threads_only(tmp_path: Path, is_batch: bool) -> None:
    """The loop reads them through maps, of which there are none afterwards."""
    clock = SetClock()
    store = new_store(tmp_path, clock, retention=NEVER, batch_queue_file_bytes=4 * BATCH_UNIT_BYTES)
    store.is_batch_topic = lambda _topic: is_batch
    store.load()
    queue = store.queue("T", 0)
    while len(store.commit_log.files.files) < 4:
        clock.ms += MINUTE_MS
        put(store, queue, bytes(300))
    store.index_tick()
    consume_queue = queue.consume_queue
    count = consume_queue.max_offset
    store.cleaner.detached += store.commit_log.files.detach_first(1)
    gone = store.source(queue).min_offset()
    limit(store, minutes=count - gone - 5.5)
    store.cleaner.unconsumed = lambda: unconsumed({0: count - 2})
    consume_queue.unmap()
    await store.cleaner.round()
    assert not any(file.is_mapped for file in consume_queue.files.files)
    assert consume_queue.first_number > 0
    assert firsts(store) == [gone + 5]
    assert store.cleaner.status().oldest_unconsumed == "group g, topic T, queue 0"


async def test_after_a_restart_it_is_as_before(tmp_path: Path) -> None:
    store = timed_store(tmp_path)
    limit(store, minutes=9.5)
    await store.cleaner.round()
    before = firsts(store)
    crash(store)
    again = open_store(tmp_path, store.clock, retention=NEVER)
    limit(again, minutes=9.5)
    await again.cleaner.raise_floors()
    assert firsts(again) == before


async def test_a_topic_that_is_deleted_and_made_again_begins_anew(tmp_path: Path) -> None:
    store = timed_store(tmp_path)
    limit(store, size=1)
    await store.cleaner.round()
    assert firsts(store) == [15, 15]
    store.delete_topic("T")
    await store.cleaner.round()
    limit(store, size=1 << 20)
    put(store, store.queue("T", 0), b"first")
    await store.cleaner.round()
    assert firsts(store) == [0]
    assert [message.body for message in read_all(store, store.queue("T", 0))] == [b"first"]


async def test_a_queue_that_begins_late(tmp_path: Path) -> None:
    store = timed_store(tmp_path, count=4)
    late = store.queue("T", 5)
    late.next_offset = 13  # as after a loss of its first files: blank units come first
    put(store, late, bytes(300))
    limit(store, minutes=60)
    await store.cleaner.round()
    assert firsts(store) == [0, 0, 13]
    size = late.consume_queue.unit(13)[1]
    limit(store, size=size)
    await store.cleaner.round()
    assert firsts(store) == [2, 2, 13]


async def test_the_log_was_removed_below(tmp_path: Path) -> None:
    store = timed_store(tmp_path, count=40)
    store.index_tick()
    store.flusher.flush_now()
    limit(store, minutes=25.5)
    await store.cleaner.round()
    assert firsts(store) == [7, 7]
    all_hours = frozenset(range(24))
    store.cleaner.retention = Retention(delete_hours=all_hours, reserved_ms=-(1 << 50))
    await store.cleaner.round()
    assert firsts(store)[0] > 7
    store.cleaner.retention = NEVER
    await store.cleaner.round()
    size = store.queue("T", 0).consume_queue.unit(firsts(store)[0])[1]
    limit(store, size=2 * size)
    await store.cleaner.round()
    assert firsts(store) == [19, 19]


async def test_what_left_with_the_log_is_not_counted_any_more(tmp_path: Path) -> None:
    store = timed_store(tmp_path, count=40)
    store.index_tick()
    store.flusher.flush_now()
    size = store.queue("T", 0).consume_queue.unit(0)[1]
    limit(store, size=40 * size)
    all_hours = frozenset(range(24))
    store.cleaner.retention = Retention(delete_hours=all_hours, reserved_ms=-(1 << 50))
    await store.cleaner.round()  # counts them, and then the oldest files of the queues go too
    begun = firsts(store)
    assert min(begun) > 10
    store.cleaner.retention = NEVER
    for number in range(20):
        put(store, store.queue("T", number % 2), bytes(300))
    await store.cleaner.round()
    assert firsts(store) == begun


async def test_a_clock_that_jumps_hides_nothing(tmp_path: Path, autojump_clock: object) -> None:
    store = timed_store(tmp_path)
    limit(store, minutes=120)
    await store.cleaner.round()
    assert isinstance(store.clock, SetClock)
    store.clock.ms += round(TRUST_S * 1000) * 100
    await store.cleaner.round()
    assert firsts(store) == [0, 0]


@pytest.mark.parametrize("seed", range(4))
async def test_at_random(tmp_path: Path, seed: int) -> None:
    """The newest bytes up to the limit, nothing that expired, and never backwards."""
    dice = random.Random(seed)
    clock = SetClock()
    store = open_store(tmp_path, clock, retention=NEVER, ring_rows=1024)
    before: dict[int, int] = {}
    for _ in range(60):
        for _ in range(dice.randrange(8)):
            clock.ms += dice.randrange(MINUTE_MS)
            put(store, store.queue("T", dice.randrange(3)), bytes(dice.randrange(900)))
        size, minutes = dice.randrange(1, 9000), dice.randrange(1, 30)
        limit(store, minutes=minutes, size=size)
        await store.cleaner.raise_floors()
        assert shown_bytes(store) <= size
        for queue in store.queues_of("T"):
            first = store.source(queue).min_offset()
            assert first >= before.get(queue.queue_id, 0)
            before[queue.queue_id] = first
            for message in read_all(store, queue):
                assert message.store_timestamp > clock.ms - minutes * MINUTE_MS


async def test_what_was_given_up_does_not_come_back_with_a_start(tmp_path: Path) -> None:
    store = timed_store(tmp_path)
    limit(store, size=1)
    await store.cleaner.round()
    assert firsts(store) == [15, 15]
    crash(store)
    again = open_store(tmp_path, store.clock, retention=NEVER)  # without any limit
    assert firsts(again) == [15, 15]
    put(again, again.queue("T", 0), b"new")
    assert [message.body for message in read_all(again, again.queue("T", 0))] == [b"new"]


async def test_floors_are_those_of_one_life_of_a_topic(tmp_path: Path) -> None:
    store = timed_store(tmp_path)
    limit(store, size=1)
    await store.cleaner.round()
    assert firsts(store) == [15, 15]
    store.delete_topic("T")
    for number in range(20):
        put(store, store.queue("T", 0), b"%d" % number)
    store.close()
    again = open_store(tmp_path, store.clock, retention=NEVER)
    assert firsts(again) == [0]
    assert len(read_all(again, again.queue("T", 0))) == 20
