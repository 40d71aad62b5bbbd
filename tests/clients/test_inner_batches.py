"""Topics with queue.type=BatchCQ, whose batches are one record: clients see single messages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncIterator
from itertools import accumulate
from random import Random

import pytest
import trio

from headrace import Message, PullConsumer
from headrace.consumer.pulls import Wanted
from headrace.consumer.queue_slices import SliceReader
from headrace.consumer.subscription import Subscription
from headrace.embedded import Embedded
from headrace.errors import MalformedAnswer
from headrace_protocol.bodies import MessageQueue
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.drivers.blocking import BlockingConnection
from headrace_protocol.headers import (
    PullMessageResponseHeader,
)
from headrace_protocol.message import (
    INNER_BATCH,
    NEED_UNWRAP,
    encode_properties,
    encode_record,
)
from headrace_protocol.serving import Reply
from tests.support.fixtures import in_memory
from tests.support.inner_batches import batch_items, send_batch
from tests.support.scripted import Asked, scripted_in_thread
from tests.support.verbs import take

QUEUE = MessageQueue("T", "broker-0", 0)
END = 600


@pytest.fixture
async def mq() -> AsyncIterator[Embedded]:
    """A broker with the topic, which has three batches and a message between them."""
    async for running in in_memory():
        async with running.admin() as admin:
            await admin.create_topic("T", queues=1, attributes={"queue.type": "BatchCQ"})
        await send(running, 0, 4)
        async with running.producer() as producer:
            await producer.send(Message("T", b"4", key="k4", tag="a"))
        await send(running, 5, 3)
        await send(running, 8, 2)
        yield running


async def send(mq: Embedded, first: int, count: int) -> None:
    sent = await send_batch(mq.connect, mq.broker, first, count)
    assert (sent.queue_offset, sent.batch_uniq_id) == (first, f"B{first}")


async def test_a_consumer_gets_each_message_once(mq: Embedded) -> None:
    async with mq.consumer("g", "T") as consumer:
        assert await take(consumer, 10) == [*range(10)]


async def test_a_subscription_to_a_tag_gets_those_of_batches(mq: Embedded) -> None:
    async with mq.consumer("g", {"T": "a"}) as consumer:
        assert await take(consumer, 5) == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("first", range(10))
async def test_a_reader_begins_in_a_batch(first: int, mq: Embedded) -> None:
    async with PullConsumer(**mq.options()) as reader:
        (queue,) = await reader.queues("T")
        await reader.assign([queue])
        reader.seek(queue, first)
        found: list[int] = []
        while len(found) < 10 - first:
            batch = await reader.receive_many(timeout_ms=5000)
            assert batch is not None
            found += [message.queue_offset for message in batch]
    assert found == [*range(first, 10)]


async def test_a_message_of_a_batch_is_retried(mq: Embedded) -> None:
    async with mq.consumer("g", "T") as consumer:
        async for message in consumer:
            if message.body == b"2":
                await message.retry(after=1)
                break
    with trio.fail_after(20):
        async with mq.consumer("g", "%RETRY%g") as consumer:
            async for message in consumer:
                assert (message.body, message.key) == (b"2", "k2")
                break


async def test_messages_of_batches_are_found(mq: Embedded) -> None:
    async with mq.admin() as admin:
        for number in range(10):
            (found,) = await admin.query_by_key("T", f"k{number}")
            assert (found.body, found.queue_offset) == (b"%d" % number, number)
        (found,) = await admin.query_by_id("U6", "T")
        assert found.body == b"6"
        view = await admin.message(found.stored.offset_message_id)
        assert view is not None
        assert view.body == b"5"


# --- a broker of Apache RocketMQ --------------------------------------------------------------


class Peer:
    """A queue of batches, as Apache's broker serves it: whole records, few at a time."""

    def __init__(self, counts: list[int], given_max: int) -> None:
        self.starts = [0, *accumulate(counts)]
        self.counts = counts
        self.given_max = given_max

    def __call__(self, asked: Asked) -> Reply:
        start, wanted = int(asked.ext["queueOffset"]), int(asked.ext["maxMsgNums"])
        number = bisect_right(self.starts, start) - 1
        records, given = [], 0
        while number < len(self.counts) and given < min(wanted, self.given_max):
            records.append(record(self.starts[number], self.counts[number]))
            given += self.counts[number]
            number += 1
        header = PullMessageResponseHeader(
            suggest_which_broker_id=0,
            next_begin_offset=self.starts[number],
            min_offset=0,
            max_offset=self.starts[-1],
        )
        code = ResponseCode.SUCCESS if records else ResponseCode.PULL_NOT_FOUND
        return Reply(header, tuple(records), code=code)


def record(first: int, count: int, stated: int | None = None) -> bytes:
    if count == 1:
        return encode_record(topic="T", queue_id=0, body=b"%d" % first, queue_offset=first)
    return encode_record(
        topic="T",
        queue_id=0,
        body=batch_items(first, count),
        properties=encode_properties({"INNER_NUM": str(stated or count)}),
        queue_offset=first,
        sys_flag=INNER_BATCH | NEED_UNWRAP,
    )


def read(address: str, start: int, end: int, slice_bytes: int) -> list[int]:
    wanted = Wanted("g", QUEUE, start, Subscription("T", "*"), record_bytes_max=slice_bytes)
    found, at = [], start
    with BlockingConnection.connect(address) as connection:
        for piece in SliceReader(connection, wanted, end):
            assert piece.start_offset == at
            at = piece.next_offset
            if piece.columns is not None:
                found += piece.columns.queue_offset.tolist()
                assert piece.columns.queue_offset[-1] < at
    return found


@pytest.mark.parametrize("seed", range(10))
def test_many_pulls_under_way_meet_in_batches(seed: int) -> None:
    rng = Random(seed)
    counts: list[int] = []
    while sum(counts) < END:
        counts.append(rng.choice((1, 1, 2, 7, 40)))
    peer = Peer(counts, rng.choice((1, 8, 32)))
    start = rng.randrange(END // 2)
    end = rng.randrange(start + 1, END)
    with scripted_in_thread() as (server,):
        server.answer(RequestCode.PULL_MESSAGE, peer)
        found = read(server.address, start, end, rng.choice((1, 3000, 1 << 20)))
    assert found == [*range(start, end)], f"seed {seed}"


def test_a_batch_that_states_another_count_is_malformed() -> None:
    def broken(_asked: Asked) -> Reply:
        reply = Peer([5], 32)(_asked)
        return Reply(reply.header, (record(0, 5, stated=6),))

    with scripted_in_thread() as (server,):
        server.answer(RequestCode.PULL_MESSAGE, broken)
        with pytest.raises(MalformedAnswer, match="states 6 messages and has 5"):
            read(server.address, 0, 5, 1)
