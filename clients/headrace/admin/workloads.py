"""The five workloads of ``headrace bench``, each run in a single process."""

from __future__ import annotations

import os
import struct
import time
from array import array
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import trio

from headrace.admin.failures import CommandFailed
from headrace.consumer.pull import PullConsumer
from headrace.errors import HeadraceError
from headrace.messages import BODY_BYTES_MAX, Message
from headrace.producer.producer import Producer

if TYPE_CHECKING:
    from headrace.messages import SendResult

_MANY = 1000
_DELIVERY_TIMEOUT_MS_MIN = 3000
# Id of the run, and the time at which the message was due, on this process's clock.
_STAMP = struct.Struct("8sd")
_now = time.perf_counter


class Setup(NamedTuple):
    """Parameters shared by all workloads.

    in_flight: used by ``pipeline``. rate: messages per second of ``latency``.
    stall_s: a consumer that gets nothing for so long gets no more.
    """

    topic: str
    body_bytes: int
    seconds: float
    in_flight: int
    rate: float
    nameserver: str | None
    stall_s: float = 10.0

    def producer(self) -> Producer:
        """A Producer without compression: random bytes do not compress.

        A message is given up once it takes as long as the whole workload, and longer than one
        attempt may take.
        """
        return Producer(
            nameserver=self.nameserver,
            compress_from_bytes=None,
            delivery_timeout_ms=max(1000 * self.seconds, _DELIVERY_TIMEOUT_MS_MIN),
        )


class Outcome(NamedTuple):
    """The number of messages stored or received in ``seconds``, using ``cpu_s`` of CPU time here.

    latencies: in seconds. errors: number of messages that were not stored or received.
    """

    messages: int
    seconds: float
    cpu_s: float
    latencies: array[float]
    errors: int


class _Tally:
    """Counters that start on construction."""

    def __init__(self, seconds: float) -> None:
        self.messages = self.errors = 0
        self.latencies = array("d")
        self._cpu = time.process_time()
        self.begin = _now()
        self.deadline = self.begin + seconds

    def stored(self, messages: int, latency: float) -> None:
        self.messages += messages
        self.latencies.append(latency)

    def outcome(self) -> Outcome:
        """Compute the outcome. Raises CommandFailed if no message succeeded."""
        seconds, cpu_s = _now() - self.begin, time.process_time() - self._cpu
        if not self.messages:
            raise CommandFailed(f"no message got through, {self.errors} failed")
        return Outcome(self.messages, seconds, cpu_s, self.latencies, self.errors)


async def send(setup: Setup) -> Outcome:
    """Send one message after another."""
    message = Message(setup.topic, os.urandom(setup.body_bytes))
    async with setup.producer() as producer:
        # Opens the connections, and raises any problem with the cluster or the topic.
        await producer.send(message)
        tally = _Tally(setup.seconds)
        while (begin := _now()) < tally.deadline:
            try:
                await producer.send(message)
            except HeadraceError:
                tally.errors += 1
            else:
                tally.stored(1, _now() - begin)
        return tally.outcome()


async def pipeline(setup: Setup) -> Outcome:
    """Send with many messages in flight; latency runs from ``send`` to the response."""
    body = os.urandom(setup.body_bytes)
    # Responses arrive in any order, so messages are identified by object id.
    started: dict[int, float] = {}

    def on_result(message: Message, result: SendResult | HeadraceError) -> None:
        latency = _now() - started.pop(id(message))
        if isinstance(result, HeadraceError):
            tally.errors += 1
        else:
            tally.stored(1, latency)

    async with setup.producer() as producer:
        # Two messages: a single one would not load the code for batches.
        await producer.send_many([body, body], topic=setup.topic)
        tally = _Tally(setup.seconds)
        async with producer.pipeline(max_in_flight=setup.in_flight, on_result=on_result) as sends:
            while (begin := _now()) < tally.deadline:
                message = Message(setup.topic, body)
                started[id(message)] = begin
                try:
                    await sends.send(message)
                except HeadraceError as error:
                    on_result(message, error)
        return tally.outcome()


async def send_many(setup: Setup) -> Outcome:
    """Send a thousand messages per call, or as many as fit into 4 MiB; latency is per call."""
    count = max(1, min(_MANY, BODY_BYTES_MAX // setup.body_bytes))
    bodies = [os.urandom(setup.body_bytes)] * count
    async with setup.producer() as producer:
        await producer.send_many(bodies, topic=setup.topic)
        tally = _Tally(setup.seconds)
        while (begin := _now()) < tally.deadline:
            try:
                await producer.send_many(bodies, topic=setup.topic)
            except HeadraceError:
                tally.errors += count
            else:
                tally.stored(count, _now() - begin)
        return tally.outcome()


async def receive(setup: Setup) -> Outcome:
    """Receive the topic from its beginning to its end, or until the time is up."""
    async with PullConsumer(nameserver=setup.nameserver) as consumer:
        queues = await consumer.queues(setup.topic)
        if not queues:
            raise CommandFailed(f"topic {setup.topic} has no queue to read; check its permission")
        wanted = 0
        for queue in queues:
            wanted += await consumer.max_offset(queue) - await consumer.min_offset(queue)
        if not wanted:
            raise CommandFailed(f"topic {setup.topic} has no messages to receive; send some first")
        await consumer.assign(queues)
        tally = _Tally(setup.seconds)
        while tally.messages < wanted and _now() < tally.deadline:
            batch = await consumer.receive_many(timeout_ms=1000 * setup.stall_s)
            if not batch:
                raise CommandFailed(
                    f"{wanted - tally.messages} messages of {setup.topic} did not arrive within "
                    f"{setup.stall_s:g} s: were messages deleted, or was the topic recreated?"
                )
            tally.messages += len(batch)
        return tally.outcome()


async def latency(setup: Setup) -> Outcome:
    """Measure, at a steady rate, from a message's due time to its arrival at a consumer."""
    run, total = os.urandom(8), max(1, int(setup.rate * setup.seconds))
    async with (
        PullConsumer(nameserver=setup.nameserver, start="latest") as consumer,
        setup.producer() as producer,
        trio.open_nursery() as nursery,
    ):
        await consumer.assign(await consumer.queues(setup.topic))
        await producer.queues(setup.topic)
        tally = _Tally(setup.seconds)
        nursery.start_soon(_send_steadily, setup, producer, run, total, tally)
        await _receive_stamped(setup, consumer, run, total, tally)
        tally.errors = total - tally.messages
        return tally.outcome()


async def _send_steadily(
    setup: Setup, producer: Producer, run: bytes, total: int, tally: _Tally
) -> None:
    padding = os.urandom(setup.body_bytes - _STAMP.size)
    # A failed message does not arrive, and is counted as an error for that reason.
    async with producer.pipeline(on_result=lambda _message, _result: None) as sends:
        for number in range(total):
            due = tally.begin + number / setup.rate
            # Late messages keep their due time, so that waiting for a slow broker counts.
            await trio.sleep(max(0, due - _now()))
            with suppress(HeadraceError):
                await sends.send(Message(setup.topic, _STAMP.pack(run, due) + padding))


async def _receive_stamped(
    setup: Setup, consumer: PullConsumer, run: bytes, total: int, tally: _Tally
) -> None:
    """Receive until all messages have arrived, or no more arrive."""
    while tally.messages < total:
        batch = await consumer.receive_many(timeout_ms=1000 * setup.stall_s)
        if not batch:
            return
        arrived = _now()
        for body in batch.values():
            # Other clients may use the topic too.
            if body.startswith(run):
                tally.stored(1, arrived - _STAMP.unpack_from(body)[1])


WORKLOADS = {
    "send": send,
    "pipeline": pipeline,
    "send-many": send_many,
    "receive": receive,
    "latency": latency,
}
