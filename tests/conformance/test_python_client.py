"""Our clients against the real Apache RocketMQ broker, under trio and under asyncio."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import anyio
import pytest

import headrace
from headrace import (
    Admin,
    Consumer,
    Message,
    PoppedMessage,
    Producer,
    PullConsumer,
    ReceivedMessage,
    SimpleConsumer,
)
from headrace.admin.topics import TopicExists
from headrace.errors import BrokerError, RouteNotFound
from tests.conformance.peer import TIMEOUT_MS

TIMEOUT_S = 120
POLL_S = 0.05
QUEUES = 4
BACKENDS = ("trio", "asyncio")

pytestmark = [pytest.mark.conformance, pytest.mark.slow]


async def make_topic(nameserver: str, topic: str, queues: int = QUEUES) -> None:
    async with Admin(nameserver=nameserver) as admin:
        await admin.create_topic(topic, queues=queues)


async def read(nameserver: str, topic: str, count: int, tags: str = "*") -> list[ReceivedMessage]:
    """The first ``count`` messages of a topic, by queue and offset."""
    found: list[ReceivedMessage] = []
    async with PullConsumer(nameserver=nameserver) as consumer:
        await consumer.assign(await consumer.queues(topic), tags)
        while len(found) < count:
            found += await consumer.receive_many() or []
    assert len(found) == count
    return sorted(found, key=lambda message: (message.queue.queue_id, message.queue_offset))


async def take(consumer: Consumer, count: int) -> list[ReceivedMessage]:
    found = []
    async for message in consumer:
        found.append(message)
        if len(found) == count:
            return found
    raise AssertionError("a consumer's iterator ended")


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    while not await condition():  # noqa: ASYNC110 - the other side is a broker, not a task
        await anyio.sleep(POLL_S)


def messages(topic: str, count: int, tag: str = "") -> list[Message]:
    return [
        Message(topic, f"body-{index}".encode(), key=f"key-{index % 7}", tag=tag)
        for index in range(count)
    ]


def bodies(found: Sequence[ReceivedMessage] | Sequence[Message]) -> list[bytes]:
    return sorted(message.body for message in found)


async def send_one_by_one(nameserver: str, topic: str) -> None:
    await make_topic(nameserver, topic)
    async with Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer:
        results = [await producer.send(message) for message in messages(topic, 30)]
    found = await read(nameserver, topic, 30)
    places = [(result.queue, result.queue_offset, result.message_id) for result in results]
    assert sorted(places) == sorted((m.queue, m.queue_offset, m.message_id) for m in found)
    assert {result.queue for result in results} == {message.queue for message in found}
    assert len({m.queue for m in found if m.key == "key-3"}) == 1


async def send_every_field(nameserver: str, topic: str) -> None:
    await make_topic(nameserver, topic, queues=1)
    sent = Message(topic, b"\0\1\2", key="k1 k2", tag="é", properties={"город": "東京 🚀"})
    async with Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer:
        await producer.send(sent)
    (found,) = await read(nameserver, topic, 1)
    assert (found.body, found.key, found.tag) == (sent.body, sent.key, sent.tag)
    assert found.properties["город"] == "東京 🚀"
    assert found.system_properties["CLUSTER"] == "DefaultCluster"


async def send_big_bodies(nameserver: str, topic: str) -> None:
    await make_topic(nameserver, topic, queues=1)
    sent = [Message(topic, b"fox " * 250_000), Message(topic, random.randbytes(1_000_000))]
    async with Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer:
        for message in sent:
            await producer.send(message)
    assert bodies(await read(nameserver, topic, 2)) == bodies(sent)


async def send_in_batches(nameserver: str, topic: str) -> None:
    await make_topic(nameserver, topic)
    sent = messages(topic, 500)
    async with Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer:
        results = await producer.send_many(sent)
    assert sum(result.message_count for result in results) == 500
    found = await read(nameserver, topic, 500)
    assert bodies(found) == bodies(sent)
    in_order = [m.body for m in sorted(found, key=lambda m: m.queue_offset) if m.key == "key-2"]
    assert in_order == [message.body for message in sent if message.key == "key-2"]


async def send_in_a_pipeline(nameserver: str, topic: str) -> None:
    await make_topic(nameserver, topic)
    sent = messages(topic, 3000)
    async with (
        Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer,
        producer.pipeline(max_in_flight=200) as pipeline,
    ):
        for message in sent:
            await pipeline.send(message)
    assert bodies(await read(nameserver, topic, 3000)) == bodies(sent)


async def send_one_way(nameserver: str, topic: str) -> None:
    await make_topic(nameserver, topic)
    sent = messages(topic, 50)
    async with Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer:
        for message in sent:
            await producer.send_oneway(message)
        assert bodies(await read(nameserver, topic, 50)) == bodies(sent)


async def create_topic_by_sending(nameserver: str, topic: str) -> None:
    async with Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer:
        await producer.send(Message(topic, b"first"))
    assert bodies(await read(nameserver, topic, 1)) == [b"first"]


async def be_refused(nameserver: str, topic: str) -> None:
    async with Admin(nameserver=nameserver) as admin:
        with pytest.raises(RouteNotFound):
            await admin.topic_stats(topic)
        with pytest.raises(TopicExists):
            await admin.create_topic("SELF_TEST_TOPIC")
        with pytest.raises(BrokerError):
            await admin.alter_topic("SELF_TEST_TOPIC", queues=9)


async def pull_by_tag(nameserver: str, topic: str) -> None:
    await make_topic(nameserver, topic)
    sent = [*messages(topic, 10, "A"), *messages(topic, 10, "B"), *messages(topic, 10, "C")]
    async with Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer:
        await producer.send_many(sent)
    found = await read(nameserver, topic, 20, "A || C")
    assert {message.tag for message in found} == {"A", "C"}


async def pull_seek_and_commit(nameserver: str, topic: str) -> None:
    await make_topic(nameserver, topic, queues=1)
    async with (
        Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer,
        PullConsumer(f"G_{topic}", nameserver=nameserver) as consumer,
    ):
        await producer.send_many(messages(topic, 20))
        (queue,) = await consumer.queues(topic)
        await eventually(lambda: reaches(consumer, queue, 20))
        assert await consumer.committed(queue) is None
        assert await consumer.offset_at(queue, 1000) == 0
        assert await consumer.offset_at(queue, int(time.time() * 1000) + 3_600_000) == 20
        await consumer.assign([queue])
        consumer.seek(queue, 15)
        batch = await consumer.receive_many()
        assert batch is not None
        assert [message.queue_offset for message in batch] == [15, 16, 17, 18, 19]
        await consumer.commit()
        assert await consumer.committed(queue) == 20


async def reaches(consumer: PullConsumer, queue: headrace.MessageQueue, offset: int) -> bool:
    return await consumer.max_offset(queue) == offset


async def consume_in_a_group(nameserver: str, topic: str) -> None:
    await make_topic(nameserver, topic)
    group = f"G_{topic}"
    sent = messages(topic, 200)
    async with Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer:
        await producer.send_many(sent)
        async with Consumer(group, topic, nameserver=nameserver, start="earliest") as consumer:
            assert bodies(await take(consumer, 200)) == bodies(sent)
        await producer.send(Message(topic, b"later"))
        async with Consumer(group, topic, nameserver=nameserver, start="earliest") as consumer:
            assert bodies(await take(consumer, 1)) == [b"later"]
    async with Admin(nameserver=nameserver) as admin:
        lags = [queue for queue in await admin.lag(group) if queue.queue.topic == topic]
        assert len(lags) == QUEUES
        assert sum(queue.lag for queue in lags) == 0


async def consume_in_order(nameserver: str, topic: str) -> None:
    await make_topic(nameserver, topic)
    async with Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer:
        await producer.send_many(messages(topic, 100))
    group = f"G_{topic}"
    async with Consumer(
        group, topic, nameserver=nameserver, start="earliest", ordered=True
    ) as consumer:
        found = await take(consumer, 100)
    for queue in {message.queue for message in found}:
        offsets = [message.queue_offset for message in found if message.queue == queue]
        assert offsets == list(range(len(offsets)))


async def share_the_queues(nameserver: str, topic: str) -> None:
    """Two members split the queues; when one leaves, the other takes all."""
    await make_topic(nameserver, topic)
    group = f"G_{topic}"
    async with Consumer(group, topic, nameserver=nameserver) as stays:
        async with Consumer(group, topic, nameserver=nameserver) as leaves:
            await eventually(lambda: has_queues(stays, topic, 2))
            await eventually(lambda: has_queues(leaves, topic, 2))
        await eventually(lambda: has_queues(stays, topic, QUEUES))


async def has_queues(consumer: Consumer, topic: str, count: int) -> bool:
    return sum(queue.topic == topic for queue in consumer.assignment) == count


async def send_back(nameserver: str, topic: str) -> None:
    await make_topic(nameserver, topic, queues=1)
    async with (
        Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer,
        Consumer(f"G_{topic}", topic, nameserver=nameserver, start="earliest") as consumer,
    ):
        await producer.send(Message(topic, b"again"))
        (first,) = await take(consumer, 1)
        await first.retry(after=1)
        (second,) = await take(consumer, 1)
        assert (second.body, second.reconsume_times, second.topic) == (b"again", 1, topic)


async def look_up(nameserver: str, topic: str) -> None:
    await make_topic(nameserver, topic)
    async with (
        Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer,
        Admin(nameserver=nameserver) as admin,
    ):
        await producer.send_many(messages(topic, 20))
        result = await producer.send(Message(topic, b"wanted", key="rare"))

        async def is_indexed() -> bool:
            return bodies(await admin.query_by_key(topic, "rare")) == [b"wanted"]

        await eventually(is_indexed)
        for found in (
            await admin.message(result.offset_message_id),
            await admin.message(result.message_id, topic),
        ):
            assert found is not None
            assert found.body == b"wanted"
        stats = await admin.topic_stats(topic)
        assert sum(offset.max_offset for offset in stats.values()) == 21


async def administer(nameserver: str, topic: str) -> None:
    async with Admin(nameserver=nameserver) as admin:
        (node,) = await admin.cluster()
        assert (node.cluster, node.broker_name, node.broker_id) == ("DefaultCluster", "broker-a", 0)

        async def tells_rates() -> bool:
            try:
                return "putTps" in await admin.runtime_info(node.address)
            except BrokerError as error:
                # Apache's broker fails to look at its first sample in its first second.
                assert "NoSuchElementException" in str(error)  # noqa: PT017
                return False

        await eventually(tells_rates)
        assert (await admin.broker_config(node.address))["brokerName"] == "broker-a"
        await admin.create_topic(topic, queues=3)
        assert topic in await admin.topics()
        config = (await admin.topic(topic))["broker-a"]
        assert (config.read_queue_nums, config.write_queue_nums) == (3, 3)
        await admin.delete_topic(topic)
        assert topic not in await admin.topics()


async def reset_a_group(nameserver: str, topic: str) -> None:
    await make_topic(nameserver, topic, queues=1)
    group = f"G_{topic}"
    async with Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer:
        await producer.send_many(messages(topic, 10))
    async with Consumer(group, topic, nameserver=nameserver, start="earliest") as consumer:
        await take(consumer, 10)
    async with Admin(nameserver=nameserver) as admin:
        assert set((await admin.reset_offsets(group, topic, "earliest")).values()) == {0}
    async with Consumer(group, topic, nameserver=nameserver) as consumer:
        assert len(await take(consumer, 10)) == 10


async def take_out_and_settle(nameserver: str, topic: str) -> None:
    await make_topic(nameserver, topic)
    async with (
        Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer,
        SimpleConsumer(f"G_{topic}", topic, nameserver=nameserver) as consumer,
    ):
        sent = messages(topic, 20)
        await producer.send_many(sent)
        found: list[PoppedMessage] = []
        while len(found) < len(sent):
            found += await consumer.receive(wait=20, invisible=20)
        assert bodies(found) == bodies(sent)
        await consumer.ack(found[:15])
        async with anyio.create_task_group() as tasks:
            for message in found[15:17]:
                tasks.start_soon(consumer.ack, [message])
        await found[17].extend(60)
        await found[17].ack()
        await found[18].reject()
        await found[19].retry(after=1)
        (again,) = await consumer.receive(wait=30)
        assert (again.body, again.topic, again.reconsume_times) == (found[19].body, topic, 1)
        await again.ack()
        # Behind the end of all invisible times.
        assert await consumer.receive(wait=25) == []
    assert bodies(await read(nameserver, f"%DLQ%G_{topic}", 1)) == [found[18].body]


async def pop_in_a_loop(nameserver: str, topic: str) -> None:
    await make_topic(nameserver, topic)
    sent, seen = messages(topic, 50), Counter[bytes]()
    async with Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer:
        await producer.send_many(sent)
    async with Consumer(
        f"G_{topic}", topic, mode="pop", retry_delay=1, nameserver=nameserver
    ) as consumer:
        async for message in consumer:
            assert message.topic == topic
            seen[message.body] += 1
            if message.body == sent[7].body and not message.reconsume_times:
                await message.retry()
            if sum(seen.values()) == len(sent) + 1:
                break
    assert seen == Counter(message.body for message in [*sent, sent[7]])
    async with SimpleConsumer(f"G_{topic}", topic, nameserver=nameserver) as rest:
        # Behind the time for which they were out.
        assert await rest.receive(wait=35) == []


CHECKS = (
    administer,
    be_refused,
    consume_in_a_group,
    consume_in_order,
    create_topic_by_sending,
    look_up,
    pull_by_tag,
    pull_seek_and_commit,
    reset_a_group,
    send_back,
    send_big_bodies,
    send_every_field,
    send_in_a_pipeline,
    send_in_batches,
    send_one_by_one,
    send_one_way,
    share_the_queues,
)
# Each ends when all times are over for which messages were out.
POPS = (pop_in_a_loop, take_out_and_settle)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_client(
    check: Callable[[str, str], Awaitable[None]], backend: str, nameserver: str
) -> None:
    async def within_time() -> None:
        with anyio.fail_after(TIMEOUT_S):
            await check(nameserver, f"PY_{check.__name__}_{backend}")

    anyio.run(within_time, backend=backend)


def test_all_pops_side_by_side(nameserver: str) -> None:
    async def within_time(backend: str) -> None:
        with anyio.fail_after(TIMEOUT_S):
            async with anyio.create_task_group() as tasks:
                for check in POPS:
                    tasks.start_soon(check, nameserver, f"PY_{check.__name__}_{backend}")

    with ThreadPoolExecutor() as threads:
        runs = [
            threads.submit(partial(anyio.run, within_time, each, backend=each)) for each in BACKENDS
        ]
    for run in runs:
        run.result()


def test_blocking_client(nameserver: str) -> None:
    topic = "PY_blocking"
    sent = messages(topic, 50)
    with headrace.blocking.Admin(nameserver=nameserver) as admin:
        admin.create_topic(topic, queues=QUEUES)
    with (
        headrace.blocking.Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer,
        headrace.blocking.Consumer(
            "G_PY_blocking", topic, nameserver=nameserver, start="earliest"
        ) as consumer,
    ):
        producer.send_many(sent)
        found = [message for _, message in zip(sent, consumer, strict=False)]
    assert bodies(found) == bodies(sent)
