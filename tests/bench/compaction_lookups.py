"""GET_BY_KEY: how fast keys are found, and how fast a key index is made.

Messages are small, so that a store of ten million keys takes 4 GB. After the fill the broker is
killed and its key index removed, so that the first request has it made as a whole.
"""

from __future__ import annotations

import select
import shutil
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.columns import encode_records
from headrace_protocol.headers import BulkSendHeader, GetByKeyHeader
from headrace_protocol.key_lookup import WantedKey, encode_keys
from headrace_protocol.message import encode_properties
from tests.bench.compacted_topics import (
    COMPACTED,
    encoded_frame,
    say,
    topic_fields,
    wait_for_follower,
)
from tests.bench.processes import cpu_s, status_kib
from tests.bench.wire import Client, Refused, call_until_accepted, frame
from tests.conformance.peer import running

if TYPE_CHECKING:
    from tests.conformance.peer import Peer

_BULK = 10_000
_IN_FLIGHT = 32
_FRAMES = 20_000
_SINGLES = 5_000
_LOOK_S = 0.1


def measure(home: Path, key_count: int, rounds: int) -> None:
    """Print how an index is made, and what requests get from it."""
    store = home / "store"
    with (
        running("headrace", home, store=store, settings={}) as peer,
        Client(peer.broker) as client,
    ):
        client.call(frame(RequestCode.UPDATE_AND_CREATE_TOPIC, topic_fields(COMPACTED)))
        start = time.perf_counter()
        for first in range(0, key_count, _BULK):
            call_until_accepted(client, _bulk(first))
        wait_for_follower(peer)
        say(f"{key_count} messages sent and copied in {time.perf_counter() - start:.0f} s")
        _measure_first(peer, client, "after sending")
    with (
        running("headrace", home, store=store, settings={}) as peer,
        Client(peer.broker) as client,
    ):
        _measure_first(peer, client, "after kill -9")
        _measure_requests(peer, client, key_count, rounds)
    folder = store / "compaction/headrace" / COMPACTED / "0"
    index_bytes = sum(path.stat().st_size for path in (folder / "keys").iterdir())
    shutil.rmtree(folder / "keys")
    with (
        running("headrace", home, store=store, settings={}) as peer,
        Client(peer.broker) as client,
    ):
        _measure_first(peer, client, "without an index")
        say(f"index: {index_bytes / 2**20:.0f} MiB, {index_bytes / key_count:.0f} B a key")


def _bulk(first: int) -> bytes:
    properties = [encode_properties({"KEYS": f"user-{first + at}"}) for at in range(_BULK)]
    block = encode_records(
        COMPACTED, [b"12345678"] * _BULK, properties, born_timestamp=1, born_host=bytes(8)
    )
    header = BulkSendHeader(
        producer_group="bench_producer",
        topic=COMPACTED,
        default_topic="TBW102",
        default_topic_queue_nums=1,
        queue_id=0,
        count=_BULK,
    )
    return encoded_frame(RequestCode.BULK_SEND, header, bytes(block.body))


def _get(number: int) -> bytes:
    header = GetByKeyHeader(topic=COMPACTED, count=1, max_msg_bytes=1 << 20)
    body = encode_keys([WantedKey(f"user-{number}".encode(), 0)])
    return encoded_frame(RequestCode.GET_BY_KEY, header, body)


def _measure_first(peer: Peer, client: Client, when: str) -> None:
    """Print how long the first request takes, and what the process that makes the index uses."""
    start, broker_cpu_s = time.perf_counter(), cpu_s([peer.broker_pid])
    late_count = 0
    child_cpu_s: dict[int, float] = {}
    child_kib: tuple[int, ...] = (0, 0)
    client.send(_get(1))
    while True:
        child = _child(peer.broker_pid)
        if child is not None:
            with suppress(OSError, KeyError):  # it has ended
                child_cpu_s[child] = cpu_s([child])
                child_kib = max(child_kib, status_kib(child, "RssAnon", "VmHWM"))
        try:
            if select.select([client.socket], [], [], _LOOK_S)[0]:
                client.take_answers(1)
                break
        except Refused as refusal:
            if refusal.code != ResponseCode.SYSTEM_BUSY:
                raise
            late_count += 1
            client.send(_get(1))
    seconds = time.perf_counter() - start
    index_cpu_s = sum(child_cpu_s.values())
    say(
        f"first request {when}: {seconds:.1f} s, {late_count} times answered with the progress; "
        f"CPU {cpu_s([peer.broker_pid]) - broker_cpu_s:.1f} s of the broker, {index_cpu_s:.1f} s "
        f"of processes that make the index, their memory {child_kib[0] >> 10} MiB, "
        f"{child_kib[1] >> 10} MiB with the map"
    )


def _child(pid: int) -> int | None:
    children = [
        child
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for child in path.read_text().split()
    ]
    return int(children[0]) if children else None


def _measure_requests(peer: Peer, client: Client, key_count: int, rounds: int) -> None:
    numbers = np.random.default_rng(1).integers(0, key_count, _FRAMES).tolist()
    frames = [_get(number) for number in numbers]
    groups = [b"".join(frames[at : at + _IN_FLIGHT]) for at in range(0, _FRAMES, _IN_FLIGHT)]
    rates, cpus_us, times_us = [], [], []
    for _ in range(1 + rounds):  # the first one reads the pages of the index
        start, cpu = time.perf_counter(), cpu_s([peer.broker_pid])
        for group in groups:
            client.send(group)
            client.take_answers(_IN_FLIGHT)
        rates.append(_FRAMES / (time.perf_counter() - start))
        cpus_us.append((cpu_s([peer.broker_pid]) - cpu) / _FRAMES * 1e6)
    for request in frames[:_SINGLES]:
        start = time.perf_counter()
        client.call(request)
        times_us.append((time.perf_counter() - start) * 1e6)
    kib = status_kib(peer.broker_pid, "RssAnon", "VmHWM")
    say(
        f"GET_BY_KEY, {key_count} keys: {statistics.median(rates[1:]):.0f}/s with {_IN_FLIGHT} "
        f"unanswered, broker CPU {statistics.median(cpus_us[1:]):.1f} us each; 1 unanswered: "
        f"p50 {np.percentile(times_us, 50):.0f} us, p99 {np.percentile(times_us, 99):.0f} us; "
        f"broker's memory {kib[0] >> 10} MiB, {kib[1] >> 10} MiB with maps"
    )
