"""kill -9 of a broker at any moment of appending and compacting: no newest value is lost.

As a program it takes the number of kills and a seed, and "static" for a topic whose queues move
between two brokers: ``python -m tests.system.test_compaction_kills 200 1 static``.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio

from headrace import blocking
from headrace.admin.client import Admin
from headrace.admin.statictopic import HalfDone, UnchangedTopic
from headrace.errors import HeadraceError
from headrace.messages import Message
from headrace_protocol.statictopic.plans import Mode
from tests.support.cluster import Cluster, Daemon
from tests.support.until import wait_until

TOPIC = "users"
KEYS = 50
# Long, for busy machines.
READ_S = 120
COMPACTED_S = 60
SETTINGS: dict[str, Any] = {
    "compactionScheduleInternal": 100,
    # Compaction takes what is flushed.
    "flushCommitLogLeastPages": 0,
    "compactionMappedFileSize": 46_000,
    "compactionCqMappedFileSize": 4600,
    "mappedFileSizeCommitLog": 1 << 20,
}
ATTRIBUTES = {
    "cleanup.policy": "COMPACTION",
    "max.compaction.lag.ms": "20",
    "delete.retention.ms": "50",
}


class Table:
    """The values sent: the last acknowledged one of each key, and one that may be stored.

    An empty value deletes the key.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._count = 0
        self.acknowledged: dict[str, bytes] = {}
        self.unsure: dict[str, set[bytes]] = {}

    def send_until(self, nameserver: str, stop: threading.Event) -> None:
        with blocking.Producer(
            nameserver=nameserver, timeout_ms=500, delivery_timeout_ms=500
        ) as producer:
            while not stop.is_set():
                self._count += 1
                key = f"k{self._rng.randrange(KEYS)}"
                body = b"%d" % self._count if self._rng.random() < 0.9 else b""
                self.unsure.setdefault(key, set()).add(body)
                try:
                    producer.send(Message(TOPIC, body, key=key))
                except HeadraceError:
                    time.sleep(0.02)
                else:
                    self.acknowledged[key] = body
                    self.unsure[key].clear()

    def check(self, found: dict[str, bytes]) -> None:
        for key in (f"k{number}" for number in range(KEYS)):
            value = found.get(key, b"")
            expected = {self.acknowledged.get(key, b""), *self.unsure.get(key, ())}
            assert value in expected, (key, value, expected)


def read_all(nameserver: str) -> dict[str, bytes]:
    """The newest value of each key, from the beginning of each queue on."""
    table: dict[str, bytes] = {}
    with (
        blocking.Admin(nameserver=nameserver) as admin,
        blocking.PullConsumer(nameserver=nameserver) as consumer,
    ):
        ends = {queue: at.max_offset for queue, at in admin.topic_stats(TOPIC).items()}
        consumer.assign(consumer.queues(TOPIC))
        until = time.monotonic() + READ_S
        while any(consumer.position(queue) < end for queue, end in ends.items()):
            assert time.monotonic() < until, ends
            for message in consumer.receive_many(timeout_ms=1000) or ():
                table[message.key] = message.body
    return table


def kill_rounds(folder: Path, kill_count: int, seed: int) -> None:
    rng = Random(seed)
    table = Table(rng)
    with Cluster(folder, "a", **SETTINGS) as cluster:
        broker, nameserver = cluster.brokers["a"], cluster.nameserver.address
        with blocking.Admin(nameserver=nameserver) as admin:
            admin.create_topic(TOPIC, queues=2, attributes=ATTRIBUTES)
        for number in range(kill_count):
            stop = threading.Event()
            sender = threading.Thread(target=table.send_until, args=(nameserver, stop))
            sender.start()
            if not number:
                wait_compacted(broker)
            time.sleep(rng.uniform(0.2, 5.0))
            broker.kill()
            stop.set()
            sender.join()
            broker.start()
            broker.wait_up()
            cluster.wait_registered()
            table.check(read_all(nameserver))
        assert "Traceback" not in broker.said()


def wait_compacted(*daemons: Daemon) -> None:
    """Wait until one of them has compacted a queue: where cores are few, that takes seconds."""
    wait_until(
        lambda: any('"event": "queue compacted"' in daemon.said() for daemon in daemons),
        lambda: [daemon.said() for daemon in daemons],
        COMPACTED_S,
    )


def static_kill_rounds(folder: Path, kill_count: int, seed: int) -> None:
    """The queues move in each round; the old leader or the new one is killed during it or after.

    Reads begin at offset 0 of the first item, so a delete marker that went too early shows.
    """
    rng = Random(seed)
    table = Table(rng)
    with Cluster(folder, "a", "b", **SETTINGS) as cluster:
        nameserver = cluster.nameserver.address
        change(nameserver, "create_static_topic", 2, attributes=ATTRIBUTES)
        for number in range(kill_count):
            stop = threading.Event()
            sender = threading.Thread(target=table.send_until, args=(nameserver, stop))
            sender.start()
            if not number:
                wait_compacted(*cluster.brokers.values())
            time.sleep(rng.uniform(0.2, 2.0))
            moved = [rng.choice("ab")]
            mode = rng.choice((Mode.STRICT, Mode.AVAILABLE))
            mover = threading.Thread(
                target=change, args=(nameserver, "remap_static_topic", moved), kwargs={"mode": mode}
            )
            mover.start()
            time.sleep(rng.uniform(0.0, 2.0))
            broker = cluster.brokers[rng.choice("ab")]
            broker.kill()
            stop.set()
            sender.join()
            mover.join()
            broker.start()
            broker.wait_up()
            cluster.wait_registered()
            change(nameserver, "repair_static_topic")
            table.check(read_all(nameserver))
        for daemon in cluster.brokers.values():
            assert "Traceback" not in daemon.said()


def change(nameserver: str, method: str, *arguments: Any, **options: Any) -> None:
    """Change the static topic, as far as the brokers are up."""

    async def run() -> None:
        async with Admin(nameserver=nameserver) as admin:
            await getattr(admin, method)(TOPIC, *arguments, **options)

    try:
        trio.run(run)
    except (HalfDone, UnchangedTopic):
        pass  # repaired later
    except HeadraceError:
        assert method == "remap_static_topic"  # a broker was away before it began


@pytest.mark.slow
def test_a_broker_killed_at_any_moment_keeps_the_newest_values(tmp_path: Path) -> None:
    kill_rounds(tmp_path, 4, 1)


@pytest.mark.slow
def test_brokers_killed_while_queues_move_keep_the_newest_values(tmp_path: Path) -> None:
    static_kill_rounds(tmp_path, 4, 1)


if __name__ == "__main__":
    rounds = static_kill_rounds if sys.argv[3:] == ["static"] else kill_rounds
    with tempfile.TemporaryDirectory() as folder:
        rounds(Path(folder), int(sys.argv[1]), int(sys.argv[2]))
