"""Real brokers with a tier on a folder, killed and started again."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from headrace import Message, blocking
from tests.support.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TOPIC = "Orders"
_WAIT_S = 60.0


def wait_until(is_so: Callable[[], bool], said: Callable[[], str]) -> None:
    end = time.monotonic() + _WAIT_S
    while not is_so():
        assert time.monotonic() < end, said()
        time.sleep(0.05)


def send(nameserver: str, first: int, count: int) -> None:
    with blocking.Producer(nameserver=nameserver) as producer:
        bodies = [b"%d " % number + bytes(1000) for number in range(first, first + count)]
        producer.send_many([Message(TOPIC, body) for body in bodies])


def read_all(nameserver: str, count: int) -> list[int]:
    """The numbers of so many messages of all queues, each queue in its order from 0 on."""
    numbers: list[int] = []
    offsets: dict[int, int] = {}
    with blocking.PullConsumer(nameserver=nameserver) as consumer:
        consumer.assign(consumer.queues(TOPIC))
        end = time.monotonic() + _WAIT_S
        while len(numbers) < count:
            assert time.monotonic() < end, len(numbers)
            for message in consumer.receive_many() or ():
                assert message.queue_offset == offsets.get(message.queue.queue_id, 0)
                offsets[message.queue.queue_id] = message.queue_offset + 1
                numbers.append(int(message.body.split()[0]))
    return sorted(numbers)


@pytest.mark.slow
def test_a_killed_broker_serves_its_whole_history(tmp_path: Path) -> None:
    cluster = Cluster(
        tmp_path,
        "a",
        messageStorePlugIn="org.apache.rocketmq.tieredstore.TieredMessageStore",
        tieredBackendServiceProvider="org.apache.rocketmq.tieredstore.provider.PosixFileSegment",
        tieredStoreFilePath=tmp_path / "tier",
        tieredStoreGroupCommitTimeout=200,
        tieredStoreCommitLogMaxSize=1 << 20,
        tieredStoreIndexFileMaxHashSlotNum=1000,
        tieredStoreIndexFileMaxIndexNum=5000,
        mappedFileSizeCommitLog=1 << 20,
        cleanResourceInterval=100,
        fileReservedTime=1,
        deleteWhen=";".join(f"{hour:02}" for hour in range(24)),
        flushIntervalCommitLog=50,
    )
    with cluster:
        broker, nameserver = cluster.brokers["a"], cluster.nameserver.address
        with blocking.Admin(nameserver=nameserver) as admin:
            admin.create_topic(TOPIC, queues=2)
        send(nameserver, 0, 4000)
        # In the midst of an upload.
        wait_until(lambda: any((tmp_path / "tier").rglob("COMMIT_LOG/*")), broker.said)
        broker.kill()
        broker.start()
        broker.wait_up()
        cluster.wait_registered()
        send(nameserver, 4000, 1000)
        log = tmp_path / "a" / "commitlog"

        def is_expired() -> bool:
            files = sorted(log.iterdir())
            for file in files:
                os.utime(file, (0, time.time() - 10 * 3600))
            return int(files[0].name) > 3 << 20

        wait_until(is_expired, broker.said)
        assert read_all(nameserver, 5000) == [*range(5000)]
        broker.kill()
        broker.start()
        broker.wait_up()
        cluster.wait_registered()
        send(nameserver, 5000, 100)
        assert read_all(nameserver, 5100) == [*range(5100)]
        broker.stop()
        assert '"level": "error"' not in broker.said(), broker.said()
