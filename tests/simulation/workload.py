"""Producers and consumers as programs use them; what they send and get goes into the history."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec
import trio

from headrace import Consumer, Message, Producer, PullConsumer
from headrace.errors import HeadraceError, RouteNotFound
from headrace.messages import EncodedMessage, SendResult
from headrace.received import ReceivedMessage
from headrace_protocol.bodies import MessageQueue
from headrace_protocol.codes import ResponseCode
from headrace_protocol.message import WAIT
from tests.simulation.cluster import NAMESERVER, BrokerMachine
from tests.simulation.history import BATCH_KEY, FILTER, FILTERED, Ack, History, Place, Sent
from tests.simulation.network import FaultyNetwork, LifeNetwork

TOPIC = "Simulated"
KEYS = 3
MESSAGES_PER_KEY = 16
BATCHES = 4
BATCH_COUNT_MAX = 20
PAUSE_S_MAX = 1.2
BODY_BYTES = (10, 10, 200, 1500)
TAGS = ("", "red", "green")
UNWAITING_PROBABILITY = 0.2
WORDLESS_PROBABILITY = 0.5


class Unwaiting(Message, gc=False):
    """Does not want its broker to wait for the disk, as Apache's clients can say."""

    def encoded(self) -> EncodedMessage:
        whole = super().encoded()
        properties = whole.properties + f"{WAIT}\x01false\x02".encode()
        return msgspec.structs.replace(whole, properties=properties)


class Workload:
    """All clients of a run."""

    def __init__(
        self, network: FaultyNetwork, history: History, brokers: list[BrokerMachine]
    ) -> None:
        self.network = network
        self.rng: Random = network.rng
        self.history = history
        self.brokers = {broker.name: broker for broker in brokers}

    # -- producers ---------------------------------------------------------------------------------

    async def produce(self) -> None:
        """Everything that is sent: keys one message after the other, and batches."""
        producer = Producer(nameserver=NAMESERVER, connect=self.network.connect)
        async with producer, trio.open_nursery() as nursery:
            for number in range(KEYS):
                nursery.start_soon(self._send_key, producer, f"key{number}")
            nursery.start_soon(self._send_batches, producer)

    async def _send_key(self, producer: Producer, key: str) -> None:
        for number in range(MESSAGES_PER_KEY):
            waits = self.rng.random() >= UNWAITING_PROBABILITY
            message, sent_s = self.message(key, number, waits=waits), trio.current_time()
            try:
                result = await producer.send(message)
            except HeadraceError:
                pass  # it may be there or not
            else:
                self._acked(result, [message], sent_s)
            await trio.sleep(self.rng.random() * PAUSE_S_MAX)

    async def _send_batches(self, producer: Producer) -> None:
        number = 0
        for _ in range(BATCHES):
            count = self.rng.randint(1, BATCH_COUNT_MAX)
            batch = [self.message(BATCH_KEY, number + index) for index in range(count)]
            number += count
            sent_s = trio.current_time()
            try:
                results = await producer.send_many(batch)
            except HeadraceError:
                continue
            # All of one key, so all in one queue.
            for result in results:
                self._acked(result, batch[: result.message_count], sent_s)
                del batch[: result.message_count]
            await trio.sleep(self.rng.random() * 4 * PAUSE_S_MAX)

    def message(self, key: str, number: int, *, waits: bool = True) -> Message:
        rng = self.rng
        body = f"{key}/{number}/".encode() + rng.randbytes(rng.choice(BODY_BYTES))
        sent = self.history.sent[body] = Sent(key, number, rng.choice(TAGS), body, waits)
        kind = Message if waits else Unwaiting
        return kind(TOPIC, body, key=key, tag=sent.tag)

    def _acked(self, result: SendResult, messages: list[Message], sent_s: float) -> None:
        if result.status != ResponseCode.SUCCESS:
            return  # stored, but the broker could not bring it to disk
        now_s = trio.current_time()
        life = self.brokers[result.queue.broker_name].life_number
        for index, message in enumerate(messages):
            place = Place(result.queue, result.queue_offset + index)
            self.history.acks.append(Ack(place, message.body, life, sent_s, now_s))

    # -- consumers ---------------------------------------------------------------------------------

    async def consume(self, group: str, member: int) -> None:
        """A member of a group that sometimes ends without a word, and comes again."""
        while True:
            life_s = 5 + self.rng.random() * 30
            with trio.move_on_after(life_s) as scope:
                if self.network.is_calm:
                    scope.deadline = float("inf")
                try:
                    await self._consume(group, member)
                except HeadraceError:
                    await trio.sleep(1)

    async def _consume(self, group: str, member: int) -> None:
        network = LifeNetwork(self.network)
        consumer = Consumer(
            group,
            TOPIC,
            nameserver=NAMESERVER,
            start="earliest",
            ordered=group.startswith("ordered"),
            filter=FILTER if group.startswith(FILTERED) else None,
            connect=network.connect,
        )
        async with consumer:
            try:
                async for message in consumer:
                    self.history.received(group, member, message)
            except trio.Cancelled:
                if self.rng.random() < WORDLESS_PROBABILITY:
                    network.end()
                raise

    async def read_all(self) -> None:
        """Read every queue from its first to its last offset, when nothing fails any more."""
        # A nameserver that was started again knows a broker once that registers.
        while not await self.read_queues():  # noqa: ASYNC110
            await trio.sleep(1)

    def _are_all(self, queues: Sequence[MessageQueue]) -> bool:
        return {queue.broker_name for queue in queues} == self.brokers.keys()

    async def read_queues(self) -> bool:
        consumer = PullConsumer(nameserver=NAMESERVER, connect=self.network.connect)
        async with consumer:
            try:
                queues = await consumer.queues(TOPIC)
            except RouteNotFound:
                return False
            if not self._are_all(queues):
                return False
            firsts = {queue: await consumer.min_offset(queue) for queue in queues}
            ends = {queue: await consumer.max_offset(queue) for queue in queues}
            await consumer.assign(queues)
            messages: dict[MessageQueue, list[ReceivedMessage]] = {queue: [] for queue in queues}
            while any(consumer.position(queue) < end for queue, end in ends.items()):
                batch = await consumer.receive_many(timeout_ms=60_000)
                if batch is None:
                    break
                messages[batch.queue] += batch
            if firsts != {queue: await consumer.min_offset(queue) for queue in queues}:
                return False  # some have expired meanwhile
            are_read = all(consumer.position(queue) >= end for queue, end in ends.items())
            assert are_read, "what is there can be read"
        self.history.ended_s = trio.current_time()
        for queue in queues:
            self.history.read_finally(queue, firsts[queue], messages[queue])
        return True
