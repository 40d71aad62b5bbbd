"""One suite for queues of every kind: wherever its messages are, a client reads the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace_protocol.codes import ResponseCode
from tests.support.queue_sources import KINDS, Build, FilledQueue, Read

READS = pytest.mark.parametrize("read", [FilledQueue.pull, FilledQueue.bulk_pull])
Pull = Callable[..., Read]
# Most messages, and bytes of their records.
Limits = tuple[int, int]
LARGE = 1000, 1 << 20


@pytest.fixture(params=KINDS)
def build(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]


def bodies(queue: FilledQueue, tags: str = "t") -> dict[int, bytes]:
    found = queue.messages.items()
    return {at: message.body for at, message in found if message.tags.startswith(tags)}


def read_on(
    queue: FilledQueue, read: Pull, offset: int, limits: Limits = LARGE, **fields: Any
) -> dict[int, bytes]:
    """The messages of the first answer that has some, each between the offsets that it passes."""
    count_max, bytes_max = limits
    while offset < queue.end:
        answer = read(queue, offset, max_msg_nums=count_max, max_msg_bytes=bytes_max, **fields)
        assert answer.code in {ResponseCode.SUCCESS, ResponseCode.PULL_RETRY_IMMEDIATELY}
        assert (answer.min_offset, answer.max_offset) == (queue.low, queue.end)
        assert offset < answer.next_offset <= queue.end
        assert all(offset <= at < answer.next_offset for at in answer.messages)
        if answer.messages:
            assert len(answer.messages) <= count_max
            # A plain pull is not limited to fewer bytes than 256 KiB.
            is_unlimited = len(answer.messages) == 1 or read is FilledQueue.pull
            assert is_unlimited or answer.record_bytes <= bytes_max
            return answer.messages
        offset = answer.next_offset
    return {}


def read_all(
    queue: FilledQueue, read: Pull, limits: Limits = LARGE, **fields: Any
) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    offset = queue.low
    while some := read_on(queue, read, offset, limits, **fields):
        found |= some
        offset = max(some) + 1
    return found


@READS
async def test_each_message_is_read_once(build: Build, read: Pull, tmp_path: Path) -> None:
    queue = await build(tmp_path, False)
    for limits in ((1, 1), (3, 100_000), (32, 2500), (1000, 5000), LARGE):
        assert read_all(queue, read, limits) == bodies(queue), limits


@READS
async def test_a_read_begins_at_any_offset(build: Build, read: Pull, tmp_path: Path) -> None:
    queue = await build(tmp_path, False)
    for offset in range(max(queue.low, queue.end - 60), queue.end):
        found = read_on(queue, read, offset, (5, 4000))
        wanted = [each for each in bodies(queue).items() if each[0] >= offset]
        assert found
        assert [*found.items()] == wanted[: len(found)]


@READS
async def test_tags_choose_messages(build: Build, read: Pull, tmp_path: Path) -> None:
    queue = await build(tmp_path, False)
    for limits in ((1, 1), (32, 2500), LARGE):
        for tags in ("t0", "t1", "none"):
            found = read_all(queue, read, limits, subscription=f"{tags} || other")
            assert found == bodies(queue, tags), (tags, limits)


@READS
async def test_sql_chooses_messages(build: Build, read: Pull, tmp_path: Path) -> None:
    """A condition on properties, whatever the messages are read from."""
    queue = await build(tmp_path, False)
    keys = sorted(message.key for message in queue.messages.values())
    middle = keys[len(keys) // 2]
    for limits in ((1, 1), (3, 100_000), (32, 2500), LARGE):
        for condition, tags in (("TAGS STARTSWITH 't0'", "t0"), ("TAGS IN ('t1')", "t1")):
            found = read_all(queue, read, limits, subscription=condition, expression_type="SQL92")
            assert found == bodies(queue, tags), (condition, limits)
    found = read_all(queue, read, subscription=f"KEYS = '{middle}'", expression_type="SQL92")
    assert found == {
        at: message.body for at, message in queue.messages.items() if message.key == middle
    }
    nothing = read_all(queue, read, subscription="missing = 5", expression_type="SQL92")
    assert nothing == {}


@READS
async def test_an_offset_outside_is_answered_with_the_next_one(
    build: Build, read: Pull, tmp_path: Path
) -> None:
    queue = await build(tmp_path, False)
    end = queue.end
    for offset, code, following in (
        (end, ResponseCode.PULL_NOT_FOUND, end),
        (end + 1, ResponseCode.PULL_OFFSET_MOVED, end),
        (end + 9999, ResponseCode.PULL_OFFSET_MOVED, end),
    ):
        answer = read(queue, offset)
        assert (answer.code, answer.next_offset, answer.messages) == (code, following, {})
        assert (answer.min_offset, answer.max_offset) == (queue.low, end)
    for offset in {-1, 0, queue.low - 1} - {queue.low}:
        answer = read(queue, offset)
        if queue.has_next_below:
            assert min(answer.messages) == queue.low
        else:
            assert answer.code == ResponseCode.PULL_OFFSET_MOVED
            assert (answer.next_offset, answer.messages) == (queue.low, {})


@READS
async def test_a_queue_without_messages(build: Build, read: Pull, tmp_path: Path) -> None:
    queue = await build(tmp_path, True)
    for offset in (0, 5):
        answer = read(queue, offset)
        assert answer.code in {ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_OFFSET_MOVED}
        assert answer[1:] == (0, 0, 0, 0, {})
    assert queue.range() == (0, 0)
    assert queue.earliest_ms() == -1
    assert queue.search(0) == queue.search(1 << 50, "UPPER") == 0


async def test_times_choose_offsets(build: Build, tmp_path: Path) -> None:
    queue = await build(tmp_path, False)
    offsets = sorted(queue.messages)
    for number, offset in enumerate(offsets):
        exact_ms = queue.messages[offset].store_ms
        following = offsets[number + 1] if number + 1 < len(offsets) else queue.end
        assert queue.search(exact_ms) == queue.search(exact_ms, "UPPER") == offset
        assert queue.search(exact_ms + 1) == following
        assert queue.search(exact_ms + 1, "UPPER") == offset
    assert queue.search(0) == queue.low
    assert queue.search(1 << 50) == queue.end
    assert queue.search(1 << 50, "UPPER") == offsets[-1]


async def test_the_range_and_the_first_time(build: Build, tmp_path: Path) -> None:
    queue = await build(tmp_path, False)
    assert queue.range() == (queue.low, queue.end)
    # Each broker of a static topic counts its own part of a queue.
    assert len(queue.brokers) > 1 or queue.statistics() == (queue.low, queue.end)
    assert queue.earliest_ms() == queue.messages[queue.low].store_ms


async def test_keys_find_messages(build: Build, tmp_path: Path) -> None:
    queue = await build(tmp_path, False)
    for message in queue.messages.values():
        # The log still has what a run has dropped.
        found = queue.by_key(message.key)
        assert found[0] == message.body, [each[:3] for each in found]
        assert len(found) == 1 or queue.has_next_below
    assert queue.by_key("none") == []
