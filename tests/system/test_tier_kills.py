"""kill -9 of a broker at any moment of upload, roll and expiry: its whole history is read.

As a program it takes the number of kills and a seed: ``python -m tests.system.test_tier_kills
200 1``.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest

from headrace import blocking
from headrace.errors import HeadraceError
from headrace.messages import Message
from tests.support.cluster import Cluster

TOPIC: Final = "history"
QUEUES: Final = 2
BODY_BYTES: Final = 900
# The tier has segments of a few messages, and the log one file beside the one being written.
SETTINGS: Final[dict[str, Any]] = {
    "messageStorePlugIn": "tieredstore",
    "tieredBackendServiceProvider": "posix",
    "tieredStoreGroupCommitTimeout": 50,
    "tieredStoreCommitLogMaxSize": 20_000,
    "tieredStoreConsumeQueueMaxSize": 400,
    "tieredStoreDeleteFileInterval": 200,
    "tieredStoreIndexFileMaxHashSlotNum": 100,
    "tieredStoreIndexFileMaxIndexNum": 200,
    "mappedFileSizeCommitLog": 1 << 17,
    "flushDiskType": "SYNC_FLUSH",
}


class Sender:
    """Sends numbered messages. unsure: numbers whose answer was lost; they may be stored."""

    def __init__(self) -> None:
        self._count = 0
        self.acknowledged: set[int] = set()
        self.unsure: set[int] = set()

    def send_until(self, nameserver: str, stop: threading.Event) -> None:
        with blocking.Producer(
            nameserver=nameserver, timeout_ms=500, delivery_timeout_ms=500
        ) as producer:
            while not stop.is_set():
                self._count += 1
                try:
                    producer.send(Message(TOPIC, b"%d " % self._count + bytes(BODY_BYTES)))
                except HeadraceError:
                    self.unsure.add(self._count)
                    time.sleep(0.02)
                else:
                    self.acknowledged.add(self._count)

    def check(self, found: list[int]) -> None:
        lost, unknown = self.acknowledged - {*found}, {*found} - self.acknowledged - self.unsure
        assert not lost, sorted(lost)
        assert not unknown, sorted(unknown)
        # The client itself may have sent one of these again.
        twice = {number for number in found if found.count(number) > 1} - self.unsure
        assert not twice or len(found) - len({*found}) <= len(self.unsure), sorted(twice)


def read_all(nameserver: str) -> list[int]:
    """The numbers of all messages, each queue from offset 0 on and without a gap."""
    numbers: list[int] = []
    offsets: dict[int, int] = {}
    with (
        blocking.Admin(nameserver=nameserver) as admin,
        blocking.PullConsumer(nameserver=nameserver) as consumer,
    ):
        ends = {queue: at.max_offset for queue, at in admin.topic_stats(TOPIC).items()}
        consumer.assign(consumer.queues(TOPIC))
        until = time.monotonic() + 60
        while any(consumer.position(queue) < end for queue, end in ends.items()):
            assert time.monotonic() < until, (ends, offsets)
            for message in consumer.receive_many(timeout_ms=1000) or ():
                assert message.queue_offset == offsets.get(message.queue.queue_id, 0)
                offsets[message.queue.queue_id] = message.queue_offset + 1
                numbers.append(int(message.body.split()[0]))
    return numbers


def kill_rounds(folder: Path, kill_count: int, seed: int) -> None:
    rng, sender = Random(seed), Sender()
    settings = {**SETTINGS, "tieredStoreFilePath": folder / "tier"}
    with Cluster(folder, "a", **settings) as cluster:
        broker, nameserver = cluster.brokers["a"], cluster.nameserver.address
        with blocking.Admin(nameserver=nameserver) as admin:
            admin.create_topic(TOPIC, queues=QUEUES)
        for _ in range(kill_count):
            stop = threading.Event()
            thread = threading.Thread(target=sender.send_until, args=(nameserver, stop))
            thread.start()
            time.sleep(rng.uniform(0.2, 3.0))
            broker.kill()
            stop.set()
            thread.join()
            broker.start()
            broker.wait_up()
            cluster.wait_registered()
            sender.check(read_all(nameserver))
        assert any((folder / "tier").rglob("COMMIT_LOG/*"))
        assert "queue is not uploaded" not in broker.said()
        assert "Traceback" not in broker.said()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kill_count", [3, pytest.param(15, marks=pytest.mark.long)], ids=["3 kills", "15 kills"]
)
def test_a_broker_killed_at_any_moment_keeps_its_history(tmp_path: Path, kill_count: int) -> None:
    kill_rounds(tmp_path, kill_count, 1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        kill_rounds(Path(folder), int(sys.argv[1]), int(sys.argv[2]))
