"""What ``headrace bench`` measures: five ways to use a cluster, one process each."""

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
_STALL_MS = 10_000
# Of a run, and when its message was due, on this process's clock.
_STAMP = struct.Struct("8sd")
_now = time.perf_counter


class Setup(NamedTuple):
    """What all workloads share.

    in_flight: for ``pipeline``. rate: messages a second for ``latency``.
    """

    topic: str
    body_bytes: int
    seconds: float
    in_flight: int
    rate: float
    nameserver: str | None

    def producer(self) -> Producer:
        """A Producer that sends bodies as they are: random bytes are nothing to compress."""
        return Producer(nameserver=self.nameserver, compress_from_bytes=None)


class Outcome(NamedTuple):
    """Messages that were stored or received, in ``seconds``, with this process's ``cpu_s``.

    latencies: in seconds. errors: messages that were not.
    """

    messages: int
    seconds: float
    cpu_s: float
    latencies: array[float]
    errors: int


class _Tally:
    """Counts from now on."""

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
        """Raises CommandFailed when nothing got through, for there is nothing to say then."""
        seconds, cpu_s = _now() - self.begin, time.process_time() - self._cpu
        if not self.messages:
            raise CommandFailed(f"no message got through, {self.errors} failed")
        return Outcome(self.messages, seconds, cpu_s, self.latencies, self.errors)


async def send(setup: Setup) -> Outcome:
    """One message after the other."""
    message = Message(setup.topic, os.urandom(setup.body_bytes))
    async with setup.producer() as producer:
        # Opens the connections, and raises what is wrong with the cluster or the topic.
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
    """Many messages under way at once; latency is from handing one over to its answer."""
    body = os.urandom(setup.body_bytes)
    # Answers come in any order; a message is its own key here.
    started: dict[int, float] = {}

    def on_result(message: Message, result: SendResult | HeadraceError) -> None:
        latency = _now() - started.pop(id(message))
        if isinstance(result, HeadraceError):
            tally.errors += 1
        else:
            tally.stored(1, latency)

    async with setup.producer() as producer:
        # Two, for only what goes together loads the code for it.
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
    """A thousand messages a call, or what fits into 4 MiB; latency is the call's."""
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
    """The topic from its beginning to its end, or as far as the time lets it come."""
    async with PullConsumer(nameserver=setup.nameserver) as consumer:
        queues = await consumer.queues(setup.topic)
        if not queues:
            raise CommandFailed(f"topic {setup.topic} has no queue to read: look at its perm")
        wanted = 0
        for queue in queues:
            wanted += await consumer.max_offset(queue) - await consumer.min_offset(queue)
        if not wanted:
            raise CommandFailed(f"topic {setup.topic} has no messages to receive: send some first")
        await consumer.assign(queues)
        tally = _Tally(setup.seconds)
        while tally.messages < wanted and _now() < tally.deadline:
            batch = await consumer.receive_many(timeout_ms=_STALL_MS)
            if not batch:
                raise CommandFailed(
                    f"{wanted - tally.messages} messages of {setup.topic} did not come within "
                    f"{_STALL_MS / 1000:g} s: does somebody delete, or was the topic made anew?"
                )
            tally.messages += len(batch)
        return tally.outcome()


async def latency(setup: Setup) -> Outcome:
    """From when a message is due to be sent to its arrival at a consumer, at a steady rate."""
    run, total = os.urandom(8), max(1, int(setup.rate * setup.seconds))
    async with (
        PullConsumer(nameserver=setup.nameserver, start="last") as consumer,
        setup.producer() as producer,
        trio.open_nursery() as nursery,
    ):
        await consumer.assign(await consumer.queues(setup.topic))
        await producer.queues(setup.topic)
        tally = _Tally(setup.seconds)
        nursery.start_soon(_send_steadily, setup, producer, run, total, tally)
        await _receive_stamped(consumer, run, total, tally)
        tally.errors = total - tally.messages
        return tally.outcome()


async def _send_steadily(
    setup: Setup, producer: Producer, run: bytes, total: int, tally: _Tally
) -> None:
    padding = os.urandom(setup.body_bytes - _STAMP.size)
    # What fails does not arrive, and is counted as that.
    async with producer.pipeline(on_result=lambda _message, _result: None) as sends:
        for number in range(total):
            due = tally.begin + number / setup.rate
            # Late ones are stamped as due, or else waiting for a slow broker would not count.
            await trio.sleep(max(0, due - _now()))
            with suppress(HeadraceError):
                await sends.send(Message(setup.topic, _STAMP.pack(run, due) + padding))


async def _receive_stamped(consumer: PullConsumer, run: bytes, total: int, tally: _Tally) -> None:
    """Until all have come, or none comes any more."""
    while tally.messages < total:
        batch = await consumer.receive_many(timeout_ms=_STALL_MS)
        if not batch:
            return
        arrived = _now()
        for body in batch.values():
            # Others may use the topic too.
            if body.startswith(run):
                tally.stored(1, arrived - _STAMP.unpack_from(body)[1])


WORKLOADS = {
    "send": send,
    "pipeline": pipeline,
    "send-many": send_many,
    "receive": receive,
    "latency": latency,
}
