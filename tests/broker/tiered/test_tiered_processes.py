"""Real brokers with a tier on a folder, killed and started again."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace import Message, blocking
from tests.support.cluster import Cluster
from tests.support.own_disk import OwnDisk, may_mount

TOPIC = "Orders"
_WAIT_S = 20.0


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
            for message in consumer.receive_many(timeout_ms=1000) or ():
                assert message.queue_offset == offsets.get(message.queue.queue_id, 0)
                offsets[message.queue.queue_id] = message.queue_offset + 1
                numbers.append(int(message.body.split()[0]))
    return sorted(numbers)


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="no file system can be mounted here")
def test_a_killed_broker_serves_its_whole_history(tmp_path: Path) -> None:
    """The store's disk has room for less than all messages, so their files are removed soon."""
    with OwnDisk(tmp_path / "a", 16 << 20) as disk, _cluster(tmp_path, disk) as cluster:
        broker, nameserver = cluster.brokers["a"], cluster.nameserver.address
        with blocking.Admin(nameserver=nameserver) as admin:
            admin.create_topic(TOPIC, queues=2)
        send(nameserver, 0, 4000)
        # In the midst of an upload.
        wait_until(lambda: any((tmp_path / "tier").rglob("COMMIT_LOG/*")), broker.said)
        _kill_and_start(cluster)
        send(nameserver, 4000, 3000)
        log = disk.inside(tmp_path / "a" / "commitlog")
        wait_until(lambda: min(int(file.name) for file in log.iterdir()) > 3 << 20, broker.said)
        assert read_all(nameserver, 7000) == [*range(7000)]
        _kill_and_start(cluster)
        send(nameserver, 7000, 100)
        assert read_all(nameserver, 7100) == [*range(7100)]
        broker.stop()
        assert '"level": "error"' not in broker.said(), broker.said()


def _cluster(folder: Path, disk: OwnDisk) -> Cluster:
    provider = "org.apache.rocketmq.tieredstore.provider.PosixFileSegment"
    return Cluster(
        folder,
        "a",
        before=disk,
        messageStorePlugIn="org.apache.rocketmq.tieredstore.TieredMessageStore",
        tieredBackendServiceProvider=provider,
        tieredStoreFilePath=folder / "tier",
        tieredStoreGroupCommitTimeout=200,
        tieredStoreCommitLogMaxSize=1 << 20,
        tieredStoreIndexFileMaxHashSlotNum=1000,
        tieredStoreIndexFileMaxIndexNum=5000,
        mappedFileSizeCommitLog=1 << 20,
        diskSpaceCleanForciblyRatio=30,
        cleanResourceInterval=100,
        flushIntervalCommitLog=50,
    )


def _kill_and_start(cluster: Cluster) -> None:
    broker = cluster.brokers["a"]
    broker.kill()
    broker.start()
    broker.wait_up()
    cluster.wait_registered()
