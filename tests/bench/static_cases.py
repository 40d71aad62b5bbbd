"""What the benchmark of static topics measures: each function returns or yields reports."""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.blocking import Admin
from headrace_broker.statictopic.table import MAPPING_NAME
from headrace_broker.store.files.config_file import ConfigFile
from headrace_protocol.bodies import DataVersion
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.message import encode_batch
from headrace_protocol.statictopic.mapping import (
    MappingItem,
    TopicMapping,
    encode_detail,
    encode_file,
)
from tests.bench.load import say
from tests.bench.processes import cpu_s, resident_mb
from tests.bench.wire import (
    QUEUES,
    SUBSCRIPTION,
    Client,
    Refused,
    Rotation,
    call_until_accepted,
    frame,
    pull_frame,
    send_frame,
)
from tests.conformance.peer import Peer, headrace_cluster
from tests.conformance.probe import wait_for_send
from tests.support.processes import HEADRACE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from tests.bench.driver import Report

BODY = os.urandom(100)
BATCH_MESSAGES = 100
# Of a topic in a measured piece of a drain.
PASSES = 2
CHAIN_ITEMS = 5000
TOPICS, TOPIC_QUEUES, ITEMS = 1000, 16, 4
STARTS, CHANGES = 3, 10
# Brokers return freed memory once a minute.
TRIMMED_S = 65
REMAPPED_QUEUES = 64
START_TIMEOUT_S = 120
CONTINUES = (ResponseCode.SUCCESS, ResponseCode.PULL_RETRY_IMMEDIATELY)


def now_ms() -> int:
    """The time as epochs have it."""
    return time.time_ns() // 1_000_000


def headrace(nameserver: str, *words: str) -> None:
    """A command of ours."""
    command = [HEADRACE, *words, "--nameserver", nameserver]
    subprocess.run(command, capture_output=True, check=True)


def pid_of(peer: Peer, broker: str = "broker-a") -> int:
    """The process of a broker."""
    return peer.daemons[broker].process.pid


# -- reading and sending ---------------------------------------------------------------------------


def fill(address: str, topic: str, count: int, queues: int = QUEUES, body: bytes = BODY) -> None:
    """Send as many messages to each queue, in batches."""
    batch = encode_batch([(0, body, b"")] * BATCH_MESSAGES)
    with Client(address) as client:
        for queue in range(queues):
            request = send_frame(topic, queue, batch, is_batch=True)
            for _ in range(count // BATCH_MESSAGES):
                call_until_accepted(client, request)


def drain(client: Client, topic: str, end: int, *, start: int = 0, queues: int = QUEUES) -> None:
    """Read each queue up to an offset, with one pull of each under way."""

    def pull(queue: int, offset: int) -> bytes:
        return pull_frame("bench", topic, queue, offset, SUBSCRIPTION, opaque=queue)

    client.send(b"".join(pull(queue, start) for queue in range(queues)))
    unread = queues
    while unread:
        requests = []
        for header in client.answers():
            if header["code"] not in CONTINUES:
                raise Refused(header)
            offset = int(header["extFields"]["nextBeginOffset"])
            if offset >= end:
                unread -= 1
            else:
                requests.append(pull(header["opaque"], offset))
        if requests:
            client.send(b"".join(requests))


Work = Callable[[], object]


class Cost(NamedTuple):
    """Seconds of work, and each process's CPU seconds in them."""

    seconds: float
    cpu_s: tuple[float, ...]


def in_turn(number: int, works: tuple[Work, Work], pids: Sequence[int]) -> tuple[Cost, Cost]:
    """What both works cost, each done twice: a b b a, and in every other round b a a b."""
    costs = {work: [0.0] * (1 + len(pids)) for work in works}
    one, other = works if number % 2 else works[::-1]
    for work in (one, other, other, one):
        before = [time.monotonic(), *(cpu_s([pid]) for pid in pids)]
        work()
        after = [time.monotonic(), *(cpu_s([pid]) for pid in pids)]
        for place, (then, now) in enumerate(zip(before, after, strict=True)):
            costs[work][place] += now - then
    first, second = (Cost(costs[work][0], tuple(costs[work][1:])) for work in works)
    return first, second


def pairs(
    rounds: Iterable[int], messages: int, pids: Sequence[int], one: Work, other: Work
) -> Iterator[Report]:
    """``other`` ÷ ``one``, each of so many messages. pids: of one broker, or of each work's."""
    one()
    other()
    for number in rounds:
        base, cost = in_turn(number, (one, other), pids)
        yield {
            "rate_ratio": base.seconds / cost.seconds,
            "cpu_ratio": cost.cpu_s[-1] / base.cpu_s[0],
            "base_cpu_us": base.cpu_s[0] / messages / 2 * 1e6,
            "broker_cpu_us": cost.cpu_s[-1] / messages / 2 * 1e6,
        }


def sender(client: Client, topic: str, count: int, queues: int = QUEUES) -> Work:
    """Sends single messages, 32 of them unanswered."""
    frames = itertools.cycle(send_frame(topic, queue, BODY) for queue in range(queues))
    rotation = Rotation([client], frames)
    return lambda: rotation.run(count=count)


def reader(client: Client, topic: str, *, end: int, start: int = 0, queues: int = QUEUES) -> Work:
    """Drains a topic ``PASSES`` times."""

    def work() -> None:
        for _ in range(PASSES):
            drain(client, topic, end, start=start, queues=queues)

    return work


# -- a leader beside a plain topic -----------------------------------------------------------------


def on_leader(directory: Path, rounds: int, messages: int) -> Iterator[tuple[str, Report]]:
    """A static topic on its leader ÷ a plain one."""
    with headrace_cluster(directory, ["broker-a"], {}) as peer:
        wait_for_send(peer.broker, START_TIMEOUT_S)
        headrace(peer.nameserver, "topic", "create", "PLAIN", "--queues", str(QUEUES))
        create(peer, "STATIC", QUEUES, "broker-a")
        pid = pid_of(peer)
        with Client(peer.broker) as client:
            sends = [sender(client, topic, messages) for topic in ("PLAIN", "STATIC")]
            for report in pairs(range(rounds), messages, [pid], *sends):
                yield "sends on the leader", report
            end = messages // QUEUES
            reads = [reader(client, topic, end=end) for topic in ("PLAIN", "STATIC")]
            for report in pairs(range(rounds), PASSES * messages, [pid], *reads):
                yield "pulls on the leader", report


def create(peer: Peer, topic: str, queues: int, brokers: str) -> None:
    words = ("topic", "create", topic, "--static", "--queues", str(queues), "--broker", brokers)
    headrace(peer.nameserver, *words)


# -- items on another broker -----------------------------------------------------------------------


def elsewhere(
    rounds: int, messages: int, addresses: tuple[str, str], pids: tuple[int, int]
) -> Iterator[Report]:
    """Drains at the leader, the second broker: of MOVED, whose messages the first has ÷ of LOCAL.

    messages: of each of the topics, by which they are filled already.
    """
    end = messages // QUEUES
    with Client(addresses[1]) as client:
        works = reader(client, "LOCAL", end=end), reader(client, "MOVED", end=end)
        for work in works:
            work()
        count = 2 * PASSES * messages
        for number in range(rounds):
            local, moved = in_turn(number, works, pids)
            serving, relaying, leader = *moved.cpu_s, local.cpu_s[1]
            yield {
                "rate": count / moved.seconds,
                "local_rate": count / local.seconds,
                "rate_ratio": local.seconds / moved.seconds,
                "leader_cpu_us": leader / count * 1e6,
                "serving_cpu_us": serving / count * 1e6,
                "relaying_cpu_us": relaying / count * 1e6,
                "relay_leader_ratio": relaying / leader,
                "relay_serving_ratio": relaying / serving,
                "total_ratio": (serving + relaying) / leader,
            }


def elsewhere_headrace(directory: Path, rounds: int, messages: int) -> Iterator[Report]:
    """Two of our brokers."""
    with headrace_cluster(directory, ["broker-a", "broker-b"], {}) as peer:
        host, port = peer.broker.split(":")
        addresses = peer.broker, f"{host}:{int(port) + 1}"
        create(peer, "LOCAL", QUEUES, "broker-b")
        create(peer, "MOVED", QUEUES, "broker-a")
        fill(addresses[1], "LOCAL", messages // QUEUES)
        fill(addresses[0], "MOVED", messages // QUEUES)
        headrace(peer.nameserver, "topic", "remap", "MOVED", "--to", "broker-b")
        pids = pid_of(peer, "broker-a"), pid_of(peer, "broker-b")
        yield from elsewhere(rounds, messages, addresses, pids)


# -- long chains -----------------------------------------------------------------------------------


def put_mapping(client: Client, mapping: TopicMapping, queues: int) -> None:
    """UPDATE_AND_CREATE_STATIC_TOPIC."""
    fields: dict[str, Any] = {
        "topic": mapping.topic,
        "defaultTopic": "TBW102",
        "readQueueNums": queues,
        "writeQueueNums": queues,
        "perm": 6,
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": 0,
        "order": False,
        "force": False,
    }
    code = RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC
    client.call(frame(code, fields, encode_detail(mapping)))


def long_chain(directory: Path, rounds: int, messages: int) -> Iterator[tuple[str, Report]]:
    """A queue of 5,000 items ÷ one of 1. The first and the last item have messages here."""
    with headrace_cluster(directory, ["broker-a"], {}) as peer, Client(peer.broker) as client:
        wait_for_send(peer.broker, START_TIMEOUT_S)
        for topic in ("ONE", "LONG"):
            create(peer, topic, 1, "broker-a")
            fill(peer.broker, topic, messages, queues=1)
        start = messages + CHAIN_ITEMS
        put_mapping(client, _long_mapping("LONG", messages), 2)
        fill(peer.broker, "LONG", messages, queues=1)
        pid = pid_of(peer)
        sends = [sender(client, topic, messages, queues=1) for topic in ("ONE", "LONG")]
        read = reader(client, "ONE", end=messages, queues=1)
        of_leader = reader(client, "LONG", start=start, end=start + messages, queues=1)
        of_first = reader(client, "LONG", end=messages, queues=1)
        for report in pairs(range(rounds), messages, [pid], sends[0], sends[1]):
            yield "sends", report
        for report in pairs(range(rounds), PASSES * messages, [pid], read, of_leader):
            yield "pulls of the leader", report
        for report in pairs(range(rounds), PASSES * messages, [pid], read, of_first):
            yield "pulls of the first item", report


def _long_mapping(topic: str, messages: int) -> TopicMapping:
    """The first and the last item are here, the others on a broker that is not asked."""
    first = MappingItem(bname="broker-a", gen=0, queue_id=0, logic_offset=0)
    last = CHAIN_ITEMS - 1
    between = (
        MappingItem(bname="broker-z", gen=gen, queue_id=gen, logic_offset=messages + gen)
        for gen in range(1, last)
    )
    leader = MappingItem(
        bname="broker-a", gen=last, queue_id=1, logic_offset=messages + CHAIN_ITEMS
    )
    return TopicMapping(
        topic=topic,
        bname="broker-a",
        epoch=now_ms() + 60_000,
        total_queues=1,
        hosted={0: (first, *between, leader)},
    )


# -- many items ------------------------------------------------------------------------------------


def many_items(directory: Path) -> Report:
    """64,000 items beside as many plain topics: memory, start, and a change."""
    with_items, plain = directory / "items", directory / "plain"
    config = store_many_items(with_items)
    with broker_on(plain):
        pass
    for name in ("topics.json", "topicIncarnation.json"):
        text = (config / name).read_bytes()
        (plain / "broker-a" / "config" / name).write_bytes(text)
    starts: dict[Path, list[tuple[float, float]]] = {with_items: [], plain: []}
    for _, folder in itertools.product(range(STARTS), starts):
        with broker_on(folder) as (peer, seconds):
            starts[folder].append((seconds, cpu_s([pid_of(peer)])))
    with broker_on(with_items) as (peer, _), broker_on(plain) as (plain_peer, _):
        more_mb = _more_mb(peer, plain_peer)
        change = _changes(peer)
        changed_mb = _more_mb(peer, plain_peer)
    with_s, without_s = (
        [statistics.median(times) for times in zip(*starts[folder], strict=True)]
        for folder in (with_items, plain)
    )
    longer_s, longer_cpu_s = (a - b for a, b in zip(with_s, without_s, strict=True))
    start = {"more_start_s": longer_s, "more_start_cpu_s": longer_cpu_s}
    return {"more_mb": more_mb, "changed_mb": changed_mb, **start, **change}


def store_many_items(folder: Path) -> Path:
    """A broker's store with 64,000 items; returns its folder of tables."""
    with broker_on(folder):
        pass
    config = folder / "broker-a" / "config"
    mappings = {name: _mapping(name, now_ms()) for name in _names()}
    ConfigFile(config / MAPPING_NAME).save(encode_file(mappings, DataVersion()))
    with broker_on(folder):
        pass  # it makes the topics of the mappings
    return config


def _more_mb(peer: Peer, other: Peer) -> float:
    """How much more memory one broker holds than another, a minute later."""
    time.sleep(TRIMMED_S)
    memory, less = (resident_mb([pid_of(each)], mapped_files=False) for each in (peer, other))
    return memory - less


class broker_on:  # noqa: N801 - used like a function
    """A broker on a store that stays: the peer, and the seconds until it served."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._cluster = headrace_cluster(folder, ["broker-a"], {})

    def __enter__(self) -> tuple[Peer, float]:
        self._peer = self._cluster.__enter__()
        wait_for_send(self._peer.broker, START_TIMEOUT_S)
        return self._peer, time.monotonic() - self._peer.started

    def __exit__(self, *problem: object) -> None:
        self._peer.daemons["broker-a"].stop()
        self._cluster.__exit__(None, None, None)


def _names() -> list[str]:
    return [f"MANY_{number}" for number in range(TOPICS)]


def _mapping(topic: str, epoch: int, items: int = ITEMS) -> TopicMapping:
    """16 queues with 4 items each, the last of which this broker has; or 5, of which it has two."""
    chains = {
        queue: tuple(
            MappingItem(
                bname=f"broker-{'zyxaa'[gen]}",
                gen=gen,
                queue_id=queue + TOPIC_QUEUES * gen,
                logic_offset=1000 * gen,
            )
            for gen in range(items)
        )
        for queue in range(TOPIC_QUEUES)
    }
    return TopicMapping(
        topic=topic,
        bname="broker-a",
        epoch=epoch,
        total_queues=TOPIC_QUEUES,
        hosted=chains,
    )


def _changes(peer: Peer) -> Report:
    """Ten changes of a topic: milliseconds until each is on disk, and the longest step."""
    times = []
    with Client(peer.broker) as client, Admin(nameserver=peer.nameserver) as admin:
        before = admin.runtime_info(peer.broker)
        for number in range(CHANGES):
            mapping = _mapping(f"MANY_{number}", now_ms() + 5000, ITEMS + 1)
            began = time.monotonic()
            put_mapping(client, mapping, TOPIC_QUEUES * (ITEMS + 1))
            times.append((time.monotonic() - began) * 1000)
        after = admin.runtime_info(peer.broker)
        if after["loopStallCount"] != before["loopStallCount"]:
            say(f"longest step: {after['longestLoopStallRan']}")
    return {
        "change_ms": sorted(times)[CHANGES // 2],
        "longest_change_ms": max(times),
        "long_steps": float(after["loopStallCount"]) - float(before["loopStallCount"]),
    }


# -- remaps ----------------------------------------------------------------------------------------


def remaps(peer: Peer, rounds: int) -> Iterator[Report]:
    """``headrace topic remap`` of 64 queues, from its start to its end."""
    create(peer, "REMAPPED", REMAPPED_QUEUES, "broker-a")
    fill(peer.broker, "REMAPPED", BATCH_MESSAGES, REMAPPED_QUEUES)
    targets = itertools.cycle(("broker-b,broker-c", "broker-a"))
    for target in itertools.islice(targets, rounds):
        began = time.monotonic()
        headrace(peer.nameserver, "topic", "remap", "REMAPPED", "--to", target)
        yield {"remap_s": time.monotonic() - began}
