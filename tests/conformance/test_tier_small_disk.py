"""A topic larger than the disk: the tier takes it, sends wait for room, Java reads all of it.

190 MB by default. With ``HEADRACE_SMALL_DISK_MB=1024 _JAVA_OPTIONS=-Xmx4g`` it is 1 GB: the Java
program keeps all messages in memory.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace import Message
from headrace.blocking import Admin, Producer
from headrace.errors import HeadraceError
from tests.conformance.console import Console
from tests.conformance.peer import TIMEOUT_MS, Peer
from tests.conformance.uploads import wait_until_uploaded
from tests.support.cluster import Cluster
from tests.support.own_disk import OwnDisk, may_mount

pytestmark = [pytest.mark.conformance, pytest.mark.slow, pytest.mark.long]

TOPIC = "tier_small_disk"
QUEUES = 4
BODY_BYTES = 32_000
_MB = int(os.environ.get("HEADRACE_SMALL_DISK_MB", "190"))
# So many that the messages of one can be printed.
TAGS = _MB // 2
COUNT = (_MB << 20) // BODY_BYTES // TAGS * TAGS
# Little more than half of what is sent.
DISK_BYTES = max(COUNT * BODY_BYTES * 55 // 100, 128 << 20)
WAIT_S = 120 + COUNT // 50
_QUEUE, _OFFSET = 2, 3


def message(number: int) -> Message:
    body = random.Random(number).randbytes(BODY_BYTES)  # does not compress
    return Message(TOPIC, body, key=f"k{number}", tag=f"t{number % TAGS}")


def send_all(nameserver: str, heal: Callable[[], None]) -> set[str]:
    """Send until all are stored; returns the remarks of refusals. heal: called after the first."""
    refusals: set[str] = set()
    number = 0
    until_s = time.monotonic() + WAIT_S
    with Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer:
        while number < COUNT:
            assert time.monotonic() < until_s, (number, refusals)
            try:
                producer.send(message(number))
                number += 1
            except HeadraceError as error:
                if not refusals:
                    heal()
                refusals.add(str(error))
                time.sleep(0.1)
    return refusals


def check(console: Console, peer: Peer) -> None:
    """Java's client gets all of it in order; by tag, key and time as well."""
    offsets: dict[str, list[int]] = {}
    for line in console.dump(peer, [TOPIC], ["dumping"]):
        kind, *_ = fields = line.split("\t")
        if kind == "message":
            offsets.setdefault(fields[_QUEUE], []).append(int(fields[_OFFSET]))
        elif kind == "index":
            assert fields[-1] not in {"nothing", "[]"}, line
    assert sum(map(len, offsets.values())) == COUNT
    assert all(sorted(numbers) == [*range(len(numbers))] for numbers in offsets.values())
    times = ("-b", "0", "-e", str(int(time.time() * 1000)))
    printed = console.printed(peer, "printMsg", "-t", TOPIC, "-s", "t7", "-d", "false", *times)
    assert len(re.findall("^MSGID", printed, re.MULTILINE)) == COUNT // TAGS


@contextmanager
def small_broker(folder: Path) -> Iterator[tuple[Cluster, Peer]]:
    """A broker on a disk that is too small for its messages; its tier is on another one."""
    settings = {
        "messageStorePlugIn": "tieredstore",
        "tieredBackendServiceProvider": "posix",
        "tieredStoreFilePath": str(folder / "tier"),
        "tieredStoreGroupCommitTimeout": "1000",
        "cleanResourceInterval": "500",
    }
    with (
        OwnDisk(folder / "broker-a", DISK_BYTES) as disk,
        Cluster(folder, "broker-a", before=disk, **settings) as cluster,
    ):
        address = cluster.brokers["broker-a"].address
        yield cluster, Peer("headrace", cluster.nameserver.address, address, {}, 0.0)


@pytest.mark.skipif(not may_mount(), reason="this user may not mount")
def test_a_topic_larger_than_the_disk(tmp_path: Path, console: Console) -> None:
    with small_broker(tmp_path) as (cluster, peer):
        with Admin(nameserver=peer.nameserver) as admin:
            admin.create_topic(TOPIC, queues=QUEUES)
        # While the tier is away, nothing makes room.
        tier, away = tmp_path / "tier", tmp_path / "away"
        tier.mkdir(exist_ok=True)
        tier.rename(away)
        tier.touch()

        def heal() -> None:
            tier.unlink()
            away.rename(tier)

        refusals = send_all(peer.nameserver, heal)
        assert refusals
        assert all("full" in each or "No space" in each for each in refusals), refusals
        wait_until_uploaded(peer.nameserver, TOPIC, WAIT_S)
        check(console, peer)
        broker = cluster.brokers["broker-a"]
        for end in (broker.stop, broker.kill):
            end()
            broker.start()
            broker.wait_up()
            cluster.wait_registered()
            check(console, peer)
