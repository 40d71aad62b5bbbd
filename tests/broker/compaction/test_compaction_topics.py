"""Compacted topics of running brokers: messages are sent, followed, read and kept by a restart."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from headrace import Admin, Message, Producer, PullConsumer
from headrace_broker.server import Broker
from tests.support.running_brokers import Brokers, brokers
from tests.support.until import until

TOPIC = "users"
SIZES = {"compaction_mapped_file_size": 4096, "compaction_cq_mapped_file_size": 460}


@pytest.fixture
async def mq(tmp_path: Path) -> AsyncIterator[Brokers]:
    async with brokers(tmp_path, []) as running:
        await running.start("a", **SIZES)
        async with Admin(**running.at) as admin:
            await admin.create_topic(TOPIC, queues=2, attributes={"cleanup.policy": "COMPACTION"})
        yield running


async def send(mq: Brokers, **values: int) -> None:
    async with Producer(**mq.at) as producer:
        for key, value in values.items():
            await producer.send(Message(TOPIC, b"%d" % value, key=key))


async def read(mq: Brokers) -> dict[str, int]:
    """The newest value of each key, after reading all messages from the beginning."""
    table: dict[str, int] = {}
    async with (
        Admin(**mq.at) as admin,
        PullConsumer(**mq.at) as consumer,
    ):
        ends = {queue: at.max_offset for queue, at in (await admin.topic_stats(TOPIC)).items()}
        await consumer.assign(await consumer.queues(TOPIC))
        with trio.fail_after(10):
            while any(consumer.position(queue) < end for queue, end in ends.items()):
                messages = await consumer.receive_many() or ()
                table |= {message.key: int(message.body) for message in messages}
    return table


async def followed(broker: Broker) -> None:
    """Wait until the compaction logs have everything."""
    await until(lambda: not broker.readiness.followers()["compaction"]["behindMessages"])


async def test_the_values_of_all_keys_survive_a_restart(mq: Brokers) -> None:
    values = {f"k{number}": number for number in range(40)}
    await send(mq, **values)
    assert await read(mq) == values
    await followed(mq.brokers["a"])
    assert await read(mq) == values
    await mq.stop("a")
    await mq.start("a", **SIZES)
    assert await read(mq) == values
    await send(mq, k0=99)
    assert await read(mq) == values | {"k0": 99}


async def test_runs_keep_the_newest_value_of_each_key(mq: Brokers) -> None:
    await mq.stop("a")
    broker = await mq.start("a", compaction_schedule_internal=100, **SIZES)
    for value in range(5):
        await send(mq, **{f"k{number}": 10 * value + number for number in range(20)})
    await followed(broker)
    expected = {f"k{number}": 40 + number for number in range(20)}
    with trio.fail_after(20):
        # A hundred messages have about 25,000 bytes.
        while await stored_bytes(mq) > 15_000:  # noqa: ASYNC110
            await trio.sleep(0.05)
    assert await read(mq) == expected
    await mq.stop("a")
    await mq.start("a", **SIZES)
    assert await read(mq) == expected


async def stored_bytes(mq: Brokers) -> int:
    async with Admin(**mq.at) as admin:
        return (await admin.topic_totals())[0].record_bytes or 0
