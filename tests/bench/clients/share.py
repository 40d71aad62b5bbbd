"""Members of one group, each of which works on a message at a time, until they are killed.

``python -m tests.bench.clients.share TASK``, a ``Task`` as JSON. Prints a line for each message
that is done: its number, the attempt, and when it came and was done, in ms since 1970.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

import msgspec
import trio

from headrace import SimpleConsumer

if TYPE_CHECKING:
    from headrace import PoppedMessage

NUMBER_BYTES = 8


class Task(msgspec.Struct, frozen=True):
    """members: how many this process has. messages: most that one takes at a time."""

    nameserver: str
    topic: str
    group: str
    members: int
    messages: int
    work_s: float
    invisible_s: float


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def work(task: Task) -> None:
    """Take messages, work on one after the other, and acknowledge them while the next come."""
    consumer = SimpleConsumer(task.group, task.topic, nameserver=task.nameserver)
    async with consumer, trio.open_nursery() as nursery:
        while True:
            messages = await consumer.receive(max=task.messages, invisible=task.invisible_s)
            came_ms, due_s = now_ms(), trio.current_time()
            for message in messages:
                due_s += task.work_s
                await trio.sleep_until(due_s)
                note(message, came_ms)
            nursery.start_soon(consumer.ack, messages)


def note(message: PoppedMessage, came_ms: int) -> None:
    number = int.from_bytes(message.body[:NUMBER_BYTES])
    line = f"{number} {message.reconsume_times + 1} {came_ms} {now_ms()}\n"
    os.write(sys.stdout.fileno(), line.encode())


async def main(task: Task) -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(task.members):
            nursery.start_soon(work, task)


if __name__ == "__main__":
    trio.run(main, msgspec.json.decode(sys.argv[1], type=Task))
