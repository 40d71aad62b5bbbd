"""Progress of groups in a compacted topic, against a real broker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

import headrace
from headrace import Message
from headrace.embedded import Embedded
from headrace.errors import ConfigurationError, InvalidValue, RouteNotFound
from tests.support.running import in_background

QUEUES = 4


@pytest.fixture
async def mq() -> AsyncIterator[Embedded]:
    async with headrace.embedded(memory=True) as running:
        async with running.admin() as admin:
            await admin.create_topic("visits", queues=QUEUES)
            attributes = {"cleanup.policy": "COMPACTION"}
            await admin.create_topic("progress", queues=2, attributes=attributes)
        yield running


async def send(mq: Embedded, count: int, begin: int = 0) -> set[bytes]:
    bodies = [b"%d" % number for number in range(begin, begin + count)]
    async with mq.producer() as producer:
        for body in bodies:
            await producer.send(Message("visits", body))  # queue after queue
    return set(bodies)


async def read(mq: Embedded, count: int, **options: Any) -> set[bytes]:
    """The next messages of group g."""
    bodies: set[bytes] = set()
    async with mq.consumer("g", "visits", offsets_topic="progress", **options) as consumer:
        async for message in consumer:
            bodies.add(message.body)
            if len(bodies) == count:
                break
    return bodies


def pull_consumer(mq: Embedded, offsets_topic: str | None = "progress") -> headrace.PullConsumer:
    return headrace.PullConsumer(
        "g", nameserver=mq.nameserver, connect=mq.connect, offsets_topic=offsets_topic
    )


async def offsets(mq: Embedded) -> dict[str, int]:
    async with mq.table("progress", model=int) as table:
        await table.synced()
        return dict(table.items())


async def test_a_group_resumes_where_the_topic_says(mq: Embedded) -> None:
    first = await send(mq, 20)
    assert await read(mq, 20) == first
    saved = {key: offset for key, offset in (await offsets(mq)).items() if "/visits/" in key}
    assert sorted(saved) == [f"g/visits/broker-a/{queue_id}" for queue_id in range(QUEUES)]
    assert sum(saved.values()) == 20
    second = await send(mq, 5, begin=20)
    assert await read(mq, 5) == second


async def test_the_brokers_are_not_asked_for_progress(mq: Embedded) -> None:
    await send(mq, 8)
    await read(mq, 8)
    async with pull_consumer(mq, None) as consumer:
        queues = await consumer.queues("visits")
        assert [await consumer.committed(queue) for queue in queues] == [None] * QUEUES


async def test_queues_that_move_to_another_member_bring_their_progress(mq: Embedded) -> None:
    first = await send(mq, 40)
    seen: list[bytes] = []
    both = trio.Event()

    async def member() -> None:
        async with mq.consumer("g", "visits", offsets_topic="progress") as consumer:
            async for message in consumer:
                seen.append(message.body)
                if len(set(seen)) >= 40:
                    both.set()

    async with in_background(member, member):
        with trio.fail_after(60):
            await both.wait()
    assert set(seen) == first
    assert sum(n for key, n in (await offsets(mq)).items() if "/visits/" in key) == 40


async def test_a_reader_of_queues_commits_to_the_topic(mq: Embedded) -> None:
    await send(mq, 12)
    async with pull_consumer(mq) as consumer:
        queues = await consumer.queues("visits")
        await consumer.assign(queues)
        for queue in queues:
            assert await consumer.committed(queue) is None
        await consumer.commit({queues[0]: 2})
        await consumer.commit({queues[0]: 1, queues[1]: 3})
        assert [await consumer.committed(queue) for queue in queues[:3]] == [1, 3, None]
    async with pull_consumer(mq) as consumer:
        await consumer.assign(queues)
        assert [consumer.position(queue) for queue in queues[:2]] == [1, 3]


async def test_another_value_than_an_offset_is_an_error_of_its_key(mq: Embedded) -> None:
    async with mq.table("progress", model=str) as table:
        await table.put("g/visits/broker-a/0", "three")
    async with pull_consumer(mq) as consumer:
        first, *_ = await consumer.queues("visits")
        with pytest.raises(InvalidValue, match="g/visits/broker-a/0"):
            await consumer.committed(first)


async def test_a_missing_topic_is_an_error_at_the_start(
    autojump_clock: object, mq: Embedded
) -> None:
    with pytest.raises(RouteNotFound, match="absent"):
        async with mq.consumer("g", "visits", offsets_topic="absent"):
            pass
    with pytest.raises(RouteNotFound, match="absent"):
        async with pull_consumer(mq, "absent"):
            pass


def test_what_cannot_be_combined() -> None:
    with pytest.raises(ConfigurationError, match="offsets_topic= cannot be combined with broad"):
        headrace.Consumer("g", "visits", broadcast=True, offsets_topic="progress")
    with pytest.raises(ConfigurationError, match="offsets_topic='progress' requires a group"):
        headrace.PullConsumer(offsets_topic="progress")
