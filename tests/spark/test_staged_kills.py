"""kill -9 of brokers at any moment of staging, deciding and applying: every row is there once."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from headrace import blocking
from headrace.errors import HeadraceError
from headrace.spark.cluster import Cluster as Nameservers
from headrace.spark.write.broker_link import BrokerLink
from headrace.spark.write.commits import Committer
from headrace.spark.write.sink import WriteOptions, write_rows
from headrace_protocol.drivers.blocking import BlockingConnection
from headrace_protocol.drivers.response import Response
from headrace_protocol.staging import StagedAttempt
from tests.support.cluster import Cluster, Daemon

ROUNDS = int(os.environ.get("KILL_ROUNDS", "6"))
ROWS = 30
PARTITIONS = 2
# About the requests of a batch: staging to two brokers, asking, deciding, applying.
REQUESTS = 40


class Killer:
    """Kills a broker a moment after a client has made so many requests, and starts it again."""

    def __init__(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, choice: Random) -> None:
        self._cluster = cluster
        self._choice = choice
        self._countdown = 0
        self._thread: threading.Thread | None = None
        submit = BlockingConnection.submit

        def counted(connection: BlockingConnection, *arguments: Any) -> int:
            self._count()
            return submit(connection, *arguments)

        monkeypatch.setattr(BlockingConnection, "submit", counted)

    def arm(self) -> None:
        self._countdown = self._choice.randint(1, REQUESTS)

    def _count(self) -> None:
        self._countdown -= 1
        if self._countdown == 0:
            broker = self._choice.choice(list(self._cluster.brokers.values()))
            pause_s = self._choice.random() ** 2 * 0.05
            self._thread = threading.Thread(target=self._kill, args=(broker, pause_s))
            self._thread.start()

    def _kill(self, broker: Daemon, pause_s: float) -> None:
        time.sleep(pause_s)
        broker.kill()
        broker.start()

    def settle(self) -> None:
        if self._thread:
            self._thread.join()
            self._thread = None
        for broker in self._cluster.brokers.values():
            broker.wait_up()


def row(batch_id: int, partition: int, number: int) -> bytes:
    return b"%d/%d/%d " % (batch_id, partition, number) + bytes(100_000)


def write_batch(options: WriteOptions, query_id: str, batch_id: int) -> bool:
    """As Spark does it: tasks, then the commit; from the beginning again after a failure."""
    parts: dict[str, list[StagedAttempt]] = {}
    with Nameservers(options.nameservers) as nameservers:
        committer = Committer(nameservers, query_id)
        try:
            for partition in range(PARTITIONS):
                values = pa.array([row(batch_id, partition, n) for n in range(ROWS)], pa.binary())
                rows = pa.RecordBatch.from_arrays([values], ["value"])
                written = write_rows(options, query_id, batch_id, [rows])
                for broker_name, staged in written.staged.items():
                    parts.setdefault(broker_name, []).append(staged)
            committer.commit(batch_id, parts)
        except HeadraceError:
            with suppress(HeadraceError):
                committer.abort(batch_id, parts)
            return False
        return True


def bodies(nameserver: str, topic: str, count: int) -> Counter[bytes]:
    found: Counter[bytes] = Counter()
    with blocking.PullConsumer(nameserver=nameserver) as consumer:
        consumer.assign(consumer.queues(topic))
        while found.total() < count:
            batch = consumer.receive_many(timeout_ms=10_000)
            assert batch is not None, f"{found.total()} of {count}"
            found.update(body.partition(b" ")[0] for body in batch.values())
        assert consumer.receive_many(timeout_ms=200) is None, "more than was written"
    return found


class DriverKilled(BaseException):
    """The cause of the driver's death in a test."""


@pytest.fixture
def dying_driver(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Let the driver die before or after its n-th request to brokers."""
    ask = BrokerLink.ask

    def arm(moment: str, number: int) -> None:
        requests = itertools.count(1)

        def counted(link: BrokerLink, *arguments: Any) -> Response:
            is_last = next(requests) == number
            if is_last and moment == "before":
                raise DriverKilled
            answer = ask(link, *arguments)
            if is_last:
                raise DriverKilled
            return answer

        monkeypatch.setattr(BrokerLink, "ask", counted)

    return arm


@pytest.mark.slow
def test_drivers_killed_at_every_step_of_a_commit_leave_nothing_twice(
    tmp_path: Path, dying_driver: Callable[..., Any]
) -> None:
    """Each batch comes again by other attempts."""
    steps = [(moment, number) for moment in ("before", "after") for number in range(1, 9)]
    with Cluster(tmp_path, "a", "b") as cluster:
        nameserver = cluster.nameserver.address
        with blocking.Admin(nameserver=nameserver) as admin:
            admin.create_topic("T", queues=1)
        options = WriteOptions((nameserver,), "T", exactly_once=True)
        killed = 0
        for batch_id, step in enumerate(steps):
            parts = stage_batch(options, "query", batch_id)
            dying_driver(*step)
            with suppress(DriverKilled), Nameservers(options.nameservers) as nameservers:
                Committer(nameservers, "query").commit(batch_id, parts)
                killed -= 1
            killed += 1
            dying_driver("after", 0)
            parts = stage_batch(options, "query", batch_id)
            with Nameservers(options.nameservers) as nameservers:
                Committer(nameservers, "query").commit(batch_id, parts)
        assert killed == len(steps), "there are fewer steps: the test should know"
        found = bodies(nameserver, "T", len(steps) * PARTITIONS)
        assert set(found.values()) == {1}
        assert list(tmp_path.glob("?/staged/*/*.blocks")) == []


def stage_batch(
    options: WriteOptions, query_id: str, batch_id: int
) -> dict[str, list[StagedAttempt]]:
    """One row by each of two tasks, one to each broker."""
    parts: dict[str, list[StagedAttempt]] = {}
    for partition in range(PARTITIONS):
        values = pa.array([row(batch_id, partition, 0)], pa.binary())
        rows = pa.RecordBatch.from_arrays([values, pa.array(["ad"[partition]])], ["value", "key"])
        written = write_rows(options, query_id, batch_id, [rows])
        for broker_name, staged in written.staged.items():
            parts.setdefault(broker_name, []).append(staged)
    assert set(parts) == {"a", "b"}
    return parts


@pytest.mark.slow
@pytest.mark.long
def test_brokers_killed_at_any_moment_keep_every_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = random.Random(os.environ.get("KILL_SEED", "1"))
    with Cluster(tmp_path, "a", "b") as cluster:
        nameserver = cluster.nameserver.address
        with blocking.Admin(nameserver=nameserver) as admin:
            admin.create_topic("T", queues=2)
        options = WriteOptions((nameserver,), "T", exactly_once=True)
        killer = Killer(cluster, monkeypatch, choice)
        attempts = 0
        for batch_id in range(ROUNDS):
            is_done = False
            while not is_done:
                killer.arm()
                is_done = write_batch(options, "query", batch_id)
                attempts += 1
                killer.settle()
            if choice.random() < 0.3:  # Spark was killed before it noted the batch
                write_batch(options, "query", batch_id)
                killer.settle()
        total = ROUNDS * PARTITIONS * ROWS
        found = bodies(nameserver, "T", total)
        assert found == Counter(
            b"%d/%d/%d" % (batch_id, partition, number)
            for batch_id in range(ROUNDS)
            for partition in range(PARTITIONS)
            for number in range(ROWS)
        )
        leftovers = [path for name in ("a", "b") for path in tmp_path.glob(f"{name}/staged/*/*.b*")]
        assert len(leftovers) <= attempts  # of the last batch, of attempts that came to nothing
