"""Consumers against a real broker: groups, progress, filters, positions."""

# ruff: noqa: PT012 - what blocks raise after a few statements is the point here

from __future__ import annotations

import asyncio
import datetime as dt
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import anyio
import msgspec
import pytest
import trio
import trio.lowlevel

import headrace
from headrace import Consumer, HeadraceError, Message, MessageQueue, PullConsumer
from headrace.embedded import Embedded
from headrace.errors import ClientClosed, ConfigurationError, RouteNotFound
from headrace.received import MessageBatch
from headrace_protocol.compression import BodyTooLarge
from tests.support.fixtures import in_memory
from tests.support.verbs import lag_of, produce, take, take_nothing

mq = pytest.fixture(in_memory)


# -- reading in a group ----------------------------------------------------------------------------


async def test_members_with_different_subscriptions_are_reported_once(
    mq: Embedded, caplog: pytest.LogCaptureFixture
) -> None:
    await produce(mq, 1)
    async with mq.consumer("g", "T"), mq.consumer("g", {"T": "a"}):
        pass
    lines = [each.message for each in caplog.records if each.name == "headrace.client"]
    assert 1 <= len(lines) <= 2  # one per member, if the first one had a heartbeat in time
    assert all("T (a)" in line and "must have the same subscriptions" in line for line in lines)


async def test_a_member_gets_every_message_in_the_order_of_its_key(mq: Embedded) -> None:
    await produce(mq, 500)
    by_key = defaultdict(list)
    async with mq.consumer("g", "T") as consumer:
        assert [q for q in consumer.assignment if q.topic == "T"] == [
            MessageQueue("T", q.broker_name, n) for n, q in enumerate(consumer.assignment[-4:])
        ]
        count = 0
        async for message in consumer:
            assert (message.topic, message.key) == ("T", f"k{int(message.body) % 10}")
            by_key[message.key].append(int(message.body))
            count += 1
            if count == 500:
                break
    assert by_key == {f"k{n}": list(range(n, 500, 10)) for n in range(10)}


async def test_what_was_processed_does_not_come_again(mq: Embedded) -> None:
    await produce(mq, 100)
    async with mq.consumer("g", "T") as consumer:
        first = await take(consumer, 30)
    async with mq.consumer("g", "T") as consumer:
        second = await take(consumer, 70)
        await take_nothing(consumer)
    assert sorted(first + second) == list(range(100))


async def test_a_message_whose_handler_failed_comes_again(mq: Embedded) -> None:
    await produce(mq, 10, queues=1)
    with pytest.raises(KeyError, match="handler"):
        async with mq.consumer("g", "T") as consumer:
            async for message in consumer:
                if message.body == b"4":
                    raise KeyError("handler")
    async with mq.consumer("g", "T") as consumer:
        assert await take(consumer, 6) == [4, 5, 6, 7, 8, 9]


async def test_a_message_whose_handler_ran_out_of_time_comes_again(mq: Embedded) -> None:
    await produce(mq, 10, queues=1)
    async with mq.consumer("g", "T") as consumer:
        with trio.move_on_after(0.1):
            async for message in consumer:
                if message.body == b"4":
                    await trio.sleep_forever()
    async with mq.consumer("g", "T") as consumer:
        assert await take(consumer, 1) == [4]


@pytest.mark.parametrize("ordered", [False, True])
async def test_a_member_that_is_cancelled_says_goodbye(mq: Embedded, ordered: bool) -> None:
    await produce(mq, 50, queues=1)
    numbers: list[int] = []
    with trio.CancelScope() as scope:
        async with mq.consumer("g", "T", ordered=ordered) as consumer:
            async for message in consumer:
                numbers.append(int(message.body))
                if len(numbers) == 50:
                    scope.cancel()
    assert scope.cancelled_caught
    assert await lag_of(mq) == 0
    async with mq.consumer("g", "T", ordered=ordered) as consumer:
        await produce(mq, 1, queues=1, first=50)
        with trio.fail_after(30):
            assert await take(consumer, 1) == [50]


async def test_messages_of_another_task_that_is_cancelled_come_again(mq: Embedded) -> None:
    await produce(mq, 10, queues=1)

    async def handle(consumer: Consumer, task_status: Any) -> None:
        async for message in consumer:
            if message.body == b"4":
                task_status.started()
                await trio.sleep_forever()

    async with mq.consumer("g", "T") as consumer, trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: handle(consumer, task_status))
        nursery.cancel_scope.cancel()
    async with mq.consumer("g", "T") as consumer:
        assert await take(consumer, 1) == [4]


async def test_commit_now_counts_the_message_at_hand(mq: Embedded) -> None:
    await produce(mq, 10, queues=1)
    with pytest.raises(KeyError):
        async with mq.consumer("g", "T") as consumer:
            async for message in consumer:
                if message.body == b"4":
                    await consumer.commit()
                    raise KeyError
    async with mq.consumer("g", "T") as consumer:
        assert await take(consumer, 1) == [5]


async def test_a_loop_goes_on_where_the_one_before_was_left(mq: Embedded) -> None:
    await produce(mq, 50, queues=1)
    async with mq.consumer("g", "T") as consumer:
        numbers = [await take(consumer, 5) for _ in range(4)]
        async for batch in consumer.batches():
            numbers.append([int(message.body) for message in batch])
            break
        await take_nothing(consumer)
    assert numbers == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
        [10, 11, 12, 13, 14],
        [15, 16, 17, 18, 19],
        list(range(20, 50)),
    ]


async def test_batches_come_from_one_queue_each_and_count_when_the_next_is_asked_for(
    mq: Embedded,
) -> None:
    await produce(mq, 200)
    numbers: list[int] = []
    async with mq.consumer("g", "T") as consumer:
        async for batch in consumer.batches():
            assert {message.queue for message in batch} == {batch.queue}
            assert [m.queue_offset for m in batch] == list(
                range(batch.queue_offset, batch.next_offset)
            )
            assert batch[0].body == batch[:1][0].body
            numbers += [int(message.body) for message in batch]
            if len(numbers) == 200:
                break
    assert sorted(numbers) == list(range(200))
    async with mq.consumer("g", "T") as consumer:
        await take_nothing(consumer)


async def test_several_tasks_share_one_consumer(mq: Embedded) -> None:
    await produce(mq, 300)
    numbers: list[int] = []
    async with mq.consumer("g", "T") as consumer:

        async def handle() -> None:
            async for message in consumer:
                numbers.append(int(message.body))
                await trio.lowlevel.checkpoint()
                if len(numbers) == 300:
                    nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(handle)
    assert sorted(numbers) == list(range(300))


async def test_messages_that_arrive_while_waiting_are_delivered(mq: Embedded) -> None:
    await produce(mq, 1)
    async with mq.consumer("g", "T") as consumer, mq.producer() as producer:
        assert await take(consumer, 1) == [0]
        for number in range(1, 4):
            await producer.send(Message("T", b"%d" % number))
            assert await take(consumer, 1) == [number]


async def test_groups_do_not_disturb_each_other(mq: Embedded) -> None:
    await produce(mq, 20)
    for group in ("g1", "g2"):
        async with mq.consumer(group, "T") as consumer:
            assert sorted(await take(consumer, 20)) == list(range(20))


async def test_two_topics_with_their_own_tags(mq: Embedded) -> None:
    await produce(mq, 5, "A", tag="a")
    await produce(mq, 5, "A", tag="b", first=100)
    await produce(mq, 5, "B", first=200)
    async with mq.consumer("g", {"A": "b || c", "B": "*"}) as consumer:
        assert sorted(await take(consumer, 10)) == [*range(100, 105), *range(200, 205)]


async def test_tags_with_equal_hashes_are_told_apart(mq: Embedded) -> None:
    await produce(mq, 3, queues=1, tag="Aa")
    await produce(mq, 3, queues=1, tag="BB", first=10)
    await produce(mq, 3, queues=1, first=20)
    async with mq.consumer("g", {"T": "BB"}) as consumer:
        assert await take(consumer, 3) == [10, 11, 12]
    async with mq.admin() as admin:
        assert {q.lag for q in await admin.lag("g", "T")} <= {0, 3}


# -- members come and go ---------------------------------------------------------------------------


async def test_members_share_the_queues_and_the_last_one_has_them_all(mq: Embedded) -> None:
    await produce(mq, 1)

    def count(consumer: Consumer) -> int:
        return sum(queue.topic == "T" for queue in consumer.assignment)

    async def until(consumer: Consumer, wanted: int) -> None:
        with trio.fail_after(5):
            while count(consumer) != wanted:  # noqa: ASYNC110 - no event crosses the wire
                await trio.sleep(0.005)

    async with mq.consumer("g", "T", ordered=True) as first:
        assert count(first) == 4
        async with mq.consumer("g", "T", ordered=True) as second:
            await until(first, 2)
            await until(second, 2)
            assert not set(first.assignment) & set(second.assignment)
        await until(first, 4)


@pytest.mark.slow
async def test_an_ordered_group_hands_queues_over_without_doubles(mq: Embedded) -> None:
    await produce(mq, 400)
    seen = []
    second_has_some = trio.Event()

    async def member(name: str) -> None:
        async with mq.consumer("g", "T", ordered=True) as consumer:
            async for message in consumer:
                seen.append((message.key, int(message.body)))
                if name == "second":
                    second_has_some.set()
                await trio.sleep(0.002)
                if len(seen) >= 400:
                    break
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(member, "first")
        while len(seen) < 50:  # noqa: ASYNC110
            await trio.sleep(0.002)
        nursery.start_soon(member, "second")
        await second_has_some.wait()
    numbers = [number for _, number in seen]
    assert sorted(numbers) == list(range(400))
    for key in {key for key, _ in seen}:
        of_key = [number for seen_key, number in seen if seen_key == key]
        assert of_key == sorted(of_key)


# -- where to begin --------------------------------------------------------------------------------


async def test_a_new_group_misses_nothing(mq: Embedded) -> None:
    await produce(mq, 10)
    async with Consumer("g", "T", nameserver=mq.nameserver, connect=mq.connect) as consumer:
        assert sorted(await take(consumer, 10)) == list(range(10))


async def test_several_topics_may_be_a_list(mq: Embedded) -> None:
    async with mq.producer() as producer:
        await producer.send(Message("One", b"1"))
        await producer.send(Message("Two", b"2"))
    async with mq.consumer("g", ["One", "Two"]) as consumer:
        assert sorted(await take(consumer, 2)) == [1, 2]


async def test_latest_means_only_what_comes_from_now_on(mq: Embedded) -> None:
    await produce(mq, 10)
    async with mq.consumer("g", "T", start="latest") as consumer, mq.producer() as producer:
        await producer.send(Message("T", b"99"))
        assert await take(consumer, 1) == [99]


async def test_a_point_in_time(mq: Embedded) -> None:
    await produce(mq, 3, queues=1)
    await trio.sleep(0.01)
    moment = dt.datetime.now(dt.UTC)
    await produce(mq, 3, queues=1, first=10)
    async with mq.consumer("g", "T", start=moment) as consumer:
        assert await take(consumer, 3) == [10, 11, 12]


async def test_progress_beyond_the_end_is_corrected(mq: Embedded) -> None:
    await produce(mq, 5, queues=1)
    async with PullConsumer("g", nameserver=mq.nameserver, connect=mq.connect) as consumer:
        (queue,) = await consumer.queues("T")
        await consumer.assign([queue])
        await consumer.receive_many(timeout_ms=1000)
        await consumer.commit({queue: 1000})
        assert await consumer.committed(queue) == 1000
    async with mq.consumer("g", "T") as consumer, mq.producer() as producer:
        await trio.sleep(0.05)
        await producer.send(Message("T", b"5"))
        assert (await take(consumer, 1))[0] in range(6)


@pytest.mark.slow
async def test_a_topic_that_is_made_anew_is_read_from_its_beginning(mq: Embedded) -> None:
    """The new queue is longer than what was read of the old one when the member asks again."""
    await produce(mq, 5, queues=1)
    async with mq.consumer("g", "T") as consumer:
        assert await take(consumer, 5) == [0, 1, 2, 3, 4]
        async with mq.admin() as admin:
            await admin.delete_topic("T")
        await produce(mq, 8, queues=1, first=5)
        with trio.fail_after(30):
            assert await take(consumer, 8) == [5, 6, 7, 8, 9, 10, 11, 12]


async def test_resetting_a_group_reaches_its_running_members(mq: Embedded) -> None:
    await produce(mq, 20, queues=1)
    async with mq.consumer("g", "T") as consumer:
        assert await take(consumer, 20) == list(range(20))
        await consumer.commit()
        async with mq.admin() as admin:
            assert set((await admin.reset_offsets("g", "T", "earliest")).values()) == {0}
        # Soon: the pull that waits for messages would wait for 15 s.
        with trio.fail_after(5):
            assert await take(consumer, 20) == list(range(20))


# -- queues by hand --------------------------------------------------------------------------------


@pytest.fixture
async def reader(mq: Embedded) -> AsyncIterator[PullConsumer]:
    await produce(mq, 100, queues=2)
    async with PullConsumer("g", nameserver=mq.nameserver, connect=mq.connect) as consumer:
        yield consumer


async def test_no_time_to_wait_is_enough_for_what_is_here(reader: PullConsumer) -> None:
    await reader.assign(await reader.queues("T"))
    count = 0
    with trio.fail_after(30):
        while count < 100:
            batch = await reader.receive_many(max_messages=7, timeout_ms=0)
            count += len(batch or ())
            await trio.lowlevel.checkpoint()
    assert count == 100
    assert await reader.receive_many(timeout_ms=0) is None


async def receive(consumer: PullConsumer, count: int) -> list[int]:
    numbers: list[int] = []
    while len(numbers) < count:
        batch = await consumer.receive_many(timeout_ms=2000)
        assert batch, f"only {len(numbers)} of {count} came"
        numbers += [int(message.body) for message in batch]
    return numbers


async def test_assigned_queues_are_read_from_the_start(reader: PullConsumer) -> None:
    queues = await reader.queues("T")
    await reader.assign(queues)
    assert sorted(await receive(reader, 100)) == list(range(100))
    assert await reader.receive_many(timeout_ms=20) is None
    assert [reader.position(q) for q in queues] == [await reader.max_offset(q) for q in queues]


async def test_one_queue_only(reader: PullConsumer) -> None:
    queue = (await reader.queues("T"))[1]
    await reader.assign([queue])
    count = await reader.max_offset(queue)
    assert len(await receive(reader, count)) == count < 100
    assert await reader.receive_many(timeout_ms=20) is None


async def test_seeking_goes_back_and_forth(reader: PullConsumer) -> None:
    queue = (await reader.queues("T"))[0]
    await reader.assign([queue])
    whole = await receive(reader, await reader.max_offset(queue))
    reader.seek(queue, 7)
    assert reader.position(queue) == 7
    assert await receive(reader, len(whole) - 7) == whole[7:]
    await reader.seek_to("earliest")
    assert await receive(reader, len(whole)) == whole
    await reader.seek_to("latest")
    assert await reader.receive_many(timeout_ms=20) is None


async def test_seeking_interrupts_a_pull_that_waits(reader: PullConsumer) -> None:
    queue = (await reader.queues("T"))[0]
    await reader.assign([queue])
    await reader.seek_to("latest")
    assert await reader.receive_many(timeout_ms=50) is None
    reader.seek(queue, 0)
    batch = await reader.receive_many(timeout_ms=1000)
    assert batch
    assert batch.queue_offset == 0


async def test_offsets_of_a_queue(reader: PullConsumer) -> None:
    queue = (await reader.queues("T"))[0]
    assert await reader.min_offset(queue) == 0
    assert await reader.offset_at(queue, 0) == 0
    await reader.assign([queue])
    batch = await reader.receive_many(timeout_ms=1000)
    assert batch is not None
    last = batch[-1]
    assert await reader.offset_at(queue, last.store_timestamp_ms) <= last.queue_offset
    now = last.store_timestamp_ms + 1
    assert await reader.offset_at(queue, now) == await reader.max_offset(queue)


async def test_progress_is_committed_when_asked(mq: Embedded, reader: PullConsumer) -> None:
    queues = await reader.queues("T")
    await reader.assign(queues)
    assert await reader.committed(queues[0]) is None
    await receive(reader, 100)
    await reader.commit()
    assert await reader.committed(queues[0]) == await reader.max_offset(queues[0])
    async with mq.consumer("g", "T") as consumer:
        await take_nothing(consumer)


async def test_queues_that_are_not_assigned_any_more_are_silent(
    mq: Embedded, reader: PullConsumer
) -> None:
    queues = await reader.queues("T")
    await reader.assign(queues)
    await receive(reader, 100)
    await reader.assign(queues[:1])
    async with mq.producer() as producer:
        await producer.send(Message("T", b"1"), queue=queues[1])
        await producer.send(Message("T", b"0"), queue=queues[0])
    assert await receive(reader, 1) == [0]
    with pytest.raises(ConfigurationError, match="not assigned"):
        reader.seek(queues[1], 0)


async def test_a_queue_is_fetched_ahead_only_so_far(mq: Embedded) -> None:
    await produce(mq, 100, queues=1)
    async with PullConsumer(
        nameserver=mq.nameserver, connect=mq.connect, queue_messages_max=10
    ) as consumer:
        await consumer.assign(await consumer.queues("T"))
        for start in range(0, 100, 10):
            batch = await consumer.receive_many(timeout_ms=1000)
            assert batch is not None
            assert [int(message.body) for message in batch] == list(range(start, start + 10))


async def test_no_more_than_wanted_is_received_at_once(mq: Embedded) -> None:
    await produce(mq, 100, queues=1)
    async with PullConsumer("g", nameserver=mq.nameserver, connect=mq.connect) as consumer:
        (queue,) = await consumer.queues("T")
        await consumer.assign([queue])
        for start in range(0, 90, 30):
            batch = await consumer.receive_many(max_messages=30, timeout_ms=1000)
            assert batch is not None
            assert [int(message.body) for message in batch] == list(range(start, start + 30))
            assert (batch.queue_offset, batch.next_offset) == (start, start + 30)
            assert consumer.position(queue) == start + 30
        consumer.seek(queue, 5)
        assert consumer.position(queue) == 5
        batch = await consumer.receive_many(max_messages=2, timeout_ms=1000)
        assert batch is not None
        assert [message.queue_offset for message in batch] == [5, 6]
        await consumer.commit()
        assert await consumer.committed(queue) == 7
        assert len(await consumer.receive_many(timeout_ms=1000) or ()) == 93
        assert consumer.position(queue) == 100


async def test_batches_are_as_small_as_wanted_and_the_one_at_hand_is_not_processed(
    mq: Embedded,
) -> None:
    await produce(mq, 10, queues=1)
    with pytest.raises(KeyError):
        async with mq.consumer("g", "T") as consumer:
            numbers: list[list[int]] = []
            async for batch in consumer.batches(max_messages=4):
                numbers.append([int(message.body) for message in batch])
                if len(numbers) == 2:
                    raise KeyError
    assert numbers == [[0, 1, 2, 3], [4, 5, 6, 7]]
    async with mq.consumer("g", "T") as consumer:
        assert await take(consumer, 6) == [4, 5, 6, 7, 8, 9]


async def test_other_tasks_get_their_turn_within_a_large_batch(mq: Embedded) -> None:
    await produce(mq, 5000, queues=1)
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with mq.consumer("g", "T") as consumer, trio.open_nursery() as nursery:
        assert await take(consumer, 1) == [0]
        nursery.start_soon(count_turns)
        assert await take(consumer, 4998) == list(range(1, 4999))
        nursery.cancel_scope.cancel()
    assert turns >= 3


async def test_a_seek_within_a_batch_ends_it(mq: Embedded) -> None:
    await produce(mq, 3000, queues=1)
    async with mq.consumer("g", "T") as consumer:
        messages = aiter(consumer)
        assert [int((await anext(messages)).body) for _ in range(10)] == list(range(10))
        (queue,) = [queue for queue in consumer.assignment if queue.topic == "T"]
        consumer.seek(queue, 2500)
        assert [int((await anext(messages)).body) for _ in range(10)] == list(range(2500, 2510))


# -- messages --------------------------------------------------------------------------------------


async def receive_one_batch(mq: Embedded, **options: Any) -> MessageBatch:
    async with PullConsumer(nameserver=mq.nameserver, connect=mq.connect, **options) as consumer:
        await consumer.assign(await consumer.queues("T"))
        batch = await consumer.receive_many(timeout_ms=1000)
        assert batch is not None
        return batch


async def test_a_batch_is_a_list_of_messages_and_columns(mq: Embedded) -> None:
    await produce(mq, 10, queues=1, tag="t")
    batch = await receive_one_batch(mq)
    assert len(batch) == len(batch.columns) == 10
    assert batch.values() == [b"%d" % number for number in range(10)]
    assert batch.columns.queue_offset.tolist() == list(range(10))
    assert [message.body for message in batch] == batch.values()
    assert (batch[3].body, batch[-1].body, batch[-1].queue_offset) == (b"3", b"9", 9)
    assert [message.body for message in batch[2:8:3]] == [b"2", b"5"]
    with pytest.raises(IndexError):
        _ = batch[10]
    assert "10 messages" in repr(batch)


async def test_a_batch_becomes_an_arrow_table(mq: Embedded) -> None:
    await produce(mq, 3, queues=1, tag="t")
    batch = await receive_one_batch(mq)
    table = batch.to_arrow()
    assert table.column_names == [
        "value",
        "key",
        "tag",
        "queue_offset",
        "born_timestamp",
        "store_timestamp",
    ]
    assert table.column("value").to_pylist() == [b"0", b"1", b"2"]
    assert table.column("key").to_pylist() == ["k0", "k1", "k2"]
    assert table.column("tag").to_pylist() == ["t", "t", "t"]
    stored = table.column("store_timestamp").to_pylist()[0]
    assert round(stored.timestamp() * 1000) == batch[0].store_timestamp_ms


async def test_compressed_bodies_are_as_they_were_sent_but_no_larger_than_allowed(
    mq: Embedded,
) -> None:
    bodies = [b"short", b"long " * 10_000, b"end"]
    async with mq.admin() as admin:
        await admin.create_topic("T", queues=1)
    async with mq.producer() as producer:
        for body in bodies:
            await producer.send(Message("T", body))
    batch = await receive_one_batch(mq)
    assert batch.columns.body_bytes.max() < 1000, "the long one is compressed"
    assert batch.values() == [message.body for message in batch] == bodies
    batch = await receive_one_batch(mq, body_bytes_max=49_999)
    short, long, _ = batch
    assert short.body == b"short"
    assert long.key == "", "the rest of it can be read"
    for read in (batch.values, lambda: long.body):
        with pytest.raises(BodyTooLarge, match=r"more than 49999 bytes .* body_bytes_max"):
            read()


def fields(message: Message) -> tuple[object, ...]:
    return msgspec.structs.astuple(message)


async def test_a_received_message_can_be_sent_on(mq: Embedded) -> None:
    first = Message("From", b"x" * 5000, key="k1 k2", tag="t", properties={"x": "ü"})
    async with mq.producer() as producer:
        await producer.send(first)
        async with mq.consumer("g", "From") as consumer:
            received = await anext(aiter(consumer))
        assert fields(received.copy_to("From")) == fields(first)
        copied = await producer.send(received.copy_to("To"))
    async with mq.consumer("g", "To") as consumer:
        again = await anext(aiter(consumer))
    assert fields(again.copy_to("From")) == fields(first)
    assert again.message_id == copied.message_id != received.message_id


async def test_a_received_message_tells_all_about_itself(mq: Embedded) -> None:
    body = b"headrace " * 1000
    async with mq.producer() as producer:
        sent = await producer.send(
            Message("T", body, key="k1 k2", tag="t", properties={"x": "ü", "y": "2"})
        )
    async with mq.consumer("g", "T") as consumer:
        message = await anext(aiter(consumer))
    assert message.body == body
    assert (message.topic, message.key, message.tag) == ("T", "k1 k2", "t")
    assert message.properties == {"x": "ü", "y": "2"}
    system = message.system_properties
    assert system.keys() >= {"KEYS", "TAGS", "UNIQ_KEY"}
    assert {**message.properties, **system} == message.stored.properties
    assert (message.queue, message.queue_offset) == (sent.queue, sent.queue_offset)
    assert message.message_id == sent.message_id
    assert message.offset_message_id == sent.offset_message_id
    assert 0 < message.born_timestamp_ms <= message.store_timestamp_ms
    assert message.reconsume_times == 0
    assert "T/" in repr(message)


# -- wrong use -------------------------------------------------------------------------------------


async def test_a_missing_topic_is_an_error_on_entering(mq: Embedded) -> None:
    with pytest.raises(RouteNotFound, match="Missing"):
        async with mq.consumer("g", "Missing"):
            pass


@pytest.mark.parametrize(
    "options",
    [
        {"group": "my group", "topics": "T"},
        {"group": "g", "topics": {}},
        {"group": "g", "topics": "bad topic"},
        {"group": "g", "topics": "T", "start": "yesterday"},
        {"group": "g", "topics": "T", "start": dt.datetime(2026, 1, 1)},  # noqa: DTZ001
        {"group": "g", "topics": "T", "queue_messages_max": 0},
        {"group": "g", "topics": "T", "body_bytes_max": 0},
        {"group": "g", "topics": 7},
        {"group": "g", "topics": ["T", 7]},
        {"group": "g", "topics": []},
        {"group": "g", "topics": {"T": None}},
        {"group": "g", "topics": {"T": "a > 5 and TAGS in ('x')"}},
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(options: dict[Any, Any]) -> None:
    with pytest.raises(HeadraceError):
        Consumer(**options, nameserver="127.0.0.1:65001")


async def test_consumers_outside_their_block_are_errors(mq: Embedded) -> None:
    with pytest.raises(ClientClosed):
        await take(mq.consumer("g", "T"), 1)
    reader = PullConsumer(nameserver=mq.nameserver)
    with pytest.raises(ClientClosed):
        await reader.queues("T")


async def test_a_client_has_one_block_at_a_time(mq: Embedded) -> None:
    async with mq.producer() as producer, mq.consumer("g", "TBW102") as consumer:
        for client in (producer, consumer):
            with pytest.raises(ConfigurationError, match="already open"):
                await client.__aenter__()
    await producer.__aexit__(None, None, None)
    async with producer:
        await producer.send(Message("Again", b"x"))


async def test_progress_needs_a_group(mq: Embedded) -> None:
    await produce(mq, 1)
    async with PullConsumer(nameserver=mq.nameserver, connect=mq.connect) as consumer:
        with pytest.raises(ConfigurationError, match="assigned"):
            await consumer.receive_many()
        with pytest.raises(ConfigurationError, match="group"):
            await consumer.commit()


# -- the other event loop --------------------------------------------------------------------------


def test_the_same_under_asyncio() -> None:
    async def main() -> tuple[list[int], list[int]]:
        async with headrace.embedded() as mq:
            async with mq.producer() as producer, producer.pipeline() as pipeline:
                for number in range(100):
                    await pipeline.send(Message("T", b"%d" % number))
            async with mq.consumer("g", "T") as consumer:
                first = await take(consumer, 40)
            with pytest.raises(KeyError):
                async with mq.consumer("g", "T") as consumer:
                    first += await take(consumer, 30)
                    raise KeyError
            async with mq.consumer("g", "T") as consumer:
                with anyio.fail_after(5):
                    rest = await take(consumer, 31)
            return first, rest

    first, rest = anyio.run(main, backend="asyncio")
    # The message at hand when the exception came is not processed, so it comes again.
    assert set(first) | set(rest) == set(range(100))
    assert len(set(first) & set(rest)) == 1


def test_a_time_limit_of_asyncio_around_each_receive() -> None:
    """Before Python 3.12 ``wait_for`` runs each call in a task of its own."""

    async def main() -> None:
        async with headrace.embedded() as mq:
            async with mq.producer() as producer:
                await producer.send_many([b"%d" % number for number in range(10)], topic="T")
            numbers: list[int] = []
            async with mq.consumer("g", "T", queue_messages_max=2) as consumer:
                while len(numbers) < 10:
                    batch = await asyncio.wait_for(consumer.receive(max_messages=1), 10)
                    assert batch is not None
                    numbers += [int(message.body) for message in batch]
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(consumer.receive(), 0.1)
            assert sorted(numbers) == list(range(10))
            assert await lag_of(mq) == 0

    asyncio.run(main())
