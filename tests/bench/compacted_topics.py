"""A compacted topic beside a plain one of one running broker: sends, drains and tables.

Rounds of both topics alternate. The generator shares the machine with the broker. On a busy machine
only the broker's CPU time can be compared; that of sends includes the copy into the compaction log.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import trio

from headrace import Table
from headrace.blocking import Admin
from headrace_protocol.codes import RequestCode
from headrace_protocol.columns import encode_records
from headrace_protocol.command import header_fields
from headrace_protocol.headers import BulkPullHeader, BulkSendHeader
from headrace_protocol.message import encode_batch, encode_properties
from tests.bench.processes import cpu_s
from tests.bench.wire import Client, call_until_accepted, frame, pull_frame, send_frame
from tests.conformance.peer import PeerError, running

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import msgspec

    from tests.conformance.peer import Peer

    # Prints the costs of a named work for each topic.
    Compare = Callable[[str, Callable[[str], int]], None]

PLAIN, COMPACTED = "PLAIN_BENCH", "KEYED_BENCH"
_TOPICS = (PLAIN, COMPACTED)
_BODY = bytes(100)
FRAMES = 200
_BATCH, _BULK = 100, 1000
_IN_FLIGHT = 32
ROUND_S = 1.0
_BULK_BYTES = 8 << 20
# So that a round takes long enough for the CPU time, which is shown in steps of 10 ms.
BULK_DRAINS = 10
_SETTLE_S = 120


class Way(NamedTuple):
    """A way to send.

    messages: of one request. make: the request with the messages from a number on.
    """

    name: str
    messages: int
    in_flight: int
    make: Callable[[str, int], bytes]


def measure(home: Path, key_count: int, rounds: int) -> None:
    """Print a line per case."""
    with running("headrace", home, settings={}) as peer, Client(peer.broker) as client:
        for topic in (*_TOPICS, *(f"{topic}_FULL" for topic in _TOPICS)):
            client.call(frame(RequestCode.UPDATE_AND_CREATE_TOPIC, topic_fields(topic)))
        compare = partial(_compare, peer, rounds)
        for way in WAYS:
            _compare_sends(client, way, compare)
        for topic in _TOPICS:
            fill(client, f"{topic}_FULL", key_count)
        wait_for_follower(peer)
        _compare_drains(client, key_count, compare)
        for topic in _TOPICS:
            _measure_table(peer.nameserver, f"{topic}_FULL", key_count, rounds)


def topic_fields(topic: str) -> dict[str, Any]:
    attributes = "+cleanup.policy=COMPACTION" if topic.startswith(COMPACTED) else ""
    return {
        "topic": topic,
        "defaultTopic": "TBW102",
        "readQueueNums": 1,
        "writeQueueNums": 1,
        "perm": 6,
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": 0,
        "order": False,
        "attributes": attributes,
    }


def encoded_frame(code: RequestCode, header: msgspec.Struct, body: bytes = b"") -> bytes:
    """A request with the fields of a header."""
    fields = {
        name: value for name, value in (header_fields(header) or {}).items() if value is not None
    }
    return frame(code, fields, body)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Cost(NamedTuple):
    """Messages per second, and the broker's CPU time for each in microseconds."""

    per_s: float
    cpu_us: float


def _compare(peer: Peer, rounds: int, name: str, work: Callable[[str], int]) -> None:
    """Print what a message of the plain and of the compacted topic costs: medians of the rounds.

    work: for a topic; returns the number of messages.
    """
    costs: dict[str, list[Cost]] = {topic: [] for topic in _TOPICS}
    for number in range(rounds):
        for topic in _TOPICS if number % 2 else reversed(_TOPICS):
            cpu, start = cpu_s([peer.broker_pid]), time.perf_counter()
            count = work(topic)
            seconds = time.perf_counter() - start
            wait_for_follower(peer)
            used_s = cpu_s([peer.broker_pid]) - cpu
            costs[topic].append(Cost(count / seconds, used_s / count * 1e6))
    plain, compacted = (
        Cost(*map(statistics.median, zip(*costs[topic], strict=True))) for topic in _TOPICS
    )
    say(
        f"{name:24} {plain.per_s:9.0f}/s plain {compacted.per_s:9.0f}/s compacted "
        f"{compacted.per_s / plain.per_s:5.2f}   CPU {plain.cpu_us:6.2f} us plain "
        f"{compacted.cpu_us:6.2f} us compacted {plain.cpu_us / compacted.cpu_us:5.2f}"
    )


# -- sends -----------------------------------------------------------------------------------------


def _properties(number: int) -> bytes:
    return encode_properties({"KEYS": f"user-{number}", "UNIQ_KEY": f"{number:032X}"})


def _single(topic: str, number: int) -> bytes:
    fields = {
        "a": "bench_producer",
        "b": topic,
        "c": "TBW102",
        "d": 1,
        "e": 0,
        "f": 0,
        "g": 1,
        "h": 0,
        "i": _properties(number).decode(),
        "j": 0,
        "k": False,
        "m": False,
    }
    return frame(RequestCode.SEND_MESSAGE_V2, fields, _BODY)


def _batch(topic: str, number: int) -> bytes:
    items = [(0, _BODY, _properties(number + at)) for at in range(_BATCH)]
    return send_frame(topic, 0, encode_batch(items), is_batch=True)


def _bulk(topic: str, number: int) -> bytes:
    properties = [_properties(number + at) for at in range(_BULK)]
    block = encode_records(topic, [_BODY] * _BULK, properties, born_timestamp=1, born_host=bytes(8))
    header = BulkSendHeader(
        producer_group="bench_producer",
        topic=topic,
        default_topic="TBW102",
        default_topic_queue_nums=1,
        queue_id=0,
        count=_BULK,
    )
    return encoded_frame(RequestCode.BULK_SEND, header, bytes(block.body))


WAYS = (
    Way("sends, 1 unanswered", 1, 1, _single),
    Way("sends, 32 unanswered", 1, _IN_FLIGHT, _single),
    Way(f"batches of {_BATCH}", _BATCH, 2, _batch),
    Way(f"bulk sends of {_BULK}", _BULK, 2, _bulk),
)


def _compare_sends(client: Client, way: Way, compare: Compare) -> None:
    groups: dict[str, list[bytes]] = {}
    for topic in _TOPICS:
        frames = [way.make(topic, number * way.messages) for number in range(FRAMES)]
        groups[topic] = [
            b"".join(frames[at : at + way.in_flight])
            for at in range(0, FRAMES - way.in_flight + 1, way.in_flight)
        ]

    def send(topic: str) -> int:
        end, sent = time.perf_counter() + ROUND_S, 0
        for group in itertools.cycle(groups[topic]):
            client.send(group)
            client.take_answers(way.in_flight)
            sent += way.in_flight * way.messages
            if time.perf_counter() > end:
                break
        return sent

    compare(way.name, send)


# -- drains ----------------------------------------------------------------------------------------


def fill(client: Client, topic: str, key_count: int) -> None:
    for number in range(0, key_count, _BULK):
        call_until_accepted(client, _bulk(topic, number))


def wait_for_follower(peer: Peer) -> None:
    end = time.monotonic() + _SETTLE_S
    with Admin(nameserver=peer.nameserver) as admin:
        while admin.runtime_info(peer.broker)["follower.compaction.behindMessages"] != "0":
            if time.monotonic() > end:
                raise PeerError("the compaction follower did not catch up in time")
            time.sleep(0.2)


def _compare_drains(client: Client, count: int, compare: Compare) -> None:
    for name, make, times in (
        ("pulls of 32", pull_of, 1),
        ("bulk pulls", bulk_pull_of, BULK_DRAINS),
    ):

        def drain(topic: str, make: Callable[[str, int], bytes] = make, times: int = times) -> int:
            for _ in range(times):
                offset = 0
                while offset < count:
                    client.send(make(f"{topic}_FULL", offset))
                    offset = int(client.answer()["extFields"]["nextBeginOffset"])
            return count * times

        compare(f"drain, {name}", drain)


def pull_of(topic: str, offset: int) -> bytes:
    return pull_frame("bench_group", topic, 0, offset, 4)


def bulk_pull_of(topic: str, offset: int) -> bytes:
    header = BulkPullHeader(
        topic=topic,
        queue_id=0,
        consumer_group="bench_group",
        queue_offset=offset,
        max_msg_nums=4000,
        max_msg_bytes=_BULK_BYTES,
        sys_flag=4,
        commit_offset=0,
        suspend_timeout_millis=0,
    )
    return encoded_frame(RequestCode.BULK_PULL, header)


# -- tables ----------------------------------------------------------------------------------------


def _measure_table(nameserver: str, topic: str, key_count: int, rounds: int) -> None:
    async def load() -> float:
        start = time.perf_counter()
        async with Table(topic, nameserver=nameserver) as table:
            await table.get("user-0")
            assert len(table) == key_count
            return key_count / (time.perf_counter() - start)

    rate = statistics.median([trio.run(load) for _ in range(rounds)])
    say(f"Table of {key_count} keys, {topic}: {rate:.0f}/s")
