"""What compacted topics cost a plain one: while they are idle, and while they are compacted.

A broker without a compacted topic and one whose compacted topic is full, but idle, serve the same
load in turn; their CPU times are compared. Then paced sends, at half of what the second broker
reaches, alternate with and without a compaction.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from headrace.blocking import Admin
from headrace_protocol.codes import RequestCode
from tests.bench.compacted_topics import (
    BULK_DRAINS,
    COMPACTED,
    FRAMES,
    PLAIN,
    ROUND_S,
    WAYS,
    bulk_pull_of,
    fill,
    pull_of,
    say,
    topic_fields,
    wait_for_follower,
)
from tests.bench.processes import cpu_s
from tests.bench.wire import Client, frame
from tests.conformance.peer import running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conformance.peer import Peer

    # Puts load on a broker; returns the number of messages.
    Work = Callable[[Client], int]

_DRAINED = 100_000
_FULL = f"{PLAIN}_FULL"
_SINGLES = WAYS[1]
_SHARE = 0.5
_TICK_S = 0.002
_PACED_S = 4.0
_LOOK_S = 0.1
_IN_FLIGHT = 32
# The broker indexes up to 100 ms later.
_SETTLE_S = 0.2


def measure(home: Path, key_count: int, rounds: int) -> None:
    """Print a line per case."""
    with ExitStack() as stack:
        peers = [stack.enter_context(running("headrace", home, settings={})) for _ in range(2)]
        clients = [stack.enter_context(Client(peer.broker)) for peer in peers]
        for client in clients:
            for topic in (PLAIN, _FULL):
                client.call(frame(RequestCode.UPDATE_AND_CREATE_TOPIC, topic_fields(topic)))
            fill(client, _FULL, _DRAINED)
        clients[1].call(frame(RequestCode.UPDATE_AND_CREATE_TOPIC, topic_fields(COMPACTED)))
        fill(clients[1], COMPACTED, key_count)
        wait_for_follower(peers[1])
        for name, work in _works():
            _compare_idle(name, work, peers, clients, rounds)
        _compare_paced(peers[1], clients[1], key_count, rounds)


# -- idle ------------------------------------------------------------------------------------------


def _works() -> Iterator[tuple[str, Work]]:
    for way in WAYS[1:]:
        frames = [way.make(PLAIN, number * way.messages) for number in range(FRAMES)]
        groups = [
            b"".join(frames[at : at + way.in_flight])
            for at in range(0, FRAMES - way.in_flight + 1, way.in_flight)
        ]

        def send(
            client: Client,
            groups: list[bytes] = groups,
            in_flight: int = way.in_flight,
            messages: int = way.messages,
        ) -> int:
            end = time.perf_counter() + ROUND_S
            for number, group in enumerate(itertools.cycle(groups), 1):
                client.send(group)
                client.take_answers(in_flight)
                if time.perf_counter() > end:
                    return number * in_flight * messages
            raise AssertionError

        yield way.name, send
    for name, make, times in (
        ("drain, pulls of 32", pull_of, 1),
        ("drain, bulk pulls", bulk_pull_of, 5 * BULK_DRAINS),
    ):

        def drain(
            client: Client, make: Callable[[str, int], bytes] = make, times: int = times
        ) -> int:
            for _ in range(times):
                offset = 0
                while offset < _DRAINED:
                    client.send(make(_FULL, offset))
                    offset = int(client.answer()["extFields"]["nextBeginOffset"])
            return _DRAINED * times

        yield name, drain


def _compare_idle(
    name: str, work: Work, peers: list[Peer], clients: list[Client], rounds: int
) -> None:
    """Print the median CPU time of a message on each broker, and that of the ratios of pairs."""
    costs: list[list[float]] = [[], []]
    for number in range(rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            pids = [peers[which].broker_pid]
            cpu = cpu_s(pids)
            count = work(clients[which])
            time.sleep(_SETTLE_S)
            costs[which].append((cpu_s(pids) - cpu) / count * 1e6)
    ratio = statistics.median(beside / alone for alone, beside in zip(*costs, strict=True))
    alone, beside = map(statistics.median, costs)
    say(f"{name:24} CPU {alone:6.2f} us alone {beside:6.2f} us beside an idle one {ratio:5.3f}")


# -- paced -----------------------------------------------------------------------------------------


def _compare_paced(peer: Peer, client: Client, key_count: int, rounds: int) -> None:
    """Print p50 and p99 of paced sends with and without a compaction, and the ratios of pairs."""
    request = _SINGLES.make(PLAIN, 0)
    rate = _SHARE * _peak_rate(client, request)
    quiet: list[tuple[float, float]] = []
    busy: list[tuple[float, float]] = []
    for _ in range(rounds):
        fill(client, COMPACTED, key_count)
        wait_for_follower(peer)
        quiet.append(_paced(client, request, rate, threading.Timer(_PACED_S, lambda: None)))
        run = threading.Thread(target=_compact, args=(peer,))
        busy.append(_paced(client, request, rate, run))
    for name, values in (("without", quiet), ("with", busy)):
        p50, p99 = (statistics.median(each) for each in zip(*values, strict=True))
        say(f"paced {rate:.0f}/s {name} a compaction: p50 {p50:.0f} us, p99 {p99:.0f} us")
    pairs = [*zip(quiet, busy, strict=True)]
    p50, p99 = (statistics.median(b[at] / a[at] for a, b in pairs) for at in (0, 1))
    say(f"ratios of pairs: p50 {p50:.2f}, p99 {p99:.2f}")


def _peak_rate(client: Client, request: bytes) -> float:
    end, count = time.perf_counter() + _PACED_S, 0
    while time.perf_counter() < end:
        client.send(request * _IN_FLIGHT)
        client.take_answers(_IN_FLIGHT)
        count += _IN_FLIGHT
    return count / _PACED_S


def _compact(peer: Peer) -> None:
    """Returns when the compaction has ended."""
    with Admin(nameserver=peer.nameserver) as admin:
        admin.compact_topic(COMPACTED)
        while any(
            state.is_running for state in admin.compact_topic(COMPACTED, start=False).values()
        ):
            time.sleep(_LOOK_S)


def _paced(
    client: Client, request: bytes, rate: float, during: threading.Thread
) -> tuple[float, float]:
    """Send by a schedule while a thread runs; p50 and p99 of what answers took, in microseconds.

    A message's time counts from when it was due, so a pause shows in all that were due meanwhile.
    """
    group_count = max(1, round(rate * _TICK_S))
    group = request * group_count
    took_us: list[float] = []
    during.start()
    due = time.perf_counter()
    while during.is_alive():
        time.sleep(max(0.0, due - time.perf_counter()))
        client.send(group)
        client.take_answers(group_count)
        took_us.append((time.perf_counter() - due) * 1e6)
        due += _TICK_S
    p50, p99 = np.percentile(took_us, (50, 99)).tolist()
    return p50, p99
