"""Several tasks on one consumer share its messages, and timed reads end in time."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from itertools import chain
from random import Random
from typing import Any

import anyio
import pytest
import trio
import trio.testing

from headrace import Message
from headrace.consumer.inbox import BatchIterator, Inbox, MessageIterator, Receiver
from headrace.consumer.process_queue import Limits, ProcessQueue
from headrace.embedded import Embedded
from headrace.errors import ConfigurationError
from headrace.received import MessageBatch
from headrace_protocol.bodies import MessageQueue
from headrace_protocol.columns import RecordColumns
from headrace_protocol.message import encode_record
from tests.support.fixtures import in_memory
from tests.support.seeds import seeds
from tests.support.until import until
from tests.support.verbs import lag_of, produce

QUEUE = MessageQueue("T", "b", 0)
TASKS = 8


mq = pytest.fixture(in_memory)


def fetched(queue: ProcessQueue, count: int, gap: int = 1) -> MessageBatch:
    """The next messages of a queue, of which only each ``gap``-th exists."""
    first = queue.pull_offset
    offsets = range(first, first + count * gap, gap)
    records = b"".join(
        encode_record(topic="T", queue_id=0, queue_offset=each, body=b"%d" % each)
        for each in offsets
    )
    return MessageBatch(QUEUE, first, first + count * gap, RecordColumns.from_records(records))


def opened(*, ordered: bool = False) -> tuple[Inbox, ProcessQueue]:
    inbox = Inbox("Consumer", ordered=ordered)
    inbox.open()
    return inbox, ProcessQueue(QUEUE, Limits(1000, 1 << 20), 0)


@pytest.mark.parametrize("count", [TASKS, 100, 2000])
async def test_tasks_share_one_batch_fairly(autojump_clock: object, count: int) -> None:
    inbox, queue = opened()
    taken: list[list[int]] = [[] for _ in range(TASKS)]

    async def work(mine: list[int]) -> None:
        async for message in MessageIterator(inbox):
            mine.append(message.queue_offset)
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        for mine in taken:
            nursery.start_soon(work, mine)
        await trio.testing.wait_all_tasks_blocked()
        inbox.put(queue.add(fetched(queue, count)))
        await trio.sleep(-(-count // TASKS) + 1.5)
        assert sorted(chain.from_iterable(taken)) == list(range(count))
        assert max(map(len, taken)) - min(map(len, taken)) <= 2
        assert queue.processed_offset == count
        assert (queue.message_count, queue.room) == (0, Limits(1000, 1 << 20))
        nursery.cancel_scope.cancel()


async def test_a_fast_task_takes_over_what_a_slow_one_would_do(autojump_clock: object) -> None:
    inbox, queue = opened()
    taken: dict[float, list[int]] = {1000: [], 1: []}

    async def work(seconds: float) -> None:
        async for message in MessageIterator(inbox):
            taken[seconds].append(message.queue_offset)
            await trio.sleep(seconds)

    inbox.put(queue.add(fetched(queue, 100)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(work, 1000)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(work, 1)
        await trio.sleep(101)
        assert len(taken[1000]) == 1
        assert sorted(taken[1000] + taken[1]) == list(range(100))
        assert queue.processed_offset == 0, "the slow one's message is not processed"
        nursery.cancel_scope.cancel()


async def test_parts_of_batches_are_shared(autojump_clock: object) -> None:
    inbox, queue = opened()
    taken: list[list[int]] = []

    async def work() -> None:
        async for batch in BatchIterator(inbox, 10):
            taken.append([message.queue_offset for message in batch])
            await trio.sleep(1)

    inbox.put(queue.add(fetched(queue, 80)))
    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(work)
        await trio.sleep(3.5)
        assert sorted(chain.from_iterable(taken)) == list(range(80))
        assert queue.processed_offset == 80
        nursery.cancel_scope.cancel()


async def test_an_ordered_queue_stays_with_one_task() -> None:
    inbox, queue = opened(ordered=True)
    inbox.put(queue.add(fetched(queue, 10)))
    assert inbox.take_ready() is not None
    found: list[object] = []

    async def other() -> None:
        found.append(inbox.take_ready())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
    assert found == [None]


@pytest.mark.parametrize("seed", seeds(20))
async def test_whatever_tasks_do_each_message_is_handed_out_once_and_none_is_skipped(
    autojump_clock: object, seed: int
) -> None:
    random = Random(seed)
    inbox, queue = opened()
    processed: list[int] = []
    current: dict[int, list[int]] = {}

    def check_progress() -> None:
        held = [offset for offsets in current.values() for offset in offsets]
        done = set(processed)
        assert all(each in done for each in existing if each < queue.processed_offset)
        assert not done & set(held)

    async def work(number: int, chance: Random) -> None:
        while True:
            messages = MessageIterator(inbox)
            batches = BatchIterator(inbox, chance.randint(1, 9))
            by_message = chance.random() < 0.5
            while chance.random() > 0.05:
                # Asking for more is what says that the current ones are processed.
                processed.extend(current.pop(number, []))
                if by_message:
                    current[number] = [(await anext(messages)).queue_offset]
                else:
                    current[number] = [each.queue_offset for each in await anext(batches)]
                check_progress()
                await trio.sleep(chance.random())

    existing: list[int] = []
    async with trio.open_nursery() as nursery:
        for number in range(random.randint(2, 6)):
            nursery.start_soon(work, number, Random(random.random()))
        for _ in range(5):
            batch = fetched(queue, random.randint(1, 60), random.randint(1, 3))
            existing += [message.queue_offset for message in batch]
            inbox.put(queue.add(batch))
            await trio.sleep(5 * random.random())
        await trio.sleep(1000)
        for offsets in current.values():
            processed += offsets
        assert sorted(processed) == existing
        nursery.cancel_scope.cancel()


async def test_a_later_task_does_not_inherit_what_a_failed_one_held() -> None:
    inbox, queue = opened()
    inbox.put(queue.add(fetched(queue, 2)))

    async def fail() -> None:
        async for _ in MessageIterator(inbox):
            raise KeyError

    async def take_over() -> None:
        """As a task at the same address does."""
        assert (delivery := inbox.take_ready()) is not None
        assert delivery.make_ready().popleft().queue_offset == 0
        assert inbox.take_ready() is delivery

    for function in (fail, take_over):
        gc.collect()
        with anyio.CancelScope():
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(function)
            except* KeyError:
                pass
    assert queue.processed_offset == 0, "nobody has processed the first message"


@pytest.mark.parametrize("ordered", [False, True])
async def test_a_waiting_task_gets_what_an_ended_one_held(
    autojump_clock: object, ordered: bool
) -> None:
    inbox, queue = opened(ordered=ordered)
    inbox.put(queue.add(fetched(queue, 3)))
    taken: list[int] = []

    async def fail() -> None:
        async for message in MessageIterator(inbox):
            if message.queue_offset == 1:
                await trio.sleep(5)
                return

    async def wait() -> None:
        async for message in MessageIterator(inbox):
            taken.append(message.queue_offset)  # noqa: PERF401 - seen while it runs

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fail)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(wait)
        await trio.sleep(3)
        assert taken == ([] if ordered else [2])
        await trio.sleep(8)
        assert taken == ([1, 2] if ordered else [2, 1])
        assert queue.processed_offset == 3
        nursery.cancel_scope.cancel()


async def test_a_stop_does_not_wait_for_tasks_that_have_ended(autojump_clock: object) -> None:
    inbox, queue = opened()
    inbox.put(queue.add(fetched(queue, 3)))

    async def take() -> None:
        inbox.take_ready()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
    with trio.fail_after(0):
        await inbox.wait_until_others_are_done()


ASKS = ["receive", "batches", "messages"]


@pytest.mark.parametrize("ask", ASKS)
def test_calls_in_tasks_of_their_own_act_for_their_caller(ask: str) -> None:
    """As ``asyncio.wait_for`` makes them before Python 3.12."""

    async def main() -> None:
        inbox, queue = opened()
        for _ in range(3):
            inbox.put(queue.add(fetched(queue, 4)))
        batches, messages = BatchIterator(inbox, 2), MessageIterator(inbox)

        def call() -> Coroutine[Any, Any, Any]:
            match ask:
                case "receive":
                    return BatchIterator(inbox, 2, is_call=True).__anext__()
                case "batches":
                    return batches.__anext__()
                case _:
                    return messages.__anext__()

        count = 1 if ask == "messages" else 2
        for first in range(0, 12, count):
            got = await asyncio.create_task(call())
            assert got.next_offset == first + count if count > 1 else got.queue_offset == first
            assert queue.processed_offset <= first
            inbox.mark_current_processed()
            assert queue.processed_offset == first + count

    asyncio.run(main())


def test_calls_at_once_get_messages_of_their_own() -> None:
    async def main() -> None:
        inbox, queue = opened()
        inbox.put(queue.add(fetched(queue, 12)))
        calls = [BatchIterator(inbox, 2, is_call=True).__anext__() for _ in range(3)]
        batches = await asyncio.gather(*calls)
        offsets = [message.queue_offset for batch in batches for message in batch]
        assert len(set(offsets)) == 6
        assert queue.processed_offset == 0
        await BatchIterator(inbox, 2, is_call=True).__anext__()
        assert queue.processed_offset > 0

    asyncio.run(main())


@pytest.mark.slow  # the mock clock waits for threads
async def test_reads_end_in_time(mq: Embedded, autojump_clock: object) -> None:
    async with mq.producer() as producer:
        await producer.send_many([Message("T", b"%d" % number, key="k") for number in range(5)])
    async with mq.consumer("g", "T") as consumer:
        batch = await consumer.receive(2, timeout_ms=5000)
        assert batch is not None
        assert batch.values() == [b"0", b"1"]
        began = trio.current_time()
        found = [message.body async for message in consumer.until(timeout_ms=2000)]
        assert found == [b"2", b"3", b"4"]
        assert trio.current_time() - began == pytest.approx(2, abs=0.5)
        assert await consumer.receive(timeout_ms=0) is None
        assert [each async for each in consumer.until(timeout_ms=0)] == []
        with pytest.raises(ConfigurationError, match="timeout_ms=-1"):
            consumer.until(timeout_ms=-1)
        with pytest.raises(ConfigurationError, match="max_messages=0"):
            await consumer.receive(0)
    assert await lag_of(mq) == 0


@pytest.mark.slow  # the mock clock waits for threads
async def test_until_hands_out_nothing_after_its_time(mq: Embedded, autojump_clock: object) -> None:
    async with mq.producer() as producer:
        await producer.send_many([Message("T", b"%d" % number, key="k") for number in range(5)])
    async with mq.consumer("g", "T") as consumer:
        found = []
        async for message in consumer.until(timeout_ms=60_000):
            found.append(message.body)
            await trio.sleep(25)
        assert found == [b"0", b"1", b"2"]
        # The batch that comes is handled for longer than the wait for it might have taken.
        batch = await consumer.receive(1, timeout_ms=1000)
        assert batch is not None
        assert batch.values() == [b"3"]
        await trio.sleep(60)
    assert await lag_of(mq) == 1


async def test_a_paused_queue_may_move_while_its_reader_asks_for_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inbox, queue = opened()
    inbox.put(queue.add(fetched(queue, 10)))
    receiver = Receiver(inbox)
    delivery = await receiver.receive()
    assert delivery is not None
    delivery.next_part(1)
    inbox.pause(queue)

    async def run_others() -> None:
        queue.reset(5)
        inbox.put(queue.add(fetched(queue, 2)))
        inbox.resume(queue)
        inbox.pause(queue)

    with monkeypatch.context() as patch:
        patch.setattr("anyio.lowlevel.checkpoint", run_others)
        with trio.move_on_after(0.01):
            await receiver.receive()
    inbox.resume(queue)
    delivery = await receiver.receive()
    assert delivery is not None
    assert delivery.next_part(1).queue_offset == 5


async def test_what_is_done_behind_a_stuck_message_is_bounded(
    mq: Embedded, autojump_clock: object
) -> None:
    """A crash would repeat all of it."""
    await produce(mq, 100, queues=1)
    stuck, taken = trio.Event(), []
    async with mq.consumer("g", "T", queue_messages_max=10) as consumer:

        async def work() -> None:
            async for message in consumer:
                taken.append(int(message.body))
                if message.body == b"0":
                    await stuck.wait()
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(work)
            await until(lambda: len(taken) >= 20)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert sorted(taken) == list(range(20))
            stuck.set()
            await until(lambda: len(taken) == 100)
            nursery.cancel_scope.cancel()
    assert sorted(taken) == list(range(100))
