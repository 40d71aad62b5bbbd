"""``headrace bench``: how fast a cluster takes and gives messages."""

from __future__ import annotations

import time
from array import array
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from headrace.admin.failures import CommandFailed
from headrace.admin.options import Json, Nameserver
from headrace.admin.output import print_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.consumer.pull import PullConsumer
    from headrace.errors import HeadraceError
    from headrace.messages import Message, SendResult
    from headrace_protocol.bodies import MessageQueue

_PERCENTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "p999_ms": 0.999, "max_ms": 1.0}
_STALL_MS = 10_000


class _Work(NamedTuple):
    topic: str
    messages: int
    body_bytes: int
    in_flight: int


def bench(
    topic: Annotated[
        str, typer.Option(help="Where to; made if need be, and not deleted.")
    ] = "headrace_bench",
    messages: Annotated[int, typer.Option(min=1, help="How many.")] = 100_000,
    body_bytes: Annotated[int, typer.Option(min=1, help="Size of each body.")] = 1024,
    in_flight: Annotated[int, typer.Option(min=1, help="Sends without an answer yet.")] = 1000,
    queues: Annotated[int, typer.Option(min=1, help="Queues of a topic that is made.")] = 4,
    as_json: Json = False,
    nameserver: Nameserver = None,
) -> None:
    """Send messages, read them back, and print rates and latencies.

    One process sends and reads with one core: a cluster may be faster than what this shows.
    Latency is from handing a message to the producer to its answer, so it grows with --in-flight.
    """
    import trio

    work = _Work(topic, messages, body_bytes, in_flight)
    rows = trio.run(_run, work, queues, nameserver)
    print_rows(rows, as_json=as_json, empty="")


async def _run(work: _Work, queues: int, nameserver: str | None) -> list[dict[str, Any]]:
    from headrace.consumer.pull import PullConsumer

    await _make_topic(work.topic, queues, nameserver)
    async with PullConsumer(nameserver=nameserver, start="last") as consumer:
        places = await consumer.queues(work.topic)
        starts = {queue: await consumer.max_offset(queue) for queue in places}
        sent = await _send(work, nameserver)
        consumed = await _consume(work, consumer, starts)
    return [sent, consumed]


async def _make_topic(topic: str, queues: int, nameserver: str | None) -> None:
    from headrace.admin.client import Admin

    async with Admin(nameserver=nameserver) as admin:
        if topic not in await admin.topics():
            await admin.create_topic(topic, queues=queues)


async def _send(work: _Work, nameserver: str | None) -> dict[str, Any]:
    from headrace.messages import Message
    from headrace.producer.producer import Producer

    body = bytes(work.body_bytes)
    # Answers come in any order; a message is its own key here.
    started: dict[int, float] = {}
    latencies = array("d")
    failures: list[HeadraceError] = []
    now = time.perf_counter

    def on_result(message: Message, result: SendResult | HeadraceError) -> None:
        if isinstance(result, Exception):
            failures.append(result)
        latencies.append(now() - started.pop(id(message)))

    begin = now()
    async with (
        Producer(nameserver=nameserver, compress_from_bytes=None) as producer,
        producer.pipeline(max_in_flight=work.in_flight, on_result=on_result) as pipeline,
    ):
        for _ in range(work.messages):
            message = Message(work.topic, body)
            started[id(message)] = now()
            await pipeline.send(message)
            if failures:
                break
    if failures:
        raise failures[0]
    seconds = now() - begin
    return _row("send", work, seconds, sorted(latencies))


async def _consume(
    work: _Work, consumer: PullConsumer, starts: dict[MessageQueue, int]
) -> dict[str, Any]:
    begin = time.perf_counter()
    await consumer.assign(starts)
    for queue, offset in starts.items():
        consumer.seek(queue, offset)
    received = 0
    while received < work.messages:
        batch = await consumer.poll(timeout_ms=_STALL_MS)
        if batch is None:
            raise CommandFailed(
                f"{work.messages - received} messages of {work.topic} were not there after "
                f"{_STALL_MS / 1000:g} s: does somebody delete, or was the topic made anew?"
            )
        received += len(batch)
    return _row("consume", work, time.perf_counter() - begin, [])


def _row(phase: str, work: _Work, seconds: float, latencies: Sequence[float]) -> dict[str, Any]:
    per_second = work.messages / seconds
    return {
        "phase": phase,
        "messages": work.messages,
        "seconds": round(seconds, 3),
        "messages_per_second": round(per_second, 1),
        "mib_per_second": round(per_second * work.body_bytes / 2**20, 1),
        **{name: _percentile_ms(latencies, part) for name, part in _PERCENTILES.items()},
    }


def _percentile_ms(latencies: Sequence[float], part: float) -> float | None:
    """The latency that ``part`` of all stay within; None without any."""
    if not latencies:
        return None
    index = max(0, -int(-part * len(latencies) // 1) - 1)
    return round(latencies[index] * 1000, 3)
