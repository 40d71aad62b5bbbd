"""One client process that sends: ``python -m tests.bench.clients.paced TASK``, a ``Task`` as JSON.

With a rate it sends by a schedule and prints its ``Latencies`` as JSON; a message's latency counts
from when it was due. Without one it sends as fast as it may, until it is killed; it prints a line
once it does.
"""

from __future__ import annotations

import sys
from itertools import count

import msgspec
import trio

from headrace import Message, Producer

_WARM_UP_S = 1.0
_AT_ONCE = 64
# More than a limit lets pass at once.
_FIRST = 300


class Task(msgspec.Struct, frozen=True):
    """rate: messages a second; 0 for as many as there may be."""

    nameserver: str
    topic: str
    body_bytes: int
    rate: float = 0
    seconds: float = 0


class Latencies(msgspec.Struct, frozen=True):
    """Of the messages that were due after the first second."""

    p50_us: float
    p99_us: float
    messages: int


async def paced(task: Task) -> Latencies:
    """Send each message when it is due, whatever becomes of those before."""
    body, began, latencies = b"x" * task.body_bytes, trio.current_time() + 0.1, list[float]()

    async def send(producer: Producer, due_s: float) -> None:
        await producer.send(Message(task.topic, body))
        if due_s > began + _WARM_UP_S:
            latencies.append(trio.current_time() - due_s)

    async with Producer(nameserver=task.nameserver) as producer, trio.open_nursery() as nursery:
        for number in count():
            due_s = began + number / task.rate
            if due_s > began + _WARM_UP_S + task.seconds:
                break
            await trio.sleep_until(due_s)
            nursery.start_soon(send, producer, due_s)
    latencies.sort()
    p50_s, p99_s = (latencies[int(len(latencies) * share)] for share in (0.5, 0.99))
    return Latencies(p50_s * 1e6, p99_s * 1e6, len(latencies))


async def flood(task: Task) -> None:
    """Send without an end, some messages at a time."""
    body = b"x" * task.body_bytes

    async def send(producer: Producer) -> None:
        while True:
            await producer.send(Message(task.topic, body))

    async with (
        Producer(nameserver=task.nameserver, delivery_timeout_ms=600_000) as producer,
        trio.open_nursery() as nursery,
    ):
        for _ in range(_FIRST):
            await producer.send(Message(task.topic, body))
        sys.stdout.write("sending\n")
        sys.stdout.flush()
        for _ in range(_AT_ONCE):
            nursery.start_soon(send, producer)


def main() -> None:
    task = msgspec.json.decode(sys.argv[1], type=Task)
    if task.rate:
        sys.stdout.write(msgspec.json.encode(trio.run(paced, task)).decode() + "\n")
    else:
        trio.run(flood, task)


if __name__ == "__main__":
    main()
