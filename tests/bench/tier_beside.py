"""What a tier costs those who do not read it: hot sends, memory, and requests of the object store.

Paced sends go to a topic that is not tiered, and alternate with the same beside work of the tier.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headrace import blocking
from tests.bench.load import say
from tests.bench.processes import loop_cpu_s, resident_mb
from tests.bench.tier_load import (
    BODY_BYTES,
    PIECE_BYTES,
    PLACES,
    SAMPLE_S,
    TOPIC,
    broker,
    drain,
    fill,
    folder_place,
    in_bucket,
)
from tests.bench.wire import QUEUES, Client, Refused, send_frame
from tests.support.object_server import running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.synchronize import Event
    from pathlib import Path

    from tests.conformance.peer import Peer

UPLOADING, READING, HANGING = "sends beside uploads", "sends beside 4 readers", "sends, store hangs"
BEHIND, MEMORY, REQUESTS = "upload at half of the peak", "an idle broker", "requests for 1 GiB"
CASES = (UPLOADING, READING, HANGING, BEHIND, MEMORY, REQUESTS)
COLUMNS = (
    ("p99_us", "p99 beside it, ms", 1000, 2),
    ("alone_p99_us", "p99 alone, ms", 1000, 2),
    ("p99_ratio", "p99 with ÷ without it", 1, 2),
    ("alone_loop_us", "CPU of the broker's loop for a message alone, µs", 1, 2),
    ("loop_ratio", "CPU of the broker's loop for a message, with ÷ without it", 1, 2),
    ("behind_s", "most behind, s", 1, 2),
    ("rate", "messages/s", 1, 0),
    ("more_mb", "more resident memory, MB", 1, 1),
    ("puts", "PUT", 1, 0),
    ("gets", "GET and HEAD", 1, 0),
    ("idle_requests", "in an idle minute", 1, 0),
)
PLAIN = "PLAIN"
_TICK_S = 0.002
_IN_FLIGHT = 32
_PEAK_S = 2.0
_READERS = 4
_IDLE_S = 60.0
_SETTLE_S = 3.0
# The default: objects are as large as they get.
_COMMIT_MS = 30_000
# In the server's log, as S3 writes it.
_REQUEST: Any = re.compile(r" s3_(\w+) (\S+) ")

Report = dict[str, float]


# -- sends by a schedule ---------------------------------------------------------------------------


def frames_of(topic: str) -> list[bytes]:
    """One message for each queue."""
    return [send_frame(topic, queue, os.urandom(BODY_BYTES)) for queue in range(QUEUES)]


def peak_rate(client: Client) -> float:
    """What one connection reaches, in messages a second."""
    group = b"".join(frames_of(PLAIN) * (_IN_FLIGHT // QUEUES))
    began, count = time.perf_counter(), 0
    while time.perf_counter() < began + _PEAK_S:
        client.send(group)
        client.take_answers(_IN_FLIGHT)
        count += _IN_FLIGHT
    return count / (time.perf_counter() - began)


class Paced(NamedTuple):
    """p99 in microseconds, and those that the broker's loop works for a message.

    A message's time counts from when it was due, so a pause shows in all that were due meanwhile.
    """

    p99_us: float
    loop_us: float


def paced(peer: Peer, client: Client, topic: str, rate: float, seconds: float) -> Paced:
    """Sends by a schedule."""
    frames = frames_of(topic)
    count = max(1, round(rate * _TICK_S))
    groups = [b"".join(frames[(at + n) % QUEUES] for n in range(count)) for at in range(QUEUES)]
    took_us: list[float] = []
    cpu_s = loop_cpu_s(peer.broker_pid)
    due = time.perf_counter()
    end = due + seconds
    while due < end:
        time.sleep(max(0.0, due - time.perf_counter()))
        client.send(groups[len(took_us) % QUEUES])
        client.take_answers(count)
        took_us.append((time.perf_counter() - due) * 1e6)
        due += _TICK_S
    cpu_s = loop_cpu_s(peer.broker_pid) - cpu_s
    return Paced(float(np.percentile(took_us, 99)), cpu_s / (len(took_us) * count) * 1e6)


def with_topics(peer: Peer) -> Client:
    """A client of a broker that has both topics, warmed up."""
    with blocking.Admin(nameserver=peer.nameserver) as admin:
        admin.create_topic(PLAIN, queues=QUEUES, attributes={"tiered": "false"})
        admin.create_topic(TOPIC, queues=QUEUES)
    client = Client(peer.broker)
    peak_rate(client)
    return client


def _pair(alone: Paced, beside: Paced) -> Report:
    return {
        "alone_p99_us": alone.p99_us,
        "p99_us": beside.p99_us,
        "p99_ratio": beside.p99_us / alone.p99_us,
        "alone_loop_us": alone.loop_us,
        "loop_ratio": beside.loop_us / alone.loop_us,
    }


# -- readers ---------------------------------------------------------------------------------------


def _read(address: str, is_ready: Event) -> None:
    # They stand for readers on other machines.
    os.nice(19)
    is_ready.set()
    while True:
        try:
            drain(address, PIECE_BYTES)
        except Refused:  # the tier is unreachable
            time.sleep(1)


@contextmanager
def readers(address: str) -> Iterator[None]:
    """Processes that read all queues from the beginning, again and again."""
    context = multiprocessing.get_context("spawn")
    ready = [context.Event() for _ in range(_READERS)]
    started = [context.Process(target=_read, args=(address, is_ready)) for is_ready in ready]
    for process in started:
        process.start()
    try:
        for is_ready in ready:
            is_ready.wait()
        time.sleep(_SETTLE_S)
        yield
    finally:
        for process in started:
            process.kill()
            process.join()


# -- cases -----------------------------------------------------------------------------------------


def beside_folder(
    directory: Path, rounds: int, seconds: float, share: float
) -> Iterator[tuple[str, Report]]:
    """Sends beside uploads to a folder, and beside readers of it; how far behind uploads are.

    share: of the peak rate.
    """
    with (
        folder_place(directory) as place,
        broker(directory, directory / "store", place.settings) as (peer, sums),
        with_topics(peer) as client,
    ):
        rate = share * peak_rate(client)

        def send(topic: str) -> Paced:
            return paced(peer, client, topic, rate, seconds)

        for _ in range(rounds):
            yield UPLOADING, _pair(send(PLAIN), send(TOPIC))
            _wait_uploaded(sums)
        yield BEHIND, _behind(lambda: paced(peer, client, TOPIC, rate, 1), seconds, sums)
        _wait_uploaded(sums)
        for _ in range(rounds):
            place.drop_cached()
            quiet = send(PLAIN)
            with readers(peer.broker):
                yield READING, _pair(quiet, send(PLAIN))


def _behind(
    send: Callable[[], Paced], seconds: float, sums: Callable[[], dict[str, float]]
) -> Report:
    """The largest age of a message that is still to be uploaded, beside seconds of sends."""
    ages: list[float] = []
    began = sums()["rocketmq_tiered_store_messages_dispatch_total"]
    for _ in range(max(round(2 * seconds), 1)):
        send()
        now = sums()
        ages.append(now.get("rocketmq_tiered_store_dispatch_latency", 0) / 1000)
    uploaded = now["rocketmq_tiered_store_messages_dispatch_total"] - began
    return {"behind_s": max(ages), "rate": uploaded / len(ages)}


def beside_hanging(
    directory: Path, rounds: int, seconds: float, share: float
) -> Iterator[tuple[str, Report]]:
    """Sends while an S3 server accepts and never answers: uploads and readers wait for it."""
    folder = directory / "s3"
    folder.mkdir()
    with running(folder) as (bucket, server):
        place = in_bucket(folder, bucket)
        with (
            broker(directory, directory / "store", place.settings) as (peer, sums),
            with_topics(peer) as client,
        ):
            rate = share * peak_rate(client)
            for _ in range(rounds):
                paced(peer, client, TOPIC, rate, 1)
                _wait_uploaded(sums)
                quiet = paced(peer, client, PLAIN, rate, seconds)
                server.send_signal(signal.SIGSTOP)
                try:
                    with readers(peer.broker):
                        beside = paced(peer, client, TOPIC, rate, seconds)
                    yield HANGING, _pair(quiet, beside)
                finally:
                    server.send_signal(signal.SIGCONT)
            _wait_uploaded(sums)


def _wait_uploaded(sums: Callable[[], dict[str, float]]) -> None:
    while sums().get("rocketmq_tiered_store_dispatch_behind", 1):
        time.sleep(SAMPLE_S)


def idle_memory(directory: Path, rounds: int) -> Iterator[tuple[str, Report]]:
    """Resident memory of idle brokers with a tier, beside that of one without."""
    for number in range(rounds):
        sizes: dict[str, float] = {}
        for name in ("none", *PLACES):
            home = directory / f"{name}-{number}"
            home.mkdir()
            with PLACES[name](home) if name in PLACES else _no_place() as place:
                settings = place.settings if place is not None else {}
                with broker(home, home / "store", settings) as (peer, _):
                    time.sleep(_SETTLE_S)
                    sizes[name] = resident_mb([peer.broker_pid])
        say(f"resident: {', '.join(f'{name} {size:.1f} MB' for name, size in sizes.items())}")
        yield MEMORY, {"more_mb": max(sizes.values()) - sizes["none"]}


@contextmanager
def _no_place() -> Iterator[None]:
    yield None


def requests(directory: Path, byte_count: int) -> Iterator[tuple[str, Report]]:
    """Requests that the S3 server logs: of an upload with its merges, for a GiB, and at idle."""
    folder, log = directory / "s3", directory / "access.log"
    folder.mkdir()
    with running(folder, ["--access-log", str(log)]) as (bucket, _):
        settings = in_bucket(folder, bucket).settings
        with broker(directory, directory / "store", settings, commit_ms=_COMMIT_MS) as (peer, sums):
            before = _logged(log)
            fill(peer, byte_count)
            _wait_uploaded(sums)
            # A merge begins within a minute.
            time.sleep(_IDLE_S + _SETTLE_S)
            loaded = _logged(log)
            time.sleep(_IDLE_S)
            idle = _logged(log)
    done, share = loaded - before, (1 << 30) / byte_count
    say(f"requests: {dict(done)}, at idle {dict(idle - loaded)}")
    yield (
        REQUESTS,
        {
            "puts": done["PutObject"] * share,
            "gets": (done["GetObject"] + done["HeadObject"]) * share,
            "idle_requests": float((idle - loaded).total()),
        },
    )


def _logged(log: Path) -> Counter[str]:
    """The requests so far, without those that save the broker's tables."""
    found = _REQUEST.findall(log.read_text(errors="replace"))
    return Counter(name for name, path in found if not path.endswith("tables.json"))
