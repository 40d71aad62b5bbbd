"""Real brokers whose tier hangs: a folder whose lock is held, and an S3 server that is stopped."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace import blocking
from headrace_protocol.codes import ResponseCode
from tests.bench.wire import SUBSCRIPTION, Client, pull_frame
from tests.broker.tiered.test_tiered_processes import TOPIC, read_all, send, wait_until
from tests.support.cluster import Cluster
from tests.support.object_server import ACCESS_KEY, BUCKET, SECRET_KEY, running

_STOP_S = 25.0


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Have every put into a folder wait in the kernel."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def waits_for_lock(pid: int) -> bool:
    locks = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and f" {pid} " in line for line in locks)


def is_uploaded(admin: blocking.Admin) -> bool:
    status = next(iter(admin.tier_status(TOPIC).values()))
    return bool(status.queues) and not any(queue.behind_messages for queue in status.queues)


def cluster_of(folder: Path, **settings: str) -> Cluster:
    return Cluster(
        folder,
        "a",
        messageStorePlugIn="tieredstore",
        tieredStorageLevel="FORCE",
        tieredStoreGroupCommitTimeout=200,
        flushIntervalCommitLog=50,
        flushCommitLogLeastPages=0,  # the tier takes what is flushed
        **settings,
    )


@pytest.mark.slow
def test_a_stop_ends_in_time_although_threads_hang(tmp_path: Path) -> None:
    location = tmp_path / "tier"
    settings = {"tieredBackendServiceProvider": "file", "tieredStoreFilePath": str(location)}
    with cluster_of(tmp_path, **settings) as cluster:
        broker, nameserver = cluster.brokers["a"], cluster.nameserver.address
        with blocking.Admin(nameserver=nameserver) as admin:
            admin.create_topic(TOPIC, queues=2)
        send(nameserver, 0, 1000)
        wait_until(lambda: any(location.rglob("data/*")), broker.said)
        with locked(next(location.rglob("data"))):
            send(nameserver, 1000, 1000)
            wait_until(lambda: waits_for_lock(broker.pid), broker.said)
            # Sends don't notice.
            send(nameserver, 2000, 1000)
            began = time.monotonic()
            broker.stop()
            assert time.monotonic() - began < _STOP_S
            assert "no answer to write" in broker.said()
        broker.start()
        broker.wait_up()
        cluster.wait_registered()
        assert read_all(nameserver, 3000) == [*range(3000)]


@pytest.mark.slow
def test_a_server_that_accepts_and_never_answers(tmp_path: Path) -> None:
    (tmp_path / "s3").mkdir()
    with running(tmp_path / "s3") as (location, server):
        settings = {
            "tieredBackendServiceProvider": "s3",
            "objectStoreEndpoint": location.endpoint,
            "objectStoreBucket": BUCKET,
            "objectStoreAccessKey": ACCESS_KEY,
            "objectStoreSecretKey": SECRET_KEY,
        }
        with cluster_of(tmp_path, **settings) as cluster:
            broker, nameserver = cluster.brokers["a"], cluster.nameserver.address
            with blocking.Admin(nameserver=nameserver) as admin:
                admin.create_topic(TOPIC, queues=2)
                send(nameserver, 0, 1000)
                wait_until(lambda: is_uploaded(admin), broker.said)
            server.send_signal(signal.SIGSTOP)
            try:
                send(nameserver, 1000, 1000)
                with Client(broker.address) as client:
                    began = time.monotonic()
                    client.send(pull_frame("group", TOPIC, 0, 0, SUBSCRIPTION))
                    answer = client.answer()
                assert time.monotonic() - began < 10
            finally:
                server.send_signal(signal.SIGCONT)
            assert answer["code"] == ResponseCode.SYSTEM_BUSY
            assert "the tier is unreachable since" in answer["remark"]
            assert read_all(nameserver, 2000) == [*range(2000)]
