"""A broker on a disk that runs full: what is refused, what goes on, and how it gets over it."""

from __future__ import annotations

import os
import re
import time
from itertools import islice
from pathlib import Path

import pytest

from headrace import Message, blocking
from headrace.blocking import Admin, Consumer, Producer, PullConsumer
from headrace.errors import BrokerError
from headrace_protocol.codes import ResponseCode
from tests.support.cluster import Cluster, Daemon
from tests.support.own_disk import EXT4, TMPFS, Filler, OwnDisk, may_mount

BROKER = "broker-a"
DISK_BYTES = 24 << 20
BODY = os.urandom(60_000)
TOPIC, OTHER, GROUP = "Full", "Other", "full_readers"
PATIENCE_S = 30
HEALS_S = 15
SETTINGS = {
    "cleanResourceInterval": 10,
    "flushConsumerOffsetInterval": 50,
    "mappedFileSizeConsumeQueue": 20 * 1000,
}


class FullBroker:
    """A broker, and clients of it that wait."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.nameserver = cluster.nameserver.address
        self.daemon: Daemon = cluster.brokers[BROKER]
        self.sent = 0

    def fill(self) -> str:
        """Send until a message is refused; why it was."""
        with Producer(nameserver=self.nameserver, delivery_timeout_ms=0) as producer:
            while True:
                try:
                    producer.send(Message(TOPIC, BODY))
                except BrokerError as error:
                    if error.code != ResponseCode.SERVICE_NOT_AVAILABLE:
                        raise
                    return error.remark or ""
                self.sent += 1

    def fill_up(self, admin: blocking.Admin) -> tuple[str, str]:
        """Fill until the broker still refuses when it is asked; why a message was, and why it does.

        A file that finds no room fills the disk, and is gone at once.
        """
        until = time.monotonic() + PATIENCE_S
        while True:
            told, refusal = self.fill(), self.refusal(admin)
            if refusal != "no":
                return told, refusal
            assert time.monotonic() < until, told

    def send_when_there_is_room(self, count: int = 1) -> None:
        """Room comes within ``HEALS_S`` for each message."""
        with Producer(nameserver=self.nameserver, delivery_timeout_ms=0) as producer:
            for _ in range(count):
                until = time.monotonic() + HEALS_S
                while not self.is_taken(producer):
                    assert time.monotonic() < until, self.daemon.said()[-3000:]
                    time.sleep(0.02)
                self.sent += 1

    def is_taken(self, producer: blocking.Producer) -> bool:
        try:
            producer.send(Message(TOPIC, BODY))
        except BrokerError as error:
            if error.code != ResponseCode.SERVICE_NOT_AVAILABLE:
                raise
            return False
        return True

    def read_all(self) -> None:
        """By somebody without a group, whose reading lets nothing go."""
        with PullConsumer(nameserver=self.nameserver) as consumer:
            consumer.assign(consumer.queues(TOPIC))
            read = 0
            while read < self.sent:
                batch = consumer.receive_many(timeout_ms=PATIENCE_S * 1000)
                assert batch, f"{read} of {self.sent} read: {self.daemon.said()[-3000:]}"
                wrong = [body[:40] for body in batch.values() if body != BODY]
                assert not wrong, f"after {read} of {self.sent}"
                read += len(batch)

    def consume(self, count: int) -> None:
        """By the group, which has to have all."""
        with Consumer(GROUP, TOPIC, nameserver=self.nameserver, start="earliest") as consumer:
            for message in islice(consumer, count):
                assert message.body == BODY, message
            consumer.commit()

    def refusal(self, admin: blocking.Admin) -> str:
        (node,) = admin.cluster()
        refusal: str = admin.runtime_info(node.address)["refusesWrites"]
        return refusal

    def restart(self) -> None:
        self.daemon.kill()
        self.start_again()

    def start_again(self) -> None:
        self.daemon.start()
        self.daemon.wait_up()
        self.cluster.wait_registered()


def wait_for(path: Path, pattern: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while not re.search(pattern, text := path.read_text() if path.exists() else ""):
        assert time.monotonic() < until, f"no {pattern} in {path}: {text!r}"
        time.sleep(0.02)


# Many small files, and two that leave no room for a third.
@pytest.mark.slow
@pytest.mark.skipif(
    not may_mount(), reason="may not mount; tests/store/test_full_disk.py stands in"
)
@pytest.mark.parametrize("log_file_bytes", [1 << 20, 9 << 20])
def test_a_full_disk(tmp_path: Path, log_file_bytes: int) -> None:
    settings = {**SETTINGS, "mappedFileSizeCommitLog": log_file_bytes}
    with (
        OwnDisk(tmp_path / BROKER, DISK_BYTES) as disk,
        Cluster(tmp_path, BROKER, before=disk, **settings) as cluster,
        Admin(nameserver=cluster.nameserver.address) as admin,
    ):
        broker = FullBroker(cluster)
        for topic in (TOPIC, OTHER):
            admin.create_topic(topic, queues=1)
        broker.send_when_there_is_room()
        broker.consume(1)
        # From now on it counts, whatever becomes of the broker.
        wait_for(disk.inside(tmp_path / BROKER / "config" / "consumerOffset.json"), GROUP)
        for told in broker.fill_up(admin):
            assert "the disk" in told
        broker.read_all()
        admin.delete_topic(OTHER)
        broker.restart()
        broker.read_all()
        broker.fill()
        broker.consume(broker.sent - 1)
        broker.send_when_there_is_room()
        assert broker.refusal(admin) == "no"
        broker.restart()
        broker.consume(1)


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="may not mount")
def test_a_topic_that_is_larger_than_the_disk_moves_into_the_tier(tmp_path: Path) -> None:
    settings = {
        "mappedFileSizeCommitLog": 1 << 20,
        "mappedFileSizeConsumeQueue": 20 * 1000,
        "messageStorePlugIn": "tieredstore",
        "tieredBackendServiceProvider": "posix",
        "tieredStoreFilePath": str(tmp_path / "tier"),
    }
    with (
        OwnDisk(tmp_path / BROKER, DISK_BYTES) as disk,
        Cluster(tmp_path, BROKER, before=disk, **settings) as cluster,
        Admin(nameserver=cluster.nameserver.address) as admin,
    ):
        broker = FullBroker(cluster)
        admin.create_topic(TOPIC, queues=1)
        broker.send_when_there_is_room(3 * DISK_BYTES // len(BODY))
        assert disk.used_bytes <= DISK_BYTES, disk.used_bytes
        broker.read_all()
        broker.daemon.stop()
        left = disk.inside(tmp_path / BROKER / "abort")
        assert not left.exists(), broker.daemon.said()[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("takes_inodes", [False, True], ids=["no byte", "no inode"])
@pytest.mark.parametrize("kind", [TMPFS, EXT4])
def test_a_disk_without_a_byte_loses_nothing(
    tmp_path: Path, kind: str, *, takes_inodes: bool
) -> None:
    if not may_mount(kind):
        pytest.skip(f"may not mount {kind}")
    settings = {**SETTINGS, "mappedFileSizeCommitLog": 1 << 20}
    inodes = 200 if takes_inodes else 0
    with (
        OwnDisk(tmp_path / BROKER, DISK_BYTES, kind, inodes) as disk,
        Cluster(tmp_path, BROKER, before=disk, **settings) as cluster,
        Admin(nameserver=cluster.nameserver.address) as admin,
    ):
        broker = FullBroker(cluster)
        root = disk.inside(tmp_path / BROKER)
        admin.create_topic(TOPIC, queues=1)
        broker.send_when_there_is_room(60)
        broker.consume(1)
        wait_for(root / "config" / "consumerOffset.json", GROUP)
        filler = Filler(root / "lost+found" / "filler", takes_inodes=takes_inodes)
        filler.fill()
        told = broker.fill()
        assert ("inodes" in told) is takes_inodes, told
        broker.consume(1)
        wait_for(root / "config" / "consumerOffset.json", r'"?0"?:\s*2\b')
        for end in (broker.daemon.kill, broker.daemon.stop, broker.daemon.kill):
            filler.fill()
            end()
            broker.start_again()
            broker.read_all()
        filler.free()
        broker.send_when_there_is_room()
        broker.read_all()
