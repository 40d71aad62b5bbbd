"""Searches of a queue in threads find what those on the loop find."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_broker.store.files.filesystem import Files
from headrace_broker.store.log.batch_units import BATCH_UNIT_BYTES, make_units
from headrace_broker.store.queues.batch_queue import BatchConsumeQueue
from headrace_broker.store.queues.cold_queue import ColdQueue
from headrace_broker.store.queues.consume_queue import UNIT_BYTES, ConsumeQueue

COUNTS = (5, 2, 1, 9, 1, 1, 32, 3, 7)


def plain_queue(folder: Path) -> ConsumeQueue:
    """Units at 0, 100, ..., with a gap at its beginning and another one among them."""
    queue = ConsumeQueue(folder / "consumequeue/T/0", 4 * UNIT_BYTES, Files())
    for number in range(10):
        queue.put(5 + number + 6 * (number > 6), number * 100, 50, 1)
    return queue


def batch_queue(folder: Path) -> ConsumeQueue:
    """Units at 0, 100, ..., with a gap at its beginning."""
    queue = BatchConsumeQueue(folder / "batchconsumequeue/T/0", 4 * BATCH_UNIT_BYTES, Files())
    for number, count in enumerate(COUNTS):
        first = 5 + sum(COUNTS[:number])
        queue.put_units(make_units([number * 100], [50], 1, 0, [first], [count]))
    return queue


QUEUES = {"plain": plain_queue, "batch": batch_queue}


@pytest.mark.parametrize("kind", QUEUES)
def test_a_thread_finds_what_the_loop_finds(tmp_path: Path, kind: str) -> None:
    queue = QUEUES[kind](tmp_path)
    cold = ColdQueue(queue)
    for queue_offset in range(queue.max_offset + 1):
        number = queue.number_of(queue_offset)
        assert cold.number_of(queue_offset) == number
        assert cold.offset_of(number) == queue.offset_of(number)
    for floor in range(queue.max_offset + 1):
        queue.raise_floor(floor)
        for log_min_offset in range(0, 1100, 50):
            before = ColdQueue(queue)
            first = queue.number_of(queue.min_offset(log_min_offset))
            assert before.first_visible(log_min_offset) == first
            assert ColdQueue(queue).first_visible(log_min_offset) == first
            at = queue.number_of(queue.first_at_or_after(log_min_offset))
            assert cold.first_at(log_min_offset) == at


@pytest.mark.parametrize("kind", QUEUES)
def test_of_a_deleted_queue_nothing_is_found(tmp_path: Path, kind: str) -> None:
    queue = QUEUES[kind](tmp_path)
    cold = ColdQueue(queue)
    queue.delete()
    assert cold.first_at(100) == cold.first_visible(100) == cold.end
