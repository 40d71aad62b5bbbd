"""A static topic whose queues move while clients write and read it, on running brokers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from headrace import Consumer, Message, Producer
from headrace.admin.client import Admin
from headrace_protocol.statictopic.plans import Mode
from tests.support.running_brokers import Brokers, brokers

COUNT = 600
KEYS = 4


@pytest.fixture
async def mq(tmp_path: Path) -> AsyncIterator[Brokers]:
    async with brokers(tmp_path, ["a", "b", "c"]) as running:
        yield running


@pytest.fixture
async def admin(mq: Brokers) -> AsyncIterator[Admin]:
    async with Admin(**mq.at) as admin:
        yield admin


@pytest.mark.parametrize("mode", Mode)
async def test_nothing_is_lost_while_queues_move(mq: Brokers, admin: Admin, mode: Mode) -> None:
    await admin.create_static_topic("T", 2, brokers=["a"])
    acknowledged: dict[tuple[int, int], bytes] = {}
    read: dict[tuple[int, int], bytes] = {}
    order: dict[int, list[int]] = {key: [] for key in range(KEYS)}
    is_written = trio.Event()

    async def write() -> None:
        async with Producer(**mq.at) as producer:
            for number in range(COUNT):
                body = b"%d %d" % (number % KEYS, number)
                sent = await producer.send(Message("T", body, key=str(number % KEYS)))
                if sent.queue_offset >= 0:
                    acknowledged[sent.queue.queue_id, sent.queue_offset] = body
                await trio.sleep(0.002)
        is_written.set()

    async def read_all() -> None:
        consumer = Consumer("g", "T", **mq.at)
        async with consumer:
            async for message in consumer:
                place = message.queue.queue_id, message.queue_offset
                assert read.get(place) is None, place
                read[place] = bytes(message.body)
                key, number = map(int, message.body.split())
                order[key].append(number)
                if len(read) == COUNT:
                    return

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            nursery.start_soon(read_all)
            for target in (["b"], ["c"], ["a", "b"]):
                await trio.sleep(0.3)
                await admin.remap_static_topic("T", target, mode=Mode(mode))
    assert acknowledged.items() <= read.items()
    assert sorted(body for body in read.values()) == sorted(
        b"%d %d" % (number % KEYS, number) for number in range(COUNT)
    )
    if mode is Mode.STRICT:
        assert order == {key: sorted(order[key]) for key in order}
        for queue in range(2):
            offsets = sorted(offset for queue_id, offset in read if queue_id == queue)
            assert offsets == list(range(len(offsets)))
