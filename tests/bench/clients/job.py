"""The work of one client process, and its measurements of itself and of the broker."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import msgspec

from tests.bench.processes import cpu_s

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

# Bodies that differ, so that neither side has its one body in the processor's cache all the time.
DIFFERENT_BODIES = 1000


class Job(msgspec.Struct, frozen=True):
    """Send ``warm_up`` and then ``messages`` to ``topic``, or read as many out of it.

    work: a name in one of the tables ``WORKS``.
    address: Kafka's bootstrap server or headrace's nameserver.
    """

    work: str
    address: str
    broker_pid: int
    topic: str
    body_bytes: int
    messages: int
    warm_up: int

    def bodies(self) -> list[bytes]:
        return [os.urandom(self.body_bytes) for _ in range(DIFFERENT_BODIES)]


class Report(msgspec.Struct, frozen=True):
    """rate: messages a second. CPU: user and system time, µs per message."""

    messages: int
    seconds: float
    rate: float
    broker_cpu_us: float
    client_cpu_us: float


class Lost(Exception):
    """Other messages came out of a topic than went in."""


class Window:
    """The time that is measured, and the CPU that both processes use within it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._messages_before = 0
        self._begin = (0.0, 0.0, 0.0)

    def open(self, messages_before: int = 0) -> None:
        """Begin. messages_before: of the first batch, whose coming opens the window of a reader."""
        self._messages_before = messages_before
        self._begin = self._now()

    def close(self, messages: int) -> Report:
        """End, with all ``messages`` sent or received."""
        seconds, broker, client = (
            after - before for after, before in zip(self._now(), self._begin, strict=True)
        )
        return report(messages - self._messages_before, seconds, broker, client)

    def check_bodies(self, messages: int, body_bytes: int) -> None:
        """Raise Lost unless so many messages have so many bytes."""
        if body_bytes != messages * self._job.body_bytes:
            raise Lost(f"{messages} messages of {self._job} had {body_bytes} bytes of bodies")

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), cpu_s([self._job.broker_pid]), time.process_time()


async def warm_and_measure(job: Job, send_all: Callable[[int], Awaitable[None]]) -> Report:
    """Send the job's messages. send_all: sends so many, and returns once all are acknowledged."""
    window = Window(job)
    await send_all(job.warm_up)
    window.open()
    await send_all(job.messages)
    return window.close(job.messages)


def report(messages: int, seconds: float, broker_cpu_s: float, client_cpu_s: float) -> Report:
    return Report(
        messages,
        seconds,
        messages / seconds,
        broker_cpu_s / messages * 1e6,
        client_cpu_s / messages * 1e6,
    )
