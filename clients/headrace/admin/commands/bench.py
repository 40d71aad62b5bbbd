"""``headrace bench``: measures how fast a cluster stores and delivers messages."""

from __future__ import annotations

import re
import secrets
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import click

from headrace.admin import completion, options
from headrace.admin.failures import CommandFailed
from headrace.admin.output import print_rows
from headrace.errors import BrokerError, ConfigurationError, HeadraceError
from headrace.messages import BODY_BYTES_MAX
from headrace_daemon.command import warn
from headrace_protocol.codes import ResponseCode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from headrace.admin.workloads import Outcome, Setup

# Sending comes first, so that there is something to receive.
WORKS = ("send", "pipeline", "send-many", "receive", "latency")
_SIZE = re.compile(r"(\d+) ?(B|KiB|MiB)?")
_UNITS = {None: 1, "B": 1, "KiB": 1024, "MiB": 1024 * 1024}
# Size of the stamp that identifies the messages of "latency".
BODY_BYTES_MIN = 16
_PERCENTILES = {"p50_ms": 0.5, "p99_ms": 0.99, "p999_ms": 0.999}
_DELETE_S = 5
# Refusals that do not depend on the topic.
_TOPIC_INDEPENDENT_CODES = {ResponseCode.INVALID_PARAMETER, ResponseCode.REQUEST_CODE_NOT_SUPPORTED}


@options.command(
    "bench",
    "headrace bench",
    "headrace bench --work pipeline --work latency --size 100 --seconds 5 --rate 500",
)
@click.option(
    "--work",
    "works",
    type=click.Choice(WORKS),
    multiple=True,
    metavar="WORK",
    help=f"One of {', '.join(WORKS)}; may be repeated. Default: all.",
)
@click.option(
    "--size",
    default="1KiB",
    show_default=True,
    metavar="BYTES",
    help="Size of each body, e.g. 100, 1KiB or 1MiB.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.01),
    default=10,
    show_default=True,
    metavar="SECONDS",
    help="Duration of each workload.",
)
@click.option(
    "--topic",
    metavar="TOPIC",
    shell_complete=completion.topics,
    help="Topic to use and keep. By default a topic is created and deleted.",
)
@click.option(
    "--queues",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    metavar="QUEUES",
    help="Number of queues of a created topic.",
)
@click.option(
    "--in-flight",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    metavar="MESSAGES",
    help="Most messages that pipeline keeps in flight.",
)
@click.option(
    "--rate",
    type=click.FloatRange(min=1),
    default=1000,
    show_default=True,
    metavar="MESSAGES",
    help="Messages per second that latency sends.",
)
@options.answer
def command(
    works: tuple[str, ...],
    size: str,
    seconds: float,
    topic: str | None,
    queues: int,
    in_flight: int,
    rate: float,
    nameserver: str | None,
    *,
    as_json: bool,
) -> None:
    """Measure throughput and latency of a cluster.

    send: one message after another, each waiting for its response. pipeline: many messages in
    flight. send-many: 1,000 messages per call; latency is per call. receive: reads the topic from
    its beginning. latency: from producer to consumer, at a steady --rate.

    A single process on one core generates the load: the cluster may be faster than the result.
    """
    import trio

    from headrace.admin.workloads import Setup

    works = tuple(name for name in WORKS if name in (works or WORKS))
    body_bytes = _body_bytes(size)
    name = topic or f"headrace_bench_{secrets.token_hex(4)}"
    setup = Setup(name, body_bytes, seconds, in_flight, rate, nameserver)
    rows: list[dict[str, Any]] = []

    async def run() -> None:
        async with _topic(setup, queues, is_throw_away=topic is None):
            if topic is None and works[0] == "receive":
                await _outcome("send-many", setup)
            for name in works:
                outcome = await _outcome(name, setup)
                rows.append(_row(name, setup, outcome))

    try:
        trio.run(run)
    finally:
        # Includes workloads measured before a failure or an interrupt.
        if rows:
            print_rows(rows, as_json=as_json, empty="")


def _body_bytes(size: str) -> int:
    match = _SIZE.fullmatch(size)
    body_bytes = int(match[1]) * _UNITS[match[2]] if match else 0
    if not BODY_BYTES_MIN <= body_bytes <= BODY_BYTES_MAX:
        raise ConfigurationError(
            f"--size {size}: must be {BODY_BYTES_MIN}B to 4MiB, such as 100 or 1KiB"
        )
    return body_bytes


@asynccontextmanager
async def _topic(setup: Setup, queues: int, *, is_throw_away: bool) -> AsyncIterator[None]:
    """Create the topic if it is missing, and delete a throw-away topic at the end."""
    import trio

    from headrace.admin.client import Admin

    async with Admin(nameserver=setup.nameserver) as admin:
        try:
            if is_throw_away or setup.topic not in await admin.topics():
                await admin.create_topic(setup.topic, queues=queues)
        except BrokerError as error:
            if error.code in _TOPIC_INDEPENDENT_CODES:
                raise
            raise CommandFailed(f"{error}; name an existing topic with --topic") from error
        try:
            yield
        finally:
            if is_throw_away:
                with trio.move_on_after(_DELETE_S, shield=True):
                    await _delete(admin, setup.topic)


async def _delete(admin: Any, topic: str) -> None:
    try:
        await admin.delete_topic(topic)
    except HeadraceError as error:
        warn(f"topic {topic} could not be deleted: {error}")


async def _outcome(work: str, setup: Setup) -> Outcome:
    from headrace.admin.workloads import WORKLOADS

    # A moving progress bar would use CPU time of the core that is measured.
    if sys.stderr.isatty():
        sys.stderr.write(f"{work}: {setup.seconds:g} s ...\n")
    return await WORKLOADS[work](setup)


def _row(work: str, setup: Setup, outcome: Outcome) -> dict[str, Any]:
    per_second = outcome.messages / outcome.seconds
    latencies = sorted(outcome.latencies)
    return {
        "work": work,
        "per_second": round(per_second),
        "mb_per_second": round(per_second * setup.body_bytes / 1e6, 3),
        **{name: _percentile_ms(latencies, part) for name, part in _PERCENTILES.items()},
        "errors": outcome.errors,
        "client_cpu_us": round(outcome.cpu_s / outcome.messages * 1e6, 2),
    }


def _percentile_ms(latencies: list[float], part: float) -> float | None:
    """The latency that the fraction ``part`` of all does not exceed; None if there are none."""
    if not latencies:
        return None
    index = max(0, -int(-part * len(latencies) // 1) - 1)
    return round(latencies[index] * 1000, 3)
