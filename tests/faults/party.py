"""Producers and consumers as programs of their own, which write down what they see.

``python -m tests.faults.party KIND NUMBER NAMESERVER FILE``; SIGTERM lets them finish.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import trio

from headrace import Consumer, Message, Producer, SendResult
from headrace.errors import HeadraceError
from tests.faults.history import LANES, Identity, Recorder, identify

TOPIC, GROUP = "Faults", "fault_readers"
PAUSE_S = 0.002
AFTER_FAILURE_S = 0.02
BURST = 160
BURST_PAUSE_S = 0.02
MESSAGES_PER_BATCH = 500


class Sender:
    """A producer's own numbers, and what it was told of them."""

    def __init__(self, number: int, path: Path) -> None:
        self.number = number
        self.sent = [0] * LANES
        self._recorder = Recorder(path)

    def next(self, lane: int) -> Message:
        identity = Identity(self.number, lane, self.sent[lane])
        self.sent[lane] += 1
        return Message(TOPIC, identity.body(), key=identity.key)

    def told(self, message: Message, outcome: SendResult | HeadraceError) -> None:
        if isinstance(outcome, SendResult):
            place = outcome.queue.queue_id, outcome.queue_offset
            self._recorder.add([(*place, identify(message.body))])


async def send_singly(sender: Sender, nameserver: str, ends: trio.Event) -> None:
    """One message after the other, of each key; what fails is left at that."""

    async def send(lane: int) -> None:
        while not ends.is_set():
            message = sender.next(lane)
            try:
                sender.told(message, await producer.send(message))
            except HeadraceError:
                await trio.sleep(AFTER_FAILURE_S)
            await trio.sleep(PAUSE_S)

    async with Producer(nameserver=nameserver) as producer, trio.open_nursery() as nursery:
        for lane in range(LANES):
            nursery.start_soon(send, lane)


async def send_in_bulk(sender: Sender, nameserver: str, ends: trio.Event) -> None:
    """Bursts of whole records; those under way are tried again by the client."""
    async with (
        Producer(nameserver=nameserver) as producer,
        producer.pipeline(on_result=sender.told) as pipeline,
    ):
        while not ends.is_set():
            for index in range(BURST):
                # Refused at once while the nameserver knows of no broker.
                with suppress(HeadraceError):
                    await pipeline.send(sender.next(index % LANES))
            await trio.sleep(BURST_PAUSE_S)


async def produce(
    send: Callable[[Sender, str, trio.Event], Awaitable[None]],
    number: int,
    nameserver: str,
    path: Path,
) -> None:
    sender, ends = Sender(number, path), trio.Event()
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, sender, nameserver, ends)
            await anext(signals)
            ends.set()
    path.with_suffix(".sent").write_text(json.dumps(sender.sent))


async def consume(number: int, nameserver: str, path: Path) -> None:
    """A member of the group that takes queues in order."""
    recorder = Recorder(path, number)
    consumer = Consumer(GROUP, TOPIC, nameserver=nameserver, start="earliest", ordered=True)

    async def receive() -> None:
        async for batch in consumer.batches(max_messages=MESSAGES_PER_BATCH):
            recorder.add(
                (batch.queue.queue_id, message.queue_offset, identify(message.body))
                for message in batch
            )

    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async with consumer, trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await anext(signals)
            nursery.cancel_scope.cancel()


Program = Callable[[int, str, Path], Awaitable[None]]


def run(programs: Mapping[str, Program]) -> None:
    """Run the program that the command line names."""
    kind, number, nameserver, path = sys.argv[1:]
    trio.run(programs[kind], int(number), nameserver, Path(path))


if __name__ == "__main__":
    run(
        {
            "single": partial(produce, send_singly),
            "bulk": partial(produce, send_in_bulk),
            "consumer": consume,
        }
    )
