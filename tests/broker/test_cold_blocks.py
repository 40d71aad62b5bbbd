"""Messages of the tier that stay in memory, and the number read ahead."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import numpy as np
import pytest

from headrace_broker.cold.blocks import ReadBlocks
from headrace_broker.cold.cursors import ReadCursors
from headrace_broker.cold.queue import ReadBlock
from headrace_protocol.columns import UNIT_DTYPE, RecordColumns

EXPIRE_S = 15.0
# Queues are only compared.
QUEUE: Any = "queue"
ALL = (QUEUE, None)
SOME = (QUEUE, frozenset({1}))


def block(asked: int, count: int = 100) -> ReadBlock:
    units = np.zeros(count, UNIT_DTYPE)
    records = RecordColumns.from_records(b"")
    return ReadBlock(asked, asked + count, np.arange(asked, asked + count), units, records)


def new_blocks(bytes_max: int = 64 << 20) -> ReadBlocks:
    return ReadBlocks(EXPIRE_S, 4096, bytes_max)


def read(blocks: ReadBlocks, begin: int, end: int, now_s: float, stream: Any = ALL) -> None:
    """One reader's pull."""
    blocks.note_read(stream, begin, end, end - begin, now_s)


def test_a_block_goes_once_its_only_reader_has_read_it_out() -> None:
    blocks = new_blocks()
    blocks.put(ALL, block(0), 0)
    read(blocks, 0, 50, 0)
    assert len(blocks) == 1
    read(blocks, 50, 100, 0)
    assert (len(blocks), blocks.byte_count, blocks.message_count) == (0, 0, 0)


def test_a_block_stays_until_the_last_of_its_readers_has_read_it() -> None:
    blocks = new_blocks()
    blocks.put(ALL, block(0), 0)
    for _ in range(3):  # as many clients, of whatever group
        read(blocks, 0, 10, 0)
    for last in (False, False, True):
        read(blocks, 10, 100, 0.5)
        assert len(blocks) == (not last)


@pytest.mark.parametrize(("speed", "is_kept"), [(100, True), (10, False)])
def test_a_block_waits_for_a_reader_who_comes_before_it_expires(speed: int, is_kept: bool) -> None:
    blocks = new_blocks()
    read(blocks, 0, 10, 0)
    read(blocks, 10, 10 + 2 * speed, 2)
    blocks.put(ALL, block(1000), 2)
    read(blocks, 1000, 1100, 2)
    assert len(blocks) == is_kept


def test_a_reader_that_stands_still_holds_nothing() -> None:
    blocks = new_blocks()
    read(blocks, 0, 1000, 0)
    read(blocks, 1000, 2000, 1)
    blocks.put(ALL, block(3000), 1)
    read(blocks, 3000, 3100, 1)
    assert len(blocks) == 1
    for now_s in (2, 5, 8):
        blocks.find(ALL, 3000, now_s)
    blocks.expire(9)
    assert len(blocks) == 1  # at 1,000 messages in 8 s it comes in time
    blocks.expire(14)
    assert len(blocks) == 0


def test_a_block_that_was_just_fetched_waits_for_its_request() -> None:
    blocks = new_blocks()
    blocks.put(ALL, block(0), 0)
    blocks.expire(0.9)
    assert len(blocks) == 1
    blocks.expire(1)
    assert len(blocks) == 0


def test_a_block_that_is_read_on_without_a_look_up_stays() -> None:
    blocks, read_on = new_blocks(), block(0)
    blocks.put(ALL, read_on, 0)
    read_on.is_used = True
    for now_s, is_kept in ((EXPIRE_S, True), (2 * EXPIRE_S, False)):
        blocks.expire(now_s)
        assert (len(blocks) == 1) == is_kept


def test_a_reader_that_was_not_noted_on_its_way_keeps_its_window() -> None:
    blocks = new_blocks()
    read(blocks, 0, 32, 0)
    blocks.move(ALL, 32, 96, 0)
    assert (blocks.window(ALL, 32), blocks.window(ALL, 96)) == (0, 128)
    blocks.move(ALL, 32, 96, 0)  # nobody is there any more
    assert blocks.window(ALL, 96) == 128


def test_blocks_of_all_tags_serve_readers_of_some_and_not_the_other_way() -> None:
    blocks = new_blocks()
    read(blocks, 0, 10, 0, SOME)
    blocks.put(ALL, block(10), 0)
    read(blocks, 10, 110, 0, ALL)
    assert len(blocks) == 1
    read(blocks, 10, 110, 0, SOME)
    assert len(blocks) == 0
    read(blocks, 110, 120, 0, ALL)
    blocks.put(SOME, block(120), 0)
    read(blocks, 110, 220, 0, SOME)
    assert len(blocks) == 0


def test_the_window_grows_by_a_batch_with_each_read_and_halves_with_an_expired_block() -> None:
    blocks = new_blocks()
    assert blocks.window(ALL, 0) == 0
    for begin, window in ((0, 64), (32, 96), (64, 128)):
        read(blocks, begin, begin + 32, begin / 100)
        assert blocks.window(ALL, begin + 32) == window
    blocks.put(ALL, block(96, 128), 1)
    read(blocks, 96, 128, 1)
    blocks.expire(1 + EXPIRE_S)
    assert (len(blocks), blocks.window(ALL, 128)) == (0, 80)
    read(blocks, 128, 4224, 17)
    assert blocks.window(ALL, 4224) == 4096
    blocks.expire(17 + 4 * EXPIRE_S + 1)
    assert blocks.window(ALL, 4224) == 0


def test_a_new_scan_takes_no_block_that_another_reader_needs_sooner() -> None:
    blocks = new_blocks(3 * block(0).held_bytes)
    read(blocks, 0, 50, 0)
    read(blocks, 50, 100, 2)  # 25 messages/s
    for asked in (100, 300, 200):  # of which the second is needed last
        blocks.put(ALL, block(asked), 2)
    scan: Any = ("another queue", None)
    for number in range(5):
        now_s, begin = 2 + number / 10, 100 * number
        blocks.put(scan, block(begin), now_s)
        assert blocks.find(scan, begin, now_s)
        read(blocks, begin, begin + 100, now_s, scan)
    there = [asked for asked in (100, 200, 300) if blocks.find(ALL, asked, 3)]
    assert there == [100, 200]


def test_nothing_is_left_of_random_readers() -> None:
    seed = Random().randrange(1 << 32)
    print(f"seed {seed}")  # noqa: T201
    rng, blocks, now_s = Random(seed), new_blocks(), 0.0
    positions = [(rng.choice((ALL, SOME)), rng.randrange(2000)) for _ in range(20)]
    for _ in range(3000):
        now_s += rng.choice((0, 0.01, 0.5, 0, 0.01, 4))
        number = rng.randrange(len(positions))
        stream, begin = positions[number]
        found = blocks.find(stream, begin, now_s)
        if found is None:
            found = block(begin, max(blocks.window(stream, begin), 10))
            blocks.put(stream, found, now_s)
        end = min(begin + 10, found.end)
        read(blocks, begin, end, now_s, stream)
        positions[number] = stream, rng.choice((end, end, end, rng.randrange(2000)))
        if rng.random() < 0.1:
            blocks.expire(now_s)
    blocks.expire(math.inf)
    assert (len(blocks), blocks.byte_count, blocks.message_count) == (0, 0, 0)
    assert not any(blocks.window(stream, at) for stream in (ALL, SOME) for at in range(5000))


def test_readers_at_random_offsets_are_forgotten() -> None:
    cursors = ReadCursors()
    for begin in range(0, 10_000, 10):
        cursors.move(ALL, begin, begin + 1, 0)
    assert len([*cursors.of(ALL)]) == 256
    streams: list[Any] = [(f"queue {number}", None) for number in range(10_000)]
    for stream in streams:
        cursors.move(stream, 0, 1, 0)
    assert not any(cursors.of(ALL))
    assert sum(len([*cursors.of(stream)]) for stream in streams) == 4096
