"""Ordered consumers: one message of a queue at a time, retries in place, and locks that end."""

from __future__ import annotations

import logging
import math
import random
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
from anyio.abc import ByteStream
from trio.testing import MockClock

from headrace import Consumer, Message
from headrace.consumer.assignment import LOCK_TRUST_S
from headrace.consumer.inbox import Inbox, MessageIterator
from headrace.consumer.process_queue import Limits, ProcessQueue
from headrace.embedded import Embedded
from headrace.errors import ClientClosed, ConfigurationError, HeadraceError
from headrace.producer.producer import Producer
from headrace.received import MessageBatch, ReceivedMessage
from headrace_broker.config import BrokerConfig
from headrace_broker.server import Broker
from headrace_daemon.network import MemoryNetwork
from headrace_nameserver.config import NameServerConfig
from headrace_nameserver.server import NameServer
from headrace_protocol.bodies import MessageQueue
from headrace_protocol.columns import RecordColumns
from headrace_protocol.message import encode_record
from tests.simulation.cluster import NAMESERVER
from tests.support.fixtures import in_memory
from tests.support.verbs import produce, take, take_nothing

OUTAGES_S = [0] * 17 + [45, 70]
QUEUES = 2
MESSAGES = 10_000
# Shorter than the 5 s between the end of a client's trust in its lock and the end of the lock.
HANDLER_S_MAX = 4.0


mq = pytest.fixture(in_memory)


# -- handing out -----------------------------------------------------------------------------------


def batch(queue: MessageQueue, offset: int, count: int = 1) -> MessageBatch:
    records = b"".join(
        encode_record(topic="T", queue_id=queue.queue_id, queue_offset=each, body=b"%d" % each)
        for each in range(offset, offset + count)
    )
    return MessageBatch(queue, offset, offset + count, RecordColumns.from_records(records))


def process_queue(queue_id: int) -> ProcessQueue:
    return ProcessQueue(MessageQueue("T", "b", queue_id), Limits(100, 1 << 20), 0)


def opened_inbox() -> Inbox:
    inbox = Inbox("Consumer", ordered=True)
    inbox.open()
    return inbox


async def test_deliveries_of_a_queue_keep_their_order_while_others_overtake_them() -> None:
    inbox, one, two = opened_inbox(), process_queue(1), process_queue(2)
    inbox.put(one.add(batch(one.queue, 0)))
    first = inbox.take_ready()
    assert first is not None
    for queue, offset in ((one, 1), (two, 0), (one, 2)):
        inbox.put(queue.add(batch(queue.queue, offset)))
    taken = []
    async with trio.open_nursery() as nursery:

        async def other_task() -> None:
            while delivery := inbox.take_ready():
                taken.append((delivery.process_queue.queue.queue_id, delivery.batch.queue_offset))
                delivery.next_part()
                inbox.finish(delivery)
                if len(taken) == 1:
                    inbox.finish(first)

        nursery.start_soon(other_task)
    assert taken == [(2, 0), (1, 1), (1, 2)]


async def test_no_message_is_handed_out_without_the_lock(autojump_clock: object) -> None:
    inbox, queue = opened_inbox(), process_queue(1)
    queue.locked_until = trio.current_time() + LOCK_TRUST_S
    inbox.put(queue.add(batch(queue.queue, 0, 10)))
    delivery = inbox.take_ready()
    assert delivery is not None
    assert len(delivery.make_ready()) == 1
    delivery.ready.popleft()
    await trio.sleep(LOCK_TRUST_S)
    assert not delivery.has_more
    assert inbox.take_ready() is None


async def test_a_queue_yields_to_others_after_a_minute(autojump_clock: object) -> None:
    inbox, one, two = opened_inbox(), process_queue(1), process_queue(2)
    for queue, offset, count in ((one, 0, 5), (one, 5, 1), (two, 0, 1)):
        queue.locked_until = math.inf
        inbox.put(queue.add(batch(queue.queue, offset, count)))
    taken = []
    async for message in MessageIterator(inbox):
        taken.append((message.queue.queue_id, message.queue_offset))
        await trio.sleep(25)
        if len(taken) == 7:
            break
    assert taken == [(1, 0), (1, 1), (1, 2), (2, 0), (1, 3), (1, 4), (1, 5)]
    assert (one.processed_offset, two.processed_offset) == (5, 1)


# -- retries ---------------------------------------------------------------------------------------


async def test_a_message_is_retried_before_the_next_one(
    mq: Embedded, autojump_clock: object
) -> None:
    await produce(mq, 10, queues=1)
    seen, times = [], []
    async with mq.consumer("g", "T", ordered=True) as consumer:
        async for message in consumer:
            seen.append(int(message.body))
            times.append(trio.current_time())
            if message.body == b"3" and seen.count(3) < 3:
                await message.retry(after=7)
            if seen[-1] == 9:
                break
    assert seen == [0, 1, 2, 3, 3, 3, *range(4, 10)]
    assert times[4] - times[3] == pytest.approx(7, abs=0.1)


async def test_other_queues_continue_during_a_retry(mq: Embedded, autojump_clock: object) -> None:
    await produce(mq, 40, queues=4)
    seen: list[tuple[int, bytes]] = []
    retried = None
    async with mq.consumer("g", "T", ordered=True) as consumer:
        async for message in consumer:
            seen.append((message.queue.queue_id, message.body))
            if retried is None:
                retried = seen[0]
                await message.retry(after=30)
            if len(seen) == 41:
                break
    assert retried is not None
    again = seen.index(retried, 1)
    assert again == 41 - [queue_id for queue_id, _ in seen[1:]].count(retried[0])
    assert len(set(seen)) == 40


async def test_a_batch_is_retried_from_a_message_on(mq: Embedded, autojump_clock: object) -> None:
    await produce(mq, 10, queues=1)
    seen = []
    async with mq.consumer("g", "T", ordered=True) as consumer:
        async for part in consumer.batches(max_messages=4):
            messages = list(part)
            seen.append([int(message.body) for message in messages])
            if len(seen) == 1:
                await messages[1].retry()
            if seen[-1][-1] == 9:
                break
    assert seen == [[0, 1, 2, 3], [1, 2, 3, 4], [5, 6, 7, 8], [9]]


async def test_the_last_attempt_makes_a_dead_letter(mq: Embedded, autojump_clock: object) -> None:
    await produce(mq, 3, queues=1)
    seen = []
    async with mq.consumer("g", "T", ordered=True, max_attempts=3) as consumer:
        async for message in consumer:
            seen.append(int(message.body))
            if message.body == b"1":
                await message.retry()
            if message.body == b"2":
                break
    assert seen == [0, 1, 1, 1, 2]
    async with mq.consumer("undertaker", "%DLQ%g") as consumer:
        assert await take(consumer, 1) == [1]
        await take_nothing(consumer)


async def test_retries_that_cannot_be(mq: Embedded) -> None:
    await produce(mq, 2, queues=1)
    async with mq.consumer("g", "T", ordered=True) as consumer:
        messages = [message async for message in take_two(consumer)]
        with pytest.raises(ConfigurationError, match="retry the current message"):
            await messages[0].retry()
        with pytest.raises(ConfigurationError, match=r"after=31: must be 0.01 to 30 seconds"):
            await messages[1].retry(after=31)
    with pytest.raises(ClientClosed):
        await messages[1].retry()
    with pytest.raises(ConfigurationError, match="max_attempts=0"):
        mq.consumer("g", "T", ordered=True, max_attempts=0)


async def take_two(consumer: Consumer) -> AsyncIterator[ReceivedMessage]:
    count = 0
    async for message in consumer:
        yield message
        count += 1
        if count == 2:
            break


# -- two members and a network that breaks ---------------------------------------------------------


class Machine:
    """A client's connections, which can be cut and refused."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self._streams: list[ByteStream] = []
        self._up = True

    async def connect(self, address: str) -> ByteStream:
        if not self._up:
            raise ConnectionRefusedError("no network")
        stream = await self._network.connect(address)
        self._streams.append(stream)
        return stream

    async def cut(self, outage_s: float) -> None:
        self._up = False
        for stream in self._streams:
            await stream.aclose()
        self._streams.clear()
        await trio.sleep(outage_s)
        self._up = True


class Handlers:
    """The messages that two members process, and overlaps of two handlers of a queue."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.running: Counter[MessageQueue] = Counter()
        self.overlaps: list[str] = []
        self.owners: dict[MessageQueue, int] = {}
        self.handovers = 0
        self.next_offset: Counter[MessageQueue] = Counter()
        self.handled_count = 0

    async def handle(self, member: int, consumer: Consumer) -> None:
        async for message in consumer:
            queue = message.queue
            if self.running[queue]:
                self.overlaps.append(f"{queue} at {trio.current_time()}")
            # Nothing is skipped, though some messages come again.
            assert message.queue_offset <= self.next_offset[queue]
            self.next_offset[queue] = max(self.next_offset[queue], message.queue_offset + 1)
            self.handovers += self.owners.get(queue, member) != member
            self.owners[queue] = member
            self.running[queue] += 1
            try:
                await trio.sleep(self.rng.uniform(2, HANDLER_S_MAX))
            finally:
                self.running[queue] -= 1
            self.handled_count += 1


async def live(handlers: Handlers, member: int, machine: Machine) -> None:
    """One member, which leaves the group and joins it again at times."""
    while True:
        try:
            async with Consumer(
                "g",
                "T",
                nameserver=NAMESERVER,
                start="earliest",
                ordered=True,
                connect=machine.connect,
            ) as consumer:
                with trio.move_on_after(handlers.rng.uniform(50, 2000)):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(handlers.handle, member, consumer)
                        nursery.start_soon(handlers.handle, member, consumer)
        except HeadraceError:
            await trio.sleep(1)


class WallClock:
    """The broker's clocks, which follow the loop's."""

    def __init__(self, clock: MockClock) -> None:
        self._clock = clock

    def now_ms(self) -> int:
        return self.steady_ms()

    def steady_ms(self) -> int:
        return int(self._clock.current_time() * 1000)


async def start_daemons(
    nursery: trio.Nursery, network: MemoryNetwork, folder: Path, clock: MockClock
) -> None:
    port = int(NAMESERVER.rpartition(":")[2])
    await nursery.start(NameServer(NameServerConfig(listen_port=port), network).run)
    config = BrokerConfig(
        broker_name="b",
        namesrv_addr=NAMESERVER,
        store_path_root_dir=folder / "store",
        default_topic_queue_nums=QUEUES,
        mapped_file_size_commit_log=1 << 22,
    )
    await nursery.start(Broker(config, network, WallClock(clock)).run)


@pytest.mark.slow
@pytest.mark.parametrize("breaks", [100, pytest.param(1000, marks=pytest.mark.long)])
async def test_handlers_of_a_queue_never_overlap(
    tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, breaks: int
) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # noqa: T201
    # Each pull that an outage fails is a warning, each idle queue an error.
    caplog.set_level(logging.CRITICAL, "headrace")
    rng = random.Random(seed)
    network, handlers = MemoryNetwork(), Handlers(rng)
    machines = [Machine(network), Machine(network)]
    async with trio.open_nursery() as nursery:
        await start_daemons(nursery, network, tmp_path, autojump_clock)
        async with Producer(nameserver=NAMESERVER, connect=network.connect) as producer:
            await producer.send(Message("T", b"makes the topic"))
            await producer.send_many([b"x"] * MESSAGES, topic="T")
        for number, machine in enumerate(machines):
            nursery.start_soon(live, handlers, number, machine)
        for _ in range(breaks):
            await trio.sleep(rng.uniform(0, 2))
            await rng.choice(machines).cut(rng.choice(OUTAGES_S))
        nursery.cancel_scope.cancel()
    assert handlers.overlaps == []
    assert handlers.handovers > breaks / 33
    assert handlers.handled_count > breaks
