"""Kafka's own performance tools, in Java: the best that Kafka's producer and consumer give.

Their processes end with the work, so their CPU, and the broker's, is that of the whole run, warm-up
and (theirs) start included; the rate is that after the warm-up.
"""

from __future__ import annotations

import datetime as dt
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.bench.clients.job import Report
from tests.bench.clients.with_confluent import check_stored
from tests.bench.kafka_peer import java_command
from tests.bench.processes import cpu_s
from tests.conformance.peer import PeerError

if TYPE_CHECKING:
    from tests.bench.clients.job import Job

# Batches of 16 KiB, the default, halve the rate. The default acks=all says the same with the one
# replica, and makes the producer idempotent, which RocketMQ's is not.
PRODUCER = ("acks=1", "batch.size=131072", "linger.ms=5", "buffer.memory=134217728")
STEADY = re.compile(r"(\d+) steady state records sent, ([\d.]+) records/sec")
INTERVAL_MS = 100


def send(job: Job) -> Report:
    """kafka-producer-perf-test, with bodies from a file: making random ones costs it more."""
    with tempfile.NamedTemporaryFile() as bodies:
        Path(bodies.name).write_bytes(b"\n".join(job.bodies()))
        total = job.warm_up + job.messages
        output, broker_s, client_s = _run(
            job,
            "ProducerPerformance",
            *("--topic", job.topic),
            *("--num-records", str(total)),
            *("--warmup-records", str(job.warm_up)),
            *("--throughput", "-1"),
            *("--payload-file", bodies.name),
            *("--command-property", *PRODUCER),
        )
    check_stored(job, total)
    steady = STEADY.search(output)
    if not steady:
        raise PeerError(f"the producer's tool printed no steady state:\n{output[-2000:]}")
    return _report(job.messages, float(steady[2]), total, broker_s, client_s)


def read(job: Job) -> Report:
    """kafka-consumer-perf-test."""
    total = job.warm_up + job.messages
    output, broker_s, client_s = _run(
        job,
        "ConsumerPerformance",
        *("--topic", job.topic),
        *("--num-records", str(total)),
        *("--reporting-interval", str(INTERVAL_MS)),
        "--show-detailed-stats",
        "--hide-header",
    )
    points = [_point(line) for line in output.splitlines() if line.count(",") >= 9]
    warm = [point for point in points if point[1] >= job.warm_up]
    if len(warm) < 2:
        raise PeerError(f"too few messages for the consumer's tool to get warm:\n{output[-2000:]}")
    messages = warm[-1][1] - warm[0][1]
    rate = messages / (warm[-1][0] - warm[0][0]).total_seconds()
    return _report(messages, rate, total, broker_s, client_s)


def _point(line: str) -> tuple[dt.datetime, int]:
    """Time and messages so far: ``time, thread, MB, MB/s, messages, messages/s, ...``."""
    cells = [cell.strip() for cell in line.split(",")]
    return dt.datetime.strptime(cells[0], "%Y-%m-%d %H:%M:%S:%f"), int(cells[4])  # noqa: DTZ007


def _run(job: Job, tool: str, *arguments: str) -> tuple[str, float, float]:
    """Output, CPU of the broker and of the tool in seconds."""
    command = java_command(
        f"org.apache.kafka.tools.{tool}", "--bootstrap-server", job.address, *arguments
    )
    broker_before, before = cpu_s([job.broker_pid]), os.times()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    broker_s, after = cpu_s([job.broker_pid]) - broker_before, os.times()
    if done.returncode != 0:
        raise PeerError(f"{tool} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    client_s = (after.children_user - before.children_user) + (
        after.children_system - before.children_system
    )
    return done.stdout, broker_s, client_s


def _report(
    messages: int, rate: float, all_messages: int, broker_s: float, client_s: float
) -> Report:
    return Report(
        messages,
        messages / rate,
        rate,
        broker_s / all_messages * 1e6,
        client_s / all_messages * 1e6,
    )


WORKS = {"kafka-producer": send, "kafka-consumer": read}
